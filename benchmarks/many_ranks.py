"""What a checkpoint of many ranks costs those who read it: CPU seconds of a load on one rank, and of inspect, verify and plan.

Ranks are threads; each writes its rows of every tensor, so the checkpoint has ranks x leaves parts. The tensors are small: what is measured is the cost of a part.

    python benchmarks/many_ranks.py [--quick] [--json] [--check] [--ranks N] [--leaves N] [--directory DIR]
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import attrs
import torch
from _targets import Target, finish, machine, make_parser
from plan import big_state, sharded_state

import trainfold
from trainfold.core.layout.world import World
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState
from trainfold.ranks import run_threads

COMMANDS = ("ls", "inspect", "verify", "plan")
MOST_US = {"load": 25.0, "inspect": 15.0, "verify": 25.0, "plan": 12.0}  # for each part


def saved(run, ranks, leaves):
    """Save a checkpoint of many ranks."""

    def save(world):
        trainfold.save(sharded_state(leaves, World(world.rank, ranks)), run, collectives=world)

    run_threads(ranks, save)


def whole_state(ranks, leaves):
    """Return the same state on one rank."""
    state, shapes = big_state(leaves), ((4 * ranks, 3), (ranks + 1, 2), (ranks,))
    params = {name: torch.zeros(shapes[index % 3]) for index, name in enumerate(state.model.params)}
    slots = {name: {key: torch.zeros_like(each) for key in ("exp_avg", "exp_avg_sq")} for name, each in params.items()}
    optimizer = attrs.evolve(state.optimizer, slots=Leaves(slots))
    return state.evolve(model=ModelState(Leaves(params), Leaves()), optimizer=optimizer)


def measure(run, like, rounds):
    """Return the least CPU seconds of a load and of each command; those of a command are with the start of its process."""
    found = {"load": [], **{name: [] for name in COMMANDS}}
    for _ in range(rounds):
        began = time.process_time()
        trainfold.load(run, like=like, policy={"world": "adapt"})
        found["load"].append(time.process_time() - began)
        for name in COMMANDS:
            before = os.times()
            subprocess.run([sys.executable, "-m", "trainfold", name, str(run)], check=True, stdout=subprocess.DEVNULL)
            after = os.times()
            used = after.children_user + after.children_system - before.children_user - before.children_system
            found[name].append(used)
    return {name: min(each) for name, each in found.items()}


def main():
    """Run it."""
    parser = make_parser(__doc__, quick="4 ranks of 30 leaves, one round")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--leaves", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="a place on the filesystem to measure")
    options = parser.parse_args()
    ranks, leaves, rounds = (4, 30, 1) if options.quick else (options.ranks, options.leaves, options.rounds)
    around = machine()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix=".bench-") as folder:
        saved(Path(folder) / "run", ranks, leaves)
        secs = measure(Path(folder) / "run", whole_state(ranks, leaves), rounds)
    parts = ranks * leaves
    targets = [
        Target(f"{name}: CPU us for each part", 1e6 * secs[name] / parts, "<=", limit)
        for name, limit in MOST_US.items()
    ]
    table = [
        f"{ranks} ranks of {leaves:,} leaves: {parts:,} parts, least of {rounds} rounds",
        *(f"  {name:10}{each:8.2f} CPU-s" for name, each in secs.items()),
    ]
    found = {"machine": around, "parts": parts, "cpu_secs": secs}
    return finish(options, found, targets, table)


if __name__ == "__main__":
    sys.exit(main())
