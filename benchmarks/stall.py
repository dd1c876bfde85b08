"""The cost of saves to the training loop: lost wall time, the call, the longest step, memory; trainfold beside the usual ways to save.

The cost of a save is the wall time that the run loses: (time with K saves - time without) / K. Each contestant trains a
block of steps with K saves and waits for the last save. The block runs between two blocks of the same loop without saves, and is
compared with their mean; a contestant with its own loop runs between blocks of that loop. Blocks alternate in one process, in a
newly shuffled order each round, because machines and disks throttle: compare figures of one run. All contestants use the same
loop, model and fused AdamW. Every contestant is durable at the end of its block. If a rival does not sync its files, they are
synced here: in its time if it saves in the foreground, and after the block, in its favour, if it saves in the background.

Memory is measured in a separate process, by a thread that reads the resident set every millisecond: the peak during saves and
the memory that remains afterwards, minus that of the loop without saves.

    python benchmarks/stall.py [--quick] [--json] [--check] [--size 300MB] [--rounds 4] [--directory DIR] [--only NAME ...]
"""

import argparse
import ctypes
import gc
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _targets import Target, finish, machine, make_parser
from step import GPT, loss_fn, status_bytes
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import trainfold
from trainfold.core import tree

SIZES = {  # name: (width, blocks, vocabulary, sequence length, batch size, steps between saves)
    "2MB": (64, 2, 512, 16, 4, 3),
    "300MB": (512, 6, 12288, 32, 8, 6),
    "1GB": (1024, 6, 12288, 32, 8, 6),
}
SAVES = 3  # per block
RIVALS = ("torch.save", "dcp.save", "dcp thread", "dcp process", "torch_checkpointing")
MINE = ("trainfold", "trainfold, 0 extra", "trainfold, state")
TARGETS = {"call_ms": 2.0, "lost": 1 / 3, "longest": 1.15, "memory": 1.0}


class Loop:
    """A model, its fused AdamW, and random batches."""

    def __init__(self, size):
        width, blocks, vocabulary, length, samples, self.every = SIZES[size]
        torch.manual_seed(0)
        self.model = GPT(width, blocks, vocabulary, length).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        tokens = torch.randint(vocabulary, (8, samples, length + 1))
        self.batches = [{"x": part[:, :-1].contiguous(), "y": part[:, 1:].contiguous()} for part in tokens]
        self.count = 0
        self.train()  # so that the optimizer has its state

    def train(self, update=None):
        """Do one step; the update runs inside a context."""
        loss = loss_fn(self.model, self.batches[self.count % len(self.batches)])
        (loss.sum / loss.weight).backward()
        with update or nullcontext():
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.count += 1

    def state_dict(self):
        """Return the state that the rivals save."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Trainfold:
    """The manager on the mutable loop."""

    is_own_loop = False

    def __init__(self, loop, folder, **options):
        self.loop = loop
        self.live = trainfold.attach(loop.model, loop.optimizer)
        self.manager = trainfold.CheckpointManager(folder, mode="async", **options)

    def train(self):
        """Do one step, count it, and poll the save under way, like a loop that asks whether to save."""
        self.loop.train()
        self.live.advance(samples=1)
        self.manager.poll()

    def save(self):
        """Save."""
        self.manager.save(self.live)

    def drain(self):
        """Wait."""
        self.manager.drain()

    def close(self):
        """End."""
        self.manager.close()


class Fold:
    """The manager on states of a donating step, whose steps are compared with the same steps without saves."""

    is_own_loop = True

    def __init__(self, loop, folder):
        self.loop = loop
        adamw = trainfold.optimizer(torch.optim.AdamW, lr=3e-4, fused=True)
        self.state = trainfold.init_state(loop.model, adamw)
        self.step = trainfold.make_step(loop.model, loss_fn, adamw, donate=True)
        self.manager = trainfold.CheckpointManager(folder, mode="async")
        self.train()

    def train(self):
        """Do one step, and poll the save under way."""
        self.state, _ = self.step(self.state, self.loop.batches[self.loop.count % len(self.loop.batches)])
        self.loop.count += 1
        self.manager.poll()

    def save(self):
        """Save."""
        self.manager.save(self.state)

    def drain(self):
        """Wait."""
        self.manager.drain()

    def close(self):
        """End."""
        self.manager.close()


class Rival:
    """A rival's save; `write` saves, and returns what to wait for."""

    is_own_loop = False

    def __init__(self, loop, folder):
        self.loop, self.folder, self.pending = loop, folder, None

    def train(self):
        """One step."""
        self.loop.train()

    def save(self):
        """Save, after the previous save has ended: every rival has one save at a time."""
        self.drain()
        self.pending = self.write(self.folder / f"step-{self.loop.count:08d}")

    def drain(self):
        """Wait."""
        if self.pending is not None:
            self.pending.result()
        self.pending = None

    def close(self):
        """End."""


class TorchSave(Rival):
    """torch.save and fsync."""

    def write(self, path):
        """In the foreground."""
        torch.save(self.loop.state_dict(), path)
        sync(path)


class DcpSave(Rival):
    """torch.distributed.checkpoint.save, which syncs its files; the directory is synced here."""

    def write(self, path):
        """In the foreground."""
        dcp.save(self.loop.state_dict(), checkpoint_id=str(path))
        sync(path)


class DcpThread(Rival):
    """torch.distributed.checkpoint.async_save with a thread."""

    def write(self, path):
        """In the background."""
        return dcp.async_save(self.loop.state_dict(), checkpoint_id=str(path))


class DcpProcess(Rival):
    """torch.distributed.checkpoint.async_save with a process."""

    def write(self, path):
        """In the background."""
        kind = AsyncCheckpointerType.PROCESS
        return dcp.async_save(self.loop.state_dict(), checkpoint_id=str(path), async_checkpointer_type=kind)


class TorchCheckpointing(Rival):
    """torch_checkpointing's manager, with its options for a CPU."""

    def __init__(self, loop, folder):
        super().__init__(loop, folder)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        self.manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=staging),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def train(self):
        """Do one step, whose update waits for the copy to end."""
        self.loop.train(self.manager.lock())

    def write(self, path):
        """In the background."""
        return self.manager.save(str(path), self.loop.state_dict())

    def close(self):
        """End."""
        self.manager.close()


CONTESTANTS = {
    "trainfold": Trainfold,
    "trainfold, 0 extra": lambda loop, folder: Trainfold(loop, folder, max_extra_bytes=0),
    "trainfold, state": Fold,
    "torch.save": TorchSave,
    "dcp.save": DcpSave,
    "dcp thread": DcpThread,
    "dcp process": DcpProcess,
    "torch_checkpointing": TorchCheckpointing,
}


def sync(path):
    """Make the files of a contestant that only writes durable: sync each file and each directory."""
    for each in [path, *path.rglob("*"), path.parent] if path.is_dir() else [path, path.parent]:
        fd = os.open(each, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def block(loop, contestant, *, saves):
    """Train with `SAVES` saves or without; return the seconds of the block, of each call and of each step."""
    calls, steps = [], []
    train = contestant.train if saves or contestant.is_own_loop else loop.train
    gc.collect()
    os.sync()  # no contestant pays for what another has left in the page cache
    begin = time.perf_counter()
    for index in range(SAVES * loop.every):
        start = time.perf_counter()
        train()
        if saves and index % loop.every == 0:
            called = time.perf_counter()
            contestant.save()
            calls.append(time.perf_counter() - called)
        steps.append(time.perf_counter() - start)
    if saves:
        contestant.drain()
    return time.perf_counter() - begin, calls, steps


def empty(folder):
    """Remove the checkpoints and keep the run."""
    for path in folder.iterdir():
        if path.name.startswith("step-"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def run_rounds(size, names, rounds, directory):
    """Return for each contestant and round: seconds lost per save, seconds of the calls, longest step / median step without saves."""
    found = {name: {"lost": [], "calls": [], "longest": [], "longest_without": []} for name in names}
    plain_steps = []
    loop = Loop(size)
    made = {}
    for name in names:
        folder = directory / name.replace(" ", "-").replace(",", "")
        folder.mkdir()
        made[name] = CONTESTANTS[name](loop, folder), folder
    for turn in range(rounds + 1):
        before, was_own_loop = None, None
        for name in random.Random(turn).sample(names, len(names)):
            contestant, folder = made[name]
            if before is None or contestant.is_own_loop or was_own_loop:
                before = block(loop, contestant, saves=False)
            whole, calls, steps = block(loop, contestant, saves=True)
            empty(folder)
            after, was_own_loop = block(loop, contestant, saves=False), contestant.is_own_loop
            if turn or not rounds:  # the first round warms up
                usual = statistics.median(before[2] + after[2])
                found[name]["lost"].append((whole - (before[0] + after[0]) / 2) / SAVES)
                found[name]["calls"] += calls
                found[name]["longest"].append(max(steps) / usual)
                found[name]["longest_without"].append(max(before[2] + after[2]) / usual)
                plain_steps += after[2]
            before = after
    for contestant, _ in made.values():
        contestant.close()
    state_bytes = sum(t.nbytes for t in tree.leaves(loop.state_dict()) if isinstance(t, torch.Tensor))
    median = statistics.median(plain_steps)
    return found, {
        "size": size,
        "state_bytes": state_bytes,
        "step_secs": median,
        "longest_without": statistics.median(x for each in found.values() for x in each["longest_without"]),
    }


class Watch:
    """The peak of the resident set, read every millisecond."""

    def __enter__(self):
        self.peak, self.ends = 0, False
        self.thread = threading.Thread(target=self._look)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ends = True
        self.thread.join()

    def _look(self):
        with Path("/proc/self/statm").open("rb", buffering=0) as statm:
            while not self.ends:
                statm.seek(0)
                self.peak = max(self.peak, int(statm.read().split()[1]) * 4096)
                time.sleep(0.001)


def settled_bytes():
    """Return the resident set without the free memory of malloc, which is up to 150 MB after a step, and varies at random."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status_bytes("VmRSS")


def measure_memory(size, max_extra_bytes, saves, directory):
    """Measure in this process: the peak of the saves above that of the loop alone, what remains, and what 1,000 small saves leave."""
    loop = Loop(size)
    for _ in range(4):
        loop.train()
    with Watch() as plain:
        for _ in range(2 * loop.every):
            loop.train()
    rest = settled_bytes()
    contestant = Trainfold(loop, directory, max_extra_bytes=max_extra_bytes, keep_last=1)
    contestant.train()
    with Watch() as watch:
        for _ in range(saves):
            contestant.save()
            for _ in range(loop.every):
                contestant.train()
    contestant.drain()
    stays = settled_bytes()
    contestant.close()
    return {"peak_bytes": watch.peak - plain.peak, "stays_bytes": stays - rest}


def memory_of(size, max_extra_bytes, saves, directory):
    """Run `measure_memory` in a separate process."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        command = [sys.executable, __file__, "--measure-memory", str(max_extra_bytes), "--size", size]
        done = subprocess.run(
            [*command, "--saves", str(saves), "--directory", folder], check=True, capture_output=True, text=True
        )
    peak, stays = map(int, done.stdout.split()[-2:])
    return {"peak_bytes": peak, "stays_bytes": stays}


def memory_here(size, max_extra_bytes, _saves, directory):
    """Run `measure_memory` of one save in this process, after other loops: it checks that it runs; its figures mean nothing."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        return measure_memory(size, max_extra_bytes, 1, Path(folder))


def main():
    """Run the rounds and print the table or JSON."""
    parser = make_parser(__doc__, quick="2 MB, one cold round, and all memory measured in one process")
    parser.add_argument("--size", choices=SIZES, default="300MB")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="*", choices=CONTESTANTS)
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="a place on the filesystem to measure")
    parser.add_argument("--measure-memory", help=argparse.SUPPRESS)
    parser.add_argument("--saves", type=int, default=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    size, rounds = ("2MB", 0) if options.quick else (options.size, options.rounds)
    if options.measure_memory is not None:
        room = None if options.measure_memory == "None" else int(options.measure_memory)
        found = measure_memory(options.size, room, options.saves, options.directory)
        print(found["peak_bytes"], found["stays_bytes"])
        return 0
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    store = dist.TCPStore("localhost", 0, 1, is_master=True)
    os.environ["MASTER_PORT"] = str(store.port)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    around, names = machine(), list(options.only or CONTESTANTS)
    with tempfile.TemporaryDirectory(dir=options.directory, prefix=".bench-") as directory:
        found, facts = run_rounds(size, names, rounds, Path(directory))
        bound = max(48 << 20, facts["state_bytes"] // 3)
        measured = memory_here if options.quick else memory_of
        memory = {
            "all that it wants": measured(size, None, 4, directory),
            "a third": {**measured(size, bound, 4, directory), "bound_bytes": bound},
            "1,000 small saves": measured("2MB", None, 1000, directory),
        }
    dist.destroy_process_group()
    rows = {
        name: {
            "lost_ms": 1e3 * statistics.median(each["lost"]),
            "call_ms": 1e3 * statistics.median(each["calls"]),
            "longest_call_ms": 1e3 * max(each["calls"]),
            "longest_step": statistics.median(each["longest"]),
            "lost_secs": each["lost"],
        }
        for name, each in found.items()
    }
    rivals = [rows[name]["lost_ms"] for name in RIVALS if name in rows]
    targets = []
    for name in (each for each in MINE if each in rows and each != "trainfold, 0 extra"):
        targets.append(Target(f"{name}: call, ms", rows[name]["call_ms"], "<=", TARGETS["call_ms"]))
        targets.append(
            Target(f"{name}: longest step / median without", rows[name]["longest_step"], "<=", TARGETS["longest"])
        )
        if rivals:
            ratio = max(rows[name]["lost_ms"], 1e-3) / min(rivals)
            targets.append(Target(f"{name}: lost a save / best rival's", ratio, "<=", TARGETS["lost"]))
    state_bytes = facts["state_bytes"]
    targets += [
        Target(
            "extra memory / state", memory["all that it wants"]["peak_bytes"] / state_bytes, "<=", TARGETS["memory"]
        ),
        Target("extra memory / max_extra_bytes", memory["a third"]["peak_bytes"] / bound, "<=", 1.05),
        Target("memory that stays, MB", memory["all that it wants"]["stays_bytes"] / 1e6, "<=", 16.0),
        Target("memory after 1,000 saves, MB", memory["1,000 small saves"]["stays_bytes"] / 1e6, "<=", 16.0),
    ]
    title = (
        f"{facts['state_bytes'] / 1e6:.0f} MB of state, {1e3 * facts['step_secs']:.0f} ms a step, {SAVES} saves a block, "
        f"medians of {rounds} rounds, load {around['load']} at the start; without saves the longest step is x{facts['longest_without']:.2f}"
    )
    table = [
        title,
        f"  {'':22}{'lost a save':>12}{'call':>12}{'longest call':>14}{'longest step':>14}",
        *(
            f"  {name:22}{row['lost_ms']:9.1f} ms{row['call_ms']:9.2f} ms{row['longest_call_ms']:11.2f} ms{row['longest_step']:13.2f}x"
            for name, row in rows.items()
        ),
        "  memory beside the loop's own:",
        *(
            f"  {name:22}peak {each['peak_bytes'] / 1e6:8.1f} MB, stays {each['stays_bytes'] / 1e6:8.1f} MB"
            for name, each in memory.items()
        ),
    ]
    return finish(
        options, {"machine": around, **facts, "rounds": rounds, "rows": rows, "memory": memory}, targets, table
    )


if __name__ == "__main__":
    sys.exit(main())
