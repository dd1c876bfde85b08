"""`Descent`: the checkpoint that a state descends from. Imports no torch, because commands that read a run need it."""

from typing import Final, final

import attrs


@final
@attrs.frozen
class Descent:
    """The checkpoint that a state descends from: the one it was loaded from, or the last one saved since.

    Attributes:
        timeline: the timeline of the checkpoint.
        step: the step of the checkpoint, or a lower step if the state went back to it in memory.
        forks: where the run left its earlier timelines, from the head of the checkpoint; may be empty while the run has a
            checkpoint of the timeline.
    """

    timeline: int
    step: int
    forks: tuple[tuple[int, int], ...] = ()


BEGINNING: Final = Descent(-1, -1)
"""The descent of a state that was never saved: it descends from no checkpoint of the run."""
