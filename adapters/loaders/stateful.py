"""`StatefulFeed`: a loader that knows its own position, such as torchdata's StatefulDataLoader."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import attrs
from torch.utils.data import DataLoader

from trainfold.adapters.components.component import ComponentAdapter, Stateful, Undo, copied, copied_containers, kind_of
from trainfold.adapters.draws.batch_digest import batch_digest, batch_kind
from trainfold.adapters.draws.beside import KEY, Beside, KeptBeside
from trainfold.adapters.draws.data_probe import compared, is_wanted, warn_uncompared
from trainfold.adapters.draws.draw_batches import replaced, undisturbed, unpaired
from trainfold.adapters.draws.draws import Drawn, Draws, Last
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
    samplers_of,
    set_epochs,
    set_generators,
    stale,
    warn_if_old,
)
from trainfold.adapters.draws.hand_out import Counted, HandedOut, Mark, Unreported, is_large
from trainfold.adapters.draws.pull_watch import PullWatch, is_foreign, late_problems
from trainfold.adapters.draws.sampler_tap import capture_order, order_problems, restore_order
from trainfold.adapters.draws.worker_trace import WorkerTrace
from trainfold.adapters.loaders.iterable import Replay, ended_in_part, iterates, keeps_nothing, torchdatas
from trainfold.adapters.streams.rng_streams import preserved_rng
from trainfold.adapters.streams.stream_reader import StreamReader, set_streams
from trainfold.core.errors import DataPositionMismatch, IncompleteWindow, InvalidArgument, TrainfoldError
from trainfold.core.resume.drift import DriftAction
from trainfold.core.state.state import Opaque


@final
class StatefulFeed:
    """A loader that knows its own position, asked for it at the right moment: between two batches.

    Where the loader's state says nothing of its dataset, an iterable one without a state, the position is the number of
    batches and a digest of them: a resume starts the epoch again, from the random streams that it was started from,
    and draws and compares as many. So does one where an iterable dataset has come to its end in one worker and not in
    another.

    Args:
        loader: an iterable with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._generators = generators_of(loader)
        self._deliveries = Deliveries()
        self._epoch = self._batches = 0
        self._drawing, self._drawn = 0, 0
        self._iterator: Iterator[Any] | None = None
        self._order: Opaque | None = None  # what the epoch's order was drawn from
        self._loaded: Any = None  # a state that the loader has taken and not been iterated with
        self._replay: Replay | None = None  # how batches are drawn that may have to be drawn again
        self._digest: str | None = None  # of those of the epoch that were consumed; None: the loader's state will do
        self._samplers: dict[str, Any] = {}  # states between two epochs
        workers = loader.num_workers if _is_traced(loader) else 0
        self._draws = Draws(workers, persistent=bool(workers and loader.persistent_workers))
        self._began: Any = None  # the loader's state when the epoch began, where it has one
        self._reader = StreamReader() if torchdatas(loader) and not workers else None
        self._counts = getattr(loader, "batch_sampler", None) is not None
        self._counted: Counted | None = None
        self._watch = PullWatch(kind_of(loader.sampler), is_ahead=True) if workers and is_foreign(loader) else None
        # the loader's states before the last batches that were consumed: one for each worker
        self._befores: deque[Any] = deque(maxlen=max(1, workers))
        self._beside = Beside(loader)
        self._start_place: dict[str, Any] = {}  # between the last two epochs
        self._looks_back = torchdatas(loader)  # whether such states are taken
        self._looks = 0
        self._holds_the_users = not workers and _holds_the_users(loader)
        self._total: int | None = None  # batches of an epoch
        self._probe_due = False  # after a restore
        self._again: deque[Opaque] = deque()  # for batches to be given once more: everything that they were drawn from
        self._again_ends = False  # whether the last of them is the last of its epoch
        self._run = 0
        self.policy: Mapping[str, DriftAction] = {}

    def attend(self, extra: Mapping[str, ComponentAdapter]) -> None:
        """Look after the components under ``extra`` that batches may be drawn from."""
        self._beside.attend(extra)

    @property
    def epoch(self) -> int:
        """Epochs whose batches were all consumed."""
        return self._epoch

    @property
    def is_inside(self) -> bool:
        """Whether a batch of the epoch was consumed, and the epoch goes on."""
        return self._batches > 0

    def undelivered(self) -> int:
        """How many batches were handed out and not consumed."""
        return len(self._deliveries.waiting)

    def rewind(self) -> None:
        """Such a loader cannot go back.

        Raises:
            IncompleteWindow: if a batch was handed out and not consumed.
        """
        if self._deliveries.waiting:
            raise IncompleteWindow(
                "live.batches",
                expected="that every batch of the earlier iteration was consumed",
                found=f"{len(self._deliveries.waiting)} that were not",
                fix="call live.advance() after the last step, or live.drop_window(), before iterating again",
            )

    def advance(self, samples: int | None) -> int:
        """Count batches that were handed out as consumed: all of them, where only the caller knows how many samples they have."""
        taken = self._deliveries.take(samples)
        for delivery in taken:
            handed: HandedOut = delivery.drawn
            self._batches += 1
            self._befores.append(handed.before)
            if handed.drawn is not None:
                self._draws.consume(handed.drawn, delivery.samples or 0)
            if delivery.last:
                self._end_epoch()
        if not self._deliveries.waiting:
            self._digest = self._digest_now()
        return (
            (samples or 0) if any(each.samples is None for each in taken) else sum(each.samples or 0 for each in taken)
        )

    def check_samples(self, samples: int | None) -> None:
        """Raise what `advance` would raise."""
        self._deliveries.count_of(samples)

    def waiting_samples(self) -> int | None:
        """Of the batches that were handed out and not consumed."""
        return self._deliveries.samples

    def _end_epoch(self) -> None:
        self._epoch, self._batches = self._epoch + 1, 0
        self._befores.clear()
        self._draws.end_epoch()

    def _digest_now(self) -> str | None:
        """Of everything that was drawn in this epoch."""
        if self._replay is None:
            return self._digest
        return self._replay.digest if self._drawn else ""

    def leave_epoch(self) -> None:
        """Begin the next epoch, where this one has not begun.

        Raises:
            InvalidArgument: inside an epoch: such a loader cannot leave it.
        """
        if self._deliveries.waiting and not self._drawn:
            self.advance(None)  # it was read to its end, and the last batches were not trained on
            return
        if self._drawn or self._deliveries.waiting:
            raise InvalidArgument(
                "live.epochs",
                expected="that a loader with a state of its own is read to the end of each epoch",
                found=f"{self._drawn} batches of one, and a loop that has left it",
                fix="read every batch, or attach a plain DataLoader",
            )
        self._end_epoch()
        self._drawing = self._epoch

    def drop(self) -> int:
        """Give up what was handed out and not consumed."""
        return self.advance(None)

    def batches(self, *, epochs: int | None, done: Callable[[], bool]) -> Iterator[Any]:
        """Batches from where the loader is."""
        self._run += 1
        run = self._run
        self.rewind()
        told = False
        while (epochs is None or self._drawing < epochs) and not done():
            mark = self._mark()
            if self._iterator is None:
                if not self._drawn and self._looks_back:
                    self._start_place = {"state": self._state(), "samplers": self._sampler_states(), "first": True}
                self._iterator = self._open_again() if self._again and not self._drawn else self._open()
            iterator, last = self._iterator, False
            self._total = length_of(self._loader)
            if not told:
                told = True
                yield OPENED
            while not last and not done():
                mark = mark or self._mark()
                delivery, batch = self._give_next(iterator, mark)
                mark = None
                if delivery is None:
                    self._end_late()
                    break
                last = delivery.last
                self._deliveries.waiting.append(delivery)
                if last:
                    self._iterator, self._drawing, self._drawn = None, self._drawing + 1, 0
                yield batch
                if self._run != run:
                    raise stale()

    # --- batches ------------------------------------------------------------------------------------------------------

    def _mark(self) -> Mark | None:
        """Where the loader stands, if the loop is ahead of what it has counted."""
        if not self._deliveries.waiting:
            return None
        return Mark(self._place(), self._again[0] if self._again else capture_order(self._generators, self._beside))

    def _give_next(self, iterator: Iterator[Any], mark: Mark | None) -> tuple[Delivery | None, Any]:
        """The next batch and how it was given; no delivery at the end. One that is given once more is drawn as it was."""
        if not self._again:
            return self._drawn_now(iterator, mark)
        with self._apart():
            restore_order(self._again[0], self._generators, self._beside)
            delivery, batch = self._drawn_now(iterator, mark)
            if delivery is None:
                return None, END
            self._again.popleft()
            if self._again_ends and not self._again and not delivery.last and self._draw(iterator) is END:
                delivery = attrs.evolve(
                    delivery, last=True
                )  # the loop has seen the end, and a stream may have drawn for that
        return delivery, batch

    def _drawn_now(self, iterator: Iterator[Any], mark: Mark | None) -> tuple[Delivery | None, Any]:
        before = self._look_back()
        reader = None if self._replay is not None else self._reader
        if reader is not None:
            reader.moved()
        held = {} if reader is None else self._beside.now()
        streams = {} if reader is None else {**reader.streams, KEY: held} if held else reader.streams
        batch = self._draw(iterator)
        if batch is END:
            return None, END
        self._drawn += 1
        drawn, samples = None, None
        if isinstance(iterator, Unreported):
            drawn, samples = iterator.drawn, iterator.samples
        elif self._counted is not None:
            samples = self._counted.samples
        if reader is not None:
            drawn = Drawn(None, batch_digest(batch), reader.moved(), streams, batch_kind(batch))
        last = self._drawn == self._total
        if last and self._draw(iterator) is not END:  # so that the loader knows of its end, and saves that
            raise mismatch("attach.loader", f"{self._total} batches, as len() says", "more", "fix its __len__")
        return Delivery(samples, last, HandedOut(drawn, before, mark)), batch

    def _draw(self, iterator: Iterator[Any]) -> Any:
        if self._replay is not None:
            return self._replay.draw(iterator)
        if self._watch is not None:
            return self._watch.pull(lambda: next(iterator, END), is_first=False)
        return next(iterator, END)

    def _look_back(self) -> Any:
        """The loader's state before a batch, for the data probe; a large one is not taken each time."""
        if not self._looks_back or (self._replay is not None and self._began is None):
            return None
        if not self._drawn:
            return self._start_place  # a sampler that has not been started yet says where the epoch before has left it
        return self._state_between()

    def _state_between(self) -> Any:
        state = self._loader.state_dict()
        if self._holds_the_users:
            state = copied_containers(state)
        self._looks += 1
        if self._looks.bit_count() == 1 and is_large(state):
            self._looks_back = False
        return (
            None
            if not self._looks_back or _steps_since_snapshot(state)
            else {"state": state, "samplers": {}, "first": False}
        )

    def _end_late(self) -> None:
        """The end of an epoch of unknown length is known one call after its last batch."""
        if self._drawn == 0:
            raise InvalidArgument(
                "attach.loader", expected="at least one batch an epoch", found="none", fix="check the dataset"
            )
        self._iterator, self._drawing, self._drawn = None, self._drawing + 1, 0
        if self._deliveries.waiting:
            waiting = self._deliveries.waiting
            waiting[-1] = attrs.evolve(waiting[-1], last=True)
        else:
            self._end_epoch()
            self._digest = self._digest_now()

    # --- the loader's iterators ---------------------------------------------------------------------------------------

    def _open_again(self) -> Iterator[Any]:
        """An iterator of an epoch whose first batch is given once more."""
        with self._apart():
            restore_order(self._again[0], self._generators, self._beside)
            iterator = self._open()
            self._again[0] = capture_order(self._generators, self._beside)
        return iterator

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Leave every stream and generator as it is."""
        now = {name: generator.get_state() for name, generator in self._generators.items()}
        try:
            with self._beside.kept(everything=self._probe_due), undisturbed():
                yield
        finally:
            set_generators(self._generators, now)

    def _open(self) -> Iterator[Any]:
        set_epochs(self._loader, self._drawing)
        if not isinstance(self._loader, DataLoader):
            if self._probe_due and self._drawn > 0:
                self._warn_uncompared("it is known to the loader alone how it goes back")
            self._loaded = None
            return iter(self._loader)
        if self._drawn > 0:
            return self._inside()
        if self._loaded is not None:
            self._end_again(self._loaded, self._samplers)
        return self._start()

    def _inside(self) -> Iterator[Any]:
        """An iterator in the middle of an epoch, from a position that was taken."""
        loader, digest = self._loader, self._digest
        if digest is not None and self._starts_over():
            return self._again_from_start(digest)
        lasts = self._lasts_to_compare()
        now = {name: generator.get_state() for name, generator in self._generators.items()}
        # the run that was not interrupted made this iterator when the epoch began
        with self._beside.kept() as kept, preserved_rng():
            if lasts:
                self._go_back()
            if self._order is not None:  # for samplers whose state the loader cannot keep
                restore_order(self._order, self._generators, self._beside)
            with self._traced(again=bool(lasts), goes_on=True):
                iterator = self._unreported(iter(loader))
            kept.put_back()
            error = self._compared(iterator, lasts, kept)
        if error is not None:
            set_generators(self._generators, now)
            del iterator  # a traceback would keep it, and its workers, until a collection, which waits for them
            self._give(self._loaded)
            raise error
        reads_ahead = loader.num_workers > 0 and getattr(loader.sampler, "replacement", False)
        if self._again or not reads_ahead:
            set_generators(self._generators, now)
        if iterates(loader) and keeps_nothing(loader.state_dict()):
            raise mismatch("attach.loader", "the dataset with a state that was saved", "one without", OTHER)
        if digest is not None and self._order is not None:
            self._replay = Replay(loader, self._order, digest=digest)
        self._loaded, self._probe_due = None, False
        return iterator

    def _starts_over(self) -> bool:
        """Whether the epoch is started again, and its batches are drawn again and compared."""
        loader, state = self._loader, self._loaded
        if state is None or ended_in_part(state) or loader.batch_size is None:
            return True  # without batches a worker's state does not say that it has ended
        # a stream may draw when a worker starts it; the probe looks at one worker, and sees that after its second batch only
        return self._began is not None and 1 < loader.num_workers >= self._drawn

    def _lasts_to_compare(self) -> tuple[Last, ...]:
        """The last batch of each worker, where they can be drawn again (W03)."""
        if not self._probe_due or not is_wanted(self.policy):
            return ()
        if not self._draws.lasts or not self._back():
            self._warn_uncompared(
                "its state before the last batch is not in the position, because it is large, or older than this release"
            )
            return ()
        return tuple(self._draws.lasts)

    def _back(self) -> int:
        """How many of the last batches can be drawn again: the state before the first of them is known."""
        known = [at for at, before in enumerate(self._befores) if before is not None]
        return min(len(self._befores) - known[0], len(self._draws.lasts)) if known else 0

    def _go_back(self) -> None:
        """Give the loader the state that it had before the last batch of each worker."""
        before = self._befores[-len(self._draws.lasts)]
        self._give(before["state"])
        if before["first"] and before["state"] is not None:
            self._end_again(before["state"], before["samplers"], again=True)

    def _warn_uncompared(self, why: str) -> None:
        self._probe_due = False
        warn_uncompared(kind_of(self._loader), why, self.policy)

    def _compared(
        self, iterator: Iterator[Any], lasts: tuple[Last, ...], kept: KeptBeside
    ) -> DataPositionMismatch | None:
        """Draw the last batches again, and compare them with what was trained on; what is to be raised."""
        others = 0
        for number, last in enumerate(lasts):
            if number:
                self._befores[number - len(lasts)] = self._state_between()
            held = last.before.get(KEY, {})
            if not self._draws.workers:
                set_streams(last.before)
                self._beside.write(held)
            batch = next(iterator, END)
            drawn: Drawn | None = None
            if isinstance(iterator, Unreported):
                drawn = iterator.drawn if batch is not END else None
            elif batch is not END:
                drawn = Drawn(None, batch_digest(batch), {}, kind=batch_kind(batch))
            if others or (drawn is not None and drawn.digest == last.digest):
                continue
            others += 1
            error = compared(last, drawn, self.policy, drew_from=sorted(set(kept.drawn_from()) - set(held)))
            if error is not None:
                return error
        return None

    def _end_again(self, state: Any, samplers: Mapping[str, Any], *, again: bool = False) -> None:
        """Bring the loader to the end of an epoch, where the next one has not begun."""
        loader = self._loader
        now = {name: generator.get_state() for name, generator in self._generators.items()}
        with preserved_rng(), self._traced(again=again, goes_on=True):
            if not isinstance(state, dict) or not state.get("_iterator_finished"):
                iter(loader)
            elif loader.num_workers > 0 and not loader.persistent_workers:
                self._give(None)  # the datasets end with their workers, and what reads ahead would move the sampler
            else:
                loader.state_dict()  # makes the iterator that has ended, and not the next one
        set_generators(self._generators, now)
        for name, sampler in samplers_of(loader).items():
            if name in samplers:
                sampler.load_state_dict(copied(samplers[name]))
        if hasattr(loader.sampler, "next_yielded"):
            # torchdata 0.11: a StatefulDistributedSampler at the end of an epoch would skip the whole next one
            loader.sampler.next_yielded = None
        set_epochs(loader, self._drawing)

    def _give(self, state: Any) -> None:
        self._loader.load_state_dict({} if state is None else copied(state))
        if state is None and hasattr(self._loader, "next_iter_state"):
            self._loader.next_iter_state = None  # torchdata 0.11: {} leaves the one that was loaded before

    def _start(self) -> Iterator[Any]:
        """An iterator at the start of an epoch, which is made now, whether the run was interrupted or not."""
        self._order = capture_order(self._generators, self._beside)
        with self._traced():
            iterator = self._unreported(iter(self._loader))
        self._loaded = self._replay = self._began = None
        if iterates(self._loader):
            state = copied_containers(self._loader.state_dict())
            if not keeps_nothing(state):
                self._began = state
            if self._began is None or self._loader.num_workers > 0:
                self._replay = Replay(self._loader, self._order)
        if self._replay is None:
            self._digest = None
        return iterator

    def _again_from_start(self, digest: str) -> Iterator[Any]:
        """An iterator of an epoch that is started again, after the batches that were drawn of it."""
        assert self._order is not None
        now = {name: generator.get_state() for name, generator in self._generators.items()}
        with self._beside.kept(), preserved_rng():
            restore_order(self._order, self._generators, self._beside)
            if self._began is not None:
                self._loader.load_state_dict(copied(self._began))
            with self._traced():
                iterator = self._unreported(iter(self._loader))
            replay = Replay(self._loader, self._order)
            replay.skip(iterator, self._drawn, digest)
        set_generators(self._generators, now)
        self._replay, self._loaded, self._probe_due = replay, None, False
        return iterator

    @contextmanager
    def _traced(self, *, again: bool = False, goes_on: bool = False) -> Iterator[None]:
        """Workers that are started in this block report their batches; without workers, samples are counted.

        Args:
            again: whether the last batches are drawn again first.
            goes_on: whether the workers start with the streams of the position.
        """
        loader, draws = self._loader, self._draws
        if not draws.workers:
            if self._reader is None:
                yield
                return
            self._counted = Counted(loader.collate_fn, counts=self._counts)
            with replaced(loader, {"collate_fn": self._counted}):
                yield
            return
        trace = WorkerTrace(
            loader.collate_fn,
            loader.worker_init_fn,
            starts=draws.starts(probe=again) if goes_on else {},
            afters=draws.afters() if again else None,
            counts=self._counts,
        )
        with replaced(loader, {"collate_fn": trace.collate, "worker_init_fn": trace.start}):
            yield

    def _unreported(self, iterator: Iterator[Any]) -> Iterator[Any]:
        return Unreported(iterator) if self._draws.workers else iterator

    # --- the position -------------------------------------------------------------------------------------------------

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
            IncompleteWindow: if a batch waits that the loader could not give once more.
        """
        waiting = self._deliveries.waiting
        if waiting and waiting[0].drawn.mark is None:
            raise IncompleteWindow(
                "live.batches",
                expected="that every batch is trained on before anything is saved, for a loader with a state of its own that was not asked "
                "for it before that batch",
                found=f"{len(waiting)} batches that were handed out and not counted",
                fix="call live.advance(samples=...) for them first, or live.drop_window(); or attach a plain DataLoader",
            )
        return self._captured()

    def _captured(self) -> Opaque:
        waiting = [each.drawn.mark for each in self._deliveries.waiting]
        marks = [each for each in waiting if each is not None]
        again = [each.streams for each in marks] if len(marks) == len(waiting) else []
        place = marks[0].place if again else self._place()
        digest, inside, back = place["digest"], self._batches > 0, self._back()
        return Opaque(
            {
                "kind": "stateful",
                "version": 2,  # 1 has no draws
                "loader": kind_of(self._loader),
                "length": length_of(getattr(self._loader, "dataset", None)),
                "epoch": self._epoch,
                "batches": self._batches,
                **place,
                "began": place["began"] if inside and digest is not None else None,
                "order": place["order"] if inside else None,
                "draws": self._draws.capture(None),
                "before": self._befores[-back] if inside and back else None,
                "back": back,
                "again": [each.value for each in (again or self._again)],
                "again_ends": self._deliveries.waiting[-1].last if again else self._again_ends,
                "late": self._watch.late if inside and self._watch is not None else [],
                "generators": {name: generator.get_state() for name, generator in self._generators.items()},
            }
        )

    def _place(self) -> dict[str, Any]:
        """Where the loader stands, as a position says it; everything that was drawn counts."""
        return {
            "state": self._state(),
            "samplers": self._sampler_states(),
            "digest": self._digest_now(),
            "began": self._began,
            "order": None if self._order is None else self._order.value,
        }

    def _sampler_states(self) -> dict[str, Any]:
        """Between two epochs: the loader's state has those from when the last batch was asked for."""
        if self._loaded is not None:
            return self._samplers
        between = self._iterator is None and self._drawing > 0 and torchdatas(self._loader)
        states = {name: sampler.state_dict() for name, sampler in samplers_of(self._loader).items() if between}
        return {name: copied_containers(state) for name, state in states.items()}

    def _state(self) -> Any:
        if self._loaded is not None or (self._digest_now() is not None and self._began is None):
            return self._loaded
        untouched = self._iterator is None and self._drawing == 0
        if untouched and isinstance(self._loader, DataLoader):
            return None  # asking would start its workers and draw from the global stream
        return copied_containers(self._loader.state_dict())

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every way in which a position does not fit this loader."""
        found = position_problems(saved, "stateful", ("epoch", "batches"), versions=(1, 2))
        if found:
            return found
        value = saved.value
        if value.get("loader") != kind_of(self._loader):
            found.append(mismatch("state.dataset.loader", kind_of(self._loader), value.get("loader"), OTHER))
        length = length_of(getattr(self._loader, "dataset", None))
        if value.get("length", length) != length:  # an older position does not say it; the contract of rank 0 does
            found.append(
                mismatch(
                    "state.dataset.length",
                    f"a position in the {length} samples of this dataset",
                    f"one in {value['length']}",
                    "give the dataset that the run was started with",
                )
            )
        digest, moved = value.get("digest"), value["epoch"] or value["batches"]
        if "state" not in value or (value["state"] is None and moved and digest is None):
            found.append(mismatch("state.dataset.state", "the loader's own state", "nothing", OTHER))
        if set(value.get("samplers", {})) - set(samplers_of(self._loader)):
            found.append(mismatch("state.dataset.samplers", "samplers with a state", "others", OTHER))
        if digest is not None and type(digest) is not str:
            found.append(mismatch("state.dataset.digest", "a digest of the batches, as text", repr(digest), OTHER))
        if value.get("order") is not None or (digest is not None and value["batches"]):
            found.extend(order_problems(value.get("order"), self._generators, self._beside))
        found.extend(self._ahead_problems(value))
        found.extend(self._draws_problems(value))
        found.extend(generator_problems(self._generators, value.get("generators"), "state.dataset.generators"))
        return found

    def _ahead_problems(self, value: dict[str, Any]) -> list[TrainfoldError]:
        """Of what was drawn last, and of what was drawn ahead."""
        found = late_problems(value.get("late")) if value["batches"] else []
        before, again = value.get("before"), value.get("again", [])
        if before is not None and not (isinstance(before, dict) and {"state", "samplers", "first"} <= set(before)):
            found.append(
                mismatch("state.dataset.before", "the loader's state before a batch", repr(before)[:80], OTHER)
            )
        if type(value.get("back", 1)) is not int or not 0 <= value.get("back", 1) <= max(1, self._draws.workers):
            found.append(mismatch("state.dataset.back", "a number of batches", repr(value["back"])[:80], OTHER))
        if not isinstance(again, list):
            return [*found, mismatch("state.dataset.again", "a list", repr(again)[:80], OTHER)]
        for number, order in enumerate(again):
            found.extend(order_problems(order, self._generators, self._beside, where=f"state.dataset.again[{number}]"))
        return found

    def _draws_problems(self, value: dict[str, Any]) -> list[TrainfoldError]:
        saved = value.get("draws")
        moved = isinstance(saved, dict) and saved.get("moved") is True
        behind = _steps_since_snapshot(value.get("state"))
        if moved and behind and value.get("digest") is None:
            return [
                mismatch(
                    "state.dataset.state",
                    "a loader's state from after its last batch, because its workers' random streams have moved",
                    f"one from {behind} batches before",
                    "make the loader with snapshot_every_n_steps=1, and resume from the end of an epoch",
                )
            ]
        return self._draws.problems(
            saved, {}, self.policy, inside=bool(value["batches"]), tied=True, beside=self._beside
        )

    def write(self, saved: Any) -> Undo:
        """Give the loader its state; it moves when the batches are asked for."""
        before = copied(self._captured()).value

        def take(value: dict[str, Any]) -> None:
            state = value["state"]
            self._give(state)
            self._run += 1
            self._epoch, self._batches = value["epoch"], value["batches"]
            self._drawing, self._drawn = self._epoch, self._batches
            self._iterator, self._loaded = None, state
            self._replay, self._digest, self._began = None, value.get("digest"), value.get("began")
            self._draws.take(value.get("draws"))
            back = min(value.get("back", 1), len(self._draws.lasts))
            while len(self._draws.lasts) > max(1, back):
                self._draws.lasts.popleft()
            self._befores.clear()
            self._befores.extend([value.get("before"), *[None] * (back - 1)] if back else [])
            self._probe_due = True
            self._again = deque(Opaque(order) for order in value.get("again", []))
            self._again_ends = value.get("again_ends") is True
            self._samplers = value.get("samplers", {})
            self._order = None if value["order"] is None else Opaque(value["order"])
            self._deliveries.waiting.clear()
            set_generators(self._generators, value["generators"])

        warn_if_old(saved.value, inside=bool(saved.value["batches"]))
        try:
            take(copied(saved).value)
        except Exception:
            take(before)
            raise
        return lambda: take(before)


def _holds_the_users(loader: Any) -> bool:
    """Whether code of the user's says a part of the state of torchdata's loader, and may go on changing what it said."""
    return torchdatas(loader) and (iterates(loader) or isinstance(loader.dataset, Stateful) or is_foreign(loader))


def _is_traced(loader: Any) -> bool:
    """Whether it is torchdata's loader with workers; one of the user's says itself what it saves.

    Raises:
        InvalidArgument: if a class of the user's may change what torchdata's workers made.
    """
    if not (isinstance(loader, DataLoader) and torchdatas(loader) and loader.num_workers):
        return False
    if type(loader).__iter__.__module__.split(".")[0] != "torchdata":
        raise unpaired(loader, "another iterator")
    return True


def _steps_since_snapshot(state: Any) -> int:
    """How many batches a state of torchdata's loader is behind.

    Examples:
        >>> _steps_since_snapshot({"_steps_since_snapshot": 2}), _steps_since_snapshot(None)
        (2, 0)
    """
    behind = state.get("_steps_since_snapshot", 0) if isinstance(state, dict) else 0
    return behind if type(behind) is int else 0
