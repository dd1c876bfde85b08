"""A generator and a discriminator of convolutions with an optimizer each, on images of 8 x 8.

Based on the DCGAN example of pytorch/examples, rewritten and smaller.
"""

import argparse
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainfold

NOISE = 6

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--epochs", type=int, default=25)
parser.add_argument("--seed", type=int, default=999)
options = parser.parse_args()
random.seed(options.seed)
torch.manual_seed(options.seed)


def init_weights(module):
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


generator = nn.Sequential(
    nn.ConvTranspose2d(NOISE, 8, 4, 1, 0, bias=False),
    nn.BatchNorm2d(8),
    nn.ReLU(inplace=True),
    nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
).apply(init_weights)
discriminator = nn.Sequential(
    nn.Conv2d(1, 8, 4, 2, 1, bias=False),
    nn.BatchNorm2d(8),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(8, 1, 4, 1, 0, bias=False),
    nn.Flatten(0),
).apply(init_weights)
criterion = nn.BCEWithLogitsLoss()
images = torch.sin(torch.arange(64.0).view(1, 1, 8, 8) * (1 + torch.rand(44, 1, 1, 1)))
loader = DataLoader(TensorDataset(images), batch_size=8, shuffle=True)
fixed_noise = torch.randn(4, NOISE, 1, 1)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))

live = trainfold.attach(
    generator, optimizer_g, loader=loader, extra={"discriminator": discriminator, "optimizer_d": optimizer_d}
)
manager = trainfold.CheckpointManager(options.out, every=100, keep_last=2)
manager.restore(live)
for (real,) in live.batches(epochs=options.epochs):
    # the discriminator: accept real images, reject generated ones
    discriminator.zero_grad()
    loss_real = criterion(discriminator(real), torch.full((len(real),), random.uniform(0.9, 1.0)))
    loss_real.backward()
    fake = generator(torch.randn(len(real), NOISE, 1, 1))
    loss_fake = criterion(discriminator(fake.detach()), torch.zeros(len(real)))
    loss_fake.backward()
    optimizer_d.step()
    # the generator: generated images should be accepted
    generator.zero_grad()
    loss_g = criterion(discriminator(fake), torch.ones(len(real)))
    loss_g.backward()
    optimizer_g.step()
    live.record(loss_d=loss_real + loss_fake, loss_g=loss_g)
    live.advance(samples=len(real))
    if live.progress.step % 5 == 0:
        with torch.no_grad():  # in train mode, as in the original: it changes the statistics of BatchNorm
            live.record(seen=generator(fixed_noise).mean())
    manager.step(live)
manager.close()
