"""`DistributedEvalCursor`: the position of an evaluation, in samples over all ranks, so that each sample is evaluated exactly once."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, final

import attrs

from trainfold.core import tree
from trainfold.core.checks import count
from trainfold.core.data.bounds import MAX_LENGTH
from trainfold.core.data.shares import shard_of
from trainfold.core.errors import DataPositionMismatch, InvalidArgument, InvalidState
from trainfold.core.layout.world import Collectives

T = TypeVar("T")


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen
class DistributedEvalCursor:
    """The position of an evaluation in its samples: the same on every rank. Make it with `make_eval_cursor`.

    Law: each sample is evaluated exactly once, however often the evaluation is interrupted and whatever the sizes of batches and worlds
    after each interruption. No sample is repeated or padded to make the shares equal, and no sample is dropped.

    Attributes:
        length: samples to evaluate.
        global_batch_size: samples per step, over all ranks; the last step may have fewer.
        next_index: samples already evaluated, in [0, length].

    Examples:
        >>> cursor = make_eval_cursor(10, global_batch_size=4)
        >>> [cursor.share(rank, 3) for rank in range(3)]
        [range(0, 2), range(2, 3), range(3, 4)]
        >>> cursor.steps, cursor.advance(2).positions, cursor.advance(3).is_done
        (3, range(8, 10), True)
    """

    length: int
    global_batch_size: int
    next_index: int

    @property
    def positions(self) -> range:
        """The samples of the next step, over all ranks; empty at the end."""
        return range(self.next_index, min(self.next_index + self.global_batch_size, self.length))

    @property
    def steps(self) -> int:
        """The number of remaining steps, the same on every rank; pass it to ``evaluate(..., steps=...)``."""
        return -(-(self.length - self.next_index) // self.global_batch_size)

    @property
    def is_done(self) -> bool:
        """Whether every sample has been evaluated."""
        return self.next_index >= self.length

    def share(self, rank: int, world_size: int) -> range:
        """Return one rank's samples of the next step.

        Law: the shares of all ranks, concatenated in rank order, are `positions`. Their sizes differ by at most one; with more
        ranks than samples, some are empty.

        Args:
            rank: this rank, from 0.
            world_size: the number of ranks that share the step.

        Raises:
            InvalidArgument: unless ``0 <= rank < world_size``.
        """
        mine: range = shard_of(self.positions, rank, world_size)
        return mine

    def advance(self, steps: int = 1) -> "DistributedEvalCursor":
        """Return the position after more steps; it never passes the end.

        Raises:
            InvalidArgument: if ``steps < 0``.
        """
        if steps < 0:
            raise InvalidArgument(
                "DistributedEvalCursor.advance.steps",
                expected="steps >= 0",
                found=steps,
                fix="pass the number of steps done; a position never moves back",
            )
        return attrs.evolve(self, next_index=min(self.next_index + steps * self.global_batch_size, self.length))


def make_eval_cursor(
    length: int, *, global_batch_size: int, next_index: int = 0, after: DistributedEvalCursor | None = None
) -> DistributedEvalCursor:
    """Return a checked position; by default, the first sample.

    Args:
        length: samples to evaluate, >= 0.
        global_batch_size: samples per step over all ranks, >= 1.
        next_index: samples already evaluated, in [0, length].
        after: a position to continue from, possibly with another batch size; its number of samples must be ``length``.

    Raises:
        InvalidState: naming the invalid field.
        DataPositionMismatch: if ``after`` belongs to another number of samples.

    Examples:
        >>> make_eval_cursor(10, global_batch_size=4)
        DistributedEvalCursor(length=10, global_batch_size=4, next_index=0)
        >>> make_eval_cursor(10, global_batch_size=3, after=make_eval_cursor(10, global_batch_size=4).advance()).positions
        range(4, 7)
    """
    if after is not None:
        next_index = check_eval_cursor(after, length=length).next_index
    for name, value, low, high in (
        ("length", length, 0, MAX_LENGTH),
        ("global_batch_size", global_batch_size, 1, MAX_LENGTH),
        ("next_index", next_index, 0, length),
    ):
        where, text, fix = f"DistributedEvalCursor.{name}", f"an int in [{low}, {high}]", f"correct the {name}"
        count(where, value, least=low, below=high + 1, expected=text, fix=fix, error=InvalidState)
    return DistributedEvalCursor(length=length, global_batch_size=global_batch_size, next_index=next_index)


def check_eval_cursor(cursor: DistributedEvalCursor, *, length: int) -> DistributedEvalCursor:
    """Check a position from elsewhere, such as a checkpoint, against the samples to be read.

    Raises:
        InvalidState: if a field is out of range.
        DataPositionMismatch: if it belongs to another number of samples.

    Examples:
        >>> check_eval_cursor(make_eval_cursor(10, global_batch_size=4), length=10).steps
        3
    """
    make_eval_cursor(cursor.length, global_batch_size=cursor.global_batch_size, next_index=cursor.next_index)
    if cursor.length != length:
        raise DataPositionMismatch(
            "DistributedEvalCursor.length",
            expected=f"a position in the {length} samples of this dataset",
            found=f"a position in {cursor.length} samples",
            fix="pass the samples that the evaluation started with, or restart it with make_eval_cursor",
        )
    return cursor


@final
@attrs.define(eq=False, on_setattr=attrs.setters.frozen)
class EvalBatches(Generic[T]):
    """One rank's batches of an evaluation, or of a part of it; made by `eval_batches`. Its length is the number of batches.

    Attributes:
        cursor: the position of the first batch.
        fetch: a function from the positions of a batch to the batch.
        steps: the number of steps, the same on every rank; a rank without a share of a step has no batch for it.
        rank: the rank of these batches.
        world_size: the number of ranks.
        chunk: each share begins at a multiple of this number of samples, and ends at one or at the last sample.
        given: batches yielded so far by the last iteration; an interrupted evaluation uses it to find its position.
    """

    cursor: DistributedEvalCursor
    fetch: Callable[[range], T]
    steps: int
    rank: int
    world_size: int
    chunk: int = 1
    given: int = attrs.field(default=0, init=False, on_setattr=attrs.setters.NO_OP)

    @property
    def complete(self) -> bool:
        """Whether no samples remain after these batches; otherwise the evaluation reports that it is partial."""
        return self.after.is_done

    @property
    def after(self) -> DistributedEvalCursor:
        """The position after all of these batches; save it with the tally."""
        return self.cursor.advance(self.steps)

    def __len__(self) -> int:
        full, last = (len(self._share(step)) > 0 for step in (0, max(self.steps - 1, 0)))
        return max(self.steps - 1, 0) * full + last  # only the last step may have fewer samples

    def __bool__(self) -> bool:
        return True  # like a loader, even if this rank has no batch

    def __iter__(self) -> Iterator[T]:
        self.given = 0
        for step in range(self.steps):
            mine = self._share(step)
            if mine:
                self.given += 1
                yield self.fetch(mine)

    def shares(self) -> Iterator[range]:
        """Return the samples of each batch, in order."""
        return filter(None, map(self._share, range(self.steps)))

    def _share(self, step: int) -> range:
        positions = self.cursor.advance(step).positions
        chunks: range = shard_of(range(-(-len(positions) // self.chunk)), self.rank, self.world_size)
        return positions[chunks.start * self.chunk : chunks.stop * self.chunk]


def eval_batches(
    cursor: DistributedEvalCursor,
    fetch: Callable[[range], T],
    *,
    collectives: Collectives | None = None,
    limit: int | None = None,
    chunk: int = 1,
) -> EvalBatches[T]:
    """Return this rank's batches, starting at a position.

    Args:
        cursor: the position of the first batch, the same on every rank.
        fetch: called with the positions of each batch, a non-empty range.
        collectives: the ranks; None for a single process. Nothing is communicated.
        limit: the largest number of steps, to evaluate a part and save; None for no limit.
        chunk: cut the ranks' shares at multiples of this number of samples, for ``evaluate(..., chunk=...)`` on several ranks.

    Returns:
        An iterable of batches, which can be iterated any number of times.

    Raises:
        InvalidState: if the position is invalid.
        InvalidArgument: if ``limit < 1``, or if the steps would cut a chunk.

    Examples:
        >>> part = eval_batches(make_eval_cursor(10, global_batch_size=4), list, limit=2)
        >>> list(part), part.complete
        ([[0, 1, 2, 3], [4, 5, 6, 7]], False)
        >>> list(eval_batches(part.after, list))
        [[8, 9]]
    """
    check_eval_cursor(cursor, length=cursor.length)
    if limit is not None and limit < 1:
        raise InvalidArgument(
            "limit", expected="a number of steps, >= 1, or None", found=limit, fix="leave it out to evaluate to the end"
        )
    _check_chunk(cursor, chunk)
    rank, world_size = (0, 1) if collectives is None else (collectives.rank, collectives.world_size)
    steps = cursor.steps if limit is None else min(limit, cursor.steps)
    return EvalBatches(cursor, fetch, steps, rank, world_size, chunk)


def _check_chunk(cursor: DistributedEvalCursor, chunk: object) -> None:
    chunk = count("eval_batches.chunk", chunk, expected="a number of samples, >= 1", fix="pass one such as chunk=32")
    size = cursor.global_batch_size
    if size % chunk:
        raise InvalidArgument(
            "eval_batches.chunk",
            expected=f"a cursor whose global_batch_size is a multiple of chunk={chunk}",
            found=size,
            fix=f"call make_eval_cursor(..., global_batch_size={-(-size // chunk) * chunk}), or more: that is the number of samples of a step over "
            f"all ranks, and every rank gets a share if there are {chunk} for each",
        )
    if cursor.next_index % chunk and not cursor.is_done:
        raise InvalidArgument(
            "eval_batches.chunk",
            expected=f"a cursor that begins at a multiple of chunk={chunk}",
            found=f"next_index={cursor.next_index}",
            fix=f"begin at the start of a chunk: next_index={cursor.next_index // chunk * chunk}, with the tally of an evaluation in "
            f"chunks of {chunk} that ended there",
        )
