"""What a save writes and takes if the base of a model is frozen, with ``reuse_unchanged`` and without, and what it costs a run in which everything changes.

A frozen base of 1 GB with adapters of rank 8 (LoRA) and their AdamW. Each manager saves the same state after the same change, one after the other in each
round, and the order alternates; medians. Bytes are those of the data files. In the second case all leaves differ from the save before in their first piece.

    python benchmarks/unchanged.py [--quick] [--json] [--check] [--directory DIR]
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from _targets import Target, finish, machine, make_parser
from torch import nn

import trainfold


class Adapted(nn.Module):
    """A frozen matrix, and an adapter of low rank beside it."""

    def __init__(self, width, rank=8):
        super().__init__()
        self.base = nn.Parameter(torch.randn(width, width), requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(rank, width)), nn.Parameter(torch.zeros(width, rank))

    def forward(self, x):
        """The product with both."""
        return x @ self.base + (x @ self.down.T) @ self.up.T


def attached(width, layers):
    """Return a live run of adapted layers after one step, so that its optimizer has a state."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted(width) for _ in range(layers)))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    for each in optimizer.param_groups[0]["params"]:
        each.grad = torch.ones_like(each)
    live = trainfold.attach(model, optimizer)
    optimizer.step()
    return live, model, optimizer


def saved(manager, live):
    """Return the seconds and the CPU seconds of a save, and the bytes that it has written."""
    began, cpu = time.perf_counter(), time.process_time()
    outcome = manager.save(live)
    return time.perf_counter() - began, time.process_time() - cpu, outcome.result.size_bytes


def measure(width, layers, rounds, directory, change):
    """Return the medians of saves in full and with reuse, after a change of the run in each round."""
    live, model, optimizer = attached(width, layers)
    found = {"full": [], "reuse": []}
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix=".bench-") as place,
        trainfold.CheckpointManager(f"{place}/full", every=None, keep_last=1) as full,
        trainfold.CheckpointManager(f"{place}/reuse", every=None, keep_last=1, reuse_unchanged=True) as reuse,
    ):
        managers = {"full": full, "reuse": reuse}
        for number in range(rounds + 1):
            change(model, optimizer)
            live.advance(samples=1)
            for name in sorted(managers, reverse=bool(number % 2)):
                row = saved(managers[name], live)
                if number:  # the first one writes everything
                    found[name].append(row)
    return {
        name: dict(zip(("secs", "cpu_secs", "bytes"), map(statistics.median, zip(*rows, strict=True)), strict=True))
        for name, rows in found.items()
    }


def train(_, optimizer):
    """Change what a step changes."""
    optimizer.step()


def change_all(model, optimizer):
    """Change every tensor of the model too, from its first element on."""
    optimizer.step()
    with torch.no_grad():
        torch._foreach_add_([each for each in model.parameters() if not each.requires_grad], 1.0)


def main():
    """Run it."""
    parser = make_parser(__doc__, quick="a small model")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="a place on the filesystem to measure")
    options = parser.parse_args()
    around = machine()
    shape = (128, 2, 1) if options.quick else (4096, 16, 5)
    rows = {
        "adapters of a frozen base": measure(*shape, options.directory, train),
        "everything changes": measure(*shape, options.directory, change_all),
    }
    table = [f"{'':28}{'in full':>34}{'reuse_unchanged':>34}"] + [
        f"{name:28}"
        + "".join(f"{each['bytes'] / 1e6:12,.1f} MB {each['secs']:6.2f} s, CPU {each['cpu_secs']:5.2f}" for each in row.values())
        for name, row in rows.items()
    ]  # fmt: skip
    lora, every = rows.values()
    targets = [
        Target("bytes of adapters / bytes in full", lora["reuse"]["bytes"] / lora["full"]["bytes"], "<=", 0.02),
        Target("time of adapters / time in full", lora["reuse"]["secs"] / lora["full"]["secs"], "<=", 0.5),
        Target("CPU time if everything changes / in full", every["reuse"]["cpu_secs"] / every["full"]["cpu_secs"], "<=", 1.1),
    ]  # fmt: skip
    return finish(options, {"machine": around, "rows": rows}, targets, table)


if __name__ == "__main__":
    sys.exit(main())
