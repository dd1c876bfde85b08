"""Learning rates that nothing attached sets: what they were when the run began, so that a schedule that begins anew is told (W08)."""

from collections.abc import Sequence
from typing import Final

RATES: Final = "rates"  # the key of the contract under which a manifest lists them; it is never compared
KEPT: Final = 3


def with_rate(began: Sequence[float], rate: float) -> list[float]:
    """The first rates of a run, one for each change, with one more.

    Examples:
        >>> with_rate([0.1], 0.1), with_rate([0.1], 0.09), with_rate([0.1, 0.09, 0.08], 0.07)
        ([0.1], [0.1, 0.09], [0.1, 0.09, 0.08])
    """
    if len(began) >= KEPT or (began and began[-1] == rate):
        return list(began)
    return [*began, rate]


def begins_anew(began: Sequence[float], saved: float, first: float) -> bool:
    """Whether the first change of a rate after a resume leads back to where the run began, from a rate that it did not begin with.

    A rate that is computed from the step goes on, so that its first change is another one.

    Args:
        began: the first rates of the run, one for each change.
        saved: the rate of the checkpoint.
        first: the rate after the first change that follows the resume.

    Examples:
        >>> begins_anew([0.1, 0.09, 0.081], 0.05, 0.09), begins_anew([0.1, 0.09, 0.081], 0.05, 0.045)
        (True, False)
    """
    return len(began) > 1 and saved not in began and first in began[:2]
