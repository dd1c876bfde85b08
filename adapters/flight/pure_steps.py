"""Pure steps that are recorded: what a flight log keeps of each, from its batch, its metrics and its state."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar, final

import attrs
import xxhash

from trainfold.adapters.batches.batch_digest import WHOLE, logged_digest
from trainfold.core.errors import InvalidState
from trainfold.core.flight.flight import state_digests
from trainfold.core.flight.step_record import LogLine, StepRecord, float_bits_of
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.state.components import select
from trainfold.core.state.state import TrainState

S = TypeVar("S", bound=TrainState)
B = TypeVar("B")
PureStep: TypeAlias = Callable[[S, B], tuple[S, Mapping[str, Any]]]


@final
@attrs.frozen
class RecordedStep(Generic[S, B]):
    """A pure step that also writes what it did; the log goes back where its state does.

    Attributes:
        step: what `make_step` returns, or any function ``(state, batch) -> (state, metrics)`` whose states count their steps. Of the metrics,
            ``loss`` and ``grad_norm`` are kept.
        append: writes lines.
        states_every: digest the whole state each so many steps; 0 for never.
        begins: called before each step, with the steps that are done.
    """

    step: PureStep[S, B]
    append: Callable[[Sequence[LogLine]], object] = attrs.field(repr=False)
    states_every: int = attrs.field(kw_only=True)
    begins: Callable[[int], object] = attrs.field(kw_only=True, repr=False)

    def __call__(self, state: S, batch: B) -> tuple[S, Mapping[str, Any]]:
        """Do the step, and write it."""
        self.begins(counted(state))
        digest = digest_of_batches([logged_digest(batch)])
        after, metrics = self.step(state, batch)
        record = record_of_step(after, metrics, digest)
        has_digests = self.states_every and record.step % self.states_every == 0
        self.append([record, *(digests_of(after) if has_digests else ())])
        return after, metrics


def record_of_step(after: TrainState, metrics: Mapping[str, Any], batch: tuple[bytes, bool]) -> StepRecord:
    """The record of a step.

    Args:
        after: the state after it.
        metrics: what the step returned with it.
        batch: `digest_of_batches` of its batch, before the step.
    """
    known = {
        field: float_bits_of(float(metrics[name]))
        for field, name in (("loss", "loss"), ("norm", "grad_norm"))
        if metrics.get(name) is not None
    }
    streams = None
    if after.rng is not None:
        streams = bytes.fromhex(fingerprint(select(after, ["rng"]))["rng"][-16:])
    epoch, samples = (0, 0) if after.trainer is None else (after.trainer.epoch, after.trainer.samples)
    return StepRecord(counted(after), epoch, samples, **known, batch=batch[0], streams=streams, is_whole=batch[1])


def digests_of(after: TrainState) -> tuple[LogLine, ...]:
    """The lines for the state after a step."""
    return state_digests(counted(after), fingerprint(after))


def digest_of_batches(digests: Sequence[str]) -> tuple[bytes, bool]:
    """The digest of the batches of a step, 8 bytes, and whether it covers every byte of them.

    Args:
        digests: `logged_digest` of each.
    """
    is_whole = all(each.startswith(WHOLE) for each in digests)
    return xxhash.xxh3_64_digest(" ".join(digests).encode()), is_whole


def counted(state: TrainState) -> int:
    """The steps that a state has counted.

    Raises:
        InvalidState: if it counts none.
    """
    if state.trainer is None:
        raise InvalidState("state", expected="one that counts its steps, with trainer", found="none that does",
                           fix="make it with trainfold.init_state")  # fmt: skip
    return state.trainer.step
