"""`CopyRoom`: the limit on the bytes that a hold copies, the choice of those bytes, and the memory for the copies."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final, TypeVar, final

import torch

from trainfold.backends.hold.copy_arena import Arena, padded
from trainfold.backends.hold.held_leaf import HeldLeaf, copied_to, is_flat

K = TypeVar("K")
# random states and the like: copied at once though there is no room, as the writer has buffers
SMALL_COPIES_BYTES: Final = 1 << 20


@final
class CopyRoom:
    """The room for copies. It is not locked: its hold does that.

    Args:
        max_bytes: how many bytes may be copied in all; None for as many as there are. Up to ``SMALL_COPIES_BYTES`` of what is copied
            at once are copied all the same.

    Attributes:
        copied_bytes: how many were copied in all.
        protected_bytes: how many of them for an update.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._ready: Arena | None = None
        self.copied_bytes = 0
        self.protected_bytes = 0

    def copy_at_once(self, tensors: Mapping[K, torch.Tensor]) -> dict[K, torch.Tensor]:
        """The bytes of the tensors that have room, the smallest first."""
        names = list(tensors)
        if self._max_bytes is not None:
            room = max(self._max_bytes, SMALL_COPIES_BYTES)
            names.sort(key=lambda name: tensors[name].nbytes)
            totals = accumulate(tensors[name].nbytes for name in names)
            names = [name for name, total in zip(names, totals, strict=True) if total <= room]
        arena = Arena(sum(padded(tensors[name].nbytes) for name in names))
        copies = {name: copied_to(arena.take(tensors[name].nbytes), tensors[name]) for name in names}
        self.copied_bytes += sum(tensors[name].nbytes for name in names)
        return copies

    def reserve(self, leaves: Sequence[HeldLeaf], size_bytes: int) -> tuple[Arena, int] | None:
        """Memory for all possible copies, so that a second one is never needed; and how much of it to make present.

        Args:
            leaves: the held leaves.
            size_bytes: how much was asked for; None is returned if there is no room for any of it.
        """
        room = self._left(leaves)
        present = size_bytes if room is None else min(size_bytes, room)
        if present <= 0:
            return None
        self._ready = Arena(sum(padded(leaf.size_bytes) for leaf in leaves if _is_on_cpu(leaf)))
        return self._ready, present

    def arena_for(self, chosen: Sequence[tuple[HeldLeaf, int]]) -> Arena:
        """Memory for these copies: the reserved one, if it is large enough."""
        wanted = sum(padded(leaf.copied_from - start) for leaf, start in chosen if _is_on_cpu(leaf))
        ready, self._ready = self._ready, None
        return ready if ready is not None and ready.left_bytes >= wanted else Arena(wanted)

    def release(self) -> None:
        """Give back the reserved memory."""
        self._ready = None

    def choose(self, leaves: Sequence[HeldLeaf]) -> list[tuple[HeldLeaf, int]]:
        """What to copy for an update, and from which byte on: the last of the unread bytes, because the writer reads the first ones soonest."""
        room = self._left(leaves)
        chosen = []
        for leaf in reversed(leaves):
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

    def count(self, size_bytes: int) -> None:
        """Count the bytes copied for an update."""
        self.copied_bytes += size_bytes
        self.protected_bytes += size_bytes

    def _left(self, leaves: Sequence[HeldLeaf]) -> int | None:
        """How many bytes may be copied beside a leaf whose bytes are not in order: the writer copies such a leaf whole, one at a time."""
        if self._max_bytes is None:
            return None
        whole = (leaf.size_bytes for leaf in leaves if leaf.live is not None and not is_flat(leaf.live))
        return self._max_bytes - self.copied_bytes - max(whole, default=0)


def _is_on_cpu(leaf: HeldLeaf) -> bool:
    return leaf.live is not None and leaf.live.is_cpu
