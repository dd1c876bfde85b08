"""Loaders of a mutable loop: where they stand, and how they get there again without reading what was read.

`MapFeed` drives an ordinary ``DataLoader`` over a map-style dataset: the position is counted in samples, and a resume
draws the same indices again and skips them, so that no skipped sample is ever read. `StatefulFeed` drives anything with
``state_dict`` and ``load_state_dict``, such as torchdata's ``StatefulDataLoader``.

Limits: worker processes (``num_workers > 0``) have random streams of their own that nobody can capture, so random
augmentation in them is not resumed exactly; a sampler that draws from a *global* stream while the epoch goes on (not
at its start) is not either. Draw from the index, or from a generator that is given to the loader.
"""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trainfold.adapters.feed import Feed
from trainfold.adapters.map_feed import MapFeed
from trainfold.adapters.part import Stateful
from trainfold.adapters.stateful_feed import StatefulFeed
from trainfold.core.errors import InvalidArgument

_TORCH = ("torch", "torchdata")


def feed_of(loader: Any) -> Feed:
    """The feed for a loader.

    Raises:
        InvalidArgument: for a loader whose position nobody knows, or whose batches come in no order.

    Examples:
        >>> type(feed_of(DataLoader([1, 2, 3]))).__name__
        'MapFeed'
    """
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
        raise InvalidArgument(
            "attach.loader",
            expected="in_order=True: with workers, only then do the batches come in the order of the samples",
            found="in_order=False",
            mend="make the loader with in_order=True; a position counts samples in their order",
        )
    mapped: DataLoader[Any] | None = None
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        mapped = loader
    if isinstance(loader, Stateful) and hasattr(loader, "__iter__") and (mapped is None or not _knows_less(mapped)):
        return StatefulFeed(loader)
    if mapped is not None:
        return MapFeed(mapped)
    kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
    over = f" over {type(loader.dataset).__qualname__}" if isinstance(loader, DataLoader) else ""
    raise InvalidArgument(
        "attach.loader",
        expected="a DataLoader over a map-style dataset, or an iterable with state_dict and load_state_dict",
        found=f"a {kind}{over}, whose position cannot be known",
        mend="use torchdata's StatefulDataLoader, or give the dataset __len__ and __getitem__; "
        "or attach without a loader and keep the position yourself under extra=",
    )


def _knows_less(loader: "DataLoader[Any]") -> bool:
    """Whether a loader with a state has a sampler of the user's without one, and would only start it again to resume.

    Such a sampler may draw its order from a stream each time that it is started; `MapFeed` keeps what it drew from.
    """
    own = loader.batch_sampler if type(loader.batch_sampler).__module__.split(".")[0] not in _TORCH else loader.sampler
    foreign = own is not None and type(own).__module__.split(".")[0] not in _TORCH
    return foreign and not isinstance(own, Stateful) and not isinstance(loader.dataset, Stateful)
