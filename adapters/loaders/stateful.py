"""`StatefulFeed`: the feed for a loader that knows its own position, such as torchdata's StatefulDataLoader."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, final

import attrs
from torch.utils.data import DataLoader, DistributedSampler

from trainfold.adapters.batches.batch_digest import batch_digests, batch_kind
from trainfold.adapters.batches.draw_batches import unpaired
from trainfold.adapters.batches.draws import Drawn
from trainfold.adapters.batches.feed import (
    END,
    OPENED,
    AtPosition,
    Delivery,
    Ended,
    length_of,
    mismatch,
    no_batch,
    stale,
    warn_if_old,
)
from trainfold.adapters.batches.global_sampler import SharedOrder, shared_order
from trainfold.adapters.batches.hand_out import HandedOut, Mark, Unreported
from trainfold.adapters.batches.loader_extras import KEY
from trainfold.adapters.batches.pull_watch import PullWatch, is_foreign, sure_size
from trainfold.adapters.batches.sampler_tap import capture_order, restore_order
from trainfold.adapters.components.component import Undo, copied, kind_of
from trainfold.adapters.loaders.iterable import torchdatas
from trainfold.adapters.loaders.stateful_iterators import StatefulIterators
from trainfold.adapters.loaders.stateful_position import StatefulPosition
from trainfold.core.errors import IncompleteWindow, InvalidArgument, TrainfoldError
from trainfold.core.state.state import Opaque


@final
class StatefulFeed(AtPosition):
    """A loader that knows its own position; it is asked for its state between two batches.

    An iterable dataset without a state leaves nothing of itself in the loader's state. Then the position is the number of
    batches and a digest of them: a resume starts the epoch again, from the random streams that it was started from, draws
    as many batches, and compares them. It does the same if an iterable dataset has come to its end in one worker and not
    in another.

    Args:
        loader: an iterable with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, loader: Any) -> None:
        workers = loader.num_workers if _is_traced(loader) else 0
        self._loader = loader
        self._at = StatefulPosition(loader, workers)
        super().__init__(self._at)
        self._iterators = StatefulIterators(self._at)
        self._deliveries = self._at.deliveries
        self._watch = PullWatch(kind_of(loader.sampler), is_ahead=True) if workers and is_foreign(loader) else None
        self._total: int | None = None  # batches of an epoch
        self._run = 0
        sampler = getattr(loader, "sampler", None)
        # all of them are equally long
        self._shares = sampler.num_replicas if isinstance(sampler, DistributedSampler) else 1
        self.counts_over_ranks = self._shares > 1

    @property
    def sure_size(self) -> tuple[int, int] | None:
        """The batches and the samples of each epoch, if they are certain."""
        return sure_size(self._loader)

    @property
    def shared_order(self) -> SharedOrder | None:
        """The order of samples that its sampler shares with those of other ranks; None without one."""
        return shared_order(self._loader)

    def count_shares(self, shares: int) -> None:
        """Count the samples of equally long shares, unless a sampler of several shares has them counted already."""
        if not self.counts_over_ranks:
            self._shares, self.counts_over_ranks = shares, shares > 1

    def undelivered(self) -> int:
        """How many batches were handed out and not consumed."""
        return len(self._deliveries.waiting)

    def rewind(self) -> None:
        """Refuse to go back over a batch, because such a loader cannot.

        Raises:
            IncompleteWindow: if a batch was handed out but not consumed.
        """
        if self._deliveries.waiting:
            raise IncompleteWindow(
                "live.batches",
                expected="every batch of the earlier iteration consumed",
                found=f"{len(self._deliveries.waiting)} that were not",
                fix="call live.advance() after the last step, or live.drop_window(), before iterating again",
            )

    def advance(self, samples: int | None) -> int:
        """Count batches handed out as consumed: all of them, if only the caller knows how many samples they have."""
        taken = self._deliveries.take(self._own(samples))
        self._at.count(taken)
        if any(each.samples is None for each in taken):
            return samples or 0
        return sum(each.over_shares(self._shares) for each in taken)

    def check_samples(self, samples: int | None) -> None:
        """Raise what `advance` would raise."""
        self._deliveries.count_of(self._own(samples))

    def _own(self, samples: int | None) -> int | None:
        """This rank's share of the samples of all ranks in whole batches that wait; any other number is this rank's own."""
        waiting = list(self._deliveries.waiting)
        if samples is None or not self.counts_over_ranks or any(each.samples is None for each in waiting):
            return samples
        firsts = [waiting[:count] for count in range(len(waiting), 0, -1)]
        ends = [
            (sum(each.samples or 0 for each in one), sum(each.over_shares(self._shares) for each in one))
            for one in firsts
        ]
        return next((own for own, total in ends if samples in (own, total)), samples)

    def waiting_samples(self) -> int | None:
        """Samples of the batches handed out but not consumed."""
        return self._deliveries.samples

    def leave_epoch(self) -> None:
        """Begin the next epoch, if no batch of this one was drawn.

        Raises:
            InvalidArgument: inside an epoch: such a loader cannot leave it.
        """
        at = self._at
        if self._deliveries.waiting and not at.drawn:
            self.advance(None)  # it was read to its end, and the last batches were not trained on
            return
        if at.drawn or self._deliveries.waiting:
            raise InvalidArgument(
                "live.epochs",
                expected="a loop that reads each epoch to its end, because the loader has its own state",
                found=f"a loop that left an epoch after {at.drawn} batches",
                fix="read every batch, or attach a plain DataLoader",
            )
        at.end_epoch()
        at.drawing = at.epoch

    def drop(self) -> int:
        """Discard the batches handed out but not consumed; return their samples."""
        return self.advance(None)

    def batches(self, *, epochs: int | None, done: Callable[[], bool]) -> Iterator[Any]:
        """Batches from where the loader is."""
        at = self._at
        self._run += 1
        run = self._run
        self.rewind()
        is_opened = False
        while (epochs is None or at.drawing < epochs) and not done():
            mark = self._mark()
            if at.iterator is None:
                if not at.drawn and at.states_before.is_asked:
                    at.states_before.start_epoch(at.state(), at.sampler_states())
                at.iterator = self._iterators.open_again() if at.again and not at.drawn else self._iterators.open()
            iterator, last = at.iterator, False
            self._total = length_of(self._loader)
            if not is_opened:
                is_opened = True
                yield OPENED
            while not last and not done():
                mark = mark or self._mark()
                delivery, batch = self.take(partial(self._give_next, iterator, mark))
                mark = None
                if isinstance(delivery, Ended):
                    self._end_late(delivery)
                    break
                last = delivery.last
                self._deliveries.waiting.append(delivery)
                if last:
                    at.iterator, at.drawing, at.drawn = None, at.drawing + 1, 0
                yield batch
                if self._run != run:
                    raise stale()

    # --- batches ------------------------------------------------------------------------------------------------------

    def _mark(self) -> Mark | None:
        """The loader's position before the next batch, if earlier batches are not counted yet; else None."""
        at = self._at
        if not self._deliveries.waiting:
            return None
        return Mark(at.place(), at.again[0] if at.again else capture_order(at.generators, at.extras))

    def _give_next(self, iterator: Iterator[Any], mark: Mark | None) -> tuple[Delivery | Ended, Any]:
        """The next batch and its delivery, or the end. A batch that is delivered again is drawn as it was."""
        at = self._at
        if not at.again:
            return self._drawn_now(iterator, mark)
        with self._iterators.apart():
            restore_order(at.again[0], at.generators, at.extras)
            delivery, batch = self._drawn_now(iterator, mark)
            if isinstance(delivery, Ended):
                return delivery, END
            at.again.popleft()
            if at.again_ends and not at.again and not delivery.last and self._draw(iterator) is END:
                # the loop has reached the end, and a stream may have drawn for that
                delivery = attrs.evolve(delivery, last=True)
        return delivery, batch

    def _drawn_now(self, iterator: Iterator[Any], mark: Mark | None) -> tuple[Delivery | Ended, Any]:
        at = self._at
        is_replayed = at.replay is not None and at.began is None
        before = None if is_replayed else at.states_before.now(is_first=not at.drawn)
        reader = None if at.replay is not None else self._iterators.reader
        if reader is not None:
            reader.moved()
        held = {} if reader is None else at.extras.now()
        streams = {} if reader is None else {**reader.streams, KEY: held} if held else reader.streams
        batch = self._draw(iterator)
        if batch is END:
            if not at.drawn:
                raise no_batch("check the dataset")
            return Ended(), END
        at.drawn += 1
        drawn, samples = None, None
        if isinstance(iterator, Unreported):
            drawn, samples = iterator.drawn, iterator.samples
        elif self._iterators.counted is not None:
            samples = self._iterators.counted.samples
        if reader is not None:
            digest, logged = batch_digests(batch, is_logged=at.draws.is_logged)
            drawn = Drawn(None, digest, reader.moved(), streams, batch_kind(batch), logged)
        last = at.drawn == self._total
        if last and self._draw(iterator) is not END:  # so that the loader notices its end, and saves that
            raise mismatch("attach.loader", f"{self._total} batches, as len() says", "more", "fix its __len__")
        return Delivery(samples, last, HandedOut(drawn, before, mark)), batch

    def _draw(self, iterator: Iterator[Any]) -> Any:
        if self._at.replay is not None:
            return self._at.replay.draw(iterator)
        if self._watch is not None:
            return self._watch.pull(lambda: next(iterator, END), is_first=False)
        return next(iterator, END)

    def _end_late(self, ended: Ended) -> None:
        """End an epoch one call after its last batch: its length is not known, or another rank has no more."""
        at, waiting = self._at, self._deliveries.waiting
        at.iterator, at.drawing, at.drawn = None, at.drawing + 1, 0
        if waiting:
            waiting[-1] = attrs.evolve(waiting[-1], last=True, left=ended.left)
        else:
            at.leave_out(ended.left)
            at.end_epoch()
            at.digest = at.digest_now()

    # --- the component ------------------------------------------------------------------------------------------------

    def contract(self) -> dict[str, Any]:
        """What must be the same at a resume."""
        return {
            "loader.kind": kind_of(self._loader),
            "batch_size": getattr(self._loader, "batch_size", None),
            "dataset_size": length_of(getattr(self._loader, "dataset", None)),
        }

    def capture(self) -> Opaque:
        """The loader's own state, and the epochs counted here.

        Raises:
            IncompleteWindow: if a batch waits that the loader could not deliver again.
        """
        waiting = self._deliveries.waiting
        if waiting and waiting[0].drawn.mark is None:
            raise IncompleteWindow(
                "live.batches",
                expected="every batch counted before a save, because the loader's state from before that batch is not known",
                found=f"{len(waiting)} batches that were handed out and not counted",
                fix="call live.advance(samples=...) for them first, or live.drop_window(); or attach a plain DataLoader",
            )
        return self._at.capture(self._late())

    def _late(self) -> list[str]:
        return [] if self._watch is None else self._watch.late

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every way in which a position does not fit this loader."""
        return self._at.problems(saved)

    def write(self, saved: Any) -> Undo:
        """Give the loader its state; it moves when the batches are asked for."""
        before = copied(self._at.capture(self._late())).value

        def take(value: dict[str, Any]) -> None:
            self._at.take(value)
            self._run += 1
            self._iterators.probe_due = True

        warn_if_old(saved.value, inside=bool(saved.value["batches"]))
        try:
            take(copied(saved).value)
        except Exception:
            take(before)
            raise
        return lambda: take(before)


def _is_traced(loader: Any) -> bool:
    """Whether it is torchdata's loader with workers; a user's loader decides itself what it saves.

    Raises:
        InvalidArgument: if a class of the user's may change what torchdata's workers made.
    """
    if not (isinstance(loader, DataLoader) and torchdatas(loader) and loader.num_workers):
        return False
    if type(loader).__iter__.__module__.split(".")[0] != "torchdata":
        raise unpaired(loader, "another iterator")
    return True
