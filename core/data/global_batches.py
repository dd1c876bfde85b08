"""`GlobalBatches`: how an epoch is cut into batches of all ranks together, and each batch into shares."""

from typing import final

import attrs

from trainfold.core.checks import count
from trainfold.core.data.bounds import MAX_LENGTH
from trainfold.core.data.shares import shard_of
from trainfold.core.errors import InvalidArgument


@final
@attrs.frozen
class GlobalBatches:
    """The batches of an epoch, in samples over all ranks. Make it with `global_batches`.

    Law: from any position, under any sequence of batch sizes and numbers of replicas, each remaining sample of the epoch is in exactly
    one share of one batch.

    Attributes:
        length: samples in the dataset.
        batch_size: samples in a batch, over all replicas.
        replicas: how many shares a batch has, one for each data-parallel replica.
        drop_last: whether the samples after the last whole batch are left out.
    """

    length: int
    batch_size: int
    replicas: int
    drop_last: bool = False

    def positions(self, start: int) -> range:
        """Return the positions of the batch that begins at ``start``; an empty range at the end of the epoch.

        If fewer samples than replicas would be left after it, they are part of it, so that no replica is without a sample.

        Args:
            start: the position in the epoch, in [0, length].

        Examples:
            >>> GlobalBatches(10, batch_size=4, replicas=2).positions(8), GlobalBatches(9, batch_size=4, replicas=2).positions(4)
            (range(8, 10), range(4, 9))
        """
        left = self.length - start
        if self.drop_last:
            return range(start, start + self.batch_size * (left >= self.batch_size))
        beyond = left - self.batch_size
        return range(start, self.length if beyond < self.replicas else start + self.batch_size)

    def count(self, start: int = 0) -> int:
        """Return how many batches are left from a position on.

        Examples:
            >>> GlobalBatches(10, batch_size=4, replicas=2).count(), GlobalBatches(9, batch_size=4, replicas=2).count(4)
            (3, 1)
        """
        whole, rest = divmod(self.length - start, self.batch_size)
        is_own = rest >= self.replicas or (rest > 0 and not whole)
        return whole + (is_own and not self.drop_last)

    def share(self, positions: range, replica: int) -> range:
        """Return the share of one replica; the sizes of the shares differ by at most one.

        Examples:
            >>> GlobalBatches(10, batch_size=5, replicas=2).share(range(5, 10), replica=1)
            range(8, 10)
        """
        found: range = shard_of(positions, replica, self.replicas)
        return found

    def without_share(self, start: int) -> int:
        """Return how many samples are left, if they are fewer than the replicas; 0 if every replica has a share, or nothing is left to read.

        Examples:
            >>> GlobalBatches(10, batch_size=4, replicas=4).without_share(8)
            2
        """
        left = len(self.positions(start))
        return left if left < self.replicas else 0


def global_batches(length: int, batch_size: int, *, replicas: int, drop_last: bool = False) -> GlobalBatches:
    """Return checked batches.

    Args:
        length: samples in the dataset, at least one for each replica.
        batch_size: samples in a batch, over all replicas; at least one for each.
        replicas: the number of data-parallel replicas, >= 1.
        drop_last: whether the samples after the last whole batch are left out.

    Raises:
        InvalidArgument: naming the argument.

    Examples:
        >>> global_batches(100, 8, replicas=4).count()
        13
        >>> global_batches(100, 3, replicas=4)
        Traceback (most recent call last):
            ...
        trainfold.core.errors.InvalidArgument: batch_size: expected an int >= 4, found 3; count the samples of a batch over all replicas, \
at least one for each
    """
    where = "GlobalBatchSampler"
    count(f"{where}.replicas", replicas, least=1, fix="pass the number of data-parallel replicas")
    fix = "count the samples of a batch over all replicas, at least one for each"
    count("batch_size", batch_size, least=replicas, fix=fix)
    least = batch_size if drop_last else replicas
    count(
        f"{where}.dataset", length, least=least, below=MAX_LENGTH + 1, fix=f"pass a dataset of at least {least} samples"
    )
    if type(drop_last) is not bool:
        raise InvalidArgument(f"{where}.drop_last", expected="a bool", found=repr(drop_last), fix="pass True or False")
    return GlobalBatches(length, batch_size, replicas, drop_last)
