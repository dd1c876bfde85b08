"""Loaders of a mutable loop: where they stand, and how they get there again without reading what was read.

`MapFeed` drives an ordinary ``DataLoader`` over a map-style dataset: the position is counted in samples, and a resume
draws the same indices again and skips them, so that no skipped sample is ever read. `StatefulFeed` drives anything with
``state_dict`` and ``load_state_dict``, such as torchdata's ``StatefulDataLoader``; where its sampler has no state, and
could only be started anew, `MapFeed` drives that one too. Batches of an iterable dataset without a state are drawn again
to resume, and compared with those that were drawn (`Replay`).

Workers (``num_workers > 0``): each batch brings the random streams of its worker, as they are after it. A resume starts
every worker with its own streams, and gives it the batches that it would have had. So random augmentation is resumed
exactly, wherever it draws from the streams of torch, numpy and python.

Inside an epoch the last batch is drawn again and compared (the data probe). So data that changed behind the same length
are refused, and so is a dataset, sampler or collate that draws from a generator or a counter of its own, and a stream
that draws when its iteration is *started* and does not keep that in its ``state_dict``. `StatefulFeed` asks torchdata's
loader for its state before each batch for that; where it cannot, it says that nothing is compared.

Limits: a sampler of the user's that draws from a *global* stream while the epoch goes on (not at its start) is refused
inside an epoch (`PullWatch`), unless nothing else moves that stream and there are no workers. A dataset or sampler that
changes itself from epoch to epoch needs ``state_dict`` or ``set_epoch``.
"""

from collections.abc import Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from trainfold.adapters.components.component import Stateful, kind_of
from trainfold.adapters.draws.feed import Feed, samplers_of
from trainfold.adapters.loaders.group import FeedGroup
from trainfold.adapters.loaders.iterable import iterates, torchdatas
from trainfold.adapters.loaders.map_style import MapFeed
from trainfold.adapters.loaders.prepared import PreparedFeed
from trainfold.adapters.loaders.stateful import StatefulFeed
from trainfold.core.errors import InvalidArgument


def feeds_of(loader: Any) -> Feed | FeedGroup:
    """The feed for a loader, or for several by name.

    Raises:
        InvalidArgument: as `feed_of`; or for names that are no text, or none at all.

    Examples:
        >>> feeds_of({"labelled": DataLoader([1]), "unlabelled": DataLoader([2])}).epoch
        0
    """
    if not isinstance(loader, Mapping):
        return feed_of(loader)
    if not loader or not all(isinstance(name, str) and name for name in loader):
        raise InvalidArgument("attach.loader", expected="loaders by name", found=repr(dict(loader))[:80],
                              fix='say loader={"labelled": ..., "unlabelled": ...}')  # fmt: skip
    return FeedGroup({name: feed_of(each) for name, each in loader.items()})


def loaders_by_path(loader: Any) -> dict[str, Any]:
    """Each loader by the path that names it; of a prepared one, the loader that reads the dataset.

    Examples:
        >>> list(loaders_by_path({"labelled": [1]})), loaders_by_path(None)
        (["loader['labelled']"], {})
    """
    if loader is None:
        return {}
    named = (
        {f"loader[{name!r}]": each for name, each in loader.items()}
        if isinstance(loader, Mapping)
        else {"loader": loader}
    )
    return {path: getattr(each, "base_dataloader", each) for path, each in named.items()}


def feed_of(loader: Any) -> Feed:
    """The feed for a loader.

    Raises:
        InvalidArgument: for a loader whose position nobody knows or can follow, or whose batches come in no order.

    Examples:
        >>> type(feed_of(DataLoader([1, 2, 3]))).__name__
        'MapFeed'
    """
    if isinstance(getattr(loader, "base_dataloader", None), DataLoader):
        return _prepared(loader)
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
        raise InvalidArgument(
            "attach.loader",
            expected="in_order=True: with workers, only then do the batches come in the order of the samples",
            found="in_order=False",
            fix="make the loader with in_order=True; a position counts samples in their order",
        )
    if iterates(loader) and loader.num_workers > 0 and loader.persistent_workers:
        raise InvalidArgument(
            "attach.loader",
            expected="workers that are started in each epoch, for an iterable dataset",
            found=f"persistent_workers over a {type(loader.dataset).__qualname__}",
            fix="make the loader with persistent_workers=False: what a worker has read ahead at the end of an epoch, and "
            "its random streams, go into the next epoch, and are in no state",
        )
    mapped: DataLoader[Any] | None = None
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        mapped = loader
    if mapped is not None and torchdatas(loader):
        _refuse_moved_datasets(mapped)
    if isinstance(loader, Stateful) and hasattr(loader, "__iter__"):
        return StatefulFeed(loader) if mapped is None or not _knows_less(mapped) else _indexed(mapped)
    if mapped is not None:
        return MapFeed(mapped)
    kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
    over = f" over {type(loader.dataset).__qualname__}" if isinstance(loader, DataLoader) else ""
    raise InvalidArgument(
        "attach.loader",
        expected="a DataLoader over a map-style dataset, or an iterable with state_dict and load_state_dict",
        found=f"a {kind}{over}, whose position cannot be known",
        fix="use torchdata's StatefulDataLoader, or give the dataset __len__ and __getitem__; "
        "or attach without a loader and keep the position yourself under extra=",
    )


def _prepared(loader: Any) -> Feed:
    """The feed for a loader around another one, as ``accelerator.prepare`` makes it."""
    base = loader.base_dataloader
    several = type(loader).__name__ == "DataLoaderDispatcher" or getattr(base.batch_sampler, "num_processes", 1) > 1
    if several or torchdatas(base) or isinstance(base.dataset, IterableDataset) or getattr(loader, "skip_batches", 0):
        raise InvalidArgument(
            "attach.loader",
            expected="a prepared loader of one process, over a DataLoader over a map-style dataset",
            found=f"a {kind_of(loader)} over a {kind_of(base)}" + (", of several processes" if several else ""),
            fix="attach the DataLoader as it was before accelerator.prepare"
            + (", with a DistributedSampler, so that each rank reads its share" if several else "")
            + ", and move its batches to the device in the loop",
        )
    return PreparedFeed(loader)


def _knows_less(loader: "DataLoader[Any]") -> bool:
    """Whether a loader with a state has a sampler without one, and would only start it again to resume.

    Such a sampler may draw its order from a stream each time that it is started, and a torch one does so when the first
    index is asked for; `MapFeed` keeps what it drew from. No sampler is started to find this out: that may draw too.
    """
    index = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if _origin(index) == "torchdata":  # its iterators have a state; that of a batch sampler has what its sampler has
        inner = getattr(index, "sampler", index)
        known = _origin(inner) == "torchdata" or type(inner) is SequentialSampler
        return not (known or isinstance(inner, Stateful) or isinstance(loader.dataset, Stateful))
    if isinstance(index, Stateful):
        return False
    # the position of a class of the user's is the user's word; torchdata skips in a sampler that is started anew
    parts = (index, getattr(index, "sampler", index))
    foreign = any(_origin(part) not in ("torch", "torchdata") for part in parts)
    return torchdatas(loader) or (foreign and not isinstance(loader.dataset, Stateful))


def _refuse_moved_datasets(loader: "DataLoader[Any]") -> None:
    """At the end of an epoch a sampler of the user's starts the next one, and workers that go on read for it twice."""
    own = [sampler for sampler in samplers_of(loader).values() if _origin(sampler) != "torchdata"]
    if own and loader.num_workers > 0 and loader.persistent_workers and isinstance(loader.dataset, Stateful):
        raise InvalidArgument(
            "attach.loader",
            expected="workers that are started in each epoch, for a sampler and a dataset with a state each",
            found=f"persistent_workers, a {type(own[0]).__qualname__} and a {type(loader.dataset).__qualname__}",
            fix="make the loader with persistent_workers=False",
        )


def _indexed(loader: "DataLoader[Any]") -> Feed:
    """The feed for a loader whose sampler has no state: by index, which is no way for a dataset that has one."""
    if not isinstance(loader.dataset, Stateful):
        return MapFeed(loader)
    index = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    order = index.sampler if type(index) is BatchSampler else index
    if type(order) in (SequentialSampler, DistributedSampler):  # whose order is the same, whenever it is started
        return StatefulFeed(loader)
    raise InvalidArgument(
        "attach.loader",
        expected="a sampler whose position can be known, where the dataset has a state of its own",
        found=f"a {kind_of(order)} without state_dict, and a {type(loader.dataset).__qualname__} with one",
        fix="give the sampler state_dict and load_state_dict, or give StatefulDataLoader batch_size= and shuffle= or "
        "sampler= instead of batch_sampler=: then it keeps the order",
    )


def _origin(value: object) -> str:
    return type(value).__module__.split(".")[0]
