"""`WriteWatch`: detects unannounced writes to tensors, by torch's version counters and, on request, by their bytes."""

import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from types import FrameType
from typing import Final, TypeAlias, TypeVar, final

import torch

from trainfold.backends import wakeup
from trainfold.core.errors import SaveFailed
from trainfold.core.format.codec import leaf_digest

T = TypeVar("T")
LeafName: TypeAlias = tuple[str, str]
"""A component and a leaf path in it."""
_Seen: TypeAlias = tuple[Mapping[LeafName, torch.Tensor], list[int]]
LONGEST_SECS: Final = 0.5
_VERSION: Final = attrgetter("_version")  # torch has no public name for the counter
_WRITE: Final = "a write to it before the next optimizer step"
_WRITE_FIX: Final = "nothing: it is copied from now on, which costs each save the time of the copy; or call manager.wait_staging() before you change it"
_AROUND: Final = (
    "other bytes, and no version counter that moved: something writes to it around torch and the optimizer's hooks"
)
_AROUND_FIX: Final = (
    "look for tensor.data, numpy or dlpack views, a flat parameter, or a fused optimizer that is not attached; "
    "call manager.wait_staging() before it writes; without hold_check=True the write would have been saved unnoticed"
)
_WAITING: Final = (vars(threading), vars(wakeup))
_FIRST_NAP_SECS: Final = 0.0005
_LONGEST_NAP_SECS: Final = 0.02


@final
class WriteWatch:
    """Remembers the version counters of tensors, and finds those that have changed. It has no lock: its hold locks it.

    Torch moves the counter when a kernel returns, so a write in progress shows later: see `wait_for_kernels`.

    Some writes move no counter: those through ``tensor.data``, numpy or dlpack, and those of a fused optimizer that is not
    attached. With ``by_bytes`` every tensor is digested when this is made and again at the last look, which finds them.

    Args:
        leaves: the tensors by name.
        counters: tensors whose counters move at writes to leaves, beside those of the leaves: the DTensors of which leaves are local parts.
        but: the names of those that are not watched, such as tensors of inference mode, which have no counter.
        by_bytes: whether their bytes are compared too. That costs two readings of all of them, in the threads that call.

    Attributes:
        written: the names of those that were written to.
        digests: name -> digest of the bytes when this was made; empty unless they are compared.
    """

    def __init__(
        self,
        leaves: Mapping[LeafName, torch.Tensor],
        *,
        counters: Mapping[LeafName, torch.Tensor] | None = None,
        but: Collection[LeafName] = (),
        by_bytes: bool = False,
    ) -> None:
        watched = {name: leaf for name, leaf in leaves.items() if name not in but} if but else leaves
        beside = {name: each for name, each in (counters or {}).items() if name in watched}
        # each one value, so that an interrupt leaves them together
        self._seen: _Seen = watched, list(map(_VERSION, watched.values()))
        self._beside: _Seen = beside, list(map(_VERSION, beside.values()))
        self._version_of: tuple[dict[LeafName, int], dict[LeafName, int]] | None = None
        self._first: tuple[LeafName, str, str] | None = None
        self._owner = threading.get_ident()
        self.digests = {name: steadily(leaf, leaf_digest) for name, leaf in watched.items()} if by_bytes else {}
        self.written: set[LeafName] = set()

    @property
    def is_over(self) -> bool:
        """Whether the watch will look at nothing more."""
        return not self._seen[0]

    def wait_for_kernels(self) -> None:
        """Return when the thread that made this watch has left its current kernel; call it without a lock."""
        if not self.is_over:
            wait_until_it_moves(self._owner)

    def keep(self, names: Collection[LeafName]) -> None:
        """Watch only these tensors from now on."""
        self._seen, self._beside = _kept(self._seen, names), _kept(self._beside, names)

    def look_at(self, name: LeafName) -> None:
        """Look at one tensor, if it is watched."""
        seen = self._seen, self._beside
        if self._version_of is None:
            first, second = (dict(zip(tensors, versions, strict=True)) for tensors, versions in seen)
            self._version_of = first, second
        for (tensors, _), version_of in zip(seen, self._version_of, strict=True):
            tensor = tensors.get(name)
            if tensor is not None and _VERSION(tensor) != version_of[name]:
                self._note(name)

    def look(self) -> None:
        """Look at all watched tensors."""
        for tensors, versions in (self._seen, self._beside):
            now = list(map(_VERSION, tensors.values()))
            if now != versions:
                for name, one, other in zip(tensors, now, versions, strict=True):
                    if one != other:
                        self._note(name)

    def end(self) -> None:
        """Look at all watched tensors for the last time: from now on they may be written to."""
        self.look()
        self._look_at_bytes()
        self._seen = self._beside = {}, []

    def compare(self, name: LeafName, digest: str) -> None:
        """Compare the digest of the bytes written for a leaf with that of the bytes held."""
        if self.digests.get(name, digest) != digest:
            self._note(name, found=_AROUND, fix=_AROUND_FIX)

    def check(self) -> None:
        """Fail if a write was noticed.

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


def _kept(seen: _Seen, names: Collection[LeafName]) -> _Seen:
    tensors, _ = seen
    kept = {name: version for name, version in zip(*seen, strict=True) if name in names}
    return {name: tensors[name] for name in kept}, list(kept.values())


def steadily(tensor: torch.Tensor, copy: Callable[[torch.Tensor], T]) -> T:
    """The result of a function that copies from a tensor whose memory may be replaced meanwhile: ``share_memory_()`` frees the old one.

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
    """Whether the memory of a tensor was freed, as by ``untyped_storage().resize_(0)``.

    Examples:
        >>> weight = torch.ones(2)
        >>> _ = weight.untyped_storage().resize_(0)
        >>> is_gone(weight), is_gone(torch.ones(2)), is_gone(torch.ones(0))
        (True, False, False)
    """
    return tensor.data_ptr() == 0 and tensor.numel() > 0


def wait_until_it_moves(thread: int, *, longest_secs: float = LONGEST_SECS) -> bool:
    """Wait until a thread has left its current operation, such as a kernel that writes to a tensor.

    A kernel moves the version counter of what it writes to before it returns to Python. So once the thread's place in its Python
    code has moved, the counters show everything that was being written before. A thread in the module `threading` waits for a
    lock, and is in no kernel; so is one in `trainfold.backends.wakeup`.

    Args:
        thread: its identifier.
        longest_secs: give up after so long, because the operation may wait for something that never comes.

    Returns:
        Whether it has moved, waits, or has ended.

    Examples:
        >>> wait_until_it_moves(threading.get_ident())  # in the thread itself there is nothing to wait for
        True
    """
    if thread == threading.get_ident():
        return True
    deadline, nap_secs = time.monotonic() + longest_secs, _FIRST_NAP_SECS
    before = _place(thread)
    while before is not None and _place(thread) == before:
        if time.monotonic() >= deadline:
            return False
        time.sleep(nap_secs)
        nap_secs = min(2 * nap_secs, _LONGEST_NAP_SECS)
    return True


def _place(thread: int) -> tuple[FrameType, int] | None:
    """The position of a thread in its Python code; None if it is not in an operation."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001  # public but for its name
    if frame is None or any(frame.f_globals is each for each in _WAITING):
        return None
    return frame, frame.f_lasti
