"""What checkpoints cost on several ranks: trainfold beside torch.distributed.checkpoint (DCP), on the same FSDP2 state.

The ranks are forked processes with gloo. Each contestant saves and loads the same model, so every part of an operation is there
for both: DCP's time includes that it gathers and sets the state dicts. The two take turns, the first one another each round. An
operation lasts from the moment when all ranks begin until all have ended. Durable: both sync their files. Files are in the page
cache when they are loaded. trainfold verifies the digest of all that it reads, DCP has none.

    step        the time of a loop of FSDP2 that is attached, with ``live.advance`` and ``manager.step``, no save due: blocks of
                steps of two equal models take turns; and of the same loops where they clip, by ``clip_grad_norm_`` and an all-reduce of the
                loss that are written by hand, and by ``live.check``
    save        a durable save in the loop, of one run that goes on. DCP syncs the bytes of its files and not their names; so there is also a DCP after which
                rank 0 syncs the directories, which is as durable. The disk alone: as many processes write as many bytes to one plain file each, and sync it
    async       the call, and the wall time that a block of steps with saves loses: (with - without) / saves, blocks take turns
    load        on the same mesh, also with ``in_place=True``; the checkpoint of another number of ranks; that of tensor parallelism, whose tensors are cut in inner
                dimensions too; and an FSDP2 checkpoint under tensor parallelism
    memory      the peak resident set of a rank during its first load, above what it was before, as a multiple of the rank's part of
                the state; a new process for each contestant; also for ``restore(live, in_place=True)``. The modules of both are imported before

    python benchmarks/ranks.py [--quick] [--json] [--check] [--ranks 2 4] [--size 100MB] [--rounds 5] [--only saves] [--directory DIR]
"""

import contextlib
import json
import logging
import mmap
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
from trainfold.adapters.manager import manager  # noqa: F401 - with what it imports, before the ranks are forked, as of DCP
from trainfold.core import tree

SIZES = {
    "1MB": (64, 2),
    "100MB": (512, 4),
    "340MB": (768, 6),
}  # name: (width, blocks); parameters and two slots of AdamW
SAMPLES = 64
CLIP = 1.0
BLOCK, SAVES = 4, 2  # steps of a block; saves in a block of async saves, one each BLOCK steps
LAYOUTS = ("fsdp", "tp")
PAGE, DISK = 4096, "the disk alone"
TARGETS = {"step": 1.02, "save": 2.0, "call": 1 / 5, "lost": 1 / 3, "load": 1.0, "memory": 1.3, "in place": 0.3}


class Block(torch.nn.Module):
    """A residual block of two large weights."""

    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        """Add to the input."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


def lay_out(model, layout):
    """Cut a model over all ranks: "dp" (not at all), "fsdp", "tp", or in two dimensions "hsdp" and "fsdp x tp"."""
    count = dist.get_world_size()
    sizes = (2, count // 2) if layout in ("hsdp", "fsdp x tp") else (count,)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :])
    for each in model if "tp" in layout else ():
        parallelize_module(each, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for each in (*model, model) if layout in ("fsdp", "hsdp", "fsdp x tp") else ():
        fully_shard(each, mesh=mesh["outer"] if layout == "fsdp x tp" else mesh)


class Loop:
    """A sharded model and its AdamW."""

    def __init__(self, size, layout="fsdp"):
        width, blocks = SIZES[size]
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(Block(width) for _ in range(blocks)))
        lay_out(self.model, layout)
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

    def train(self, *, clips=False):
        """Do one step; one that clips knows the mean loss, and its norm."""
        loss = self.model(self.x).square().mean()
        loss.backward()
        if clips and self.manager is not None:
            self.live.check(loss.detach(), clip_norm=CLIP)
        elif clips:
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP).full_tensor()
            assert torch.isfinite(mean + norm)
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


def settle():
    """Wait until nothing is left to write."""
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()


def fresh(path):
    """Return the path of a folder, which is removed if it is there; rank 0 waits until nothing is left to write."""
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    settle()
    return str(path)


def sync_directory(path):
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def measure_step(size, rounds, folder):
    """Return seconds of a step of the plain loop and of an attached one, with and without clipping, by block, in turns."""
    plain, attached = Loop(size), Loop(size).attach(str(folder / "step"), mode="async")
    ways = {
        "plain": (plain, False),
        "attached": (attached, False),
        "clipped": (plain, True),
        "checked": (attached, True),
    }
    found = {name: [] for name in ways}
    for turn in range(2 * rounds + 1):
        for name, (loop, clips) in list(ways.items())[:: 1 if turn % 2 else -1]:
            secs = together(lambda loop=loop, clips=clips: [loop.train(clips=clips) for _ in range(BLOCK)]) / BLOCK
            if turn:
                found[name].append(secs)
    attached.manager.close()
    return found


def bare_bytes(count):
    """Return memory with as many bytes, in whole pages."""
    memory = mmap.mmap(-1, -(-count // PAGE) * PAGE)
    memory.write(os.urandom(PAGE) * (len(memory) // PAGE))
    return memory


def bare_write(path, memory):
    """Write a plain file and sync it: past the page cache where the filesystem can, which took the least of what we tried."""
    flags = os.O_WRONLY | os.O_CREAT
    try:
        fd = os.open(path, flags | getattr(os, "O_DIRECT", 0))
    except OSError:
        fd = os.open(path, flags)
    try:
        os.posix_fallocate(fd, 0, len(memory))
        done, view = 0, memoryview(memory)
        while done < len(view):
            done += os.pwrite(fd, view[done:], done)
        os.fsync(fd)
    finally:
        os.close(fd)


def measure_saves(size, rounds, folder):
    """Return seconds of saves in the loop, by contestant; the last of each stays there for the loads."""
    count = dist.get_world_size()
    loop = Loop(size).attach(fresh(folder / f"fsdp-{count}-trainfold"))
    rival, found = Dcp(loop), {"trainfold": [], "dcp": [], "dcp, synced": [], DISK: []}
    memory, bare = bare_bytes(loop.part_bytes()), folder / f"bare-{dist.get_rank()}"

    def durable(place):
        rival.save(place)
        if dist.get_rank() == 0:  # DCP's last collective is over: every file has its name
            for each in (place, folder):
                sync_directory(each)

    for turn in range(rounds + 1):
        loop.train()  # so that each save of the run has a step of its own
        for name in list(found)[:: 1 if turn % 2 else -1]:
            if name == "trainfold":
                settle()
                secs = together(lambda: loop.manager.save(loop.live))
            elif name == DISK:
                bare.unlink(missing_ok=True)
                settle()
                secs = together(lambda: bare_write(bare, memory))
            else:
                place = fresh(folder / f"fsdp-{count}-{name}")
                save = rival.save if name == "dcp" else durable
                secs = together(lambda place=place, save=save: save(place))
            if turn:
                found[name].append(secs)
    bare.unlink()
    loop.manager.close()
    return found, loop.part_bytes()


def measure_async(size, rounds, folder):
    """Return seconds of each call (of the slowest rank) and seconds lost per save, by contestant; neither deletes a checkpoint in that time."""
    found = {name: {"calls": [], "lost": []} for name in ("trainfold", "dcp")}
    loop = Loop(size).attach(fresh(folder / "async"), mode="async")
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


def load_mine(loop, place, *, in_place=False):
    """Return the seconds of a restore by a new manager."""
    mine = loop.attach(place)
    secs = together(lambda: mine.manager.restore(mine.live, in_place=in_place))
    mine.manager.close()
    loop.manager = None
    return secs


def measure_loads(size, rounds, folder, other):
    """Return seconds of loads, by what is loaded onto what, and contestant."""
    here = dist.get_world_size()
    cases = {
        "the same mesh": (f"fsdp-{here}", "fsdp"),
        "the same mesh, in place": (f"fsdp-{here}", "fsdp"),
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
                    secs = load_mine(loops[layout], place, in_place="in place" in case)
                if turn:
                    found[case][name].append(secs)
    return found


def measure_memory(size, name, folder):
    """Return the peak of this rank's first load above what it had, over the bytes of its part; the largest of the ranks."""
    loop = Loop(size)
    place = str(folder / f"fsdp-{dist.get_world_size()}-{'dcp' if name == 'dcp' else 'trainfold'}")
    part, rest = loop.part_bytes(), settled_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    Dcp(loop).load(place) if name == "dcp" else load_mine(loop, place, in_place=name == "in place")
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


def measure_save_rows(count, size, rounds, folder):
    """Return the rows of saves of a number of ranks."""
    saves, part = on_ranks(count, measure_saves, size, rounds, folder)
    return {"ranks": count, "part_bytes": part, "save": saves}


def judge_saves(world):
    """Return the targets and the lines of the table of saves."""
    middle, ranks, found = statistics.median, world["ranks"], world["save"]
    targets, table = [], [f"{ranks} ranks, {world['part_bytes'] / 1e6:.1f} MB a rank"]
    for name in ("dcp", "dcp, synced"):
        ratio = middle(b / a for a, b in zip(found["trainfold"], found[name], strict=True))
        targets.append(Target(f"{ranks} ranks: a save, {name} / trainfold", ratio, ">=", TARGETS["save"]))
    for name, secs in found.items():
        over = middle(a / b for a, b in zip(secs, found[DISK], strict=True))
        table.append(f"  {name:26}{1e3 * middle(secs):9.1f} ms (least {1e3 * min(secs):.1f}), {over:.2f} times {DISK}")
    return targets, table


def measure_world(count, other, size, rounds, folder):
    """Return all rows of a number of ranks; the checkpoints of both numbers are there."""
    step = on_ranks(count, measure_step, size, rounds, folder)
    saves, part = on_ranks(count, measure_saves, size, rounds, folder)
    background = on_ranks(count, measure_async, size, rounds, folder)
    loads = on_ranks(count, measure_loads, size, rounds, folder, other)
    memory = {name: on_ranks(count, measure_memory, size, name, folder) for name in ("trainfold", "dcp", "in place")}
    return {"ranks": count, "part_bytes": part, "step": step, "save": saves, "async": background, "load": loads,
            "memory": {name: each["peak_over_part"] for name, each in memory.items()}}  # fmt: skip


def judge(world):
    """Return the figures of a number of ranks, the targets and the lines of the table."""
    middle, ranks = statistics.median, world["ranks"]
    rows, steps = [], world["step"]

    def step(name, mine, plain):
        rows.append((name, 1e3 * middle(steps[mine]), 1e3 * middle(steps[plain])))
        return middle(a / b for a, b in zip(steps[mine], steps[plain], strict=True))

    attached, checked = step("a step", "attached", "plain"), step("a step that clips", "checked", "clipped")

    def row(name, found):
        rows.append((name, 1e3 * middle(found["trainfold"]), 1e3 * middle(found["dcp"])))
        return middle(a / b for a, b in zip(found["trainfold"], found["dcp"], strict=True))

    save_targets, save_lines = judge_saves(world)
    calls, lost = ({name: each[kind] for name, each in world["async"].items()} for kind in ("calls", "lost"))
    call = row("async: the call", calls)
    row("async: lost a save", lost)
    mine, other = middle(lost["trainfold"]), middle(lost["dcp"])
    lost = mine / other if min(mine, other) > 0 else 1.0  # a loss below 0 is noise, and meets nothing
    loads = {case: row(f"load: {case}", found) for case, found in world["load"].items()}
    targets = [
        Target(f"{ranks} ranks: a step, attached / plain", attached, "<=", TARGETS["step"]),
        Target(f"{ranks} ranks: a step, live.check / clipped by hand", checked, "<=", TARGETS["step"]),
        *save_targets,
        Target(f"{ranks} ranks: an async call, trainfold / DCP", call, "<=", TARGETS["call"]),
        Target(f"{ranks} ranks: lost an async save, trainfold / DCP", lost, "<=", TARGETS["lost"]),
        *(Target(f"{ranks} ranks: load, {case}, DCP / trainfold", 1 / ratio, ">=", TARGETS["load"]) for case, ratio in loads.items()),
        Target(f"{ranks} ranks: peak of a load / a rank's part", world["memory"]["trainfold"], "<=", TARGETS["memory"]),
        Target(f"{ranks} ranks: peak of a load in place / a rank's part", world["memory"]["in place"], "<=", TARGETS["in place"]),
    ]  # fmt: skip
    table = [
        *save_lines,
        f"  {'':26}{'trainfold':>12}{'DCP (step: plain)':>20}",
        *(f"  {name:26}{mine:9.1f} ms{other:17.1f} ms" for name, mine, other in rows),
        f"  {'peak of a load, x its part':26}{world['memory']['trainfold']:12.2f}{world['memory']['dcp']:20.2f}",
        f"  {'in place':26}{world['memory']['in place']:12.2f}",
    ]
    return targets, table


def main():
    """Run it."""
    parser = make_parser(__doc__, quick="1 MB, one round on 2 ranks, and the checkpoint of 3 ranks")
    parser.add_argument("--size", choices=SIZES, default="100MB")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["saves"], help="leave out steps, async saves, loads and memory")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="a place on the filesystem to measure")
    options = parser.parse_args()
    size, rounds, counts = ("1MB", 1, [2]) if options.quick else (options.size, options.rounds, options.ranks)
    around = machine()
    others = {count: counts[1 - index] if len(counts) == 2 else count + 1 for index, count in enumerate(counts)}
    with tempfile.TemporaryDirectory(dir=options.directory, prefix=".bench-") as directory:
        folder = Path(directory)
        for count in sorted({*others.values()}) if options.only is None else ():
            on_ranks(count, save_once, size, "fsdp", folder)
        for count in counts if options.only is None else ():
            on_ranks(count, save_once, size, "tp", folder)
        worlds, judged = [], []
        for count in counts:
            if options.only == "saves":
                worlds.append(measure_save_rows(count, size, rounds, folder))
                judged.append(judge_saves(worlds[-1]))
            else:
                worlds.append(measure_world(count, others[count], size, rounds, folder))
                judged.append(judge(worlds[-1]))
            print(*judged[-1][1], sep="\n", file=sys.stderr, flush=True)
    table = [f"{size} of state, medians of {rounds} rounds, load {around['load']} at the start"]
    targets = [target for each, _ in judged for target in each]
    found = {"machine": around, "size": size, "rounds": rounds, "rows": worlds}
    return finish(options, found, targets, [*table, *(line for _, each in judged for line in each)])


if __name__ == "__main__":
    sys.exit(main())
