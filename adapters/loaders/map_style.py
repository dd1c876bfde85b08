"""`MapFeed`: an ordinary DataLoader over a map-style dataset, positioned in samples."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import attrs
import torch
from torch.utils.data import DataLoader

from trainfold.adapters.components.component import ComponentAdapter, Undo, copied, kind_of
from trainfold.adapters.draws.beside import KEY, Beside, KeptBeside, streams_only
from trainfold.adapters.draws.data_probe import compared, is_wanted
from trainfold.adapters.draws.draw_batches import Drawer
from trainfold.adapters.draws.draws import Drawn, Draws, Last, plain
from trainfold.adapters.draws.feed import (
    END,
    OPENED,
    OTHER,
    Deliveries,
    Delivery,
    generator_problems,
    generators_of,
    length_of,
    mismatch,
    position_problems,
    set_epochs,
    set_generators,
    stale,
    warn_if_old,
)
from trainfold.adapters.draws.pull_watch import PullWatch, is_foreign, late_problems
from trainfold.adapters.draws.sampler_tap import (
    Tap,
    capture_order,
    not_between,
    order_problems,
    restore_order,
    unfollowed,
)
from trainfold.adapters.draws.worker_trace import WorkerTrace
from trainfold.adapters.streams.rng_streams import moved_stream_problems, preserved_rng
from trainfold.adapters.streams.stream_reader import Streams
from trainfold.core.errors import DataPositionMismatch, InvalidArgument, TrainfoldError
from trainfold.core.resume.drift import DriftAction
from trainfold.core.state.state import Opaque


@final
class MapFeed:
    """An ordinary ``DataLoader`` over a map-style dataset, positioned in samples.

    The order of an epoch comes from the random streams, the loader's generators and ``set_epoch`` as they were when
    the epoch began, so these are kept; to resume inside an epoch they are put back, the sampler is started, and its
    indices are skipped. No skipped sample is read, and the training's own random streams do not move.

    Args:
        loader: the loader; it is left as it is.
        tells_epoch: whether ``set_epoch`` is called here, and by no one else.
    """

    def __init__(self, loader: "DataLoader[Any]", *, tells_epoch: bool = True) -> None:
        self.policy: Mapping[str, DriftAction] = {}
        self._loader = loader
        self._tells_epoch = tells_epoch
        self._counts = loader.batch_sampler is not None
        self._slot = "batch_sampler" if self._counts else "sampler"
        self._generators = generators_of(loader)
        self._beside = Beside(loader)
        self._tap = Tap(getattr(loader, self._slot), self._generators, self._beside, counts=self._counts)
        self._drawer = Drawer(loader, self._beside)
        self._tap.look = self._drawer.watch.look
        workers = loader.num_workers
        self._draws = Draws(workers, persistent=bool(workers and loader.persistent_workers))
        if is_foreign(loader):
            self._tap.watch = PullWatch(kind_of(loader.sampler), is_ahead=bool(workers))
        self._deliveries = Deliveries()
        self._epoch = self._samples = self._batches = 0
        self._drawing = 0
        self._orders: dict[int, Opaque] = {}  # epoch that batches are read from -> what its order was drawn from
        self._borns: dict[int, Opaque] = {}  # epoch -> what the seed of its workers was drawn from
        self._run = 0
        self._probe_due = False  # after a restore
        self._is_restored = False  # and not read since then
        self._started = False  # whether this feed has started persistent workers
        self._alive = False  # whether they go on with the next epoch
        self._living: Iterator[Any] | None = None  # their iterator, inside of an epoch

    def attend(self, extra: Mapping[str, ComponentAdapter]) -> None:
        """Look after the components under ``extra`` that batches may be drawn from."""
        self._beside.attend(extra)

    @property
    def epoch(self) -> int:
        """Epochs whose samples were all consumed."""
        return self._epoch

    @property
    def is_inside(self) -> bool:
        """Whether a batch of the epoch was consumed, and the epoch goes on."""
        return self._samples > 0

    def undelivered(self) -> int:
        """How many batches were handed out and not consumed."""
        return len(self._deliveries.waiting)

    def rewind(self) -> None:
        """Go back to the position: batches that were handed out and not consumed will be handed out again."""
        if self._deliveries.waiting:
            self._alive = False  # the workers have drawn what will be drawn again
            for epoch in [each for each in self._orders if each > self._epoch or not self._samples]:
                del self._orders[epoch]
            self._drawer.watch.again.clear()
        self._deliveries.waiting.clear()
        self._drawing = self._epoch

    def advance(self, samples: int | None) -> int:
        """Count batches that were handed out as consumed."""
        return self._count(self._deliveries.take(self._known(samples)))

    def check_samples(self, samples: int | None) -> None:
        """Raise what `advance` would raise."""
        self._deliveries.count_of(self._known(samples))

    def waiting_samples(self) -> int | None:
        """Of the batches that were handed out and not consumed."""
        return self._deliveries.samples if self._counts else None

    def _known(self, samples: int | None) -> int | None:
        return samples if self._counts or samples == 0 else None  # without batches only the caller knows what one holds

    def samples_of(self, batches: int) -> int | None:
        """Of so many batches, the first that wait."""
        sizes = [each.samples or 0 for each in list(self._deliveries.waiting)[:batches]]
        return sum(sizes) if self._counts else None

    def consume(self, batches: int) -> int:
        """Count so many batches, the first that wait, as consumed."""
        return self._count([self._deliveries.waiting.popleft() for _ in range(batches)])

    def ends_here(self) -> bool:
        """Whether the batch that was handed out last is the last of its epoch."""
        return bool(self._deliveries.waiting) and self._deliveries.waiting[-1].last

    def _count(self, taken: list[Delivery]) -> int:
        counted = 0
        for each in taken:
            size = each.samples or 0
            counted += size
            self._samples, self._batches = self._samples + size, self._batches + 1
            self._draws.consume(each.drawn, size)
            if each.last:
                self._end_epoch()
        return counted

    def _end_epoch(self) -> None:
        self._orders.pop(self._epoch, None)
        self._borns.pop(self._epoch, None)
        self._draws.end_epoch()
        self._epoch, self._samples, self._batches = self._epoch + 1, 0, 0  # G03

    def leave_epoch(self) -> None:
        """Begin the next epoch, as a plain loop that leaves this one early does (W04).

        Workers that live on have drawn ahead for this epoch, and the next one begins after that. So what they have drawn
        is taken from them.

        Raises:
            DataPositionMismatch: if these workers lived in a process that has died, and what they had drawn is not known.
        """
        self._run += 1
        iterator, self._living = self._living, None
        if iterator is not None:
            _present(self._tap.current).stopped = True
            for each in self._deliveries.waiting:
                self._draws.absorb(each.drawn)
            while (made := self._drawer.draw(iterator)) is not END:
                self._draws.absorb(made[1])
            self._alive = True
        elif self._draws.persistent and self._samples:
            raise mismatch(
                "state.dataset.draws",
                "a position in an epoch that goes on, or one from after the next has begun",
                "one from after this epoch was left early, and what its workers had drawn ahead is not known",
                "save inside the loop over the batches; or make the loader with persistent_workers=False",
            )
        self._deliveries.waiting.clear()
        self._drawer.watch.again.clear()
        self._orders.clear()
        self._borns.clear()
        self._end_epoch()
        self._drawing = self._epoch

    def drop(self) -> int:
        """Give up what was handed out and not consumed."""
        return self.advance(None)

    def batches(self, *, epochs: int | None, done: Callable[[], bool]) -> Iterator[Any]:
        """Batches from the position on."""
        self._run += 1
        run = self._run
        self.rewind()
        told = False
        while (epochs is None or self._drawing < epochs) and not done():
            iterator = self._open()
            self._living = iterator if self._draws.persistent else None
            tap, last = _present(self._tap.current), False
            if not told:
                told = True
                yield OPENED
            while not last and not done():
                made = self._drawer.draw(iterator)
                if made is END:
                    last = self._end_late(tap)
                    break
                batch, drawn = made
                self._orders[self._drawing] = _present(self._tap.started_from)
                size, last = tap.passed.popleft() if tap.passed else (-1, True)
                if size < 0 or (last and self._drawer.draw(iterator) is not END):
                    raise unfollowed(self._loader, "one that yields more batches than its sampler")
                self._deliveries.waiting.append(Delivery(size, last, drawn))
                yield batch
                if self._run != run:
                    raise stale()
            del iterator
            self._alive = last and self._draws.persistent
            self._living = None if last else self._living
            self._drawing += int(last)

    def _end_late(self, tap: Any) -> bool:
        """The end of an epoch whose sampler gave fewer than its ``len()``: it is known one call after the last batch."""
        if not tap.given:
            raise InvalidArgument(
                "attach.loader",
                expected="at least one batch an epoch",
                found="none",
                fix="make the batch size smaller than the dataset, or set drop_last=False",
            )
        waiting = self._deliveries.waiting
        if waiting:
            waiting[-1] = attrs.evolve(waiting[-1], last=True)
        else:
            self._end_epoch()
        return True

    # --- the loader's iterators ---------------------------------------------------------------------------------------

    def _open(self) -> Iterator[Any]:
        """An iterator of the loader at the position; `set_epoch` comes before the seek (G04)."""
        if self._tells_epoch:
            set_epochs(self._loader, self._drawing)
        self._tap.start, self._tap.skip, self._tap.empty, self._tap.seeks = None, 0, 0, False
        order = self._orders.get(self._drawing)
        return self._begin() if order is None else self._seek(order)

    def _begin(self) -> Iterator[Any]:
        """An iterator at the start of an epoch, made now, whether the run was interrupted or not."""
        draws, tap = self._draws, self._tap
        if not draws.persistent:
            if draws.workers:
                self._borns[self._drawing] = capture_order(self._generators)
            return self._iterate(self._trace({}))
        if self._alive:
            self._alive = False
            return self._iterate(None)
        self._forget_workers()
        if draws.born is None and self._drawing == 0:
            draws.born = capture_order(self._generators, self._beside)
        else:
            # the run that was not interrupted had its workers from epoch 0 and drew no seed for new ones here
            tap.start = capture_order(self._generators, self._beside)
            if draws.born is not None:
                restore_order(draws.born, self._generators, self._beside)
        return self._iterate(self._trace(draws.starts(probe=False)))

    def _seek(self, order: Opaque) -> Iterator[Any]:
        """An iterator in the middle of an epoch, whose streams do not move for it."""
        draws, tap, here = self._draws, self._tap, self._drawing == self._epoch
        if not (here and self._probes()):
            lasts: tuple[Last, ...] = ()
        else:
            lasts = tuple(draws.lasts)
        now = {name: generator.get_state() for name, generator in self._generators.items()}
        tap.start = order
        tap.skip = (self._samples - sum(last.samples for last in lasts)) if here else 0
        tap.seeks = True
        trace: WorkerTrace | None = None
        with self._beside.kept(everything=self._is_restored) as kept:
            with preserved_rng():
                if draws.workers:
                    self._forget_workers()
                    self._beside.write(order.value.get(KEY, {}))  # workers take copies of it
                    born = draws.born if draws.persistent else self._borns.get(self._drawing)
                    if born is not None:
                        restore_order(born, self._generators, self._beside)
                    trace = self._trace(
                        draws.starts(probe=bool(lasts)) if here or draws.persistent else {}, lasts, here=here
                    )
                iterator = self._iterate(trace)
                _present(tap.current).prime()
            if not draws.workers:
                set_generators(self._generators, now)
            # a sampler that draws as it goes on is ahead of what was restored, and so is what it draws from
            first = _present(tap.current).at_first
            kept.leave({name for name in first if self._beside.differs(name, first[name])})
            kept.put_back()
            error = self._compared(iterator, lasts, kept) if lasts else None
        self._is_restored = self._is_restored and error is not None
        if error is not None:
            del iterator  # a traceback would keep it, and its workers, until a collection, which waits for them
            raise error
        return iterator

    def _trace(
        self, starts: dict[int, Streams], lasts: tuple[Last, ...] = (), *, here: bool = False
    ) -> WorkerTrace | None:
        loader, draws = self._loader, self._draws
        if not draws.workers:
            return None
        self._tap.empty = 0 if not here else draws.first_worker if lasts else draws.next
        return WorkerTrace(
            loader.collate_fn,
            loader.worker_init_fn,
            starts=starts,
            empty=self._tap.empty,
            afters=draws.afters() if lasts else None,
        )

    def _forget_workers(self) -> None:
        """Let workers go that have drawn more than was consumed."""
        if self._started and self._draws.persistent:
            vars(self._loader)["_iterator"] = None
        self._started, self._alive = True, False

    def _iterate(self, trace: WorkerTrace | None) -> Iterator[Any]:
        self._tap.current = None
        iterator = self._drawer.open(trace, {self._slot: self._tap})
        if self._tap.current is None:
            raise unfollowed(self._loader, "one that does not start the sampler")
        return iterator

    # --- the data probe -----------------------------------------------------------------------------------------------

    def _probes(self) -> bool:
        return self._probe_due and is_wanted(self.policy)

    def _compared(
        self, iterator: Iterator[Any], lasts: tuple[Last, ...], kept: KeptBeside
    ) -> DataPositionMismatch | None:
        """Draw the last batch of each worker again, and compare it with what was trained on (W03); what is to be raised."""
        read, others = self._samples - sum(last.samples for last in lasts), 0
        for last in lasts:
            if not self._draws.workers:
                self._drawer.watch.again.appendleft(last.before)
            made, tap = self._drawer.draw(iterator), _present(self._tap.current)
            size = tap.passed.popleft()[0] if made is not END else 0
            read += size
            if size != last.samples or (read == self._samples and tap.ahead == [END] and not tap.passed):
                return not_between(self._samples, read, is_end=True)
            if others:
                continue  # it has been said
            drawn: Drawn = made[1]
            drew_from = [] if drawn.digest == last.digest else sorted(kept.drawn_from())
            error = compared(last, drawn, self.policy, drew_from=drew_from)
            if error is not None:
                return error
            others += drawn.digest != last.digest
        self._probe_due = False
        return None

    def contract(self) -> dict[str, Any]:
        """What must be the same at a resume."""
        loader = self._loader
        return {
            "loader.kind": "torch.utils.data.DataLoader",
            "loader.sampler": kind_of(loader.sampler),
            "loader.drop_last": bool(loader.drop_last),
            "batch_size": loader.batch_size,
            "dataset_size": length_of(loader.dataset),
        }

    def capture(self) -> Opaque:
        """The position: ``epoch``, ``samples`` and ``batches`` in it, and what the order of the epoch was drawn from."""
        order = self._orders[self._epoch] if self._samples else self._orders.get(self._epoch)
        draws, later = self._draws, sorted(each for each in self._orders if each > self._epoch)
        born = draws.born if draws.persistent else self._borns.get(self._epoch)
        again = [each.drawn.before for each in self._deliveries.waiting] or list(self._drawer.watch.again)
        return Opaque(
            {
                "kind": "map",
                "version": 2,  # 1 has no draws
                "epoch": self._epoch,
                "samples": self._samples,
                "batches": self._batches,
                "batch_size": self._loader.batch_size,
                "length": length_of(self._loader.dataset),
                "order": None if order is None else order.value,
                "later": [self._orders[each].value for each in later],
                "later_born": [self._borns[each].value for each in later if each in self._borns],
                "again": [
                    plain(each) if draws.moved else {KEY: each[KEY]}
                    for each in again
                    if (draws.moved or KEY in each) and not draws.workers
                ],
                "draws": draws.capture(born if order is not None or draws.persistent else None),
                "late": self._tap.watch.late if self._samples and self._tap.watch is not None else [],
                "generators": {name: generator.get_state() for name, generator in self._generators.items()},
            }
        )

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every way in which a position does not fit this loader (G02, G12, G13)."""
        found = position_problems(saved, "map", ("epoch", "samples", "batches"), versions=(1, 2))
        if found:
            return found
        value, loader = saved.value, self._loader
        length, size, samples, batches = (
            length_of(loader.dataset),
            loader.batch_size,
            value["samples"],
            value["batches"],
        )
        if value.get("length") != length:
            found.append(
                mismatch(
                    "state.dataset.length",
                    f"a position in the {length} samples of this dataset",
                    f"one in {value.get('length')}",
                    "give the dataset that the run was started with; its order depends on its length",
                )
            )
        old = value.get("batch_size")
        if type(old) is int and samples != batches * old:
            found.append(
                mismatch(
                    "state.dataset.samples",
                    f"{batches} batches of {old}, {batches * old} samples",
                    samples,
                    "use another checkpoint: batches and samples disagree",
                )
            )
        if size is not None and samples % size:
            found.append(
                mismatch(
                    "state.dataset.samples",
                    f"a multiple of the batch size {size}",
                    f"{samples} (it was {old})",
                    f"use a batch size that divides {samples}, or resume at the end of an epoch",
                )
            )
        end = self._epoch_samples()
        if end is not None and samples >= end:
            found.append(
                mismatch(
                    "state.dataset.samples",
                    f"a position before the epoch's end at {end}",
                    samples,
                    "the end of an epoch is written epoch + 1, samples 0; give the dataset the run was started with",
                )
            )
        record = value.get("draws")
        if samples and size != old and loader.num_workers and isinstance(record, dict) and record.get("moved") is True:
            found.append(
                mismatch(
                    "state.dataset.draws.batch_size",
                    f"batches of {old}, because the random streams of {loader.num_workers} workers have moved",
                    f"batches of {size}",
                    "use the batch size that the position was saved with, or resume at the end of an epoch",
                )
            )
        if samples:
            found.extend(late_problems(value.get("late")))
        if samples or value.get("order") is not None:
            found.extend(order_problems(value.get("order"), self._generators, self._beside))
        found.extend(self._ahead_problems(value))
        inside = bool(samples or value.get("order"))
        saved_draws = value.get("draws") if value["version"] > 1 else None
        if value["version"] > 1 and saved_draws is None:
            found.append(mismatch("state.dataset.draws", "how the batches were drawn", "nothing", OTHER))
        found.extend(
            self._draws.problems(saved_draws, self._generators, self.policy, inside=inside, beside=self._beside)
        )
        found.extend(generator_problems(self._generators, value.get("generators"), "state.dataset.generators"))
        return found

    def _ahead_problems(self, value: dict[str, Any]) -> list[TrainfoldError]:
        found: list[TrainfoldError] = []
        for name in ("later", "later_born", "again"):
            if not isinstance(value.get(name, []), list):
                found.append(mismatch(f"state.dataset.{name}", "a list", repr(value[name])[:80], OTHER))
            elif name == "again":
                for number, streams in enumerate(value.get(name, [])):
                    where = f"state.dataset.again[{number}]"
                    found.extend(moved_stream_problems(streams_only(streams), path=where))
                    if isinstance(streams, dict):
                        found.extend(self._beside.problems(streams.get(KEY, {}), where=f"{where}.{KEY}"))
            else:
                for order in value.get(name, []):
                    found.extend(order_problems(order, self._generators, self._beside))
        return found

    def _epoch_samples(self) -> int | None:
        """Samples of an epoch, where that is known without drawing an order."""
        if type(self._loader.batch_sampler) is not torch.utils.data.BatchSampler:
            return None
        total = length_of(self._loader.sampler)
        return total - total % int(self._loader.batch_size or 1) if total and self._loader.drop_last else total

    def write(self, saved: Any) -> Undo:
        """Take a position; the loader's iterator is made when the batches are asked for."""
        before = copied(self.capture())

        def take(value: dict[str, Any]) -> None:
            self._run += 1
            self._alive, self._probe_due, self._is_restored, self._living = False, True, True, None
            self._deliveries.waiting.clear()
            self._epoch, self._samples, self._batches = value["epoch"], value["samples"], value["batches"]
            self._draws.take(value.get("draws"))
            if self._samples and self._loader.batch_size != value.get("batch_size"):
                self._batches = self._samples // (self._loader.batch_size or 1)
                self._draws.lasts.clear()  # its samples come in other batches
            orders = [value["order"], *value.get("later", [])]
            self._orders = {self._epoch + i: Opaque(order) for i, order in enumerate(orders) if order is not None}
            borns = value.get("later_born", [])
            self._borns = {self._epoch + 1 + i: Opaque(born) for i, born in enumerate(borns)}
            if self._draws.born is not None and not self._draws.persistent:
                self._borns[self._epoch], self._draws.born = self._draws.born, None
            set_generators(self._generators, value["generators"])
            self.rewind()
            self._drawer.watch.again.extend(value.get("again", []))
            self._drawer.knows_that_streams_move = self._draws.moved

        warn_if_old(saved.value, inside=bool(saved.value["samples"]))
        take(copied(saved).value)
        return lambda: take(before.value)


def _present(value: Any) -> Any:
    assert value is not None
    return value
