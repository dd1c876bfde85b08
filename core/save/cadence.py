"""`advise_cadence`: the cadence that loses the least time, from the cost of a save and the failure rate; `choose_cadence` for ``every="auto"``."""

import math
from typing import Final, final

import attrs

from trainfold.core.checks import count, positive

_RATIOS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_MOST_STEPS = 2.0**53
_HALVINGS = 200  # more than a float has bits: the bisection ends when its two ends are neighbours
ASSUMED_MTBF_SECS: Final = 12 * 3600.0
"""The assumed mean time between two failures of a job; `advise_cadence` takes your own figure."""
FIRST_SAVE_SECS: Final = 60.0
"""When the first save is due. It measures the cost of a save."""
_LEAST_STEP_SECS: Final = 1e-6  # below the resolution of a clock
_CHANGE: Final = 2.0


@final
@attrs.frozen
class _Costs:
    save: float
    step: float
    mtbf: float
    restart: float
    write: float


@final
@attrs.frozen
class Choice:
    """One cadence and the time that it loses.

    Attributes:
        every_steps: steps between two saves.
        interval_secs: seconds between two saves, including the cost of a save.
        lost_fraction: the fraction of time that is lost, in [0, 1]: to saves, to repeated work, and to restarts.
    """

    every_steps: int
    interval_secs: float
    lost_fraction: float


@final
@attrs.frozen
class Cadence:
    """The cadence that loses the least time, with alternatives. Prints as a table.

    Attributes:
        every_steps: steps between two saves.
        interval_secs: seconds between two saves, including the cost of a save.
        lost_fraction: the fraction of time that is lost, in [0, 1].
        alternatives: cadences from eight times as often to eight times as seldom, including this one, most often first.
    """

    every_steps: int
    interval_secs: float
    lost_fraction: float
    alternatives: tuple[Choice, ...]

    def __str__(self) -> str:
        lines = [f"{'every':>12} steps  {'seconds':>12}  time lost"]
        for choice in self.alternatives:
            mark = "  <- loses least" if choice.every_steps == self.every_steps else ""
            cells = f"{choice.every_steps:>12}        {choice.interval_secs:>12.6g}  {choice.lost_fraction:.3%}"
            lines.append(cells + mark)
        return "\n".join(lines)


def advise_cadence(
    *, save_secs: float, step_secs: float, mtbf_secs: float, restart_secs: float = 0.0, write_secs: float = 0.0
) -> Cadence:
    """Advise after how many steps to save to lose the least time.

    Law: no other whole number of steps loses less by `lost_fraction`.

    The optimum is flat: half or twice the advised cadence loses only a quarter more. So rough figures suffice.

    Args:
        save_secs: how long one save delays the loop, >= 0.
        step_secs: how long a step takes, > 0.
        mtbf_secs: mean time between failures of the whole job, > 0. For N machines that each fail once in T seconds it is T / N.
        restart_secs: the time from a failure to the next step, >= 0. It costs time and does not change the advice.
        write_secs: the time from the call of a save until it is durable, >= 0, if it runs in the background. After a failure in that time the
            previous save is resumed, and the next save waits for it.

    Returns:
        The advice.

    Raises:
        InvalidArgument: naming the invalid argument.

    Examples:
        >>> print(advise_cadence(save_secs=0.2, step_secs=0.5, mtbf_secs=12 * 3600.0))
               every steps       seconds  time lost
                  33                16.7  1.217%
                  66                33.2  0.641%
                 132                66.2  0.378%
                 263               131.7  0.304%  <- loses least
                 526               263.2  0.380%
                1052               526.2  0.646%
                2104              1052.2  1.232%

    Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; J. T. Daly, "A
    higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006, whose exact model this is.
    """
    costs = _checked(save_secs, step_secs, mtbf_secs, restart_secs, write_secs)
    # with less work between saves, a save waits for the last one
    keeping_up = min(costs.mtbf, costs.write - costs.save)
    ideal = max(_best_work_secs(costs), keeping_up)
    below = max(1, math.floor(min(ideal / costs.step, _MOST_STEPS)))
    best = min((_choice(every, costs) for every in (below, below + 1)), key=lambda each: each.lost_fraction)
    others = {max(1, round(best.every_steps * ratio)) for ratio in _RATIOS}
    table = tuple(_choice(every, costs) for every in sorted(others))
    return Cadence(best.every_steps, best.interval_secs, best.lost_fraction, table)


def lost_fraction(  # noqa: PLR0913 - keywords
    every_steps: int,
    *,
    save_secs: float,
    step_secs: float,
    mtbf_secs: float,
    restart_secs: float = 0.0,
    write_secs: float = 0.0,
) -> float:
    """The fraction of its time that a run with this cadence loses; exact if failures are a Poisson process.

    An attempt lasts ``t``, exponential with mean M. After the restart R it repeats periods p of work w and a save. The work that is durable by
    ``t`` is ``floor((t - R - d) / p)`` times w, where d is how much longer a write takes than the call of its save. Its mean is
    ``w exp(-(R + d) / M) / (exp(p / M) - 1)``, and the rest of M is lost. With d = 0 this is Daly's equation 20.

    Args:
        every_steps: steps between two saves, >= 1.
        save_secs: see `advise_cadence`; so are the others.
        step_secs: how long a step takes.
        mtbf_secs: mean time between failures.
        restart_secs: the time from a failure to the next step.
        write_secs: the time from the call of a save until it is durable.

    Returns:
        A number in [0, 1].

    Raises:
        InvalidArgument: naming the invalid argument.

    Examples:
        >>> round(lost_fraction(263, save_secs=0.2, step_secs=0.5, mtbf_secs=43200), 5)
        0.00304
    """
    count("every_steps", every_steps, fix="count steps")
    return _choice(every_steps, _checked(save_secs, step_secs, mtbf_secs, restart_secs, write_secs)).lost_fraction


def _best_work_secs(costs: _Costs) -> float:
    """The work between two saves that loses least: the one root below M of ``w / M = 1 - exp(-(w + C) / M)``."""
    save, mtbf = costs.save, costs.mtbf
    low, high = 0.0, mtbf
    for _ in range(_HALVINGS):
        work = (low + high) / 2
        if not low < work < high:
            break
        low, high = (low, work) if work / mtbf > -math.expm1(-(work + save) / mtbf) else (work, high)
    return high


def _choice(every: int, costs: _Costs) -> Choice:
    work = every * costs.step
    stall = max(costs.save, costs.write - work)  # saves do not overlap: the next one waits until this one is durable
    late = max(0.0, costs.write - stall)
    x = min((work + stall) / costs.mtbf, 1e300)
    again = x + math.log(-math.expm1(-x) / x) if x else 0.0
    log_ratio = math.log1p(stall / work) + again + (costs.restart + late) / costs.mtbf
    return Choice(every, work + stall, -math.expm1(-max(0.0, log_ratio)))


def _checked(save: float, step: float, mtbf: float, restart: float, write: float) -> _Costs:
    return _Costs(
        _secs("save_secs", save),
        _secs("step_secs", step, is_positive=True),
        _secs("mtbf_secs", mtbf, is_positive=True),
        _secs("restart_secs", restart),
        _secs("write_secs", write),
    )


def _secs(name: str, value: object, *, is_positive: bool = False) -> float:
    return positive(name, value, least=None if is_positive else 0, fix="measure it in seconds")


def choose_cadence(current: int | None, *, save_secs: float, step_secs: float, write_secs: float = 0.0) -> int:
    """Choose after how many optimizer steps to save.

    The optimum is flat, so the choice is a round number (1, 2 or 5 times a power of ten), which noise in the measurements seldom changes. A
    cadence stays unless the advice is more than twice or less than half of it.

    Args:
        current: the cadence so far; None if none was chosen yet.
        save_secs: how long a save delays the loop.
        step_secs: how long a step takes.
        write_secs: the time from the call of a save until it is durable.

    Examples:
        >>> choose_cadence(None, save_secs=0.2, step_secs=0.5)
        200
        >>> choose_cadence(200, save_secs=0.4, step_secs=0.5), choose_cadence(200, save_secs=2.0, step_secs=0.5)
        (200, 1000)
    """
    advised = advise_cadence(
        save_secs=max(0.0, save_secs),
        step_secs=max(_LEAST_STEP_SECS, step_secs),
        mtbf_secs=ASSUMED_MTBF_SECS,
        write_secs=max(0.0, write_secs),
    ).every_steps
    if current is not None and current / _CHANGE <= advised <= current * _CHANGE:
        return current
    return _round(advised)


def describe_cadence(every: int, *, save_secs: float, step_secs: float) -> str:
    """The chosen cadence and the reason for it, for the log.

    Examples:
        >>> describe_cadence(200, save_secs=0.2, step_secs=0.5)
        'every="auto" saves every 200 steps (100 s): a save costs 0.2 s, a step takes 0.5 s, and a failure each 12 h is assumed; \
every=200 keeps it, and every=None saves by hand'
    """
    return (
        f'every="auto" saves every {every} steps ({every * step_secs:.3g} s): a save costs {save_secs:.3g} s, a step takes '
        f"{step_secs:.3g} s, and a failure each {ASSUMED_MTBF_SECS / 3600:g} h is assumed; every={every} keeps it, and every=None "
        "saves by hand"
    )


def _round(steps: int) -> int:
    """The nearest of 1, 2, 5, 10, 20, 50 ..., by ratio."""
    power = int(10 ** max(0, math.floor(math.log10(steps))))
    return min((factor * power for factor in (1, 2, 5, 10)), key=lambda each: abs(math.log(each / steps)))
