"""`batches_in_doubt`: finds ranks that have trained on one batch although each reads a share of its own, or on two although they read one share."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

BatchesRead: TypeAlias = tuple[int, Mapping[str, str]]
"""The share of the data for which a rank trains, and the digest of the last batch of each loader whose sampler does not say whose samples it reads."""


def batches_in_doubt(read: Sequence[BatchesRead | None]) -> list[str]:
    """Return a text for each loader whose batches are not those of the shares that the ranks train for.

    Args:
        read: by rank; None where nothing is known, and then nothing is compared.

    Examples:
        >>> batches_in_doubt([(0, {"": "a"}), (1, {"": "b"})]), batches_in_doubt([(0, {"": "a"}), (0, {"": "a"})])
        ([], [])
        >>> [text] = batches_in_doubt([(0, {"": "a"}), (1, {"": "a"})])
        >>> text.partition(":")[0], text.partition(": ")[2].partition(",")[0]
        ('loader', 'ranks 0 and 1 have trained on the same batch')
        >>> [text] = batches_in_doubt([(0, {"": "a"}), (0, {"": "b"})])
        >>> text.partition(": ")[2].partition(",")[0]
        'ranks 0 and 1 have trained on other batches'
    """
    known = [each for each in read if each is not None]
    if len(known) < len(read):
        return []
    found = []
    for name in known[0][1]:
        rows = [(share, batches[name]) for share, batches in known if name in batches]
        if len(rows) < len(known):
            continue
        where = f"loader[{name!r}]" if name else "loader"
        of_share: dict[int, int] = {}
        of_batch: dict[str, int] = {}
        for rank, (share, batch) in enumerate(rows):
            first, same = of_share.setdefault(share, rank), of_batch.setdefault(batch, rank)
            if rows[first][1] != batch:
                found.append(
                    f"{where}: ranks {first} and {rank} have trained on other batches, although they hold parts of one model, or copies of a part, "
                    "that need the same samples. Give them the same seed, or the same share of a trainfold.data.GlobalBatchSampler"
                )
                break
            if rows[same][0] != share:
                found.append(
                    f"{where}: ranks {same} and {rank} have trained on the same batch, although each is to read a share of its own: every sample is "
                    "read more than once. Give the loader a trainfold.data.GlobalBatchSampler; or give each rank data or a seed of its own"
                )
                break
    return found
