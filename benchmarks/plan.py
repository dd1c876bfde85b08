"""Planning at scale: plan_save and plan_resume for 1e3, 1e4 and 1e5 leaves, many ranks, and the newest of 1,000 checkpoints.

    python benchmarks/plan.py [--quick] [--json] [--check]

The time of a plan includes describing the state, which every save and resume does. Three resumes are planned: into the
same state; into a fresh state, whose optimizer has no slots yet; and into a state with one tensor of another dtype, which
the policy adapts. ``trainfold.plan`` includes everything: the run, its manifest, the state and the decision. Growth is
the exponent of a power law through the smallest and the largest size: 1.0 is linear.

Of a save on many ranks, this is what one rank does before it writes, for 10,000 leaves of which each rank holds rows: the digest of its
description, the reading of what the others announce, and the plan of its own files. The other ranks are simulated.
"""

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from _targets import Target, finish, machine, make_parser

import trainfold
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.ranks.in_process import SingleProcess
from trainfold.backends.ranks.wire import from_wire, to_wire
from trainfold.backends.runs.save import run_save
from trainfold.backends.runs.scan import examine, read_inventory
from trainfold.backends.stores.local import LocalStore
from trainfold.core.format.manifest import Head
from trainfold.core.format.structure.describe import describe
from trainfold.core.format.structure.described import Described
from trainfold.core.format.structure.outline import announcement_of, by_rule, unequal
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.world import World
from trainfold.core.resume.choose import next_to_examine
from trainfold.core.resume.planner import plan_resume
from trainfold.core.resume.request import ResumeRequest, resume_request
from trainfold.core.resume.request import Target as Resumer
from trainfold.core.resume.resume_plan import ResumePlan
from trainfold.core.save.save_plan import plan_save
from trainfold.core.state.components import components_of
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, OptimizerState, ParamGroup, Progress, TrainState

LIMIT_SECS, LIMIT_GROWTH, LIMIT_NEWEST_SECS, LIMIT_RANK_SECS = 2.0, 1.2, 0.1, 0.05
STEP_1 = "step-00000001"
COLUMNS = {  # key of a row: its heading
    "plan_save_secs": "plan_save",
    "plan_resume_secs": "plan_resume",
    "plan_resume_fresh_secs": "... fresh",
    "plan_resume_dtype_secs": "... dtype",
    "read_manifest_secs": "manifest",
    "whole_plan_secs": "trainfold.plan",
}
PLANS = [key for key in COLUMNS if key.startswith("plan_")]


def big_state(leaves: int) -> TrainState:
    """Return a state with this number of tensor leaves: one third parameters, two thirds optimizer slots."""
    names = [f"layers.{i // 12}.block.{i % 12}.weight" for i in range(leaves // 3)]
    params = {name: torch.zeros(4) for name in names}
    slots = {name: {"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)} for name in names}
    group = ParamGroup({"lr": 1e-3}, tuple(names))
    optimizer = OptimizerState("torch.optim.adamw.AdamW", Leaves(slots), (group,))
    return TrainState(model=ModelState(Leaves(params), Leaves()), optimizer=optimizer, trainer=Progress(step=1))


def without_slots(state: TrainState) -> TrainState:
    """Return the state of a run before its first step."""
    return state.evolve(optimizer=attrs.evolve(state.optimizer, slots=Leaves()))


def with_other_dtype(state: TrainState) -> TrainState:
    """Return the state with its last parameter in bfloat16."""
    assert state.model is not None
    params = dict(state.model.params)
    name = list(params)[-1]
    return state.evolve(model=attrs.evolve(state.model, params=Leaves({**params, name: params[name].bfloat16()})))


def described(state: TrainState) -> dict[str, Described]:
    """Return the input that a plan needs of a state."""
    return {name: describe(component, name)[0] for name, component in components_of(state).items()}


def median_secs(function: Callable[[], Any], repeats: int) -> float:
    """Return the median wall time of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_plans(leaves: int, repeats: int) -> dict[str, float]:
    """Return the median seconds of each kind of plan for a state of this size, saved on a local disk."""
    state = big_state(leaves)
    adapt = {"dtype": "adapt"}
    wanted = {
        "plan_resume_secs": (state, ResumeRequest()),
        "plan_resume_fresh_secs": (without_slots(state), ResumeRequest()),
        "plan_resume_dtype_secs": (with_other_dtype(state), resume_request(policy=adapt)),
    }
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        trainfold.save(state, run)
        store = LocalStore(run)

        def read() -> Any:
            return examine(store, read_inventory(store), STEP_1)

        inventory = read()

        def decide(like: TrainState, request: ResumeRequest) -> Any:
            return without_collecting(plan_resume)(inventory, Resumer(described(like)), request)

        for like, request in wanted.values():  # check that each is a plan, and that the policy adapts a leaf
            outcome = decide(like, request)
            assert isinstance(outcome, ResumePlan), outcome
            assert [drift.kind for drift in outcome.drifts if drift.kind == "dtype"] == ["dtype"] * bool(request.policy)
        assert isinstance(trainfold.plan(run, like=state), ResumePlan)
        return {
            "leaves": leaves,
            "plan_save_secs": median_secs(without_collecting(lambda: plan_save([described(state)], step=1)), repeats),
            **{key: median_secs(lambda pair=pair: decide(*pair), repeats) for key, pair in wanted.items()},
            "read_manifest_secs": median_secs(read, repeats),
            "whole_plan_secs": median_secs(lambda: trainfold.plan(run, like=state), repeats),
        }


def measure_discovery(checkpoints: int, repeats: int) -> float:
    """Return the median seconds to find and validate the newest of several checkpoints on a local disk."""
    state = big_state(30)
    pairs = {name: describe(component, name) for name, component in components_of(state).items()}
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder) / "run")
        trainfold.save(state, store)
        run_id = read_inventory(store).run_id
        assert run_id is not None
        for step in range(2, checkpoints + 1):
            pairs["trainer"] = describe(Progress(step=step), "trainer")
            decided = plan_save([{name: said for name, (said, _) in pairs.items()}], step=step)
            tensors = {name: tensors for name, (_, tensors) in pairs.items()}
            run_save(decided, tensors, head=Head(run_id, step), store=store, collectives=SingleProcess(), contract={})

        def find() -> None:
            store = LocalStore(Path(folder) / "run")
            inventory = read_inventory(store)
            while (name := next_to_examine(inventory, ResumeRequest())) is not None:
                inventory = examine(store, inventory, name)
            newest = inventory.entry(f"step-{checkpoints:08d}")
            assert newest is not None
            assert newest.manifest is not None

        return median_secs(find, repeats)


def sharded_state(leaves: int, world: World) -> TrainState:
    """Return `big_state` with rows of each tensor on each rank, unevenly."""
    rule = make_placement(make_mesh((world.size,)), [[0]])
    cuts = [
        (shape, rule.box(shape, (world.rank,))) for shape in ((4 * world.size, 3), (world.size + 1, 2), (world.size,))
    ]

    def cut(index: int) -> Shard:
        shape, box = cuts[index % len(cuts)]
        return Shard(
            torch.zeros([stop - start for start, stop in box]), shape, tuple(start for start, _ in box), placement=rule
        )

    state = big_state(leaves)
    assert state.model is not None
    assert state.optimizer is not None
    params = {name: cut(index) for index, name in enumerate(state.model.params)}
    slots = {name: {key: cut(index) for key in ("exp_avg", "exp_avg_sq")} for index, name in enumerate(params)}
    optimizer = attrs.evolve(state.optimizer, slots=Leaves(slots))
    return state.evolve(model=ModelState(Leaves(params), Leaves()), optimizer=optimizer)


def measure_rank(leaves: int, world: World, repeats: int) -> dict[str, Any]:
    """Measure what one of several ranks does before it writes."""
    said = described(sharded_state(leaves, world))

    def ruled() -> dict[str, Described]:
        return {name: by_rule(each, world) for name, each in said.items()}

    mine = ruled()
    wire = to_wire(announcement_of(mine))
    digest_secs = median_secs(lambda: announcement_of(ruled()), repeats)
    read_secs = median_secs(lambda: unequal([from_wire(wire) for _ in range(world.size)]), repeats)
    plan = without_collecting(lambda: plan_save([mine] * world.size, step=1, only=world.rank))
    plan_secs = median_secs(plan, repeats)
    return {
        "leaves": leaves,
        "ranks": world.size,
        "announced_bytes": len(wire),
        "digest_secs": digest_secs,
        "read_secs": read_secs,
        "plan_secs": plan_secs,
        "secs": digest_secs + read_secs + plan_secs,
    }


def main() -> int:
    """Measure and print."""
    options = make_parser(__doc__, quick="300 and 3,000 leaves, 50 checkpoints").parse_args()
    sizes = (300, 3_000) if options.quick else (1_000, 10_000, 100_000)
    checkpoints = 50 if options.quick else 1_000
    around = machine()
    rows = [measure_plans(leaves, max(5, 20_000 // leaves)) for leaves in sizes]
    newest_secs = measure_discovery(checkpoints, 5)
    span = math.log(sizes[-1] / sizes[0])
    ranks = [measure_rank(sizes[1], World(size - 1, size), 5) for size in ((2, 64) if options.quick else (8, 64, 512))]
    growth = {key: math.log(rows[-1][key] / rows[0][key]) / span for key in [*PLANS, "whole_plan_secs"]}
    names = {
        "plan_save_secs": "plan_save",
        "plan_resume_secs": "plan_resume",
        "plan_resume_fresh_secs": "plan_resume into a fresh optimizer",
        "plan_resume_dtype_secs": "plan_resume with a dtype to adapt",
    }
    targets = [
        *(Target(f"{names[key]}, {sizes[-1]:,} leaves, s", rows[-1][key], "<=", LIMIT_SECS) for key in PLANS),
        *(Target(f"{names[key]}, growth exponent", growth[key], "<=", LIMIT_GROWTH) for key in PLANS),
        Target(
            f"planning and exchange of a rank, {ranks[-1]['ranks']} ranks, s", ranks[-1]["secs"], "<=", LIMIT_RANK_SECS
        ),
        Target(f"newest of {checkpoints:,} checkpoints, s", newest_secs, "<=", LIMIT_NEWEST_SECS),
    ]
    table = [
        f"{'leaves':>8}" + "".join(f" {heading:>14}" for heading in COLUMNS.values()) + "   (seconds)",
        *(f"{row['leaves']:>8,}" + "".join(f" {row[key]:>14.4f}" for key in COLUMNS) for row in rows),
        f"{'growth':>8}" + "".join(f" {growth[key]:>14.2f}" if key in growth else f"{'':15}" for key in COLUMNS),
    ]
    table += [
        "",
        f"{'ranks':>8} {'announced bytes':>16} {'digest':>14} {'read':>14} {'own files':>14} {'in all':>14}   (seconds; {sizes[1]:,} leaves a rank)",
        *(
            f"{row['ranks']:>8,} {row['announced_bytes']:>16,}"
            + "".join(f" {row[key]:>14.4f}" for key in ("digest_secs", "read_secs", "plan_secs", "secs"))
            for row in ranks
        ),
    ]
    found = {"machine": around, "plans": rows, "ranks": ranks, "growth": growth}
    return finish(options, {**found, "checkpoints": checkpoints, "find_newest_secs": newest_secs}, targets, table)


if __name__ == "__main__":
    sys.exit(main())
