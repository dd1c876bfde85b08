"""`GlobalBatchSampler`: a batch sampler for torch's loaders whose position is counted over all ranks; `SharedOrder`: what it and torch's have in common."""

import os
from collections.abc import Iterator, Sized
from typing import Any, final

import attrs
import torch
from torch.utils.data import DistributedSampler, Sampler

from trainfold.backends.ranks.launcher import ranks_around
from trainfold.core.checks import count
from trainfold.core.data.global_batches import global_batches
from trainfold.core.data.permutation import sample_order
from trainfold.core.errors import InvalidArgument


@final
class GlobalBatchSampler(Sampler[list[int]]):
    """Batches of all ranks together, of which each rank reads its share: pass it to a ``DataLoader`` as ``batch_sampler=``.

    Law: however often the number of ranks and the batch size change, each sample of an epoch is read exactly once. No sample is repeated
    to make shares equal, and none is left out, except with ``drop_last``. Every rank has as many batches as the others.

    The order of an epoch is a function of the seed, the epoch and the length: it draws from no random stream, and takes no memory.

    Shares differ by at most one sample if the batch size is not a multiple of the number of replicas, and in the last batch of an epoch. If fewer
    samples than replicas would be left for the last batch, the one before it takes them.

    Args:
        dataset: of which ``len()`` is taken; at least one sample for each replica.
        batch_size: samples in a batch, over all replicas.
        seed: of the order, in [0, 2**64); the same on every rank.
        shuffle: whether the order is random.
        drop_last: whether the samples after the last whole batch of an epoch are left out.
        rank: the data-parallel coordinate of this process. Ranks that share data, such as those of a tensor-parallel group, have the same.
            None for the rank in ``torch.distributed``.
        replicas: the number of data-parallel replicas. None for the world size of ``torch.distributed``.

    Raises:
        InvalidArgument: naming the argument; also if there are several ranks and they are not known yet.

    Examples:
        >>> samplers = [GlobalBatchSampler(range(7), 4, shuffle=False, rank=rank, replicas=2) for rank in range(2)]
        >>> [list(sampler) for sampler in samplers]
        [[[0, 1], [4, 5]], [[2, 3], [6]]]
        >>> len(torch.utils.data.DataLoader(range(7), batch_sampler=samplers[0]))
        2
    """

    def __init__(  # noqa: PLR0913 - keywords
        self,
        dataset: Sized,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int | None = None,
        replicas: int | None = None,
    ) -> None:
        rank, replicas = _coordinates(rank, replicas)
        self.batches = global_batches(len(dataset), batch_size, replicas=replicas, drop_last=drop_last)
        self.rank = count("GlobalBatchSampler.rank", rank, least=0, below=replicas, fix="count replicas from 0")
        self.seed = count("GlobalBatchSampler.seed", seed, least=0, below=2**64, fix="pass a seed in range")
        self.shuffle = bool(shuffle)
        self.epoch = 0
        self.start = 0

    def __repr__(self) -> str:
        """The batches and this rank's share of them."""
        order = f"seed {self.seed}" if self.shuffle else "in order"
        return f"<GlobalBatchSampler: {self.batches.length} samples in batches of {self.batch_size}, {order}; share {self.rank} of {self.replicas}>"

    @property
    def batch_size(self) -> int:
        """Samples in a batch, over all replicas."""
        return self.batches.batch_size

    @property
    def replicas(self) -> int:
        """The number of data-parallel replicas."""
        return self.batches.replicas

    @property
    def drop_last(self) -> bool:
        """Whether the samples after the last whole batch of an epoch are left out."""
        return self.batches.drop_last

    @property
    def batches_left(self) -> int:
        """The number of batches that the next iteration yields."""
        return self.batches.count(self.start)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin at the start of an epoch; ``live.batches()`` calls this."""
        self.epoch, self.start = epoch, 0

    def seek(self, start: int) -> None:
        """Let the next iteration begin at a position of the epoch, in samples over all ranks; ``live.batches()`` calls this."""
        self.start = start

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return self.batches.count()

    def __iter__(self) -> Iterator[list[int]]:
        batches, start = self.batches, self.start
        order = sample_order(self.seed, self.epoch, batches.length) if self.shuffle else None
        while positions := batches.positions(start):
            share, start = batches.share(positions, self.rank), positions.stop
            yield list(share) if order is None else order[share].tolist()


@final
@attrs.frozen
class SharedOrder:
    """The order of samples of which each rank reads a share; all ranks have the same, or they read samples twice and never.

    Attributes:
        order: what the order is a function of, as text.
        share: the share of this rank.
        shares: how many there are.
    """

    order: str
    share: int
    shares: int


def shared_order(loader: Any) -> SharedOrder | None:
    """The order that a loader shares with those of other ranks; None if its sampler has no shares.

    Examples:
        >>> shared_order(torch.utils.data.DataLoader(range(7), batch_sampler=GlobalBatchSampler(range(7), 4, rank=1, replicas=2)))
        SharedOrder(order='7 samples, batch_size=4, drop_last=False, seed=0', share=1, shares=2)
    """
    outer, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    if isinstance(outer, GlobalBatchSampler):
        samples = f"{outer.batches.length} samples, batch_size={outer.batch_size}"
        return SharedOrder(_order(samples, outer), outer.rank, outer.replicas)
    is_torchs = type(sampler).__module__.split(".")[0] in ("torch", "torchdata")
    if isinstance(sampler, DistributedSampler) and is_torchs:
        data: Any = sampler.dataset
        return SharedOrder(_order(f"{len(data)} samples", sampler), sampler.rank, sampler.num_replicas)
    return None


def _order(samples: str, sampler: "GlobalBatchSampler | DistributedSampler[Any]") -> str:
    seed = f"seed={sampler.seed}" if sampler.shuffle else "shuffle=False"
    return f"{samples}, drop_last={sampler.drop_last}, {seed}"


def _coordinates(rank: int | None, replicas: int | None) -> tuple[int, int]:
    if rank is not None and replicas is not None:
        return rank, count("GlobalBatchSampler.replicas", replicas, fix="pass the number of data-parallel replicas")
    if (rank is None) != (replicas is None):
        raise InvalidArgument("GlobalBatchSampler", expected="both rank= and replicas=, or neither", found=f"rank={rank}, replicas={replicas}",
                              fix="pass both")  # fmt: skip
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    others = ranks_around(os.environ)
    if others is not None:
        raise InvalidArgument("GlobalBatchSampler", expected=f"the rank and the number of replicas, because there is {others}", found="neither",
                              fix="make it after torch.distributed.init_process_group(); or pass rank= and replicas=")  # fmt: skip
    return 0, 1
