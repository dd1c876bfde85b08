"""`choose_cadence`: the cadence of ``every="auto"``, from measured costs and an assumed failure rate."""

import math
from typing import Final

from trainfold.core.save.cadence import advise_cadence

ASSUMED_MTBF_SECS: Final = 12 * 3600.0
"""The assumed mean time between two failures of a job; `advise_cadence` takes your own figure."""
FIRST_SAVE_SECS: Final = 60.0
"""When the first save is due. It measures the cost of a save."""
_LEAST_SECS: Final = 1e-6  # below the resolution of a clock
_CHANGE: Final = 2.0


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
        step_secs=max(_LEAST_SECS, step_secs),
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
