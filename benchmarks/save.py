"""Saving and loading a state: native files beside the raw disk, memcpy, and the usual ways to save.

Every round runs each contestant once, in an order that changes, because disks throttle: compare ratios of one round,
not numbers of two runs. What is reported are medians over the rounds of (this contestant / its yardstick).

    python benchmarks/save.py [--size-mb 1000] [--rounds 5] [--quick] [--json] [--directory DIR]
"""

import argparse
import ctypes
import gc
import json
import mmap
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from trainfold.backends.local import LocalStore
from trainfold.backends.native_reader import ReadRequest, read_tensors
from trainfold.backends.native_writer import WrittenFile, write_file
from trainfold.core.save_plan import FilePlan, plan_save
from trainfold.core.structure import describe

CHUNK_BYTES = 16 << 20
TRIM = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
Tensors = dict[str, torch.Tensor]


def make_tensors(size_mb: int) -> Tensors:
    """Random weights like a model's: matrices of 16 MB with small vectors between them."""
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    for layer in range(max(1, size_mb // 16)):
        tensors[f"h.{layer:03d}.weight"] = torch.randn(2000, 2000, generator=generator)
        tensors[f"h.{layer:03d}.bias"] = torch.randn(2000, generator=generator)
    return tensors


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of a call; CPU of all threads, the kernel's included."""
    gc.collect()
    TRIM(0)  # freed memory goes back, so that fresh pages are fresh for everyone
    cpu, start = time.process_time(), time.perf_counter()
    work()
    return time.perf_counter() - start, time.process_time() - cpu


def sync(path: Path) -> None:
    """What durable means for those who only write: sync each file and each directory."""
    for each in [path, *path.rglob("*"), path.parent] if path.is_dir() else [path, path.parent]:
        fd = os.open(each, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def write_raw(path: Path, size_bytes: int, *, in_flight: int) -> None:
    """The ceiling: O_DIRECT writes of a ready buffer, some of them in flight at once, and fsync."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError:
        fd = os.open(path, flags, 0o644)
    os.posix_fallocate(fd, 0, size_bytes)

    def write(offset: int) -> None:
        os.pwrite(fd, READY[: min(CHUNK_BYTES, -(-(size_bytes - offset) // 4096) * 4096)], offset)

    with ThreadPoolExecutor(in_flight) as pool:
        list(pool.map(write, range(0, size_bytes, CHUNK_BYTES)))
    os.fsync(fd)
    os.close(fd)


def ready_buffer() -> memoryview:
    """Random bytes in aligned memory of large pages, like the writer's own buffers."""
    memory = mmap.mmap(-1, CHUNK_BYTES)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(np.random.default_rng(0).bytes(CHUNK_BYTES))
    return memoryview(memory)


READY = ready_buffer()


def write_native(path: Path, tensors: Tensors, file: FilePlan) -> WrittenFile:
    """Durable, checksummed and committed."""
    store = LocalStore(path)
    written = write_file(file, tensors, store=store, directory="step-00000001")
    store.commit("step-00000001/manifest.json", json.dumps(dict(written.tensor_digests)).encode())
    return written


def write_torch(path: Path, tensors: Tensors) -> None:
    """torch.save and fsync."""
    torch.save(tensors, path)
    sync(path)


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """safetensors.torch.save_file and fsync."""
    safetensors.torch.save_file(tensors, path)
    sync(path)


def write_dcp(path: Path, tensors: Tensors) -> None:
    """torch.distributed.checkpoint.save, which syncs its files by itself; the directory is synced here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(tensors), checkpoint_id=str(path), no_dist=True)
    sync(path)


def run_saves(directory: Path, tensors: Tensors, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds (wall, CPU) of every contestant in every round."""
    described, leaves = describe(dict(tensors), "model")
    (file,) = plan_save([{"model": described}], step=1).files
    contestants: dict[str, Callable[[Path], object]] = {
        "raw, 1 in flight": lambda path: write_raw(path, file.size_bytes, in_flight=1),
        "raw, 2 in flight": lambda path: write_raw(path, file.size_bytes, in_flight=2),
        "native": lambda path: write_native(path, leaves, file),
        "torch.save": lambda path: write_torch(path, tensors),
        "dcp.save": lambda path: write_dcp(path, tensors),
        "safetensors": lambda path: write_safetensors(path, tensors),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        # shuffled, not turned: what a disk gives depends on who wrote just before
        for name in random.Random(turn).sample(list(contestants), len(contestants)):
            path = directory / f"save-{name}"
            found = timed(lambda path=path, name=name: contestants[name](path))
            if turn:  # the first round warms up
                seconds[name].append(found)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()  # nobody pays for another's removal
    return seconds


def run_loads(directory: Path, tensors: Tensors, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds (wall, CPU) of verified loads from the page cache, and of memcpy into the same kind of memory."""
    described, leaves = describe(dict(tensors), "model")
    (file,) = plan_save([{"model": described}], step=1).files
    written = write_native(directory / "load", leaves, file)
    store = LocalStore(directory / "load")
    (directory / "load/step-00000001" / file.name).read_bytes()  # into the page cache

    def requests(out: Tensors | None) -> list[ReadRequest]:
        return [
            ReadRequest(
                f"step-00000001/{file.name}", t.start, t.stop, t.dtype, t.stored, t.shape,
                written.tensor_digests[t.path], t.path, None if out is None else out[t.path],
            )
            for t in file.tensors
        ]  # fmt: skip

    live = {path: torch.zeros_like(tensor) for path, tensor in leaves.items()}
    flat = {path: tensor.numpy() for path, tensor in leaves.items()}

    def copy_live() -> None:
        for path, source in flat.items():
            np.copyto(live[path].numpy(), source)

    def copy_fresh() -> list[torch.Tensor]:
        fresh = [torch.empty_like(tensor) for tensor in leaves.values()]
        for tensor, source in zip(fresh, flat.values(), strict=True):
            np.copyto(tensor.numpy(), source)
        return fresh

    contestants: dict[str, Callable[[], object]] = {
        "memcpy, fresh": copy_fresh,
        "load, fresh": lambda: read_tensors(store, requests(None)),
        "memcpy, live": copy_live,
        "load, live": lambda: read_tensors(store, requests(live)),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, work in contestants.items():
            found = timed(work)
            if turn:
                seconds[name].append(found)
    assert all(torch.equal(live[path], tensor) for path, tensor in leaves.items())
    shutil.rmtree(directory / "load")
    return seconds


def ratios(seconds: dict[str, list[tuple[float, float]]], yardstick: str, name: str) -> float:
    """The median over the rounds of yardstick / contestant: above 1 is faster than the yardstick."""
    return statistics.median(y[0] / s[0] for y, s in zip(seconds[yardstick], seconds[name], strict=True))


def main() -> None:
    """Run the rounds and print the table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="64 MB and 2 rounds: only to see that it runs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="a place on the filesystem to measure")
    args = parser.parse_args()
    size_mb, rounds = (64, 2) if args.quick else (args.size_mb, args.rounds)
    tensors = make_tensors(size_mb)
    size_gb = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
    with tempfile.TemporaryDirectory(dir=args.directory, prefix=".bench-") as directory:
        seconds = run_saves(Path(directory), tensors, rounds) | run_loads(Path(directory), tensors, rounds)
    rows = {
        name: {
            "gb_per_sec": size_gb / statistics.median(wall for wall, _ in runs),
            "cpu_secs_per_gb": statistics.median(cpu for _, cpu in runs) / size_gb,
        }
        for name, runs in seconds.items()
    }
    found = {
        "native / raw ceiling": (min(ratios(seconds, f"raw, {n} in flight", "native") for n in (1, 2)), 0.85),
        "native / torch.save": (ratios(seconds, "torch.save", "native"), 1.0),
        "native / dcp.save": (ratios(seconds, "dcp.save", "native"), 1.0),
        "native / safetensors": (ratios(seconds, "safetensors", "native"), 1.0),
        "0.5 CPU-s per GB / native": (0.5 / rows["native"]["cpu_secs_per_gb"], 1.0),
        "verified load / memcpy, fresh pages": (ratios(seconds, "memcpy, fresh", "load, fresh"), 0.5),
        "verified load / memcpy, live memory": (ratios(seconds, "memcpy, live", "load, live"), 0.5),
    }
    if args.json:
        targets = {name: {"ratio": ratio, "target": target} for name, (ratio, target) in found.items()}
        print(json.dumps({"size_gb": size_gb, "rounds": rounds, "rows": rows, "targets": targets}, indent=1))
        return
    print(f"{size_gb:.2f} GB, medians of {rounds} interleaved rounds")
    for name, row in rows.items():
        print(f"  {name:16} {row['gb_per_sec']:6.2f} GB/s  {row['cpu_secs_per_gb']:5.2f} CPU-s/GB")
    for name, (ratio, target) in found.items():
        print(f"  {name:38} {ratio:5.2f}  (target >= {target})  {'ok' if ratio >= target else 'MISSED'}")


if __name__ == "__main__":
    main()
