"""`StepDifference`: the first step in which two flights differ, and in what."""

from typing import Final, Literal, TypeAlias, final

import attrs

from trainfold.core.flight.flight import Flight
from trainfold.core.flight.step_record import StepRecord, float_of_bits

HostDraws: TypeAlias = Literal["both", "one", "no"]
"""Which of two programs draw from streams of python or numpy that were elsewhere from the first step on; ``no`` if they were not."""

_NUMBERS: Final = ("loss", "norm")
_POSITION: Final = ("epoch", "samples")
_WORDS: Final = {
    "batch": "it read other batches",
    "streams": "the random streams are elsewhere after it",
    "host_streams": "the streams of python or numpy are elsewhere after it",
}


@final
@attrs.frozen
class StepDifference:
    """The first step in which two flights differ.

    Attributes:
        step: the step.
        parts: what differs, of ``samples``, ``epoch``, ``batch``, ``loss``, ``norm``, ``streams``, ``host_streams`` and ``state``. The
            streams of python and numpy count only where other things differ, and they were the same one or two steps before: a draw after the last use in a step shows in the next one. Those of torch do not count where they
            were elsewhere before, and results are the same: nothing depends on them.
        same: what is known in both, and the same.
        one: the record of the first flight; None if it has none, where only the state is compared.
        other: that of the second one.
        components: the components of the state that differ, where both have their digests.

    Examples:
        >>> from trainfold.core.flight.flight import flight_of
        >>> from trainfold.core.flight.step_record import float_bits_of
        >>> one, other = (flight_of([StepRecord(1, 0, 32, loss=float_bits_of(loss))]) for loss in (0.5, 0.25))
        >>> print(first_step_apart(one, other))
        step 1: the loss is 0.5 and 0.25; the same: samples, epoch
    """

    step: int
    parts: tuple[str, ...]
    same: tuple[str, ...]
    one: StepRecord | None
    other: StepRecord | None
    components: tuple[str, ...] = ()

    def __str__(self) -> str:
        same = f"; the same: {', '.join(self.same)}" if self.same else ""
        return f"step {self.step}: {'; '.join(map(self._said, self.parts))}{same}"

    @property
    def is_of_one_rank(self) -> bool:
        """Whether something differs that each rank has for itself: all of them have one loss, one norm and one state."""
        return not {*self.parts} <= {*_NUMBERS, "state"}

    def _said(self, part: str) -> str:
        if part == "state":
            return f"the state after it differs in {', '.join(self.components)}"
        if part in _WORDS or self.one is None or self.other is None:
            return _WORDS[part]
        values = [getattr(record, part) for record in (self.one, self.other)]
        shown = [repr(float_of_bits(value)) if part in _NUMBERS else str(value) for value in values]
        if shown[0] == shown[1]:  # NaNs of other bits
            shown = [value.hex() for value in values]
        count = "is" if part in (*_NUMBERS, "epoch") else "are"
        return f"the {part} {count} {shown[0]} and {shown[1]}"


def first_step_apart(one: Flight, other: Flight, *, after: int = 0, until: int | None = None) -> StepDifference | None:
    """The first step in which two flights differ, of those that both can have; None if they do not.

    What only one of them knows is not compared: a field, or a step. A flight that ends earlier, or has lost steps, is not another one. Torch's
    streams alone, where they were never seen to be the same, count only if no result after it is known.

    Args:
        one: a flight.
        other: another flight.
        after: look at later steps than this one.
        until: and at none after this one; None for all.
    """
    stray: StepDifference | None = None
    for step in sorted((one.steps.keys() & other.steps.keys()) | (one.states.keys() & other.states.keys())):
        if after < step and (until is None or step <= until):
            found = step_difference(one, other, step)
            if found is not None and (found.parts != ("streams",) or _alike(one, other, step - 1, "streams")):
                return found
            is_known = found is None and _has_results(one, other, step)
            stray = None if is_known else stray or found
    return stray


def step_difference(one: Flight, other: Flight, step: int) -> StepDifference | None:
    """What differs in one step; None if nothing does that both know."""
    mine, theirs = one.steps.get(step), other.steps.get(step)
    parts: list[str] = []
    same: list[str] = []
    for name in (*_POSITION[::-1], "batch", *_NUMBERS):
        if mine is None or theirs is None or not mine.is_comparable(theirs, name):
            continue
        if getattr(mine, name) != getattr(theirs, name):
            parts.append(name)
        else:
            same.append(name if mine.shows(theirs, name) else f"{name} as far as samples of it show")
    streams = _alike(one, other, step, "streams")
    if streams:
        same.append("streams")
    elif streams is False and not _is_adrift(one, other, step):
        parts.append("streams")
    were_alike = any(_alike(one, other, at, "host_streams") for at in (step - 1, step - 2))
    if parts and were_alike and _alike(one, other, step, "host_streams") is False:
        parts.append("host_streams")
    states = one.states.get(step, {}), other.states.get(step, {})
    components = tuple(name for name, digest in states[0].items() if digest != states[1].get(name, digest))
    if states[0] and states[1]:
        (parts if components else same).append("state")
    return StepDifference(step, tuple(parts), tuple(same), mine, theirs, components) if parts else None


def is_compared(one: Flight, other: Flight, step: int, part: str) -> bool:
    """Whether both flights know a part of a step, so that it would show if it differed.

    Examples:
        >>> from trainfold.core.flight.flight import flight_of
        >>> log = flight_of([StepRecord(1, loss=bytes(8))])
        >>> is_compared(log, log, 1, "loss"), is_compared(log, log, 2, "loss"), is_compared(log, log, 1, "state")
        (True, False, False)
    """
    if part == "state":
        return all(step in each.states for each in (one, other))
    mine, theirs = one.steps.get(step), other.steps.get(step)
    return mine is not None and theirs is not None and mine.is_comparable(theirs, part)


def steps_with_other_batch_digests(one: Flight, other: Flight) -> list[int]:
    """The steps whose batches both flights know, and of which they have digests that cannot be compared: of one every byte, of the other samples."""
    both = ((one.steps[step], other.steps[step]) for step in sorted(one.steps.keys() & other.steps.keys()))
    return [a.step for a, b in both if None not in (a.batch, b.batch) and not a.is_comparable(b, "batch")]


def _alike(one: Flight, other: Flight, step: int, name: str) -> bool | None:
    """Whether both have the same there; None if one of them does not know it."""
    values = [getattr(flight.steps.get(step), name, None) for flight in (one, other)]
    return None if None in values else values[0] == values[1]


def _has_results(one: Flight, other: Flight, step: int) -> bool:
    """Whether results of a step are known in both, and the same."""
    states = [flight.states.get(step) for flight in (one, other)]
    found = [_alike(one, other, step, name) for name in _NUMBERS] + [None if None in states else states[0] == states[1]]
    return True in found and False not in found


def last_result(one: Flight, other: Flight) -> int:
    """The last step of which both know a loss, a norm or a state that is the same; 0 without one.

    Examples:
        >>> from trainfold.core.flight.flight import flight_of
        >>> log = flight_of([StepRecord(1, loss=bytes(8)), StepRecord(2, batch=bytes(8))])
        >>> last_result(log, log)
        1
    """
    steps = (one.steps.keys() & other.steps.keys()) | (one.states.keys() & other.states.keys())
    return max((step for step in steps if _has_results(one, other, step)), default=0)


def _is_adrift(one: Flight, other: Flight, step: int) -> bool:
    """Whether torch's streams were elsewhere before a step, and the results were the same in it or in the one before: nothing depends on them."""
    if _alike(one, other, step - 1, "streams"):
        return False
    return any(_has_results(one, other, at) for at in (step - 1, step))


def host_draws(one: Flight, other: Flight) -> HostDraws | None:
    """Who draws from streams of python or numpy, if they are elsewhere after the first step that both flights know; None if they know none.

    A digest that changes is one of a stream that is used.

    Examples:
        >>> from trainfold.core.flight.flight import flight_of
        >>> flights = [flight_of(StepRecord(at + 1, host_streams=bytes([digest])) for at, digest in enumerate(digests)) for digests in ((1, 1), (2, 3))]
        >>> host_draws(*flights), host_draws(flights[1], flights[1])
        ('one', 'no')
    """
    both = [step for step in sorted(one.steps.keys() & other.steps.keys())
            if None not in (one.steps[step].host_streams, other.steps[step].host_streams)]  # fmt: skip
    digests = [[flight.steps[step].host_streams for step in both] for flight in (one, other)]
    if not both:
        return None
    if digests[0][0] == digests[1][0]:
        return "no"
    draw = [len({*each}) > 1 for each in digests]
    return "both" if all(draw) else "one" if any(draw) else "no"
