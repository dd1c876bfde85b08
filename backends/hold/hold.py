"""`Hold`: a background reader of a state's leaves, which an update may overtake: then the unread bytes are copied or waited for."""

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from operator import attrgetter
from typing import Final, final

import attrs
import numpy as np
import torch

from trainfold.backends.hold.copy_arena import Arena, padded
from trainfold.backends.hold.held_leaf import LeafReadState, Move, is_gone, steadily
from trainfold.backends.hold.pinned_ring import Begun, PinnedRing
from trainfold.backends.hold.write_watch import LeafName, WriteWatch
from trainfold.backends.stores.protocol import Place
from trainfold.backends.wakeup import Wakeup
from trainfold.core.errors import SaveFailed
from trainfold.core.tensor_memory import byte_view

DEVICE_PIECE_BYTES: Final = 8 << 20  # a copy from a device costs a launch, so pieces are larger than those in memory
# random states and the like: copied at once though there is no room, as the writer has buffers
SMALL_COPIES_BYTES: Final = 1 << 20
_IS_CUDA, _IS_INFERENCE = attrgetter("is_cuda"), torch.Tensor.is_inference


@final
@attrs.frozen(eq=False)
class HeldLeaf:
    """One leaf of a hold, as something to write: see `trainfold.backends.formats.native.writer.Source`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    _hold: "Hold"
    _name: LeafName

    def pieces(self, piece_bytes: int, place: Place | None = None) -> Iterator[memoryview]:
        """The bytes of the leaf as they were when the hold was made."""
        return self._hold.pieces(self._name, piece_bytes, place)


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
    What the counters do not show is seen with ``check`` alone, and else saved torn: writes through ``tensor.data`` or numpy, fused optimizers, and a kernel that
    is at work from the reading of its leaf to the last look, in another thread or for longer than `OwnerThread` waits. Who
    writes by such means calls `protect` before.

    The leaves stay in memory until that look, and not only until they have been read.

    Args:
        leaves: the tensors by name, in the order of reading as far as it is known.
        unannounced: names of leaves that are copied at once, because nobody says when they change. Where there is no room for
            them, `settle` waits until they have been read.
        max_extra_bytes: how many bytes may be copied in all; None for as many as there are; 0: wait, never copy. Up to
            ``SMALL_COPIES_BYTES`` of what is unannounced are copied all the same.
        check: whether what is held is digested now and at the last look, and what is written is compared with that, so that a
            writer that moves no version counter is found (W16).

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
        unannounced: Collection[LeafName] = (),
        max_extra_bytes: int | None = None,
        check: bool = False,
    ) -> None:
        self._mutex = threading.RLock()  # itself in `with`, and no condition around it: see `Wakeup`
        self._writers_bell = Wakeup()
        self._owners_bell = Wakeup()
        self._protecting = threading.Lock()  # optimizers may step in several threads
        self._room = max_extra_bytes
        self._arena: Arena | None = None
        self._is_over = self._is_protected = False
        self._process = os.getpid()
        self._rings: dict[torch.device, PinnedRing] = {}
        self.copied_bytes = 0
        self.protected_bytes = 0
        # other tensors of the same memory and counter: `.data =` and `swap_tensors` lead the owner's elsewhere
        leaves = dict(zip(leaves, map(torch.Tensor.detach, leaves.values()), strict=True))
        if any(map(_IS_CUDA, leaves.values())):
            for device in {tensor.device for tensor in leaves.values() if tensor.is_cuda}:
                self._ring(device)  # now, because what it reads comes after what the device was given to do before
        apart = set(unannounced)
        if any(map(_IS_INFERENCE, leaves.values())):
            apart |= {name for name, tensor in leaves.items() if tensor.is_inference()}
        self._watch = WriteWatch(leaves, but=apart, by_bytes=check)
        self._leaves = self._copied_at_once({name: leaves[name] for name in apart}) if apart else {}
        self._waited = apart - self._leaves.keys()
        self._homes = _addresses(leaves.values())
        self._given: Mapping[LeafName, torch.Tensor] | None = leaves  # what is left to look at, when the call is over
        self._specs: dict[LeafName, tuple[torch.dtype, torch.Size]] = {}
        self._order: list[LeafReadState] = []

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be read, or looked at."""
        return self._is_over and self._watch.is_over

    # --- the writer's thread -----------------------------------------------------------------------------------------

    def read_in_order(self, names: Iterable[LeafName]) -> None:
        """Say in which order the leaves will be read; those that will not be are let go."""
        with self._mutex:
            self._unpack()
            chosen = {name: self._leaves[name] for name in names}
            for name, leaf in self._leaves.items():
                if name not in chosen:
                    leaf.let_go()
            self._order = list(chosen.values())
            self._watch.keep(chosen.keys())
        self._owners_bell.ring()

    def leaves_of(self, component: str) -> dict[str, HeldLeaf]:
        """The leaves of a component by path, to be written."""
        with self._mutex:
            self._unpack()
        mine = {name[1]: (name, spec) for name, spec in self._specs.items() if name[0] == component}
        return {path: HeldLeaf(*spec, self, name) for path, (name, spec) in mine.items()}

    def prepare(self, size_bytes: int) -> None:
        """Get memory for copies ready, so that `protect` need not wait for it; as much as the last save had to copy, say."""
        try:
            with self._mutex:
                self._unpack()
                room = self._left_room()
                ready = size_bytes if room is None else min(size_bytes, room)
                if ready <= 0 or self._is_over or self._is_protected:
                    return  # a thread that comes late would only add to what has been copied
                # of all that may be copied, so that there is never a second one beside it
                self._arena = arena = Arena(sum(padded(leaf.size_bytes) for leaf in self._order if leaf.is_in_arena))
            arena.make_present(ready)
        except (MemoryError, OSError, RuntimeError):
            return  # it is no more than a preparation

    def pieces(self, name: LeafName, piece_bytes: int, place: Place | None = None) -> Iterator[memoryview]:
        """The bytes of a leaf as they were, in order.

        Args:
            name: the leaf; each is read once.
            piece_bytes: the largest piece; each is used before the next one is asked for.
            place: where they are wanted; None for a buffer of the hold's own. Pieces from a device come from its ring.

        Raises:
            SaveFailed: if the leaf was written to without `protect`.
        """
        with self._mutex:
            self._unpack()
            if name not in self._leaves:
                self._check(name)
            leaf = self._leaves[name]
        if not leaf.is_flat:
            self._flatten(name, leaf)
        if leaf.ring is not None:
            ring = leaf.ring
            for host in ring.pieces(lambda: self._begun(name, leaf, ring)):
                yield memoryview(host.numpy())  # type: ignore[arg-type]  # an array is a buffer; this memory is the ring's own
            return
        place = place or _scratch(min(piece_bytes, leaf.size_bytes))
        while leaf.read < leaf.size_bytes:
            wanted = place(min(piece_bytes, leaf.size_bytes - leaf.read))  # first, because it may have to wait
            taken = self._taken_by_writer(name, leaf, wanted)
            if taken is not None:
                yield taken
        with self._mutex:
            leaf.let_go()
        self._owners_bell.ring()

    def check_unchanged(self) -> None:
        """Look once more at what was read, when all of it is written and nothing is committed.

        Raises:
            SaveFailed: if a leaf was written to without `protect`, at whatever time since the hold was made.
        """
        self._watch.wait_for_kernels()
        with self._mutex:
            self._watch.end()
            self._watch.check()

    def check_written(self, component: str, digests: Mapping[str, str]) -> None:
        """Compare what was written of a component, path by path, with what was held; nothing is compared without ``check``.

        Raises:
            SaveFailed: if the bytes of a leaf are not those that it had in the call.
        """
        with self._mutex:
            for path, digest in digests.items():
                self._watch.compare((component, path), digest)
            self._watch.check()

    def release(self) -> None:
        """Let go of everything: the save is done, or has failed; then what was written to is known when `written` is asked."""
        with self._mutex:
            self._is_over = True
            self._unpack()
            self._watch.look()
            if not self._watch.written:
                self._watch.end()
            for leaf in self._leaves.values():
                leaf.let_go()
            self._arena = None
        self._owners_bell.ring()
        self._writers_bell.ring()

    def forget(self) -> None:
        """The writer asks for nothing any more: what is left goes here, and not in the owner's next call."""
        with self._mutex:
            self._leaves, self._specs, self._order = {}, {}, []

    # --- the owner's thread ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Return when what is unannounced, and had no room to be copied, has been read; the call that saves ends with it."""
        if self._waited:
            with self._protecting:
                self._wait_for(lambda: [self._leaves[name] for name in self._waited])

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
            with self._mutex:
                self._watch.look()
                if self._is_over:
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
                chosen = self._choose()
                for leaf, start in chosen:
                    leaf.move(move, start)
            self._move(chosen)
        finally:
            move.is_over = True
            self._writers_bell.ring()
        self._wait_for(lambda: self._order)
        with self._mutex:
            self._watch.end()  # not before: somebody else's kernel may have returned while this one waited
            for leaf in self._order:
                leaf.live = None
        for ring in self._rings.values():
            ring.order_writes()

    def _wait_for(self, leaves: Callable[[], Iterable[LeafReadState]]) -> None:
        """Return when the writer needs these leaves no more as they are; in the owner's thread."""
        while True:
            with self._mutex:
                self._unpack()
                if self._is_over or not any(leaf.is_exposed for leaf in leaves()):
                    return
            self._owners_bell.wait()

    @contextmanager
    def _unmoved(self, leaf: LeafReadState) -> Iterator[None]:
        """Wait while the owner copies what is to be read next, and do what follows before it begins with that; in the writer's thread."""
        while True:
            with self._mutex:
                if leaf.moving_from is None or (leaf.is_flat and leaf.read < leaf.moving_from):
                    yield
                    return
            self._writers_bell.wait()

    def _unpack(self) -> None:
        """Look at what was given, in whichever thread is the first to need it; again, if an interrupt came in between."""
        given = self._given
        if given is not None:
            self._specs = {name: (tensor.dtype, tensor.shape) for name, tensor in given.items()}
            copied = self._leaves
            self._leaves = {
                name: copied.get(name) or self._taken(tensor, home)
                for (name, tensor), home in zip(given.items(), self._homes, strict=True)
            }
            self._order = list(self._leaves.values())
            self._given = None

    def _with_room(self, tensors: Mapping[LeafName, torch.Tensor]) -> list[LeafName]:
        """Those that are copied at once, the smallest first."""
        if self._room is None:
            return list(tensors)
        room = max(self._room, SMALL_COPIES_BYTES)
        sizes = accumulate(sorted(tensor.nbytes for tensor in tensors.values()))
        names = sorted(tensors, key=lambda name: tensors[name].nbytes)
        return [name for name, size_bytes in zip(names, sizes, strict=True) if size_bytes <= room]

    def _copied_at_once(self, tensors: Mapping[LeafName, torch.Tensor]) -> dict[LeafName, LeafReadState]:
        chosen = {name: tensors[name] for name in self._with_room(tensors)}
        arena = Arena(sum(padded(tensor.nbytes) for tensor in chosen.values()))
        found = {}
        for name, tensor in chosen.items():
            copy = _copied_to(arena.take(tensor.nbytes), tensor)
            self.copied_bytes += tensor.nbytes
            found[name] = LeafReadState(None, tensor.nbytes, is_flat=True, copied_from=0, copy=copy)
        return found

    def _taken(self, tensor: torch.Tensor, home: int | None) -> LeafReadState:
        is_flat = _is_flat(tensor)
        ring = self._ring(tensor.device) if is_flat and tensor.is_cuda else None
        return LeafReadState(tensor, tensor.nbytes, is_flat, ring, copied_from=tensor.nbytes, home=home)

    def _ring(self, device: torch.device) -> PinnedRing:
        if device not in self._rings:
            self._rings[device] = PinnedRing(device, DEVICE_PIECE_BYTES)
        return self._rings[device]

    def _left_room(self) -> int | None:
        """How many bytes may be copied beside the leaf that the writer copies as a whole, one at a time, because they are not in order."""
        if self._room is None:
            return None
        read_from_copies = (
            leaf.size_bytes for leaf in self._order if leaf.live is not None and not _is_flat(leaf.live)
        )
        return self._room - self.copied_bytes - max(read_from_copies, default=0)

    def _choose(self) -> list[tuple[LeafReadState, int]]:
        """What to copy, from which byte on: the last of the unread bytes, because the first ones are read the soonest."""
        room = self._left_room()
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

    def _move(self, chosen: list[tuple[LeafReadState, int]]) -> None:
        """Copy; the writer waits for a leaf while it is being copied, and goes on from the copy."""
        wanted = sum(padded(leaf.copied_from - start) for leaf, start in chosen if leaf.is_in_arena)
        try:
            arena = self._arena_of(wanted)
            for leaf, start in chosen:
                live = leaf.live
                if live is None:
                    continue  # released meanwhile, or let go because it is not read
                if leaf.is_replaced:
                    return  # the writer finds that out, and says so
                stop = leaf.copied_from
                if leaf.ring is not None:
                    copy = byte_view(live)[start:stop].clone()
                    leaf.ring.wait_for_current()
                elif not live.is_cpu:
                    copy = steadily(live, torch.clone)
                elif leaf.is_flat:
                    copy = arena.take(stop - start)
                    steadily(live, lambda source: copy.copy_(byte_view(source)[start:stop]))  # noqa: B023  # called here
                else:
                    copy = _copied_to(arena.take(leaf.size_bytes), live)
                with self._mutex:
                    if self._is_over:
                        return
                    self.copied_bytes += stop - start
                    self.protected_bytes += stop - start
                    leaf.moved(copy, start)
                self._writers_bell.ring()
        except (MemoryError, RuntimeError, OSError):
            return  # no memory: what is not copied is waited for

    def _arena_of(self, size_bytes: int) -> Arena:
        """Memory for so many bytes: what `prepare` has made ready, if that is enough."""
        with self._mutex:
            ready, self._arena = self._arena, None
        return ready if ready is not None and ready.left_bytes >= size_bytes else Arena(size_bytes)

    def _taken_by_writer(self, name: LeafName, leaf: LeafReadState, wanted: memoryview) -> memoryview | None:
        """Copy the next piece to where it is wanted; None if its memory went elsewhere meanwhile, and it is to be read again.

        Not the live bytes themselves are written: nobody but a copy may hold an update up, least of all a disk.
        """
        with self._unmoved(leaf):
            self._check(name)
            source, start, stop = leaf.next_bytes(len(wanted))
            _check_there(name, leaf, source)
            is_live = source is leaf.live
            array, taken = leaf.array_of(source), wanted[: stop - leaf.read]
            leaf.pinned_to = stop if is_live else 0
        try:
            np.copyto(np.frombuffer(taken, dtype=np.uint8), array[leaf.read - start : stop - start])
        finally:
            with self._mutex:
                if is_live:
                    self._watch.look_at(name)
                is_taken = leaf.is_where_it_was()
                leaf.read, leaf.pinned_to = stop if is_taken else leaf.read, 0
            self._owners_bell.ring()
        with self._mutex:
            self._check(name)
        return taken if is_taken else None

    def _begun(self, name: LeafName, leaf: LeafReadState, ring: PinnedRing) -> Begun | None:
        """Begin to read the next piece on a device; a write that comes later waits for it there."""
        if leaf.read == leaf.size_bytes:
            return None
        with self._unmoved(leaf):
            self._watch.look_at(name)
            self._check(name)
            source, start, stop = leaf.next_bytes(ring.piece_bytes)
            _check_there(name, leaf, source)
            begun = ring.begin(byte_view(source)[leaf.read - start : stop - start])
            leaf.read = stop
        self._owners_bell.ring()
        return begun

    def _flatten(self, name: LeafName, leaf: LeafReadState) -> None:
        """Copy a leaf whose bytes do not lie in order, or not on the CPU; from then on the live one may change."""
        with self._unmoved(leaf):
            self._check(name)
            if leaf.is_flat:
                return  # the owner has just copied it
            source = leaf.live if leaf.copy is None else leaf.copy
            assert source is not None
            _check_there(name, leaf, source)
            leaf.pinned_to = leaf.size_bytes if leaf.copy is None else 0
        flat = _copied_to(Arena(leaf.size_bytes).take(leaf.size_bytes), source)
        with self._mutex:
            if leaf.pinned_to:
                self._watch.look_at(name)
            leaf.copy, leaf.copied_from, leaf.pinned_to, leaf.is_flat = flat, 0, 0, True
            self._check(name)
        self._owners_bell.ring()

    def _check(self, name: LeafName) -> None:
        self._watch.check()
        if self._is_over:
            raise SaveFailed(name[1], expected="a hold", found="a released one", fix="save again")


def _is_flat(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie in order, where they can be read."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()) and (tensor.is_cpu or tensor.is_cuda)


def _addresses(tensors: Collection[torch.Tensor]) -> list[int | None]:
    """Where the memory of each is now."""
    try:
        return list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:  # one of them has no memory, and is refused by name elsewhere
        return [None] * len(tensors)


def _check_there(name: LeafName, leaf: LeafReadState, source: torch.Tensor) -> None:
    if is_gone(source) or (source is leaf.live and leaf.is_replaced):
        raise SaveFailed(
            name[1],
            expected="memory that stays until it is saved",
            found="memory that was given back or replaced meanwhile, as untyped_storage().resize_(0) or an assignment to .data do",
            fix="call manager.wait_staging() before you resize or free what is being saved",
        )


def _copied_to(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, row-major, in the memory that is given for them."""
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)  # else the copy makes a 1 of every byte that is not 0
    wanted = memory.view(tensor.dtype).view(tensor.shape)
    steadily(tensor, wanted.copy_)
    return memory


def _scratch(size_bytes: int) -> Place:
    memory = memoryview(bytearray(size_bytes))
    return lambda wanted_bytes: memory[:wanted_bytes]
