"""`PreparedFeed`: the feed for a loader that wraps a DataLoader, as accelerate's does, and moves batches to a device one batch ahead."""

from collections.abc import Callable, Iterator
from typing import Any, final

from trainfold.adapters.batches.feed import END, OPENED, OTHER, AtPosition, mismatch
from trainfold.adapters.batches.global_sampler import SharedOrder
from trainfold.adapters.components.component import Undo
from trainfold.adapters.loaders.map_style import MapFeed
from trainfold.core.errors import InvalidArgument, TrainfoldError
from trainfold.core.state.state import Opaque


@final
class PreparedFeed(AtPosition):
    """A loader that reads its ``base_dataloader`` ahead of the batches that it yields.

    The loop gets what the outer loader makes of each batch. The position is that of the inner loader, after the batches
    that the loop has received. A resume draws again what the outer loader had drawn ahead.

    Args:
        loader: the outer loader, of one process.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._inner = MapFeed(loader.base_dataloader, sets_epoch=not hasattr(loader, "set_epoch"))
        super().__init__(self._inner)
        self._handed = 0  # batches that the loop has received and not counted
        self._run = 0
        self._iteration = _iteration(loader)
        self._at = 0  # the epoch in which it was read

    @property
    def sure_size(self) -> tuple[int, int] | None:
        """The batches and the samples of each epoch of the inner loader, if they are certain."""
        return self._inner.sure_size

    @property
    def shared_order(self) -> SharedOrder | None:
        """The order of samples that its sampler shares with those of other ranks; None without one."""
        return self._inner.shared_order

    def count_shares(self, shares: int) -> None:
        """Do nothing: it is the loader of one process."""

    def undelivered(self) -> int:
        """How many batches the loop has received and not counted."""
        return self._handed

    def advance(self, samples: int | None) -> int:
        """Count the batches that the loop has received."""
        self.check_samples(samples)
        if samples == 0:
            return 0
        counted = self._inner.consume(self._handed)
        self._handed = 0
        return counted

    def check_samples(self, samples: int | None) -> None:
        """Raise what `advance` would raise."""
        known = self.waiting_samples()
        if samples and known is not None and samples != known and self._handed:
            raise mismatch("advance.samples", f"{known}, those of the batches handed out", samples,
                           "count every sample of each batch, or leave samples= out")  # fmt: skip

    def waiting_samples(self) -> int | None:
        """Samples of the batches that the loop has received and not counted."""
        return self._inner.samples_of(self._handed)

    def drop(self) -> int:
        """Discard the batches handed out but not consumed; return their samples."""
        return self.advance(None)

    def rewind(self) -> None:
        """Return to the position."""
        self._handed = 0
        self._inner.rewind()

    def leave_epoch(self) -> None:
        """Begin the next epoch. The outer loader does not count an epoch that is left early, so its count stays."""
        self._run += 1
        self._handed = 0
        self._iteration, self._at = _iteration(self._loader), self._inner.epoch + 1
        self._inner.leave_epoch()

    def batches(self, *, epochs: int | None, done: Callable[[], bool]) -> Iterator[Any]:
        """What the outer loader makes of the batches of the inner one."""
        self._run += 1
        run = self._run
        self.rewind()
        source = self._inner.batches(epochs=epochs, done=lambda: False)
        is_opened, epoch = False, self._inner.epoch
        while (epochs is None or epoch < epochs) and not done():
            inner = _Epoch(self._loader.base_dataloader, self._inner, source)
            self._iteration, self._at = _iteration(self._loader), epoch
            outer = self._open(inner)
            if not is_opened:
                is_opened = True
                yield OPENED
            for batch in outer:
                self._handed += 1
                yield batch
                if self._run != run or done():
                    return
            if not inner.is_read:
                raise InvalidArgument(
                    "attach.loader", expected="a loader that reads its base_dataloader to the end", found="one that does not",
                    fix="attach the plain DataLoader, and move its batches to the device in the loop",
                )  # fmt: skip
            epoch += 1

    def _open(self, inner: "_Epoch") -> Iterator[Any]:
        """The outer loader's iterator; it takes the inner one at its first batch."""
        own = self._loader.base_dataloader
        self._loader.base_dataloader = inner
        try:
            outer = iter(self._loader)
            first = next(outer, END)
        finally:
            self._loader.base_dataloader = own
        return _with_first(first, outer)

    def contract(self) -> dict[str, Any]:
        """The contract of the inner feed."""
        return self._inner.contract()

    def capture(self) -> Opaque:
        """The position of the inner feed, and the epochs that the outer loader has counted."""
        ended = self._inner.epoch > self._at
        return Opaque({"kind": "prepared", "version": 1, "iteration": self._iteration + int(ended),
                       "inner": self._inner.capture().value})  # fmt: skip

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every reason why this position cannot be taken."""
        value = saved.value if isinstance(saved, Opaque) else None
        if not isinstance(value, dict) or value.get("kind") != "prepared" or value.get("version") != 1:
            return [mismatch("state.dataset", "the position of a loader with a base_dataloader", "another", OTHER)]
        if type(value.get("iteration")) is not int or value["iteration"] < 0:
            return [mismatch("state.dataset.iteration", "an int >= 0", repr(value.get("iteration"))[:80], OTHER)]
        return self._inner.problems(Opaque(value.get("inner")))

    def write(self, saved: Any) -> Undo:
        """Take a position."""
        before = self._iteration, self._at, _iteration(self._loader)
        undo = self._inner.write(Opaque(saved.value["inner"]))
        self._run += 1
        self._handed = 0
        self._iteration, self._at = saved.value["iteration"], self._inner.epoch
        _set_iteration(self._loader, self._iteration)

        def take_back() -> None:
            undo()
            self._iteration, self._at, now = before
            _set_iteration(self._loader, now)

        return take_back


class _Epoch:
    """Stands in for the inner loader: one epoch of it, from the position on."""

    def __init__(self, loader: Any, feed: MapFeed, source: Iterator[Any]) -> None:
        self._loader = loader
        self._feed = feed
        self._source = source
        self.is_read = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._source:
            if batch is OPENED:
                continue
            last = self._feed.ends_here()
            if last:
                self.is_read = True
            yield batch
            if last:
                return


def _with_first(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    if first is not END:
        yield first
        yield from rest


def _iteration(loader: Any) -> int:
    found = getattr(loader, "iteration", 0)
    return found if type(found) is int else 0


def _set_iteration(loader: Any, iteration: int) -> None:
    if hasattr(loader, "iteration"):
        loader.iteration = iteration
