"""`FirstBatch`: whether the ranks of a step have batches of their own, which the first step of a process looks at."""

import warnings
from collections.abc import Sequence
from typing import Any, Final, final

import torch

from trainfold.core import tree
from trainfold.core.digest import DIGEST_PREFIX, digest_of
from trainfold.core.errors import SameBatch
from trainfold.core.tensor_memory import tensor_bytes

_DIGITS: Final = 12  # hexadecimal; a sum over ranks has one such number for each, so that float64 holds it
_TO_THE_CALLER: Final = 4  # of the step: compare, _measure, __call__


@final
class FirstBatch:
    """Digests the first batch of a step, and warns of ranks that have the same one.

    Examples:
        >>> first = FirstBatch()
        >>> first.mark([torch.ones(2)]) > 0, first.mark([torch.ones(2)])
        (True, 0)
    """

    def __init__(self) -> None:
        self._is_over = False

    def mark(self, micro: Sequence[Any]) -> int:
        """Return a number for a batch, the same for the same values; 0 after the first one, and for a batch without plain tensors."""
        if self._is_over:
            return 0
        self._is_over = True
        tensors = [
            leaf.detach()
            for leaf in tree.leaves(list(micro))
            if type(leaf) is torch.Tensor and leaf.layout is torch.strided
        ]
        text = "".join(digest_of(tensor_bytes(each)) for each in tensors if not each.is_meta)
        return int(digest_of(text.encode()).removeprefix(DIGEST_PREFIX)[:_DIGITS], 16) if text else 0

    def compare(self, marks: Sequence[int], *, rank: int, step: int) -> None:
        """Warn on rank 0 if two ranks have the same batch.

        Args:
            marks: by rank.
            rank: this one.
            step: for the text.
        """
        seen: dict[int, int] = {}
        for other, mark in enumerate(marks if rank == 0 and any(marks) else ()):
            first = seen.setdefault(mark, other)
            if mark and first != other:
                text = (
                    f"step {step}: expected a batch of its own on each rank, found the same one on ranks {first} and {other}, so its samples count more "
                    "than once; give each rank its share, as trainfold.data.shard_of(batch, rank, world_size) returns it"
                )
                warnings.warn(SameBatch(text), stacklevel=_TO_THE_CALLER)
                return
