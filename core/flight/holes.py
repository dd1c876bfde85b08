"""The steps of which flight logs have no record, though they have some before and after it."""

from itertools import pairwise

from trainfold.core.flight.flight import Flight


def steps_unrecorded(one: Flight, other: Flight) -> tuple[tuple[int, int], ...]:
    """The steps of which a flight has no record, and another one has, from the first to the last that both can have: (first, last) of each hole.

    Examples:
        >>> from trainfold.core.flight.flight import flight_of
        >>> from trainfold.core.flight.step_record import StepRecord
        >>> steps_unrecorded(*(flight_of(map(StepRecord, steps)) for steps in ([1, 5, 7], range(1, 9))))
        ((2, 4), (6, 6))
    """
    if not one.steps or not other.steps:
        return ()
    first, last = _shared(one, other)
    holes: list[tuple[int, int]] = []
    for step in sorted(step for step in other.steps.keys() - one.steps.keys() if first <= step <= last):
        begin = holes.pop()[0] if holes and holes[-1][1] == step - 1 else step
        holes.append((begin, step))
    return tuple(holes)


def steps_in_neither(one: Flight, other: Flight) -> tuple[tuple[int, int], ...]:
    """The steps of which neither has a record, in the same form. Where each record counts several steps, those between two of them are not missing.

    Examples:
        >>> from trainfold.core.flight.flight import flight_of
        >>> from trainfold.core.flight.step_record import StepRecord
        >>> steps_in_neither(*(flight_of(map(StepRecord, steps)) for steps in ([1, 5, 7], [1, 2, 6, 7])))
        ((3, 4),)
        >>> steps_in_neither(*[flight_of(map(StepRecord, [4, 8, 16]))] * 2)
        ((9, 15),)
    """
    if not one.steps or not other.steps:
        return ()
    first, last = _shared(one, other)
    known = [step for step in sorted(one.steps.keys() | other.steps.keys()) if first <= step <= last]
    usual = min((after - before for before, after in pairwise(known)), default=1)
    return tuple((before + 1, after - 1) for before, after in pairwise(known) if after - before > usual)


def _shared(one: Flight, other: Flight) -> tuple[int, int]:
    """The first and the last step that both logs can have."""
    return max(min(one.steps), min(other.steps)), min(max(one.steps), max(other.steps))
