"""`FlightRecorder`: writes the flight log of a live run for its manager."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from trainfold.adapters.flight.journal import Journal
from trainfold.adapters.flight.nonfinite_end import nonfinite_end
from trainfold.adapters.flight.pure_steps import B, PureStep, RecordedStep, S, digest_of_batches
from trainfold.adapters.flight.stream_digest import StreamDigest
from trainfold.adapters.live.live import Live
from trainfold.adapters.watch.recorder import plain_number, with_recorder
from trainfold.backends.flight.flights import FlightWriter, flight_writer
from trainfold.backends.flight.journals import journal_writer
from trainfold.backends.stores.protocol import Store
from trainfold.core.checks import count
from trainfold.core.errors import InvalidArgument
from trainfold.core.flight.flight import state_digests
from trainfold.core.flight.step_record import LogLine, StepRecord, float_bits_of
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.rehearsal.orders import Orders
from trainfold.core.state.state import Progress, TrainState

_LOSS, _NORM = "loss", "grad_norm"
SELDOM: Final = 10  # steps at least between two values of a name in the journal: of evaluations, and not of each step


def flight_recorder(
    store: Store, rank: int, states_every: int | None, orders: Orders | None = None
) -> "FlightRecorder | None":
    """The recorder that a manager's ``record=`` asks for, or a replay; None without one.

    Raises:
        InvalidArgument: for anything but a number of steps.
    """
    if states_every is None:
        return None
    count("CheckpointManager.record", states_every, least=0,
          fix="pass a number of steps between digests of the whole state, such as record=100; 0 for none of these")  # fmt: skip
    file = flight_writer(store, rank)
    journal = Journal(journal_writer(store), file) if rank == 0 else None
    return FlightRecorder(file, states_every, rank=rank, orders=orders, journal=journal)


@final
class FlightRecorder:
    """A `Recorder` of the live runs of a manager.

    Args:
        file: the log.
        states_every: digest the state each so many steps; 0 for never.
        rank: of this process.
        orders: of a replay, which ends at a NaN, or lets a loop of states record itself; None without one.
        journal: writes when what happened; None on all ranks but the first.
    """

    def __init__(
        self,
        file: FlightWriter,
        states_every: int,
        *,
        rank: int = 0,
        orders: Orders | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.journal = journal
        self._orders = orders
        self._nonfinite = nonfinite_end(orders, rank, lambda: self._under_way)
        self._under_way: int | None = None
        self._file = file
        self._states_every = states_every
        self._streams = StreamDigest()
        self._watched: weakref.ref[Live] | None = None
        self._has_begun = self._has_pure_steps = False
        self._values: dict[str, bytes] = {}
        self._batches: list[str] = []
        self._step: int | None = None  # the last one that was recorded here
        self._seen: dict[str, tuple[int, int]] = {}  # name of another value -> its last step, and the last kept

    def watch(self, run: Live | TrainState) -> None:
        """Record the steps of a live run from here on.

        Raises:
            InvalidArgument: for a state, unless its step was made by `recorded`: what a step of it read, and its loss, are known to the loop alone.
        """
        if not isinstance(run, Live):
            if self._has_pure_steps or self._orders is not None:
                return
            raise InvalidArgument(
                "CheckpointManager.record",
                expected="None, for a loop of states",
                found="a number",
                fix="record the step itself: step = manager.recorded(step)",
            )
        if self._watched is None or self._watched() is not run:
            self._begin(run.progress.step)
            run.take_logged()
            if self._nonfinite is not None:
                self._nonfinite.begin(run.attached())
            self._watched, self._under_way = weakref.ref(run), run.progress.step + 1
            run.recorders = with_recorder(run.recorders, self)

    def recorded(self, step: PureStep[S, B]) -> PureStep[S, B]:
        """The same pure step, which also writes what it did."""
        self._has_pure_steps = True
        return RecordedStep(step, self._append, states_every=self._states_every, begins=self._begin)

    def _begin(self, done: int) -> None:
        """Note that a process trains, before its first step."""
        self._under_way = done + 1
        if not self._has_begun and self.journal is not None:
            self.journal.started(done)
        self._has_begun = True

    def _append(self, lines: Sequence[LogLine]) -> None:
        """Write a pure step, and end there if it is not finite and a replay asks for that."""
        if self.journal is not None and lines:
            self.journal.did(lines[0].step)
        self._file.append(lines)
        if self._nonfinite is not None:
            self._nonfinite.recorded(lines)

    def boundary(self, run: Live) -> None:
        """Digest the state, if that is due after this step."""
        step = run.progress.step
        if self._states_every and step == self._step and step % self._states_every == 0:
            self._step = None
            self._file.append(state_digests(step, fingerprint(run.read(view=True, is_saved=False).state)))

    def put(self) -> None:
        """Make what is recorded so far outlive this process, where the run is in a store that cannot append. It makes requests."""
        self._file.put()
        if self.journal is not None:
            self.journal.put()

    def finished(self) -> None:
        """Note that the loop is over."""
        if self._nonfinite is not None:
            self._nonfinite.over()
        self._file.put()
        if self.journal is not None:
            self.journal.finished()

    def close(self, failures: Sequence[Exception] = ()) -> None:
        """Close the log, and end the journal.

        Args:
            failures: the end of the manager raises the first of them, if nothing else is raised.
        """
        if self._nonfinite is not None:
            self._nonfinite.closed()
        self._file.close()
        if self.journal is not None:
            self.journal.ended(failures)

    # --- as a recorder -----------------------------------------------------------------------------------------------

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Keep the loss and the norm of the step under way; of several values the last one counts. Others go to the journal, if they do not come in each step."""
        if self.journal is not None:
            for name in values.keys() - {_LOSS, _NORM}:
                if self._is_evaluation(step, name):
                    self.journal.evaluated(step, name, _real(values[name]))
        self._values |= {name: float_bits_of(_real(values[name])) for name in (_LOSS, _NORM) if name in values}

    def _is_evaluation(self, step: int, name: str) -> bool:
        """Whether a value is kept: the name does not come in each step, and the value before is some steps old. A run that has gone back begins again."""
        last, kept = self._seen.get(name, (step + 1, 0))
        is_kept = step < last or (step - last > 1 and step - kept >= SELDOM)
        self._seen[name] = step, step if is_kept else kept
        return is_kept

    def consumed(self, batches: Sequence[str]) -> None:
        """Keep the digests of batches of the step under way."""
        self._batches += batches

    def advanced(self, progress: Progress) -> None:
        """Write the step."""
        if self.journal is not None:
            self.journal.did(progress.step)
        live = None if self._watched is None else self._watched()
        is_known = self._batches and (live is None or live.uncounted() is None)  # else it may have read those instead
        batches, is_whole = digest_of_batches(self._batches) if is_known else (None, False)
        self._file.append([StepRecord(progress.step, progress.epoch, progress.samples, self._values.get(_LOSS),
                                      self._values.get(_NORM), batches, *self._streams(), is_whole=is_whole)])  # fmt: skip
        if self._nonfinite is not None:
            self._nonfinite.stepped(progress.step, *map(self._values.get, (_LOSS, _NORM)))
        self._values, self._batches, self._step, self._under_way = {}, [], progress.step, progress.step + 1

    def is_over(self, step: int) -> bool:
        """A log ends no run."""
        del step
        return False


def _real(value: Any) -> float:
    """A number as a float; the real part of a complex one."""
    found = plain_number(value)
    return found.real if isinstance(found, complex) else found
