"""Saving and loading a training state: trainfold beside the raw disk, memcpy, and the usual ways to save.

``trainfold.save`` and ``trainfold.load`` are timed as a whole, as a user calls them: describe, plan, lock, reserve, write,
check, commit the manifest; read the run and its manifest, plan, allocate, read, verify, rebuild. "files only" and "read"
are their inner parts: prepared requests, and a stub of a manifest. Only they can load into live memory, because
``trainfold.load`` always allocates. Loads are compared with a memcpy by one thread; the reader has two threads, and
hashes. Every save writes a new step into an existing run; the old step is deleted outside the timed part.

Every round runs each contestant once, in a newly shuffled order, because disks throttle: compare ratios within a round, not
numbers of two runs. The targets are medians over the rounds of (time of the reference / time of the contestant).

    python benchmarks/save.py [--size-mb 1000] [--rounds 5] [--quick] [--json] [--check] [--directory DIR]
"""

import ctypes
import gc
import itertools
import json
import math
import mmap
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from _targets import Target, finish, machine, make_parser

import trainfold
from trainfold.backends.formats.native.reader import ReadRequest, read_tensors
from trainfold.backends.formats.native.writer import write_file
from trainfold.backends.stores.local import LocalStore
from trainfold.core.format.structure.describe import describe
from trainfold.core.save.save_plan import SavePlan, plan_save
from trainfold.core.save.written import WrittenFile
from trainfold.core.state.components import components_of
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, OptimizerState, ParamGroup, Progress, TrainState

RAW = {  # contestant: (bytes per write, writes in flight); the fastest of them is the ceiling
    "raw, 16 MB x 1": (16 << 20, 1),
    "raw, 8 MB x 2": (8 << 20, 2),
    "raw, 8 MB x 4": (8 << 20, 4),
}
TRIM = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
MINE = ("trainfold.save", "files only")
Tensors = dict[str, torch.Tensor]
Seconds = dict[str, list[tuple[float, float]]]


def make_state(size_mb: int) -> TrainState:
    """A model with its AdamW: random matrices of 16 MB (1 MB for a small state) with small vectors between them."""
    width = 2000 if size_mb >= 480 else 500
    generator = torch.Generator().manual_seed(0)
    params: Tensors = {}
    for layer in range(math.ceil(size_mb * 1e6 / (3 * 4 * width * (width + 1)))):
        params[f"h.{layer:03d}.weight"] = torch.randn(width, width, generator=generator)
        params[f"h.{layer:03d}.bias"] = torch.randn(width, generator=generator)
    slots = {
        name: {
            "step": torch.tensor(1.0),
            "exp_avg": torch.randn(value.shape, generator=generator),
            "exp_avg_sq": torch.randn(value.shape, generator=generator),
        }
        for name, value in params.items()
    }
    group = ParamGroup({"lr": 3e-4, "betas": (0.9, 0.999), "weight_decay": 0.1}, tuple(params))
    optimizer = OptimizerState("torch.optim.adamw.AdamW", Leaves(slots), (group,))
    return TrainState(model=ModelState(Leaves(params), Leaves()), optimizer=optimizer, trainer=Progress(step=1))


def flat_tensors(state: TrainState) -> Tensors:
    """Return all tensors of the state by path, as the rivals save them."""
    return {
        path: leaf
        for name, component in components_of(state).items()
        for path, leaf in describe(component, name)[1].items()
    }


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return wall and CPU seconds of a call; CPU time of all threads, including the kernel's."""
    gc.collect()
    TRIM(0)  # return freed memory, so that every contestant starts with fresh pages
    cpu, start = time.process_time(), time.perf_counter()
    held = work()
    secs = time.perf_counter() - start, time.process_time() - cpu
    del held  # freeing memory is not timed
    return secs


def sync(path: Path) -> None:
    """Make the files of a contestant that only writes durable: sync each file and each directory."""
    for each in [path, *path.rglob("*"), path.parent] if path.is_dir() else [path, path.parent]:
        fd = os.open(each, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def write_raw(path: Path, size_bytes: int, *, chunk_bytes: int, in_flight: int) -> None:
    """Write the ceiling: O_DIRECT writes of a prepared buffer, several in flight at once, and fsync."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError:
        fd = os.open(path, flags, 0o644)
    os.posix_fallocate(fd, 0, size_bytes)

    def write(offset: int) -> None:
        os.pwrite(fd, READY[: min(chunk_bytes, -(-(size_bytes - offset) // 4096) * 4096)], offset)

    with ThreadPoolExecutor(in_flight) as pool:
        list(pool.map(write, range(0, size_bytes, chunk_bytes)))
    os.fsync(fd)
    os.close(fd)


def ready_buffer() -> memoryview:
    """Return random bytes in aligned memory of large pages, like the buffers of the writer."""
    size_bytes = max(chunk_bytes for chunk_bytes, _ in RAW.values())
    memory = mmap.mmap(-1, size_bytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(np.random.default_rng(0).bytes(size_bytes))
    return memoryview(memory)


READY = ready_buffer()


class Files:
    """The inner part of a save and of a load: the data files, with a prepared plan and requests."""

    def __init__(self, state: TrainState) -> None:
        pairs = {name: describe(component, name) for name, component in components_of(state).items()}
        self.plan: SavePlan = plan_save([{name: said for name, (said, _) in pairs.items()}], step=1)
        self.leaves = {name: tensors for name, (_, tensors) in pairs.items()}
        self.written: dict[str, WrittenFile] = {}

    def write(self, path: Path) -> None:
        """Write the files, durable and with checksums, and commit them with a stub of a manifest."""
        store = LocalStore(path)
        for file in self.plan.files:
            (name,) = file.components
            self.written[file.name] = write_file(file, self.leaves[name], store=store, directory=self.plan.directory)
        digests = {name: [part.digest for part in written.parts] for name, written in self.written.items()}
        store.commit(f"{self.plan.directory}/manifest.json", json.dumps(digests).encode())

    def requests(self, outs: Mapping[str, torch.Tensor] | None) -> list[ReadRequest]:
        """Return requests for every tensor of the step that `write` wrote."""
        return [
            ReadRequest(
                f"{self.plan.directory}/{file.name}", t.start, t.stop, t.dtype, t.stored, t.shape,
                part.digest, t.path, None if outs is None else outs[t.path],
            )
            for file in self.plan.files
            for t, part in zip(file.tensors, self.written[file.name].parts, strict=True)
        ]  # fmt: skip


def write_torch(path: Path, tensors: Tensors) -> None:
    """torch.save and fsync."""
    torch.save(tensors, path)
    sync(path)


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """safetensors.torch.save_file and fsync."""
    safetensors.torch.save_file(tensors, path)
    sync(path)


def write_dcp(path: Path, tensors: Tensors) -> None:
    """torch.distributed.checkpoint.save, which syncs its files itself; the directory is synced here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(tensors), checkpoint_id=str(path), no_dist=True)
    sync(path)


def run_saves(directory: Path, state: TrainState, rounds: int) -> Seconds:
    """Return the seconds (wall, CPU) of every contestant in every round."""
    files, tensors = Files(state), flat_tensors(state)
    size_bytes = sum(file.size_bytes for file in files.plan.files)
    run, steps = directory / "run", itertools.count(1)
    trainfold.save(state.evolve(trainer=Progress(step=0)), run, components=["trainer"])  # makes the run

    contestants: dict[str, Callable[[Path, TrainState], object]] = {
        **{
            name: lambda path, _, how=how: write_raw(path, size_bytes, chunk_bytes=how[0], in_flight=how[1])
            for name, how in RAW.items()
        },
        "trainfold.save": lambda _, now: trainfold.save(now, run),
        "files only": lambda path, _: files.write(path),
        "torch.save": lambda path, _: write_torch(path, tensors),
        "dcp.save": lambda path, _: write_dcp(path, tensors),
        "safetensors": lambda path, _: write_safetensors(path, tensors),
    }
    seconds: Seconds = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name in shuffled(contestants, turn):
            step, path = next(steps), directory / f"save-{name}"
            work = partial(contestants[name], path, state.evolve(trainer=Progress(step=step)))
            found = timed(work)
            if turn:  # the first round warms up
                seconds[name].append(found)
            for old in (path, run / f"step-{step:08d}"):
                shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
            os.sync()  # no contestant pays for the removal of another's files
    shutil.rmtree(run)
    return seconds


def run_loads(directory: Path, state: TrainState, rounds: int) -> tuple[Seconds, bool]:
    """Return the seconds (wall, CPU) of verified loads from the page cache and of memcpy, and whether each loaded the same bits."""
    files, tensors = Files(state), flat_tensors(state)
    run, inner = directory / "run", directory / "files"
    trainfold.save(state, run)
    files.write(inner)
    for file in [*run.rglob("*.safetensors"), *inner.rglob("*.safetensors")]:
        file.read_bytes()  # into the page cache
    store = LocalStore(inner)
    live = {path: torch.zeros_like(tensor) for path, tensor in tensors.items()}
    flat = {path: tensor.numpy() for path, tensor in tensors.items()}

    def copy_live() -> None:
        for path, source in flat.items():
            np.copyto(live[path].numpy(), source)

    def copy_fresh() -> list[torch.Tensor]:
        fresh = [torch.empty_like(tensor) for tensor in tensors.values()]
        for tensor, source in zip(fresh, flat.values(), strict=True):
            np.copyto(tensor.numpy(), source)
        return fresh

    contestants: dict[str, Callable[[], object]] = {
        "memcpy, fresh": copy_fresh,
        "trainfold.load": lambda: trainfold.load(run, like=state),
        "read, fresh": lambda: read_tensors(store, files.requests(None)),
        "memcpy, live": copy_live,
        "read, live": lambda: read_tensors(store, files.requests(live)),
    }
    seconds: Seconds = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name in shuffled(contestants, turn):
            found = timed(contestants[name])
            if turn:
                seconds[name].append(found)
    for tensor in live.values():
        tensor.zero_()
    contestants["read, live"]()
    same = all(equal(mine, tensors) for mine in (live, flat_tensors(trainfold.load(run, like=state))))
    shutil.rmtree(run)
    shutil.rmtree(inner)
    return seconds, same


def shuffled(contestants: Mapping[str, Any], turn: int) -> list[str]:
    """Return the order of a round; shuffled, not rotated, because the speed of a disk depends on the contestant before."""
    return random.Random(turn).sample(list(contestants), len(contestants))


def equal(mine: Tensors, theirs: Tensors) -> bool:
    """Whether two mappings have the same tensors under the same names."""
    return mine.keys() == theirs.keys() and all(torch.equal(mine[path], theirs[path]) for path in mine)


def speedup(seconds: Seconds, yardstick: str, name: str) -> float:
    """Return the median over the rounds of (time of the reference / time of the contestant): above 1 is faster."""
    return statistics.median(y[0] / s[0] for y, s in zip(seconds[yardstick], seconds[name], strict=True))


def main() -> int:
    """Run the rounds and print the table or JSON."""
    parser = make_parser(__doc__, quick="16 MB and 2 rounds")
    parser.add_argument("--size-mb", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="a place on the filesystem to measure")
    options = parser.parse_args()
    size_mb, rounds = (16, 2) if options.quick else (options.size_mb, options.rounds)
    around = machine()
    state = make_state(size_mb)
    size_gb = sum(tensor.nbytes for tensor in flat_tensors(state).values()) / 1e9
    with tempfile.TemporaryDirectory(dir=options.directory, prefix=".bench-") as directory:
        saves = run_saves(Path(directory), state, rounds)
        loads, same = run_loads(Path(directory), state, rounds)
    seconds = saves | loads
    rows = {
        name: {
            "gb_per_sec": size_gb / statistics.median(wall for wall, _ in runs),
            "cpu_secs_per_gb": statistics.median(cpu for _, cpu in runs) / size_gb,
            "secs": [wall for wall, _ in runs],
        }
        for name, runs in seconds.items()
    }
    raw = {mine: min(speedup(seconds, name, mine) for name in RAW) for mine in MINE}
    rivals = {name: speedup(seconds, name, "trainfold.save") for name in ("torch.save", "dcp.save", "safetensors")}
    targets = [
        Target("trainfold.save / raw ceiling", raw["trainfold.save"], ">=", 0.85),
        *(Target(f"trainfold.save / {name}", ratio, ">", 1.0) for name, ratio in rivals.items()),
        Target("trainfold.save, CPU-s per GB", rows["trainfold.save"]["cpu_secs_per_gb"], "<=", 0.5),
        Target(
            "trainfold.load / memcpy into fresh pages", speedup(seconds, "memcpy, fresh", "trainfold.load"), ">=", 0.5
        ),
        Target("read_tensors(out=) / memcpy, live memory", speedup(seconds, "memcpy, live", "read, live"), ">=", 0.5),
    ]
    inner = {
        "files only / raw ceiling": raw["files only"],
        "trainfold.save / files only": speedup(seconds, "files only", "trainfold.save"),
        "read, fresh / memcpy into fresh pages": speedup(seconds, "memcpy, fresh", "read, fresh"),
        "trainfold.load / read, fresh": speedup(seconds, "read, fresh", "trainfold.load"),
    }
    found = {"machine": around, "size_gb": size_gb, "rounds": rounds, "rows": rows, "inner": inner, "same_bits": same}

    table = [
        f"{size_gb:.2f} GB, medians of {rounds} shuffled rounds, load {around['load']} at the start",
        *(
            f"  {name:16} {row['gb_per_sec']:6.2f} GB/s  {row['cpu_secs_per_gb']:5.2f} CPU-s/GB"
            for name, row in rows.items()
        ),
        *(f"  {name:56} {ratio:9.4g}" for name, ratio in inner.items()),
        f"  same bits loaded: {'yes' if same else 'NO'}",
    ]
    return finish(options, found, targets, table)


if __name__ == "__main__":
    sys.exit(main())
