"""A variational autoencoder: the reparametrised noise, a test pass and samples after each epoch draw from the same stream.

Based on the VAE example of pytorch/examples, rewritten and smaller.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import trainfold

PIXELS, HIDDEN, LATENT = 36, 24, 3


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(PIXELS, HIDDEN)
        self.mean, self.logvar = nn.Linear(HIDDEN, LATENT), nn.Linear(HIDDEN, LATENT)
        self.decode = nn.Sequential(nn.Linear(LATENT, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, PIXELS), nn.Sigmoid())

    def forward(self, x):
        hidden = functional.relu(self.encode(x))
        mean, logvar = self.mean(hidden), self.logvar(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        return self.decode(z), mean, logvar


def loss_function(made, x, mean, logvar):
    likelihood = functional.binary_cross_entropy(made, x, reduction="sum")
    return likelihood - 0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())


parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--epochs", type=int, default=20)
args = parser.parse_args()
torch.manual_seed(1)

images = (torch.rand(60, PIXELS) > 0.5).float().cumsum(1).remainder(2)
train_loader = DataLoader(TensorDataset(images[:44]), batch_size=8, shuffle=True)
test_loader = DataLoader(TensorDataset(images[44:]), batch_size=8)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

live = trainfold.attach(model, optimizer, loader=train_loader)
manager = trainfold.CheckpointManager(args.out, every=20)
manager.restore(live)
for (x,) in live.batches(epochs=args.epochs):
    epoch = live.progress.epoch
    model.train()
    optimizer.zero_grad()
    loss = loss_function(*((out := model(x))[:1]), x, *out[1:])  # pyright: ignore[reportCallIssue]
    loss.backward()
    optimizer.step()
    live.record(loss=loss / len(x))
    live.advance(samples=len(x))
    if live.progress.epoch > epoch:
        model.eval()
        with torch.no_grad():
            total = 0.0
            for (held_out,) in test_loader:
                made, mean, logvar = model(held_out)
                total += loss_function(made, held_out, mean, logvar).item()
            sample = model.decode(torch.randn(8, LATENT))
        live.record(test_loss=total / 16, sample=sample.mean())
    manager.step(live)
manager.close()
