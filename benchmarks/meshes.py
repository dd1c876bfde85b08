"""Every mesh onto every other one: what a load takes, trainfold beside torch.distributed.checkpoint (DCP), in one table.

The layouts are those of `trainfold.attach`: dp (replicas), fsdp, tp, and on four ranks hsdp (2 x 2) and fsdp x tp (2 x 2) too. Each contestant saves the same model
and its AdamW on each layout and loads every one of these checkpoints onto each. The two take turns, the other one first each round. An operation lasts from the moment when all
ranks begin until all have ended; files are in the page cache when they are loaded. trainfold verifies the digest of all that it reads and agrees on the
checkpoint; DCP has no digests. A cell of the table is the median of trainfold in ms and the median ratio trainfold / DCP of the pairs: below 1 trainfold is faster.

    python benchmarks/meshes.py [--quick] [--json] [--check] [--ranks 2 4] [--size 100MB] [--rounds 5] [--directory DIR]
"""

import statistics
import sys
import tempfile
from pathlib import Path

from _targets import Target, finish, machine, make_parser
from ranks import SIZES, Dcp, Loop, fresh, load_mine, on_ranks, together
from torch import distributed as dist

LAYOUTS = {2: ("dp", "fsdp", "tp"), 4: ("dp", "fsdp", "tp", "hsdp", "fsdp x tp")}
QUICK = {2: ("fsdp", "tp")}


def save_layouts(size, layouts, rounds, folder):
    """Save each layout by each contestant in turns; return seconds by layout and contestant. The last checkpoints stay."""
    found = {}
    for layout in layouts:
        loop = Loop(size, layout)
        mine, theirs = (
            place_of(layout, dist.get_world_size(), "trainfold"),
            place_of(layout, dist.get_world_size(), "dcp"),
        )
        rival = Dcp(loop)
        loop.attach(fresh(folder / mine))
        secs = found[layout] = {"trainfold": [], "dcp": []}
        for turn in range(rounds + 1):
            loop.train()
            for name in list(secs)[:: 1 if turn % 2 else -1]:
                if name == "trainfold":
                    took = together(lambda loop=loop: loop.manager.save(loop.live))
                else:
                    place = fresh(folder / theirs)
                    took = together(lambda rival=rival, place=place: rival.save(place))
                if turn:
                    secs[name].append(took)
        loop.manager.close()
    return found


def load_layouts(size, layouts, sources, rounds, folder):
    """Load each source onto each layout by each contestant in turns; return seconds by target, source and contestant."""
    found = {}
    for layout in layouts:
        loop = Loop(size, layout)
        rival = Dcp(loop)
        for count, source in sources:
            secs = found.setdefault(layout, {}).setdefault(f"{source} of {count}", {"trainfold": [], "dcp": []})
            for turn in range(rounds + 1):
                for name in list(secs)[:: 1 if turn % 2 else -1]:
                    place = str(folder / place_of(source, count, name))
                    took = (
                        load_mine(loop, place)
                        if name == "trainfold"
                        else together(lambda place=place, rival=rival: rival.load(place))
                    )
                    if turn:
                        secs[name].append(took)
    return found


def place_of(layout, count, name):
    """Return the name of the checkpoint of a contestant."""
    return f"{layout.replace(' ', '')}-{count}-{name}"


def figures(secs):
    """Return medians in ms and the median ratio of the pairs."""
    ratio = statistics.median(a / b for a, b in zip(secs["trainfold"], secs["dcp"], strict=True))
    return {**{f"{name}_ms": 1e3 * statistics.median(each) for name, each in secs.items()}, "ratio": ratio}


def table_of(saves, loads):
    """Return the lines of one table: a row for each source, a column for each target, as Markdown."""
    targets = [(count, layout) for count, each in loads.items() for layout in each]

    def cell(row):
        return f"{row['trainfold_ms']:.0f} ({row['ratio']:.2f})"

    yield "| saved on | a save | " + " | ".join(f"{layout} of {count}" for count, layout in targets) + " |"
    yield "|---" * (len(targets) + 2) + "|"
    for count, layouts in saves.items():
        for layout, row in layouts.items():
            source = f"{layout} of {count}"
            cells = [cell(loads[each][target][source]) for each, target in targets]
            yield f"| {source} | {cell(row)} | {' | '.join(cells)} |"


def main():
    """Run it."""
    parser = make_parser(__doc__, quick="1 MB, one round, two layouts on 2 ranks")
    parser.add_argument("--size", choices=SIZES, default="100MB")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], choices=LAYOUTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="a place on the filesystem to measure")
    options = parser.parse_args()
    worlds = QUICK if options.quick else {count: LAYOUTS[count] for count in options.ranks}
    size, rounds = ("1MB", 1) if options.quick else (options.size, options.rounds)
    around = machine()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix=".bench-") as directory:
        folder = Path(directory)
        saved = {count: on_ranks(count, save_layouts, size, each, rounds, folder) for count, each in worlds.items()}
        sources = [(count, layout) for count, each in worlds.items() for layout in each]
        loaded = {
            count: on_ranks(count, load_layouts, size, each, sources, rounds, folder) for count, each in worlds.items()
        }
    saves = {count: {layout: figures(each) for layout, each in found.items()} for count, found in saved.items()}
    loads = {
        count: {target: {source: figures(each) for source, each in row.items()} for target, row in found.items()}
        for count, found in loaded.items()
    }
    rows = [row for found in loads.values() for target in found.values() for row in target.values()]
    targets = [
        Target(
            "saves: most of trainfold / DCP",
            max(row["ratio"] for each in saves.values() for row in each.values()),
            "<=",
            0.5,
        ),
        Target("loads: most of trainfold / DCP", max(row["ratio"] for row in rows), "<=", 1.0),
        Target("loads: median of trainfold / DCP", statistics.median(row["ratio"] for row in rows), "<=", 1.0),
    ]
    head = f"{size} of state, medians of {rounds} rounds in ms (trainfold / DCP), load {around['load']} at the start"
    found = {"machine": around, "size": size, "rounds": rounds, "saves": saves, "loads": loads}
    return finish(options, found, targets, [head, "", *table_of(saves, loads), ""])


if __name__ == "__main__":
    sys.exit(main())
