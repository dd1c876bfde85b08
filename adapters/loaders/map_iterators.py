"""`MapIterators`: opens iterators of a map-style DataLoader at a position."""

from collections.abc import Iterator
from typing import Any, final

from trainfold.adapters.batches.close_workers import closed_on_error
from trainfold.adapters.batches.data_probe import compare_batch, is_wanted
from trainfold.adapters.batches.draw_batches import Drawer
from trainfold.adapters.batches.draws import Drawn, LastBatch
from trainfold.adapters.batches.feed import END, set_epochs, set_generators
from trainfold.adapters.batches.loader_extras import KEY, KeptExtras
from trainfold.adapters.batches.pull_watch import PullWatch, is_foreign
from trainfold.adapters.batches.sampler_tap import Tap, capture_order, not_between, restore_order, unfollowed
from trainfold.adapters.batches.worker_trace import WorkerTrace
from trainfold.adapters.components.component import kind_of
from trainfold.adapters.loaders.map_position import MapPosition
from trainfold.adapters.streams.rng_streams import preserved_rng
from trainfold.adapters.streams.stream_reader import Streams
from trainfold.core.errors import DataPositionMismatch
from trainfold.core.state.state import Opaque


@final
class MapIterators:
    """Opens iterators of a loader, at the start of an epoch or in the middle of one.

    Inside an epoch, the random streams are put back to where the epoch's order was drawn, the sampler is started, and its
    indices are skipped. The training's own random streams do not move. After a restore, the last batches are drawn again
    and compared (the data probe).

    Args:
        position: of the loop. The iterators read it, and add what each order was drawn from.
        sets_epoch: whether ``set_epoch`` is called here.
    """

    def __init__(self, position: MapPosition, *, sets_epoch: bool) -> None:
        loader = position.loader
        self._at = position
        self._sets_epoch = sets_epoch
        self.counts = loader.batch_sampler is not None
        self._slot = "batch_sampler" if self.counts else "sampler"
        sampler = getattr(loader, self._slot)
        self.tap = Tap(sampler, position.generators, position.extras, counts=self.counts)
        self.drawer = Drawer(loader, position.extras, position.draws)
        self.tap.look = self.drawer.watch.look
        if is_foreign(loader):
            self.tap.watch = PullWatch(kind_of(loader.sampler), is_ahead=bool(position.draws.workers))
        self.alive = False  # whether persistent workers continue with the next epoch
        self._started = False  # whether persistent workers were started here
        self._probe_due = False  # since a restore
        self._is_restored = False  # since a restore, until the first iterator

    @property
    def late(self) -> list[str]:
        """The streams that a sampler drew from in the middle of an epoch."""
        return [] if self.tap.watch is None else self.tap.watch.late

    def restored(self) -> None:
        """Note that a position was restored: the next iterator probes the data."""
        self.alive, self._probe_due, self._is_restored = False, True, True

    def open(self, epoch: int) -> Iterator[Any]:
        """An iterator of an epoch; ``set_epoch`` is called before the sampler is started."""
        if self._sets_epoch:
            set_epochs(self._at.loader, epoch)
        if self._at.shared is not None:
            self._at.shared.sampler.set_epoch(epoch)
            self._at.shared.sampler.seek(self._at.shared.start if epoch == self._at.epoch else 0)
        self.tap.start, self.tap.skip, self.tap.empty, self.tap.seeks = None, 0, 0, False
        order = self._at.orders.get(epoch)
        return self._begin(epoch) if order is None else self._seek(epoch, order)

    def _begin(self, epoch: int) -> Iterator[Any]:
        """An iterator at the start of an epoch, made at the same point as in a run without an interruption."""
        at, draws, tap = self._at, self._at.draws, self.tap
        if not draws.persistent:
            if draws.workers:
                at.worker_seeds[epoch] = capture_order(at.generators)
            return self._iterate(self._trace({}))
        if self.alive:
            self.alive = False
            return self._iterate(None)
        self._forget_workers()
        if draws.born is None and epoch == 0:
            draws.born = capture_order(at.generators, at.extras)
        else:
            # a run without an interruption has had its workers since epoch 0, and draws no seed for new ones here
            tap.start = capture_order(at.generators, at.extras)
            if draws.born is not None:
                restore_order(draws.born, at.generators, at.extras)
        return self._iterate(self._trace(draws.starts(probe=False)))

    def _seek(self, epoch: int, order: Opaque) -> Iterator[Any]:
        """An iterator in the middle of an epoch; opening it moves no random stream."""
        at, draws, tap, here = self._at, self._at.draws, self.tap, epoch == self._at.epoch
        if not (here and self._probes()):
            lasts: tuple[LastBatch, ...] = ()
        else:
            lasts = tuple(draws.lasts)
        now = {name: generator.get_state() for name, generator in at.generators.items()}
        tap.start = order
        tap.skip = (at.samples - sum(last.samples for last in lasts)) if here else 0
        tap.seeks = True
        trace: WorkerTrace | None = None
        with at.extras.kept(everything=self._is_restored) as kept:
            with preserved_rng():
                if draws.workers:
                    self._forget_workers()
                    at.extras.write(order.value.get(KEY, {}))  # workers copy it
                    born = draws.born if draws.persistent else at.worker_seeds.get(epoch)
                    if born is not None:
                        restore_order(born, at.generators, at.extras)
                    trace = self._trace(
                        draws.starts(probe=bool(lasts)) if here or draws.persistent else {}, lasts, here=here
                    )
                iterator = self._iterate(trace)
                with closed_on_error(iterator, at.loader):
                    not_none(tap.current).prime()
            if not draws.workers:
                set_generators(at.generators, now)
            # a sampler that draws in the middle of an epoch is ahead of the restored state, and so is what it draws from
            first = not_none(tap.current).at_first
            kept.leave({name for name in first if at.extras.differs(name, first[name])})
            kept.put_back()
            with closed_on_error(iterator, at.loader):
                error = self._compared(iterator, lasts, kept) if lasts else None
        self._is_restored = self._is_restored and error is not None
        if error is not None:
            # a traceback would keep it and its workers alive until a garbage collection, which waits for them
            del iterator
            raise error
        return iterator

    def _trace(
        self, starts: dict[int, Streams], lasts: tuple[LastBatch, ...] = (), *, here: bool = False
    ) -> WorkerTrace | None:
        loader, draws = self._at.loader, self._at.draws
        if not draws.workers:
            return None
        self.tap.empty = 0 if not here else draws.first_worker if lasts else draws.next
        return WorkerTrace(
            loader.collate_fn,
            loader.worker_init_fn,
            starts=starts,
            empty=self.tap.empty,
            afters=draws.afters() if lasts else None,
            is_logged=draws.is_logged,
        )

    def _forget_workers(self) -> None:
        """Release persistent workers that have drawn more than was consumed."""
        if self._started and self._at.draws.persistent:
            vars(self._at.loader)["_iterator"] = None
        self._started, self.alive = True, False

    def _iterate(self, trace: WorkerTrace | None) -> Iterator[Any]:
        self.tap.current = None
        iterator = self.drawer.open(trace, {self._slot: self.tap})
        if self.tap.current is None:
            raise unfollowed(self._at.loader, "an iterator that does not start the sampler")
        return iterator

    # --- the data probe -----------------------------------------------------------------------------------------------

    def _probes(self) -> bool:
        return self._probe_due and is_wanted(self._at.policy)

    def _compared(
        self, iterator: Iterator[Any], lasts: tuple[LastBatch, ...], kept: KeptExtras
    ) -> DataPositionMismatch | None:
        """Draw the last batch of each worker again and compare it with what was trained on; return what to raise."""
        samples, others = self._at.samples, 0
        read = samples - sum(last.samples for last in lasts)
        for last in lasts:
            if not self._at.draws.workers:
                self.drawer.watch.again.appendleft(last.before)
            made, tap = self.drawer.draw(iterator), not_none(self.tap.current)
            size = tap.passed.popleft()[0] if made is not END else 0
            read += size
            if size != last.samples or (read == samples and tap.ahead == [END] and not tap.passed):
                return not_between(samples, read, is_end=True)
            if others:
                continue  # it was reported already
            drawn: Drawn = made[1]
            drew_from = [] if drawn.digest == last.digest else sorted(kept.drawn_from())
            error = compare_batch(last, drawn, self._at.policy, drew_from=drew_from)
            if error is not None:
                return error
            others += drawn.digest != last.digest
        self._probe_due = False
        return None


def not_none(value: Any) -> Any:
    """A value that is not None here."""
    assert value is not None
    return value
