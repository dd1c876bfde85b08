"""`Hold`: a background reader of a state's leaves. An update that overtakes it first copies or waits for the unread bytes."""

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Final, final

import torch

from trainfold.backends.hold.copy_room import CopyRoom
from trainfold.backends.hold.held_leaf import Handover, HeldLeaf, Move, is_flat
from trainfold.backends.hold.pinned_ring import PinnedRing
from trainfold.backends.hold.write_watch import LeafName, WriteWatch
from trainfold.backends.stores.protocol import Place

DEVICE_PIECE_BYTES: Final = 8 << 20  # a copy from a device costs a launch, so pieces are larger than those in memory
_IS_CUDA, _IS_INFERENCE = attrgetter("is_cuda"), torch.Tensor.is_inference


@final
class Hold:
    """Keeps leaves as they are now until a writer has read them, and copies as few bytes as it can.

    The writer reads piece by piece in its own thread while the owner of the leaves reads them too. Before the owner writes to them it
    calls `protect`: of the bytes that are still unread, the last ones are copied, as many as ``max_extra_bytes`` has room for, and
    the first ones, which the writer is about to reach, are waited for.

    A leaf that was written to without `protect` shows by its version counter, and the save fails. Torch moves the counter when
    a kernel returns, which may be after the last piece was read. So every leaf is looked at once more, whether it was read or
    not: by `protect` (later writes are announced), or, without one, by `check_unchanged` before the commit, which waits until the
    thread that made the hold has left the kernel that it is in. Only ``check`` shows what the counters do not: writes through
    ``tensor.data`` or numpy, fused optimizers, and a kernel that is at work from the reading of its leaf to the last look, in
    another thread or for longer than that wait. A program that writes by such means calls `protect` before.

    The leaves stay in memory until that look, and not only until they have been read.

    Args:
        leaves: the tensors by name, in the order of reading as far as it is known.
        unannounced: names of leaves that are copied at once, because nothing announces when they change. `settle` waits until those
            without room have been read.
        max_extra_bytes: how many bytes may be copied in all; None for as many as there are; 0: wait, never copy. See `CopyRoom`.
        counters: tensors whose version counters move at writes to leaves: see `WriteWatch`.
        check: whether the bytes are digested now and at the last look, and compared with what was written, to find a writer that
            moves no version counter. Of a leaf that other ranks write too, only the writer of the first elements compares what was written.

    Attributes:
        stalled_secs: for how long `protect` has kept the owner waiting, to copy or until bytes were read; threads that wait at the same time count
            once.

    Examples:
        >>> weight = torch.zeros(4)
        >>> hold = Hold({("model", "w"): weight})
        >>> hold.protect()
        >>> _ = weight.fill_(1.0)
        >>> [bytes(piece).hex() for piece in hold.pieces(("model", "w"), 8)], hold.copied_bytes
        (['0000000000000000', '0000000000000000'], 16)
    """

    def __init__(
        self,
        leaves: Mapping[LeafName, torch.Tensor],
        *,
        unannounced: Collection[LeafName] = (),
        max_extra_bytes: int | None = None,
        counters: Mapping[LeafName, torch.Tensor] | None = None,
        check: bool = False,
    ) -> None:
        self._protecting = threading.Lock()  # optimizers may step in several threads
        self._room = CopyRoom(max_extra_bytes)
        self._is_protected = False
        self.stalled_secs = 0.0
        self._process = os.getpid()
        self._rings: dict[torch.device, PinnedRing] = {}
        # other tensors of the same memory and counter: `.data =` and `swap_tensors` lead the owner's elsewhere
        leaves = dict(zip(leaves, map(torch.Tensor.detach, leaves.values()), strict=True))
        if any(map(_IS_CUDA, leaves.values())):
            for device in {tensor.device for tensor in leaves.values() if tensor.is_cuda}:
                self._ring(device)  # now, because it reads after what the device was given to do before
        apart = set(unannounced)
        if any(map(_IS_INFERENCE, leaves.values())):
            apart |= {name for name, tensor in leaves.items() if tensor.is_inference()}
        self._handover = Handover(WriteWatch(leaves, counters=counters, but=apart, by_bytes=check))
        self._mutex, self._watch = self._handover.mutex, self._handover.watch
        copies = self._room.copy_at_once({name: leaves[name] for name in apart}) if apart else {}
        self._waited = apart - copies.keys()
        # what is left to look at when the call is over
        self._given: tuple[Mapping[LeafName, torch.Tensor], list[int | None], dict[LeafName, torch.Tensor]] | None = (
            leaves,
            _addresses(leaves.values()),
            copies,
        )
        self._leaves: dict[LeafName, HeldLeaf] = {}
        self._order: list[HeldLeaf] = []

    @property
    def is_over(self) -> bool:
        """Whether the hold will read nothing more, and look at nothing more."""
        return self._handover.is_over and self._watch.is_over

    @property
    def copied_bytes(self) -> int:
        """How many bytes were copied in all."""
        return self._room.copied_bytes

    @property
    def protected_bytes(self) -> int:
        """How many bytes were copied by `protect`."""
        return self._room.protected_bytes

    # --- the writer's thread -----------------------------------------------------------------------------------------

    def read_in_order(
        self, names: Iterable[LeafName], *, parts: Mapping[LeafName, tuple[int, int]] | None = None
    ) -> None:
        """Name the leaves in the order in which they will be read; the others are released.

        Args:
            names: of the leaves.
            parts: the first byte and the end of those of which only some bytes will be read.
        """
        with self._mutex:
            self._unpack()
            chosen = {name: self._leaves[name] for name in names}
            for name, leaf in self._leaves.items():
                if name not in chosen:
                    leaf.release()
            for name, (first, end) in (parts or {}).items():
                chosen[name].narrow(first, end)
            self._order = list(chosen.values())
            self._watch.keep(chosen.keys())

    def leaves_of(self, component: str) -> dict[str, HeldLeaf]:
        """The leaves of a component by path, to be written."""
        with self._mutex:
            self._unpack()
        return {name[1]: leaf for name, leaf in self._leaves.items() if name[0] == component}

    def prepare(self, size_bytes: int) -> None:
        """Prepare memory for copies, so that `protect` need not wait for it.

        Args:
            size_bytes: how much, such as the last save had to copy.
        """
        try:
            with self._mutex:
                self._unpack()
                if self._handover.is_over or self._is_protected:
                    return  # a thread that comes late would only add to what has been copied
                reserved = self._room.reserve(self._order, size_bytes)
            if reserved is not None:
                reserved[0].make_present(reserved[1])
        except (MemoryError, OSError, RuntimeError):
            return  # it is only a preparation

    def pieces(self, name: LeafName, piece_bytes: int, place: Place | None = None) -> Iterator[memoryview]:
        """The bytes of a leaf: see `HeldLeaf.pieces`."""
        with self._mutex:
            self._unpack()
            if name not in self._leaves:
                self._handover.check(name)
            leaf = self._leaves[name]
        yield from leaf.pieces(piece_bytes, place)

    def check_unchanged(self) -> None:
        """Look once more at the leaves that were read, after they are written and before the commit.

        Raises:
            SaveFailed: if a leaf was written to without `protect`, at whatever time since the hold was made.
        """
        self._watch.wait_for_kernels()
        with self._mutex:
            self._watch.end()
            self._watch.check()

    def check_written(self, component: str, digests: Mapping[str, str]) -> None:
        """Compare the written bytes of a component, path by path, with the held ones; without ``check`` nothing is compared.

        Args:
            component: its name.
            digests: path -> digest, of leaves that were read whole.

        Raises:
            SaveFailed: if the bytes of a leaf are not those that it had in the call.
        """
        with self._mutex:
            for path, digest in digests.items():
                self._watch.compare((component, path), digest)
            self._watch.check()

    def release(self) -> None:
        """Release everything: the save has ended, or failed. `written` is known after this."""
        with self._mutex:
            self._handover.is_over = True
            self._unpack()
            self._watch.look()
            if not self._watch.written:
                self._watch.end()
            for leaf in self._leaves.values():
                leaf.release()
            self._room.release()
        self._handover.owner.ring()
        self._handover.writer.ring()

    def forget(self) -> None:
        """Free the rest, in the writer's thread rather than in the owner's next call; the writer asks for nothing more."""
        with self._mutex:
            self._leaves, self._order = {}, []

    # --- the owner's thread ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Return when the unannounced leaves that had no room have been read; the saving call ends with this."""
        if self._waited:
            with self._protecting:
                self._wait_for(lambda: [self._leaves[name] for name in self._waited])

    def protect(self) -> None:
        """Return when the leaves may be written to. A second call costs next to nothing.

        In a forked process it returns at once: the writer is in the parent, and so is the memory that it reads.
        """
        if not self.is_over and self._process == os.getpid():
            with self._protecting:
                began = time.monotonic()
                try:
                    self._protect()
                finally:
                    self.stalled_secs += time.monotonic() - began

    def written(self) -> frozenset[LeafName]:
        """All leaves that were written to without `protect`, not only the one that made the save fail.

        After `release` it is asked once, and releases them.
        """
        if self._process == os.getpid():
            with self._mutex:
                self._watch.look()
                if self._handover.is_over:
                    self._watch.end()
        return frozenset(self._watch.written)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _protect(self) -> None:
        move = Move()
        try:
            with self._mutex:
                self._unpack()
                self._is_protected = True
                self._watch.look()
                chosen = self._room.choose(self._order)
                for leaf, start in chosen:
                    leaf.move(move, start)
            self._copy(chosen)
        finally:
            move.is_over = True
            self._handover.writer.ring()
        self._wait_for(lambda: self._order)
        with self._mutex:
            self._watch.end()  # not before: a kernel of another thread may have returned while this one waited
            for leaf in self._order:
                leaf.live = None
        for ring in self._rings.values():
            ring.order_writes()

    def _copy(self, chosen: list[tuple[HeldLeaf, int]]) -> None:
        """Copy leaves. The writer waits for a leaf while it is being copied, and continues from the copy."""
        try:
            with self._mutex:
                arena = self._room.arena_for(chosen)
            for leaf, start in chosen:
                live = leaf.live
                if live is None:
                    continue  # released meanwhile, or because it is not read
                if leaf.is_replaced:
                    return  # the writer notices, and fails
                copy = leaf.copy_of(live, start, arena)
                with self._mutex:
                    if self._handover.is_over:
                        return
                    self._room.count(leaf.copied_from - start)
                    leaf.moved(copy, start)
                self._handover.writer.ring()
        except (MemoryError, RuntimeError, OSError):
            return  # no memory: what is not copied is waited for

    def _wait_for(self, leaves: Callable[[], Iterable[HeldLeaf]]) -> None:
        """Return when the writer no longer needs these leaves unchanged."""
        while True:
            with self._mutex:
                self._unpack()
                if self._handover.is_over or not any(leaf.is_exposed for leaf in leaves()):
                    return
            self._handover.owner.wait()

    def _unpack(self) -> None:
        """Unpack the given leaves, in the first thread that needs them; repeated if an interrupt came in between."""
        if self._given is not None:
            tensors, homes, copies = self._given
            self._leaves = {
                name: self._held(name, tensor, home, copies.get(name))
                for (name, tensor), home in zip(tensors.items(), homes, strict=True)
            }
            self._order = list(self._leaves.values())
            self._given = None

    def _held(self, name: LeafName, tensor: torch.Tensor, home: int | None, copy: torch.Tensor | None) -> HeldLeaf:
        dtype, shape, size, shared = tensor.dtype, tensor.shape, tensor.nbytes, self._handover
        if copy is not None:
            return HeldLeaf(name=name, dtype=dtype, shape=shape, size_bytes=size, handover=shared, copied_from=0, copy=copy)  # fmt: skip
        flat = is_flat(tensor)
        return HeldLeaf(name=name, dtype=dtype, shape=shape, size_bytes=size, handover=shared, copied_from=size, live=tensor,
                        is_flat=flat, ring=self._ring(tensor.device) if flat and tensor.is_cuda else None, home=home)  # fmt: skip

    def _ring(self, device: torch.device) -> PinnedRing:
        if device not in self._rings:
            self._rings[device] = PinnedRing(device, DEVICE_PIECE_BYTES)
        return self._rings[device]


def _addresses(tensors: Collection[torch.Tensor]) -> list[int | None]:
    """The current address of each leaf's memory."""
    try:
        return list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:  # one of them has no memory, and is refused by name elsewhere
        return [None] * len(tensors)
