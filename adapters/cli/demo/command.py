"""The demo from its directory to its verdict: two runs, one table, one picture."""

import itertools
import json
import statistics
import time
from pathlib import Path

from rich.console import Console

from trainfold.adapters.cli.demo import report
from trainfold.adapters.cli.demo.kill import (
    Attempt,
    Command,
    plan_kills,
    run_and_kill,
    run_unharmed,
    train_command,
)
from trainfold.adapters.cli.demo.settings import MADE_BY, SETTINGS_FILE, DemoSettings, write_settings
from trainfold.adapters.cli.rehearse.moments import StepTimes
from trainfold.adapters.cli.terminal import plot
from trainfold.adapters.cli.terminal.output import Answer
from trainfold.adapters.cli.terminal.progress import Display, display
from trainfold.adapters.cli.terminal.workplace import Workplace
from trainfold.backends.stores.place import local_path
from trainfold.backends.stores.record_file import read_entries
from trainfold.core.rehearsal.entry import RecordedLine

UNINTERRUPTED, KILLED = "uninterrupted", "killed"
PICTURE, REPORT, LOCK = "losses.png", "report.json", "demo.lock"
_PLACE = Workplace(
    made_by=MADE_BY,
    noun="demo",
    option="--run",
    marker=SETTINGS_FILE,
    lock=LOCK,
    names=frozenset({
        SETTINGS_FILE, PICTURE, REPORT, LOCK,
        *(f"{run}{suffix}" for run in (UNINTERRUPTED, KILLED) for suffix in ("", ".jsonl", ".stderr")),
    }),
)  # fmt: skip


def run_demo(directory: Path, settings: DemoSettings, *, command: Command = train_command) -> Answer:
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
    directory = Path(local_path(str(directory)))
    with _PLACE.prepared(directory):
        write_settings(settings, directory)
        console = Console(stderr=True)
        with display(console, steps=settings.steps) as shown:
            attempts = _run_both(directory, settings, command=command, shown=shown)
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
    one, other = (report.record_of(read_entries(directory / f"{run}.jsonl")) for run in (UNINTERRUPTED, KILLED))
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
            killed=[other.losses.by_step],
            kills=kills,
            verdict="the same bits" if comparison.identical else "NOT the same",
            label="training loss, nats per byte",
        )
    except plot.PlotMissing as missing:
        return f"not drawn: {missing.found} {missing.expected}; {missing.fix}"
    return str(path)


def _pace(events: list[RecordedLine]) -> StepTimes:
    """How long a step and a save take, from the record of the run that was left alone."""
    steps, saves = [0.0], [0.0]
    for before, after in itertools.pairwise(events):
        if after.kind == "step" and before.kind == "step":
            steps.append(after.secs - before.secs)
        if after.kind == "saved":
            saves.append(after.secs - before.secs)
    return StepTimes(step_secs=statistics.median(steps), save_secs=statistics.median(saves))
