"""`LoopStreams`: watches the random streams between a restore, or an epoch's end, and the next batch; puts back what must not move."""

from collections.abc import Callable, Mapping
from typing import final

from trainfold.adapters.components.component import ComponentAdapter, Undo
from trainfold.adapters.live.loop.since_restore import (
    LEFT,
    PUT_BACK,
    PUT_BACK_UNSURE,
    SinceRestore,
    moved,
    small_state,
    streams_of,
)
from trainfold.core.state.state import Opaque


@final
class LoopStreams:
    """Puts the random streams back that moved between a restore and the first batch, and notes loops that move them there.

    Args:
        parts: returns the components of the run; None once the run is gone.

    Attributes:
        moves: whether the loop was seen to move the streams before the first batch of an epoch.
    """

    def __init__(self, parts: Callable[[], Mapping[str, ComponentAdapter] | None]) -> None:
        self.moves = False
        self._parts = parts
        self._since: SinceRestore | None = None  # the run at a restore, until the first batch
        self._begun: str | None = None  # `small_state` of the run when the body of `epochs` began
        self._at_end: Opaque | None = None  # the streams at an epoch's end, outside `epochs`

    # --- after a restore ----------------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether a batch was drawn since the last restore."""
        return self._since is None

    def restored(self, since: SinceRestore) -> None:
        """Keep the run as a restore left it."""
        self._since = since

    def settle(self, *, epoch: int | None, is_inside: bool) -> None:
        """At the first batch, put back what moved since the restore, and log it.

        Args:
            epoch: whose body runs in ``live.epochs()``; None outside of it.
            is_inside: whether the position is in the middle of an epoch.
        """
        since, self._since = self._since, None
        if since is None:
            return
        if epoch is not None:
            since.end_start(epoch)
        elif is_inside:
            since.settle_streams(PUT_BACK)
        else:  # an epoch begins, and a loop over range(...) may have begun it with a seed
            since.settle_streams(LEFT if self.moves else PUT_BACK_UNSURE)

    def begin_body(self, *, is_repeated: bool) -> None:
        """Put back what moved before a body of ``live.epochs()``; what its start changes is put back at its first batch.

        Args:
            is_repeated: whether the start of this body has run before the save.
        """
        since, self._since = self._since, None
        if since is not None:
            since.settle_streams(PUT_BACK)
            if is_repeated:
                since.begin_body()
                self._since = since
        parts = self._parts()
        self._begun = None if parts is None else small_state(parts)

    def end_body(self) -> None:
        """End the body; without a batch in it, nothing is put back."""
        self._since = None

    def has_moved_in_body(self) -> bool:
        """Whether the body has moved the streams, or changed a hyperparameter or a scheduler, since it began."""
        parts = self._parts()
        return parts is not None and small_state(parts) != self._begun

    # --- at an epoch's end, outside `epochs` --------------------------------------------------------------------------

    def stepped(self, *, ends_epoch: bool) -> None:
        """Note where the streams are after a step, if it ends an epoch."""
        self._at_end = self._now() if ends_epoch else None

    def was_saved(self) -> None:
        """Note where the streams are at a save: a resume does not repeat what comes before it."""
        if self._at_end is not None:
            self._at_end = self._now()

    def begin_reading(self, *, is_inside: bool) -> None:
        """Note whether the loop has moved the streams since the end of an epoch, or a save there."""
        before, self._at_end = self._at_end, None
        now = None if before is None or is_inside else self._now()
        if before is not None and now is not None:
            self.moves = self.moves or bool(moved(before, now))

    def take(self, *, moves: bool) -> Undo:
        """Take from a position whether the loop moves the streams."""
        before = self.moves
        self.moves, self._at_end = moves, None

        def undo() -> None:
            self.moves = before

        return undo

    def _now(self) -> Opaque | None:
        parts = self._parts()
        return None if parts is None else streams_of(parts)
