"""`WriteWatch`: notices writes to tensors that nobody announced, by torch's version counters."""

from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Final, TypeAlias, final

import torch

from trainfold.backends.owner_thread import OwnerThread
from trainfold.core.errors import SaveFailed

LeafName: TypeAlias = tuple[str, str]
"""A component and a leaf path in it."""
_VERSION: Final = attrgetter("_version")  # torch has no public name for the counter


@final
class WriteWatch:
    """Remembers the version counters of tensors, and says which have moved. It is not locked: its hold does that.

    Torch moves the counter when a kernel returns, so a write that is at work shows later; see `OwnerThread`.

    Args:
        leaves: the tensors by name.
        but: the names of those that are not watched, such as tensors of inference mode, which have no counter.

    Attributes:
        written: the names of those that were found to be written to.
    """

    def __init__(self, leaves: Mapping[LeafName, torch.Tensor], *, but: Collection[LeafName] = ()) -> None:
        watched = {name: leaf for name, leaf in leaves.items() if name not in but} if but else leaves
        # one value, so that an interrupt leaves them together
        self._seen = watched, list(map(_VERSION, watched.values()))
        self._version_of: dict[LeafName, int] | None = None
        self._first: LeafName | None = None
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
        self._seen = {}, []

    def check(self) -> None:
        """Fail if a write was found.

        Raises:
            SaveFailed: naming the first leaf.
        """
        if self._first is not None:
            raise SaveFailed(
                self._first[1],
                expected="a leaf that does not change while it is being saved",
                found="a write to it before the next optimizer step",
                mend="nothing: it is copied from now on, which costs each save the time of the copy; or call manager.wait_staging() "
                "before you change it; the checkpoints before this one are whole",
            )

    def _note(self, name: LeafName) -> None:
        self.written.add(name)
        self._first = self._first or name
