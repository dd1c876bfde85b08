"""FSDP2 on any number of processes, saved while it trains: kill it, start it again on as many, fewer or more, and it continues.

Run it with ``torchrun --nproc-per-node 2 examples/fsdp.py runs/fsdp``.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import trainfold

EPOCHS, BATCH_SIZE = 2, 24  # the samples of a batch are those of all processes together


def make_data() -> TensorDataset:
    """Return 480 samples of a function to learn."""
    x = torch.randn(480, 8, generator=torch.Generator().manual_seed(7))
    return TensorDataset(x, x.sin().sum(dim=1, keepdim=True))


def main(run: str) -> None:
    """Train to the end, from the newest checkpoint of the run."""
    dist.init_process_group("gloo")  # or "nccl": saves use a group of their own, on the CPU
    torch.manual_seed(0)  # the same weights on every rank, before they are sharded
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # or "cuda"
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # after fully_shard
    data = make_data()
    loader = DataLoader(data, batch_sampler=trainfold.data.GlobalBatchSampler(data, BATCH_SIZE, seed=0))

    live = trainfold.attach(model, optimizer, loader=loader)
    manager = trainfold.CheckpointManager(
        run, every=5, keep_last=2, mode="async", collectives=trainfold.TorchCollectives()
    )
    manager.restore(live)
    print(f"{dist.get_rank()} of {dist.get_world_size()} starts after step {live.progress.step}", flush=True)
    for x, y in live.batches(epochs=EPOCHS):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        live.advance()
        print(f"step {live.progress.step}: loss {loss.item():.6f}", flush=True)
        manager.step(live)
    manager.finish(live)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
