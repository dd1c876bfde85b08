"""`MapFeed`: the feed for an ordinary DataLoader over a map-style dataset, with a position in samples."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, final

import attrs
from torch.utils.data import DataLoader

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
from trainfold.adapters.batches.pull_watch import sure_size
from trainfold.adapters.batches.sampler_tap import unfollowed
from trainfold.adapters.components.component import Undo, copied, kind_of
from trainfold.adapters.loaders.map_iterators import MapIterators, not_none
from trainfold.adapters.loaders.map_position import MapPosition
from trainfold.core.errors import TrainfoldError
from trainfold.core.state.state import Opaque


@final
class MapFeed(AtPosition):
    """An ordinary ``DataLoader`` over a map-style dataset, positioned in samples.

    The order of an epoch comes from the random streams, the loader's generators and ``set_epoch``, as they were at the
    start of the epoch. So these are kept. To resume inside an epoch they are put back, the sampler is started, and its
    indices are skipped. No skipped sample is read, and the training's own random streams do not move.

    Args:
        loader: the loader; it is not changed.
        sets_epoch: whether this feed calls ``set_epoch``; False if the loader's owner does.
    """

    def __init__(self, loader: "DataLoader[Any]", *, sets_epoch: bool = True) -> None:
        self._loader = loader
        self._at = MapPosition(loader)
        super().__init__(self._at)
        self._iterators = MapIterators(self._at, sets_epoch=sets_epoch)
        self._deliveries = self._at.deliveries
        self._draws = self._at.draws
        self._drawer = self._iterators.drawer
        self._counts = self._iterators.counts
        self.share = None if self._at.shared is None else self._at.shared.sampler.rank
        self.counts_over_ranks = self._counts and (self._at.shared is not None or self._at.shares > 1)
        self._drawing = 0  # the epoch that batches are read from
        self._run = 0
        self._living: Iterator[Any] | None = None  # the iterator of persistent workers, inside an epoch

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
        if self._counts and not self.counts_over_ranks:
            self._at.shares, self.counts_over_ranks = shares, shares > 1

    def undelivered(self) -> int:
        """How many batches were handed out and not consumed."""
        return len(self._deliveries.waiting)

    def rewind(self) -> None:
        """Go back to the position: batches handed out but not consumed will be handed out again."""
        if self._deliveries.waiting:
            self._iterators.alive = False  # the workers have already drawn batches that will be drawn again
            self._at.forget_unread()
            self._drawer.watch.again.clear()
        self._deliveries.waiting.clear()
        self._drawing = self._at.epoch

    def advance(self, samples: int | None) -> int:
        """Count batches handed out as consumed."""
        return self._at.count(self._deliveries.take(self._known(samples)))

    def check_samples(self, samples: int | None) -> None:
        """Raise what `advance` would raise."""
        self._deliveries.count_of(self._known(samples))

    def waiting_samples(self) -> int | None:
        """Samples of the batches handed out but not consumed."""
        return self._deliveries.samples if self._counts else None

    def _known(self, samples: int | None) -> int | None:
        if not self._counts and samples != 0:
            return None  # without batches only the caller knows what one holds
        return samples if samples is None or not self.counts_over_ranks else self._at.own_samples(samples)

    def samples_of(self, batches: int) -> int | None:
        """Samples of the first ``batches`` that wait."""
        sizes = [each.samples or 0 for each in list(self._deliveries.waiting)[:batches]]
        return sum(sizes) if self._counts else None

    def consume(self, batches: int) -> int:
        """Count the first ``batches`` that wait as consumed."""
        return self._at.count([self._deliveries.waiting.popleft() for _ in range(batches)])

    def ends_here(self) -> bool:
        """Whether the last batch handed out is the last of its epoch."""
        return bool(self._deliveries.waiting) and self._deliveries.waiting[-1].last

    def leave_epoch(self) -> None:
        """Begin the next epoch, as a plain loop does that leaves this one early.

        Persistent workers have drawn ahead for this epoch, and a plain loop starts the next one after that. So the batches
        that they have drawn are taken from them.

        Raises:
            DataPositionMismatch: if these workers lived in a process that has died, and it is not known which batches they had drawn.
        """
        self._run += 1
        iterator, self._living = self._living, None
        if iterator is not None:
            not_none(self._iterators.tap.current).stopped = True
            for each in self._deliveries.waiting:
                self._draws.absorb(each.drawn)
            while (made := self._drawer.draw(iterator)) is not END:
                self._draws.absorb(made[1])
            self._iterators.alive = True
        elif self._draws.persistent and self._at.samples:
            raise mismatch(
                "state.dataset.draws",
                "a position inside an epoch that the loop continues, or one after the next epoch has begun",
                "one after the loop left this epoch early; what its workers had drawn ahead is not known",
                "save inside the loop over the batches; or make the loader with persistent_workers=False",
            )
        self._deliveries.waiting.clear()
        self._drawer.watch.again.clear()
        self._at.orders.clear()
        self._at.worker_seeds.clear()
        self._at.end_epoch()
        self._drawing = self._at.epoch

    def drop(self) -> int:
        """Discard the batches handed out but not consumed; return their samples."""
        return self.advance(None)

    def batches(self, *, epochs: int | None, done: Callable[[], bool]) -> Iterator[Any]:
        """Batches from the position on."""
        self._run += 1
        run = self._run
        self.rewind()
        is_opened = False
        while (epochs is None or self._drawing < epochs) and not done():
            iterator = self._iterators.open(self._drawing)
            self._living = iterator if self._draws.persistent else None
            tap, last = not_none(self._iterators.tap.current), False
            if not is_opened:
                is_opened = True
                yield OPENED
            while not last and not done():
                delivery, batch = self.take(partial(self._draw_next, iterator, tap))
                if isinstance(delivery, Ended):
                    last = self._end_late(delivery)
                    break
                last = delivery.last
                self._deliveries.waiting.append(delivery)
                yield batch
                if self._run != run:
                    raise stale()
            del iterator
            self._iterators.alive = last and self._draws.persistent
            self._living = None if last else self._living
            self._drawing += int(last)

    def _draw_next(self, iterator: Iterator[Any], tap: Any) -> tuple[Delivery | Ended, Any]:
        made = self._drawer.draw(iterator)
        if made is END:
            if not tap.given:
                raise no_batch("make the batch size smaller than the dataset, or set drop_last=False")
            return Ended(), END
        batch, drawn = made
        self._at.orders[self._drawing] = not_none(self._iterators.tap.started_from)
        size, last = tap.passed.popleft() if tap.passed else (-1, True)
        if size < 0 or (last and self._drawer.draw(iterator) is not END):
            raise unfollowed(self._loader, "an iterator that yields more batches than its sampler")
        return Delivery(size, last, drawn), batch

    def _end_late(self, ended: Ended) -> bool:
        """End an epoch one call after its last batch: its sampler gave fewer than its ``len()``, or another rank has no more."""
        waiting = self._deliveries.waiting
        if waiting:
            waiting[-1] = attrs.evolve(waiting[-1], last=True, left=ended.left)
        else:
            self._at.leave_out(ended.left)
            self._at.end_epoch()
        return True

    # --- the component ------------------------------------------------------------------------------------------------

    def contract(self) -> dict[str, Any]:
        """What must be the same at a resume."""
        loader, shared = self._loader, self._at.shared
        source = loader if shared is None else shared.sampler
        return {
            "loader.kind": "torch.utils.data.DataLoader",
            "loader.sampler": kind_of(loader.sampler if shared is None else source),
            "loader.drop_last": bool(source.drop_last),
            "batch_size": source.batch_size,
            "dataset_size": length_of(loader.dataset),
        }

    def capture(self) -> Opaque:
        """The position: ``epoch``, ``samples`` and ``batches`` in it, and what the order of the epoch was drawn from."""
        again = [each.drawn.before for each in self._deliveries.waiting] or list(self._drawer.watch.again)
        return self._at.capture(again, self._iterators.late)

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every way in which a position does not fit this loader."""
        return self._at.problems(saved)

    def write(self, saved: Any) -> Undo:
        """Take a position; the loader's iterator is made when the batches are asked for."""
        before = copied(self.capture())

        def take(value: dict[str, Any]) -> None:
            self._run += 1
            self._living = None
            self._iterators.restored()
            self._at.take(value)
            self.rewind()
            self._drawer.watch.again.extend(value.get("again", []))
            self._drawer.knows_that_streams_move = self._draws.moved

        warn_if_old(saved.value, inside=bool(saved.value["samples"]))
        take(copied(saved).value)
        return lambda: take(before.value)
