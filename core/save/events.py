"""`Event`: something that happened to a run, as a value for callbacks and logs (D06, R04)."""

from typing import Literal, TypeAlias, final

import attrs

EventKind: TypeAlias = Literal[
    "saved", "committed", "skipped", "failed", "pruned", "restored", "restored_best", "refused", "cadence"
]
"""``saved``: a save was begun, and the loop goes on. ``committed``: it is durable. ``skipped``: it was not begun, because another
one was under way. ``failed``: it did not become durable. ``pruned``: an old checkpoint was deleted. ``restored``: the run goes
on from a checkpoint. ``restored_best``: it has taken the weights of its best checkpoint, and stays at its own step. ``refused``: it
could not go on, and why. ``cadence``: how often to save was chosen, for ``every="auto"``."""


@final
@attrs.frozen
class Event:
    """Something that happened to a run.

    Attributes:
        kind: what.
        run: where the run is.
        step: the step that it is about, as it was when the save was asked for; None where there is none.
        checkpoint: the directory that it is about, or None.
        detail: more, in words.
    """

    kind: EventKind
    run: str
    step: int | None = None
    checkpoint: str | None = None
    detail: str = ""

    def __str__(self) -> str:
        place = self.run if self.checkpoint is None else f"{self.run}/{self.checkpoint}"
        at = "" if self.step is None else f" at step {self.step}"
        return f"{self.kind} {place}{at}" + (f": {self.detail}" if self.detail else "")
