"""`feed_of`: chooses the feed for a loader. A feed knows the loader's position and can return to it.

`MapFeed` reads an ordinary ``DataLoader`` over a map-style dataset. Its position is counted in samples. A resume draws
the same indices again and skips them, so it never reads a skipped sample. `StatefulFeed` reads any iterable with
``state_dict`` and ``load_state_dict``, such as torchdata's ``StatefulDataLoader``. If such a loader's sampler has no state
and would only restart, `MapFeed` reads it instead. If an iterable dataset has no state, a resume draws its batches again
and compares them with the first ones (`Replay`).

Workers (``num_workers > 0``): each batch carries its worker's random streams, as they are after the batch. A resume starts
every worker with its own streams and gives it the batches that it would have had. So random augmentation resumes exactly
if it draws from the streams of torch, numpy or python.

The data probe: a resume inside an epoch draws the last batch again and compares it. So it refuses data that changed behind
the same length; a dataset, sampler or collate that draws from its own generator or counter; and a stream that draws when
its iteration is *started* and does not keep that in its ``state_dict``. For this, `StatefulFeed` asks torchdata's loader for
its state before each batch. If it cannot, it logs that nothing is compared.

Limits: a resume inside an epoch refuses a user's sampler that draws from a *global* stream in the middle of the epoch, not
at its start (`PullWatch`), unless nothing else moves that stream and there are no workers. A dataset or sampler that
changes itself from epoch to epoch needs ``state_dict`` or ``set_epoch``.
"""

from collections.abc import Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from trainfold.adapters.batches.feed import Feed, samplers_of
from trainfold.adapters.batches.global_sampler import GlobalBatchSampler
from trainfold.adapters.components.component import Stateful, kind_of
from trainfold.adapters.loaders.group import FeedGroup
from trainfold.adapters.loaders.iterable import iterates, torchdatas
from trainfold.adapters.loaders.map_style import MapFeed
from trainfold.adapters.loaders.prepared import PreparedFeed
from trainfold.adapters.loaders.stateful import StatefulFeed
from trainfold.core.errors import InvalidArgument
from trainfold.core.printable import with_article


def feeds_of(loader: Any) -> Feed | FeedGroup:
    """The feed for a loader, or for several loaders by name.

    Raises:
        InvalidArgument: as `feed_of`; for names that are not text; or for an empty dict.

    Examples:
        >>> feeds_of({"labelled": DataLoader([1]), "unlabelled": DataLoader([2])}).epoch
        0
    """
    if not isinstance(loader, Mapping):
        return feed_of(loader)
    if not loader or not all(isinstance(name, str) and name for name in loader):
        raise InvalidArgument("attach.loader", expected="loaders by name", found=repr(dict(loader))[:80],
                              fix='pass loader={"labelled": ..., "unlabelled": ...}')  # fmt: skip
    return FeedGroup({name: feed_of(each) for name, each in loader.items()})


def loaders_by_path(loader: Any) -> dict[str, Any]:
    """Each loader by the path that names it. For a prepared loader, it is the inner one, which reads the dataset.

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
        InvalidArgument: if the loader's position cannot be known or followed, or its batches come in no fixed order.

    Examples:
        >>> type(feed_of(DataLoader([1, 2, 3]))).__name__
        'MapFeed'
    """
    if isinstance(getattr(loader, "base_dataloader", None), DataLoader):
        return _prepared(loader)
    if isinstance(getattr(loader, "sampler", None), GlobalBatchSampler):
        raise InvalidArgument(
            "attach.loader",
            expected="a GlobalBatchSampler as batch_sampler=, so that batches are counted over all ranks",
            found="one as sampler=",
            fix="make the loader with batch_sampler=GlobalBatchSampler(...), and leave out batch_size=, shuffle= and sampler=",
        )
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
        raise InvalidArgument(
            "attach.loader",
            expected="in_order=True, so that workers deliver the batches in the order of the samples",
            found="in_order=False",
            fix="make the loader with in_order=True; a position counts samples in their order",
        )
    if iterates(loader) and loader.num_workers > 0 and loader.persistent_workers:
        raise InvalidArgument(
            "attach.loader",
            expected="workers that restart in each epoch, for an iterable dataset",
            found=f"persistent_workers over {with_article(type(loader.dataset).__qualname__)}",
            fix="make the loader with persistent_workers=False: a persistent worker carries what it has read ahead, and its "
            "random streams, into the next epoch, and no state contains them",
        )
    mapped: DataLoader[Any] | None = None
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        mapped = loader
    if mapped is not None and torchdatas(loader):
        _refuse_datasets_read_ahead(mapped)
    if isinstance(loader, Stateful) and hasattr(loader, "__iter__"):
        return StatefulFeed(loader) if mapped is None or not _restarts_sampler(mapped) else _indexed(mapped)
    if mapped is not None:
        return MapFeed(mapped)
    kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
    over = f" over {type(loader.dataset).__qualname__}" if isinstance(loader, DataLoader) else ""
    raise InvalidArgument(
        "attach.loader",
        expected="a DataLoader over a map-style dataset, or an iterable with state_dict and load_state_dict",
        found=f"{with_article(kind)}{over}, whose position cannot be known",
        fix="use torchdata's StatefulDataLoader; or give the dataset __len__ and __getitem__; "
        "or attach without a loader and save the position yourself, under extra=",
    )


def _prepared(loader: Any) -> Feed:
    """The feed for a loader that wraps another one, as ``accelerator.prepare`` returns it."""
    base = loader.base_dataloader
    if getattr(loader, "skip_batches", 0) or getattr(base.batch_sampler, "skip_batches", 0):
        raise InvalidArgument("attach.loader", expected="a prepared loader that begins at its first batch", found="one that skips some of each epoch",
                              fix="attach the loader without skip_first_batches: live.batches() begins at the position of the run")  # fmt: skip
    several = type(loader).__name__ == "DataLoaderDispatcher" or getattr(base.batch_sampler, "num_processes", 1) > 1
    if several or torchdatas(base) or isinstance(base.dataset, IterableDataset):
        raise InvalidArgument(
            "attach.loader",
            expected="a prepared loader of one process, over a DataLoader over a map-style dataset",
            found=f"{with_article(kind_of(loader))} over {with_article(kind_of(base))}"
            + (", of several processes" if several else ""),
            fix="attach the DataLoader that you passed to accelerator.prepare"
            + (", with a DistributedSampler, so that each rank reads its share" if several else "")
            + ", and move its batches to the device in the loop",
        )
    return PreparedFeed(loader)


def _restarts_sampler(loader: "DataLoader[Any]") -> bool:
    """Whether a loader with a state has a sampler without one, and would only restart it to resume.

    Such a sampler may draw its order from a stream each time that it starts; torch's samplers do so at their first index.
    `MapFeed` keeps the streams that it drew from. No sampler is started to find this out, because that may draw as well.
    """
    index = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if _origin(index) == "torchdata":  # its iterators have a state; a batch sampler's contains its sampler's
        inner = getattr(index, "sampler", index)
        known = _origin(inner) == "torchdata" or type(inner) is SequentialSampler
        return not (known or isinstance(inner, Stateful) or isinstance(loader.dataset, Stateful))
    if isinstance(index, Stateful):
        return False
    # a user's class defines its own position; torchdata restarts the sampler and skips
    parts = (index, getattr(index, "sampler", index))
    foreign = any(_origin(part) not in ("torch", "torchdata") for part in parts)
    return torchdatas(loader) or (foreign and not isinstance(loader.dataset, Stateful))


def _refuse_datasets_read_ahead(loader: "DataLoader[Any]") -> None:
    """Refuse persistent workers that would read twice: a user's sampler starts the next epoch at the end of this one."""
    own = [sampler for sampler in samplers_of(loader).values() if _origin(sampler) != "torchdata"]
    if own and loader.num_workers > 0 and loader.persistent_workers and isinstance(loader.dataset, Stateful):
        raise InvalidArgument(
            "attach.loader",
            expected="workers that restart in each epoch, for a sampler and a dataset that both have a state",
            found=f"persistent_workers, {with_article(type(own[0]).__qualname__)} and {with_article(type(loader.dataset).__qualname__)}",
            fix="make the loader with persistent_workers=False",
        )


def _indexed(loader: "DataLoader[Any]") -> Feed:
    """The feed for a loader whose sampler has no state: `MapFeed`, unless the dataset has a state."""
    if not isinstance(loader.dataset, Stateful):
        return MapFeed(loader)
    index = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    order = index.sampler if type(index) is BatchSampler else index
    if type(order) in (SequentialSampler, DistributedSampler):  # their order is the same at each start
        return StatefulFeed(loader)
    raise InvalidArgument(
        "attach.loader",
        expected="a sampler whose position can be known, because the dataset has its own state",
        found=f"{with_article(kind_of(order))} without state_dict, and {with_article(type(loader.dataset).__qualname__)} with one",
        fix="give the sampler state_dict and load_state_dict; or pass batch_size= and shuffle= or sampler= to "
        "StatefulDataLoader instead of batch_sampler=, so that it keeps the order",
    )


def _origin(value: object) -> str:
    return type(value).__module__.split(".")[0]
