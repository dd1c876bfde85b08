"""`Trigger`: when to kill a run, chosen ahead from a seed."""

import random
from collections.abc import Sequence
from typing import Final, final

import attrs

from trainfold.core.rehearsal.entry import RecordedLine

_LATEST_HIT: Final = 0.7  # of the duration of a save: later, and the save may be over before the signal arrives


@final
@attrs.frozen
class Trigger:
    """When to kill a run: after a certain step, and then a part of a step or of a save later.

    Attributes:
        after_step: the first step that arms it, once the process has a checkpoint to go back to.
        in_save: wait for the next save to begin, and hit that.
        fraction: the part of the usual duration of a step or save to wait once armed, in [0, 1].
        rank: which rank alone to kill; None for all processes.
    """

    after_step: int
    in_save: bool
    fraction: float
    rank: int | None = None


@final
@attrs.frozen
class StepTimes:
    """About how long a step and a save take here."""

    step_secs: float
    save_secs: float

    def delay_secs(self, trigger: Trigger) -> float:
        """How long to wait between the arming of a trigger and the kill."""
        return trigger.fraction * (self.save_secs * _LATEST_HIT if trigger.in_save else self.step_secs)


def plan_moments(  # noqa: PLR0913 - keywords
    *,
    steps: int,
    saved: Sequence[int],
    kills: int,
    seed: int,
    saves: bool = True,
    late: bool = False,
    ranks: Sequence[int] = (1,),
) -> list[Trigger]:
    """Choose the kills: one in each equal part of the steps after the first save; the second one (or the only one) hits a save.

    `arms` holds the first kill back until that save is acknowledged. The last save is not chosen, because a signal that comes late
    would find a run that has ended. Without a save between the first and the last, all kills hit steps.

    Args:
        steps: optimizer steps of the whole run.
        saved: the steps that are saved, in order.
        kills: how many kills.
        seed: of the choice.
        saves: whether the run records when a save starts.
        ranks: how many each start has, in turn. Of several, every second kill hits one, and the launcher ends the others.
        late: always choose the last step before a save, so that as many steps as possible are trained again.

    Examples:
        >>> [trigger.in_save for trigger in plan_moments(steps=60, saved=range(10, 61, 10), kills=3, seed=1)]
        [False, True, False]
        >>> [trigger.after_step for trigger in plan_moments(steps=60, saved=range(10, 61, 10), kills=3, seed=1, late=True)]
        [19, 29, 49]
        >>> plan_moments(steps=12, saved=[6, 12], kills=1, seed=1)[0].in_save
        False
        >>> [trigger.rank for trigger in plan_moments(steps=60, saved=range(10, 61, 10), kills=4, seed=1, ranks=[2])]
        [None, 0, None, 1]
    """
    chance = random.Random(seed)  # noqa: S311 - moments, not secrets
    part = (steps - saved[0]) / max(1, kills)
    between = saves_between(saved)
    latest = [save - 1 for save in between] or [steps - 1]
    triggers = []
    for number in range(kills):
        first = saved[0] + int(number * part)
        last = max(first, saved[0] + int((number + 1) * part) - 2)
        in_save = number == min(1, kills - 1) and saves and bool(between) and not late
        step = min(first, between[-1] - 1) if in_save else chance.randint(first, last)
        if late:
            step = next((each for each in latest if each >= step), latest[-1])
        fraction = chance.random()
        there = ranks[number % len(ranks)]
        rank = chance.randrange(there) if there > 1 and number % 2 else None
        triggers.append(Trigger(step, in_save, fraction, rank))
    return triggers


def saves_between(saved: Sequence[int]) -> Sequence[int]:
    """The saves that a kill can hit while an earlier checkpoint is there to resume from and a later one is still to come.

    Examples:
        >>> saves_between([4, 8, 12]), saves_between([6, 12])
        ([8], [])
    """
    return saved[1:-1]


def arms(seen: Sequence[RecordedLine], trigger: Trigger) -> bool:
    """Whether the last entry of a process arms a trigger.

    Never before there is a checkpoint: the start after the kill would be a fresh one, which shows nothing.

    Args:
        seen: the entries of the process so far.
        trigger: the trigger.

    Examples:
        >>> seen = [RecordedLine("start", 0, 1, 0.0, {"resumed_from": None}), RecordedLine("step", 1, 1, 0.1), RecordedLine("save", 1, 1, 0.1)]
        >>> arms(seen, Trigger(1, False, 0.5)), arms([*seen, RecordedLine("saved", 1, 1, 0.2)], Trigger(1, False, 0.5))
        (False, True)
    """
    event = seen[-1]
    if not any(event.kind == "saved" or event.data.get("resumed_from") is not None for event in seen):
        return False
    if trigger.in_save:
        return event.kind == "save" and event.step > trigger.after_step
    return event.kind in ("start", "step", "saved") and event.step >= trigger.after_step
