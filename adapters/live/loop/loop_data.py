"""`LoopData`: what a loop reads, epoch by epoch or at a stretch, from one loader or several; the component ``dataset``."""

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from threading import get_ident
from typing import Any, Final, final

from trainfold.adapters.components.component import ComponentAdapter, Undo
from trainfold.adapters.draws.data_probe import is_wanted
from trainfold.adapters.draws.feed import OTHER, Feed, mismatch
from trainfold.adapters.live.loop.batch_stream import BatchStream, Reading
from trainfold.adapters.live.loop.pace import Pace, is_pace
from trainfold.adapters.live.loop.since_restore import (
    LEFT,
    PUT_BACK,
    PUT_BACK_UNSURE,
    SinceRestore,
    moved,
    small_state,
    streams_of,
)
from trainfold.adapters.loaders.group import FeedGroup, Samples
from trainfold.backends.ranks.launcher import ranks_around
from trainfold.core.errors import DataPositionMismatch, InvalidArgument, TrainfoldError
from trainfold.core.state.state import Opaque

_LOG = logging.getLogger("trainfold")
_STEPS_TO_TELL: Final = 3
INSIDE: Final = "inside"
OVER: Final = "over"
TOO_EARLY: Final = (
    "a save in epoch %d of live.epochs() was made before the first batch, and after the body has moved random streams, a hyperparameter or "
    "a scheduler. A resume from it does the body again from its beginning, and so does all of this twice. Save at the very start of the "
    "body, inside the loop over batches, or after it"
)
LEFT_AFTER: Final = (
    "the newest save was made inside the loop over live.batches(), which has then left epoch %d early. A resume from that save goes "
    "on in this epoch, and a plain loop begins the next one. If this loop leaves its epochs on purpose, test for it before the step, or "
    "save after the break as well; if it held an iterator of live.batches() in a variable, delete that before the save"
)
STOPPED: Final = (
    "the newest save was made after a break out of live.batches(), and counts epoch %d as left: a resume from it begins the next epoch, "
    "as a plain loop would. If the run was stopped there and is to go on in this epoch, save before the break, inside the inner loop"
)
HELD: Final = (
    "the newest save in epoch %d of live.epochs() is taken for one inside the loop over batches, because the loop draws ahead and a variable "
    "still holds the iterator of live.batches() that had ended: a resume from it does again what comes after that loop. If the save was made "
    "after the loop, delete the variable before it, or write the prefetcher into the loop: `for batch in prefetch(live.batches()):`"
)
AGAIN: Final = (
    "the body of live.epochs() iterates over live.batches() again in epoch %d, which it had left early: it goes on in the epoch, and a "
    "plain loop over the loader would begin it anew. A resume from a save between the two begins the next epoch. To read an epoch in "
    "parts, keep one iterator, `batches = iter(live.batches())`, and read from that"
)
NEXT_LOADER: Final = (
    "a save in epoch %d of live.epochs() was made after the loop over the batches of one loader, and before that over the batches of "
    "another one. A resume from it begins the next epoch, without what comes after it in this body. Save inside a loop over batches, or "
    "at the end of the body"
)


@final
class LoopData:
    """Where a loop is in its data.

    Args:
        feed: the loader, or several.
        parts: gives the components of the run; None once the run is gone.
    """

    def __init__(self, feed: Feed | FeedGroup, parts: Callable[[], Mapping[str, ComponentAdapter] | None]) -> None:
        self.feed = feed
        self._parts = parts
        self._depth: int | None = None  # how many batches the loop is ahead of those that it has counted
        self._body: int | None = None  # the epoch of `epochs` whose body runs
        self._resumed: int | None = None  # such an epoch, from a position
        self._opened: dict[str, int] = {}  # loader -> the epoch that it was in when this body began to read it
        self._read: set[str] = set()  # loaders that this body has read to the end
        self._left: list[str] = []  # loaders whose epoch was left early, as a position says
        self._open = 0  # iterations of this body that have not ended
        self._has_ended = False  # whether one of them has given all that it had, since the last step
        # loader -> its iteration that has ended before the step on its last batch
        self._ahead: dict[str, weakref.ref[BatchStream]] = {}
        self._looked: set[str] = set()  # loaders for whose iterations itertools.cycle was looked for
        self._paused: set[str] = set()  # loaders whose iteration `steps` has ended inside of an epoch
        self._entered: set[str] = set()  # loaders that this body has begun to read in this process
        self._saved: str | None = None  # what a save since the last step takes this body for: INSIDE or OVER
        self._told: set[str] = set()  # what was said about saves around a break
        self._since: SinceRestore | None = None
        self._begun: str | None = None  # the small state of the run when this body began
        self._at_end: Opaque | None = None  # the streams at an epoch's end, outside of `epochs`
        self._moves = False  # whether the loop was seen to move them before the first batch of an epoch
        self._reading: dict[str, Reading] = {}  # loader -> the iteration of it outside of `epochs` that came last
        self._latest: dict[str, Reading] = {}  # loader -> the iteration that came last
        self._first: list[int] = []  # batches of the first steps whose samples nobody said
        self._has_said = False
        self._pace = Pace(epoch=feed.epoch)

    # --- reading ------------------------------------------------------------------------------------------------------

    def batches(
        self, loader: str | None, *, epochs: int | None, until: int | None, done: Callable[[], bool]
    ) -> Iterator[Any]:
        """Batches of one loader; in the body of `epochs`, those of one epoch, or up to a step of it."""
        feed, name = self._feed(loader), loader or ""
        if self._body is None:
            self._resumed = None
            self._say_where_it_goes_on(name, feed)
            self._look_at_streams(feed)
            stream = self._started(feed.batches(epochs=epochs, done=done))
            self._reading[name] = self._latest[name] = stream.reading
            return stream
        if name in self._read and name in self._entered and until is None:
            self._begin_anew(name, feed)
        if name in self._read:  # as a position says, or in parts: the plain loop has had all of it
            self._entered.add(name)
            no_batch: Iterator[Any] = iter(())
            return self._started(no_batch) if self._read >= self._opened.keys() else BatchStream(no_batch)
        first = self._opened.setdefault(name, feed.epoch)
        self._say_that_it_is_entered_again(name, feed, first)
        stop = first + 1 if epochs is None else min(first + 1, epochs)
        held: list[weakref.ref[BatchStream]] = []
        stream = self._started(self._in_body(name, feed, feed.batches(epochs=stop, done=done), held))
        held.append(weakref.ref(stream))
        self._latest[name] = stream.reading
        return stream

    def _begin_anew(self, name: str, feed: Feed) -> None:
        """Let a loader that has ended give its next epoch in the same body, as a plain loop over it does (W04).

        Raises:
            InvalidArgument: outside of a loop over another loader. A resume would take the first of the two loops for the second one.
        """
        if not self._open:
            raise InvalidArgument(
                "live.batches",
                expected="one pass over a loader in a body of live.epochs(), or more of them inside the loop over another loader",
                found=f"a second one over {f'the loader {name!r}' if name else 'the loader'}, which has been read to its end",
                fix="count each pass as an epoch, `for epoch in live.epochs(2 * n)`; iterate over the loader itself for what is no training, "
                "such as an evaluation",
            )
        self._read.discard(name)
        self._opened[name] = feed.epoch

    def _say_that_it_is_entered_again(self, name: str, feed: Feed, first: int) -> None:
        """A plain loop over a loader begins anew where it is left and comes back, and this one goes on (W04)."""
        if name in self._entered and not self._open and feed.is_inside and name not in self._paused:
            self._say_once(AGAIN, first)
        elif self._saved == OVER:
            self._say_once(NEXT_LOADER, first)
        self._entered.add(name)
        self._paused.discard(name)

    def _say_once(self, message: str, epoch: int) -> None:
        if message not in self._told:
            self._told.add(message)
            _LOG.warning(message, epoch)

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
                fix="say live.batches(), or attach(..., loader={name: loader})",
            )
        return self.feed

    def _in_body(
        self, name: str, feed: Feed, stream: Iterator[Any], held: list[weakref.ref[BatchStream]]
    ) -> Iterator[Any]:
        self._open += 1
        self._has_ended = False
        try:
            for batch in stream:
                yield batch
                if feed.epoch > self._opened.get(name, feed.epoch):
                    self._read.add(name)
            self._has_ended = True
            self._check_no_cycle(name, held[0]())
            if feed.is_inside and not feed.undelivered():
                self._paused.add(name)
            elif feed.undelivered() and self._depth != 0:
                self._ahead[name] = held[0]
        finally:
            self._open -= 1

    def _check_no_cycle(self, name: str, stream: BatchStream | None) -> None:
        """Raise where `itertools.cycle` is about to give the batches of this pass again: it keeps them, and no save can (W04).

        It is looked for once for each loader, inside the loop over another one, because a look goes through all objects.
        """
        if self._open < 2 or name in self._looked:
            return
        self._looked.add(name)
        if stream is not None and stream.is_cycled():
            raise InvalidArgument(
                "live.batches",
                expected="a loop that draws each pass anew",
                found=f"itertools.cycle over {name!r}, which gives the batches of its first pass again, from a list that no save has",
                fix="write a generator, `while True: yield from live.batches(name)`; outside of live.epochs() live.batches(name) has no end",
            )

    def epochs(self, n: int, *, done: Callable[[], bool]) -> Iterator[int]:
        """The epochs that are still to do; see ``Live.epochs``."""
        if self._body is not None:
            raise InvalidArgument(
                "live.epochs", expected="one loop over epochs at a time", found="two", fix="leave one"
            )
        epoch = self.feed.epoch if self._resumed is None else self._resumed
        if self._resumed is None:
            self._opened.clear()
            self._read.clear()
        self._resumed = None
        for name in self._left:
            _leave(self._feed(name or None))
        self._left = []
        try:
            while epoch < n and not done():
                self._begin_body(epoch)
                yield epoch
                if self._body != epoch:
                    raise _replaced()
                self._body = self._since = None
                if done():
                    return
                self._leave_body(epoch)
                epoch += 1
        finally:
            if self._body == epoch:
                self._body = None
                if self._saved == OVER and self._left_early():
                    self._say_once(STOPPED, epoch)

    def _begin_body(self, epoch: int) -> None:
        """Settle what a restore has left; an epoch that is entered again is settled at its first batch."""
        self._body, self._saved, self._has_ended = epoch, None, False
        self._entered.clear()
        self._paused.clear()
        self._ahead.clear()
        since, self._since = self._since, None
        if since is not None:
            since.settle_streams(PUT_BACK)
            if self._opened or self._read or self._is_inside():
                since.begin_body()
                self._since = since
        parts = self._parts()
        self._begun = None if parts is None else small_state(parts)

    def _is_inside(self) -> bool:
        return any(feed.is_inside for feed in self._feeds().values())

    def _feeds(self) -> dict[str, Feed]:
        return self.feed.feeds if isinstance(self.feed, FeedGroup) else {"": self.feed}

    def _left_early(self) -> list[str]:
        """Loaders that this body has read in, and whose epoch it has not ended."""
        return [name for name in self._opened if name not in self._read and self._feed(name or None).is_inside]

    def _is_over(self) -> bool:
        """Whether the loop over the batches of this body has ended: read to the end, or left by a break (W04)."""
        if self._paused or (self._open and not self._has_ended) or self._is_ahead():
            return False
        return bool(self._read or self._left_early())

    def _is_ahead(self) -> bool:
        """Whether a loop that draws ahead is still in its last batches: its prefetcher then holds the iterator that has ended."""
        return any(stream() is not None for stream in self._ahead.values())

    def _leave_body(self, epoch: int) -> None:
        """Begin the next epoch of every loader that this body has not read to its end."""
        if self._saved == INSIDE and self._is_ahead():
            self._say_once(HELD, epoch)
        if self._saved == INSIDE and not self._read and self._left_early():
            self._say_once(LEFT_AFTER, epoch)
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
        if type(samples) is int and self._is_of_all_ranks(samples):
            samples = None  # of this rank all that was handed out
        if isinstance(self.feed, FeedGroup):
            counted = self.feed.advance(samples)
        else:
            counted = self.feed.advance(None if samples is None else no_names(samples))
        left = self.feed.undelivered()
        self._pace.advance(waiting - left, is_step=bool(steps), epoch=self.feed.epoch)
        if steps and not left:
            self._say_if_ahead(waiting)
        if (
            steps and self._depth is None and (self._body is None or self._open)
        ):  # at an epoch's end nothing is left ahead
            self._depth = left
        self._has_ended, self._saved = False, None
        for name, first in self._opened.items():
            if self._feed(name or None).epoch > first:
                self._read.add(name)
        self._at_end = self._streams() if self._body is None and waiting and not self._is_inside() else None
        return counted

    def _is_of_all_ranks(self, samples: int) -> bool:
        """Whether a number can only be the sum over the ranks: there are several, and this one was handed out fewer."""
        waiting = [each.waiting_samples() for each in self._feeds().values() if each.undelivered()]
        known = [each for each in waiting if each is not None]
        return len(known) == len(waiting) and 0 < sum(known) < samples and ranks_around(os.environ) is not None

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

    def unaccounted(self) -> str | None:
        """Batches that were handed out, neither counted nor drawn ahead of the step as they always are, in words."""
        waiting = {name: feed.undelivered() for name, feed in self._feeds().items()}
        if (
            self._body is not None and not self._open and not self._paused
        ):  # a break, or zip(), has thrown them away, as in a plain loop
            waiting.update(dict.fromkeys(self._left_early(), 0))
        count = max(0, sum(waiting.values()) - (self._depth or 0))
        if not count:
            return None
        found = f"batches handed out since the last advance(): {count}"
        if any(reading.thread not in (None, get_ident()) for reading in self._latest.values()):
            return (
                f"{found}, by a thread that draws ahead: how far it is differs from step to step, and so does what it draws of random numbers. "
                "Let the loader draw ahead, with num_workers= and prefetch_factor=, and iterate over live.batches() without that thread"
            )
        ended = [name for name in self._opened if name in self._read]
        if self._body is None or not self._has_ended or not ended:
            return found
        thrown = [name for name, each in waiting.items() if each and name not in ended]
        return (
            f"{found}, of {thrown}. It seems that zip() has drawn and dropped them, because {ended} had ended: put the loader that ends "
            "first into zip() first; or say `for ... in zip(live.batches(...), live.batches(...))` and keep no iterator in a variable"
        )

    # --- the component ------------------------------------------------------------------------------------------------

    def capture(self) -> Opaque:
        """The position of the loader, and of the loop in its epochs."""
        found = self.feed.capture()
        if self._pace.noted is not None:
            found = Opaque({**found.value, "pace": list(self._pace.noted)})
        if self._body is None and self._resumed is None:
            return Opaque({**found.value, "moves": True}) if self._moves else found
        if self._resumed is not None:
            epoch, opened, read, left = self._resumed, self._opened, self._read, self._left
        elif self._is_over():  # what is done at an epoch's end is done
            epoch, opened, read = (self._body or 0) + 1, {}, set()
            left = [name for name in self._opened if name not in self._read]
        else:
            epoch, opened, read, left = self._body or 0, self._opened, self._read, []
        body = {"epoch": epoch, "opened": dict(opened), "read": sorted(read), "left": list(left)}
        return Opaque({**found.value, "body": body})

    def was_saved(self) -> None:
        """Remember what a save takes this body for, and where the streams stand: what comes before it is not done again."""
        if self._body is not None:
            self._saved = OVER if self._is_over() else INSIDE
            parts = None if self._opened else self._parts()
            if parts is not None and small_state(parts) != self._begun:
                self._say_once(TOO_EARLY, self._body)
        elif self._at_end is not None:
            self._at_end = self._streams()

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
        moves = saved.value.get("moves") if isinstance(saved, Opaque) and isinstance(saved.value, dict) else None
        if moves not in (None, True):
            found.append(mismatch("state.dataset.moves", "True, or nothing", repr(moves)[:80], OTHER))
        return found

    def write(self, saved: Any) -> Undo:
        """Take it."""
        before = (self._depth, self._body, self._resumed, self._opened, self._read, self._left, self._moves, self._pace)
        undo = self.feed.write(saved)
        body = saved.value.get("body")
        self._pace = Pace(saved.value.get("pace"), self.feed.epoch)
        self._depth = self._body = None
        self._resumed = None if body is None else body["epoch"]
        self._opened = {} if body is None else dict(body["opened"])
        self._read = set() if body is None else set(body["read"])
        self._left = [] if body is None else list(body["left"])
        self._moves, self._at_end = saved.value.get("moves") is True, None

        def take_back() -> None:
            undo()
            self._depth, self._body, self._resumed, self._opened, self._read, self._left, self._moves, self._pace = (
                before
            )

        return take_back

    # --- between a restore and the first batch ------------------------------------------------------------------------

    def restored(self, since: SinceRestore) -> None:
        """Remember the run as a restore has left it."""
        self._since = since

    def _started(self, stream: Iterator[Any]) -> BatchStream:
        return BatchStream(self._after_settling(stream) if self._since is not None else stream)

    def _after_settling(self, stream: Iterator[Any]) -> Iterator[Any]:
        since, self._since = self._since, None
        if since is not None and self._body is not None:
            since.end_start(self._body)
        elif since is not None and self._is_inside():
            since.settle_streams(PUT_BACK)
        elif since is not None:  # an epoch begins, and a loop over range(...) may have begun it with a seed
            since.settle_streams(LEFT if self._moves else PUT_BACK_UNSURE)
        yield from stream

    def _streams(self) -> Opaque | None:
        parts = self._parts()
        return None if parts is None else streams_of(parts)

    def _look_at_streams(self, feed: Feed) -> None:
        """Note whether a loop without `epochs` has moved the streams since the end of an epoch, or a save there (G11)."""
        before, self._at_end = self._at_end, None
        now = None if before is None or feed.is_inside else self._streams()
        if before is not None and now is not None:
            self._moves = self._moves or bool(moved(before, now))


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
            fix="say how many samples the step was trained on, or attach(..., loader={name: loader})",
        )
    return samples or 0


def _leave(feed: Feed) -> None:
    """Begin the next epoch; workers that live on first draw ahead what they had drawn in the process that has died."""
    try:
        feed.leave_epoch()
    except DataPositionMismatch:
        if not is_wanted(feed.policy):
            raise  # without the data probe the workers begin otherwise
        opened = feed.batches(epochs=feed.epoch + 1, done=lambda: False)
        next(opened, None)
        feed.leave_epoch()


def _replaced() -> InvalidArgument:
    return InvalidArgument(
        "live.epochs",
        expected="one loop over epochs at a time",
        found="one that a restore has replaced",
        fix="leave this loop and call live.epochs() again",
    )
