"""A training loop made of functions, on any number of processes that each hold a part of the state. Kill it, start it on as many, fewer or more.

Run it with ``torchrun --nproc-per-node 2 examples/sharded_step.py runs/sharded``.
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import trainfold
from trainfold import Loss
from trainfold.ranks import Sharded

STEPS, BATCH_SIZE, SAVE_EVERY = 40, 24, 5  # the samples of a batch are those of all processes together


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 480 samples of a function to learn."""
    x = torch.randn(480, 8, generator=torch.Generator().manual_seed(7))
    return x, x.sin().sum(dim=1, keepdim=True)


def loss_fn(model: Callable[[torch.Tensor], torch.Tensor], batch: dict[str, torch.Tensor]) -> Loss:
    """Return a sum and the number of its terms, so that a share with more samples counts for more."""
    return Loss(sum=(model(batch["x"]) - batch["y"]).square().sum(), weight=len(batch["y"]))


def main(run: str) -> None:
    """Train to the end, from the newest checkpoint of the run."""
    dist.init_process_group("gloo")
    collectives = trainfold.TorchCollectives()
    ranks = Sharded(collectives)
    x, y = make_data()
    torch.manual_seed(0)  # the same weights on every rank, before they are cut
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    adamw = trainfold.optimizer(torch.optim.AdamW, lr=1e-2)
    step = trainfold.make_step(model, loss_fn, adamw, clip_norm=1.0, donate=True, parallelism=ranks)
    state = ranks.cut(trainfold.init_state(model, adamw, dataset=trainfold.data.make_cursor(len(x), seed=0)))

    with trainfold.CheckpointManager(run, mode="async", keep_last=2, collectives=collectives) as manager:
        if manager.should_load(state):
            state = manager.load(state)
        print(
            f"{ranks.collectives.rank} of {collectives.world_size} starts after step {state.trainer.step}", flush=True
        )
        while state.trainer.step < STEPS:
            cursor = state.dataset
            batch = torch.from_numpy(cursor.batch_across(BATCH_SIZE))
            mine = trainfold.data.shard_of(batch, rank=collectives.rank, world_size=collectives.world_size)
            state, metrics = step(state, {"x": x[mine], "y": y[mine]})
            state = state.evolve(dataset=cursor.advance(BATCH_SIZE))
            print(f"step {state.trainer.step}: loss {metrics['loss']:.6f}", flush=True)
            if state.trainer.step % SAVE_EVERY == 0:
                manager.save(state)  # held, not copied: the next step waits for what is still unread
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
