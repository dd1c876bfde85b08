"""What checkpoints cost on several ranks: trainfold beside torch.distributed.checkpoint (DCP), on the same FSDP2 state.

The ranks are forked processes with gloo. Each contestant saves and loads the same model, so every part of an operation is there
for both: DCP's time includes that it gathers and sets the state dicts. The two take turns, the first one another each round. An
operation lasts from the moment when all ranks begin until all have ended. Durable: both sync their files. Files are in the page
cache when they are loaded. trainfold verifies the digest of all that it reads, DCP has none.

    step        the time of a loop of FSDP2 that is attached, with ``live.advance`` and ``manager.step``, no save due: blocks of
                steps of two equal models take turns
    save        a durable save in the loop
    async       the call, and the wall time that a block of steps with saves loses: (with - without) / saves, blocks take turns
    load        on the same mesh; the checkpoint of another number of ranks; that of tensor parallelism, whose tensors are cut in inner
                dimensions too; and an FSDP2 checkpoint under tensor parallelism
    memory      the peak resident set of a rank during its first load, above what it was before, as a multiple of the rank's part of
                the state; a new process for each contestant

    python benchmarks/ranks.py [--quick] [--json] [--check] [--ranks 2 4] [--size 100MB] [--rounds 5] [--directory DIR]
"""

import contextlib
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _targets import Target, finish, machine, make_parser
from stall import settled_bytes
from step import status_bytes
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import trainfold
from trainfold.core import tree

SIZES = {
    "1MB": (64, 2),
    "100MB": (512, 4),
    "340MB": (768, 6),
}  # name: (width, blocks); parameters and two slots of AdamW
SAMPLES = 64
BLOCK, SAVES = 4, 2  # steps of a block; saves in a block of async saves, one each BLOCK steps
LAYOUTS = ("fsdp", "tp")
TARGETS = {"step": 1.02, "save": 2.0, "call": 1 / 5, "lost": 1 / 3, "load": 1.0, "memory": 1.0}


class Block(torch.nn.Module):
    """A residual block of two large weights."""

    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        """Add to the input."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Loop:
    """A sharded model and its AdamW."""

    def __init__(self, size, layout="fsdp"):
        width, blocks = SIZES[size]
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(Block(width) for _ in range(blocks)))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for each in self.model:
            if layout == "tp":
                parallelize_module(each, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            else:
                fully_shard(each, mesh=mesh)
        if layout == "fsdp":
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(SAMPLES, width, generator=torch.Generator().manual_seed(1))
        self.live = self.manager = None
        self.train()  # so that the optimizer has its state

    def attach(self, folder, **options):
        """Attach the loop, with a manager that has no save due."""
        self.live = trainfold.attach(self.model, self.optimizer)
        self.live.advance(samples=SAMPLES)
        options = {"every": 1 << 40, "policy": {"streams": "adapt"}, **options}
        self.manager = trainfold.CheckpointManager(folder, collectives=trainfold.TorchCollectives(), **options)
        return self

    def train(self):
        """Do one step."""
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.manager is not None:
            self.live.advance(samples=SAMPLES)
            self.manager.step(self.live)

    def state(self):
        """Return the state that DCP saves."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def part_bytes(self):
        """Return the bytes of this rank's part of the state."""
        tensors = [each for each in tree.leaves(self.state()) if isinstance(each, torch.Tensor)]
        return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors)


class Dcp:
    """DCP, used as its documentation describes."""

    def __init__(self, loop):
        self.loop, self.pending, self.group = loop, None, dist.new_group(backend="gloo")

    def save(self, place):
        """Save in the loop."""
        dcp.save(self.loop.state(), checkpoint_id=place)

    def start(self, place):
        """Save in a thread, with a group of its own, after the save before."""
        self.drain()
        self.pending = dcp.async_save(self.loop.state(), checkpoint_id=place, process_group=self.group)

    def drain(self):
        """Wait."""
        if self.pending is not None:
            self.pending.result()
        self.pending = None

    def load(self, place):
        """Load into the model and the optimizer."""
        state = self.loop.state()
        dcp.load(state, checkpoint_id=place)
        set_state_dict(
            self.loop.model, self.loop.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


# --- what a rank measures ---------------------------------------------------------------------------------------------


def together(action):
    """Return the seconds from the begin of all ranks to the end of all."""
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def slowest(value):
    """Return the largest value of all ranks."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def fresh(path):
    """Return the path of a folder, which is removed if it is there; rank 0 waits until nothing is left to write."""
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
    dist.barrier()
    return str(path)


def measure_step(size, rounds, folder):
    """Return seconds of a step of the plain loop and of an attached one, by block, in turns."""
    plain, attached = Loop(size), Loop(size).attach(str(folder / "step"), mode="async")
    found = {"plain": [], "attached": []}
    for turn in range(2 * rounds + 1):
        for name, loop in [("plain", plain), ("attached", attached)][:: 1 if turn % 2 else -1]:
            secs = together(lambda loop=loop: [loop.train() for _ in range(BLOCK)]) / BLOCK
            if turn:
                found[name].append(secs)
    attached.manager.close()
    return found


def measure_saves(size, rounds, folder):
    """Return seconds of saves in the loop, by contestant; the last of each stays there for the loads."""
    loop = Loop(size)
    rival, found = Dcp(loop), {"trainfold": [], "dcp": []}
    for turn in range(rounds + 1):
        for name in list(found)[:: 1 if turn % 2 else -1]:
            place = fresh(folder / f"fsdp-{dist.get_world_size()}-{name}")
            if name == "dcp":
                secs = together(lambda place=place: rival.save(place))
            else:
                mine = loop.attach(place)
                secs = together(lambda: loop.manager.save(loop.live))
                mine.manager.close()
                loop.manager = None
            if turn:
                found[name].append(secs)
    return found, loop.part_bytes()


def measure_async(size, rounds, folder):
    """Return seconds of each call (of the slowest rank) and seconds lost per save, by contestant."""
    found = {name: {"calls": [], "lost": []} for name in ("trainfold", "dcp")}
    loop = Loop(size).attach(fresh(folder / "async"), mode="async", keep_last=1)
    rival = Dcp(loop)
    ways = {
        "trainfold": (lambda _: loop.manager.save(loop.live), loop.manager.drain),
        "dcp": (lambda index: rival.start(str(folder / f"async-dcp-{index}")), rival.drain),
    }

    def block(save=None, drain=None):
        calls = []
        for index in range(SAVES * BLOCK):
            loop.train()
            if save is not None and index % BLOCK == 0:
                began = time.perf_counter()
                save(index)
                calls.append(time.perf_counter() - began)
        if drain is not None:
            drain()
        return calls

    before = together(block)
    for turn in range(rounds + 1):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            for index in range(SAVES * BLOCK):
                fresh(folder / f"async-dcp-{index}")
            calls = []
            secs = together(lambda name=name, calls=calls: calls.extend(block(*ways[name])))
            after = together(block)
            slow = [slowest(each) for each in calls]
            if turn:
                found[name]["calls"] += slow
                found[name]["lost"].append((secs - (before + after) / 2) / SAVES)
            before = after
    loop.manager.close()
    return found


def save_once(size, layout, folder):
    """Leave a checkpoint of each contestant for the loads."""
    loop = Loop(size, layout)
    Dcp(loop).save(fresh(folder / f"{layout}-{dist.get_world_size()}-dcp"))
    mine = loop.attach(fresh(folder / f"{layout}-{dist.get_world_size()}-trainfold"))
    mine.manager.save(mine.live)
    mine.manager.close()


def load_mine(loop, place):
    """Return the seconds of a restore by a new manager."""
    mine = loop.attach(place)
    secs = together(lambda: mine.manager.restore(mine.live))
    mine.manager.close()
    loop.manager = None
    return secs


def measure_loads(size, rounds, folder, other):
    """Return seconds of loads, by what is loaded onto what, and contestant."""
    here = dist.get_world_size()
    cases = {
        "the same mesh": (f"fsdp-{here}", "fsdp"),
        f"from {other} ranks": (f"fsdp-{other}", "fsdp"),
        "tp onto fsdp": (f"tp-{here}", "fsdp"),
        "fsdp onto tp": (f"fsdp-{here}", "tp"),
    }
    loops = {layout: Loop(size, layout) for layout in LAYOUTS}
    rivals = {layout: Dcp(loop) for layout, loop in loops.items()}
    found = {case: {"trainfold": [], "dcp": []} for case in cases}
    for turn in range(rounds + 1):
        for case, (source, layout) in cases.items():
            for name in list(found[case])[:: 1 if turn % 2 else -1]:
                place = str(folder / f"{source}-{name}")
                if name == "dcp":
                    secs = together(lambda place=place, layout=layout: rivals[layout].load(place))
                else:
                    secs = load_mine(loops[layout], place)
                if turn:
                    found[case][name].append(secs)
    return found


def measure_memory(size, name, folder):
    """Return the peak of this rank's first load above what it had, over the bytes of its part; the largest of the ranks."""
    loop = Loop(size)
    place = str(folder / f"fsdp-{dist.get_world_size()}-{name}")
    part, rest = loop.part_bytes(), settled_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    load_mine(loop, place) if name == "trainfold" else Dcp(loop).load(place)
    return {"peak_over_part": slowest((status_bytes("VmHWM") - rest) / part), "part_bytes": part}


# --- the ranks --------------------------------------------------------------------------------------------------------


def on_ranks(count, measure, *args):
    """Fork the ranks, measure, and return what rank 0 has found."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as notes:
        children = [start(rank, count, Path(notes), measure, args) for rank in range(count)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            said = "\n".join(path.read_text() for path in sorted(Path(notes).glob("failed-*")))
            raise SystemExit(f"{measure.__name__} on {count} ranks failed: exit codes {codes}\n{said}")
        print(f"{measure.__name__} on {count} ranks: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return json.loads((Path(notes) / "found.json").read_text())


def start(rank, count, notes, measure, args):
    """Fork one rank; return its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        dist.init_process_group("gloo", init_method=f"file://{notes}/meet", rank=rank, world_size=count)
        found = measure(*args)
        if rank == 0:
            (notes / "found.json").write_text(json.dumps(found))
        dist.barrier()
        code = 0
    except BaseException:  # noqa: BLE001 (it is a child: whatever it is, it ends here)
        (notes / f"failed-{rank}").write_text(traceback.format_exc())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def measure_world(count, other, size, rounds, folder):
    """Return all rows of a number of ranks; the checkpoints of both numbers are there."""
    step = on_ranks(count, measure_step, size, rounds, folder)
    saves, part = on_ranks(count, measure_saves, size, rounds, folder)
    background = on_ranks(count, measure_async, size, rounds, folder)
    loads = on_ranks(count, measure_loads, size, rounds, folder, other)
    memory = {name: on_ranks(count, measure_memory, size, name, folder) for name in saves}
    return {"ranks": count, "part_bytes": part, "step": step, "save": saves, "async": background, "load": loads,
            "memory": {name: each["peak_over_part"] for name, each in memory.items()}}  # fmt: skip


def judge(world):
    """Return the figures of a number of ranks, the targets and the lines of the table."""
    middle, ranks = statistics.median, world["ranks"]
    step = middle(a / b for a, b in zip(world["step"]["attached"], world["step"]["plain"], strict=True))
    rows = [("a step", 1e3 * middle(world["step"]["attached"]), 1e3 * middle(world["step"]["plain"]))]

    def row(name, found):
        rows.append((name, 1e3 * middle(found["trainfold"]), 1e3 * middle(found["dcp"])))
        return middle(a / b for a, b in zip(found["trainfold"], found["dcp"], strict=True))

    save = row("a save", world["save"])
    calls, lost = ({name: each[kind] for name, each in world["async"].items()} for kind in ("calls", "lost"))
    call = row("async: the call", calls)
    row("async: lost a save", lost)
    mine, other = middle(lost["trainfold"]), middle(lost["dcp"])
    lost = mine / other if min(mine, other) > 0 else 1.0  # a loss below 0 is noise, and meets nothing
    loads = {case: row(f"load: {case}", found) for case, found in world["load"].items()}
    targets = [
        Target(f"{ranks} ranks: a step, attached / plain", step, "<=", TARGETS["step"]),
        Target(f"{ranks} ranks: a save, DCP / trainfold", 1 / save, ">=", TARGETS["save"]),
        Target(f"{ranks} ranks: an async call, trainfold / DCP", call, "<=", TARGETS["call"]),
        Target(f"{ranks} ranks: lost an async save, trainfold / DCP", lost, "<=", TARGETS["lost"]),
        *(Target(f"{ranks} ranks: load, {case}, DCP / trainfold", 1 / ratio, ">=", TARGETS["load"]) for case, ratio in loads.items()),
        Target(f"{ranks} ranks: peak of a load / a rank's part", world["memory"]["trainfold"], "<=", TARGETS["memory"]),
    ]  # fmt: skip
    table = [
        f"{ranks} ranks, {world['part_bytes'] / 1e6:.1f} MB a rank",
        f"  {'':26}{'trainfold':>12}{'DCP (step: plain)':>20}",
        *(f"  {name:26}{mine:9.1f} ms{other:17.1f} ms" for name, mine, other in rows),
        f"  {'peak of a load, x its part':26}{world['memory']['trainfold']:12.2f}{world['memory']['dcp']:20.2f}",
    ]
    return targets, table


def main():
    """Run it."""
    parser = make_parser(__doc__, quick="1 MB, one round on 2 ranks, and the checkpoint of 3 ranks")
    parser.add_argument("--size", choices=SIZES, default="100MB")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="a place on the filesystem to measure")
    options = parser.parse_args()
    size, rounds, counts = ("1MB", 1, [2]) if options.quick else (options.size, options.rounds, options.ranks)
    around = machine()
    others = {count: counts[1 - index] if len(counts) == 2 else count + 1 for index, count in enumerate(counts)}
    with tempfile.TemporaryDirectory(dir=options.directory, prefix=".bench-") as directory:
        folder = Path(directory)
        for count in sorted({*others.values()}):
            on_ranks(count, save_once, size, "fsdp", folder)
        for count in counts:
            on_ranks(count, save_once, size, "tp", folder)
        worlds, judged = [], []
        for count in counts:
            worlds.append(measure_world(count, others[count], size, rounds, folder))
            judged.append(judge(worlds[-1]))
            print(*judged[-1][1], sep="\n", file=sys.stderr, flush=True)
    table = [f"{size} of state, medians of {rounds} rounds, load {around['load']} at the start"]
    targets = [target for each, _ in judged for target in each]
    found = {"machine": around, "size": size, "rounds": rounds, "rows": worlds}
    return finish(options, found, targets, [*table, *(line for _, each in judged for line in each)])


if __name__ == "__main__":
    sys.exit(main())
