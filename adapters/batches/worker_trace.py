"""`WorkerTrace`: travels into a loader's workers and reports, with each batch, the state of their random streams.

It replaces the loader's ``collate_fn`` and ``worker_init_fn`` and calls them. It draws no random numbers, so the samples are
the same as without it.
"""

from collections.abc import Callable, Mapping
from typing import Any, final

import attrs
from torch.utils.data import get_worker_info

from trainfold.adapters.batches.batch_digest import batch_digests, batch_kind
from trainfold.adapters.streams.stream_reader import StreamReader, Streams, set_streams


@final
@attrs.frozen
class Report:
    """The report that comes with a batch.

    Attributes:
        worker: the worker that made the batch.
        moved: the worker's streams that the batch moved, as they are after it.
        digest: the digest of the batch; None for an empty task, which has no batch.
        samples: the number of samples; None if it is not known.
        kind: a short description of the batch.
        logged: the digest for a flight log.
    """

    worker: int
    moved: Streams
    digest: str | None
    samples: int | None = None
    kind: str = ""
    logged: str = ""


@final
class Empty(list[Any]):
    """The index of an empty task: it uses up a worker's turn, and no sample is read for it."""


class SkippingDataset:
    """A dataset that reads nothing for an empty task. The user's code in a worker sees the original dataset."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: Any) -> Any:
        return index if isinstance(index, Empty) else self.inner[index]


@final
class SkippingBatches(SkippingDataset):
    """A `SkippingDataset` for a dataset that reads whole batches."""

    def __getitems__(self, indices: Any) -> Any:
        return indices if isinstance(indices, Empty) else self.inner.__getitems__(indices)


def skipping(dataset: Any, *, batches: bool) -> Any:
    """A dataset that accepts `Empty` as an index; the dataset itself if an empty list of indices reads nothing from it.

    Examples:
        >>> skipping([1, 2], batches=True)
        [1, 2]
        >>> skipping([1, 2], batches=False)[Empty()]
        []
    """
    if callable(getattr(dataset, "__getitems__", None)):
        return SkippingBatches(dataset)
    return dataset if batches else SkippingDataset(dataset)


@final
class WorkerTrace:
    """Starts each worker with its own streams, and reports them.

    Args:
        collate: the loader's own ``collate_fn``.
        init: the loader's own ``worker_init_fn``, or None.
        starts: worker -> the streams that it starts with; omitted streams stay as the worker was seeded.
        empty: workers below this number get an empty task first.
        afters: worker whose first batch is only compared -> the streams that it continues with after that batch.
        counts: whether ``collate`` is called with a list of samples.
        is_logged: whether the batches are digested for a flight log.
    """

    def __init__(  # noqa: PLR0913 - keywords
        self,
        collate: Callable[[Any], Any],
        init: Callable[[int], Any] | None,
        *,
        starts: Mapping[int, Streams],
        empty: int = 0,
        afters: Mapping[int, Streams] | None = None,
        counts: bool = False,
        is_logged: bool = False,
    ) -> None:
        self._collate = collate
        self._init = init
        self._starts = starts
        self._empty = empty
        self._afters = dict(afters or {})
        self._counts = counts
        self._is_logged = is_logged
        self._worker = -1
        self._reader: StreamReader | None = None
        self._seeded: Streams = {}

    def start(self, worker: int) -> None:
        """Call the loader's ``worker_init_fn``, then set the worker's streams."""
        info: Any = get_worker_info()
        if info is not None and isinstance(info.dataset, SkippingDataset):
            object.__setattr__(info, "dataset", info.dataset.inner)  # the class is frozen, and the user's code reads it
        if self._init is not None:
            self._init(worker)
        self._worker = worker
        if worker in self._afters:
            self._seeded = StreamReader().streams
        set_streams(self._starts.get(worker, {}))
        self._reader = StreamReader()

    def collate(self, samples: Any) -> tuple[Any, Report]:
        """Call the loader's ``collate_fn`` and make a report."""
        assert self._reader is not None, "a worker starts before it collates"
        if self._worker < self._empty:
            self._empty = 0
            return None, Report(self._worker, {}, None)
        size = len(samples) if self._counts else None
        batch = self._collate(samples)
        digest, logged = batch_digests(batch, is_logged=self._is_logged)
        kind = batch_kind(batch)
        after = self._afters.pop(self._worker, None)
        if after is None:
            return batch, Report(self._worker, self._reader.moved(), digest, size, kind, logged)
        set_streams({**self._seeded, **after})
        self._seeded = {}
        self._reader = StreamReader()
        return batch, Report(self._worker, {}, digest, size, kind)
