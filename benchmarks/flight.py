"""What a flight log and the check of steps cost: steps of a recorded loop beside an unrecorded one, and steps that run twice beside steps that run once.

Both loops of a pair take turns, one step each. A step is repeated work of about 10 ms on 200 parameters, as in ``loop.py``; the digests of the state are counted apart,
because how often they come is a choice.

    python benchmarks/flight.py [--quick] [--json] [--check]
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from _targets import Target, finish, machine, make_parser

import trainfold
from trainfold import Loss
from trainfold.states import FlightLog, check_live_steps, check_steps

WIDTH, BATCH, LAYERS, EVERY = 16, 8, 50, 10
STEP_SECS = 0.010


def model():
    """A model of 200 parameters."""
    torch.manual_seed(0)
    pairs = (pair for _ in range(LAYERS) for pair in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)))
    return torch.nn.Sequential(*pairs)


class Live:
    """An attached loop, recorded or not."""

    def __init__(self, folder, record, every=None):
        self.model = model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        data = torch.utils.data.TensorDataset(torch.randn(1 << 17, WIDTH), torch.randn(1 << 17, WIDTH))
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
        self.live = trainfold.attach(self.model, self.optimizer, loader=loader)
        self.manager = trainfold.CheckpointManager(folder, every=1 << 40, record=record)
        self.manager.restore(self.live)
        self.batches = self.live.batches()
        self.calls = []
        self.trained = self.train if every is None else check_live_steps(self.live, self.train, every=every)

    def train(self, x, y, repeats):
        """Train on a batch."""
        for _ in range(repeats):
            loss = (self.model(x) - y).square().mean()
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def step(self, repeats):
        """Do one step; return its time."""
        began = time.perf_counter()
        x, y = next(self.batches)
        loss = self.trained(x, y, repeats)
        called = time.perf_counter()
        self.live.record(loss=loss)
        self.live.advance(samples=len(x))
        self.manager.step(self.live)
        self.calls.append(time.perf_counter() - called)
        return time.perf_counter() - began


class Pure:
    """A loop of pure steps."""

    def __init__(self, wrap):
        adam = trainfold.optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
        self.run = wrap(trainfold.make_step(model(), self.loss, adam, donate=True))
        self.state = trainfold.init_state(model(), adam, seed=0)
        self.batch = torch.randn(BATCH, WIDTH)

    @staticmethod
    def loss(model, x):
        """A loss."""
        return Loss(model(x).square().sum(), len(x))

    def step(self, _):
        """Do one step; return its time."""
        began = time.perf_counter()
        self.state, _ = self.run(self.state, self.batch)
        return time.perf_counter() - began


def compare(name, plain, other, *, steps, repeats, grouped=1):
    """Run two loops in turns; compare the median of what each ``grouped`` steps take."""
    times = [], []
    for _ in range(steps):
        for loop, taken in zip((plain, other), times, strict=True):
            taken.append(sum(loop.step(repeats) for _ in range(grouped)) / grouped)
    one, more = (statistics.median(each) for each in times)
    calls = [statistics.median(loop.calls) * 1e6 for loop in (plain, other)] if isinstance(plain, Live) else None
    return {"name": name, "plain_ms": one * 1e3, "with_ms": more * 1e3, "ratio": more / one, "calls_us": calls}


def extra_us(row):
    """How much longer the calls of a recorded step take."""
    return row["calls_us"][1] - row["calls_us"][0]


def repeats_for(loop):
    """How often the forward and backward run, so that a step takes 10 ms."""
    for _ in range(5):
        taken = loop.step(1)
    return max(1, round(STEP_SECS / taken))


def main():
    """Measure, and compare with the targets."""
    options = make_parser(__doc__, quick="few steps").parse_args()
    steps = 20 if options.quick else 200
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        plain, recorded = Live(f"{folder}/a", None), Live(f"{folder}/b", 0)
        repeats = repeats_for(plain)
        repeats_for(recorded)
        rows.append(compare("recorded live loop", plain, recorded, steps=steps, repeats=repeats))
        pure = Pure(lambda step: step)
        rows.append(
            compare("recorded pure step", pure, Pure(FlightLog(f"{folder}/c").recorded), steps=steps, repeats=1)
        )
        rows.append(
            compare(
                "recorded pure step and state",
                pure,
                Pure(FlightLog(f"{folder}/d", states_every=1).recorded),
                steps=steps,
                repeats=1,
            )
        )
        checked = Pure(lambda step: check_steps(step, every=EVERY))
        rows.append(
            compare(f"one step in {EVERY} twice", pure, checked, steps=max(2, steps // EVERY), repeats=1, grouped=EVERY)
        )
        live = Live(f"{folder}/e", None, EVERY)
        rows.append(
            compare(
                f"one live step in {EVERY} twice",
                plain,
                live,
                steps=max(2, steps // EVERY),
                repeats=repeats,
                grouped=EVERY,
            )
        )
        live.manager.close()
        size = sum(path.stat().st_size for path in Path(folder, "b").glob("flight-*.log"))
        bytes_a_step = size / recorded.live.progress.step
        for loop in (plain, recorded):
            loop.manager.close()
    table = [
        f"{'':32} {'without ms':>10} {'with ms':>10} {'ratio':>7}",
        *(f"{row['name']:32} {row['plain_ms']:10.3f} {row['with_ms']:10.3f} {row['ratio']:7.4f}" for row in rows),
        f"the calls of a recorded live step take {extra_us(rows[0]):.1f} us more; {bytes_a_step:.0f} bytes a step",
    ]
    targets = [
        Target(
            "recorded live loop, time of a step of 10 ms", 1 + extra_us(rows[0]) / rows[0]["plain_ms"] / 1e3, "<=", 1.02
        ),
        Target("bytes a step", bytes_a_step, "<=", 64),
        Target("a pure step that runs twice, in steps", 1 + EVERY * (rows[-2]["ratio"] - 1), "<=", 5),
        Target("a live step that runs twice, in steps", 1 + EVERY * (rows[-1]["ratio"] - 1), "<=", 5),
    ]
    return finish(options, {"machine": machine(), "rows": rows, "bytes_a_step": bytes_a_step}, targets, table)


if __name__ == "__main__":
    sys.exit(main())
