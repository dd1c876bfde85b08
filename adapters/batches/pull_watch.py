"""`PullWatch`: watches what a sampler draws from the global random streams; an order drawn during an epoch cannot be drawn again."""

import logging
from collections.abc import Callable
from typing import Any, final

from torch.utils.data import DataLoader, IterableDataset

from trainfold.adapters.batches.feed import length_of, mismatch
from trainfold.adapters.batches.global_sampler import GlobalBatchSampler
from trainfold.adapters.streams.stream_reader import StreamReader
from trainfold.core.errors import TrainfoldError

_LOG = logging.getLogger("trainfold")
_CURE = (
    "draw the whole order at the start of the sampler's __iter__, or draw from a generator that is seeded there; or resume from the end "
    "of an epoch"
)


@final
class PullWatch:
    """Reads the global streams before and after each index that the sampler gives.

    A resume restarts the sampler with the streams from the start of the epoch, so what it draws at its start is drawn again.
    What it draws later comes from streams that the training has moved meanwhile; with workers, it is drawn ahead of the training.

    Args:
        kind: the name of the sampler's class.
        is_ahead: whether indices are read ahead of the training, because there are loader workers.
    """

    def __init__(self, kind: str, *, is_ahead: bool) -> None:
        self._kind = kind
        self._is_ahead = is_ahead
        self._reader = StreamReader()
        self._own: set[str] = set()
        self._of_others: set[str] = set()
        self._has_warned = False

    @property
    def late(self) -> list[str]:
        """The streams that prevent a resume inside an epoch."""
        return sorted(self._own if self._is_ahead else self._own & self._of_others)

    def pull(self, ask: Callable[[], Any], *, is_first: bool) -> Any:
        """Get an index.

        Args:
            ask: gets it from the sampler.
            is_first: whether the sampler has just been started, so that it may still draw its order.
        """
        of_others = self._reader.moved()
        item = ask()
        own = self._reader.moved()
        if not is_first:
            self._of_others.update(of_others)
            self._own.update(own)
            if self.late and not self._has_warned:
                self._has_warned = True
                _LOG.warning(
                    "the sampler %s draws from the global random streams of %s during an epoch, and so does the training or the "
                    "dataset, or loader workers read ahead of them. A resume inside an epoch could not draw the same order again, and will "
                    "be refused: %s",
                    self._kind,
                    ", ".join(self.late),
                    _CURE,
                )
        return item


def late_order_problems(saved: Any) -> list[TrainfoldError]:
    """Refuse a position inside an epoch whose order cannot be drawn again."""
    if not saved:
        return []
    found = ", ".join(map(str, saved))[:80] if isinstance(saved, list) else repr(saved)[:80]
    return [
        mismatch(
            "state.dataset.late",
            "an order that the sampler draws when the epoch begins",
            f"one that it drew from the global random streams of {found} during the epoch",
            _CURE,
        )
    ]


def is_foreign(loader: Any) -> bool:
    """Whether a sampler of a loader is the user's own class. Torch's samplers draw at their start, or from their own generators.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> is_foreign(DataLoader([1])), is_foreign(DataLoader([1], sampler=[0]))
        (False, True)
    """
    outer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if isinstance(outer, GlobalBatchSampler):
        return False
    parts = (outer, getattr(outer, "sampler", outer))
    return any(type(part).__module__.split(".")[0] not in ("torch", "torchdata") for part in parts)


def sure_size(loader: Any) -> tuple[int, int] | None:
    """The batches and the samples of each epoch, if the loader and its samplers are torch's, torchdata's or ours; others may end anywhere.

    Examples:
        >>> sure_size(DataLoader([1, 2, 3], batch_size=2)), sure_size(DataLoader([1, 2], sampler=[0])), sure_size([1])
        ((2, 3), None, None)
    """
    is_known = isinstance(loader, DataLoader) and type(loader).__module__.split(".")[0] in ("torch", "torchdata")
    if not is_known or isinstance(loader.dataset, IterableDataset) or is_foreign(loader):
        return None
    batches, samples = length_of(loader), length_of(loader.sampler)
    return None if batches is None else (batches, samples or 0)
