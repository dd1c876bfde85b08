"""`WriteWatch`: notices writes to tensors that nobody announced, by torch's version counters."""

from collections.abc import Collection, Mapping
from typing import TypeAlias, final

import torch

from trainfold.backends.owner_thread import OwnerThread
from trainfold.core.errors import SaveFailed

LeafName: TypeAlias = tuple[str, str]
"""A component and a leaf path in it."""


@final
class WriteWatch:
    """Remembers the version counters of tensors, and says which have moved. It is not locked: its hold does that.

    Torch moves the counter when a kernel returns, so a write that is at work shows later; see `OwnerThread`.

    Args:
        leaves: the tensors by name; each has a counter, which those of inference mode have not.

    Attributes:
        written: the names of those that were found to be written to.
    """

    def __init__(self, leaves: Mapping[LeafName, torch.Tensor]) -> None:
        # torch has no public name for the counter
        self._seen = {name: (tensor, tensor._version) for name, tensor in leaves.items()}  # noqa: SLF001
        self._first: LeafName | None = None
        self._owner = OwnerThread()
        self.written: set[LeafName] = set()

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be looked at."""
        return not self._seen

    def wait_for_kernels(self) -> None:
        """Return when the thread that made this has left the kernel that it is in; to be called without a lock."""
        if self._seen:
            self._owner.wait_until_it_moves()

    def keep(self, names: Collection[LeafName]) -> None:
        """Look at no others from now on."""
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}

    def look_at(self, name: LeafName) -> None:
        """Look at one, if it is watched."""
        tensor, version = self._seen.get(name, (None, 0))
        if tensor is not None and tensor._version != version:  # noqa: SLF001  # as above
            self._note(name)

    def look(self) -> None:
        """Look at all of them."""
        for name, (tensor, version) in self._seen.items():
            if tensor._version != version:  # noqa: SLF001  # as above
                self._note(name)

    def end(self) -> None:
        """Look at all of them for the last time: from now on, whoever writes may."""
        self.look()
        self._seen = {}

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
