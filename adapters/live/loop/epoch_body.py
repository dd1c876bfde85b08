"""`EpochBody`: what one body of ``live.epochs()`` has read of each loader, and whether its loop over batches is over."""

import logging
import weakref
from collections.abc import Collection, Iterator
from typing import Any, Final, final

from trainfold.adapters.batches.data_probe import is_wanted
from trainfold.adapters.batches.feed import OTHER, Feed, mismatch
from trainfold.adapters.components.component import Undo
from trainfold.adapters.live.loop.batch_stream import BatchStream
from trainfold.adapters.live.loop.break_warnings import AGAIN, KEPT, LEFT_AFTER, NEXT_LOADER, STOPPED
from trainfold.adapters.live.loop.draw_ahead import DrawAhead
from trainfold.adapters.loaders.group import FeedGroup
from trainfold.backends.ranks.launcher import log_for_all
from trainfold.core.errors import DataPositionMismatch, InvalidArgument, TrainfoldError

_LOG: Final = logging.getLogger("trainfold")
_INSIDE: Final = "inside"
_OVER: Final = "over"


@final
class EpochBody:
    """The body of ``live.epochs()`` that is running, or that a restored position is in.

    Args:
        feed: the loader, or several.
        ahead: how far the loop draws ahead.

    Attributes:
        epoch: whose body runs; None outside ``live.epochs()``.
        resumed: the epoch that a restored position is in, until its body runs.
        opened: loader -> the epoch that it was in when this body began to read it.
        read: loaders that this body has read to the end.
        running: iterations of this body that have not ended.
        has_ended: whether one of them has yielded its last batch since the last step.
    """

    def __init__(self, feed: Feed | FeedGroup, ahead: DrawAhead) -> None:
        self._feed = feed
        self._ahead = ahead
        self.epoch: int | None = None
        self.resumed: int | None = None
        self.opened: dict[str, int] = {}
        self.read: set[str] = set()
        self.running = 0
        self.has_ended = False
        self._left: list[str] = []  # loaders whose epoch was left early, as a position says
        # loader -> its iteration that ended before the step on its last batch
        self._ended_ahead: dict[str, weakref.ref[BatchStream]] = {}
        self._searched: set[str] = set()  # loaders whose iterations were searched for itertools.cycle
        self._paused: set[str] = set()  # loaders whose iteration ended inside an epoch, at a step of `steps`
        self._entered: set[str] = set()  # loaders that this body has started to read in this process
        self._saved: str | None = None  # where in this body a save since the last step was made
        self._warned: set[str] = set()  # logged messages

    def feed_of(self, name: str) -> Feed:
        """The feed of a loader; ``""`` names the only one."""
        return self._feed.feed(name or None) if isinstance(self._feed, FeedGroup) else self._feed

    # --- reading ------------------------------------------------------------------------------------------------------

    def enter(self, name: str, *, is_whole: bool) -> int | None:
        """Begin to read a loader; return the epoch that it was in at first, or None if it has no batch left.

        Args:
            name: of the loader.
            is_whole: whether the loop asks for the whole epoch, not for batches up to a step.

        Raises:
            InvalidArgument: for a second pass outside a loop over another loader.
        """
        feed = self.feed_of(name)
        if name in self.read and name in self._entered and is_whole:
            self._restart(name, feed)
        if name in self.read:  # by the position, or in parts: a plain loop has had all of it
            self._entered.add(name)
            return None
        first = self.opened.setdefault(name, feed.epoch)
        if name in self._entered and not self.running and feed.is_inside and name not in self._paused:
            self.warn_once(AGAIN, first)  # where a plain loop restarts the epoch, this one continues it
        elif self._saved == _OVER:
            self.warn_once(NEXT_LOADER, first)
        self._entered.add(name)
        self._paused.discard(name)
        return first

    def _restart(self, name: str, feed: Feed) -> None:
        """Let a loader that has ended yield its next epoch in the same body, as a plain loop over it does.

        Raises:
            InvalidArgument: outside a loop over another loader. A resume would take the first of the two loops for the second.
        """
        if not self.running:
            raise InvalidArgument(
                "live.batches",
                expected="one pass over a loader in a body of live.epochs(), or several inside the loop over another loader",
                found=f"a second one over {f'the loader {name!r}' if name else 'the loader'}, which was read to its end",
                fix="count each pass as an epoch, `for epoch in live.epochs(2 * n)`; or iterate over the loader itself where nothing "
                "is trained, as in an evaluation",
            )
        self.read.discard(name)
        self.opened[name] = feed.epoch

    def reading(self, name: str, batches: Iterator[Any], stream: list[weakref.ref[BatchStream]]) -> Iterator[Any]:
        """Yield batches of one loader, and note how the iteration ends.

        Args:
            name: of the loader.
            batches: of its feed.
            stream: the stream that hands these batches to the loop; empty until that is made.
        """
        feed = self.feed_of(name)
        self.running += 1
        self.has_ended = False
        try:
            for batch in batches:
                yield batch
                if feed.epoch > self.opened.get(name, feed.epoch):
                    self.read.add(name)
            self.has_ended = True
            self._check_no_cycle(name, stream[0]())
            if feed.is_inside and not feed.undelivered():
                self._paused.add(name)
            elif feed.undelivered() and self._ahead.depth != 0:
                self._ended_ahead[name] = stream[0]
        finally:
            self.running -= 1

    def _check_no_cycle(self, name: str, stream: BatchStream | None) -> None:
        """Raise if `itertools.cycle` is about to repeat the batches of this pass: it keeps them in a list that no save contains.

        Each loader is searched once, inside the loop over another one, because the search goes through all objects.
        """
        if self.running < 2 or name in self._searched:
            return
        self._searched.add(name)
        if stream is not None and stream.is_cycled():
            raise InvalidArgument(
                "live.batches",
                expected="a loop that draws each pass from the loader",
                found=f"itertools.cycle over {name!r}, which repeats the batches of its first pass, from a list that no save has",
                fix="write a generator, `while True: yield from live.batches(name)`; outside live.epochs(), live.batches(name) has no end",
            )

    def note_read(self) -> None:
        """After a step: note the loaders whose epoch has ended, and that nothing was saved since."""
        self.has_ended, self._saved = False, None
        for name, first in self.opened.items():
            if self.feed_of(name).epoch > first:
                self.read.add(name)

    # --- from body to body --------------------------------------------------------------------------------------------

    def next_epoch(self) -> int:
        """The first epoch of a new loop over epochs; loaders left early in a restored position start their next epoch."""
        epoch = self._feed.epoch if self.resumed is None else self.resumed
        if self.resumed is None:
            self.opened.clear()
            self.read.clear()
        self.resumed = None
        for name in self._left:
            _leave(self.feed_of(name))
        self._left = []
        return epoch

    def begin(self, epoch: int) -> None:
        """Begin the body of an epoch."""
        self.epoch, self._saved, self.has_ended = epoch, None, False
        self._entered.clear()
        self._paused.clear()
        self._ended_ahead.clear()

    def leave(self, epoch: int) -> None:
        """End the body: begin the next epoch of every loader that it has not read to its end."""
        if self._saved == _INSIDE and self._is_ahead():
            self.warn_once(KEPT, epoch)
        if self._saved == _INSIDE and not self.read and self.left_early():
            self.warn_once(LEFT_AFTER, epoch)
        for name, first in self.opened.items():
            feed = self.feed_of(name)
            if feed.epoch == first:
                feed.leave_epoch()
        if not self.opened and not isinstance(self._feed, FeedGroup):
            self._feed.leave_epoch()
        self.opened.clear()
        self.read.clear()

    def stop(self, epoch: int) -> None:
        """Note that the loop over epochs was left in this body."""
        self.epoch = None
        if self._saved == _OVER and self.left_early():
            self.warn_once(STOPPED, epoch)

    # --- where a save is ----------------------------------------------------------------------------------------------

    def was_saved(self) -> None:
        """Note where in this body a save was made."""
        self._saved = _OVER if self.is_over() else _INSIDE

    def is_over(self) -> bool:
        """Whether the loop over the batches of this body has ended: read to the end, or left by a break."""
        if self._paused or (self.running and not self.has_ended) or self._is_ahead():
            return False
        return bool(self.read or self.left_early())

    def is_left(self) -> bool:
        """Whether no iteration of this body continues: a break or zip() has discarded what waits, as in a plain loop."""
        return self.epoch is not None and not self.running and not self._paused

    def left_early(self) -> list[str]:
        """Loaders that this body has started to read and whose epoch it has not ended."""
        return [name for name in self.opened if name not in self.read and self.feed_of(name).is_inside]

    def _is_ahead(self) -> bool:
        """Whether a loop that draws ahead is still in its last batches: its prefetcher then refers to the iterator that has ended."""
        return any(stream() is not None for stream in self._ended_ahead.values())

    def warn_once(self, message: str, epoch: int) -> None:
        """Log a message about saves around a break, unless it was logged before."""
        if message not in self._warned:
            self._warned.add(message)
            log_for_all(message, epoch)

    # --- as a value ---------------------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any] | None:
        """The position in the loop over epochs; None outside such a loop."""
        if self.epoch is None and self.resumed is None:
            return None
        if self.resumed is not None:
            epoch, opened, read, left = self.resumed, self.opened, self.read, self._left
        elif self.is_over():  # a resume does not repeat the end of the epoch
            epoch, opened, read = (self.epoch or 0) + 1, {}, set()
            left = [name for name in self.opened if name not in self.read]
        else:
            epoch, opened, read, left = self.epoch or 0, self.opened, self.read, []
        return {"epoch": epoch, "opened": dict(opened), "read": sorted(read), "left": list(left)}

    def take(self, body: dict[str, Any] | None) -> Undo:
        """Take a position that `capture` returned, or None."""
        before = self.epoch, self.resumed, self.opened, self.read, self._left
        self.epoch = None
        self.resumed = None if body is None else body["epoch"]
        self.opened = {} if body is None else dict(body["opened"])
        self.read = set() if body is None else set(body["read"])
        self._left = [] if body is None else list(body["left"])

        def undo() -> None:
            self.epoch, self.resumed, self.opened, self.read, self._left = before

        return undo


def body_problems(body: Any, loaders: Collection[str]) -> list[TrainfoldError]:
    """Every reason why a saved position in a loop over epochs cannot be taken.

    Args:
        body: from a checkpoint.
        loaders: the names of the attached loaders; ``""`` for the only one.

    Examples:
        >>> body_problems({"epoch": 1, "opened": {"": 1}, "read": [], "left": []}, {""}), len(body_problems({"epoch": -1}, {""}))
        ([], 1)
    """
    names = set(loaders)
    if body is None or (
        isinstance(body, dict)
        and type(body.get("epoch")) is int
        and body["epoch"] >= 0
        and isinstance(body.get("opened"), dict)
        and set(body["opened"]) <= names
        and all(type(epoch) is int for epoch in body["opened"].values())
        and all(isinstance(body.get(key), list) and set(map(str, body[key])) <= names for key in ("read", "left"))
    ):
        return []
    return [mismatch("state.dataset.body", "an epoch, and what was read in it", repr(body)[:80], OTHER)]


def _leave(feed: Feed) -> None:
    """Begin the next epoch; persistent workers first draw again the batches that they had drawn ahead in the process that has died."""
    try:
        feed.leave_epoch()
    except DataPositionMismatch:
        if not is_wanted(feed.policy):
            raise  # without the data probe the workers start in another state
        opened = feed.batches(epochs=feed.epoch + 1, done=lambda: False)
        next(opened, None)
        feed.leave_epoch()
