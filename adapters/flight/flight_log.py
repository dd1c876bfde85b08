"""`FlightLog`: the flight log of a loop of pure steps; `replay`: runs such steps again, and compares them with a log."""

import itertools
import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Final, final

import attrs

from trainfold.adapters.batches.batch_digest import logged_digest
from trainfold.adapters.flight.nonfinite_end import nonfinite_end
from trainfold.adapters.flight.pure_steps import (
    B,
    PureStep,
    RecordedStep,
    S,
    counted,
    digest_of_batches,
    digests_of,
    record_of_step,
)
from trainfold.adapters.flight.replay_orders import end_after_last
from trainfold.backends.flight.flights import FlightWriter, flight_name, flight_writer, read_flights
from trainfold.backends.job import Job
from trainfold.backends.stores.local import Run, open_store
from trainfold.core.checks import count
from trainfold.core.errors import InvalidArgument
from trainfold.core.flight.flight import Flight, flight_of
from trainfold.core.flight.step_difference import StepDifference, step_difference
from trainfold.core.flight.step_record import LogLine
from trainfold.core.markup.texts import steps_text
from trainfold.core.rehearsal.orders import orders_of
from trainfold.core.state.state import TrainState

_LOG: Final = logging.getLogger("trainfold")


def _close_later(file: FlightWriter) -> None:
    """In a thread of its own: the garbage collector may call this inside of the one that puts, or saves."""
    Job(file.close, name="trainfold-log-end").start()


@final
class FlightLog:
    """The flight log of a loop of pure steps, beside its checkpoints. It is the same log as that of ``CheckpointManager(record=)``.

    Law: a run that was killed and resumed has the log of the run that was never killed.

    Args:
        run: the directory of the run, its URL, or its store.
        states_every: digest the whole state each so many steps; 0 for never.
        rank: whose log it is.

    Raises:
        InvalidArgument: for anything but a run.

    Examples:
        >>> import tempfile, torch
        >>> from trainfold import Loss, init_state, make_step, optimizer, replay
        >>> model, sgd = torch.nn.Linear(1, 1), optimizer(torch.optim.SGD, lr=0.5)
        >>> step = make_step(model, lambda model, batch: Loss(model(batch).square().sum(), len(batch)), sgd)
        >>> run, first = tempfile.mkdtemp(), init_state(model, sgd, seed=0)
        >>> recorded, state = FlightLog(run, states_every=2).recorded(step), first
        >>> for number in range(4):
        ...     state, _ = recorded(state, torch.full((2, 1), float(number)))
        >>> print(replay(step, first, [torch.full((2, 1), float(number)) for number in range(4)], run))
        steps 1 to 4 are those of the log, bit for bit
    """

    def __init__(self, run: Run, *, states_every: int = 0, rank: int = 0) -> None:
        self._states_every = count("FlightLog.states_every", states_every, least=0, fix="0 digests no state")
        self._orders = orders_of(os.environ)
        self._under_way: int | None = None
        self._nonfinite = nonfinite_end(self._orders, rank, lambda: self._under_way)
        store = open_store(run)
        self._file = flight_writer(store, rank)
        self._where = f"{store.url}/{flight_name(rank)}"
        weakref.finalize(self, _close_later, self._file)

    def __repr__(self) -> str:
        return f"FlightLog({self._where!r}, states_every={self._states_every})"

    def recorded(self, step: PureStep[S, B]) -> PureStep[S, B]:
        """The same step, which also writes what it did; the log goes back where its state does.

        Args:
            step: what `make_step` returns, or any function ``(state, batch) -> (state, metrics)`` whose states count their steps. Of the metrics,
                ``loss`` and ``grad_norm`` are kept.
        """
        return RecordedStep(step, self._append, states_every=self._states_every, begins=self._begin)

    def _begin(self, done: int) -> None:
        self._under_way = done + 1

    def _append(self, lines: Sequence[LogLine]) -> None:
        """A method of this object, so that the log is not closed while a step writes it. A replay ends here, as no manager ends it."""
        end_after_last(self._orders, lines[0].step)
        self._file.append(lines)
        if self._nonfinite is not None:
            self._nonfinite.recorded(lines)

    def close(self) -> None:
        """Write the rest, as into a bucket, where lines are put each minute; a later step opens the log again.

        Without it that is done when neither this object nor a step of it is left, and at the end of the program.
        """
        self._file.close()


@final
@attrs.frozen
class Replayed:
    """What running steps again has shown; true if they are those of the log.

    Attributes:
        first: the first step that was run again.
        last: the last one.
        difference: the first step that differs, in which the first record is that of the log; None if none does.
        state: the state after the last step.

    Examples:
        >>> print(Replayed(4, 6, None, TrainState()))
        steps 4 to 6 are those of the log, bit for bit
    """

    first: int
    last: int
    difference: StepDifference | None
    state: TrainState = attrs.field(repr=False)

    def __bool__(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is None:
            return f"{_are_equal(self.first, self.last)}, bit for bit"
        before = "" if self.last == self.first else f"{_are_equal(self.first, self.last - 1)}; "
        return f"{before}{self.difference} (first the log, then the replay)"


def _are_equal(first: int, last: int) -> str:
    return f"{steps_text(first, last)} {'is that' if first == last else 'are those'} of the log"


def replay(step: PureStep[S, B], state: S, batches: Iterable[B], log: "Flight | Run") -> Replayed:
    """Run steps again from a state, and compare each with what a log says that it did.

    It ends at the first difference, with the batches, or with the log. Nothing is written. A step that donates consumes the state.

    Args:
        step: the step.
        state: where to begin, such as what `trainfold.load` returned.
        batches: of the steps that follow.
        log: the flight, or a run, of which that of rank 0 is read.

    Raises:
        InvalidArgument: if the log has no record of the step after the state, or there is no batch. InvalidState: if the state counts no steps.
        CheckpointMissing: if the run has no log.

    Examples:
        >>> from trainfold import Progress
        >>> from trainfold.core.flight.step_record import StepRecord, float_bits_of
        >>> def step(state, batch):
        ...     return state.evolve(trainer=Progress(state.trainer.step + 1, samples=state.trainer.samples + batch)), {"loss": batch / 2}
        >>> log = flight_of([StepRecord(1, 0, 8, loss=float_bits_of(4.0)), StepRecord(2, 0, 16, loss=float_bits_of(4.0))])
        >>> print(replay(step, TrainState(trainer=Progress()), [8, 9], log))
        step 1 is that of the log; step 2: the samples are 16 and 17; the loss is 4.0 and 4.5; the same: epoch (first the log, then the replay)
    """
    if not isinstance(log, Flight):
        log = read_flights(log).get(0, Flight())
    first, found, difference, is_past = counted(state) + 1, 0, None, False
    for number, batch in zip(itertools.count(first), batches, strict=False):
        is_past = number not in log.steps
        if is_past:
            break
        digest = digest_of_batches([logged_digest(batch)])
        state, metrics = step(state, batch)
        lines: list[LogLine] = [
            record_of_step(state, metrics, digest),
            *(digests_of(state) if number in log.states else ()),
        ]
        found, difference = number, step_difference(log, flight_of(lines), number)
        if difference is not None:
            break
    if difference is None and found and found + 1 not in log.steps and (is_past or found < max(log.steps)):
        _LOG.warning("the replay ended after step %d, as the log has no record of the next one%s", found, f": {log.damage.text_of('the log')}" if log.damage else "")  # fmt: skip
    if not found:
        raise InvalidArgument("replay", expected=f"a record of step {first} in the log, and a batch for it",
                              found=f"a log of {log}" if first not in log.steps else "no batch",
                              fix="begin with the state of a step that the log has, and pass the batches after it")  # fmt: skip
    return Replayed(first, found, difference, state)
