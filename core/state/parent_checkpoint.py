"""`ParentCheckpoint`: the checkpoint that a state descends from. Imports no torch, because commands that read a run need it."""

from typing import Final, final

import attrs


@final
@attrs.frozen
class ParentCheckpoint:
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

    def at(self, last_saved: int | None) -> "ParentCheckpoint":
        """The descent of a loop that may have gone back in memory, to a step below the checkpoint.

        Args:
            last_saved: the last saved step that its state goes through; None if unknown.

        Examples:
            >>> ParentCheckpoint(0, 20).at(15).step, ParentCheckpoint(0, 20).at(20).step, ParentCheckpoint(0, 20).at(None).step
            (15, 20, 20)
        """
        return self if last_saved is None or last_saved >= self.step else attrs.evolve(self, step=last_saved)


BEGINNING: Final = ParentCheckpoint(-1, -1)
"""The descent of a state that was never saved: it descends from no checkpoint of the run."""
