"""A denoising diffusion model: random crops and flips in two loader workers, random steps and noise, an average of the weights.

Based on the usual DDPM trainers, rewritten and smaller.
"""

import argparse
import copy
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

import trainfold

SIZE, STEPS_OF_NOISE = 8, 50


class Images(Dataset):
    """Twenty-eight images of 10 x 10, each time with another crop, perhaps mirrored, a little brighter or darker."""

    def __init__(self):
        y, x = np.mgrid[0:10, 0:10]
        self.images = [np.sin(x * (0.3 + k / 28)) * np.cos(y * (0.9 - k / 40)) for k in range(28)]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        top, left = random.randrange(3), random.randrange(3)
        image = torch.from_numpy(self.images[index][top : top + SIZE, left : left + SIZE].copy()).float().unsqueeze(0)
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image * (1 + 0.1 * float(np.random.randn()))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(STEPS_OF_NOISE, 8)
        self.first, self.last = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)
        self.norm, self.drop = nn.GroupNorm(2, 8), nn.Dropout(0.1)

    def forward(self, x, t):
        h = self.norm(self.first(x)) + self.time(t)[:, :, None, None]
        return self.last(self.drop(functional.silu(h)))


parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--workers", type=int, default=2)
args = parser.parse_args()
random.seed(3)
np.random.seed(3)
torch.manual_seed(3)

loader = DataLoader(Images(), batch_size=4, shuffle=True, num_workers=args.workers, drop_last=True)
model = Denoiser()
ema = copy.deepcopy(model).requires_grad_(requires_grad=False)
betas = torch.linspace(1e-4, 0.2, STEPS_OF_NOISE)
alpha_bar = torch.cumprod(1 - betas, dim=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))

live = trainfold.attach(model, optimizer, scheduler=scheduler, loader=loader, extra={"ema": ema})
manager = trainfold.CheckpointManager(args.out, every=100, mode="async", keep_last=2)
manager.restore(live)
for clean in live.batches(epochs=args.epochs):
    t = torch.randint(STEPS_OF_NOISE, (len(clean),))
    noise = torch.randn_like(clean)
    signal = alpha_bar[t][:, None, None, None]
    loss = functional.mse_loss(model(signal.sqrt() * clean + (1 - signal).sqrt() * noise, t), noise)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    with torch.no_grad():
        for averaged, parameter in zip(ema.parameters(), model.parameters(), strict=True):
            averaged.lerp_(parameter, 0.05)
    live.record(loss=loss, data=clean.sum())
    live.advance(samples=len(clean))
    manager.step(live)
manager.close()
