"""`Descent`: which checkpoint a state comes from. Imports no torch: commands that read a run need it."""

from typing import Final, final

import attrs


@final
@attrs.frozen
class Descent:
    """Which checkpoint a state comes from: the one that it was loaded from, or that was saved last on its way.

    Attributes:
        timeline: the checkpoint's.
        step: the checkpoint's; or a lower one, if the state went back to it in memory.
        forks: where the earlier timelines were left, as its head says; may be left out while the run has a checkpoint of the
            timeline.
    """

    timeline: int
    step: int
    forks: tuple[tuple[int, int], ...] = ()


BEGINNING: Final = Descent(-1, -1)
"""What a state descends from that was never saved: nothing, whatever the run holds."""
