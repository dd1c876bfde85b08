"""Runs a rehearsal: the user's program whole, whole again, and killed and resumed; then compares the runs."""

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
from rich.console import Console

from trainfold.adapters.cli.rehearse import findings as report
from trainfold.adapters.cli.rehearse.disk_space import DiskSpace
from trainfold.adapters.cli.rehearse.document import as_json
from trainfold.adapters.cli.rehearse.errors import ProgramFailed
from trainfold.adapters.cli.rehearse.findings import Rehearsed, error_of, hit_text, tables
from trainfold.adapters.cli.rehearse.kept import KeptCheckpoints, difference_size
from trainfold.adapters.cli.rehearse.missed import not_rehearsed
from trainfold.adapters.cli.rehearse.moments import Trigger, plan_moments
from trainfold.adapters.cli.rehearse.options import RehearsalSettings
from trainfold.adapters.cli.rehearse.starts import Run, Start, environment_of_programs, pace_of
from trainfold.adapters.cli.terminal import plot
from trainfold.adapters.cli.terminal.output import Answer
from trainfold.adapters.cli.terminal.progress import Display, display
from trainfold.adapters.cli.terminal.workplace import Workplace
from trainfold.core.rehearsal.conclusion import conclude
from trainfold.core.rehearsal.entry import RecordedLine
from trainfold.core.rehearsal.number import float_of
from trainfold.core.rehearsal.resized import of_ranks, without_ranks
from trainfold.core.rehearsal.trajectory import NOTHING, differences, restless_parts

WHOLE, AGAIN, KILLED = "whole", "again", "killed"
PICTURE, REPORT = "values.png", "report.json"
_MARKER: Final = "rehearsal.json"
_LOCK: Final = "rehearsal.lock"
_PLACE: Final = Workplace(
    made_by="trainfold rehearse",
    noun="rehearsal",
    option="--dir",
    marker=_MARKER,
    lock=_LOCK,
    names=frozenset({_MARKER, _LOCK, PICTURE, REPORT, WHOLE, AGAIN, KILLED}),
)


def run_rehearsal(directory: Path, settings: RehearsalSettings) -> Answer:
    """Run a program whole, whole again, and killed and resumed; compare everything that it saved and recorded.

    Args:
        directory: for everything that the rehearsal writes; absent, empty, or that of an earlier rehearsal, which is replaced.
        settings: what to rehearse.

    Returns:
        The tables, and an error unless the resumed program has the bits of the one that was never killed.

    Raises:
        CheckpointForeign: if the directory has other files in it; nothing is touched.
        NotWritable: if it cannot be written.
        RunLocked: if a rehearsal is running there.
        ProgramFailed: if the program fails by itself, or hangs.
        NoDiskSpace: if the disk has no room for the checkpoints.
    """
    started = time.monotonic()
    with _PLACE.prepared(directory):
        _PLACE.mark(directory, {"command": list(settings.command), "steps": settings.steps, "seed": settings.seed})
        with display(Console(stderr=True), steps=settings.steps) as shown:
            rehearsed = _run_all(directory, settings, shown)
        missed = not_rehearsed(rehearsed)
        facts = [("NOT rehearsed", each) for each in missed]
        facts += [
            ("values of each step", _draw(directory / PICTURE, rehearsed)),
            ("this table", str(directory / REPORT)),
            ("what the program said", f"{directory}/{{{WHOLE},{AGAIN},{KILLED}}}/start-*/output.txt"),
        ]
        facts += [
            ("look further" if number == 0 else "", f"trainfold diff {report.relative(a, Path.cwd())} {report.relative(b, Path.cwd())}")
            for number, (a, b) in enumerate(report.further(rehearsed))
        ]  # fmt: skip
        facts.append(("seconds in all", f"{time.monotonic() - started:.1f}"))
        data: dict[str, Any] = {
            **as_json(rehearsed),
            "not_rehearsed": missed,
            "picture": facts[len(missed)][1],
            "secs": time.monotonic() - started,
        }
        (directory / REPORT).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        return Answer(data, tables(rehearsed, facts), error_of(rehearsed))


def _run_all(directory: Path, settings: RehearsalSettings, shown: Display) -> Rehearsed:
    def run(name: str, title: str, tidy: Callable[[], None]) -> Run:
        environment = environment_of_programs()
        return Run(directory / name, settings, environment=environment, watch=_watch(shown, title), tidy=tidy)

    kept = {name: KeptCheckpoints((directory / name).resolve()) for name in (WHOLE, AGAIN, KILLED)}
    room = DiskSpace(kept[WHOLE], settings, directory, shown.say)
    whole = run(WHOLE, "never killed", room.look).start()
    if not whole.stretch.saved:
        return Rehearsed(settings, whole, None, (), None)
    again = run(AGAIN, "once more", lambda: kept[AGAIN].thin(whole.stretch.saved, None)).start()
    kept[AGAIN].clear_run()
    pair, _ = _compared(settings, whole, again)
    restless = restless_parts(differences(*(each.stretch for each in pair)))
    repeats = restless is not None
    if not repeats:
        shown.say(
            "  the program does not repeat itself: values after each resume are compared with those before the kill"
        )
    killed: list[Start] = []
    last = run(
        KILLED,
        "killed and resumed",
        lambda: kept[KILLED].thin(whole.stretch.saved, restless or NOTHING),
    )
    failed: ProgramFailed | None = None
    for trigger in [*_moments(settings, whole, late=not repeats), None]:
        try:
            start = last.start(trigger, pace_of(whole))
        except ProgramFailed as failure:
            if repeats:
                raise
            failed = failure  # probably because it does not repeat itself: its weights or data are not those of the checkpoint
            break
        killed.append(start)
        if start.resumed_from is not None:
            shown.say(f"  start {start.stretch.number} resumed from {start.resumed_from}")
        if start.hit is None:
            break
        shown.say(f"  {hit_text(start)}")
    tolerance = None if failed is not None else settings.tolerance
    (whole, again, *killed), own = _compared(settings, whole, again, *killed)
    conclusion = conclude(
        whole.stretch,
        again.stretch,
        [each.stretch for each in killed],
        tolerance=tolerance,
        is_resized=settings.is_resized,
    )
    found, other = (conclusion.noise, AGAIN) if conclusion.noise else (conclusion.found, KILLED)
    measured = difference_size(kept[WHOLE], kept[other], found)
    for name, each in kept.items():
        each.clear(except_step=measured.step if measured is not None and name in (WHOLE, other) else None)
    return Rehearsed(settings, whole, again, tuple(killed), conclusion, measured, room.facts, failed, own)


def _compared(settings: RehearsalSettings, *starts: Start) -> tuple[list[Start], tuple[str, ...]]:
    """The starts without what belongs to ranks, if these have different numbers of them; and the names of what is left out."""
    if not settings.is_resized:
        return list(starts), ()
    own = [each.stretch for each in starts]
    left = [attrs.evolve(start, stretch=stretch) for start, stretch in zip(starts, without_ranks(own), strict=True)]
    return left, of_ranks(own)


def _moments(settings: RehearsalSettings, whole: Start, *, late: bool) -> list[Trigger]:
    """When to kill. A program without a manager shows only its checkpoints, so one of them has to trigger each kill."""
    says_steps = any(entry.kind == "step" for entry in whole.entries)
    saved = sorted({step for _, step in whole.stretch.saved})
    found = plan_moments(
        steps=min(settings.steps, saved[-1]),
        saved=saved,
        kills=settings.kills,
        seed=settings.seed,
        saves=any(entry.kind == "save" for entry in whole.entries),
        late=late,
        ranks=settings.nproc or (1,),
    )
    latest = settings.steps if says_steps or len(saved) == 1 else saved[-2]
    return [attrs.evolve(trigger, after_step=min(trigger.after_step, latest)) for trigger in found]


def _watch(shown: Display, title: str) -> Callable[[RecordedLine], None]:
    latest: dict[str, float] = {}

    def watch(entry: RecordedLine) -> None:
        if entry.kind == "values":
            if "loss" in entry.data["values"]:
                latest["loss"] = float_of(entry.data["values"]["loss"])
        elif entry.kind in ("step", "saved", "done"):
            kind = "step" if entry.kind == "saved" else entry.kind
            shown.watch(title, RecordedLine(kind, entry.step, entry.pid, entry.secs, dict(latest)))

    return watch


def _draw(path: Path, rehearsed: Rehearsed) -> str:
    name, (whole, *killed) = _curves(rehearsed)
    if not name:
        return "not plotted: record some with live.record(loss=loss)"
    kills = [(start.hit.step, start.hit.during) for start in rehearsed.killed if start.hit is not None]
    verdict = _verdict(rehearsed)
    with contextlib.suppress(OSError):
        try:
            plot.draw_losses(path, uninterrupted=whole, killed=killed, kills=kills, verdict=verdict, label=name)
        except plot.PlotMissing as missing:
            return f"not plotted: {missing.found} {missing.expected}; {missing.fix}"
    return str(path)


def _curves(rehearsed: Rehearsed) -> tuple[str, list[Mapping[int, float]]]:
    """The first recorded value of each process: its name, and step -> value."""
    starts = [rehearsed.whole, *rehearsed.killed]
    names = [name for start in starts for values in start.stretch.values.values() for name in values]
    if not names:
        return "", [{}]
    name = names[0]
    return name, [
        {step: float_of(values[name][-1]) for step, values in start.stretch.values.items() if name in values}
        for start in starts
    ]


def _verdict(rehearsed: Rehearsed) -> str:
    """The end of the title of the picture."""
    if error_of(rehearsed) is not None or rehearsed.conclusion is None:
        return "NOT the same bits"
    words = {"samples": "the same steps, other bits", "within": f"within {rehearsed.settings.tolerance}"}
    return words.get(rehearsed.conclusion.outcome, "the same bits")
