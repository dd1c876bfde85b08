"""`HeldLeaf`: one leaf that a writer reads while its owner may be about to write to it, and how far the writer has come."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trainfold.backends.hold.copy_arena import Arena
from trainfold.backends.hold.pinned_ring import Begun, PinnedRing
from trainfold.backends.hold.write_watch import LeafName, WriteWatch, is_gone, steadily
from trainfold.backends.stores.protocol import Place
from trainfold.backends.wakeup import Wakeup
from trainfold.core.errors import SaveFailed
from trainfold.core.tensor_memory import byte_array, byte_view

Bytes: TypeAlias = npt.NDArray[np.uint8]
_UNREAD: Final = -1


@final
class Handover:
    """State shared by the writer and the owner of held leaves: a lock, their wakeups, and the writes that were noticed.

    Attributes:
        mutex: taken in `with` only, and with no condition around it: see `Wakeup`.
        writer: wakes the writer.
        owner: wakes the owner.
        watch: notices unannounced writes.
        is_over: whether nothing more will be read.
    """

    def __init__(self, watch: WriteWatch) -> None:
        self.mutex = threading.RLock()
        self.writer = Wakeup()
        self.owner = Wakeup()
        self.watch = watch
        self.is_over = False

    def check(self, name: LeafName) -> None:
        """Check that this leaf can still be read.

        Raises:
            SaveFailed: if a write was noticed, or the hold was released.
        """
        self.watch.check()
        if self.is_over:
            raise SaveFailed(name[1], expected="a hold", found="a released one", fix="save again")


@final
@attrs.define(eq=False)
class Move:
    """A copy of some leaves, made by their owner. One assignment ends it, wherever it is interrupted."""

    is_over: bool = False


@final
@attrs.define(eq=False, kw_only=True)
class HeldLeaf:
    """A leaf to write: see `trainfold.backends.formats.native.writer.PiecewiseTensor`.

    The bytes ``[read, copied_from)`` are still to be read from the live tensor, those after it from ``copy``. Fields change under
    the lock of the handover.

    Attributes:
        name: component and path.
        dtype: of the tensor.
        shape: of the tensor.
        size_bytes: how many bytes it has.
        handover: shared by all leaves of a hold.
        live: the tensor, while it is needed.
        is_flat: whether its bytes lie in order, so that a part of them can be read or copied.
        ring: reads it, on a device.
        read: how many bytes have been read.
        pinned_to: the writer is reading the bytes ``[read, pinned_to)``.
        copied_from: the first byte of the copy.
        copy: the bytes from there on.
        home: the address of the live tensor's memory when it was held; None if it is unknown.
        first: the first byte that the writer needs.
        end: one past the last byte that it needs.
    """

    name: LeafName
    dtype: torch.dtype
    shape: torch.Size
    size_bytes: int
    handover: Handover
    live: torch.Tensor | None = None
    is_flat: bool = True
    ring: PinnedRing | None = None
    read: int = 0
    pinned_to: int = 0
    copied_from: int = _UNREAD
    copy: torch.Tensor | None = None
    home: int | None = None
    first: int = 0
    end: int = attrs.field(default=attrs.Factory(lambda leaf: leaf.size_bytes, takes_self=True))
    _moving: tuple[Move, int] | None = None
    _array: tuple[torch.Tensor, int, Bytes] | None = None
    _flat: Bytes | None = None

    # --- the owner's thread ------------------------------------------------------------------------------------------

    @property
    def is_exposed(self) -> bool:
        """Whether a write to the live tensor would change what is saved."""
        return self.live is not None and (self.read < self.copied_from or self.read < self.pinned_to)

    @property
    def moving_from(self) -> int | None:
        """The byte from which on the owner is copying the leaf now."""
        return None if self._moving is None or self._moving[0].is_over else self._moving[1]

    @property
    def is_replaced(self) -> bool:
        """Whether the live tensor's memory was replaced since it was held, other than by ``share_memory_()``, which copies the bytes."""
        live = self.live
        if live is None or self.home is None or live.data_ptr() == self.home:
            return False
        return live.is_cuda or not live.untyped_storage().is_shared()

    def move(self, move: Move, start: int) -> None:
        """Note that the owner copies the leaf from this byte on, until the move is over."""
        self._moving = move, start

    def copy_of(self, live: torch.Tensor, start: int, arena: Arena) -> torch.Tensor:
        """A copy of the live bytes from this one on; outside of the lock."""
        if self.ring is not None:
            copy = byte_view(live)[start : self.copied_from].clone()
            self.ring.wait_for_current()
            return copy
        if not live.is_cpu:
            return steadily(live, torch.clone)
        if not self.is_flat:
            return copied_to(arena.take(self.size_bytes), live)
        copy = arena.take(self.copied_from - start)
        return steadily(live, lambda source: copy.copy_(byte_view(source)[start : self.copied_from]))

    def moved(self, copy: torch.Tensor, start: int) -> None:
        """Note that the owner has copied the leaf from this byte on; on the CPU, into memory with its bytes in order."""
        self.is_flat = self.is_flat or copy.is_cpu  # first: an interrupt may come in between
        self.copy, self.copied_from, self._moving = copy, start, None

    def narrow(self, first: int, end: int) -> None:
        """Note that the writer needs these bytes only; other ranks write the rest. A leaf whose bytes are not in order is still copied whole."""
        self.first, self.end = first, end
        if self.is_flat and self.moving_from is None:
            self.read = first
            if self.copy is None:
                self.copied_from = end

    def release(self) -> None:
        """Read nothing more from the leaf."""
        self.live = self.copy = self._array = self._flat = None

    # --- the writer's thread -----------------------------------------------------------------------------------------

    def pieces(self, piece_bytes: int, place: Place | None = None, *, until: int | None = None) -> Iterator[memoryview]:
        """The bytes of the leaf that the writer needs, as they were when it was held, in order; they can be read once.

        Args:
            piece_bytes: the largest piece. Each is used before the next one is asked for.
            place: returns the memory to write a piece into; None for a buffer made here. Pieces from a device come from its ring.
            until: the byte before which to stop; a later call continues there. None for all.

        Raises:
            SaveFailed: if the leaf was written to without `Hold.protect`.
        """
        end = self.end if until is None else until
        if not self.is_flat:
            self._flatten()
        with self.handover.mutex:
            self.read = max(self.read, self.first)
        if self.ring is not None:
            for host in self.ring.pieces(lambda: self._begin_piece(end)):
                yield memoryview(host.numpy())  # type: ignore[arg-type]  # an array is a buffer; this memory is the ring's own
            return
        place = place or _scratch(min(piece_bytes, end - self.read))
        while self.read < end:
            wanted = place(min(piece_bytes, end - self.read))  # first, because it may have to wait
            taken = self._take_piece(wanted)
            if taken is not None:
                yield taken
        if end == self.end:
            with self.handover.mutex:
                self.release()
        self.handover.owner.ring()

    def peek(self, start: int, memory: memoryview) -> None:
        """Copy bytes of the leaf as they were when it was held; they can be read again.

        The owner waits while a piece is copied, and not longer: between two pieces, its update copies what is still unread, as it does while the
        leaf is written.

        Args:
            start: the first byte, at least ``first``.
            memory: for as many bytes as are wanted, up to ``end``.

        Raises:
            SaveFailed: if the leaf was written to without `Hold.protect`.
        """
        taken = 0
        while taken < len(memory):
            taken += self._peek_at(start + taken, memory[taken:])

    def end_peek(self, *, is_read: bool) -> None:
        """Free what `peek` needed.

        Args:
            is_read: whether the leaf was read to its end, and need not be written.
        """
        self._flat = None
        if is_read:
            with self.handover.mutex:
                self.release()
            self.handover.owner.ring()

    def _peek_at(self, start: int, wanted: memoryview) -> int:
        """Copy some of the bytes from one on, live or copied; return how many. None are, if the memory was replaced meanwhile."""
        handover, begun = self.handover, None
        with self._unmoved(start):
            handover.check(self.name)
            moving_from = self.moving_from
            is_copy = start >= self.copied_from
            source, first = (self.copy, self.copied_from) if is_copy else (self.live, 0)
            assert source is not None
            self._check_there(source)
            address, stop = source.data_ptr(), start + len(wanted)
            if not is_copy:
                stop = min(stop, self.copied_from if moving_from is None else moving_from)
            if self.ring is not None:
                handover.watch.look_at(self.name)
                stop = min(stop, start + self.ring.piece_bytes)
                begun = self.ring.begin(byte_view(source)[start - first : stop - first])
            else:
                array = self._array_of(source) if self.is_flat else self._flattened(source)
                np.copyto(np.frombuffer(wanted[: stop - start], dtype=np.uint8), array[start - first : stop - first])
                if not is_copy:
                    handover.watch.look_at(self.name)
            handover.check(self.name)
            is_taken = source.data_ptr() == address
        if begun is not None:
            begun[1].synchronize()
            wanted[: stop - start] = memoryview(begun[0].numpy())  # type: ignore[arg-type]  # as in `pieces`
        return stop - start if is_taken else 0

    def _flattened(self, source: torch.Tensor) -> Bytes:
        """The bytes of a leaf that are not in order, copied once for a whole peek."""
        if self._flat is None:
            self._flat = byte_array(copied_to(Arena(self.size_bytes).take(self.size_bytes), source))
        return self._flat

    @contextmanager
    def _unmoved(self, at: int | None = None) -> Iterator[None]:
        """Wait while the owner copies the next bytes, or those from one on, and keep it from starting such a copy meanwhile."""
        while True:
            with self.handover.mutex:
                moving_from = self.moving_from
                if moving_from is None or (self.is_flat and (self.read if at is None else at) < moving_from):
                    yield
                    return
            self.handover.writer.wait()

    def _take_piece(self, wanted: memoryview) -> memoryview | None:
        """Copy the next piece into the wanted memory; None if the leaf's memory was replaced meanwhile, so the piece must be read again.

        The live bytes themselves are not written: a slow disk must not delay an update.
        """
        handover = self.handover
        with self._unmoved():
            handover.check(self.name)
            source, start, stop = self._next_bytes(len(wanted))
            is_live = source is self.live
            array, taken = self._array_of(source), wanted[: stop - self.read]
            self.pinned_to = stop if is_live else 0
        try:
            np.copyto(np.frombuffer(taken, dtype=np.uint8), array[self.read - start : stop - start])
        finally:
            with handover.mutex:
                if is_live:
                    handover.watch.look_at(self.name)
                is_taken = self._array is not None and self._array[0].data_ptr() == self._array[1]
                self.read, self.pinned_to = stop if is_taken else self.read, 0
            handover.owner.ring()
        with handover.mutex:
            handover.check(self.name)
        return taken if is_taken else None

    def _begin_piece(self, end: int) -> Begun | None:
        """Begin to read the next piece on a device; a write that comes later waits for it there."""
        if self.read >= end or self.ring is None:
            return None
        with self._unmoved():
            self.handover.watch.look_at(self.name)
            self.handover.check(self.name)
            source, start, stop = self._next_bytes(min(self.ring.piece_bytes, end - self.read))
            begun = self.ring.begin(byte_view(source)[self.read - start : stop - start])
            self.read = stop
        self.handover.owner.ring()
        return begun

    def _flatten(self) -> None:
        """Copy a leaf whose bytes are not in order, or not on the CPU; from then on the live tensor may change."""
        handover = self.handover
        with self._unmoved():
            handover.check(self.name)
            if self.is_flat:
                return  # the owner has just copied it
            source = self.live if self.copy is None else self.copy
            assert source is not None
            self._check_there(source)
            self.pinned_to = self.size_bytes if self.copy is None else 0
        flat = copied_to(Arena(self.size_bytes).take(self.size_bytes), source)
        with handover.mutex:
            if self.pinned_to:
                handover.watch.look_at(self.name)
            self.copy, self.copied_from, self.pinned_to, self.is_flat = flat, 0, 0, True
            handover.check(self.name)
        handover.owner.ring()

    def _next_bytes(self, piece_bytes: int) -> tuple[torch.Tensor, int, int]:
        """What to read next, live or copied; which of its bytes is the source's first; and up to where."""
        moving_from = self.moving_from
        is_copy = self.read >= self.copied_from
        end = self.size_bytes if is_copy else self.copied_from if moving_from is None else moving_from
        source, start = (self.copy, self.copied_from) if is_copy else (self.live, 0)
        assert source is not None
        self._check_there(source)
        return source, start, min(self.read + piece_bytes, end)

    def _array_of(self, source: torch.Tensor) -> Bytes:
        """The memory that the leaf is read from; looked up again for each piece, because it may be replaced."""
        address = source.data_ptr()
        if self._array is None or self._array[0] is not source or self._array[1] != address:
            self._array = source, address, byte_array(byte_view(source))
        return self._array[2]

    def _check_there(self, source: torch.Tensor) -> None:
        if is_gone(source) or (source is self.live and self.is_replaced):
            raise SaveFailed(
                self.name[1],
                expected="memory that stays until it is saved",
                found="memory that was given back or replaced meanwhile, as untyped_storage().resize_(0) or an assignment to .data do",
                fix="call manager.wait_staging() before you resize or free what is being saved",
            )


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor are in order and readable in place."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()) and (tensor.is_cpu or tensor.is_cuda)


def copied_to(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, row-major, in this memory.

    Examples:
        >>> copied_to(torch.empty(2, dtype=torch.uint8), torch.tensor([True, False]))
        tensor([1, 0], dtype=torch.uint8)
    """
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)  # else the copy makes a 1 of every byte that is not 0
    wanted = memory.view(tensor.dtype).view(tensor.shape)
    steadily(tensor, wanted.copy_)
    return memory


def _scratch(size_bytes: int) -> Place:
    memory = memoryview(bytearray(size_bytes))
    return lambda wanted_bytes: memory[:wanted_bytes]
