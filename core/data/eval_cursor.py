"""`DistributedEvalCursor`: where an evaluation stands, in samples over all ranks, so that each sample is evaluated exactly once (Q01)."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, final

import attrs

from trainfold.core import tree
from trainfold.core.checks import count
from trainfold.core.data.permutation import MAX_LENGTH
from trainfold.core.data.shares import shard_of
from trainfold.core.errors import DataPositionMismatch, InvalidArgument, InvalidState
from trainfold.core.layout.world import Collectives

T = TypeVar("T")


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen
class DistributedEvalCursor:
    """The position of an evaluation in its samples: the same on every rank. Make it with `make_eval_cursor`.

    Law: however often an evaluation is interrupted, and with whatever sizes of batches and worlds it goes on, each sample is evaluated
    exactly once: none is repeated or padded so that shares come out even, and none is dropped.

    Attributes:
        length: samples to evaluate.
        global_batch_size: samples of one step, over all ranks; the last step may have fewer.
        next_index: samples that were evaluated, in [0, length].

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
        """The samples of the next step, over all ranks; none at the end."""
        return range(self.next_index, min(self.next_index + self.global_batch_size, self.length))

    @property
    def steps(self) -> int:
        """How many steps remain: the same on every rank, and what ``evaluate(..., steps=...)`` wants."""
        return -(-(self.length - self.next_index) // self.global_batch_size)

    @property
    def is_done(self) -> bool:
        """Whether every sample was evaluated."""
        return self.next_index >= self.length

    def share(self, rank: int, world_size: int) -> range:
        """One rank's samples of the next step.

        Law: the shares of all ranks, one after the other, are `positions`; sizes differ by at most one, and are zero where there
        are more ranks than samples.

        Args:
            rank: this rank, from 0.
            world_size: how many ranks share the step.

        Raises:
            InvalidArgument: unless ``0 <= rank < world_size``.
        """
        mine: range = shard_of(self.positions, rank, world_size)
        return mine

    def advance(self, steps: int = 1) -> "DistributedEvalCursor":
        """The position after so many more steps; it stays at the end.

        Raises:
            InvalidArgument: if ``steps < 0``.
        """
        if steps < 0:
            raise InvalidArgument(
                "DistributedEvalCursor.advance.steps",
                expected="steps >= 0",
                found=steps,
                fix="a position only goes forward",
            )
        return attrs.evolve(self, next_index=min(self.next_index + steps * self.global_batch_size, self.length))


def make_eval_cursor(
    length: int, *, global_batch_size: int, next_index: int = 0, after: DistributedEvalCursor | None = None
) -> DistributedEvalCursor:
    """Return a checked position, at the first sample unless told otherwise.

    Args:
        length: samples to evaluate, >= 0.
        global_batch_size: samples of one step over all ranks, >= 1.
        next_index: samples that were evaluated already, in [0, length].
        after: a position to go on from, perhaps with another size of batches; it has to be one in as many samples.

    Raises:
        InvalidState: naming the field that is wrong.
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
    """Check a position that comes from elsewhere, such as a checkpoint, against the samples that it will read.

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
            found=f"one in {cursor.length}",
            fix="give the samples that the evaluation was started with, or start it anew with make_eval_cursor",
        )
    return cursor


@final
@attrs.define(eq=False, on_setattr=attrs.setters.frozen)
class EvalBatches(Generic[T]):
    """This rank's batches of an evaluation, or of a part of it; made by `eval_batches`. Its length is how many it has.

    Attributes:
        cursor: where they begin.
        fetch: from the positions of a batch to the batch.
        steps: how many steps they take, the same on every rank; a rank without a share of a step has no batch for it.
        rank: whose they are.
        world_size: of how many ranks.
        chunk: each share begins at a multiple of so many samples, and ends at one or at the last sample.
        given: how many batches the last iteration over them has given so far: what an evaluation that was cut goes by.
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
        """Whether nothing remains after them; an evaluation of a part is partial, and says so."""
        return self.after.is_done

    @property
    def after(self) -> DistributedEvalCursor:
        """Where the evaluation stands when all of them were evaluated: what to save with its tally."""
        return self.cursor.advance(self.steps)

    def __len__(self) -> int:
        full, last = (len(self._share(step)) > 0 for step in (0, max(self.steps - 1, 0)))
        return max(self.steps - 1, 0) * full + last  # only the last step may have fewer samples

    def __bool__(self) -> bool:
        return True  # as a loader is, also where this rank has no batch

    def __iter__(self) -> Iterator[T]:
        self.given = 0
        for step in range(self.steps):
            mine = self._share(step)
            if mine:
                self.given += 1
                yield self.fetch(mine)

    def shares(self) -> Iterator[range]:
        """The samples of each batch, in order."""
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
    """This rank's batches from a position on.

    Args:
        cursor: where to begin, the same on every rank.
        fetch: called with the positions of each batch, a range that is not empty.
        collectives: the ranks; None: this process is all there is. Nothing is communicated.
        limit: at most so many steps, to evaluate a part and save; None: to the end.
        chunk: cut the ranks' shares at multiples of so many samples, for ``evaluate(..., chunk=...)`` on several ranks.

    Returns:
        What can be iterated over, any number of times.

    Raises:
        InvalidState: if the position is one that cannot be.
        InvalidArgument: if ``limit < 1``, or if steps would cut a chunk in two.

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
            "limit", expected="a number of steps, >= 1, or None", found=limit, fix="leave it out to go to the end"
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
            fix=f"make_eval_cursor(..., global_batch_size={-(-size // chunk) * chunk}), or more: a step has that many samples in all, "
            f"and a rank has a share of it if there are {chunk} for each",
        )
    if cursor.next_index % chunk and not cursor.is_done:
        raise InvalidArgument(
            "eval_batches.chunk",
            expected=f"a cursor that begins at a multiple of chunk={chunk}",
            found=f"next_index={cursor.next_index}",
            fix=f"begin where a chunk does: next_index={cursor.next_index // chunk * chunk}, with the tally of an evaluation in "
            f"chunks of {chunk} that ended there",
        )
