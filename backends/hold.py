"""`Hold`: a background reader of a state's leaves, which an update may overtake: then the unread bytes are copied or waited for."""

import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, TypeAlias, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trainfold.backends.arena import Arena, padded
from trainfold.backends.owner_thread import OwnerThread
from trainfold.backends.pinned_ring import Begun, PinnedRing
from trainfold.backends.protocols import Place
from trainfold.core.codec import byte_view
from trainfold.core.errors import SaveFailed

Bytes: TypeAlias = npt.NDArray[np.uint8]
LeafName: TypeAlias = tuple[str, str]
"""A component and a leaf path in it."""

DEVICE_PIECE_BYTES: Final = 8 << 20  # a copy from a device costs a launch, so pieces are larger than those in memory


@final
@attrs.frozen(eq=False)
class HeldLeaf:
    """One leaf of a hold, as something to write: see `trainfold.backends.native_writer.Source`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    _hold: "Hold"
    _name: LeafName

    def pieces(self, piece_bytes: int, place: Place | None = None) -> Iterator[memoryview]:
        """The bytes of the leaf as they were when the hold was made."""
        return self._hold.pieces(self._name, piece_bytes, place)


@final
@attrs.define(eq=False)
class _Held:
    """One leaf: the bytes ``[read, copied_from)`` are still to be read from the live tensor, those after it from ``copy``."""

    live: torch.Tensor | None
    size_bytes: int
    is_flat: bool  # its bytes lie in order, so that a part of them can be read or copied
    ring: PinnedRing | None = None  # what reads it, on a device
    read: int = 0
    pinned_to: int = 0  # the writer has a view of the bytes [read, pinned_to) in its hands
    moving_from: int | None = None  # these bytes are being copied just now
    copied_from: int = -1
    copy: torch.Tensor | None = None
    array: tuple[torch.Tensor, Bytes] | None = None  # what it is read from, and that as bytes

    @property
    def is_exposed(self) -> bool:
        """Whether a write to the live tensor would change what is saved."""
        return self.live is not None and (self.read < self.copied_from or self.read < self.pinned_to)


@final
class Hold:
    """Keeps leaves as they are now until a writer has read them, and copies as few bytes as it can.

    The writer reads piece by piece (`pieces`) in a thread of its own while the owner of the leaves reads them too. Before
    the owner writes to them it calls `protect`: of the bytes that are still unread, the last ones are copied, as many as
    ``max_extra_bytes`` has room for, and the first ones, which the writer is about to reach, are waited for.

    A leaf that was written to without `protect` is noticed by its version counter, and the save fails. Torch moves the
    counter when a kernel returns, which may be after the last piece was read; so every leaf is looked at once more, whether
    it was read or not, by `protect` (what comes later is announced) or, where nobody announced anything, by
    `check_unchanged`, before the commit, which waits until the thread that made the hold has left the kernel that it is in.
    What the counters do not show is not seen, and saved torn: writes through ``tensor.data`` or numpy, fused optimizers, and a kernel that
    is at work from the reading of its leaf to the last look, in another thread or for longer than `OwnerThread` waits. Who
    writes by such means calls `protect` before.

    The leaves stay in memory until that look, and not only until they have been read.

    Args:
        leaves: the tensors by name, in the order of reading as far as it is known.
        copied: names of leaves that are copied at once, because nobody says when they change.
        max_extra_bytes: how many bytes may be copied in all; None for as many as there are; 0: wait, never copy.

    Attributes:
        copied_bytes: how many were copied in all.
        protected_bytes: how many of them by `protect`.

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
        copied: Collection[LeafName] = (),
        max_extra_bytes: int | None = None,
    ) -> None:
        self._changed = threading.Condition()
        self._protecting = threading.Lock()  # optimizers may step in several threads
        self._room = max_extra_bytes
        self._arena: Arena | None = None
        self._is_over = False
        self._torn: LeafName | None = None  # the first leaf that was found to be written to
        self._written: set[LeafName] = set()
        self._process = os.getpid()
        self._owner = OwnerThread()
        self._rings: dict[torch.device, PinnedRing] = {}
        self.copied_bytes = 0
        self.protected_bytes = 0
        leaves = dict(
            zip(leaves, map(torch.Tensor.detach, leaves.values()), strict=True)
        )  # `.data = ` leads owners elsewhere
        for device in {tensor.device for tensor in leaves.values() if tensor.is_cuda}:
            self._ring(device)  # now, because what it reads comes after what the device was given to do before
        at_once = {key for key, tensor in leaves.items() if tensor.is_inference()}.union(copied)
        self._leaves = {key: self._copied(leaves[key]) for key in at_once}
        self._watched = {key: (tensor, tensor._version) for key, tensor in leaves.items() if key not in at_once}  # noqa: SLF001  # torch has no public name for the counter of writes
        self._given: Mapping[LeafName, torch.Tensor] | None = leaves  # what is left to look at, when the call is over
        self._specs: dict[LeafName, tuple[torch.dtype, torch.Size]] = {}
        self._order: list[_Held] = []

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be read, or looked at."""
        return self._is_over and not self._watched

    # --- the writer's thread -----------------------------------------------------------------------------------------

    def read_in_order(self, names: Iterable[LeafName]) -> None:
        """Say in which order the leaves will be read; those that will not be are let go."""
        with self._changed:
            self._unpack()
            chosen = {name: self._leaves[name] for name in names}
            for name, leaf in self._leaves.items():
                if name not in chosen:
                    leaf.live, leaf.copy = None, None
            self._order = list(chosen.values())
            self._watched = {name: seen for name, seen in self._watched.items() if name in chosen}
            self._changed.notify_all()

    def leaves_of(self, component: str) -> dict[str, HeldLeaf]:
        """The leaves of a component by path, to be written."""
        with self._changed:
            self._unpack()
        mine = {name[1]: (name, spec) for name, spec in self._specs.items() if name[0] == component}
        return {path: HeldLeaf(*spec, self, name) for path, (name, spec) in mine.items()}

    def prepare(self, size_bytes: int) -> None:
        """Get memory for copies ready, so that `protect` need not wait for it; as much as the last save had to copy, say."""
        room = size_bytes if self._room is None else min(size_bytes, self._room - self.copied_bytes)
        if room > 0:
            try:
                arena = Arena(room)
                arena.make_present()
            except (MemoryError, OSError, RuntimeError):
                return  # it is no more than a preparation
            with self._changed:
                if not self._is_over and self._arena is None:
                    self._arena = arena

    def pieces(self, name: LeafName, piece_bytes: int, place: Place | None = None) -> Iterator[memoryview]:
        """The bytes of a leaf as they were, in order.

        Args:
            name: the leaf; each is read once.
            piece_bytes: the largest piece; each is used before the next one is asked for.
            place: where they are wanted; None for a buffer of the hold's own. Pieces from a device come from its ring.

        Raises:
            SaveFailed: if the leaf was written to without `protect`.
        """
        with self._changed:
            self._unpack()
        leaf = self._leaves[name]
        if not leaf.is_flat:
            self._flatten(name, leaf)
        if leaf.ring is not None:
            ring = leaf.ring
            for host in ring.pieces(lambda: self._begun(name, leaf, ring)):
                yield memoryview(host.numpy())  # type: ignore[arg-type]  # an array is a buffer
            return
        place = place or _scratch(min(piece_bytes, leaf.size_bytes))
        while leaf.read < leaf.size_bytes:
            wanted = place(min(piece_bytes, leaf.size_bytes - leaf.read))  # first, because it may have to wait
            with self._pinned(name, leaf, len(wanted)) as piece:
                # not the live bytes themselves: nobody but a copy may hold an update up, least of all a disk
                taken = wanted[: piece.nbytes]
                np.copyto(np.frombuffer(taken, dtype=np.uint8), piece)
            yield taken
        with self._changed:
            leaf.live = leaf.copy = leaf.array = None
            self._changed.notify_all()

    def _begun(self, name: LeafName, leaf: _Held, ring: PinnedRing) -> Begun | None:
        """Begin to read the next piece on a device; a write that comes later waits for it there."""
        with self._changed:
            if leaf.read == leaf.size_bytes:
                return None
            self._changed.wait_for(lambda: leaf.moving_from is None or leaf.read < leaf.moving_from)
            self._look_at(name)
            self._check(name)
            source, start, stop = self._next(leaf, ring.piece_bytes)
            begun = ring.begin(byte_view(source)[leaf.read - start : stop - start])
            leaf.read = stop
            self._changed.notify_all()
            return begun

    def check_unchanged(self) -> None:
        """Look once more at what was read, when all of it is written and nothing is committed.

        Raises:
            SaveFailed: if a leaf was written to without `protect`, at whatever time since the hold was made.
        """
        if self._watched:
            self._owner.wait_until_it_moves()
        with self._changed:
            self._settle()
            self._check_torn()

    def release(self) -> None:
        """Let go of everything: the save is done, or has failed; then what was written to is known when `written` is asked."""
        with self._changed:
            self._is_over = True
            self._unpack()
            self._look()
            if not self._written:
                self._watched = {}
            for leaf in self._leaves.values():
                leaf.live = leaf.copy = leaf.array = None
            self._arena = None
            self._changed.notify_all()

    # --- the owner's thread ------------------------------------------------------------------------------------------

    def protect(self) -> None:
        """Return when the leaves may be written to. Calling it again costs next to nothing.

        In a process that was forked off it returns at once: the writer is in the parent, and so is the memory that it reads.
        """
        if not self.is_over and self._process == os.getpid():
            with self._protecting:
                self._protect()

    def written(self) -> frozenset[LeafName]:
        """The leaves that were written to without `protect`; after `release` it is asked once, and lets go of them.

        So a loop that writes to many leaves hears of all of them, and not only of the one that made the save fail.
        """
        if self._process == os.getpid():
            with self._changed:
                self._look()
                if self._is_over:
                    self._watched = {}
        return frozenset(self._written)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _protect(self) -> None:
        with self._changed:
            self._unpack()
            self._look()
            chosen = self._choose()
            for leaf, start in chosen:
                leaf.moving_from = start
        try:
            self._move(chosen)
        finally:
            with self._changed:
                for leaf, _ in chosen:
                    leaf.moving_from = None
                self._changed.notify_all()
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or not any(leaf.is_exposed for leaf in self._order))
            self._settle()  # not before: somebody else's kernel may have returned while this one waited
            for leaf in self._order:
                leaf.live = None
        for ring in self._rings.values():
            ring.order_writes()

    def _unpack(self) -> None:
        """Look at what was given, in whichever thread is the first to need it."""
        given, self._given = self._given, None
        if given is not None:
            self._specs = {key: (tensor.dtype, tensor.shape) for key, tensor in given.items()}
            at_once = self._leaves
            self._leaves = {key: at_once.get(key) or self._taken(tensor) for key, tensor in given.items()}
            self._order = list(self._leaves.values())

    def _copied(self, tensor: torch.Tensor) -> _Held:
        copy = byte_view(tensor.to("cpu", copy=True))
        self.copied_bytes += tensor.nbytes
        return _Held(None, tensor.nbytes, is_flat=True, copied_from=0, copy=copy)

    def _taken(self, tensor: torch.Tensor) -> _Held:
        is_flat = (
            tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()) and (tensor.is_cpu or tensor.is_cuda)
        )
        ring = self._ring(tensor.device) if is_flat and tensor.is_cuda else None
        return _Held(tensor, tensor.nbytes, is_flat, ring, copied_from=tensor.nbytes)

    def _ring(self, device: torch.device) -> PinnedRing:
        if device not in self._rings:
            self._rings[device] = PinnedRing(device, DEVICE_PIECE_BYTES)
        return self._rings[device]

    def _choose(self) -> list[tuple[_Held, int]]:
        """What to copy, from which byte on: the last of the unread bytes, because the first ones are read the soonest."""
        room = None if self._room is None else self._room - self.copied_bytes
        chosen = []
        for leaf in reversed(self._order):
            start = max(leaf.read, leaf.pinned_to)
            left = leaf.copied_from - start
            if not leaf.is_exposed or left <= 0 or leaf.moving_from is not None:
                continue
            if room is not None and left > room:
                start = leaf.copied_from - room
                if room <= 0 or not leaf.is_flat:
                    break
            chosen.append((leaf, start))
            if room is not None:
                room -= leaf.copied_from - start
        return chosen[::-1]

    def _move(self, chosen: list[tuple[_Held, int]]) -> None:
        """Copy; the writer waits for a leaf while it is being copied, and goes on from the copy."""
        wanted = sum(padded(leaf.copied_from - start) for leaf, start in chosen if leaf.is_flat and leaf.ring is None)
        try:
            arena = self._arena_of(wanted)
            for leaf, start in chosen:
                live = leaf.live
                if live is None:
                    continue  # released meanwhile, or let go because it is not read
                if not leaf.is_flat:
                    copy = live.detach().clone()
                elif leaf.ring is not None:
                    copy = byte_view(live)[start : leaf.copied_from].clone()
                    leaf.ring.wait_for_current()
                else:
                    unread = byte_view(live)[start : leaf.copied_from]
                    copy = arena.take(unread.numel()).copy_(unread)
                with self._changed:
                    if self._is_over:
                        return
                    self.copied_bytes += leaf.copied_from - start
                    self.protected_bytes += leaf.copied_from - start
                    leaf.copy, leaf.copied_from, leaf.moving_from = copy, start, None
                    self._changed.notify_all()
        except (MemoryError, RuntimeError, OSError):
            return  # no memory: what is not copied is waited for

    def _arena_of(self, size_bytes: int) -> Arena:
        """Memory for so many bytes: what `prepare` has made ready, if that is enough."""
        with self._changed:
            ready, self._arena = self._arena, None
        return ready if ready is not None and ready.left_bytes >= size_bytes else Arena(size_bytes)

    @contextmanager
    def _pinned(self, name: LeafName, leaf: _Held, piece_bytes: int) -> Iterator[Bytes]:
        """The next piece; if it is of the live tensor, `protect` waits until it has been taken."""
        with self._changed:
            self._changed.wait_for(lambda: leaf.moving_from is None or leaf.read < leaf.moving_from)
            self._check(name)
            source, start, stop = self._next(leaf, piece_bytes)
            is_live = source is leaf.live
            if leaf.array is None or leaf.array[0] is not source:
                leaf.array = source, byte_view(source).numpy()
            leaf.pinned_to = stop if is_live else 0
        try:
            yield leaf.array[1][leaf.read - start : stop - start]
        finally:
            with self._changed:
                if is_live:
                    self._look_at(name)
                leaf.read, leaf.pinned_to = stop, 0
                self._changed.notify_all()
        self._check(name)

    def _next(self, leaf: _Held, piece_bytes: int) -> tuple[torch.Tensor, int, int]:
        """What the next bytes are to be read from, live or copied; of which byte it has the first one; and where they end."""
        end = leaf.copied_from if leaf.moving_from is None else leaf.moving_from
        is_copy = leaf.read >= leaf.copied_from
        stop = min(leaf.read + piece_bytes, leaf.size_bytes if is_copy else end)
        source, start = (leaf.copy, leaf.copied_from) if is_copy else (leaf.live, 0)
        assert source is not None
        return source, start, stop

    def _flatten(self, name: LeafName, leaf: _Held) -> None:
        """Copy a leaf whose bytes do not lie in order, or not on the CPU; from then on the live one may change."""
        with self._changed:
            self._changed.wait_for(lambda: leaf.moving_from is None)
            source = leaf.live if leaf.copy is None else leaf.copy
            assert source is not None
            leaf.pinned_to = leaf.size_bytes if leaf.copy is None else 0
        flat = byte_view(source.detach().cpu())
        with self._changed:
            if leaf.pinned_to:
                self._look_at(name)
            leaf.copy, leaf.copied_from, leaf.pinned_to, leaf.is_flat = flat, 0, 0, True
            self._changed.notify_all()
        self._check(name)

    def _settle(self) -> None:
        """Look at everything for the last time: from now on, whoever writes may."""
        self._look()
        self._watched = {}

    def _look(self) -> None:
        for name, (tensor, version) in self._watched.items():
            if tensor._version != version:  # noqa: SLF001  # as above
                self._note(name)

    def _look_at(self, name: LeafName) -> None:
        tensor, version = self._watched.get(name, (None, 0))
        if tensor is not None and tensor._version != version:  # noqa: SLF001  # as above
            self._note(name)

    def _note(self, name: LeafName) -> None:
        self._written.add(name)
        if self._torn is None:
            self._torn = name

    def _check(self, name: LeafName) -> None:
        self._check_torn()
        if self._is_over:
            raise SaveFailed(name[1], expected="a hold", found="a released one", mend="save again")

    def _check_torn(self) -> None:
        if self._torn is not None:
            raise SaveFailed(
                self._torn[1],
                expected="a leaf that does not change while it is being saved",
                found="a write to it before the next optimizer step",
                mend="nothing: it is copied from now on, which costs each save the time of the copy; or call manager.wait_staging() "
                "before you change it; the checkpoints before this one are whole",
            )


def _scratch(size_bytes: int) -> Place:
    memory = memoryview(bytearray(size_bytes))
    return lambda wanted_bytes: memory[:wanted_bytes]
