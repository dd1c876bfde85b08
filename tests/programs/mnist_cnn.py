"""A small CNN on images of digits made of strokes: dropout, a step schedule, a test pass after each epoch.

Based on the MNIST example of pytorch/examples, rewritten and smaller.
"""

import argparse
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import trainfold


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.conv2(functional.relu(self.conv1(x)))), 2)
        x = functional.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return functional.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def make_digits(count, seed):
    """Images of 8 x 8 with a horizontal, vertical, or diagonal stroke, and noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    images = 0.3 * torch.randn(count, 1, 8, 8, generator=generator)
    strokes = torch.zeros(4, 8, 8)
    strokes[0, 3], strokes[1, :, 3], strokes[2], strokes[3] = 1, 1, torch.eye(8), torch.eye(8).flip(0)
    return TensorDataset(images + strokes[labels].unsqueeze(1), labels)


def test(model, loader):
    model.eval()
    loss = correct = 0
    with torch.no_grad():
        for images, labels in loader:
            output = model(images)
            loss += functional.nll_loss(output, labels, reduction="sum").item()
            correct += output.argmax(1).eq(labels).sum().item()
    model.train()
    return loss / len(loader.dataset), correct


parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=14)
parser.add_argument("--gamma", type=float, default=0.7)
parser.add_argument("--out", default="out")
args = parser.parse_args()

random.seed(1)
np.random.seed(1)
torch.manual_seed(1)
train_loader = DataLoader(make_digits(88, seed=1), batch_size=args.batch_size, shuffle=True)
test_loader = DataLoader(make_digits(32, seed=2), batch_size=32, shuffle=True)
model = Net()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)

live = trainfold.attach(model, optimizer, scheduler=scheduler, loader=train_loader)
manager = trainfold.CheckpointManager(args.out, every=100, mode="async")
manager.restore(live)
for images, labels in live.batches(epochs=args.epochs):
    epoch = live.progress.epoch
    optimizer.zero_grad()
    loss = functional.nll_loss(model(images), labels)
    loss.backward()
    optimizer.step()
    live.record(loss=loss)
    live.advance(samples=len(images))
    if live.progress.epoch > epoch:  # that was the epoch's last batch
        test_loss, correct = test(model, test_loader)
        live.record(test_loss=test_loss, correct=correct)
        scheduler.step()
    manager.step(live)
manager.close()
