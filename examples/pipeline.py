"""A pipeline of one stage a process: kill it at any time, start it again on as many, fewer or more, and it continues with the same bits.

Run it with ``torchrun --nproc-per-node 2 examples/pipeline.py runs/pipeline``.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, TensorDataset

import trainfold

LAYERS, EPOCHS, BATCH_SIZE, MICROBATCHES = 6, 2, 24, 4


class Model(nn.Module):
    """The whole model; a stage has some of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Linear | None = nn.Linear(8, 32)
        self.layers = nn.ModuleDict({str(index): nn.Linear(32, 32) for index in range(LAYERS)})
        self.last: nn.Linear | None = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the parts that are there."""
        x = x if self.first is None else self.first(x)
        for layer in self.layers.values():
            x = x + layer(x).tanh()
        return x if self.last is None else self.last(x)


def cut(model: Model, index: int, count: int) -> Model:
    """Delete what other stages have; each tensor keeps the name that it has in the whole model."""
    for name in [name for name in model.layers if int(name) * count // LAYERS != index]:
        del model.layers[name]
    model.first = model.first if index == 0 else None
    model.last = model.last if index == count - 1 else None
    return model


def main(run: str) -> None:
    """Train to the end, from the newest checkpoint of the run."""
    dist.init_process_group("gloo")  # or "nccl", and the device of each rank
    torch.manual_seed(0)
    index, count = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(cut(Model(), index, count), index, count, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-2)
    x = torch.randn(480, 8, generator=torch.Generator().manual_seed(7))
    data = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
    loader = DataLoader(data, BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(0))

    live = trainfold.attach(stage, optimizer, loader=loader)
    manager = trainfold.CheckpointManager(run, every=5, keep_last=2, collectives=trainfold.TorchCollectives())
    manager.restore(live)
    print(f"{index} of {count} starts after step {live.progress.step}", flush=True)
    for inputs, targets in live.batches(epochs=EPOCHS):
        losses: list[torch.Tensor] = []  # the last stage gets one for each microbatch
        schedule.step(*([inputs] if stage.is_first else []), target=targets if stage.is_last else None, losses=losses)
        checked = live.check(torch.stack(losses).mean() if losses else None, clip_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        live.advance()
        print(f"step {live.progress.step}: loss {checked.loss:.6f}", flush=True)
        manager.step(live)
    manager.finish(live)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
