"""`LeafReadState`: one leaf that is read while its owner may be about to write to it, and how far that has come."""

from collections.abc import Callable
from typing import TypeAlias, TypeVar, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trainfold.backends.hold.pinned_ring import PinnedRing
from trainfold.core.tensor_memory import byte_array, byte_view

Bytes: TypeAlias = npt.NDArray[np.uint8]
T = TypeVar("T")


@final
@attrs.define(eq=False)
class Move:
    """The copying of some leaves by who will write to them; over with one assignment, wherever it is interrupted."""

    is_over: bool = False


@final
@attrs.define(eq=False)
class LeafReadState:
    """The bytes ``[read, copied_from)`` are still to be read from the live tensor, those after it from ``copy``.

    Attributes:
        live: the tensor, until it is not needed any more.
        size_bytes: how many bytes it has.
        is_flat: whether they lie in order, so that a part of them can be read or copied.
        ring: what reads it, on a device.
        read: how many have been read.
        pinned_to: the writer has the bytes ``[read, pinned_to)`` in its hands.
        copied_from: where the copy begins.
        copy: of the bytes from there on.
        home: where the live tensor's memory was when it was held; None where that is not known.
    """

    live: torch.Tensor | None
    size_bytes: int
    is_flat: bool
    ring: PinnedRing | None = None
    read: int = 0
    pinned_to: int = 0
    copied_from: int = -1
    copy: torch.Tensor | None = None
    home: int | None = None
    _moving: tuple[Move, int] | None = None
    _array: tuple[torch.Tensor, int, Bytes] | None = None

    @property
    def is_exposed(self) -> bool:
        """Whether a write to the live tensor would change what is saved."""
        return self.live is not None and (self.read < self.copied_from or self.read < self.pinned_to)

    @property
    def is_in_arena(self) -> bool:
        """Whether a copy of it goes to the memory that the hold has for copies."""
        return self.live is not None and self.live.is_cpu

    @property
    def moving_from(self) -> int | None:
        """The byte from which on it is being copied just now."""
        return None if self._moving is None or self._moving[0].is_over else self._moving[1]

    def move(self, move: Move, start: int) -> None:
        """It is being copied from this byte on, until the move is over."""
        self._moving = move, start

    def moved(self, copy: torch.Tensor, start: int) -> None:
        """It has been copied from this byte on; on the CPU, to where its bytes lie in order."""
        self.is_flat = self.is_flat or copy.is_cpu  # first: an interrupt may come in between
        self.copy, self.copied_from, self._moving = copy, start, None

    def next_bytes(self, piece_bytes: int) -> tuple[torch.Tensor, int, int]:
        """What to read next, live or copied; of which byte it has the first one; and up to where."""
        moving_from = self.moving_from
        is_copy = self.read >= self.copied_from
        end = self.size_bytes if is_copy else self.copied_from if moving_from is None else moving_from
        source, start = (self.copy, self.copied_from) if is_copy else (self.live, 0)
        assert source is not None
        return source, start, min(self.read + piece_bytes, end)

    def array_of(self, source: torch.Tensor) -> Bytes:
        """The memory of what it is read from; to be asked for again for each piece, since it may go elsewhere."""
        address = source.data_ptr()
        if self._array is None or self._array[0] is not source or self._array[1] != address:
            self._array = source, address, byte_array(byte_view(source))
        return self._array[2]

    def is_where_it_was(self) -> bool:
        """Whether the memory that `array_of` gave last is still the tensor's."""
        return self._array is not None and self._array[0].data_ptr() == self._array[1]

    @property
    def is_replaced(self) -> bool:
        """Whether the live tensor has other memory than when it was held, and not by ``share_memory_()``, which copies its bytes."""
        live = self.live
        if live is None or self.home is None or live.data_ptr() == self.home:
            return False
        return live.is_cuda or not live.untyped_storage().is_shared()

    def let_go(self) -> None:
        """Nothing more is read from it."""
        self.live = self.copy = self._array = None


def steadily(tensor: torch.Tensor, copy: Callable[[torch.Tensor], T]) -> T:
    """What a function copies from a tensor, whose memory may go elsewhere meanwhile: ``share_memory_()`` frees the old one.

    Examples:
        >>> steadily(torch.ones(2), torch.clone)
        tensor([1., 1.])
    """
    while True:
        if is_gone(tensor):
            raise RuntimeError("its memory was given back")
        address = tensor.data_ptr()
        copied = copy(tensor)
        if tensor.data_ptr() == address:
            return copied


def is_gone(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor was given back, as ``untyped_storage().resize_(0)`` does.

    Examples:
        >>> weight = torch.ones(2)
        >>> _ = weight.untyped_storage().resize_(0)
        >>> is_gone(weight), is_gone(torch.ones(2)), is_gone(torch.ones(0))
        (True, False, False)
    """
    return tensor.data_ptr() == 0 and tensor.numel() > 0
