"""What the calls of a checkpoint manager did: `SaveOutcome` and `Restored`."""

from typing import Literal, TypeAlias, final

import attrs

from trainfold.backends.runs.save import SaveResult

SaveStatus: TypeAlias = Literal["written", "staged", "skipped"]


@final
@attrs.frozen
class SaveOutcome:
    """What a call of `CheckpointManager.save` did (C16).

    Attributes:
        status: ``written``: it is durable. ``staged``: it is being written, and the loop may go on. ``skipped``: another save
            was under way.
        step: the step that was saved.
        result: what was written; None if it is not yet.
    """

    status: SaveStatus
    step: int
    result: SaveResult | None = None


@final
@attrs.frozen
class Restored:
    """What `CheckpointManager.restore`, `load` or `load_best` did to a live run.

    Attributes:
        run: where the run is.
        step: the step that the run goes on from, 0 for a fresh start; or that the weights are of, where only those were loaded.
        is_fresh: whether there was nothing to resume.
    """

    run: str
    step: int
    is_fresh: bool
