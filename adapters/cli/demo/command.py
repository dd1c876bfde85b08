"""The demo from its directory to its verdict: two runs, one table, one picture."""

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from trainfold.adapters.cli.demo import plot, report
from trainfold.adapters.cli.demo.events import Event, read_events
from trainfold.adapters.cli.demo.kill import (
    Attempt,
    Command,
    Pace,
    plan_kills,
    run_and_kill,
    run_unharmed,
    train_command,
)
from trainfold.adapters.cli.demo.progress import Display, display
from trainfold.adapters.cli.demo.settings import MADE_BY, SETTINGS_FILE, Settings, write_settings
from trainfold.adapters.cli.output import Answer
from trainfold.core.errors import CheckpointForeign, NotWritable, RunLocked

UNINTERRUPTED, KILLED = "uninterrupted", "killed"
PICTURE, REPORT, LOCK = "losses.png", "report.json", "demo.lock"
_OURS = {
    SETTINGS_FILE, PICTURE, REPORT, LOCK,
    *(f"{run}{suffix}" for run in (UNINTERRUPTED, KILLED) for suffix in ("", ".jsonl", ".stderr")),
}  # fmt: skip


def run_demo(directory: Path, settings: Settings, *, command: Command = train_command) -> Answer:
    """Train twice, kill the second run again and again, and compare.

    Args:
        directory: for everything that the demo writes; absent, empty, or with an earlier demo, which is replaced.
        settings: what to train.
        command: from a run's directory to the command that starts it.

    Returns:
        The tables, and an error if the runs differ or the kills missed.

    Raises:
        CheckpointForeign: if the directory has something else in it; nothing is touched.
        NotWritable: if it cannot be written.
        RunLocked: if a demo is running there.
        DemoFailed: if a run ends with an error.
    """
    started = time.monotonic()
    with _prepared(directory):
        write_settings(settings, directory)
        console = Console(stderr=True)
        with display(console, steps=settings.steps) as shown:
            attempts = _run_both(directory, settings, command=command, shown=shown)
        return _conclude(directory, settings, attempts, started)


def _run_both(directory: Path, settings: Settings, *, command: Command, shown: Display) -> list[Attempt]:
    names = {UNINTERRUPTED: "never killed", KILLED: "killed and resumed"}

    def watch(run: str, event: Event) -> None:
        if event.kind == "start" and event.data["resumed_from"] is not None:
            shown.say(f"  resumed from {event.data['resumed_from']} by the same command, process {event.pid}")
        shown.watch(names[run], event)

    run_unharmed(directory / UNINTERRUPTED, command=command, watch=lambda event: watch(UNINTERRUPTED, event))
    pace = _pace(read_events(directory / f"{UNINTERRUPTED}.jsonl"))
    attempts = []
    for attempt in run_and_kill(
        directory / KILLED,
        plan_kills(settings),
        pace,
        command=command,
        watch=lambda event: watch(KILLED, event),
    ):
        attempts.append(attempt)
        if attempt.kill is not None:
            shown.say(f"  {report.kill_text(attempt)}")
    return attempts


def _conclude(directory: Path, settings: Settings, attempts: list[Attempt], started: float) -> Answer:
    one, other = (report.record_of(read_events(directory / f"{run}.jsonl")) for run in (UNINTERRUPTED, KILLED))
    comparison = report.compare(one, other, attempts, wanted_kills=settings.kills)
    picture = _draw(directory / PICTURE, one, other, comparison)
    facts = [
        ("loss curves", picture),
        ("this table", str(directory / REPORT)),
        ("look further", f"trainfold ls {directory / KILLED}"),
        ("", f"trainfold diff {directory / UNINTERRUPTED} {directory / KILLED}"),
        ("seconds in all", f"{time.monotonic() - started:.1f}"),
    ]
    data = {**report.as_json(comparison, other), "loss_curves": picture, "secs": time.monotonic() - started}
    (directory / REPORT).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return Answer(data, report.tables(comparison, facts), comparison.error)


def _draw(path: Path, one: report.RunRecord, other: report.RunRecord, comparison: report.Comparison) -> str:
    kills = [(attempt.kill.step, attempt.kill.during) for attempt in comparison.attempts if attempt.kill is not None]
    try:
        plot.draw_losses(
            path,
            uninterrupted=one.losses.by_step,
            killed=other.losses.by_step,
            kills=kills,
            identical=comparison.identical,
        )
    except plot.PlotMissing as missing:
        return f"not drawn: {missing.found} {missing.expected}; {missing.mend}"
    return str(path)


def _pace(events: list[Event]) -> Pace:
    """How long a step and a save take, from the record of the run that was left alone."""
    steps, saves = [0.0], [0.0]
    for before, after in itertools.pairwise(events):
        if after.kind == "step" and before.kind == "step":
            steps.append(after.secs - before.secs)
        if after.kind == "saved":
            saves.append(after.secs - before.secs)
    return Pace(step_secs=statistics.median(steps), save_secs=statistics.median(saves))


@contextlib.contextmanager
def _prepared(directory: Path) -> Iterator[None]:
    """The directory, empty and for this demo alone."""
    _check_ours(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise NotWritable(
            str(directory), expected="a directory that can be written", found=error.strerror, mend="name another: --run"
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunLocked(
                str(directory),
                expected="no demo running there",
                found="one",
                mend="wait for it, or name another: --run",
            ) from None
        for name in sorted(_OURS - {LOCK}):
            path = directory / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        yield
    finally:
        os.close(lock)


def _check_ours(directory: Path) -> None:
    """Refuse a directory that holds anything but an earlier demo."""
    if not directory.exists():
        return
    found = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else ["a file"]
    foreign = [name for name in found if name not in _OURS or (directory / name).is_symlink()]
    if set(found) - {LOCK} and not foreign and not _is_marked(directory / SETTINGS_FILE):
        foreign = found
    if foreign:
        shown = ", ".join(foreign[:4]) + (f" and {len(foreign) - 4} more" if len(foreign) > 4 else "")
        raise CheckpointForeign(
            str(directory),
            expected="no directory, an empty one, or one with an earlier demo",
            found=shown,
            mend="name another directory: --run DIR; nothing was touched",
        )


def _is_marked(path: Path) -> bool:
    try:
        return bool(json.loads(path.read_text(encoding="utf-8"))["made_by"] == MADE_BY)
    except (OSError, ValueError, KeyError, TypeError):
        return False
