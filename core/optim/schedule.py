"""Schedules: pure functions from a step to a factor of the learning rates; and `horizon`, the one source of the number of steps."""

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias, final

import attrs

from trainfold.core.errors import HorizonUnknown, InvalidSchedule, ScheduleMismatch
from trainfold.core.state.state import Scalar

Decay: TypeAlias = Literal["linear", "cosine", "1-sqrt", "none"]
ScheduleFunction: TypeAlias = Callable[[int], float]

_SHAPES: dict[str, Callable[[float], float]] = {  # progress (0 to 1) -> what is left (1 to 0)
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "1-sqrt": lambda done: 1.0 - math.sqrt(done),
}


@final
@attrs.frozen(slots=False)  # `LambdaLR` saves the `__dict__` of what it calls
class Schedule:
    """A warm-up, a plateau and a decay; make one with `constant`, `linear`, `cosine` or `wsd`.

    It maps the index of the coming step to a factor: ``lr = base_lr * schedule(step)``, with the bits of torch's
    ``LambdaLR``. It has no state, so a resume cannot count a step twice.

    Attributes:
        kind: the name of the constructor.
        total_steps: the horizon; None if the schedule needs none.
        warmup_steps: steps of the linear rise; the factor is 1 at the last of them.
        decay_steps: steps of the fall, which ends at the horizon.
        decay: the shape of the fall, or ``"none"``.
        floor: the factor at the horizon and after it.
    """

    kind: str
    total_steps: int | None = None
    warmup_steps: int = 0
    decay_steps: int = 0
    decay: Decay = "none"
    floor: float = 0.0

    def __call__(self, step: int) -> float:
        """Return the factor for the step with this index, counted from 0.

        Raises:
            InvalidSchedule: if the index is not a whole number >= 0.
        """
        if not _whole(step) or step < 0:
            raise InvalidSchedule(
                "step", expected="a whole number >= 0", found=repr(step), fix="pass state.trainer.step, an int"
            )
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "none" or self.total_steps is None:
            return 1.0
        begin = self.total_steps - self.decay_steps
        if step < begin:
            return 1.0
        done = min(1.0, (step - begin) / self.decay_steps)
        return self.floor + (1.0 - self.floor) * _SHAPES[self.decay](done)

    def describe(self) -> dict[str, Scalar]:
        """Return the content of the ``scheduler`` component, so that the horizon is saved and compared."""
        return attrs.asdict(self)


def constant(*, warmup_steps: int = 0) -> Schedule:
    """The base learning rate, after a warm-up; it needs no horizon.

    Raises:
        InvalidSchedule: if the warm-up is negative.

    Examples:
        >>> [constant(warmup_steps=2)(step) for step in range(4)]
        [0.5, 1.0, 1.0, 1.0]
    """
    return _checked(Schedule("constant", warmup_steps=warmup_steps))


def linear(total_steps: int, *, warmup_steps: int = 0, floor: float = 0.0) -> Schedule:
    """A warm-up, then a straight fall to ``floor`` at ``total_steps``.

    Raises:
        InvalidSchedule: if there is no step left to decay in, or a number is out of range.

    Examples:
        >>> [linear(4)(step) for step in (0, 1, 2, 3, 4, 9)]
        [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    return _checked(Schedule("linear", total_steps, warmup_steps, _rest(total_steps, warmup_steps), "linear", floor))


def cosine(total_steps: int, *, warmup_steps: int = 0, floor: float = 0.0) -> Schedule:
    """A warm-up, then half a cosine to ``floor`` at ``total_steps``.

    Raises:
        InvalidSchedule: if there is no step left to decay in, or a number is out of range.

    Examples:
        >>> [round(cosine(4)(step), 3) for step in range(5)]
        [1.0, 0.854, 0.5, 0.146, 0.0]

    Source: Loshchilov and Hutter, SGDR, arXiv:1608.03983.
    """
    return _checked(Schedule("cosine", total_steps, warmup_steps, _rest(total_steps, warmup_steps), "cosine", floor))


def wsd(
    total_steps: int | None = None,
    *,
    warmup_steps: int = 0,
    decay_steps: int,
    decay: Decay = "linear",
    floor: float = 0.0,
) -> Schedule:
    """Warm-up, stable, decay: the plateau lasts until ``decay_steps`` before ``total_steps``.

    Args:
        total_steps: the horizon; may be None if ``decay="none"``.
        warmup_steps: steps of the linear rise.
        decay_steps: steps of the fall, >= 1; 0 if and only if ``decay="none"``.
        decay: the shape of the fall; ``"none"`` trains without a fall, and a later run may decay from any checkpoint.
        floor: the factor at the horizon and after it.

    Returns:
        The schedule.

    Raises:
        InvalidSchedule: if the decay has no steps and is not disabled, or if the numbers contradict each other.
        HorizonUnknown: if there is a decay but no horizon.

    Examples:
        >>> schedule = wsd(10, warmup_steps=2, decay_steps=4)
        >>> [schedule(step) for step in (0, 1, 5, 6, 8, 10)]
        [0.5, 1.0, 1.0, 1.0, 0.5, 0.0]
        >>> wsd(10, decay_steps=0)
        Traceback (most recent call last):
            ...
        trainfold.core.errors.InvalidSchedule: decay_steps: expected >= 1 where decay is 'linear', found 0; set \
decay="none" to train without a decay, or decay_steps >= 1

    Source: Hu et al., MiniCPM, arXiv:2404.06395; "1-sqrt" is from Haegele et al., arXiv:2405.18392.
    """
    return _checked(Schedule("wsd", total_steps, warmup_steps, decay_steps, decay, floor))


def horizon(*, total: int | None = None, max_steps: int | None = None, data_steps: int | None = None) -> int:
    """Return the number of optimizer steps of a run: the first of ``total``, ``max_steps`` and ``data_steps`` that is known.

    Args:
        total: the horizon of the schedule, set explicitly.
        max_steps: the step at which the run stops.
        data_steps: the steps in the data of all epochs; None for a stream.

    Raises:
        HorizonUnknown: if all are None.
        InvalidSchedule: if the first that is known is not positive.

    Examples:
        >>> horizon(max_steps=100, data_steps=70)
        100
    """
    known = [("total", total), ("max_steps", max_steps), ("data_steps", data_steps)]
    for name, value in known:
        if value is not None:
            if not _whole(value) or value < 1:
                raise InvalidSchedule(name, expected=">= 1 steps", found=repr(value), fix="count optimizer steps")
            return value
    raise HorizonUnknown(
        "horizon",
        expected="one of total, max_steps, data_steps",
        found="none of them",
        fix="pass total or max_steps, because a stream has no length",
    )


def describe_schedule(schedule: ScheduleFunction | None) -> dict[str, Scalar] | None:
    """Return the description of a schedule; of a user's own function, only its name.

    Examples:
        >>> describe_schedule(lambda step: 0.5)["kind"]
        'custom'
    """
    if schedule is None:
        return None
    if isinstance(schedule, Schedule):
        return schedule.describe()
    name = getattr(schedule, "__qualname__", type(schedule).__qualname__)
    return {"kind": "custom", "name": name}


def check_schedule(saved: object, wanted: Mapping[str, Scalar] | None) -> None:
    """Refuse to train a state under a schedule other than its own.

    A scheduler component that is not a description, such as the state of a stateful scheduler, passes if the step has
    no schedule.

    Raises:
        ScheduleMismatch: naming every field that differs, and both horizons.
    """
    described = isinstance(saved, Mapping) and "kind" in saved
    if saved is None or saved == wanted or (wanted is None and not described):
        return
    old: Mapping[str, object] = saved if isinstance(saved, Mapping) else {"kind": type(saved).__name__}
    new: Mapping[str, object] = wanted if wanted is not None else {"kind": None}
    differs = [name for name in {**old, **new} if name != "total_steps" and old.get(name) != new.get(name)]
    show = ["total_steps", *differs]
    raise ScheduleMismatch(
        "state.scheduler",
        expected="the schedule that the step was made with: " + _table(new, show),
        found=_table(old, show),
        fix="make the step with the schedule of the state, or set state.scheduler to None to change it on purpose",
    )


def _table(described: Mapping[str, object], names: list[str]) -> str:
    return ", ".join(f"{name}={described.get(name)!r}" for name in names)


def _whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _rest(total: int, warmup: int) -> int:
    """Return the steps after the warm-up; `_checked` reports arguments that are not whole numbers."""
    return total - warmup if _whole(total) and _whole(warmup) else 0


def _refuse(where: str, expected: str, found: object, fix: str) -> None:
    raise InvalidSchedule(where, expected=expected, found=found, fix=fix)


def _checked(schedule: Schedule) -> Schedule:
    total, warmup, decay = schedule.total_steps, schedule.warmup_steps, schedule.decay_steps
    for name, steps in (("total_steps", total), ("warmup_steps", warmup), ("decay_steps", decay)):
        if steps is not None and not _whole(steps):
            _refuse(name, "a whole number of steps", repr(steps), "count optimizer steps")
    if warmup < 0:
        _refuse("warmup_steps", ">= 0", warmup, "use 0 for no warm-up")
    if not isinstance(schedule.floor, numbers.Real) or not 0.0 <= schedule.floor <= 1.0:
        _refuse("floor", "a factor from 0 to 1", repr(schedule.floor), "it multiplies the base learning rate")
    if schedule.decay == "none":
        _check_plateau(total, warmup, decay)
    else:
        _check_decay(schedule)
    return schedule


def _check_plateau(total: int | None, warmup: int, decay: int) -> None:
    if decay != 0:
        _refuse("decay_steps", "0 where decay is 'none'", decay, "name the decay's shape, or set decay_steps=0")
    if total is not None and total < max(1, warmup):
        _refuse(
            "total_steps", f">= 1, and >= warmup_steps ({warmup})", total, "lengthen the run or shorten the warm-up"
        )


def _check_decay(schedule: Schedule) -> None:
    total, warmup, decay = schedule.total_steps, schedule.warmup_steps, schedule.decay_steps
    if schedule.decay not in _SHAPES:
        _refuse("decay", f"one of {[*_SHAPES, 'none']}", repr(schedule.decay), "choose a shape")
    if total is None:
        raise HorizonUnknown(
            "total_steps",
            expected="the horizon that the decay ends at",
            found=None,
            fix='give total_steps (see `horizon`), or set decay="none"',
        )
    if schedule.kind == "wsd" and decay < 1:
        _refuse(
            "decay_steps",
            f">= 1 where decay is {schedule.decay!r}",
            decay,
            'set decay="none" to train without a decay, or decay_steps >= 1',
        )
    if decay < 1 or warmup + decay > total:
        _refuse(
            "total_steps",
            f"> warmup_steps ({warmup})"
            if schedule.kind != "wsd"
            else f">= warmup_steps + decay_steps ({warmup + decay})",
            total,
            "lengthen the run or shorten the phases",
        )
