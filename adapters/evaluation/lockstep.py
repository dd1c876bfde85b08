"""Ranks in lockstep: the same number of forward calls on every rank, for a forward that itself communicates."""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NoReturn, TypeVar, final

import attrs
import numpy as np
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument, error_text, rank_failed
from trainfold.core.evaluate.suite import Suite, Tally, no_tally, observe
from trainfold.core.layout.world import Collectives

Forward = Callable[[Any], Mapping[str, Any]]
L = TypeVar("L")  # what a rank keeps
T = TypeVar("T")  # what it sends to the others
NOTHING: Any = object()


@final
class Ahead:
    """An iterator that looks one batch ahead, and keeps no other batch.

    Attributes:
        batch: the next batch, or NOTHING.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self.move()

    def move(self) -> None:
        """Advance to the next batch."""
        self.batch = NOTHING
        self.batch = next(self._batches, NOTHING)


@final
@attrs.frozen
class Share:
    """What one rank evaluates.

    Attributes:
        forward: maps a batch to the arguments of metrics.
        suite: the metrics.
        batches: the batches of this rank.
    """

    forward: Forward
    suite: Suite
    batches: Ahead


@final
@attrs.frozen
class Seen:
    """What a rank has seen.

    Attributes:
        tally: the tally of its own batches.
        has_more: whether it has batches left.
        failure: the error of its loader or of a metric; the rank kept calling forward, so that no other rank waited in vain.
    """

    tally: Tally
    has_more: bool
    failure: Exception | None


@final
class Agreed(Exception):
    """An error that every rank knows of; each raises its own, and the collectives remain usable."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def everywhere(ranks: Collectives, work: Callable[[], tuple[L, T]]) -> tuple[L, list[T]]:
    """Run work that each rank does alone; return what this rank keeps and what every rank sent. If one failed, every rank raises.

    Raises:
        Agreed: with a `RankFailed` on the ranks that did not fail, and with its own error on the one that did.
    """
    mine: tuple[L, T] | None = None
    failure: Exception | None = None
    try:
        try:
            mine = work()
        except Exception as error:  # noqa: BLE001 raised below, after the other ranks know
            failure = error
        sent = ranks.gather((mine and mine[1], failure and error_text(failure)), doing="evaluate its batches")
        if failure is not None:
            raise Agreed(failure)
    finally:
        del failure  # it references this frame, which references it: together they would keep all batches alive
    failed = {rank: error for rank, (_, error) in enumerate(sent) if error is not None}
    if failed or mine is None:
        found = "; ".join(f"rank {rank}: {error}" for rank, error in failed.items())
        raise Agreed(
            rank_failed(
                min(failed),
                expected="every rank to evaluate its batches",
                found=found,
                fix="fix that rank; no rank has a result",
            )
        )
    return mine[0], [report for report, _ in sent if report is not None]


def raise_again(error: Exception) -> NoReturn:
    """Raise an error caught before, with its own context. The caller has to release its reference as well."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context  # not the error being handled here
        del error, context  # it references this frame


def see_alone(share: Share) -> Seen:
    """Evaluate the batches of a rank that need not wait for others."""
    tally, ahead = no_tally(share.suite), share.batches
    while ahead.batch is not NOTHING:
        tally = observe(share.suite, tally, share.forward(ahead.batch))
        ahead.move()
    return Seen(tally, has_more=False, failure=None)


def see_in_step(share: Share, ranks: Collectives, *, steps: int | None, having: list[bool]) -> Seen:
    """Evaluate with the same number of forward calls on every rank; a call without a batch of its own repeats one and is not counted.

    Args:
        share: what this rank evaluates.
        ranks: the ranks, each of which calls this.
        steps: the number of calls, the same on every rank; None to ask all ranks before each call whether any has a batch.
        having: which ranks have a first batch.

    Raises:
        BaseException: from the forward, at once, because the other ranks may be waiting inside the model.
    """
    tally, failure, ahead = no_tally(share.suite), None, share.batches
    dummy = _dummy(ahead.batch, having, ranks)
    try:
        for index in itertools.count():
            if index == steps or not any(having):
                break
            has_batch = ahead.batch is not NOTHING and failure is None
            if steps is None and not any(ranks.gather(has_batch, doing="evaluate a batch")):
                break
            dummy = ahead.batch if has_batch else dummy
            outputs = share.forward(_shallow_copy(dummy))  # a forward may remove items from a batch: `batch.pop("y")`
            if not has_batch:
                continue
            try:
                tally = observe(share.suite, tally, outputs)
                ahead.move()
            except Exception as error:  # noqa: BLE001 the other ranks still need this one's forward calls
                failure = error
        return Seen(tally, has_more=ahead.batch is not NOTHING, failure=failure)
    finally:
        del failure  # as in `everywhere`


def _shallow_copy(batch: Any) -> Any:
    """The batch in new containers that share its tensors and arrays."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor | np.ndarray):
            with suppress(Exception):
                return copy.copy(leaf)
        return leaf

    try:
        return tree.map(copied, batch)
    except Exception:  # noqa: BLE001 a container that cannot be rebuilt from its parts
        return batch


def _dummy(first: Any, having: list[bool], ranks: Collectives) -> Any:
    """A batch to repeat for a rank without one, from the first rank that has one."""
    if not any(having) or all(having):
        return first
    source = having.index(True)
    sent = None
    if ranks.rank == source:
        devices = [leaf.device.type if isinstance(leaf, torch.Tensor) else None for leaf in tree.leaves(first)]
        sent = (tree.map_tensors(torch.Tensor.cpu, first), devices)
    try:
        given = ranks.broadcast(sent, source=source, doing="draw its first batch")
    except InvalidArgument as error:
        raise InvalidArgument(
            "batches",
            expected=f"a first batch that can travel to the ranks without one ({having.count(False)} of {len(having)})",
            found=error.found,
            fix="give every rank at least one batch, or use batches made of dicts, lists, tuples, tensors and arrays",
        ) from error
    if first is not NOTHING or given is None:
        return first
    leaves, structure = tree.flatten(given[0])
    moved = [leaf if device is None else leaf.to(device) for leaf, device in zip(leaves, given[1], strict=True)]
    return tree.unflatten(structure, moved)
