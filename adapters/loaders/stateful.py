"""`StatefulFeed`: a loader that knows its own position, such as torchdata's StatefulDataLoader."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import attrs
from torch.utils.data import DataLoader

from trainfold.adapters.components.component import Undo, copied, copied_containers, kind_of
from trainfold.adapters.components.rng_streams import preserved_rng
from trainfold.adapters.components.stream_reader import Streams
from trainfold.adapters.loaders.draw_batches import replaced, unpaired
from trainfold.adapters.loaders.draws import Drawn, Draws
from trainfold.adapters.loaders.feed import (
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
    set_generators,
    stale,
    tell_epoch,
)
from trainfold.adapters.loaders.iterable import Replay, ended_in_part, iterates, keeps_nothing, torchdatas
from trainfold.adapters.loaders.sampler_tap import capture_order, order_problems, restore_order
from trainfold.adapters.loaders.worker_trace import WorkerTrace
from trainfold.core.errors import IncompleteWindow, InvalidArgument, TrainfoldError
from trainfold.core.policy import Verdict
from trainfold.core.state import Opaque


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
        self._run = 0
        self.policy: Mapping[str, Verdict] = {}

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
                mend="call live.advance() after the last step, or live.drop_window(), before iterating again",
            )

    def advance(self, samples: int | None) -> int:
        """Count every batch that was handed out as consumed; only the caller knows how many samples they had."""
        for delivery in self._deliveries.take(None):
            self._batches += 1
            if delivery.drawn is not None:
                self._draws.consume(delivery.drawn, 0)
            if delivery.last:
                self._end_epoch()
        self._settle()
        return samples or 0

    def _end_epoch(self) -> None:
        self._epoch, self._batches = self._epoch + 1, 0
        self._draws.end_epoch()

    def _settle(self) -> None:
        """Everything that was drawn is consumed."""
        if self._replay is not None:
            self._digest = self._replay.digest if self._drawn else ""

    def leave_epoch(self) -> None:
        """Begin the next epoch, where this one has not begun.

        Raises:
            InvalidArgument: inside an epoch: such a loader cannot leave it.
        """
        if self._drawn or self._deliveries.waiting:
            raise InvalidArgument(
                "live.epochs",
                expected="that a loader with a state of its own is read to the end of each epoch",
                found=f"{self._drawn} batches of one, and a loop that has left it",
                mend="read every batch, or attach a plain DataLoader",
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
            if self._iterator is None:
                self._iterator = self._open()
            iterator, total = self._iterator, length_of(self._loader)
            last = False
            if not told:
                told = True
                yield OPENED
            while not last and not done():
                batch = self._draw(iterator)
                if batch is END:
                    self._end_late()
                    break
                self._drawn += 1
                drawn = iterator.drawn if isinstance(iterator, Unreported) else None
                last = self._drawn == total
                if last and self._draw(iterator) is not END:  # so that the loader knows of its end, and saves that
                    raise mismatch("attach.loader", f"{total} batches, as len() says", "more", "mend its __len__")
                self._deliveries.waiting.append(Delivery(0, last, drawn))
                if last:
                    self._iterator, self._drawing, self._drawn = None, self._drawing + 1, 0
                yield batch
                if self._run != run:
                    raise stale()

    def _draw(self, iterator: Iterator[Any]) -> Any:
        return next(iterator, END) if self._replay is None else self._replay.draw(iterator)

    def _end_late(self) -> None:
        """The end of an epoch of unknown length is known one call after its last batch."""
        if self._drawn == 0:
            raise InvalidArgument(
                "attach.loader", expected="at least one batch an epoch", found="none", mend="check the dataset"
            )
        self._iterator, self._drawing, self._drawn = None, self._drawing + 1, 0
        if self._deliveries.waiting:
            waiting = self._deliveries.waiting
            waiting[-1] = attrs.evolve(waiting[-1], last=True)
        else:
            self._end_epoch()
            self._settle()

    def _open(self) -> Iterator[Any]:
        tell_epoch(self._loader, self._drawing)
        if not isinstance(self._loader, DataLoader):
            self._loaded = None
            return iter(self._loader)
        if self._drawn > 0:
            return self._inside()
        if self._loaded is not None:
            self._end_again()
        return self._start()

    def _inside(self) -> Iterator[Any]:
        """An iterator in the middle of an epoch, from a position that was taken."""
        loader, state, digest = self._loader, self._loaded, self._digest
        if digest is not None and (state is None or ended_in_part(state) or loader.batch_size is None):
            return self._again(digest)  # without batches a worker's state does not say that it has ended
        now = {name: generator.get_state() for name, generator in self._generators.items()}
        with preserved_rng():  # the run that was not interrupted made this iterator when the epoch began
            if self._order is not None:
                restore_order(self._order, self._generators)  # for samplers whose state the loader cannot keep
            with self._traced(self._draws.starts(probe=False)):
                iterator = self._unreported(iter(loader))
        if loader.num_workers == 0 or not getattr(loader.sampler, "replacement", False):  # else it has read ahead
            set_generators(self._generators, now)
        if iterates(loader) and keeps_nothing(loader.state_dict()):
            raise mismatch("attach.loader", "the dataset with a state that was saved", "one without", OTHER)
        if digest is not None and self._order is not None:
            self._replay = Replay(loader, self._order, digest=digest)
        self._loaded = None
        return iterator

    def _end_again(self) -> None:
        """Bring the loader to the end of an epoch, where the next one has not begun."""
        loader, state = self._loader, self._loaded
        now = {name: generator.get_state() for name, generator in self._generators.items()}
        with preserved_rng(), self._traced(self._draws.starts(probe=False)):
            if not isinstance(state, dict) or not state.get("_iterator_finished"):
                iter(loader)
            elif loader.num_workers > 0 and not loader.persistent_workers:
                self._give(None)  # the datasets end with their workers, and what reads ahead would move the sampler
            else:
                loader.state_dict()  # makes the iterator that has ended, and not the next one
        set_generators(self._generators, now)
        for name, sampler in samplers_of(loader).items():
            if name in self._samplers:
                sampler.load_state_dict(copied(self._samplers[name]))
        if hasattr(loader.sampler, "next_yielded"):
            # torchdata 0.11: a StatefulDistributedSampler at the end of an epoch would skip the whole next one
            loader.sampler.next_yielded = None
        tell_epoch(loader, self._drawing)

    def _give(self, state: Any) -> None:
        self._loader.load_state_dict({} if state is None else copied(state))
        if state is None and hasattr(self._loader, "next_iter_state"):
            self._loader.next_iter_state = None  # torchdata 0.11: {} leaves the one that was loaded before

    def _start(self) -> Iterator[Any]:
        """An iterator at the start of an epoch, which is made now, whether the run was interrupted or not."""
        self._order = capture_order(self._generators)
        with self._traced({}):
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

    def _again(self, digest: str) -> Iterator[Any]:
        """An iterator of an epoch that is started again, after the batches that were drawn of it."""
        assert self._order is not None
        now = {name: generator.get_state() for name, generator in self._generators.items()}
        with preserved_rng():
            restore_order(self._order, self._generators)
            if self._began is not None:
                self._loader.load_state_dict(copied(self._began))
            with self._traced({}):
                iterator = self._unreported(iter(self._loader))
            replay = Replay(self._loader, self._order)
            replay.skip(iterator, self._drawn, digest)
        set_generators(self._generators, now)
        self._replay, self._loaded = replay, None
        return iterator

    @contextmanager
    def _traced(self, starts: dict[int, Streams]) -> Iterator[None]:
        """Workers that are started in this block report the streams of their batches."""
        if not self._draws.workers:
            yield
            return
        loader = self._loader
        trace = WorkerTrace(loader.collate_fn, loader.worker_init_fn, starts=starts, digests=False)
        with replaced(loader, {"collate_fn": trace.collate, "worker_init_fn": trace.start}):
            yield

    def _unreported(self, iterator: Iterator[Any]) -> Iterator[Any]:
        return Unreported(iterator) if self._draws.workers else iterator

    def contract(self) -> dict[str, Any]:
        """What must be the same at a resume."""
        return {
            "loader.kind": kind_of(self._loader),
            "batch_size": getattr(self._loader, "batch_size", None),
            "dataset_size": length_of(getattr(self._loader, "dataset", None)),
        }

    def capture(self) -> Opaque:
        """The loader's own state, and the epochs counted here."""
        return Opaque(
            {
                "kind": "stateful",
                "version": 2,  # 1 has no draws
                "loader": kind_of(self._loader),
                "epoch": self._epoch,
                "batches": self._batches,
                "state": self._state(),
                "samplers": self._sampler_states(),
                "digest": self._digest,
                "draws": self._draws.capture(None),
                "began": self._began if self._batches and self._digest is not None else None,
                "order": self._order.value if self._batches and self._order is not None else None,
                "generators": {name: generator.get_state() for name, generator in self._generators.items()},
            }
        )

    def _sampler_states(self) -> dict[str, Any]:
        """Between two epochs: the loader's state has those from when the last batch was asked for."""
        if self._loaded is not None:
            return self._samplers
        between = self._iterator is None and self._drawing > 0 and torchdatas(self._loader)
        states = {name: sampler.state_dict() for name, sampler in samplers_of(self._loader).items() if between}
        return {name: copied_containers(state) for name, state in states.items()}

    def _state(self) -> Any:
        if self._loaded is not None or (self._digest is not None and self._began is None):
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
        digest, moved = value.get("digest"), value["epoch"] or value["batches"]
        if "state" not in value or (value["state"] is None and moved and digest is None):
            found.append(mismatch("state.dataset.state", "the loader's own state", "nothing", OTHER))
        if set(value.get("samplers", {})) - set(samplers_of(self._loader)):
            found.append(mismatch("state.dataset.samplers", "samplers with a state", "others", OTHER))
        if digest is not None and type(digest) is not str:
            found.append(mismatch("state.dataset.digest", "a digest of the batches, as text", repr(digest), OTHER))
        if value.get("order") is not None or (digest is not None and value["batches"]):
            found.extend(order_problems(value.get("order"), self._generators))
        found.extend(self._draws_problems(value))
        found.extend(generator_problems(self._generators, value.get("generators"), "state.dataset.generators"))
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
        return self._draws.problems(saved, {}, self.policy, inside=bool(value["batches"]), tied=True)

    def write(self, saved: Any) -> Undo:
        """Give the loader its state; it moves when the batches are asked for."""
        before = copied(self.capture()).value

        def take(value: dict[str, Any]) -> None:
            state = value["state"]
            self._give(state)
            self._run += 1
            self._epoch, self._batches = value["epoch"], value["batches"]
            self._drawing, self._drawn = self._epoch, self._batches
            self._iterator, self._loaded = None, state
            self._replay, self._digest, self._began = None, value.get("digest"), value.get("began")
            self._draws.take(value.get("draws"))
            self._samplers = value.get("samplers", {})
            self._order = None if value["order"] is None else Opaque(value["order"])
            self._deliveries.waiting.clear()
            set_generators(self._generators, value["generators"])

        try:
            take(copied(saved).value)
        except Exception:
            take(before)
            raise
        return lambda: take(before)


@final
class Unreported:
    """An iterator without the reports that come with its batches; the last one is kept.

    Args:
        made: an iterator of pairs of a batch and its report.
    """

    def __init__(self, made: Iterator[Any]) -> None:
        self._made = made
        self.drawn: Drawn | None = None

    def __iter__(self) -> "Unreported":
        return self

    def __next__(self) -> Any:
        batch, report = next(self._made)
        self.drawn = Drawn.by_worker(report)
        return batch


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
