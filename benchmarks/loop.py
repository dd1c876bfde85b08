"""The cost of an attached loop at steps at which no save is due, beside the same loop without trainfold.

Two copies of one loop take turns, one step each: the plain loop, and an attached one that calls ``live.advance`` and
``manager.step``. Their steps do the same work on the same number of tensors, with the same ordinary DataLoader. The extra
work of the attached loop is also timed separately: the two calls, and the extra time of ``live.batches`` per batch. The
forward and the backward are repeated until a step takes 10 ms.

    python benchmarks/loop.py [--quick] [--json] [--check]
"""

import itertools
import statistics
import sys
import tempfile
import time

import torch
from _targets import Target, finish, machine, make_parser

import trainfold

TENSORS = 200
STEP_SECS = 0.010
TARGET = 1.01
WIDTH, BATCH = 16, 8


class Loop:
    """A model of 200 parameters, its optimizer and its batches, attached or not."""

    def __init__(self, *, mode, folder):
        torch.manual_seed(0)
        pairs = (
            pair for _ in range(TENSORS // 4) for pair in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH))
        )
        self.model = torch.nn.Sequential(*pairs)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        data = torch.utils.data.TensorDataset(torch.randn(1 << 17, WIDTH), torch.randn(1 << 17, WIDTH))
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
        self.live = self.manager = None
        if mode == "plain":
            self.batches = itertools.chain.from_iterable(itertools.repeat(loader))
        else:
            self.live = trainfold.attach(self.model, self.optimizer, loader=loader)
            self.manager = trainfold.CheckpointManager(folder, every=1 << 40, mode=mode)
            self.manager.restore(self.live)
            self.batches = self.live.batches()
        self.calls = []
        self.draws = []

    def step(self, repeats):
        """Do one step; return its time."""
        began = time.perf_counter()
        x, y = next(self.batches)
        self.draws.append(time.perf_counter() - began)
        for _ in range(repeats):
            (self.model(x) - y).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.live is not None:
            called = time.perf_counter()
            self.live.advance(samples=len(x))
            self.manager.step(self.live)
            self.calls.append(time.perf_counter() - called)
        return time.perf_counter() - began


def compare(mode, steps):
    """Run the plain loop and an attached one in turns, one step each."""
    with tempfile.TemporaryDirectory() as folder:
        loops = [Loop(mode="plain", folder=folder), Loop(mode=mode, folder=folder)]
        once = statistics.median(loops[0].step(1) for _ in range(30))
        repeats = max(1, round(STEP_SECS / once))
        for loop in loops:
            loop.step(repeats)
            loop.calls.clear()
            loop.draws.clear()
        times = [[], []]
        for index in range(steps):
            for which in (0, 1) if index % 2 else (1, 0):
                times[which].append(loops[which].step(repeats))
        plain, attached = loops
        calls = statistics.median(attached.calls)
        draws = statistics.median(attached.draws) - statistics.median(plain.draws)
        step = statistics.median(times[0])
        return {
            "mode": mode,
            "step_ms": step * 1e3,
            "calls_us": calls * 1e6,
            "draws_us": draws * 1e6,
            "ratio": 1 + (calls + draws) / step,
            "ratio_of_steps": statistics.median(times[1]) / step,
        }


def main():
    """Run it."""
    options = make_parser(__doc__, quick="20 steps").parse_args()
    rows = [compare(mode, 20 if options.quick else 600) for mode in ("sync", "async")]
    table = [
        f"{'mode':6} {'step ms':>8} {'calls us':>9} {'draw us':>9} {'ratio':>8} {'of steps':>9}",
        *(
            f"{row['mode']:6} {row['step_ms']:8.2f} {row['calls_us']:9.1f} {row['draws_us']:9.1f} {row['ratio']:8.4f}"
            f" {row['ratio_of_steps']:9.4f}"
            for row in rows
        ),
    ]
    targets = [Target(f"attached loop, {row['mode']}, time of a step", row["ratio"], "<=", TARGET) for row in rows]
    return finish(options, {"machine": machine(), "rows": rows}, targets, table)


if __name__ == "__main__":
    sys.exit(main())
