"""Ranks that evaluate in step: as many forward calls on each, for a forward that itself communicates (Q05)."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument, RankFailed, RanksDisagree
from trainfold.core.scalars import shown
from trainfold.core.suite import Suite, Tally, no_tally, observe
from trainfold.core.world import Collectives

Forward = Callable[[Any], Mapping[str, Any]]
L = TypeVar("L")  # what a rank keeps
T = TypeVar("T")  # what it tells
_NOTHING: Any = object()


@final
@attrs.frozen
class Share:
    """What one rank evaluates.

    Attributes:
        forward: a batch to the arguments of metrics.
        suite: the metrics.
        batches: an iterator over this rank's.
    """

    forward: Forward
    suite: Suite
    batches: Iterator[Any]


def everywhere(ranks: Collectives, work: Callable[[], tuple[L, T]]) -> tuple[L, list[T]]:
    """Work that each rank does alone: what it keeps, and what every rank told; if one failed, every rank raises.

    Raises:
        RankFailed: on the ranks that did not fail; the failed one raises its own error.
    """
    mine: tuple[L, T] | None = None
    failure: Exception | None = None
    try:
        mine = work()
    except Exception as error:  # noqa: BLE001 raised below, when the other ranks know
        failure = error
    except BaseException as error:
        ranks.fail(error)
        raise
    told = ranks.gather((mine and mine[1], failure and f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        raise failure
    failed = {rank: error for rank, (_, error) in enumerate(told) if error is not None}
    if failed or mine is None:
        raise RankFailed(
            f"rank {min(failed)}",
            expected="every rank to evaluate its batches",
            found="; ".join(f"rank {rank}: {error}" for rank, error in failed.items()),
            mend="mend that rank; no rank has a result",
        )
    return mine[0], [report for report, _ in told if report is not None]


def tally_of(share: Share) -> Tally:
    """What a rank sees that need not wait for others."""
    tally = no_tally(share.suite)
    for batch in share.batches:
        tally = observe(share.suite, tally, share.forward(batch))
    return tally


def tally_in_step(
    begin: Callable[[], Share], ranks: Collectives, *, steps: int
) -> tuple[Share, Tally, bool, Exception | None]:
    """What a rank sees in ``steps`` forward calls; those that it has no batch for repeat one and are not counted.

    Args:
        begin: opens this rank's share.
        ranks: the ranks, each of which calls this.
        steps: how many calls, the same on every rank.

    Returns:
        The share, its tally, whether the last call was for a batch of this rank, and an error to raise when all ranks are done:
        of a loader or a metric, after which this rank went on calling so that no other one waits in vain.
    """
    (share, batch), told = everywhere(ranks, lambda: _first(begin, steps))
    dummy = _dummy(batch, told, ranks)
    tally, failure = no_tally(share.suite), None
    for index in range(steps if any(has for _, has in told) else 0):
        outputs = _communicating(share.forward, dummy if batch is _NOTHING else batch, ranks)
        if batch is _NOTHING:
            continue
        dummy = batch
        try:
            tally = observe(share.suite, tally, outputs)
            if index + 1 < steps:
                batch = next(share.batches, _NOTHING)
        except Exception as error:  # noqa: BLE001 the other ranks still need this one's forward calls
            batch, failure = _NOTHING, error
    return share, tally, batch is not _NOTHING, failure


def has_more(share: Share) -> bool:
    """Whether there is a batch that was not asked for; it is taken."""
    return next(share.batches, _NOTHING) is not _NOTHING


def _first(begin: Callable[[], Share], steps: int) -> tuple[tuple[Share, Any], tuple[int, bool]]:
    """The first batch, before anybody communicates in a forward; the others are told whether there is one."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise InvalidArgument("steps", expected="a number of calls, >= 1", found=shown(steps), mend="or leave it out")
    share = begin()
    batch = next(share.batches, _NOTHING)
    return (share, batch), (steps, batch is not _NOTHING)


def _dummy(first: Any, told: list[tuple[int, bool]], ranks: Collectives) -> Any:
    """A batch to repeat for a rank that has none; from the first rank that has one."""
    if len({count for count, _ in told}) > 1:
        raise RanksDisagree(
            "steps",
            expected="the same number on every rank",
            found=", ".join(f"rank {rank}: {count}" for rank, (count, _) in enumerate(told)),
            mend="give the largest number of batches that any rank has, as DistributedEvalCursor.steps is",
        )
    having = [rank for rank, (_, has) in enumerate(told) if has]
    if not having or len(having) == ranks.world_size:
        return first
    sent = None
    if ranks.rank == having[0]:
        devices = [leaf.device.type if isinstance(leaf, torch.Tensor) else None for leaf in tree.leaves(first)]
        sent = (tree.map_tensors(torch.Tensor.cpu, first), devices)
    given = ranks.broadcast(sent, source=having[0])
    if first is not _NOTHING or given is None:
        return first
    leaves, structure = tree.flatten(given[0])
    moved = [leaf if device is None else leaf.to(device) for leaf, device in zip(leaves, given[1], strict=True)]
    return tree.unflatten(structure, moved)


def _communicating(forward: Forward, batch: Any, ranks: Collectives) -> Mapping[str, Any]:
    try:
        return forward(batch)
    except BaseException as error:
        ranks.fail(error)  # the others may wait for this rank inside of the model
        raise
