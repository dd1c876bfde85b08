"""`WriteWatch`: notices writes to tensors that nobody announced, by torch's version counters and, where asked, by their bytes."""

from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Final, TypeAlias, final

import torch

from trainfold.backends.hold.held_leaf import is_gone, steadily
from trainfold.backends.hold.owner_thread import OwnerThread
from trainfold.core.errors import SaveFailed
from trainfold.core.format.codec import leaf_digest

LeafName: TypeAlias = tuple[str, str]
"""A component and a leaf path in it."""
_VERSION: Final = attrgetter("_version")  # torch has no public name for the counter
_WRITE: Final = "a write to it before the next optimizer step"
_WRITE_FIX: Final = "nothing: it is copied from now on, which costs each save the time of the copy; or call manager.wait_staging() before you change it"
_AROUND: Final = (
    "other bytes, and no version counter that moved: something writes to it around torch and the optimizer's hooks"
)
_AROUND_FIX: Final = (
    "look for tensor.data, numpy or dlpack views, a flat parameter, or a fused optimizer that is not attached; "
    "call manager.wait_staging() before it writes; without hold_check=True nobody would have seen it"
)


@final
class WriteWatch:
    """Remembers the version counters of tensors, and says which have moved. It is not locked: its hold does that.

    Torch moves the counter when a kernel returns, so a write that is at work shows later; see `OwnerThread`.

    Some writes move no counter: those through ``tensor.data``, numpy or dlpack, and those of a fused optimizer that is not
    attached. With ``by_bytes`` every tensor is digested when this is made, and again at the last look, which finds them (W16).

    Args:
        leaves: the tensors by name.
        but: the names of those that are not watched, such as tensors of inference mode, which have no counter.
        by_bytes: whether their bytes are compared too. That costs two readings of all of them, in the threads that call.

    Attributes:
        written: the names of those that were found to be written to.
        digests: name -> digest of the bytes when this was made; empty unless they are compared.
    """

    def __init__(
        self, leaves: Mapping[LeafName, torch.Tensor], *, but: Collection[LeafName] = (), by_bytes: bool = False
    ) -> None:
        watched = {name: leaf for name, leaf in leaves.items() if name not in but} if but else leaves
        # one value, so that an interrupt leaves them together
        self._seen = watched, list(map(_VERSION, watched.values()))
        self._version_of: dict[LeafName, int] | None = None
        self._first: tuple[LeafName, str, str] | None = None
        self.digests = {name: steadily(leaf, leaf_digest) for name, leaf in watched.items()} if by_bytes else {}
        self._owner = OwnerThread()
        self.written: set[LeafName] = set()

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be looked at."""
        return not self._seen[0]

    def wait_for_kernels(self) -> None:
        """Return when the thread that made this has left the kernel that it is in; to be called without a lock."""
        if not self.is_over:
            self._owner.wait_until_it_moves()

    def keep(self, names: Collection[LeafName]) -> None:
        """Look at no others from now on."""
        watched, _ = self._seen
        kept = {name: version for name, version in zip(*self._seen, strict=True) if name in names}
        self._seen = {name: watched[name] for name in kept}, list(kept.values())

    def look_at(self, name: LeafName) -> None:
        """Look at one, if it is watched."""
        watched, versions = self._seen
        if self._version_of is None:
            self._version_of = dict(zip(watched, versions, strict=True))
        tensor = watched.get(name)
        if tensor is not None and _VERSION(tensor) != self._version_of[name]:
            self._note(name)

    def look(self) -> None:
        """Look at all of them."""
        watched, versions = self._seen
        now = list(map(_VERSION, watched.values()))
        if now != versions:
            for name, one, other in zip(watched, now, versions, strict=True):
                if one != other:
                    self._note(name)

    def end(self) -> None:
        """Look at all of them for the last time: from now on, whoever writes may."""
        self.look()
        self._look_at_bytes()
        self._seen = {}, []

    def compare(self, name: LeafName, digest: str) -> None:
        """Compare the digest of what was written for a leaf with that of what was held."""
        if self.digests.get(name, digest) != digest:
            self._note(name, found=_AROUND, fix=_AROUND_FIX)

    def check(self) -> None:
        """Fail if a write was found.

        Raises:
            SaveFailed: naming the first leaf.
        """
        if self._first is not None:
            name, found, fix = self._first
            raise SaveFailed(
                name[1],
                expected="a leaf that does not change while it is being saved",
                found=found,
                fix=f"{fix}; the checkpoints before this one are whole",
            )

    def _look_at_bytes(self) -> None:
        for name, tensor in self._seen[0].items():
            if name not in self.digests or name in self.written:
                continue
            if is_gone(tensor) or steadily(tensor, leaf_digest) != self.digests[name]:
                self._note(name, found=_AROUND, fix=_AROUND_FIX)

    def _note(self, name: LeafName, *, found: str = _WRITE, fix: str = _WRITE_FIX) -> None:
        self.written.add(name)
        self._first = self._first or (name, found, fix)
