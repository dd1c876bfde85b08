"""`DataCursor`: where a run stands in its data, counted in samples over all ranks."""

from typing import final

import attrs
import numpy as np

from trainfold.core import tree
from trainfold.core.checks import count
from trainfold.core.data.permutation import MAX_LENGTH, Indices, Permutation, sample_order
from trainfold.core.data.shares import shard_of
from trainfold.core.errors import DataPositionMismatch, InvalidArgument, InvalidState

__all__ = ["DataCursor", "check_cursor", "make_cursor", "sample_order", "shard_of"]


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen
class DataCursor:
    """The position of a run in its data: the same on every rank, whatever the world size. Make it with `make_cursor`.

    Law: however the sizes of batches and worlds change on the way, each sample of an epoch is read exactly once.

    Attributes:
        epoch: epochs finished; the one being read has this number.
        next_index: samples of this epoch that were read, in [0, length): the end of an epoch is position 0 of the next.
        length: samples in the dataset.
        seed: of the order in which epochs are read.

    Examples:
        >>> cursor = make_cursor(10, seed=3)
        >>> ids = cursor.batch(4)
        >>> cursor = cursor.advance(len(ids))
        >>> cursor.next_index, cursor.remaining
        (4, 6)
    """

    epoch: int
    next_index: int
    length: int
    seed: int

    @property
    def remaining(self) -> int:
        """Samples of this epoch that were not read yet, at least one."""
        return self.length - self.next_index

    @property
    def order(self) -> Permutation:
        """The order of this epoch."""
        return sample_order(self.seed, self.epoch, self.length)

    def positions(self, size: int) -> range:
        """The next ``size`` positions in this epoch, fewer at its end; the dataset indices of an unshuffled run.

        Args:
            size: at most this many, >= 1.

        Returns:
            A range inside ``range(length)``, never empty.

        Raises:
            InvalidArgument: if ``size < 1``.

        Examples:
            >>> make_cursor(10, next_index=7).positions(4)
            range(7, 10)
        """
        if size < 1:
            raise InvalidArgument(
                "DataCursor.positions.size", expected="size >= 1", found=size, fix="ask for one sample or more"
            )
        return range(self.next_index, min(self.next_index + size, self.length))

    def batch(self, size: int) -> Indices:
        """The next ``size`` dataset indices of this epoch, fewer at its end (as a loader with ``drop_last=False``).

        Args:
            size: at most this many, over all ranks, >= 1.

        Returns:
            An int64 array, never empty: index a tensor with it, or iterate over it. Advance by its length.

        Raises:
            InvalidArgument: if ``size < 1``.

        Examples:
            >>> cursor = make_cursor(10, next_index=7)
            >>> len(cursor.batch(4)), set(cursor.batch(3).tolist()) <= set(range(10))
            (3, True)
        """
        return self.order[self.positions(size)]

    def batch_across(self, size: int) -> Indices:
        """The next ``size`` dataset indices, going on into the orders of the next epochs: always ``size`` of them.

        Args:
            size: how many, over all ranks, >= 1.

        Returns:
            An int64 array. A sample can be in it twice where it crosses the end of an epoch, once for each epoch.

        Raises:
            InvalidArgument: if ``size < 1``.

        Examples:
            >>> len(make_cursor(10, next_index=7).batch_across(25))
            25
        """
        parts = [self.batch(size)]
        cursor, left = self.advance(len(parts[0])), size - len(parts[0])
        while left:
            parts.append(cursor.batch(left))
            cursor, left = cursor.advance(len(parts[-1])), left - len(parts[-1])
        return np.concatenate(parts)

    def advance(self, samples: int) -> "DataCursor":
        """The position after so many more samples; the end of an epoch is position 0 of the next one (G03).

        Args:
            samples: read since, over all ranks, >= 0; it may cross ends of epochs.

        Returns:
            The new position.

        Raises:
            InvalidArgument: if ``samples < 0``.

        Examples:
            >>> make_cursor(10, next_index=7).advance(3)
            DataCursor(epoch=1, next_index=0, length=10, seed=0)
        """
        if samples < 0:
            raise InvalidArgument(
                "DataCursor.advance.samples",
                expected="samples >= 0",
                found=samples,
                fix="a position only goes forward",
            )
        epochs, next_index = divmod(self.next_index + samples, self.length)
        return attrs.evolve(self, epoch=self.epoch + epochs, next_index=next_index)


def make_cursor(length: int, *, seed: int = 0, epoch: int = 0, next_index: int = 0) -> DataCursor:
    """Return a checked position, at the start of the data unless told otherwise.

    Args:
        length: samples in the dataset, >= 1.
        seed: of the order, in [0, 2**64).
        epoch: epochs finished, >= 0.
        next_index: samples of this epoch already read, in [0, length).

    Returns:
        The position.

    Raises:
        InvalidState: naming the field that is wrong.

    Examples:
        >>> make_cursor(100)
        DataCursor(epoch=0, next_index=0, length=100, seed=0)
    """
    for name, value, low, high in (
        ("length", length, 1, MAX_LENGTH + 1),
        ("seed", seed, 0, 2**64),
        ("epoch", epoch, 0, 2**63),
        ("next_index", next_index, 0, length),
    ):
        is_end = name == "next_index" and value == length
        fix = "the end of an epoch is written epoch + 1, next_index 0" if is_end else f"correct the {name}"
        count(f"state.dataset.{name}", value, least=low, below=high, fix=fix, error=InvalidState)
    return DataCursor(epoch=epoch, next_index=next_index, length=length, seed=seed)


def check_cursor(cursor: DataCursor, *, length: int) -> DataCursor:
    """Check a position that comes from elsewhere, such as a checkpoint, against the dataset that it will read (G02).

    Args:
        cursor: the position.
        length: samples in the dataset.

    Returns:
        The same position.

    Raises:
        InvalidState: if a field is out of range.
        DataPositionMismatch: if it belongs to a dataset of another length.

    Examples:
        >>> check_cursor(make_cursor(100), length=100).length
        100
    """
    make_cursor(cursor.length, seed=cursor.seed, epoch=cursor.epoch, next_index=cursor.next_index)
    if cursor.length != length:
        raise DataPositionMismatch(
            "state.dataset.length",
            expected=f"a position in the {length} samples of this dataset",
            found=f"one in {cursor.length}",
            fix="give the dataset that the run was started with, or start the data anew with make_cursor",
        )
    return cursor
