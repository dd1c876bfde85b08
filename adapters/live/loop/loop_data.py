"""`LoopData`: the component ``dataset``: where a loop is in its data, with one loader or several."""

import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from threading import get_ident
from typing import Any, Final, final

from trainfold.adapters.batches.feed import OTHER, Feed, mismatch
from trainfold.adapters.components.component import ComponentAdapter, Undo
from trainfold.adapters.live.loop.batch_stream import BatchStream, Reading
from trainfold.adapters.live.loop.batches_per_step import Pace, is_pace
from trainfold.adapters.live.loop.break_warnings import TOO_EARLY
from trainfold.adapters.live.loop.draw_ahead import DrawAhead
from trainfold.adapters.live.loop.epoch_body import EpochBody, body_problems
from trainfold.adapters.live.loop.loop_streams import LoopStreams
from trainfold.adapters.live.loop.since_restore import SinceRestore
from trainfold.adapters.loaders.group import FeedGroup, Samples, no_names
from trainfold.backends.ranks.launcher import log_for_all, ranks_around
from trainfold.core.errors import InvalidArgument, TrainfoldError
from trainfold.core.state.state import Opaque

_LOG: Final = logging.getLogger("trainfold")


@final
class LoopData:
    """The position of a loop in its data.

    Args:
        feed: the loader, or several.
        parts: a method that returns the components of the run; the loop does not keep its object alive.
    """

    def __init__(self, feed: Feed | FeedGroup, parts: Callable[[], Mapping[str, ComponentAdapter]]) -> None:
        self.feed = feed
        self._parts = _weakly(parts)
        self._ahead = DrawAhead()
        self._body = EpochBody(feed, self._ahead)
        self._streams = LoopStreams(self._parts)
        self._reading: dict[str, Reading] = {}  # loader -> its newest iteration outside `epochs`
        self._latest: dict[str, Reading] = {}  # loader -> its newest iteration
        self._has_warned = False  # of an epoch that the loop left early and continues
        self._pace = Pace(epoch=feed.epoch)

    # --- reading ------------------------------------------------------------------------------------------------------

    def batches(
        self, loader: str | None, *, epochs: int | None, until: int | None, done: Callable[[], bool]
    ) -> Iterator[Any]:
        """Batches of one loader; in the body of `epochs`, those of one epoch, or up to a step of it."""
        if epochs is not None and self.feed.epoch >= epochs:
            log_for_all("live.batches(epochs=%d) has no batch left: the run has had %d epochs; raise epochs= to extend it: "
                         '"Train for fewer epochs than were done" in docs/how-to/change-a-run.md', epochs, self.feed.epoch)  # fmt: skip
        feed, name = self._feed(loader), loader or ""
        if self._body.epoch is None:
            self._body.resumed = None
            self._warn_of_an_epoch_left_early(name, feed)
            self._streams.begin_reading(is_inside=feed.is_inside)
            stream = self._started(feed.batches(epochs=epochs, done=done))
            self._reading[name] = self._latest[name] = stream.reading
            return stream
        first = self._body.enter(name, is_whole=until is None)
        if first is None:
            no_batch: Iterator[Any] = iter(())
            is_last = self._body.read >= self._body.opened.keys()
            return self._started(no_batch) if is_last else BatchStream(no_batch)
        stop = first + 1 if epochs is None else min(first + 1, epochs)
        made: list[weakref.ref[BatchStream]] = []
        stream = self._started(self._body.reading(name, feed.batches(epochs=stop, done=done), made))
        made.append(weakref.ref(stream))
        self._latest[name] = stream.reading
        return stream

    def epochs(self, n: int, *, done: Callable[[], bool]) -> Iterator[int]:
        """The epochs still to do; see ``Live.epochs``."""
        body = self._body
        if body.epoch is not None:
            raise InvalidArgument(
                "live.epochs", expected="one loop over epochs at a time", found="two", fix="leave one of them"
            )
        epoch = body.next_epoch()
        try:
            while epoch < n and not done():
                body.begin(epoch)
                self._streams.begin_body(is_repeated=bool(body.opened or body.read or self._is_inside()))
                yield epoch
                if body.epoch != epoch:
                    raise _replaced()
                body.epoch = None
                self._streams.end_body()
                if done():
                    return
                body.leave(epoch)
                epoch += 1
        finally:
            if body.epoch == epoch:
                body.stop(epoch)

    def _feed(self, loader: str | None) -> Feed:
        if isinstance(self.feed, FeedGroup):
            return self.feed.feed(loader)
        if loader is not None:
            raise InvalidArgument(
                "live.batches",
                expected="no name, where one loader is attached",
                found=repr(loader),
                fix="call live.batches(), or attach(..., loader={name: loader})",
            )
        return self.feed

    def feeds(self) -> dict[str, Feed]:
        """Each loader by its name; ``""`` names the only one."""
        return self.feed.feeds if isinstance(self.feed, FeedGroup) else {"": self.feed}

    def _is_inside(self) -> bool:
        if isinstance(self.feed, FeedGroup):
            return any(feed.is_inside for feed in self.feed.feeds.values())
        return self.feed.is_inside

    def _started(self, batches: Iterator[Any]) -> BatchStream:
        return BatchStream(batches if self._streams.is_settled else self._after_settling(batches))

    def _after_settling(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._streams.settle(epoch=self._body.epoch, is_inside=self._is_inside())
        yield from batches

    def _warn_of_an_epoch_left_early(self, name: str, feed: Feed) -> None:
        """Warn that the loop continues an epoch where a plain loop, left and entered again, begins the next one."""
        last = self._reading.get(name)
        if self._has_warned or last is None or last.has_ended or not feed.is_inside:
            return
        self._has_warned = True
        log_for_all(
            "live.batches() continues epoch %d, which the loop has left early; a plain loop would begin the next epoch there. "
            "For that, write `for epoch in live.epochs(n): for batch in live.batches(): ...`. To come back to the same epoch on "
            "purpose, as after an evaluation, let live.batches(steps=...) end the loop, and not a break",
            feed.epoch,
        )

    # --- counting -----------------------------------------------------------------------------------------------------

    def advance(self, samples: Samples, *, steps: int, is_scheduled: bool = False) -> int:
        """Count batches. If the loop passes the samples that it trained on, the batches that are left were drawn ahead."""
        body, waiting = self._body, self.feed.undelivered()
        if type(samples) is int and self._is_of_all_ranks(samples):
            samples = None  # count all that this rank was handed
        if isinstance(self.feed, FeedGroup):
            counted = self.feed.advance(samples)
        else:
            counted = self.feed.advance(None if samples is None else no_names(samples))
        left = self.feed.undelivered()
        self._pace.advance(waiting - left, is_step=bool(steps), epoch=self.feed.epoch, is_scheduled=is_scheduled)
        if steps and not left:
            self._ahead.counted(waiting)
        is_read_on = body.epoch is None or body.running > 0  # at an epoch's end no batch is left ahead
        if steps and self._ahead.depth is None and is_read_on:
            self._ahead.depth = left
        body.note_read()
        self._streams.stepped(ends_epoch=body.epoch is None and waiting > 0 and not self._is_inside())
        return counted

    def _is_of_all_ranks(self, samples: int) -> bool:
        """Whether a number can only be the sum over the ranks: there are several, and this one was handed fewer.

        A feed that counts over the ranks knows that sum itself.
        """
        if self.feed.counts_over_ranks and not isinstance(self.feed, FeedGroup):
            return False
        if isinstance(self.feed, FeedGroup):
            each = [feed.waiting_samples() for feed in self.feed.feeds.values() if feed.undelivered()]
            known = [size for size in each if size is not None]
            waiting = sum(known) if len(known) == len(each) else None
        else:
            waiting = self.feed.waiting_samples()
        return waiting is not None and 0 < waiting < samples and ranks_around(os.environ) is not None

    def drop(self) -> int:
        """Discard the batches since the last step; return the samples among them that were not counted."""
        dropped = self.feed.drop()
        self._pace.begin(self.feed.epoch)
        return dropped

    def unaccounted(self) -> str | None:
        """Batches that were handed out and neither counted nor drawn ahead, as a text; None if there are none."""
        body = self._body
        waiting = {name: feed.undelivered() for name, feed in self.feeds().items()}
        if body.is_left():
            waiting.update(dict.fromkeys(body.left_early(), 0))
        count = max(0, sum(waiting.values()) - (self._ahead.depth or 0))
        if not count:
            return None
        found = f"batches handed out since the last advance(): {count}"
        if any(reading.thread not in (None, get_ident()) for reading in self._latest.values()):
            return (
                f"{found}, to a thread that draws ahead: how far it is ahead differs from step to step, and so do the random numbers that it "
                "draws. Let the loader draw ahead, with num_workers= and prefetch_factor=, and iterate over live.batches() without that thread"
            )
        ended = [name for name in body.opened if name in body.read]
        if body.epoch is None or not body.has_ended or not ended:
            return found
        thrown = [name for name, each in waiting.items() if each and name not in ended]
        return (
            f"{found}, of {thrown}. It seems that zip() has drawn and dropped them, because {ended} had ended: put the loader that ends "
            "first into zip() first; or write `for ... in zip(live.batches(...), live.batches(...))` and keep no iterator in a variable"
        )

    # --- the component ------------------------------------------------------------------------------------------------

    def capture(self) -> Opaque:
        """The position of the loader, and of the loop in its epochs."""
        found = self.feed.capture()
        if self._pace.noted is not None:
            found = Opaque({**found.value, "pace": list(self._pace.noted)})
        body = self._body.capture()
        if body is not None:
            return Opaque({**found.value, "body": body})
        return Opaque({**found.value, "moves": True}) if self._streams.moves else found

    def was_saved(self) -> None:
        """Note where in the loop a save was made, and where the streams are: a resume does not repeat what comes before it."""
        body = self._body
        if body.epoch is None:
            self._streams.was_saved()
            return
        body.was_saved()
        if not body.opened and self._streams.has_moved_in_body():
            body.warn_once(TOO_EARLY, body.epoch)

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every reason why a position cannot be taken."""
        found = self.feed.problems(saved)
        value = saved.value if isinstance(saved, Opaque) and isinstance(saved.value, dict) else {}
        if not is_pace(value.get("pace")):
            found.append(mismatch("state.dataset.pace", "two counts", repr(value["pace"])[:80], OTHER))
        found += body_problems(value.get("body"), self.feeds())
        if value.get("moves") not in (None, True):
            found.append(mismatch("state.dataset.moves", "True, or nothing", repr(value["moves"])[:80], OTHER))
        return found

    def write(self, saved: Any) -> Undo:
        """Take a position."""
        value, depth, pace = saved.value, self._ahead.depth, self._pace
        undos = [
            self.feed.write(saved),
            self._body.take(value.get("body")),
            self._streams.take(moves=value.get("moves") is True),
        ]
        self._pace = Pace(value.get("pace"), self.feed.epoch)
        self._ahead.depth = None

        def undo() -> None:
            for each in undos:
                each()
            self._ahead.depth, self._pace = depth, pace

        return undo

    def restored(self, chosen: Collection[str] | None) -> None:
        """Keep the run as a restore left it.

        Args:
            chosen: the restored components; None for all.
        """
        self._streams.restored(SinceRestore(self._parts, chosen))


def _weakly(
    method: Callable[[], Mapping[str, ComponentAdapter]],
) -> Callable[[], Mapping[str, ComponentAdapter] | None]:
    """A call of a method that does not keep its object alive; None once the object is gone."""
    kept = weakref.WeakMethod(method)

    def call() -> Mapping[str, ComponentAdapter] | None:
        found = kept()
        return None if found is None else found()

    return call


def _replaced() -> InvalidArgument:
    return InvalidArgument(
        "live.epochs",
        expected="one loop over epochs at a time",
        found="one that a restore has replaced",
        fix="leave this loop and call live.epochs() again",
    )
