"""`decide`: whether to save and whether to stop at a boundary, as a pure function of its arguments.

`should_save` is the part that depends on the step alone.
"""

from collections.abc import Collection, Iterable
from typing import Final, final

import attrs

from trainfold.core.checks import count, positive
from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown
from trainfold.core.save.cadence import FIRST_SAVE_SECS
from trainfold.core.save.requests import StopRequest, merge_requests

_MEANING: Final = {
    "every": "the cadence in steps",
    "every_secs": "the cadence in seconds",
    "best": "the best result so far",
    "last": "the last step",
    "batch": "the next step has another batch",
    "save": "asked to save",
    "stop": "asked to stop",
    "save_and_stop": "asked to save and stop",
    "abort": "asked to stop without saving",
    "saved": "this step is saved already",
}
_SAVING: Final = ("every", "every_secs", "best", "last", "save", "stop", "save_and_stop")
_STOPPING: Final = frozenset({"last", "stop", "save_and_stop", "abort"})


@final
@attrs.frozen
class Triggers:
    """When to save without a request. Make it with `make_triggers`.

    Attributes:
        every: save at each multiple of this number of optimizer steps; None for no cadence in steps.
        every_secs: save when this many seconds have passed since the last save; None for no cadence in seconds.
        at_end: whether to save the state with which the run ends, at its last step or on a request to stop.
    """

    every: int | None = None
    every_secs: float | None = None
    at_end: bool = True


@final
@attrs.frozen
class Verdict:
    """What happens at a boundary. Prints as a sentence.

    Attributes:
        save: whether to save.
        stop: whether the loop ends here.
        reasons: why, in a fixed order: ``every``, ``every_secs``, ``best``, ``last``, and the requests. ``saved`` comes last if only an
            earlier save of this step prevents the save, and ``batch`` if the next step has another batch.
    """

    save: bool
    stop: bool
    reasons: tuple[str, ...] = ()

    @property
    def must_save(self) -> bool:
        """Whether the save waits for the one before, and is not left out, because a later state cannot take its place."""
        return not {"best", "batch"}.isdisjoint(self.reasons)

    def with_change(self) -> "Verdict":
        """The verdict at a boundary that is not saved yet, if the next step has another batch; a run that ends has no next step.

        Examples:
            >>> print(Verdict(save=False, stop=False).with_change())
            save and go on: the next step has another batch
        """
        return self if self.stop else attrs.evolve(self, save=True, reasons=(*self.reasons, "batch"))

    def __str__(self) -> str:
        what = f"{'save' if self.save else 'do not save'} and {'stop' if self.stop else 'go on'}"
        why = ", ".join(_MEANING.get(reason, reason) for reason in self.reasons)
        return f"{what}: {why or 'nothing is due'}"


_NOTHING_DUE: Final = Verdict(save=False, stop=False)


def make_triggers(*, every: int | None = None, every_secs: float | None = None, at_end: bool = True) -> Triggers:
    """Return checked triggers.

    Args:
        every: a cadence in optimizer steps, >= 1; None for none.
        every_secs: a cadence in seconds, > 0; None for none. Which steps it saves depends on the machine; those of ``every`` do not.
        at_end: False saves the end of a run only if a request or a cadence asks for it, as in a search over settings.

    Raises:
        InvalidArgument: naming the invalid argument.

    Examples:
        >>> make_triggers(every=500, every_secs=600)
        Triggers(every=500, every_secs=600.0, at_end=True)
    """
    check_cadence(every)
    secs = None
    if every_secs is not None:
        fix = "pass a number of seconds, or None to save by steps only"
        secs = positive("every_secs", every_secs, expected="a finite number > 0, or None", fix=fix)
    if not isinstance(at_end, bool):
        raise InvalidArgument("at_end", expected="True or False", found=shown(at_end),
                              fix="pass True to save the last state, or False")  # fmt: skip
    return Triggers(every, secs, at_end)


def decide(  # noqa: PLR0913 - one keyword for each source
    step: int,
    *,
    triggers: Triggers,
    last_saved: int | None,
    secs_since_save: float,
    requests: Iterable[StopRequest] = (),
    is_last: bool = False,
    is_best: bool = False,
) -> Verdict:
    """Decide from all reasons to save or stop at a boundary.

    Laws: no step is saved twice, however many reasons there are. ``abort`` saves nothing and stops. The order and the number of the requests
    make no difference. The steps that ``every`` saves depend neither on interruptions nor on other saves. At step 0 no cadence is due.

    Pass what all ranks agree on: the merged requests, and the clock of rank 0. See `trainfold.core.save.boundary`.

    Args:
        step: optimizer steps done, >= 0.
        triggers: when to save without a request.
        last_saved: the step of the newest checkpoint, saved or resumed from; None if there is none.
        secs_since_save: seconds since that save, or since the start, by a monotonic clock.
        requests: what was requested since the last boundary.
        is_last: whether the run ends here by itself: the last step, or no more data.
        is_best: whether the state is the best so far.

    Returns:
        Whether to save, whether to stop, and why.

    Raises:
        InvalidArgument: for an unknown request.

    Examples:
        >>> triggers = make_triggers(every=100, every_secs=600)
        >>> print(decide(100, triggers=triggers, last_saved=None, secs_since_save=30.0, is_best=True))
        save and go on: the cadence in steps, the best result so far
        >>> print(decide(130, triggers=triggers, last_saved=100, secs_since_save=9.0, requests=["save_and_stop"]))
        save and stop: asked to save and stop
        >>> print(decide(100, triggers=triggers, last_saved=100, secs_since_save=0.0, is_last=True))
        do not save and stop: the last step, this step is saved already
    """
    asked = merge_requests([requests])
    is_new = step != last_saved
    every = should_save(step, every=triggers.every, last_saved=last_saved)
    every_secs = is_new and step > 0 and triggers.every_secs is not None and secs_since_save >= triggers.every_secs
    if not (every or every_secs or is_best or is_last or asked):
        return _NOTHING_DUE  # nearly every step ends here
    facts: dict[str, bool] = {
        "every": every,
        "every_secs": every_secs,
        "best": is_best,
        "last": is_last,
        **dict.fromkeys(asked, True),
    }
    reasons = tuple(name for name, holds in facts.items() if holds)
    ending = () if triggers.at_end else ("last", "stop")
    wants = "abort" not in asked and any(name in _SAVING and name not in ending for name in reasons)
    listed = (*reasons, "saved") if wants and not is_new else reasons
    return Verdict(wants and is_new, not _STOPPING.isdisjoint(reasons), listed)


def with_chosen_cadence(triggers: Triggers, every: int | None) -> Triggers:
    """The triggers of ``every="auto"``; before there is a cadence, the first save is due by the clock.

    Args:
        triggers: what the user gave.
        every: the cadence that was chosen; None until then.

    Examples:
        >>> with_chosen_cadence(Triggers(), 50).every, with_chosen_cadence(Triggers(), None).every_secs == FIRST_SAVE_SECS
        (50, True)
    """
    return attrs.evolve(triggers, every_secs=FIRST_SAVE_SECS) if every is None else attrs.evolve(triggers, every=every)


def last_saved_at(step: int, *, seen: int | None, last_saved: int | None) -> int | None:
    """The last saved step for a loop that is at a step now. If it went back in memory, what it trains again is not saved yet.

    Args:
        step: the step now.
        seen: the step at the boundary before; None at the first.
        last_saved: the step of the newest checkpoint until now.

    Examples:
        >>> last_saved_at(5, seen=4, last_saved=4), last_saved_at(3, seen=6, last_saved=5), last_saved_at(5, seen=6, last_saved=2)
        (4, 2, 2)
    """
    went_back = seen is not None and step < seen
    return step - 1 if went_back and last_saved is not None and step <= last_saved else last_saved


def last_saved_after_failure(now: int | None, *, before: int | None, failed: int) -> int | None:
    """The last saved step after a save has failed: that before it, unless the loop went back further in memory meanwhile.

    Args:
        now: the last saved step until now, which counts the failed save.
        before: the last saved step when that save began.
        failed: the step of that save.

    Examples:
        >>> last_saved_after_failure(6, before=3, failed=6), last_saved_after_failure(1, before=3, failed=6)
        (3, 1)
    """
    went_before_it = now is not None and before is not None and now < min(before, failed)
    return now if went_before_it else before


def should_save(step: int, *, every: int | None, last_saved: int | None = None, events: Collection[str] = ()) -> bool:
    """Whether to save after this step.

    Law: the steps that are saved do not depend on how often the run was interrupted and resumed. A multiple of ``every`` counts from step 0,
    not from the resume, and is due at the first boundary at or after it.

    Args:
        step: optimizer steps done, >= 0. The cadence is never due at step 0.
        every: the cadence in steps, >= 1; None for none.
        last_saved: the step of the newest checkpoint, saved or resumed from; None if there is none.
        events: other reasons to save, such as ``"final"`` or ``"signal"``.

    Returns:
        Whether to save; never for a step that is saved already.

    Raises:
        InvalidArgument: if ``every < 1``.

    Examples:
        >>> [step for step in range(8) if should_save(step, every=3)]
        [3, 4, 5, 6, 7]
        >>> should_save(4, every=3, last_saved=3), should_save(4, every=3, last_saved=3, events=["final"])
        (False, True)
    """
    check_cadence(every)
    if step == last_saved:
        return False
    if events:
        return True
    if every is None:
        return False
    if last_saved is not None and last_saved > step:
        return step > 0 and step % every == 0  # after a rewind: newer checkpoints belong to another timeline
    return step // every > (last_saved or 0) // every


def check_cadence(every: int | None) -> int | None:
    """Return a checked cadence.

    Raises:
        InvalidArgument: unless it is an int >= 1 or None.

    Examples:
        >>> check_cadence(500)
        500
    """
    if every is None:
        return None
    return count("every", every, expected="an int >= 1, or None", fix="count optimizer steps; None saves by hand")
