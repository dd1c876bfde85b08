"""Whether steps are more even if Python's cyclic garbage is collected at boundaries of one's choosing, instead of when Python chooses.

Three loops take turns, so many steps each: ``python``: the collector as it is; ``frozen``: ``gc.freeze()`` before the first step, so that what lives as long as
the run is not walked again; ``boundary``: the collector is off, and collects everything each 100 steps. Times are CPU times, so that other programs do not count.

    python benchmarks/garbage.py [--quick] [--json] [--check] [--objects 2000000] [--steps 1000]

``--objects`` live beside the run, as the index of a dataset does in Python.
"""

import gc
import statistics
import sys
import tempfile
import time

import torch
from _targets import finish, machine, make_parser
from flight import BATCH, WIDTH, model

import trainfold

EVERY = 100
KINDS = ("python", "frozen", "boundary")


class Pauses:
    """Counts the collections in a block, and their CPU seconds."""

    def __enter__(self):
        self.found, self._began = [], 0.0
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_):
        gc.callbacks.remove(self._note)

    def _note(self, phase, info):
        if phase == "start":
            self._began = time.process_time()
        else:
            self.found.append((info["generation"], time.process_time() - self._began))


def measured(kind, steps):
    """Train so many steps; return what they took, and what collections took."""
    torch.manual_seed(0)
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    data = torch.utils.data.TensorDataset(
        torch.randn(BATCH * (steps + 1), WIDTH), torch.randn(BATCH * (steps + 1), WIDTH)
    )
    live = trainfold.attach(module, optimizer, loader=torch.utils.data.DataLoader(data, batch_size=BATCH))
    times, boundaries = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        trainfold.CheckpointManager(f"{folder}/run", every=1 << 40) as manager,
    ):
        manager.restore(live)
        gc.collect()
        if kind == "frozen":
            gc.freeze()
        if kind == "boundary":
            gc.disable()
        with Pauses() as pauses:
            for x, y in live.batches(steps=steps):
                began = time.process_time()
                (module(x) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                live.advance(samples=len(x))
                manager.step(live)
                times.append(time.process_time() - began)
                if kind == "boundary" and live.progress.step % EVERY == 0:
                    began = time.process_time()
                    gc.collect()
                    boundaries.append(time.process_time() - began)
        gc.enable()
        gc.unfreeze()
    return times, pauses.found, boundaries


def row_of(kind, objects, found):
    """The figures of the rounds of one kind."""
    times = sorted(secs for each, _, _ in found for secs in each)
    pauses = [pause for _, each, _ in found for pause in each]
    boundaries = [secs for _, _, each in found for secs in each]
    return {
        "kind": kind, "objects": objects, "steps": len(times), "median_ms": statistics.median(times) * 1e3,
        "p99_ms": times[int(len(times) * 0.99)] * 1e3, "largest_ms": times[-1] * 1e3,
        "collections": [sum(generation == each for generation, _ in pauses) for each in range(3)],
        "collecting": sum(secs for _, secs in pauses) / sum([*times, *boundaries]),
        "boundary_ms": statistics.median(boundaries) * 1e3 if boundaries else None,
    }  # fmt: skip


def main():
    """Measure."""
    parser = make_parser(__doc__, quick="few steps")
    parser.add_argument("--objects", type=int, default=2_000_000)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    steps, rounds, most = (100, 1, 1000) if options.quick else (options.steps, 3, options.objects)
    torch.set_num_threads(1)
    rows = []
    for objects in (0, most):
        keep = [{"id": number} for number in range(objects)]
        found = {kind: [] for kind in KINDS}
        for turn in range(rounds):
            for kind in (*KINDS[turn % 3 :], *KINDS[: turn % 3]):
                found[kind].append(measured(kind, steps))
        rows += [row_of(kind, objects, found[kind]) for kind in KINDS]
        del keep
    table = [f"{'':10} {'objects':>8} {'median ms':>10} {'p99 ms':>8} {'largest':>8} {'collections':>14} {'share of time':>14} {'at a boundary ms':>17}"]  # fmt: skip
    for row in rows:
        at = "" if row["boundary_ms"] is None else f"{row['boundary_ms']:.1f}"
        table.append(
            f"{row['kind']:10} {row['objects']:8} {row['median_ms']:10.2f} {row['p99_ms']:8.2f} {row['largest_ms']:8.2f} "
            f"{' / '.join(map(str, row['collections'])):>14} {row['collecting']:13.2%} {at:>17}"
        )
    return finish(options, {"machine": machine(), "rows": rows}, [], table)


if __name__ == "__main__":
    sys.exit(main())
