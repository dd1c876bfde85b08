"""`DrawAhead`: measures how many batches a loop draws ahead of the steps that it counts."""

import logging
from typing import Final, final

from trainfold.backends.ranks.launcher import log_for_all

_LOG: Final = logging.getLogger("trainfold")
_STEPS_TO_COMPARE: Final = 3


@final
class DrawAhead:
    """Measures how far a loop is ahead, and warns of a loop that counts batches before their step.

    Attributes:
        depth: batches that wait after a step; None until the first one.
    """

    def __init__(self) -> None:
        self.depth: int | None = None
        self._counted: list[int] = []  # batches of the first steps for which the loop passed no number of samples

    def counted(self, batches: int) -> None:
        """Note the batches of a step that counted all that waited: a loop that draws ahead has more at its first step."""
        if len(self._counted) == _STEPS_TO_COMPARE:
            return
        self._counted.append(batches)
        first, *others = self._counted
        if len(self._counted) == _STEPS_TO_COMPARE and first > others[0] == others[1] > 0:
            log_for_all(
                "live.advance() has counted every batch that was handed out: %d at the first step, and %d at each of the next two. A "
                "loop that draws batches ahead and counts them like that loses them at a resume: pass live.advance(samples=...), "
                "the samples of the batches that the step was trained on, and attach a DataLoader that makes its batches itself",
                first,
                others[0],
            )
