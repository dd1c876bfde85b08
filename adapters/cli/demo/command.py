"""Runs the demo: prepares its directory, trains twice, compares the two runs, and draws two pictures."""

import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
from rich.console import Console

from trainfold.adapters.cli.demo import report
from trainfold.adapters.cli.demo.kill import (
    KILLED,
    UNINTERRUPTED,
    Attempt,
    Command,
    plan_kills,
    run_and_kill,
    run_unharmed,
    train_command,
)
from trainfold.adapters.cli.demo.settings import MADE_BY, SETTINGS_FILE, DemoSettings, write_settings
from trainfold.adapters.cli.demo.timeline import Window, durable_secs, window_of
from trainfold.adapters.cli.rehearse.moments import StepTimes
from trainfold.adapters.cli.rehearse.options import under_torchrun
from trainfold.adapters.cli.terminal import plot
from trainfold.adapters.cli.terminal.output import Answer
from trainfold.adapters.cli.terminal.progress import Display, display
from trainfold.adapters.cli.terminal.workplace import Workplace
from trainfold.backends.flight.record_file import read_entries
from trainfold.backends.stores.place import local_path
from trainfold.core.rehearsal.entry import RecordedLine

PICTURE, TIMELINE, REPORT, LOCK = "losses.png", "timeline.png", "report.json", "demo.lock"
_PLACE = Workplace(
    made_by=MADE_BY,
    noun="demo",
    option="--run",
    marker=SETTINGS_FILE,
    lock=LOCK,
    names=frozenset({
        SETTINGS_FILE, PICTURE, TIMELINE, REPORT, LOCK,
        *(f"{run}{suffix}" for run in (UNINTERRUPTED, KILLED) for suffix in ("", ".jsonl", ".stderr")),
    }),
)  # fmt: skip


def run_demo(directory: Path, settings: DemoSettings, *, command: Command = train_command) -> Answer:
    """Train twice, kill the second run several times, and compare.

    Args:
        directory: for everything that the demo writes; absent, empty, or from an earlier demo, which is replaced.
        settings: what to train.
        command: maps the directory of a run to the command that starts the run, or one of its processes.

    Returns:
        The tables, and an error if the runs differ or the kills missed.

    Raises:
        CheckpointForeign: if the directory contains anything else; nothing is touched.
        NotWritable: if the directory cannot be written.
        RunLocked: if a demo is running there.
        DemoFailed: if a run ends with an error.
    """
    started = time.monotonic()
    directory = Path(local_path(directory))

    def launch(run: Path) -> list[str]:
        return command(run) if settings.nproc == 1 else under_torchrun(command(run), settings.nproc)

    with _PLACE.prepared(directory):
        write_settings(settings, directory)
        console = Console(stderr=True)
        with display(console, steps=settings.steps) as shown:
            attempts = _run_both(directory, settings, command=launch, shown=shown)
        return _conclude(directory, settings, attempts, started)


def _run_both(directory: Path, settings: DemoSettings, *, command: Command, shown: Display) -> list[Attempt]:
    names = {UNINTERRUPTED: "never killed", KILLED: "killed and resumed"}

    def watch(run: str, event: RecordedLine) -> None:
        if event.kind == "start" and event.data["resumed_from"] is not None:
            shown.say(f"  resumed from {event.data['resumed_from']} by the same command, process {event.pid}")
        shown.watch(names[run], event)

    run_unharmed(directory / UNINTERRUPTED, command=command, watch=lambda event: watch(UNINTERRUPTED, event))
    pace = _pace(read_entries(directory / f"{UNINTERRUPTED}.jsonl"))
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


def _conclude(directory: Path, settings: DemoSettings, attempts: list[Attempt], started: float) -> Answer:
    events = {run: read_entries(directory / f"{run}.jsonl") for run in (UNINTERRUPTED, KILLED)}
    one, other = (report.record_of(each) for each in events.values())
    comparison = report.compare(one, other, attempts, wanted_kills=settings.kills)
    picture = _draw_losses(directory / PICTURE, one, other, comparison)
    timeline = _draw_timelines(directory / TIMELINE, {run: window_of(each) for run, each in events.items()})
    facts = [
        *([("processes of each run", f"{settings.nproc}, under torchrun")] if settings.nproc > 1 else []),
        ("loss curves", picture),
        ("saves and steps", timeline),
        ("this table", str(directory / REPORT)),
        ("look further", f"trainfold ls {directory / KILLED}"),
        ("", f"trainfold diff {directory / UNINTERRUPTED} {directory / KILLED}"),
        ("seconds in all", f"{time.monotonic() - started:.1f}"),
    ]
    pictures = {"loss_curves": picture, "timelines": timeline}
    data = {
        "nproc": settings.nproc,
        **report.as_json(comparison, other),
        **pictures,
        "secs": time.monotonic() - started,
    }
    (directory / REPORT).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return Answer(data, report.tables(comparison, facts), comparison.error)


def _draw_losses(path: Path, one: report.RunRecord, other: report.RunRecord, comparison: report.Comparison) -> str:
    kills = [(attempt.kill.step, attempt.kill.during) for attempt in comparison.attempts if attempt.kill is not None]
    return _drawn(
        path,
        lambda: plot.draw_losses(
            path,
            uninterrupted=one.losses.by_step,
            killed=[other.losses.by_step],
            kills=kills,
            verdict="the same bits" if comparison.identical else "NOT the same",
            label="training loss, nats per byte",
        ),
    )


def _draw_timelines(path: Path, windows: Mapping[str, Window | None]) -> str:
    titles = {
        KILLED: "trainfold.save(state, run), in the loop: the loop waits until the checkpoint is durable",
        UNINTERRUPTED: 'CheckpointManager(run, mode="async"): the loop continues',
    }
    lanes = [
        (title, attrs.astuple(window.save), [attrs.astuple(step) for step in window.steps])
        for run, title in titles.items()
        if (window := windows[run]) is not None
    ]
    if not lanes:
        return "not plotted: no save had three steps before it and three after it; use more --steps"
    return _drawn(path, lambda: plot.draw_timelines(path, lanes))


def _drawn(path: Path, draw: Callable[[], None]) -> str:
    """The path of a picture, or why it was not plotted."""
    try:
        draw()
    except plot.PlotMissing as missing:
        return f"not plotted: {missing.found} {missing.expected}; {missing.fix}"
    return str(path)


def _pace(events: list[RecordedLine]) -> StepTimes:
    """How long a step and a save take, from the record of the uninterrupted run.

    The time of a step is the median of all steps. The time of a save is the shortest one: the last save, with nothing running beside it.
    """
    steps = [after.secs - before.secs for before, after in itertools.pairwise(events) if after.kind == "step"]
    begun = {event.step: event.secs for event in events if event.kind == "save"}
    saves = [durable_secs(event) - begun[event.step] for event in events if event.kind == "saved"]
    return StepTimes(step_secs=statistics.median(steps or [0.0]), save_secs=min(saves, default=0.0))
