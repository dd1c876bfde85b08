"""`LaterLeaf`: a tensor of a save that is not in memory yet. It is read when its bytes are written, and released after that."""

from collections.abc import Callable, Iterator
from typing import final

import attrs
import torch

from trainfold.backends.stores.protocol import Place
from trainfold.core.errors import CheckpointDamaged
from trainfold.core.format.codec import torch_dtype
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.tensor_memory import tensor_bytes


@final
@attrs.frozen(eq=False)
class LaterLeaf:
    """A `PiecewiseTensor` that is read once, whole.

    Attributes:
        name: for messages.
        spec: its dtype and shape.
        read: reads it.
    """

    name: str
    spec: LeafSpec
    read: Callable[[], torch.Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """See `PiecewiseTensor`."""
        return torch_dtype(self.spec.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """See `PiecewiseTensor`."""
        return self.spec.shape

    def pieces(self, piece_bytes: int, place: Place | None = None, *, until: int | None = None) -> Iterator[memoryview]:  # noqa: ARG002
        """See `PiecewiseTensor`.

        Raises:
            CheckpointDamaged: if what was read has another dtype or shape.
        """
        tensor = self.read()
        if (tensor.dtype, tuple(tensor.shape)) != (self.dtype, self.shape):
            raise CheckpointDamaged(self.name, expected=self.spec, found=f"{tensor.dtype}{list(tensor.shape)}",
                                    fix="change nothing in the source while it is converted, and run this again")  # fmt: skip
        data = tensor_bytes(tensor)
        for start in range(0, len(data), piece_bytes):
            yield data[start : start + piece_bytes]
