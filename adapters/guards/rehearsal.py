"""`Rehearsal`: how `trainfold rehearse` changes a manager, read from the environment when the manager is made (ADR-0013)."""

import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

from trainfold.adapters.live.live import Live
from trainfold.adapters.watch.recorder import plain_number, with_recorder
from trainfold.backends.flight.record_file import RecordFile
from trainfold.backends.flight.replay_place import run_place
from trainfold.backends.runs.snapshot import step_of_state
from trainfold.backends.stores.kept_checkpoint import keep_checkpoint
from trainfold.backends.stores.local import Run, local_store, open_store
from trainfold.backends.stores.protocol import Store
from trainfold.backends.stores.stand_in import stand_in
from trainfold.core.digest import digest_of
from trainfold.core.format.file_names import directory_of
from trainfold.core.rehearsal.entry import EntryKind
from trainfold.core.rehearsal.number import exact_text
from trainfold.core.rehearsal.orders import KEPT_NAME, MANIFESTS_NAME, RECORD_NAME, VARIABLE, Orders, orders_of
from trainfold.core.save.events import Event
from trainfold.core.save.pruning import deletes_none
from trainfold.core.save.retention import Retention, keep_last
from trainfold.core.state.state import Progress, TrainState

_LOG = logging.getLogger("trainfold")
_LINGER_SECS: Final = 0.05
_AT_END_SECS: Final = 5.0  # before the last save: a kill after it would leave nothing to resume
_KEPT: Final = 2  # one to resume from, and one more if that is damaged
_PATIENCE: Final = 3  # a run that no manager has seen at a boundary may take this many times its steps


def rehearsal_of(environment: Mapping[str, str], *, rank: int) -> "Rehearsal | None":
    """The rehearsal that this process belongs to, or None.

    Args:
        environment: such as ``os.environ``.
        rank: of this process; rank 0 writes the record.

    Raises:
        InvalidArgument: if the variable is set and does not contain orders.
    """
    orders = orders_of(environment)
    return None if orders is None else Rehearsal(orders, rank=rank)


@final
class Rehearsal:
    """Moves the place where a manager saves, sets its cadence, ends its run, and writes the record. A `Recorder` of its live runs.

    Args:
        orders: of the rehearsal.
        rank: of this process.
    """

    def __init__(self, orders: Orders, *, rank: int) -> None:
        self.orders = orders
        self._rank = rank
        self._place = ""
        self._name = ""
        self._met_boundary = self._is_done = self._has_waited = False
        notes = Path(orders.notes)
        notes.mkdir(parents=True, exist_ok=True)
        self._record = RecordFile(notes / RECORD_NAME, clock=time.monotonic)

    def place(self, run: Run) -> Run:
        """Where the manager saves in this rehearsal: its own place if that is inside the rehearsal's home, else a new one there.

        Whatever place the program names, no earlier checkpoint is read or written.
        """
        if not isinstance(run, str | Path | Store):
            return run  # the manager refuses it by name
        run = (stand_in(str(run), self.orders) or run) if isinstance(run, str | Path) else open_store(run)
        run = local_store(run) or run  # nothing of a rehearsal goes to a far tier
        place = run_place(self.orders, run)
        given, stays = place.location, place.is_inside
        home = os.path.realpath(self.orders.home)
        slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", given.rstrip("/").rpartition("/")[2]).strip(".-") or "run"
        self._name = f"{slug}-{digest_of(given.encode()).removeprefix('xxh3:')[:8]}"
        if stays:  # a name that does not depend on the home
            self._name = os.path.relpath(os.path.realpath(given), home).replace("/", "-")
        self._place = given if stays else os.path.join(home, "managers", self._name)  # noqa: PTH118
        _LOG.warning(
            "REHEARSAL (%s is set): this manager saves into %s%s, every %s steps, and its run ends at step %s",
            VARIABLE, self._place, "" if stays else f" and not into {given}", self.orders.every, self.orders.steps,
        )  # fmt: skip
        self._write("start", 0, manager=self._name, place=self._place, resumed_from=None)
        return run if stays else self._place

    def records(self, given: int | None) -> int | None:
        """What the manager records: as given; but steps in any case in a replay, which compares them."""
        return 0 if given is None and self.orders.replay is not None else given

    def retention(self, given: Retention) -> Retention:
        """What the manager keeps: as given; but the last two instead of everything, so that the disk does not fill."""
        return keep_last(_KEPT) if deletes_none(given, None) else given

    def listener(self, listener: Callable[[Event], object] | None) -> Callable[[Event], object]:
        """A listener to the manager's events that writes the record too."""

        def hear(event: Event) -> object:
            self._hear(event)
            return None if listener is None else listener(event)

        return hear

    # --- boundaries --------------------------------------------------------------------------------------------------

    def watch(self, run: Live | TrainState) -> None:
        """Listen to a live run."""
        if isinstance(run, Live) and not any(each is self for each in run.recorders):
            run.recorders = with_recorder(run.recorders, self)
            if run.progress.step:  # it was not restored by a manager: record where it is
                self._step(run.progress.step)

    def is_last(self, run: Live | TrainState) -> bool:
        """Whether the run ends at this boundary."""
        self._met_boundary = True
        self.watch(run)
        step = _step(run)
        if isinstance(run, TrainState):
            self._step(step)  # a live run reports its steps when it advances
        return self.is_over(step)

    def begins_save(self, run: Live | TrainState) -> None:
        """Record that a save begins."""
        self._met_boundary = True
        self.watch(run)
        self._write("save", _step(run))

    def ends(self, run: Live | TrainState, drain: Callable[[], object]) -> None:
        """After the last boundary, wait until everything is durable, and record that the run is over."""
        if self.is_over(_step(run)) and not self._is_done:
            drain()
            self._done(_step(run), "the steps of the rehearsal")

    # --- as a recorder -----------------------------------------------------------------------------------------------

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Write values at once, so that a kill does not lose them."""
        texts = {name: exact_text(plain_number(value)) for name, value in values.items()}
        self._write("values", step, values=texts)

    def consumed(self, batches: Sequence[str]) -> None:
        """A rehearsal compares positions; batches are not recorded."""

    def advanced(self, progress: Progress) -> None:
        """Record a step; kill a run that ignores its end."""
        step = progress.step
        self._step(step, epoch=progress.epoch)
        if not self._met_boundary and step > _PATIENCE * self.orders.steps:
            self._done(step, "no call of manager.step or manager.save")
            self._die(step)

    def is_over(self, step: int) -> bool:
        """Whether the rehearsal ends at this step."""
        return step >= self.orders.steps

    # --- inside ------------------------------------------------------------------------------------------------------

    def _step(self, step: int, **data: object) -> None:
        if self._is_done and step > self.orders.steps:
            self._die(step)
        self._write("step", step, **data)
        if step > self.orders.linger_after:
            waits = self.is_over(step) and not self._has_waited
            self._has_waited |= waits
            time.sleep(_AT_END_SECS if waits else _LINGER_SECS)

    def _done(self, step: int, why: str) -> None:
        self._is_done = True
        self._write("done", step, why=why)

    def _die(self, step: int) -> None:
        """Kill a run that ignores both ``manager.should_stop`` and the end of ``live.batches()``."""
        self._record.write("done", step, rank=self._rank, why="it went on past its end", is_killed=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def _hear(self, event: Event) -> None:
        if event.kind == "restored" and event.step is not None:
            name = event.checkpoint or directory_of(event.step)
            self._write("start", event.step, manager=self._name, place=self._place, resumed_from=name)
            if self.is_over(event.step):
                self._done(event.step, "it was over when it was killed")
        if event.kind == "committed" and event.step is not None and event.checkpoint is not None:
            if self._rank == 0:
                self._keep_manifest(event.checkpoint)
            self._write("saved", event.step, checkpoint=event.checkpoint)

    def _keep_manifest(self, checkpoint: str) -> None:
        """Keep the manifest, which has the digest of every leaf, and hard links to the data, before old checkpoints are deleted."""
        keep_checkpoint(Path(self._place, checkpoint), Path(self.orders.notes, KEPT_NAME, self._name))
        kept = Path(self.orders.notes, MANIFESTS_NAME, self._name)
        kept.mkdir(parents=True, exist_ok=True)
        for index in Path(self._place, checkpoint).glob("index-*.json"):  # of the ranks beside the first
            (kept / checkpoint).mkdir(exist_ok=True)
            shutil.copyfile(index, kept / checkpoint / index.name)
        shutil.copyfile(Path(self._place, checkpoint, "manifest.json"), kept / f".{checkpoint}")
        (kept / f".{checkpoint}").replace(kept / f"{checkpoint}.json")

    def _write(self, kind: EntryKind, step: int, **data: object) -> None:
        if self._rank == 0 or kind == "start":  # the other ranks record which processes they are
            self._record.write(kind, step, rank=self._rank, **data)


def _step(run: Live | TrainState) -> int:
    return run.progress.step if isinstance(run, Live) else step_of_state(run)
