"""Runs the readers of a checkpoint on changed ones; it is a program, because its process may die.

    python -m fuzz.drive --cases 10000 --seed 0 --folder /dev/shm/somewhere

It prints one line of JSON for each case that broke a promise, and one at its end; the case under way is in the file `case` of the folder.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, Final, final
from unittest import mock

import numpy as np
import torch

import trainfold
from fuzz.changes import Checkpoint, changed
from trainfold.adapters.cli.diff import diff_checkpoints
from trainfold.adapters.cli.inspect import inspect_checkpoint
from trainfold.adapters.cli.ls import list_run
from trainfold.adapters.cli.plan import plan_run
from trainfold.adapters.cli.terminal.output import Answer, deliver
from trainfold.adapters.cli.verify import verify_checkpoint
from trainfold.backends.runs import scan as inventory
from trainfold.core.errors import RestoreRefused, TrainfoldError
from trainfold.core.format.manifest_reader import check_structures, decode_manifest
from trainfold.core.state.state import Opaque, TrainState

STEP: Final = "step-00000003"
CASE_SECS: Final = 10.0  # CPU seconds for one case; a usual case takes some milliseconds
MEMORY_BYTES: Final = 1 << 30  # bytes beyond what the process has at its start


class TooSlow(BaseException):
    """The time of a case is over."""


def functional_state() -> TrainState:
    """A small state with every built-in component, and a user's own tree."""
    model = torch.nn.Linear(2, 1).bfloat16()
    adam = trainfold.optimizer(torch.optim.AdamW, lr=0.01, masters=True)
    schedule = trainfold.schedules.constant(warmup_steps=2)
    state = trainfold.init_state(model, adam, seed=0, schedule=schedule, dataset=trainfold.data.make_cursor(10, seed=3))
    step = trainfold.make_step(
        model, lambda model, batch: trainfold.Loss(sum=model(batch).float().sum(), weight=8), adam, schedule=schedule
    )
    state, _ = step(state, torch.ones(8, 2, dtype=torch.bfloat16))
    tied = torch.arange(3.0)
    mine = {
        "pairs": {1: (tied, tied), (2, "b"): [None, 2**70, float("inf")]},
        "array": tied.numpy().copy(),
        "raw": b"x",
        "scalar": np.float32(1),
    }
    return state.evolve(trainer=trainfold.Progress(step=3), extra={"mine": mine, "other": Opaque({"at": 3})})


@final
class Loop:
    """A mutable run with everything that can be attached."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        loader = torch.utils.data.DataLoader(
            list(torch.ones(12, 2)), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1)
        )
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.live = trainfold.attach(model, optimizer, scheduler=scheduler, loader=loader)
        for _, batch in zip(range(3), self.live.batches(epochs=1), strict=False):
            model(batch).sum().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            self.live.advance(samples=len(batch))
        random.gauss(0, 1)
        self.live.restore(self.live.capture())
        self.state = self.live.capture()

    def train(self) -> None:
        """Train one step with the restored state."""
        self.model(torch.ones(1, 2)).sum().backward()
        try:
            self.optimizer.step()
        except (
            RuntimeError,
            OverflowError,
        ) as error:  # an error of torch: 1e308 and 2**64 are too large for its kernels
            if "without overflow" not in str(error) and "too big to convert" not in str(error):
                raise
        self.scheduler.step()
        self.optimizer.zero_grad()

    def fingerprint(self) -> dict[str, str]:
        """The current state of the live objects, including random streams."""
        return trainfold.fingerprint(self.live.capture())


@final
class Readers:
    """A folder with two runs whose newest checkpoint is changed again and again, and everything that reads a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.loop = Loop()
        self.states = {"functional": functional_state(), "live": self.loop.state}
        self.run = {name: folder / name for name in self.states}
        self.other = folder / "other"
        for name, state in self.states.items():
            trainfold.save(state, self.run[name])
        shutil.copytree(self.run["functional"], self.other)
        self.text = {name: (run / STEP / "manifest.json").read_bytes() for name, run in self.run.items()}
        self.files = {
            name: {f.name: f.read_bytes() for f in (run / STEP).glob("*.safetensors")} for name, run in self.run.items()
        }
        bare = self.states["functional"].evolve(optimizer=None, scheduler=None, dataset=None, rng=None, extra={})
        self.likes = [self.states["functional"], bare, bare.evolve(model=None)]
        self.loop.state = trainfold.load(self.run["live"], like=self.loop.state)  # with its own memory
        self.loop.live.restore(self.loop.state)
        self.before = self.loop.fingerprint()
        self._drawn = Random(0)

    @staticmethod
    def believes(sealed: bytes) -> bool:
        """Whether a manifest can be decoded at all; if not, every reader raises the same error as here."""
        try:
            check_structures(decode_manifest(sealed, "manifest.json"), "manifest.json")
        except TrainfoldError as error:
            refused(error)
            return False
        return True

    def put(self, name: str, checkpoint: Checkpoint, sealed: bytes) -> None:
        """Write the changed files; `restore_files` undoes this."""
        folder = self.run[name] / STEP
        (folder / "manifest.json").write_bytes(sealed)
        for file, data in checkpoint.files.items():
            if data is not self.files[name][file]:
                (folder / file).write_bytes(data)

    def restore_files(self, name: str, checkpoint: Checkpoint) -> None:
        """Put back the original data files."""
        for file, data in checkpoint.files.items():
            if data is not self.files[name][file]:
                (self.run[name] / STEP / file).write_bytes(self.files[name][file])

    def read(self, how: str, name: str, chosen: int) -> str:
        """Run one reader; return the outcome."""
        run = self.run[name]
        commands: dict[str, Callable[[], Answer]] = {
            "ls": lambda: list_run(run),
            "inspect": lambda: inspect_checkpoint(run / STEP, tensors=True),
            "verify": lambda: verify_checkpoint(run / STEP),
            "plan": lambda: plan_run(run),
            "diff": lambda: (
                diff_checkpoints(run, self.other) if chosen % 2 else diff_checkpoints(self.other, run / STEP)
            ),
        }
        if how in commands:
            return self.command(commands[how], as_json=chosen % 4 > 0)
        if how == "restore":
            return self.restore(chosen)
        like = self.likes[chosen % len(self.likes)] if name == "functional" else self.states[name]
        step = (None, 3)[chosen & 1]
        try:
            plan = trainfold.plan(run, like=like, step=step)
            shown(str(plan))
            if how == "plan_like":
                return type(plan).__name__
            trainfold.fingerprint(trainfold.load(run, like=like, step=step))
        except TrainfoldError as error:
            return refused(error)
        return "loaded"

    def command(self, make: Callable[[], Answer], *, as_json: bool) -> str:
        """Run a command as the command line does, and check that its output has no terminal control characters."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = deliver(make, as_json=as_json)
        shown(out.getvalue())
        shown(err.getvalue())
        if as_json:
            json.loads(out.getvalue())
        return f"exit {code}"

    def restore(self, chosen: int) -> str:
        """Load into a live run: either it is refused and has changed nothing, or the run can train and be captured afterwards."""
        live = self.loop.live
        try:
            state = trainfold.load(self.run["live"], like=self.loop.state, step=(None, 3)[chosen & 1])
            live.restore(state)
        except TrainfoldError as error:
            failure = error
        else:
            failure = None
        if failure is not None:
            assert self.loop.fingerprint() == self.before, f"half-written: {failure}"
            return refused(failure)
        try:
            for _ in range(3):
                np.random.random(700), np.random.standard_normal(3)  # noqa: NPY002
                random.random(), random.gauss(0, 1)
                torch.rand(700), torch.randn(17)
            self.loop.fingerprint()
            self.loop.train()
        finally:
            live.restore(self.loop.state)
        assert self.loop.fingerprint() == self.before
        return "restored"


def refused(error: TrainfoldError) -> str:
    """Check an error: it has all fields, and no terminal control characters."""
    reasons = error.reasons if isinstance(error, RestoreRefused) else ()
    for each in (error, *reasons):
        assert all(str(part).strip() for part in (each.where, each.expected, each.found, each.fix)), repr(each)
        shown(str(each))
    return type(error).__name__


def shown(text: str) -> None:
    """Check text that is shown to a user."""
    text.encode()
    odd = {c for c in text if not c.isprintable()} - {"\n"}
    assert not odd, f"not printable: {odd} in {text[:200]!r}"
    assert "\nstep 9: verified" not in text, "a line of its own"


READERS: Final = ("ls", "inspect", "verify", "plan", "diff", "load", "plan_like", "restore")


@final
class Fuzzer:
    """Run cases by their numbers."""

    def __init__(self, folder: Path, seed: int, *, skips_refused: bool) -> None:
        self.skips_refused = skips_refused
        self.readers = Readers(folder)
        self.outcomes: Counter[str] = Counter()
        self._seed = seed

    def seeds_of(self, case: int) -> list[int]:
        """The changes of a case."""
        drawn = Random(f"{self._seed} {case}")
        return [drawn.getrandbits(48) for _ in range(drawn.choice((1, 1, 1, 2, 2, 4)))]

    def run(self, case: int) -> dict[str, Any] | None:
        """Run a case; return what went wrong, with the fewest changes that cause it."""
        seeds = self.seeds_of(case)
        wrong = self.attempt(case, seeds)
        if wrong is None:
            return None
        for i in reversed(range(len(seeds))):
            fewer = [*seeds[:i], *seeds[i + 1 :]]
            if fewer and (found := self.attempt(case, fewer)) is not None:
                seeds, wrong = fewer, found
        return {"case": case, "seed": self._seed, "changes": seeds, **wrong}

    def attempt(self, case: int, seeds: list[int]) -> dict[str, Any] | None:
        """Run one case with some changes; return None if every promise was kept."""
        name = ("functional", "live")[case & 1]
        how = (
            READERS[(case >> 1) % (7 if name == "functional" else 8)]
            if case & 7
            else "load"
            if name == "functional"
            else "restore"
        )
        readers = self.readers
        checkpoint = changed(readers.text[name], readers.files[name], seeds)
        try:
            signal.setitimer(signal.ITIMER_PROF, CASE_SECS)
            sealed = checkpoint.sealed()
            if self.skips_refused and case % 64 > 15 and not readers.believes(sealed):
                self.outcomes["refused at once"] += 1
                return None
            readers.put(name, checkpoint, sealed)
            self.outcomes[f"{how}: {readers.read(how, name, case >> 4)}"] += 1
        except (Exception, TooSlow) as error:  # noqa: BLE001 - whatever it is, it is what is looked for
            trace = traceback.format_exception(error)
            return {"reader": how, "of": name, "error": f"{type(error).__name__}: {error}"[:400], "trace": "".join(trace)[-1500:],
                    "differs": difference(readers.text[name], checkpoint)}  # fmt: skip
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            readers.restore_files(name, checkpoint)
        return None


def difference(text: bytes, checkpoint: Checkpoint) -> list[str]:
    """The differences between a manifest and the one that was saved."""

    def walk(a: Any, b: Any, path: str) -> Iterator[str]:
        if type(a) is type(b) is dict and a.keys() == b.keys():
            for key in a:
                yield from walk(a[key], b[key], f"{path}.{key}")
        elif type(a) is type(b) is list and len(a) == len(b):
            for i, (one, other) in enumerate(zip(a, b, strict=True)):
                yield from walk(one, other, f"{path}[{i}]")
        elif a != b or type(a) is not type(b):
            yield f"{path}: {str(a)[:80]} -> {ascii(b)[:160]}"

    before = json.loads(text)
    before.pop("digest")
    return list(walk(before, checkpoint.document, ""))[:6]


def limit_memory() -> None:
    """Limit the additional memory of the process; a larger allocation raises `MemoryError`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        most = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


class Checked(logging.Handler):
    """Checks log records, which are text for a terminal too."""

    def emit(self, record: logging.LogRecord) -> None:
        shown(record.getMessage())


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cases", type=int, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--skips-refused", action="store_true", help="run one reader only for most manifests that cannot be decoded"
    )
    parser.add_argument(
        "--teeth", type=int, default=0, help="how many cases to run once more, without the check of structures"
    )
    options = parser.parse_args()
    logging.getLogger("trainfold").addHandler(Checked())
    logging.getLogger("trainfold").propagate = False
    logging.raiseExceptions = False
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_args, **_options: shown(str(message))  # type: ignore[assignment]

    def too_slow(_number: int, _frame: FrameType | None) -> None:
        raise TooSlow

    signal.signal(signal.SIGPROF, too_slow)
    fuzzer = Fuzzer(options.folder, options.seed, skips_refused=options.skips_refused)
    limit_memory()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with (options.folder / "case").open("wb", buffering=0) as under_way:
        for case in range(options.first, options.first + options.cases):
            os.pwrite(under_way.fileno(), b"%20d" % case, 0)
            if (wrong := fuzzer.run(case)) is not None:
                sys.stdout.write(json.dumps(wrong) + "\n")
                sys.stdout.flush()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    done = {"done": options.cases, "grown_kb": grown, "outcomes": dict(fuzzer.outcomes)}
    with mock.patch.object(inventory, "check_structures", return_value=None):
        fuzzer.skips_refused = False
        found = [fuzzer.attempt(case, fuzzer.seeds_of(case)) for case in range(options.teeth)]
    teeth = Counter(wrong["error"].partition(":")[0] for wrong in found if wrong is not None)
    sys.stdout.write(json.dumps({**done, "teeth": dict(teeth)}) + "\n")


if __name__ == "__main__":
    main()
