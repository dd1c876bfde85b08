"""`Drawer`: draws batches from a DataLoader and records how each was drawn; the loader itself does not change."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from trainfold.adapters.batches.batch_digest import batch_digests, batch_kind
from trainfold.adapters.batches.draws import Drawn, Draws
from trainfold.adapters.batches.feed import END
from trainfold.adapters.batches.loader_extras import KEY, LoaderExtras
from trainfold.adapters.batches.worker_trace import WorkerTrace, skipping
from trainfold.adapters.streams.rng_streams import preserved_rng
from trainfold.adapters.streams.stream_reader import StreamReader, Streams, set_streams
from trainfold.core.errors import InvalidArgument
from trainfold.core.printable import with_article


@final
class Watch:
    """Reads the streams of this process, and the components under ``extra``, when an index leaves the sampler.

    It has no reference to a loader, because a sampler's tap references it: a loader in a cycle would keep its workers until
    a collection.
    """

    def __init__(self, extras: LoaderExtras) -> None:
        self.extras = extras
        self.reader: StreamReader | None = None  # None if workers draw
        self.before: Streams = {}
        self.put_back: dict[str, Any] = {}  # the components under ``extra``, before a batch is drawn again
        self.again: deque[Streams] = deque()  # for batches to draw again: the streams that they were drawn with

    def look(self) -> None:
        """Read the streams; from here on only the dataset and the collate function can move them."""
        if self.reader is None:
            return
        held = self.extras.now()
        if self.again:
            self.put_back, again = held, self.again.popleft()
            held = again.get(KEY, {})
            self.extras.write(held)
            set_streams(again)
        self.reader.moved()
        self.before = {**self.reader.streams, KEY: held} if held else self.reader.streams


@final
class Drawer:
    """The iterators of a loader.

    Args:
        loader: the loader; some of its attributes are replaced while an iterator is made, and then put back.
        extras: the components under ``extra`` that its batches may be drawn from.
        draws: the record of what is consumed.
    """

    def __init__(self, loader: "DataLoader[Any]", extras: LoaderExtras, draws: Draws) -> None:
        self._loader = loader
        self._draws = draws
        self.watch = Watch(extras)
        self.knows_that_streams_move = False

    def open(self, trace: WorkerTrace | None, others: Mapping[str, Any]) -> Iterator[Any]:
        """Make an iterator.

        Args:
            trace: the trace for new workers; None if none are started.
            others: more attributes of the loader to replace.

        Raises:
            InvalidArgument: if the loader makes its own class of iterator over workers.
        """
        loader = self._loader
        now: dict[str, Any] = dict(others)
        if trace is not None:
            now["collate_fn"] = trace.collate
            now["worker_init_fn"] = trace.start
            now["dataset"] = skipping(loader.dataset, batches=loader.batch_sampler is not None)
        with replaced(loader, now):
            iterator: Iterator[Any] = iter(loader)
        if trace is not None and type(iterator).__module__.split(".")[0] not in ("torch", "torchdata"):
            raise unpaired(loader, f"{with_article(type(iterator).__qualname__)}")
        self.watch.reader = StreamReader() if loader.num_workers == 0 else None
        return iterator

    def draw(self, iterator: Iterator[Any]) -> Any:
        """The next batch and its `Drawn`, or `END`."""
        reader = self.watch.reader
        if reader is None:
            made: Any = next(iterator, END)
            while made is not END and made[1].digest is None:
                made = next(iterator, END)
            return END if made is END else (made[0], Drawn.by_worker(made[1]))
        if not self.watch.again:
            return self._draw_here(iterator, reader)
        with streams_put_back():
            try:
                return self._draw_here(iterator, reader)
            finally:
                self.watch.extras.write(self.watch.put_back)
                self.watch.put_back = {}

    def _draw_here(self, iterator: Iterator[Any], reader: StreamReader) -> Any:
        batch = next(iterator, END)
        if batch is END:
            return END
        moved: Streams = {} if self.knows_that_streams_move else reader.moved()
        self.knows_that_streams_move = self.knows_that_streams_move or bool(moved)
        digest, logged = batch_digests(batch, is_logged=self._draws.is_logged)
        return batch, Drawn(None, digest, moved, self.watch.before, batch_kind(batch), logged)


@contextmanager
def replaced(loader: "DataLoader[Any]", values: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes of a loader during a block; a DataLoader does not allow setting them directly.

    Examples:
        >>> loader = DataLoader([1])
        >>> with replaced(loader, {"dataset": [2]}):
        ...     loader.dataset
        [2]
        >>> loader.dataset
        [1]
    """
    own = {name: vars(loader)[name] for name in values}
    vars(loader).update(values)
    try:
        yield
    finally:
        vars(loader).update(own)


def unpaired(loader: Any, found: str) -> InvalidArgument:
    """The error for a loader that may change its workers' batches, and so the reports that come with them."""
    return InvalidArgument(
        "attach.loader",
        expected="a loader with workers that yields their batches unchanged",
        found=f"{with_article(type(loader).__qualname__)}, whose __iter__ returns {found}",
        fix="attach a plain DataLoader and change its batches in the loop over live.batches(), or num_workers=0",
    )


@contextmanager
def streams_put_back() -> Iterator[None]:
    """Run a block and put every stream back afterwards, including those of the GPUs."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        with preserved_rng():
            yield
    finally:
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)
