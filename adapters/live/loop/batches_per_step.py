"""`Pace`: counts the batches of each optimizer step, and warns if their number differs after a resume."""

import logging
from typing import Any, Final, final

from trainfold.backends.ranks.launcher import log_for_all

_LOG: Final = logging.getLogger("trainfold")
_SURE: Final = 2  # steps in a row that took as many batches


@final
class Pace:
    """Counts the batches of each step: no attached object knows how many a loop accumulates, so only its steps show it.

    Two kinds of window do not count: one that the end of an epoch may have cut short, and one that spans an epoch's end and
    may contain batches that the loop has left. A window that ends with the epoch counts if it is not shorter than the others.

    Args:
        noted: from a position: the batches of the last step, and how many steps in a row took as many, at most 2; None for
            a new run.
        epoch: in which the next window begins.
    """

    def __init__(self, noted: Any = None, epoch: int = 0) -> None:
        self.noted: tuple[int, int] | None = None if noted is None else (noted[0], noted[1])
        self._expected = self.noted[0] if self.noted is not None and self.noted[1] >= _SURE else None
        self.begin(epoch)

    def begin(self, epoch: int) -> None:
        """Begin a window."""
        self._window, self._epoch, self._is_over = 0, epoch, False

    def advance(self, batches: int, *, is_step: bool, epoch: int, is_scheduled: bool = False) -> None:
        """Count the batches of a call of ``advance``; warn if the first whole window after a resume has another number.

        Args:
            batches: of the call.
            is_step: whether it counts a step.
            epoch: of the run.
            is_scheduled: whether a schedule has said how many the step takes: it may change them at any step, and a resume compares the schedule itself.
        """
        self._window += batches
        if not is_step:
            self._is_over = epoch != self._epoch
            return
        took, least = self._window, 1 if self.noted is None else self.noted[0]
        ends_with_epoch = batches == 1 and not self._is_over and took >= least
        is_whole = took > 0 and (epoch == self._epoch or ends_with_epoch)
        self.begin(epoch)
        if not is_whole:
            return
        if self._expected is not None and took != self._expected:
            log_for_all(
                "live.advance: %d batches for each optimizer step before the resume and %d now: gradients are accumulated over another "
                "number of batches; put it back, unless you changed it on purpose",
                self._expected,
                took,
            )
        self._expected = None
        if is_scheduled:
            self.noted = None
            return
        times = self.noted[1] if self.noted is not None and self.noted[0] == took else 0
        self.noted = (took, min(times + 1, _SURE))


def is_pace(saved: Any) -> bool:
    """Whether the pace in a position is well formed.

    Examples:
        >>> is_pace([2, 1]), is_pace(None), is_pace([2]), is_pace(["2", 1])
        (True, True, False, False)
    """
    if saved is None:
        return True
    return isinstance(saved, list | tuple) and len(saved) == 2 and all(type(each) is int and each > 0 for each in saved)
