"""`Event`: something that happened to a run, as a value for callbacks and logs."""

from typing import Literal, TypeAlias, final

import attrs

EventKind: TypeAlias = Literal[
    "saved", "committed", "skipped", "failed", "pruned", "restored", "restored_best", "refused", "cadence",
    "uploaded", "not_uploaded", "fetched", "not_fetched", "not_pruned",
]  # fmt: skip
"""``saved``: a save has started, and the loop continues. ``committed``: it is durable. ``skipped``: it did not start, because another save was
running. ``failed``: it did not become durable. ``pruned``: an old checkpoint was deleted. ``restored``: the run continues from a checkpoint.
``restored_best``: the run has loaded the weights of its best checkpoint and stays at its own step. ``refused``: it cannot continue, and why.
``cadence``: the cadence for ``every="auto"`` was chosen. ``uploaded``: a checkpoint of a run in two tiers is durable in the far one too. ``not_uploaded``: an upload
has failed, and whether it is tried again. ``fetched``: a checkpoint came from the far tier, because the near one does not have it, or not
whole. ``not_fetched``: it could not, and an older one is tried. ``not_pruned``: old checkpoints could not be deleted after a save, and why; the next one tries again."""


@final
@attrs.frozen
class Event:
    """Something that happened to a run.

    Attributes:
        kind: what happened.
        run: the location of the run.
        step: the step of the save when it was requested, or of the checkpoint; None if the event has none.
        checkpoint: the directory of the checkpoint, or None.
        detail: more, in words.
        secs: how long it took: ``saved``, the call; ``restored``, the load; ``committed``, from the beginning of the save to the moment when it was durable; ``uploaded`` and ``fetched``, the transfer. Else None.
        stalled_secs: for how long the loop stood still: of a save that is ``committed`` or ``failed``, for its call, and in updates and in `wait_staging` while what it reads was
            copied or waited for. Else None, and after an interrupt in the call.
    """

    kind: EventKind
    run: str
    step: int | None = None
    checkpoint: str | None = None
    detail: str = ""
    secs: float | None = None
    stalled_secs: float | None = None

    def __str__(self) -> str:
        place = self.run if self.checkpoint is None else f"{self.run}/{self.checkpoint}"
        at = "" if self.step is None else f" at step {self.step}"
        return f"{self.kind} {place}{at}" + (f": {self.detail}" if self.detail else "")
