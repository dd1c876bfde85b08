"""`Tap`: wraps the sampler of a DataLoader, to repeat an epoch's order and to skip to a position in it."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainfold.adapters.batches.feed import END, OTHER, generator_problems, length_of, mismatch, set_generators
from trainfold.adapters.batches.global_sampler import GlobalBatchSampler
from trainfold.adapters.batches.loader_extras import KEY, LoaderExtras
from trainfold.adapters.batches.pull_watch import PullWatch
from trainfold.adapters.batches.worker_trace import Empty
from trainfold.adapters.components.component import nothing
from trainfold.adapters.streams.rng_streams import capture_streams, restore_streams, stream_problems
from trainfold.core.errors import DataPositionMismatch, InvalidArgument, TrainfoldError
from trainfold.core.printable import with_article
from trainfold.core.state.state import Opaque


class Tap:
    """Wraps a loader's sampler: captures the streams at the start of an epoch, skips to a position, counts the indices."""

    def __init__(
        self, sampler: Any, generators: dict[str, torch.Generator], extras: LoaderExtras, *, counts: bool
    ) -> None:
        self.sampler = sampler
        self.generators = generators
        self.extras = extras
        self.counts = counts
        self.start: Opaque | None = None  # the streams to start from; None to start from the current ones
        self.skip = 0
        self.seeks = False  # whether to read the first index immediately, while the streams are those of the start
        self.empty = 0  # empty tasks for the workers before the first index
        self.look: Callable[[], None] = nothing  # called when an index has left the sampler
        self.started_from: Opaque | None = None
        self.current: _TapIterator | None = None
        self.watch: PullWatch | None = None  # for a sampler that may draw during the epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> "_TapIterator":
        self.current = _TapIterator(self)
        return self.current


class _TapIterator:
    """One epoch of a sampler, which also reports which index batch is the last.

    If the sampler has a length, it is never read ahead, because it may draw from a stream that the dataset also draws from.
    If it has none, it is read one index batch ahead.
    """

    def __init__(self, tap: Tap) -> None:
        self.tap = tap
        self.indices: Iterator[Any] | None = None
        sampler = tap.sampler
        self.total = sampler.batches_left if isinstance(sampler, GlobalBatchSampler) else length_of(sampler)
        self.given = 0
        self.ahead: list[Any] = []
        self.stopped = False
        self.is_sought = False  # whether the position is reached
        self.is_first = True
        self.at_first: dict[str, Any] = {}  # the components under ``extra``, after a restarted sampler's first index
        self.empty = tap.empty
        self.passed: deque[tuple[int, bool]] = deque()

    def __iter__(self) -> "_TapIterator":
        return self

    def __next__(self) -> Any:
        self.prime()
        if self.stopped:
            raise StopIteration
        if self.empty:
            self.empty -= 1
            return Empty()
        item = self.ahead.pop() if self.ahead else self._pull()
        if item is END:
            raise StopIteration
        self.given += 1
        if self.total is None or self.given >= self.total:
            self.ahead.append(self._pull())
        self.passed.append((self._size(item), self.ahead == [END]))
        self.tap.look()
        return item

    def prime(self) -> None:
        """Start the sampler if it has not started. This must not happen earlier, because some samplers draw the epoch's order from a stream."""
        if self.indices is not None:
            return
        tap = self.tap
        if tap.start is not None:
            restore_order(tap.start, tap.generators, tap.extras)
        tap.started_from = tap.start or capture_order(tap.generators, tap.extras)
        tap.start, skip, tap.skip = None, tap.skip, 0
        self.indices = iter(tap.sampler)
        if not tap.seeks:
            self.is_sought = True
            return
        read, item = 0, self._pull()
        self.at_first = tap.extras.at_start()
        while read < skip and item is not END:
            read, self.given = read + self._size(item), self.given + 1
            item = self._pull()
        if read != skip or item is END:
            raise not_between(skip, read, is_end=item is END)
        self.ahead.append(item)
        self.is_sought = True

    def _pull(self) -> Any:
        indices, watch = self.indices, self.tap.watch
        assert indices is not None
        if watch is None or not self.is_sought:
            return next(indices, END)
        first, self.is_first = self.is_first, False
        return watch.pull(lambda: next(indices, END), is_first=first)

    def _size(self, item: Any) -> int:
        return len(item) if self.tap.counts else 1


def unfollowed(loader: Any, found: str) -> InvalidArgument:
    """The error for a loader whose batches do not correspond to the indices from its sampler."""
    workers = "persistent_workers" if getattr(loader, "persistent_workers", False) else ""
    return InvalidArgument(
        "attach.loader",
        expected="a DataLoader whose iterator starts its sampler, and yields one batch for each that the sampler gives",
        found=f"{found}, from {with_article(type(loader).__qualname__)}"
        + (f" with {workers} that may run already" if workers else ""),
        fix="make a new loader and iterate over live.batches() only: persistent_workers keep the order that they "
        "were started with"
        if workers
        else "attach a plain DataLoader and change its batches in the loop over live.batches(), or give the loader "
        "state_dict and load_state_dict",
    )


def not_between(samples: int, read: int, *, is_end: bool) -> DataPositionMismatch:
    """The error for a position inside a batch, or at or past the end of the epoch."""
    return mismatch(
        "state.dataset.samples",
        "a position between two batches of this epoch",
        f"{samples}, where batches end at {read}" + (" and so does the epoch" if is_end else ""),
        "use a batch size that divides the position, and the dataset and sampler that the run was started with",
    )


def capture_order(generators: dict[str, torch.Generator], extras: LoaderExtras | None = None) -> Opaque:
    """Capture everything that the order of an epoch may be drawn from."""
    states = {name: generator.get_state() for name, generator in generators.items()}
    found = {"streams": capture_streams(), "generators": states}
    held = {} if extras is None else extras.at_start()
    return Opaque({**found, KEY: held} if held else found)


def restore_order(order: Opaque, generators: dict[str, torch.Generator], extras: LoaderExtras | None = None) -> None:
    """Put back what `capture_order` captured."""
    if extras is not None:
        extras.write(order.value.get(KEY, {}))
    restore_streams(order.value["streams"])
    set_generators(generators, order.value["generators"])


def order_problems(
    order: Any,
    generators: dict[str, torch.Generator],
    extras: LoaderExtras | None = None,
    *,
    where: str = "state.dataset.order",
) -> list[TrainfoldError]:
    """List every reason why a captured order cannot be put back."""
    if not isinstance(order, dict) or "streams" not in order:
        return [mismatch(where, "what the epoch's order was drawn from", "nothing", OTHER)]
    return [
        *stream_problems(order["streams"], path=f"{where}.streams"),
        *generator_problems(generators, order.get("generators"), f"{where}.generators"),
        *([] if extras is None else extras.problems(order.get(KEY, {}), where=f"{where}.{KEY}")),
    ]
