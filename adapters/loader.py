"""Loaders of a mutable loop: where they stand, and how they get there again without reading what was read.

`MapFeed` drives an ordinary ``DataLoader`` over a map-style dataset: the position is counted in samples, and a resume
draws the same indices again and skips them, so that no skipped sample is ever read. `StatefulFeed` drives anything with
``state_dict`` and ``load_state_dict``, such as torchdata's ``StatefulDataLoader``.

Limits: worker processes (``num_workers > 0``) have random streams of their own that nobody can capture, so random
augmentation in them is not resumed exactly; a sampler that draws from a *global* stream while the epoch goes on (not
at its start) is not either. Draw from the index, or from a generator that is given to the loader.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol, final

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainfold.adapters.part import Stateful, Undo, copied, copied_containers
from trainfold.adapters.rng import capture_streams, preserved_rng, restore_streams, stream_problems
from trainfold.core.errors import DataPositionMismatch, IncompleteWindow, InvalidArgument, InvalidState, TrainfoldError
from trainfold.core.state import Opaque

VERSION = 1
Generators = dict[str, torch.Tensor]


class Feed(Protocol):
    """A loader with a position; a `Part` of the component ``dataset`` too."""

    @property
    def epoch(self) -> int:
        """Epochs whose samples were all consumed."""

    def batches(self, *, epochs: int | None, done: Callable[[], bool]) -> Iterator[Any]:
        """Batches from the position on, epoch after epoch, until there were ``epochs`` or ``done()`` says so."""

    def advance(self, samples: int | None) -> int:
        """Count batches that were handed out as consumed; return how many samples that is."""

    def undelivered(self) -> int:
        """How many batches were handed out and not consumed."""

    def drop(self) -> int:
        """Give up the batches that were handed out and not consumed; return their samples."""

    def rewind(self) -> None:
        """Forget them: they will be handed out again."""

    def contract(self) -> dict[str, Any]:
        """What must be the same at a resume."""

    def capture(self) -> Opaque:
        """The position."""

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every reason why this position cannot be taken."""

    def write(self, saved: Any) -> Undo:
        """Take a position."""


def feed_of(loader: Any) -> Feed:
    """The feed for a loader.

    Raises:
        InvalidArgument: for a loader whose position nobody knows.

    Examples:
        >>> type(feed_of(DataLoader([1, 2, 3]))).__name__
        'MapFeed'
    """
    if isinstance(loader, Stateful) and hasattr(loader, "__iter__"):
        return StatefulFeed(loader)
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        return MapFeed(loader)
    kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
    over = f" over {type(loader.dataset).__qualname__}" if isinstance(loader, DataLoader) else ""
    raise InvalidArgument(
        "attach.loader",
        expected="a DataLoader over a map-style dataset, or an iterable with state_dict and load_state_dict",
        found=f"a {kind}{over}, whose position cannot be known",
        mend="use torchdata's StatefulDataLoader, or give the dataset __len__ and __getitem__; "
        "or attach without a loader and keep the position yourself under extra=",
    )


class _Deliveries:
    """Batches that were handed out and not consumed yet, in order: (samples, whether it was the epoch's last)."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, bool]] = deque()

    def take(self, samples: int | None) -> list[tuple[int, bool]]:
        """Take batches of exactly so many samples, or all of them.

        Raises:
            DataPositionMismatch: if no number of waiting batches has so many samples; nothing is taken.
        """
        count, total = 0, 0
        while count < len(self.waiting) and (samples is None or total < samples):
            total += self.waiting[count][0]
            count += 1
        if samples is not None and total != samples:
            raise _mismatch(
                "advance.samples",
                f"the samples of whole batches from live.batches(); {[size for size, _ in self.waiting]} are waiting",
                samples,
                "iterate over live.batches(), and count every sample of each batch, or leave samples= out",
            )
        return [self.waiting.popleft() for _ in range(count)]


class _Tap:
    """Stands between a loader and its sampler: takes the streams at the start of an epoch, skips, counts what passes."""

    def __init__(self, sampler: Any, generators: dict[str, torch.Generator], *, counts: bool) -> None:
        self.sampler = sampler
        self.generators = generators
        self.counts = counts
        self.start: Opaque | None = None  # to start from, or None to start from the streams as they are
        self.skip = 0
        self.started_from: Opaque | None = None
        self.current: _TapIterator | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> "_TapIterator":
        self.current = _TapIterator(self)
        return self.current


class _TapIterator:
    """One epoch of a sampler, looked at one index batch ahead, so that the last one is known as such."""

    def __init__(self, tap: _Tap) -> None:
        self.tap = tap
        self.indices: Iterator[Any] | None = None
        self.ahead: Any = _END
        self.passed: deque[tuple[int, bool]] = deque()

    def __iter__(self) -> "_TapIterator":
        return self

    def __next__(self) -> Any:
        self.prime()
        item = self.ahead
        if item is _END:
            raise StopIteration
        self.ahead = self._pull()
        self.passed.append((self._size(item), self.ahead is _END))
        return item

    def prime(self) -> None:
        """Start the sampler, where it is not started: only now, because some draw the order of the epoch from a stream."""
        if self.indices is not None:
            return
        tap = self.tap
        if tap.start is not None:
            _restore_order(tap.start, tap.generators)
        tap.started_from = tap.start or _capture_order(tap.generators)
        tap.start, skip, tap.skip = None, tap.skip, 0
        self.indices = iter(tap.sampler)
        read, item = 0, self._pull()
        while read < skip and item is not _END:
            read += self._size(item)
            item = self._pull()
        if read != skip or (skip and item is _END):
            raise _mismatch(
                "state.dataset.samples",
                "a position between two batches of this epoch",
                f"{skip}, where batches end at {read}" + (" and the epoch too" if item is _END else ""),
                "use a batch size that divides the position, and the dataset and sampler that the run was started with",
            )
        self.ahead = item

    def _pull(self) -> Any:
        assert self.indices is not None
        return next(self.indices, _END)

    def _size(self, item: Any) -> int:
        return len(item) if self.tap.counts else 1


_END = object()


@final
class MapFeed:
    """An ordinary ``DataLoader`` over a map-style dataset, positioned in samples.

    The order of an epoch comes from the random streams, the loader's generators and ``set_epoch`` as they were when
    the epoch began, so these are kept; to resume inside an epoch they are put back, the sampler is started, and its
    indices are skipped. No skipped sample is read, and the training's own random streams do not move.

    Args:
        loader: the loader; it is left as it is.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self._loader = loader
        self._counts = loader.batch_sampler is not None
        self._slot = "batch_sampler" if self._counts else "sampler"
        self._generators = _generators_of(loader)
        self._tap = _Tap(getattr(loader, self._slot), self._generators, counts=self._counts)
        self._deliveries = _Deliveries()
        self._epoch = self._samples = self._batches = 0
        self._drawing = 0
        self._order: tuple[int, Opaque] | None = None  # (epoch, what its order was drawn from)
        self._run = 0
        self._opened = False

    @property
    def epoch(self) -> int:
        """Epochs whose samples were all consumed."""
        return self._epoch

    def undelivered(self) -> int:
        """How many batches were handed out and not consumed."""
        return len(self._deliveries.waiting)

    def rewind(self) -> None:
        """Go back to the position: batches that were handed out and not consumed will be handed out again."""
        self._deliveries.waiting.clear()
        self._drawing = self._epoch

    def advance(self, samples: int | None) -> int:
        """Count batches that were handed out as consumed."""
        taken = self._deliveries.take(samples if self._counts else None)
        for size, last in taken:
            self._samples, self._batches = self._samples + size, self._batches + 1
            if last:
                self._epoch, self._samples, self._batches = self._epoch + 1, 0, 0  # G03
        return sum(size for size, _ in taken)

    def drop(self) -> int:
        """Give up what was handed out and not consumed."""
        return self.advance(None)

    def batches(self, *, epochs: int | None, done: Callable[[], bool]) -> Iterator[Any]:
        """Batches from the position on."""
        self._run += 1
        run = self._run
        self.rewind()
        while (epochs is None or self._drawing < epochs) and not done():
            iterator, tap = self._open(), self._tap.current
            assert tap is not None
            last = False
            while not last and not done():
                batch = next(iterator, _END)
                if batch is _END:
                    raise InvalidArgument(
                        "attach.loader",
                        expected="at least one batch an epoch",
                        found="none",
                        mend="make the batch size smaller than the dataset, or set drop_last=False",
                    )
                self._order = (self._drawing, _not_none(self._tap.started_from))
                size, last = tap.passed.popleft()
                self._deliveries.waiting.append((size, last))
                yield batch
                if self._run != run:
                    raise _stale()
            del iterator
            if last:
                self._drawing += 1

    def _open(self) -> Iterator[Any]:
        """An iterator of the loader at the position; `set_epoch` comes before the seek (G04)."""
        _set_epoch(self._loader, self._drawing)
        inside = self._drawing == self._epoch and self._samples > 0
        first, self._opened = not self._opened, True
        self._tap.start, self._tap.skip = None, 0
        if not inside:
            if first and self._drawing > 0 and self._loader.persistent_workers and self._loader.num_workers > 0:
                # the run that was not interrupted had its workers from epoch 0 and drew no seed for new ones here
                self._tap.start = _capture_order(self._generators)
            return self._iterate()
        now = {name: generator.get_state() for name, generator in self._generators.items()}
        self._tap.start, self._tap.skip = _not_none(self._order)[1], self._samples
        with preserved_rng():
            iterator = self._iterate()
            _not_none(self._tap.current).prime()
        if self._loader.num_workers == 0:
            _set_generators(self._generators, now)
        return iterator

    def _iterate(self) -> Iterator[Any]:
        own = vars(self._loader)[self._slot]
        vars(self._loader)[self._slot] = self._tap  # for the time of this call; a loader's attributes cannot be set
        try:
            return iter(self._loader)
        finally:
            vars(self._loader)[self._slot] = own

    def contract(self) -> dict[str, Any]:
        """What must be the same at a resume."""
        loader = self._loader
        return {
            "loader.kind": "torch.utils.data.DataLoader",
            "loader.sampler": _kind(loader.sampler),
            "loader.drop_last": bool(loader.drop_last),
            "batch_size": loader.batch_size,
            "dataset_size": _length(loader.dataset),
        }

    def capture(self) -> Opaque:
        """The position: ``epoch``, ``samples`` and ``batches`` in it, and what the order of the epoch was drawn from."""
        order = self._order[1].value if self._samples and self._order else None
        return Opaque(
            {
                "kind": "map",
                "version": VERSION,
                "epoch": self._epoch,
                "samples": self._samples,
                "batches": self._batches,
                "batch_size": self._loader.batch_size,
                "length": _length(self._loader.dataset),
                "order": order,
                "generators": {name: generator.get_state() for name, generator in self._generators.items()},
            }
        )

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every way in which a position does not fit this loader (G02, G12, G13)."""
        found = _position_problems(saved, "map", ("epoch", "samples", "batches"))
        if found:
            return found
        value, loader = saved.value, self._loader
        length, size, samples, batches = _length(loader.dataset), loader.batch_size, value["samples"], value["batches"]
        if value.get("length") != length:
            found.append(
                _mismatch(
                    "state.dataset.length",
                    f"a position in the {length} samples of this dataset",
                    f"one in {value.get('length')}",
                    "give the dataset that the run was started with; its order depends on its length",
                )
            )
        old = value.get("batch_size")
        if type(old) is int and samples != batches * old:
            found.append(
                _mismatch(
                    "state.dataset.samples",
                    f"{batches} batches of {old}, {batches * old} samples",
                    samples,
                    "use another checkpoint: batches and samples disagree",
                )
            )
        if size is not None and samples % size:
            found.append(
                _mismatch(
                    "state.dataset.samples",
                    f"a multiple of the batch size {size}",
                    f"{samples} (it was {old})",
                    f"use a batch size that divides {samples}, or resume at the end of an epoch",
                )
            )
        end = self._epoch_samples()
        if end is not None and samples >= end:
            found.append(
                _mismatch(
                    "state.dataset.samples",
                    f"a position before the epoch's end at {end}",
                    samples,
                    "the end of an epoch is written epoch + 1, samples 0; give the dataset the run was started with",
                )
            )
        if samples and not (isinstance(value.get("order"), dict) and "streams" in value["order"]):
            found.append(_mismatch("state.dataset.order", "what the epoch's order was drawn from", "nothing", _OTHER))
        elif samples:
            found.extend(stream_problems(value["order"]["streams"], path="state.dataset.order.streams"))
            found.extend(_generator_problems(self._generators, value["order"].get("generators"), "order.generators"))
        found.extend(_generator_problems(self._generators, value.get("generators"), "generators"))
        return found

    def _epoch_samples(self) -> int | None:
        """Samples of an epoch, where that is known without drawing an order."""
        if type(self._loader.batch_sampler) is not torch.utils.data.BatchSampler:
            return None
        total = _length(self._loader.sampler)
        return total - total % int(self._loader.batch_size or 1) if total and self._loader.drop_last else total

    def write(self, saved: Any) -> Undo:
        """Take a position; the loader's iterator is made when the batches are asked for."""
        before = copied(self.capture())

        def take(value: dict[str, Any]) -> None:
            self._run += 1
            self._epoch, self._samples, self._batches = value["epoch"], value["samples"], value["batches"]
            self._order = None if value["order"] is None else (self._epoch, Opaque(value["order"]))
            _set_generators(self._generators, value["generators"])
            self.rewind()

        take(copied(saved).value)
        return lambda: take(before.value)


@final
class StatefulFeed:
    """A loader that knows its own position, asked for it at the right moment: between two batches.

    Args:
        loader: an iterable with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._generators = _generators_of(loader)
        self._deliveries = _Deliveries()
        self._epoch = self._batches = 0
        self._drawing, self._drawn = 0, 0
        self._iterator: Iterator[Any] | None = None
        self._loaded: Any = None  # a state that the loader has taken and not been iterated with
        self._run = 0

    @property
    def epoch(self) -> int:
        """Epochs whose batches were all consumed."""
        return self._epoch

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
        for _, last in self._deliveries.take(None):
            self._batches += 1
            if last:
                self._epoch, self._batches = self._epoch + 1, 0
        return samples or 0

    def drop(self) -> int:
        """Give up what was handed out and not consumed."""
        return self.advance(None)

    def batches(self, *, epochs: int | None, done: Callable[[], bool]) -> Iterator[Any]:
        """Batches from where the loader is."""
        self._run += 1
        run = self._run
        self.rewind()
        while (epochs is None or self._drawing < epochs) and not done():
            if self._iterator is None:
                self._iterator = self._open()
            iterator, total = self._iterator, _length(self._loader)
            last = False
            while not last and not done():
                batch = next(iterator, _END)
                if batch is _END:
                    self._end_late()
                    break
                self._drawn += 1
                last = self._drawn == total
                if last and next(iterator, _END) is not _END:  # so that the loader knows of its end, and saves that
                    raise _mismatch("attach.loader", f"{total} batches, as len() says", "more", "mend its __len__")
                self._deliveries.waiting.append((0, last))
                if last:
                    self._iterator, self._drawing, self._drawn = None, self._drawing + 1, 0
                yield batch
                if self._run != run:
                    raise _stale()

    def _end_late(self) -> None:
        """The end of an epoch of unknown length is known one call after its last batch."""
        if self._drawn == 0:
            raise InvalidArgument(
                "attach.loader", expected="at least one batch an epoch", found="none", mend="check the dataset"
            )
        self._iterator, self._drawing, self._drawn = None, self._drawing + 1, 0
        if self._deliveries.waiting:
            self._deliveries.waiting[-1] = (0, True)
        else:
            self._epoch, self._batches = self._epoch + 1, 0

    def _open(self) -> Iterator[Any]:
        _set_epoch(self._loader, self._drawing)
        loaded, self._loaded = self._loaded, None
        if loaded is None or not isinstance(self._loader, DataLoader):
            return iter(self._loader)
        with preserved_rng():  # the run that was not interrupted made this iterator earlier
            iterator = iter(self._loader)
        new_workers = not (self._loader.persistent_workers and self._loader.num_workers > 0)
        if self._drawn == 0 and self._loader.generator is None and new_workers:
            torch.empty((), dtype=torch.int64).random_()  # ... except at an epoch's start: torch draws a seed for it
        return iterator

    def contract(self) -> dict[str, Any]:
        """What must be the same at a resume."""
        return {
            "loader.kind": _kind(self._loader),
            "batch_size": getattr(self._loader, "batch_size", None),
            "dataset_size": _length(getattr(self._loader, "dataset", None)),
        }

    def capture(self) -> Opaque:
        """The loader's own state, and the epochs counted here."""
        return Opaque(
            {
                "kind": "stateful",
                "version": VERSION,
                "loader": _kind(self._loader),
                "epoch": self._epoch,
                "batches": self._batches,
                "state": self._state(),
                "generators": {name: generator.get_state() for name, generator in self._generators.items()},
            }
        )

    def _state(self) -> Any:
        if self._loaded is not None:
            return self._loaded
        untouched = self._iterator is None and self._drawing == 0
        if untouched and isinstance(self._loader, DataLoader):
            return None  # asking would start its workers and draw from the global stream
        return copied_containers(self._loader.state_dict())

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every way in which a position does not fit this loader."""
        found = _position_problems(saved, "stateful", ("epoch", "batches"))
        if found:
            return found
        value = saved.value
        if value.get("loader") != _kind(self._loader):
            found.append(_mismatch("state.dataset.loader", _kind(self._loader), value.get("loader"), _OTHER))
        if "state" not in value or (value["state"] is None and (value["epoch"] or value["batches"])):
            found.append(_mismatch("state.dataset.state", "the loader's own state", "nothing", _OTHER))
        found.extend(_generator_problems(self._generators, value.get("generators"), "generators"))
        return found

    def write(self, saved: Any) -> Undo:
        """Give the loader its state; it moves when the batches are asked for."""
        before = copied(self.capture()).value

        def take(value: dict[str, Any]) -> None:
            state = value["state"]
            self._loader.load_state_dict({} if state is None else copied(state))
            self._run += 1
            self._epoch, self._batches = value["epoch"], value["batches"]
            self._drawing, self._drawn = self._epoch, self._batches
            self._iterator, self._loaded = None, state
            self._deliveries.waiting.clear()
            _set_generators(self._generators, value["generators"])

        try:
            take(copied(saved).value)
        except Exception:
            take(before)
            raise
        return lambda: take(before)


_OTHER = "attach the loader that the state was captured from, or leave dataset out with components="


def _capture_order(generators: dict[str, torch.Generator]) -> Opaque:
    states = {name: generator.get_state() for name, generator in generators.items()}
    return Opaque({"streams": capture_streams(), "generators": states})


def _restore_order(order: Opaque, generators: dict[str, torch.Generator]) -> None:
    restore_streams(order.value["streams"])
    _set_generators(generators, order.value["generators"])


def _generators_of(loader: Any) -> dict[str, torch.Generator]:
    """The torch generators that a loader and its samplers hold, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = {
        "loader": loader,
        "sampler": getattr(loader, "sampler", None),
        "batch_sampler": batch_sampler,
        "batch_sampler.sampler": getattr(batch_sampler, "sampler", None),
    }
    found: dict[str, torch.Generator] = {}
    for name, owner in owners.items():
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is known for known in found.values()):
            found[name] = generator
    return found


def _set_generators(generators: dict[str, torch.Generator], states: Generators) -> None:
    for name, generator in generators.items():
        generator.set_state(states[name].cpu())


def _generator_problems(generators: dict[str, torch.Generator], saved: Any, where: str) -> list[TrainfoldError]:
    if not isinstance(saved, dict) or set(saved) != set(generators):
        names = sorted(saved) if isinstance(saved, dict) else saved
        mend = "give the loader and its samplers generators as they had"
        return [_mismatch(f"state.dataset.{where}", f"those of {sorted(generators)}", names, mend)]
    found: list[TrainfoldError] = []
    for name, generator in generators.items():
        try:
            torch.Generator(generator.device).set_state(saved[name].cpu())
        except (RuntimeError, TypeError, AttributeError) as error:
            found.append(_mismatch(f"state.dataset.{where}[{name!r}]", "a generator's state", str(error), _OTHER))
    return found


def _position_problems(saved: Any, kind: str, counters: tuple[str, ...]) -> list[TrainfoldError]:
    value = saved.value if isinstance(saved, Opaque) else None
    if not isinstance(value, dict) or value.get("kind") != kind:
        held = value.get("kind") if isinstance(value, dict) else type(saved).__qualname__
        return [_mismatch("state.dataset", f"the position of a {kind!r} loader", held, _OTHER)]
    if value.get("version") != VERSION:
        mend = "resume with the trainfold that wrote it"
        return [_mismatch("state.dataset.version", VERSION, value.get("version"), mend)]
    return [
        _mismatch(f"state.dataset.{name}", "an int >= 0", repr(value.get(name)), "use another checkpoint")
        for name in counters
        if type(value.get(name)) is not int or value[name] < 0
    ]


def _set_epoch(loader: Any, epoch: int) -> None:
    """Tell every sampler that wants to know, as a ``DistributedSampler`` does, and the dataset."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    told: list[Any] = []
    for owner in (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    ):
        set_epoch = getattr(owner, "set_epoch", None)
        if callable(set_epoch) and not any(owner is known for known in told):
            told.append(owner)
            set_epoch(epoch)


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _not_none(value: Any) -> Any:
    assert value is not None
    return value


def _stale() -> InvalidState:
    return InvalidState(
        "live.batches",
        expected="one iteration at a time",
        found="one that another iteration or a restore has replaced",
        mend="leave this loop and call live.batches() again",
    )


def _mismatch(where: str, expected: object, found: object, mend: str) -> DataPositionMismatch:
    return DataPositionMismatch(where, expected=expected, found=found, mend=mend)
