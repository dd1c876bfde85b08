"""Runs the user's program: starts each process, kills it or lets it end, and records what it left."""

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, final

import attrs

from trainfold.adapters.cli.rehearse.errors import ProgramFailed
from trainfold.adapters.cli.rehearse.kept import read_index, saved_of
from trainfold.adapters.cli.rehearse.moments import StepTimes, Trigger, arms
from trainfold.adapters.cli.rehearse.options import RehearsalSettings
from trainfold.adapters.cli.rehearse.process import Program
from trainfold.adapters.cli.rehearse.scan import Scan
from trainfold.core.format.file_names import step_of
from trainfold.core.format.manifest_reader import decode_manifest
from trainfold.core.printable import quoted
from trainfold.core.rehearsal.entry import RecordedLine
from trainfold.core.rehearsal.orders import MANIFESTS_NAME, RECORD_NAME, VARIABLE, Orders, encode_orders
from trainfold.core.rehearsal.trajectory import SavedStep, Stretch, stretch_of

_GRACE_SECS: Final = 60.0  # after the last step, for what the program does at its end
_SHOWN_CHARACTERS: Final = 4000
Watch = Callable[[RecordedLine], None]


@final
@attrs.frozen
class Hit:
    """What a kill hit.

    Attributes:
        step: steps done when the process died.
        during: ``step``, or ``save`` if the last save had started and was not acknowledged.
        rank: the one that was killed; None for all.
    """

    step: int
    during: str
    rank: int | None = None


@final
@attrs.frozen
class Start:
    """One process of a run, from its start to its end.

    Attributes:
        stretch: what it did.
        resumed_from: the checkpoint that it resumed from, or None.
        hit: what the kill hit; None if it was not killed.
        ended: how it ended without a kill, in words.
        entries: its record.
        places: where its managers saved.
    """

    stretch: Stretch
    resumed_from: str | None
    hit: Hit | None
    ended: str
    entries: tuple[RecordedLine, ...]
    places: tuple[str, ...]


@final
class Run:
    """A run of the program in its own directory: one process, or several, each resuming from the one before.

    Args:
        home: the directory.
        settings: of the rehearsal.
        environment: of the program.
        watch: called with every entry.
        tidy: called after each save.
    """

    def __init__(
        self,
        home: Path,
        settings: RehearsalSettings,
        *,
        environment: Mapping[str, str],
        watch: Watch,
        tidy: Callable[[], None],
    ) -> None:
        self._home = home.resolve()
        self._settings = settings
        self._environment = dict(environment)
        self._watch = watch
        self._tidy = tidy
        self._number = 0
        (self._home / "run").mkdir(parents=True)

    def start(self, trigger: Trigger | None = None, pace: StepTimes | None = None) -> Start:
        """Start the program once more; kill it at a trigger, or let it end.

        Raises:
            ProgramFailed: if it fails by itself, or hangs.
        """
        self._number += 1
        notes = self._home / f"start-{self._number}"
        notes.mkdir()
        every, steps = self._settings.every, self._settings.steps
        linger_after = steps if trigger is None else trigger.after_step
        orders = Orders(str(self._home), str(notes), every=every, steps=steps, linger_after=linger_after)
        scan = Scan(self._home / "run", notes) if self._settings.names_run else None
        newest = scan.newest if scan is not None else 0
        program = Program(
            self._settings.command_for(self._home / "run", start=self._number),
            environment={**self._environment, VARIABLE: encode_orders(orders)},
            record=notes / RECORD_NAME,
            output=notes / "output.txt",
            scan=scan,
        )
        seen: list[RecordedLine] = []
        with program:
            silent = self._follow(program, seen, trigger, pace)
        code = program.code
        was_killed = program.was_killed
        was_hit = was_killed and not _is_over(seen, self._settings)
        is_meant = code == 0 or was_killed or _has_killed_itself(seen)
        if silent or not is_meant:
            raise self._failed(notes, code, seen, is_silent=silent)
        self._tidy()
        is_cut = was_killed or code != 0
        rank = None if trigger is None else trigger.rank
        return self._ended(notes, seen, is_cut=is_cut, was_hit=was_hit, newest=newest, rank=rank)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _follow(
        self, program: Program, seen: list[RecordedLine], trigger: Trigger | None, pace: StepTimes | None
    ) -> bool:
        """Watch until the end; returns whether the program was silent for too long."""
        over_at: float | None = None
        patience = self._settings.patience_secs
        entries = program.entries(patience_secs=patience)
        for entry in entries:
            if entry is None:
                return over_at is None
            self._watch(entry)
            if entry.kind == "saved":
                self._tidy()
            seen.append(entry)
            if over_at is None and _is_over(seen, self._settings):
                over_at = time.monotonic()
                if entry.kind != "done":  # a program without a manager does not end by itself
                    program.kill()
                    return False
                entries = program.entries(patience_secs=_GRACE_SECS)
                return self._wait_for_end(program, entries, seen)
            if trigger is not None and pace is not None and arms(seen, trigger):
                time.sleep(pace.delay_secs(trigger))
                program.kill(trigger.rank)
                seen.extend(program.rest())
                return False
        return False

    def _wait_for_end(self, program: Program, entries: Iterator[RecordedLine | None], seen: list[RecordedLine]) -> bool:
        """After the last step, let the program end, but not for ever."""
        late = time.monotonic() + _GRACE_SECS
        for entry in entries:
            if entry is None or time.monotonic() > late:
                program.kill()
                break
            seen.append(entry)
        return False

    def _ended(  # noqa: PLR0913 - keywords
        self,
        notes: Path,
        seen: list[RecordedLine],
        *,
        is_cut: bool,
        was_hit: bool,
        newest: int,
        rank: int | None,
    ) -> Start:
        starts = [entry for entry in seen if entry.kind == "start"]
        resumed = next((entry.data["resumed_from"] for entry in starts if entry.data["resumed_from"] is not None), None)
        stretch = stretch_of(seen, _saved(notes / MANIFESTS_NAME), number=self._number, is_cut=is_cut)
        if not starts and newest:  # without a manager, the first checkpoint shows whether it resumed
            first = min((entry.step for entry in seen if entry.kind == "saved"), default=newest + 1)
            if first > newest:
                resumed = f"step-{newest:08d}"
                last = max(stretch.last_step, newest)
                stretch = attrs.evolve(stretch, resumed_at=newest, is_resumed=True, last_step=last)
        if resumed is None and stretch.is_resumed:
            resumed = f"step-{stretch.resumed_at:08d}"
        hit = attrs.evolve(_hit(seen, stretch.resumed_at), rank=rank) if was_hit else None
        done = next((entry for entry in seen if entry.kind == "done"), None)
        ended = "by itself" if done is None and not is_cut else f"after {stretch.last_step} steps"
        places = tuple(dict.fromkeys(entry.data["place"] for entry in starts))
        return Start(stretch, resumed, hit, ended, tuple(seen), places)

    def _failed(self, notes: Path, code: int, seen: list[RecordedLine], *, is_silent: bool) -> ProgramFailed:
        said = ""
        with contextlib.suppress(OSError):
            said = (notes / "output.txt").read_text(encoding="utf-8", errors="replace").strip()[-_SHOWN_CHARACTERS:]
        step = max((entry.step for entry in seen if entry.kind == "step"), default=None)
        resumed = next((each.data["resumed_from"] for each in seen if each.kind == "start" and each.data["resumed_from"]), None)  # fmt: skip
        after = "before its first step" if step is None else f"after step {step}"
        end = f"exit code {code}"
        if is_silent:
            end = f"nothing for {self._settings.patience_secs:.0f} s ({'no manager, no checkpoint' if not seen else 'it hangs'})"
        is_again = self._number > 1
        whence = (
            f", resumed from {resumed}" if resumed else ", beside the checkpoints of the one before" if is_again else ""
        )
        fix = "correct the program: it does so without being killed"
        if _is_over(seen, self._settings):
            after = f"after its last step, {step}"
            fix = (
                "correct what it does after its loop; one that asks for another start by its exit code, since manager.should_stop is true, "
                "is rehearsed with a command that ends with 0 then, such as sh -c 'python train.py; test $? = 75'"
            )
        elif is_again:
            fix = "read its text: the program was fine until it was killed, and cannot go on"
        return ProgramFailed(
            f"start {self._number} of {self._home.name}{whence}",
            expected="a program that ends with exit code 0",
            found=f"{end} {after}, saying:\n{quoted(said)}\n",
            fix=f"{fix}; all that it said is in {notes / 'output.txt'}",
        )


def pace_of(start: Start) -> StepTimes:
    """How long a step and a save take, from the record of a run that was not killed."""
    kind = "step" if any(entry.kind == "step" for entry in start.entries) else "saved"
    moments = [entry.secs for entry in start.entries if entry.kind == kind]
    begun: dict[int, float] = {}
    saves = []
    for entry in start.entries:
        if entry.kind == "save":
            begun[entry.step] = entry.secs
        if entry.kind == "saved" and entry.step in begun:
            saves.append(entry.secs - begun[entry.step])
    steps = [after - before for before, after in itertools.pairwise(moments)]
    return StepTimes(statistics.median(steps or [0.0]), statistics.median(saves or [0.0]))


def environment_of_programs() -> dict[str, str]:
    """The environment for the user's program: this one, with unbuffered output."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


def _is_over(seen: list[RecordedLine], settings: RehearsalSettings) -> bool:
    if any(entry.kind == "done" for entry in seen):
        return True
    has_manager = any(entry.kind == "start" for entry in seen)
    return not has_manager and any(entry.kind == "saved" and entry.step >= settings.steps for entry in seen)


def _has_killed_itself(seen: list[RecordedLine]) -> bool:
    """Whether it trained past its end, so that its manager ended it; the exit code is then that of the program that started it."""
    return any(entry.kind == "done" and entry.data.get("is_killed") for entry in seen)


def _hit(seen: list[RecordedLine], resumed_at: int) -> Hit:
    saves = [entry for entry in seen if entry.kind in ("save", "saved")]
    step = max((entry.step for entry in seen if entry.kind in ("step", "saved")), default=resumed_at)
    if saves and saves[-1].kind == "save":
        return Hit(saves[-1].step, "save")
    return Hit(step, "step")


def _saved(manifests: Path) -> dict[tuple[str, int], SavedStep]:
    found = {}
    for path in sorted(manifests.glob("*/step-*.json")):
        step = step_of(path.stem)
        if step is not None:
            found[path.parent.name, step] = saved_of(
                decode_manifest(path.read_bytes(), str(path), read=read_index(path.with_suffix("")))
            )
    return found
