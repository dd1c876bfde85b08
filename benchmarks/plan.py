"""Planning at scale: plan_save and plan_resume for 1e3, 1e4 and 1e5 leaves; finding the newest of 1,000 checkpoints.

    python benchmarks/plan.py [--json] [--quick]

The time for a plan includes describing the state, which every save and resume does. Growth is the exponent of a power
law through the smallest and the largest size: 1.0 is linear.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainfold.backends.collectives import SingleProcess
from trainfold.backends.interpret import run_save
from trainfold.backends.inventory import examine, read_inventory
from trainfold.backends.local import LocalStore
from trainfold.backends.memory import MemoryStore
from trainfold.backends.runs import save
from trainfold.core.components import components_of
from trainfold.core.leaves import Leaves
from trainfold.core.manifest import Head
from trainfold.core.resume_plan import Request, ResumePlan, Target, next_to_examine, plan_resume
from trainfold.core.save_plan import plan_save
from trainfold.core.state import ModelState, OptimizerState, ParamGroup, Progress, TrainState
from trainfold.core.structure import describe


def big_state(leaves: int) -> TrainState:
    """A state with so many tensor leaves: a third parameters, two thirds optimizer slots."""
    names = [f"layers.{i // 12}.block.{i % 12}.weight" for i in range(leaves // 3)]
    params = {name: torch.zeros(4) for name in names}
    slots = {name: {"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)} for name in names}
    group = ParamGroup({"lr": 1e-3}, tuple(names))
    optimizer = OptimizerState("torch.optim.adamw.AdamW", Leaves(slots), (group,))
    return TrainState(model=ModelState(Leaves(params), Leaves()), optimizer=optimizer, trainer=Progress(step=1))


def median_secs(function: Callable[[], Any], repeats: int) -> float:
    """The median wall time of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_plans(leaves: int, repeats: int) -> dict[str, float]:
    """Median seconds of plan_save and plan_resume for a state of that many leaves."""
    state = big_state(leaves)

    def described() -> dict[str, Any]:
        return {name: describe(component, name)[0] for name, component in components_of(state).items()}

    save_secs = median_secs(lambda: plan_save([described()], step=1), repeats)
    store = MemoryStore()
    save(state, store)
    inventory = examine(store, read_inventory(store), "step-00000001")
    outcome = plan_resume(inventory, Target(described()), Request())
    assert isinstance(outcome, ResumePlan), outcome
    resume_secs = median_secs(lambda: plan_resume(inventory, Target(described()), Request()), repeats)
    examine_secs = median_secs(lambda: examine(store, read_inventory(store), "step-00000001"), repeats)
    return {
        "leaves": leaves,
        "plan_save_secs": save_secs,
        "plan_resume_secs": resume_secs,
        "read_manifest_secs": examine_secs,
    }


def measure_discovery(checkpoints: int, repeats: int) -> float:
    """Median seconds to find and validate the newest of so many checkpoints on a local disk."""
    state = big_state(30)
    pairs = {name: describe(component, name) for name, component in components_of(state).items()}
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder) / "run")
        save(state, store)
        run_id = read_inventory(store).run_id
        assert run_id is not None
        for step in range(2, checkpoints + 1):
            decided = plan_save([{name: described for name, (described, _) in pairs.items()}], step=step)
            tensors = {name: tensors for name, (_, tensors) in pairs.items()}
            run_save(decided, tensors, head=Head(run_id, step), store=store, collectives=SingleProcess(), contract={})

        def find() -> None:
            inventory = read_inventory(LocalStore(Path(folder) / "run"))
            while (name := next_to_examine(inventory, Request())) is not None:
                inventory = examine(store, inventory, name)
            newest = inventory.entry(f"step-{checkpoints:08d}")
            assert newest is not None
            assert newest.manifest is not None

        return median_secs(find, repeats)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer repeats")
    options = parser.parse_args()
    sizes = (300, 3_000) if options.quick else (1_000, 10_000, 100_000)
    rows = [measure_plans(leaves, 3) for leaves in sizes]
    count = 50 if options.quick else 1_000
    found = measure_discovery(count, 5)
    span = math.log(sizes[-1] / sizes[0])
    growth = {key: math.log(rows[-1][key] / rows[0][key]) / span for key in ("plan_save_secs", "plan_resume_secs")}
    if options.json:
        print(json.dumps({"plans": rows, "growth": growth, "checkpoints": count, "find_newest_secs": found}))
        return
    print(f"{'leaves':>8} {'plan_save s':>12} {'plan_resume s':>14} {'read manifest s':>16}")
    for row in rows:
        print(
            f"{row['leaves']:>8,} {row['plan_save_secs']:>12.3f} {row['plan_resume_secs']:>14.3f} {row['read_manifest_secs']:>16.3f}"
        )
    print(f"growth exponent: plan_save {growth['plan_save_secs']:.2f}, plan_resume {growth['plan_resume_secs']:.2f}")
    print(f"newest of {count:,} checkpoints found and validated in {found * 1000:.1f} ms")


if __name__ == "__main__":
    main()
