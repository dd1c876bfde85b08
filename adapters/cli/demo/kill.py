"""Kills the demo's second run: chooses the moments, sends the signal, and finds out what each kill hit."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import final

import attrs

from trainfold.adapters.cli.demo.settings import DemoSettings
from trainfold.adapters.cli.rehearse.moments import StepTimes, Trigger, arms, plan_moments
from trainfold.adapters.cli.rehearse.process import kill_each
from trainfold.core.errors import TrainfoldError
from trainfold.core.printable import quoted
from trainfold.core.rehearsal.entry import RecordedLine, decode_entry

UNINTERRUPTED, KILLED = "uninterrupted", "killed"


class DemoFailed(TrainfoldError, has_lines=True):
    """A run of the demo ended with an error."""

    exit_code = 42


@final
@attrs.frozen
class Kill:
    """What a kill hit.

    Attributes:
        step: steps done when the process died.
        during: ``"save"`` if the last entry of the record is the beginning of a save, else ``"step"``.
        committed: whether the interrupted save had become a checkpoint already; None if no save was hit.
        leftovers: files that the save left in the run without a manifest, with their sizes in bytes.
    """

    step: int
    during: str
    committed: bool | None
    leftovers: dict[str, int]


@final
@attrs.frozen
class Attempt:
    """One start of a run, by one process or several, to its end.

    Attributes:
        resumed_from: the directory of the checkpoint, or None for a fresh start.
        first_step: steps done when it started.
        kill: what killed it, or None if it ended by itself.
    """

    resumed_from: str | None
    first_step: int
    kill: Kill | None


Command = Callable[[Path], list[str]]
Watch = Callable[[RecordedLine], None]


def train_command(run: Path) -> list[str]:
    """The command that starts a run and resumes it. Only the uninterrupted run saves in the background: a kill must be able to hit a save."""
    options = ["--async"] if run.name == UNINTERRUPTED else []
    return [sys.executable, "-m", "trainfold.adapters.cli.demo.train", str(run), *options]


def plan_kills(settings: DemoSettings) -> list[Trigger]:
    """Choose the moments: one in each equal part of the steps after the first save, the second one during a save.

    `arms` makes sure that the first kill does not come before the first save is acknowledged.

    Examples:
        >>> from trainfold.adapters.cli.demo.settings import make_settings
        >>> [trigger.in_save for trigger in plan_kills(make_settings(steps=60, seed=1))]
        [False, True, False]
    """
    saved = range(settings.save_every, settings.steps + 1, settings.save_every)
    return plan_moments(steps=settings.steps, saved=saved, kills=settings.kills, seed=settings.seed)


def run_unharmed(run: Path, *, command: Command, watch: Watch) -> None:
    """Start a run and wait until it is complete.

    Raises:
        DemoFailed: if it ends with an error.
    """
    with _Processes(run, command) as processes:
        for event in processes.events():
            watch(event)
    processes.check_end()


def run_and_kill(
    run: Path, triggers: list[Trigger], pace: StepTimes, *, command: Command, watch: Watch
) -> Iterator[Attempt]:
    """Start a run, kill it at each trigger and start it again; the last process runs to the end.

    A kill that came too late for its save is tried again at the next save, with a shorter delay.

    Args:
        run: its directory.
        triggers: when to kill, in the order of the steps.
        pace: how long steps and saves take.
        command: maps the directory of a run to the command that starts it.
        watch: called with every entry of the record.

    Yields:
        Each process, after it has ended.

    Raises:
        DemoFailed: if a process ends with an error.
    """
    waiting = list(triggers)
    while True:
        trigger = waiting.pop(0) if waiting else None
        attempt = _attempt(run, trigger, pace, command=command, watch=watch)
        yield attempt
        if attempt.kill is None:
            return
        if trigger is not None and trigger.in_save and attempt.kill.during != "save":
            waiting.insert(0, attrs.evolve(trigger, after_step=attempt.kill.step, fraction=trigger.fraction / 4))


def _attempt(run: Path, trigger: Trigger | None, pace: StepTimes, *, command: Command, watch: Watch) -> Attempt:
    seen: list[RecordedLine] = []
    killed_at = None
    with _Processes(run, command) as processes:
        for event in processes.events():
            watch(event)
            seen.append(event)
            if killed_at is None and trigger is not None and arms(seen, trigger):
                time.sleep(pace.delay_secs(trigger))
                processes.kill()
                killed_at = time.monotonic()
    start = next((event for event in seen if event.kind == "start"), None)
    if start is None or processes.code != -signal.SIGKILL:
        processes.check_end()
    assert start is not None
    kill = _examine(run, seen) if processes.code == -signal.SIGKILL else None
    return Attempt(resumed_from=start.data["resumed_from"], first_step=start.step, kill=kill)


def _examine(run: Path, seen: list[RecordedLine]) -> Kill:
    """Find out from the record and the directory what the kill hit, whatever it was meant to hit."""
    last = seen[-1]
    if last.kind != "save":
        return Kill(step=last.step, during="step", committed=None, leftovers={})
    directories = [path for path in run.glob("*") if path.is_dir() and not (path / "manifest.json").exists()]
    leftovers = {
        str(file.relative_to(run)): file.stat().st_size
        for directory in sorted(directories)
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }
    committed = any(
        (path / "manifest.json").exists() for path in run.glob("step-*") if int(path.name.split("-")[1]) == last.step
    )
    return Kill(step=last.step, during="save", committed=committed, leftovers=leftovers)


@final
class _Processes:
    """What a command started: one process, or torchrun and its ranks. Leaving the ``with`` block waits; by an error, it kills all of them.

    Args:
        run: the run's directory.
        command: maps it to the command.
    """

    def __init__(self, run: Path, command: Command) -> None:
        self._run = run
        self._stderr = run.with_suffix(".stderr")
        with self._stderr.open("ab") as stderr:
            self._first = subprocess.Popen(command(run), stdout=subprocess.PIPE, stderr=stderr)  # noqa: S603 - our own
        self._pids = {self._first.pid}

    def __enter__(self) -> "_Processes":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.kill()  # an interrupted demo leaves no run behind
        assert self._first.stdout is not None
        self._first.stdout.close()
        self._first.wait()

    @property
    def code(self) -> int:
        """The exit code of the command; negative for the signal that ended it."""
        return self._first.wait()

    def events(self) -> Iterator[RecordedLine]:
        """Yield each entry as it is written, until all processes have ended: each of them has the other end of the pipe."""
        assert self._first.stdout is not None
        for line in self._first.stdout:
            event = decode_entry(line)
            if event is not None:
                self._pids.update(event.data.get("pids", []))
                yield event

    def kill(self) -> None:
        """Send SIGKILL to all: no handler and no flush, as with the OOM killer of the kernel."""
        if self._first.poll() is None:
            kill_each([self._first.pid, *(self._pids - {self._first.pid})])  # torchrun first, so that it does not react

    def check_end(self) -> None:
        """Raise `DemoFailed` unless the command has ended well."""
        if self.code != 0:
            said = self._stderr.read_text(encoding="utf-8", errors="replace").strip()
            raise DemoFailed(
                str(self._run),
                expected="a run that ends with exit code 0",
                found=f"exit code {self.code}, with this on its standard error:\n{quoted(said[-4000:])}\n",
                fix="read the text above: the demo or this machine has a defect",
            )
