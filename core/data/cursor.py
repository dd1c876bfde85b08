"""`DataCursor`: the position of a run in its data, counted in samples over all ranks."""

from typing import final

import attrs
import numpy as np

from trainfold.core import tree
from trainfold.core.data.bounds import check_bounds
from trainfold.core.data.permutation import Indices, Permutation, sample_order
from trainfold.core.data.shares import shard_of
from trainfold.core.errors import DataPositionMismatch, InvalidArgument

__all__ = ["DataCursor", "check_cursor", "make_cursor", "sample_order", "shard_of"]


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen
class DataCursor:
    """The position of a run in its data: the same on every rank, whatever the world size. Make it with `make_cursor`.

    Law: each sample of an epoch is read exactly once, even if the sizes of batches and worlds change on the way.

    Attributes:
        epoch: finished epochs, which is the number of the current epoch.
        next_index: samples read in this epoch, in [0, length); the end of an epoch is position 0 of the next.
        length: samples in the dataset.
        seed: the seed of the order of samples.

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
        """Samples left in this epoch, at least one."""
        return self.length - self.next_index

    @property
    def order(self) -> Permutation:
        """The order of samples in this epoch."""
        return sample_order(self.seed, self.epoch, self.length)

    def positions(self, size: int) -> range:
        """Return the next ``size`` positions in this epoch, fewer at its end: the dataset indices of an unshuffled run.

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
            raise InvalidArgument("DataCursor.positions.size", expected="size >= 1", found=size, fix="pass at least 1")
        return range(self.next_index, min(self.next_index + size, self.length))

    def batch(self, size: int) -> Indices:
        """Return the next ``size`` dataset indices of this epoch, fewer at its end, like a loader with ``drop_last=False``.

        Args:
            size: at most this many, over all ranks, >= 1.

        Returns:
            An int64 array, never empty, to index a tensor with or to iterate over. Advance the cursor by its length.

        Raises:
            InvalidArgument: if ``size < 1``.

        Examples:
            >>> cursor = make_cursor(10, next_index=7)
            >>> len(cursor.batch(4)), set(cursor.batch(3).tolist()) <= set(range(10))
            (3, True)
        """
        return self.order[self.positions(size)]

    def batch_across(self, size: int) -> Indices:
        """Return exactly ``size`` dataset indices, continuing in the orders of the next epochs.

        Args:
            size: the number of samples, over all ranks, >= 1.

        Returns:
            An int64 array. If it crosses the end of an epoch, a sample may occur twice, once for each epoch.

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
        """Return the position after more samples; the end of an epoch is position 0 of the next.

        Args:
            samples: samples read since, over all ranks, >= 0; they may cross ends of epochs.

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
                fix="pass the number of samples read; a position never moves back",
            )
        epochs, next_index = divmod(self.next_index + samples, self.length)
        return attrs.evolve(self, epoch=self.epoch + epochs, next_index=next_index)


def make_cursor(length: int, *, seed: int = 0, epoch: int = 0, next_index: int = 0) -> DataCursor:
    """Return a checked position; by default, the start of the data.

    Args:
        length: samples in the dataset, >= 1.
        seed: the seed of the order, in [0, 2**64).
        epoch: finished epochs, >= 0.
        next_index: samples already read in this epoch, in [0, length).

    Returns:
        The position.

    Raises:
        InvalidState: naming the invalid field.

    Examples:
        >>> make_cursor(100)
        DataCursor(epoch=0, next_index=0, length=100, seed=0)
    """
    check_bounds(length, seed=seed, epoch=epoch, next_index=next_index)
    return DataCursor(epoch=epoch, next_index=next_index, length=length, seed=seed)


def check_cursor(cursor: DataCursor, *, length: int) -> DataCursor:
    """Check a position from elsewhere, such as a checkpoint, against the dataset to be read.

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
            found=f"a position in {cursor.length} samples",
            fix="pass the dataset that the run started with, or restart the data with make_cursor",
        )
    return cursor
