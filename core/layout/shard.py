"""`Shard`: a leaf for one rank's slice of a global tensor."""

from typing import final

import attrs
import torch

from trainfold.core.errors import InvalidState
from trainfold.core.layout.placement import Placement
from trainfold.core.layout.slices import Box


@final
@attrs.frozen(eq=False)
class Shard:
    """A slice of a global tensor, as a leaf. Make it with `make_shard`.

    Attributes:
        tensor: the values that this rank holds.
        shape: the shape of the global tensor.
        starts: the first index of the slice in each dimension; it ends at ``starts[i] + tensor.shape[i]``.
        is_copied: whether other ranks hold the same slice, or may, because the ranks of its placement are not all. Saves compare its values between these ranks.
        placement: the rule by which the tensor is cut, over the ranks of the save; None for a slice of its own kind.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    is_copied: bool = False
    placement: Placement | None = None

    @property
    def box(self) -> Box:
        """The slice, as one (start, stop) pair a dimension."""
        return tuple((start, start + size) for start, size in zip(self.starts, self.tensor.shape, strict=True))


def make_shard(tensor: torch.Tensor, *, shape: tuple[int, ...], starts: tuple[int, ...]) -> Shard:
    """Return a checked shard.

    Raises:
        InvalidState: if the slice does not lie inside the global shape.

    Examples:
        >>> make_shard(torch.zeros(2, 3), shape=(4, 3), starts=(2, 0)).starts
        (2, 0)
    """
    inside = len(shape) == len(starts) == tensor.dim() and all(
        0 <= start <= whole - size for start, size, whole in zip(starts, tensor.shape, shape, strict=True)
    )
    if not inside:
        raise InvalidState(
            "shard",
            expected=f"a slice of the global shape {shape}",
            found=f"starts {starts} with sizes {tuple(tensor.shape)}",
            fix="pass one start for each dimension, inside the global shape",
        )
    return Shard(tensor, tuple(shape), tuple(starts))
