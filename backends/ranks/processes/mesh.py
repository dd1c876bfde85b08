"""`MeshExchange`: exchanges over a process group in which each rank is connected to each."""

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, Final, Protocol, final

import attrs
import torch

from trainfold.backends.ranks.call import Call, Deadline
from trainfold.backends.ranks.process_group import (
    keep_exchange,
    padded_bytes,
    release_exchange,
    start_all_gather,
    start_all_reduce,
    start_broadcast,
)
from trainfold.backends.ranks.processes.waiting import Waiting, differing_calls

_HEAD: Final = struct.Struct("<qqq")  # number of the call, digest of the call, bytes of the value
_HEAD_LIMITS: Final = (512, 4096)  # of the first exchange; up to 8 ranks its size makes no difference to its time
_ALL_HEADS_BYTES: Final = 2**20  # what a rank may receive of them
_HEAD_FIELDS: Final = 3
_NUMBER_BYTES: Final = 8


class PendingNumbers(Protocol):
    """The numbers of all ranks, on their way."""

    @property
    def has_come(self) -> bool:
        """Whether `rows` returns, or raises, at once."""

    def rows(self, until: Deadline) -> list[tuple[int, ...]]:
        """Those of each rank, when they have come; once."""


class Exchange(Protocol):
    """How the ranks exchange bytes. Each call checks that all ranks make it."""

    def meet(self, call: Call, payload: bytes, until: Deadline) -> list[bytes]:
        """The bytes of all ranks, in rank order."""

    def give(self, call: Call, payload: bytes, source: int, until: Deadline) -> bytes:
        """The bytes of one rank."""

    def add(self, total: torch.Tensor, call: Call, until: Deadline) -> None:
        """Overwrite integers with their sums over the ranks, which have met."""

    def start(self, call: Call, payload: bytes, timeout_secs: float) -> PendingNumbers:
        """Start to gather whole numbers of eight bytes."""

    def group(self) -> Any:
        """A process group of all ranks, in which each is connected to each; all ranks that have met ask for it."""


@final
class MeshExchange:
    """Exchanges over one process group of all ranks.

    Args:
        waiting: how this rank waits.
        group: of all ranks.
        world_size: the number of ranks.
    """

    def __init__(self, waiting: Waiting, group: Any, world_size: int) -> None:
        self._waiting = waiting
        self._group = group
        self._world_size = world_size
        self._head_bytes = head_bytes(world_size)
        self._calls = 0

    def group(self) -> Any:
        """A process group of all ranks; see `Exchange`."""
        return self._group

    def meet(self, call: Call, payload: bytes, until: Deadline) -> list[bytes]:
        """The bytes of all ranks, in rank order."""
        sizes, starts = self._heads(call, payload, until)
        inline = self._head_bytes - _HEAD.size
        if max(sizes) <= inline:
            return starts
        rest = self._all_gather(padded_bytes(payload[inline:], max(sizes) - inline), call, until)
        rows = [start + bytes(row.numpy()) for start, row in zip(starts, rest, strict=True)]
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]

    def give(self, call: Call, payload: bytes, source: int, until: Deadline) -> bytes:
        """The bytes of one rank."""
        sizes, starts = self._heads(call, payload, until)
        inline = self._head_bytes - _HEAD.size
        if sizes[source] <= inline:
            return starts[source]
        rest = padded_bytes(payload[inline:], sizes[source] - inline)
        self._waiting.wait(start_broadcast(self._group, rest, source, until.left()), call, until)
        return starts[source] + bytes(rest.numpy())

    def add(self, total: torch.Tensor, call: Call, until: Deadline) -> None:
        """Overwrite integers with their sums over the ranks."""
        self._waiting.wait(start_all_reduce(self._group, total, until.left()), call, until)

    def start(self, call: Call, payload: bytes, timeout_secs: float) -> "_PendingRows":
        """Start to gather whole numbers of eight bytes."""
        head = _HEAD.pack(self._calls, call_digest(call), len(payload)) + payload
        self._calls += 1
        work, rows = start_all_gather(self._group, padded_bytes(head, self._head_bytes), self._world_size, timeout_secs)
        keep_exchange(work)
        return _PendingRows(self, call, work, rows)

    def rows(self, pending: "_PendingRows", until: Deadline) -> list[tuple[int, ...]]:
        """The numbers of all ranks, of a gather that was started."""
        self._waiting.check()
        self._waiting.wait(pending.work, pending.call, until)
        release_exchange(pending.work)
        fields = pending.found.view(torch.int64)
        if not bool((fields[:, :_HEAD_FIELDS] == fields[0, :_HEAD_FIELDS]).all()):
            raise differing_calls(self._texts(pending.call, until))
        count = int(fields[0, _HEAD_FIELDS - 1]) // _NUMBER_BYTES
        return [tuple(row) for row in fields[:, _HEAD_FIELDS : _HEAD_FIELDS + count].tolist()]

    def _all_gather(self, tensor: torch.Tensor, call: Call, until: Deadline) -> torch.Tensor:
        work, rows = start_all_gather(self._group, tensor, self._world_size, until.left())
        self._waiting.wait(work, call, until)
        return rows

    def _heads(self, call: Call, payload: bytes, until: Deadline) -> tuple[Sequence[int], list[bytes]]:
        """Check that all ranks make this call; return the size of each payload, and the part of it that lies in the head."""
        self._waiting.check()
        head = _HEAD.pack(self._calls, call_digest(call), len(payload)) + payload[: self._head_bytes - _HEAD.size]
        self._calls += 1
        found = self._all_gather(padded_bytes(head, self._head_bytes), call, until)
        heads = [bytes(row.numpy()) for row in found]
        fields = [_HEAD.unpack_from(each) for each in heads]
        if len({each[:2] for each in fields}) > 1:
            raise differing_calls(self._texts(call, until))
        sizes = [size for _, _, size in fields]
        return sizes, [each[_HEAD.size : _HEAD.size + size] for each, size in zip(heads, sizes, strict=True)]

    def _texts(self, call: Call, until: Deadline) -> list[str]:
        """The calls of all ranks. Every rank has seen that they differ, so every rank gets here."""
        rows = self._all_gather(padded_bytes(str(call).encode()[: self._head_bytes], self._head_bytes), call, until)
        return [bytes(row.numpy()).rstrip(b"\0").decode(errors="replace") for row in rows]


@final
@attrs.frozen(eq=False)
class _PendingRows:
    owner: MeshExchange
    call: Call
    work: Any
    found: torch.Tensor

    @property
    def has_come(self) -> bool:
        return bool(self.work.is_completed())

    def rows(self, until: Deadline) -> list[tuple[int, ...]]:
        return self.owner.rows(self, until)


def head_bytes(world_size: int) -> int:
    """The bytes of a rank in the first exchange of a call.

    Examples:
        >>> [head_bytes(size) for size in (2, 512, 16_384)]
        [4096, 2048, 512]
    """
    least, most = _HEAD_LIMITS
    return min(max(_ALL_HEADS_BYTES // world_size // _NUMBER_BYTES * _NUMBER_BYTES, least), most)


def call_digest(call: Call) -> int:
    """What is compared of a call."""
    return int.from_bytes(hashlib.blake2b(str(call).encode(), digest_size=7).digest(), "little")
