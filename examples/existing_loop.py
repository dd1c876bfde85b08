"""An ordinary training loop, and the eight lines that make it survive being killed: those marked ``# trainfold``.

Run it with ``python examples/existing_loop.py``. Kill it at any time and start it again: it ends with the same bits as a
run that was never killed. Without the marked lines it is an ordinary loop.
"""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainfold  # trainfold

EPOCHS, BATCH_SIZE = 4, 16


def make_data() -> TensorDataset:
    """Return three hundred samples of a function to learn."""
    x = torch.randn(300, 8, generator=torch.Generator().manual_seed(7))
    return TensorDataset(x, x.sin().sum(dim=1, keepdim=True))


def main() -> None:
    """Train for `EPOCHS` epochs."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (an existing loop)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
    loader = DataLoader(make_data(), batch_size=BATCH_SIZE, shuffle=True)
    stream: Iterable[Any] = (batch for _ in range(EPOCHS) for batch in loader)

    live = trainfold.attach(model, optimizer, scheduler=scheduler, loader=loader)  # trainfold
    manager = trainfold.CheckpointManager("runs/existing", every=4, keep_last=3)  # trainfold
    manager.restore(live)  # trainfold: from the newest checkpoint, if there is one
    stream = live.batches(epochs=EPOCHS)  # trainfold: the same batches, from the current position
    for x, y in stream:
        noisy = x + 0.05 * random.gauss(0.0, 1.0)
        loss = nn.functional.mse_loss(model(noisy), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        print(f"step {scheduler.last_epoch}: loss {loss.item()}", flush=True)
        live.advance(samples=len(x))  # trainfold
        manager.step(live)  # trainfold: saves at each multiple of 4
    manager.finish(live)  # trainfold: saves the last state, unless it is saved already


if __name__ == "__main__":
    main()
