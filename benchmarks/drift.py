"""What it costs to compare replicas each N steps in the background (``check_replicas=N``).

Each rank, a forked process with gloo, trains an equal replica, so all of the state is compared. Two attached loops take turns in blocks of steps: one compares once a block, in its
first step, and the other one never does. A block ends when all ranks have ended it, and by then every comparison has its verdict.

    boundary    the call of ``manager.step`` that starts a comparison: it describes the state and holds it; the slowest rank
    in the call the same digests in the call, as ``check_replicas="tensor"`` takes them at each save, and for which all ranks wait
    copied      bytes that updates copied because a comparison had not read them yet, over those of the state
    CPU         of a rank, its threads included: a block with a comparison minus one without
    lost        wall time, the same way; noise where other programs use the machine

    python benchmarks/drift.py [--quick] [--json] [--check] [--ranks 2 4] [--size 100MB] [--rounds 9] [--directory DIR]
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

from _targets import Target, finish, machine, make_parser
from ranks import SIZES, Loop, on_ranks, slowest, together

from trainfold.backends.runs.alike.replicas import copies_of
from trainfold.core.save.replicas import Proof

BLOCK = 8


def measure(size, rounds, folder):
    """Return seconds of blocks, boundaries and digests in the call, and bytes."""
    loops = {
        "without": Loop(size, "dp").attach(str(folder / "without")),
        "with": Loop(size, "dp").attach(str(folder / "with"), check_replicas=BLOCK),
    }
    checked = loops["with"]
    watch, live = checked.manager._saves._replicas, checked.live  # noqa: SLF001 (what is measured)
    found = {
        "without": [],
        "with": [],
        "boundary": [],
        "in the call": [],
        "copied": [],
        "cpu": {"without": [], "with": []},
    }
    begin, holds = watch._begun, []  # noqa: SLF001

    def timed(run, step):
        began = time.perf_counter()
        check = begin(run, step)
        found["boundary"].append(time.perf_counter() - began)
        holds.append(check.hold)
        return check

    watch._begun = timed  # noqa: SLF001
    for each in loops.values():
        while each.live.progress.step % BLOCK != BLOCK - 1:  # so that the first step of a block compares
            each.train()
    for turn in range(rounds + 1):
        for name in list(loops)[:: 1 if turn % 2 else -1]:
            began = time.process_time()
            secs = together(lambda name=name: [loops[name].train() for _ in range(BLOCK)])
            if turn:
                found["cpu"][name].append(time.process_time() - began)
                found[name].append(secs)
    assert watch._equal_at == live.progress.step - BLOCK + 1, "every comparison has its verdict"  # noqa: SLF001
    found["boundary"] = [slowest(secs) for secs in found["boundary"]]
    found["copied"] = [hold.copied_bytes for hold in holds]
    replicated = checked.manager._saves._contents.described(live, live.read(view=True)).replicated()  # noqa: SLF001
    for _ in range(rounds):
        found["in the call"].append(together(lambda: copies_of(replicated, proof=Proof())))
    for each in loops.values():
        each.manager.close()
    return {**found, "part_bytes": checked.part_bytes()}


def judge(count, row):
    """Return the figures of a number of ranks, in ms."""
    middle = statistics.median
    lost = [one - other for one, other in zip(row["with"], row["without"], strict=True)]
    cpu = [one - other for one, other in zip(row["cpu"]["with"], row["cpu"]["without"], strict=True)]
    step = middle(row["without"]) / BLOCK
    figures = {
        "step_ms": 1e3 * step,
        "boundary_ms": 1e3 * middle(row["boundary"]),
        "in_the_call_ms": 1e3 * middle(row["in the call"]),
        "cpu_ms": 1e3 * middle(cpu),
        "lost_ms": 1e3 * middle(lost),
        "lost_steps": middle(lost) / step,
        "copied_over_state": middle(row["copied"]) / row["part_bytes"],
    }
    line = (
        f"{count} ranks: a step {figures['step_ms']:.1f} ms; a comparison: {figures['boundary_ms']:.1f} ms at its boundary, {figures['cpu_ms']:.1f} ms of CPU and {figures['lost_ms']:.1f} ms lost in all, "
        f"{figures['copied_over_state']:.2f} of the state copied; in the call it would be {figures['in_the_call_ms']:.1f} ms"
    )
    return figures, line


def main():
    """Run it."""
    parser = make_parser(__doc__, quick="1 MB, two rounds on 2 ranks")
    parser.add_argument("--size", choices=SIZES, default="100MB")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="a place on the filesystem to measure")
    options = parser.parse_args()
    size, rounds, counts = ("1MB", 2, [2]) if options.quick else (options.size, options.rounds, options.ranks)
    around, rows, table, targets = machine(), {}, [], []
    for count in counts:
        with tempfile.TemporaryDirectory(dir=options.directory, prefix=".bench-") as directory:
            rows[count], line = judge(count, on_ranks(count, measure, size, rounds, Path(directory)))
        table.append(line)
        targets += [
            Target(
                f"{count} ranks: the boundary / a step", rows[count]["boundary_ms"] / rows[count]["step_ms"], "<=", 0.05
            ),
            Target(f"{count} ranks: lost each 500 steps / 500 steps", rows[count]["lost_steps"] / 500, "<=", 0.01),
        ]
    return finish(options, {"machine": around, "size": size, "rounds": rounds, "rows": rows}, targets, table)


if __name__ == "__main__":
    sys.exit(main())
