"""`LoopData`: what a loop reads, epoch by epoch or at a stretch, from one loader or several; the component ``dataset``."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, final

from trainfold.adapters.components.component import Undo
from trainfold.adapters.components.rng_streams import RngPart
from trainfold.adapters.live.pace import Pace, is_pace
from trainfold.adapters.loaders.batch_digest import batch_digest
from trainfold.adapters.loaders.feed import OPENED, OTHER, Feed, mismatch
from trainfold.adapters.loaders.group import FeedGroup, Samples
from trainfold.core.errors import InvalidArgument, TrainfoldError
from trainfold.core.state import Opaque

_LOG = logging.getLogger("trainfold")
_STEPS_TO_TELL: Final = 3


@final
class LoopData:
    """Where a loop is in its data.

    Args:
        feed: the loader, or several.
    """

    def __init__(self, feed: Feed | FeedGroup) -> None:
        self.feed = feed
        self._depth: int | None = None  # how many batches the loop is ahead of those that it has counted
        self._body: int | None = None  # the epoch of `epochs` whose body runs
        self._resumed: int | None = None  # such an epoch, from a position
        self._opened: dict[str, int] = {}  # loader -> the epoch that it was in when this body began to read it
        self._read: set[str] = set()  # loaders that this body has read to the end
        self._left: list[str] = []  # loaders whose epoch was left early, as a position says
        self._open = 0  # iterations of this body that have not ended
        self._was_left = False  # whether a break has ended the last of them
        self._restored: tuple[RngPart, Opaque] | None = None
        self._reading: dict[str, Reading] = {}  # loader -> the iteration of it outside of `epochs` that came last
        self._first: list[int] = []  # batches of the first steps whose samples nobody said
        self._has_said = False
        self._pace = Pace(epoch=feed.epoch)

    # --- reading ------------------------------------------------------------------------------------------------------

    def batches(self, loader: str | None, *, epochs: int | None, done: Callable[[], bool]) -> Iterator[Any]:
        """Batches of one loader; in the body of `epochs`, those of one epoch."""
        feed, name = self._feed(loader), loader or ""
        if self._body is None:
            self._resumed = None
            self._say_where_it_goes_on(name, feed)
            stream = self._started(feed.batches(epochs=epochs, done=done))
            self._reading[name] = stream.reading
            return stream
        if name in self._read:
            return self._started(iter(()))
        first = self._opened.setdefault(name, feed.epoch)
        stop = first + 1 if epochs is None else min(first + 1, epochs)
        return self._started(self._in_body(name, feed, feed.batches(epochs=stop, done=done)))

    def _say_where_it_goes_on(self, name: str, feed: Feed) -> None:
        """A plain loop that is left and comes back begins the next epoch, and this one does not (W04)."""
        last = self._reading.get(name)
        if self._has_said or last is None or last.has_ended or not feed.is_inside:
            return
        self._has_said = True
        _LOG.warning(
            "live.batches() goes on in epoch %d, which the loop has left early; a plain loop would begin the next epoch there. "
            "For that, write `for epoch in live.epochs(n): for batch in live.batches(): ...`. To come back to the same epoch on "
            "purpose, as after an evaluation, let live.batches(steps=...) end the loop, and not a break",
            feed.epoch,
        )

    def _feed(self, loader: str | None) -> Feed:
        if isinstance(self.feed, FeedGroup):
            return self.feed.feed(loader)
        if loader is not None:
            raise InvalidArgument(
                "live.batches",
                expected="no name, where one loader is attached",
                found=repr(loader),
                mend="say live.batches(), or attach(..., loader={name: loader})",
            )
        return self.feed

    def _in_body(self, name: str, feed: Feed, stream: Iterator[Any]) -> Iterator[Any]:
        self._open += 1
        self._was_left = True
        try:
            for batch in stream:
                yield batch
                if feed.epoch > self._opened.get(name, feed.epoch):
                    self._read.add(name)
            self._was_left = False
        finally:
            self._open -= 1

    def epochs(self, n: int, *, done: Callable[[], bool]) -> Iterator[int]:
        """The epochs that are still to do; see ``Live.epochs``."""
        if self._body is not None:
            raise InvalidArgument(
                "live.epochs", expected="one loop over epochs at a time", found="two", mend="leave one"
            )
        epoch = self.feed.epoch if self._resumed is None else self._resumed
        if self._resumed is None:
            self._opened.clear()
            self._read.clear()
        self._resumed = None
        for name in self._left:
            self._feed(name or None).leave_epoch()
        self._left = []
        try:
            while epoch < n and not done():
                self._body = epoch
                yield epoch
                if self._body != epoch:
                    raise _replaced()
                self._body = None
                if done():
                    return
                self._leave_body()
                epoch += 1
        finally:
            if self._body == epoch:
                self._body = None

    def _leave_body(self) -> None:
        """Begin the next epoch of every loader that this body has not read to its end."""
        for name, first in self._opened.items():
            feed = self._feed(name or None)
            if feed.epoch == first:
                feed.leave_epoch()
        if not self._opened and not isinstance(self.feed, FeedGroup):
            self.feed.leave_epoch()
        self._opened.clear()
        self._read.clear()

    # --- counting -----------------------------------------------------------------------------------------------------

    def advance(self, samples: Samples, *, steps: int) -> int:
        """Count batches; where a loop says how many samples it trained on, those that are left were drawn ahead."""
        waiting = self.feed.undelivered()
        if isinstance(self.feed, FeedGroup):
            counted = self.feed.advance(samples)
        else:
            counted = self.feed.advance(None if samples is None else no_names(samples))
        left = self.feed.undelivered()
        self._pace.advance(waiting - left, is_step=bool(steps), epoch=self.feed.epoch)
        if steps and not left:
            self._say_if_ahead(waiting)
        if steps and self._depth is None:
            self._depth = left
        for name, first in self._opened.items():
            if self._feed(name or None).epoch > first:
                self._read.add(name)
        return counted

    def _say_if_ahead(self, batches: int) -> None:
        """A loop that draws ahead takes more batches for its first step than for the others, and counts those ahead too."""
        if len(self._first) == _STEPS_TO_TELL:
            return
        self._first.append(batches)
        first, *others = self._first
        if len(self._first) == _STEPS_TO_TELL and first > others[0] == others[1] > 0:
            _LOG.warning(
                "live.advance() has counted every batch that was handed out: %d at the first step, and %d at each of the next two. A "
                "loop that draws batches ahead loses them at a resume, if it counts them like that: say live.advance(samples=...), "
                "the samples of the batches that the step was trained on, and attach a DataLoader that makes its batches itself",
                first,
                others[0],
            )

    def drop(self) -> int:
        """Give up the batches since the last step; returns the samples among them that were not counted."""
        dropped = self.feed.drop()
        self._pace.begin(self.feed.epoch)
        return dropped

    def unaccounted(self) -> int:
        """Batches that were handed out, neither counted nor drawn ahead of the step as they always are."""
        return max(0, self.feed.undelivered() - (self._depth or 0))

    # --- the component ------------------------------------------------------------------------------------------------

    def capture(self) -> Opaque:
        """The position of the loader, and of the loop in its epochs."""
        found = self.feed.capture()
        if self._pace.noted is not None:
            found = Opaque({**found.value, "pace": list(self._pace.noted)})
        if self._body is None and self._resumed is None:
            return found
        if self._resumed is not None:
            epoch, opened, read, left = self._resumed, self._opened, self._read, self._left
        elif self._open or not self._read:
            self._say_where_a_resume_goes_back_to()
            epoch, opened, read, left = self._body or 0, self._opened, self._read, []
        else:  # the loop over the batches has ended, so what is done at an epoch's end is done
            epoch, opened, read = (self._body or 0) + 1, {}, set()
            left = [name for name in self._opened if name not in self._read]
        body = {"epoch": epoch, "opened": dict(opened), "read": sorted(read), "left": list(left)}
        return Opaque({**found.value, "body": body})

    def _say_where_a_resume_goes_back_to(self) -> None:
        """A save between a break and the next epoch is in the epoch that was left: its body may still go on with it."""
        if not self._open and self._was_left and any(self._feed(name or None).is_inside for name in self._opened):
            self._was_left = False
            _LOG.warning(
                "this save comes after a break out of live.batches(), and before live.epochs() has begun the next epoch. A resume from it "
                "goes back to the epoch that was left, and reads the rest of it. Save inside the inner loop, before the break"
            )

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every reason why it cannot be taken."""
        body = saved.value.get("body") if isinstance(saved, Opaque) and isinstance(saved.value, dict) else None
        found = self.feed.problems(saved)
        if isinstance(saved, Opaque) and isinstance(saved.value, dict) and not is_pace(saved.value.get("pace")):
            found.append(mismatch("state.dataset.pace", "two counts", repr(saved.value["pace"])[:80], OTHER))
        names = set(self.feed.feeds) if isinstance(self.feed, FeedGroup) else {""}
        if body is not None and not (
            isinstance(body, dict)
            and type(body.get("epoch")) is int
            and body["epoch"] >= 0
            and isinstance(body.get("opened"), dict)
            and set(body["opened"]) <= names
            and all(type(epoch) is int for epoch in body["opened"].values())
            and all(isinstance(body.get(key), list) and set(map(str, body[key])) <= names for key in ("read", "left"))
        ):
            found.append(mismatch("state.dataset.body", "an epoch, and what it has read", repr(body)[:80], OTHER))
        return found

    def write(self, saved: Any) -> Undo:
        """Take it."""
        before = (self._depth, self._body, self._resumed, self._opened, self._read, self._left, self._pace)
        undo = self.feed.write(saved)
        body = saved.value.get("body")
        self._pace = Pace(saved.value.get("pace"), self.feed.epoch)
        self._depth = self._body = None
        self._resumed = None if body is None else body["epoch"]
        self._opened = {} if body is None else dict(body["opened"])
        self._read = set() if body is None else set(body["read"])
        self._left = [] if body is None else list(body["left"])

        def take_back() -> None:
            undo()
            self._depth, self._body, self._resumed, self._opened, self._read, self._left, self._pace = before

        return take_back

    # --- random streams between a restore and the first batch ---------------------------------------------------------

    def restored(self, part: RngPart) -> None:
        """Remember the streams as a restore has left them."""
        self._restored = part, part.capture()

    def _started(self, stream: Iterator[Any]) -> "BatchStream":
        return BatchStream(self._after_put_back(stream) if self._restored is not None else stream)

    def _after_put_back(self, stream: Iterator[Any]) -> Iterator[Any]:
        if self._restored is not None:
            part, streams = self._restored
            self._restored = None
            put_back(part, streams)
        yield from stream


def total_of(samples: Samples) -> Any:
    """The number of samples, whichever loaders they come from.

    Examples:
        >>> total_of({"labelled": 3, "unlabelled": 5}), total_of(3)
        (8, 3)
    """
    if not isinstance(samples, Mapping):
        return samples
    return sum(each for each in samples.values() if type(each) is int)


def no_names(samples: Samples) -> int:
    """The number of samples of a run whose loader has no name.

    Raises:
        InvalidArgument: for samples by name.
    """
    if isinstance(samples, Mapping):
        raise InvalidArgument(
            "advance.samples",
            expected="a number, where there are no loaders with names",
            found=repr(dict(samples))[:80],
            mend="say how many samples the step was trained on, or attach(..., loader={name: loader})",
        )
    return samples or 0


@final
class Reading:
    """Whether an iteration has come to its end. It holds nothing, so that a loader goes with its last iterator."""

    def __init__(self) -> None:
        self.has_ended = False


@final
class BatchStream:
    """Batches, whose loader's iterator is made by ``iter()``, as a DataLoader makes it.

    Making it draws from the random streams. ``zip(a, b)`` makes both before it asks for a batch.

    Args:
        batches: from `Feed.batches`.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._is_open = False
        self.reading = Reading()

    def __iter__(self) -> "BatchStream":
        if not self._is_open:
            self._is_open = True
            next(self._batches, OPENED)
        return self

    def __next__(self) -> Any:
        self.__iter__()
        try:
            return next(self._batches)
        except StopIteration:
            self.reading.has_ended = True
            raise


def put_back(part: RngPart, streams: Opaque) -> None:
    """Write streams back that have moved since a restore, and say which (G11)."""
    now = part.capture()
    moved = [name for name, value in streams.value.items() if batch_digest(value) != batch_digest(now.value.get(name))]
    if moved:
        part.write(streams)
        _LOG.warning(
            "the random streams of %s have moved between the restore and the first batch: put back, so that the run goes on "
            "as it would have. What drew there (a dataset, a model, an evaluation) is best done before the restore; to draw "
            "anew on purpose, seed after the first batch, or restore without rng",
            ", ".join(moved),
        )


def _replaced() -> InvalidArgument:
    return InvalidArgument(
        "live.epochs",
        expected="one loop over epochs at a time",
        found="one that a restore has replaced",
        mend="leave this loop and call live.epochs() again",
    )
