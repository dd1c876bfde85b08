"""`of_steps`: what the flight logs of two runs show about where they part."""

from collections.abc import Mapping
from typing import Final, TypeAlias

import attrs

from trainfold.core.flight.causes.evidence import Evidence
from trainfold.core.flight.causes.leaf_kinds import is_rng
from trainfold.core.flight.flight import Flight
from trainfold.core.flight.step_difference import StepDifference, host_draws, is_compared, step_difference
from trainfold.core.flight.step_record import StepRecord

Logs: TypeAlias = Mapping[int, Flight]
"""The flight logs of a run by rank."""

_FIELDS: Final = ("samples", "batch", "streams", "host_streams", "loss", "norm")
_RESULTS: Final = ("loss", "norm")
_Steps: TypeAlias = list[tuple[StepRecord, StepRecord]]


def only_rank(flights: tuple[Logs, Logs], rank: int, first: StepDifference) -> int | None:
    """The rank, if its logs alone differ in that step as they do: what one rank computes otherwise may reach all of them in the same step. None if that is not known of each other rank."""
    one, other = flights
    if one.keys() != other.keys():
        return None
    others = [(one[each], other[each]) for each in one.keys() - {rank}]
    if not all(is_compared(*pair, first.step, part) for pair in others for part in first.parts):
        return None
    found = (step_difference(*pair, first.step) for pair in others)
    alike = [each for each in found if each is not None and each.is_of_one_rank == first.is_of_one_rank]
    return None if alike else rank


def of_steps(one: Logs, other: Logs, known: Evidence) -> Evidence:
    """The evidence, with what the steps of both logs show up to where the runs part.

    Args:
        one: the logs of a run, as far as they count.
        other: those of the other run.
        known: what the states show, and the first difference of the logs.
    """
    pairs = [(one[rank], other[rank]) for rank in sorted(one.keys() & other.keys())]
    known = attrs.evolve(known, unrecorded=_unrecorded(pairs, known))
    ends = [step for step in (known.apart_at, known.difference and known.difference.step) if step is not None]
    if not ends or not pairs:
        return known
    end, begin = min(ends), known.same_at or 0
    both = [_both(*pair, begin + 1, end) for pair in pairs]
    is_whole = one.keys() == other.keys() and len(pairs) >= known.ranks and {len(each) for each in both} == {end - begin}  # fmt: skip
    states = {step for a, b in pairs for step in a.states.keys() & b.states.keys() if a.states[step] == b.states[step]}
    before = {name for name in _RESULTS for steps in both for each in steps if each[0].step < end and each[0].shows(each[1], name)}  # fmt: skip
    before |= {"state"} if any(begin < step < end for step in states) else set()
    seen = {name: {_is_alike(steps, name) for steps in both} for name in _FIELDS}
    if (
        seen["host_streams"] == {False}
        and (before or begin)
        and all(_are_unused(*pair, max(begin, 1), end) for pair in pairs)
    ):
        seen["host_streams"] = {True}
    shown = {name for name, found in seen.items() if is_whole and found == {True}}
    unlike = {name for name, found in seen.items() if False in found}
    drew_beside = False
    if "streams" in shown and known.is_by_state:
        # The line of a step is of before what the loop does after it; the state may be of after that.
        after = {_is_alike(_both(*pair, end + 1, end + 1), "streams") for pair in pairs}
        shown -= set() if after == {True} else {"streams"}
        drew_beside = False in after or (end == known.apart_at and any(is_rng(leaf.path) for leaf in known.leaves))
        unlike |= {"streams"} if drew_beside else set()
    earlier = [[each for each in steps if each[0].step < end] for steps in both]
    if is_whole and all(_is_alike(steps, "streams") if steps else "start" in known.alike for steps in earlier):
        shown.add("streams before")
    return attrs.evolve(
        known,
        alike=(known.alike - unlike) | shown,
        before=frozenset(before),
        is_whole=is_whole,
        drew_beside=drew_beside,
        is_settled=end - 1 in {known.same_at, *states},
        draws=max((host_draws(*pair) for pair in pairs), key=(None, "no", "one", "both").index),
    )


def _both(one: Flight, other: Flight, first: int, last: int) -> _Steps:
    """What both have of the steps from one to another."""
    steps = sorted(one.steps.keys() & other.steps.keys())
    return [(one.steps[step], other.steps[step]) for step in steps if first <= step <= last]


def _is_alike(steps: _Steps, name: str) -> bool | None:
    """Whether both have the same in each of these steps; None if that is not known of one of them, and of no step that it differs."""
    if any(a.is_comparable(b, name) and getattr(a, name) != getattr(b, name) for a, b in steps):
        return False
    return True if steps and all(a.shows(b, name) for a, b in steps) else None


def _are_unused(one: Flight, other: Flight, first: int, last: int) -> bool:
    """Whether neither program moves the streams of python and numpy after the first of these steps."""
    steps = range(first, last + 1)
    return all(
        steps[0] in each.steps and len({each.steps[step].host_streams for step in steps if step in each.steps}) == 1
        for each in (one, other)
    )


def _unrecorded(pairs: list[tuple[Flight, Flight]], known: Evidence) -> tuple[int, int] | None:
    """The steps just before the difference, or the state that differs, of which the logs say nothing together."""
    ends = [] if known.difference is None else [known.difference.step - 1]
    ends += [] if known.apart_at is None else [known.apart_at]
    if not ends:
        return None
    both = [max((step for step in a.steps.keys() & b.steps.keys() if step <= min(ends)), default=0) for a, b in pairs]
    begin = max(min(both, default=0), known.same_at or 0) + 1
    return (begin, min(ends)) if begin <= min(ends) else None
