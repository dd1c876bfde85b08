"""`Scatter`: puts the bytes of a stored shard where they belong in the memory of a part of it."""

from collections.abc import Sequence
from typing import Final, final

import attrs
import torch

from trainfold.core.layout.slices import intersect, run_blocks, volume

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@final
@attrs.frozen
class Inside:
    """Where a tensor lies in a stored shard.

    Attributes:
        shape: the shape of the shard.
        starts: the first index of the tensor in each dimension of the shard.
        offset: how many bytes of the shard come before those that are read.
    """

    shape: tuple[int, ...]
    starts: tuple[int, ...]
    offset: int = 0

    def has(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape lies inside of the shard."""
        return len(shape) == len(self.starts) == len(self.shape) and all(
            0 <= start <= whole - size for start, size, whole in zip(self.starts, shape, self.shape, strict=True)
        )

    def run(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """The elements of the shard that a tensor of this shape is, if they lie in one run; else None.

        Examples:
            >>> Inside((4, 3), (1, 0)).run((2, 3)), Inside((4, 3), (1, 0)).run((2, 2)), Inside((4, 3), (1, 1)).run((1, 2))
            ((3, 9), None, (4, 6))
        """
        first, step, is_whole = 0, 1, True  # from the last dimension on
        for start, size, whole in zip(self.starts[::-1], shape[::-1], self.shape[::-1], strict=True):
            if size != 1 and not is_whole:
                return None
            first, step, is_whole = first + start * step, step * whole, is_whole and size == whole
        count = 1
        for size in shape:
            count *= size
        return first, first + count


@final
class Scatter:
    """Writes runs of a shard into a part of it.

    Args:
        target: the part, on the CPU, with any strides.
        inside: where it lies in the shard.
    """

    def __init__(self, target: torch.Tensor, inside: Inside) -> None:
        kind = _INTEGERS.get(target.element_size(), target.dtype)  # bits are moved, and some dtypes cannot be copied
        self._target: Final = target.detach().view(kind)
        self._shape: Final = inside.shape
        self._box: Final = tuple((start, start + size) for start, size in zip(inside.starts, target.shape, strict=True))

    def put(self, data: memoryview, offset: int) -> None:
        """Write those bytes that belong to the part.

        Args:
            data: bytes of the shard, whole elements of them.
            offset: how many of its bytes come before them.
        """
        values = torch.frombuffer(data, dtype=self._target.dtype)
        place, first = 0, offset // values.element_size()
        for block in run_blocks(first, first + len(values), self._shape):
            common, count = intersect(block, self._box), volume(block)
            if common is not None:
                source = values[place : place + count].view([stop - start for start, stop in block])
                self._target[_slices(common, self._box)].copy_(source[_slices(common, block)])
            place += count


def can_scatter(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor can be written in parts."""
    is_plain = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
    return tensor.device.type == "cpu" and is_plain


def _slices(part: tuple[tuple[int, int], ...], box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(part, box, strict=True))
