"""An ordinary training loop, and the lines that make it survive being killed. They are marked ``# trainfold``.

Run it with ``python examples/existing_loop.py runs/existing``. Kill it whenever you like, start it again: it ends with the
same bits as a run that was never killed.
"""

import random
import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainfold  # trainfold

EPOCHS, BATCH_SIZE, SAVE_EVERY = 4, 16, 5


def make_data() -> TensorDataset:
    """Three hundred samples of a function to learn."""
    x = torch.randn(300, 8, generator=torch.Generator().manual_seed(7))
    return TensorDataset(x, x.sin().sum(dim=1, keepdim=True))


def main(run: str) -> None:
    """Train to the end, from wherever the run is."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (an existing loop)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
    loader = DataLoader(make_data(), batch_size=BATCH_SIZE, shuffle=True)

    live = trainfold.attach(model, optimizer, scheduler=scheduler, loader=loader)  # trainfold
    with trainfold.CheckpointManager(run, every=SAVE_EVERY, keep_last=3) as manager:  # trainfold
        restored = manager.restore(live)  # trainfold
        print(f"starting after step {live.progress.step}", flush=True)

        for x, y in live.batches(epochs=EPOCHS):  # trainfold: was two loops, over the epochs and over the loader
            noisy = x + 0.05 * random.gauss(0.0, 1.0)
            loss = nn.functional.mse_loss(model(noisy), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            live.advance(samples=len(x))  # trainfold
            print(f"step {live.progress.step}: loss {loss.item():.4f}", flush=True)
            manager.step(live)  # trainfold
        if live.progress.step != restored.step:  # trainfold: started again when it is finished, it saves nothing
            manager.save(live)  # trainfold: the last state, which is between two multiples of SAVE_EVERY

    for component, digest in trainfold.fingerprint(live.capture()).items():
        print(f"{component} {digest}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/existing")
