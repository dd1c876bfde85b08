"""`TorchCollectives`: ranks that are processes, over torch.distributed on the CPU. They fail together and name the rank that failed."""

import hashlib
import logging
import os
import secrets
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any, Final, NoReturn, TypeVar, final

import attrs
import torch

from trainfold.backends.ranks.call import Call, Deadline, check_broadcast, parted
from trainfold.backends.ranks.failure_board import Fault, NoticeBoard, StoreBulletin
from trainfold.backends.ranks.launcher import restart_trap
from trainfold.backends.ranks.ordered_sum import sum_plan
from trainfold.backends.ranks.process_group import (
    Arrivals,
    checked_group,
    default_store,
    first_sentence,
    initialised,
    is_of_tcp,
    is_of_transport,
    keep_exchange,
    not_made,
    padded_bytes,
    release_exchange,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_broadcast,
)
from trainfold.backends.ranks.wire import from_wire, to_wire
from trainfold.core.errors import InvalidArgument, RankFailed, error_text
from trainfold.core.state.spec import dtype_name
from trainfold.core.tensor_memory import tensor_bytes

T = TypeVar("T")
_LOG: Final = logging.getLogger("trainfold")

_HEAD: Final = struct.Struct("<qqq")  # number of the call, digest of the call, bytes of the value
_HEAD_LIMITS: Final = (512, 4096)  # of the first exchange; up to 8 ranks its size makes no difference to its time
_ALL_HEADS_BYTES: Final = 2**20  # what a rank may receive of them
_HEAD_FIELDS: Final = 3
_NUMBER_BYTES: Final = 8
_TOKEN_BYTES: Final = 8
_PAUSES_SECS: Final = (5e-5, 5e-3)  # the shortest and the longest between two looks at an exchange
_PAUSE_SHARE: Final = 1 / 16  # of what was waited so far, so that an exchange is seen at most so much later
_LOOK_SECS: Final = 0.2  # how often a waiting rank checks the notice board


@final
class TorchCollectives:
    """The collectives of the rank of this process. The constructor is a collective call: every rank of the group makes it at the same point.

    Each call starts with one small all-gather, in which the ranks check that all make the same call. What a value has beyond 4 KiB, or half a KiB
    where there are thousands of ranks, follows in a second exchange: an all-gather, or a broadcast of what one rank gives. A waiting rank also
    watches for trouble. If a rank raises (and reports it with `fail`), dies, or is late, every other rank raises `RankFailed`, with the same text
    everywhere. A rank that posted no error is named after a roll call of ``grace_secs``; a rank that is only busy elsewhere cannot be
    distinguished from it and is named too. Afterwards every call raises that error again: restart the job.

    Integers of 64 bits are summed by one all-reduce. Other sums are added in rank order, which the all-reduce of gloo does not do: with 1e8, 1
    and -1e8 on three ranks, it returned 0 in some parts of one float32 vector and 1 in others. The two exchanges move as many bytes as an
    all-reduce. With the copies around them they take about twice as long for a million floats, and four times as long for ten million. Tensors
    of another device go through the CPU and back. Use it for evaluations and saves, and for gradients if equal bits matter more than speed.

    Values travel as JSON (``trainfold.backends.ranks.wire``), not as pickle.

    Args:
        group: a process group with a CPU backend, which also gives the ranks; by default a gloo group of all ranks, which no training uses and
            which ends with these collectives.
        timeout_secs: how long a rank waits for the others in a call before which they may read, write or train.
        vote_secs: how long it waits in a vote, before which they have little to do, such as that on the result of a commit.
        grace_secs: how long a roll call takes at most.

    Raises:
        InvalidArgument: if torch.distributed is not initialised, or the group has no CPU backend, or this process is not in it.
        RankFailed: if not all ranks call it, naming those that do not.
    """

    def __init__(
        self, group: Any = None, *, timeout_secs: float = 600.0, vote_secs: float = 60.0, grace_secs: float = 3.0
    ) -> None:
        if not (timeout_secs > 0 and vote_secs > 0 and grace_secs > 0):
            raise InvalidArgument(
                "TorchCollectives",
                expected="timeout_secs > 0, vote_secs > 0 and grace_secs > 0",
                found=f"{timeout_secs}, {vote_secs} and {grace_secs}",
                fix="a rank has to wait for the others for some time",
            )
        dist = self._dist = initialised()
        self._timeout_secs = timeout_secs
        self._vote_secs = vote_secs
        self._grace_secs = grace_secs
        self._calls = self._bulletins = 0
        self._faults: list[Fault] = []  # at most one
        self._own: Any = None
        self._latest: Any = None
        if group is not None:
            checked_group(dist, group)
        arrivals = Arrivals(dist, group)
        try:
            if group is None:
                self._own = group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_secs))
            self._group = group
            self.rank: int = dist.get_rank(group)
            self.world_size: int = dist.get_world_size(group)
            self._head_bytes = _head_bytes(self.world_size)
            token = self._all_gather(torch.tensor(list(secrets.token_bytes(_TOKEN_BYTES)), dtype=torch.uint8))[0]
        except RuntimeError as error:
            raise not_made(error, arrivals.missing()) from error
        if self.rank == 0 and (trap := restart_trap(os.environ)):
            _LOG.warning(trap)
        store = dist.PrefixStore(f"trainfold/{bytes(token.tolist()).hex()}", default_store(dist))
        self._board = NoticeBoard(store, self.rank, self.world_size, grace_secs=grace_secs)

    def __repr__(self) -> str:
        return f"TorchCollectives(rank={self.rank}, world_size={self.world_size})"

    def __del__(self) -> None:
        """Release the sockets of a group made here, unless an exchange is running or Python is shutting down.

        Not `weakref.finalize`: its registry would keep the group until torch is unloaded, and abort the process.
        """
        own = getattr(self, "_own", None)
        if own is not None and not self._faults and not sys.is_finalizing() and self._dist.is_initialized():
            with suppress(ValueError, RuntimeError):  # already destroyed with the world
                self._dist.destroy_process_group(own)

    def all_sum(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The sums of equally shaped tensors over the ranks, added in rank order; the same bits on every rank.

        Args:
            tensors: of any dtypes and devices; they are not changed.

        Returns:
            New tensors, each on the device of its summand.

        Raises:
            RankFailed: if a rank failed or was late.
            RanksDisagree: if a rank calls something else, or has other shapes or dtypes.
        """
        detail = ", ".join(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}" for tensor in tensors)
        call, until = Call("all_sum", detail), Deadline(self._timeout_secs)
        self._meet(call, b"", until)
        if tensors and all(tensor.dtype == torch.int64 for tensor in tensors):
            return self._all_reduce(tensors, call, until)
        plan = sum_plan(tensors, self.world_size)
        if not plan.part_bytes:
            return [tensor.detach().clone() for tensor in tensors]
        mine = plan.cut(tensors)
        parts = torch.empty_like(mine)
        self._wait(start_all_to_all(self._group, parts, mine, until.left()), call, until)
        sums = plan.join(self._all_gather(plan.add(parts), call, until))
        return [total.to(tensor.device) for total, tensor in zip(sums, tensors, strict=True)]

    def broadcast(self, value: T, *, source: int = 0, doing: str = "", is_vote: bool = False) -> T:
        """A copy of the value that rank ``source`` has.

        Raises:
            RankFailed: if a rank failed or was late.
            RanksDisagree: if a rank calls something else.
            InvalidArgument: if there is no such rank, or the value cannot be encoded.
        """
        check_broadcast(source, self.world_size)
        call, until = Call("broadcast", f"source={source}", doing), self._deadline(is_vote)
        given = self._bytes_of(value) if self.rank == source else b""
        sizes, starts = self._heads(call, given, until)
        inline = self._head_bytes - _HEAD.size
        rest = self._broadcast(given[inline:], sizes[source] - inline, source, call, until)
        found: T = from_wire(starts[source] + rest)
        return found

    def gather(self, value: T, *, doing: str = "", is_vote: bool = False) -> list[T]:
        """Copies of the values of all ranks, in rank order.

        Raises:
            RankFailed: if a rank failed or was late.
            RanksDisagree: if a rank calls something else.
            InvalidArgument: if the value cannot be encoded.
        """
        return [
            from_wire(each)
            for each in self._meet(Call("gather", "", doing), self._bytes_of(value), self._deadline(is_vote))
        ]

    def exchange(
        self, parts: Sequence[Sequence[memoryview]], sizes: Sequence[int], *, doing: str = ""
    ) -> list[memoryview]:
        """What each rank has sent to this one. A rank sends and receives what it has to, and no more.

        Raises:
            RankFailed: if a rank failed or was late.
            RanksDisagree: if a rank calls something else.
        """
        call, until = Call("exchange", "", doing), Deadline(self._timeout_secs)
        self._meet(call, b"", until)
        # a byte to itself: gloo wants something from each rank
        go, come = [sum(map(len, each)) for each in parts], list(sizes)
        go[self.rank] = come[self.rank] = 1
        given, received = (torch.empty(sum(each), dtype=torch.uint8) for each in (go, come))
        memory, place = tensor_bytes(given), 0
        for rank, each in enumerate(parts):
            for part in each:
                memory[place : place + len(part)] = part
                place += len(part)
            place += rank == self.rank
        self._wait(start_all_to_all(self._group, received, given, until.left(), (come, go)), call, until)
        data, ends = tensor_bytes(received), [0, *accumulate(come)]
        found = [data[start:stop] for start, stop in pairwise(ends)]
        return [
            each[: size if rank != self.rank else 0] for rank, (each, size) in enumerate(zip(found, sizes, strict=True))
        ]

    def start_gather(self, numbers: Sequence[int], *, doing: str = "") -> "_PendingGather":
        """Start to gather whole numbers below 2**63 of all ranks, at most 60. What goes wrong is raised when they are waited for."""
        call = Call("start_gather", f"{len(numbers)} numbers", doing)
        if self._faults:
            return _PendingGather(self, call, None, torch.empty(0))
        payload = struct.pack(f"<{len(numbers)}q", *numbers)
        head = _HEAD.pack(self._calls, _digest(call), len(payload)) + payload
        self._calls += 1
        work, rows = start_all_gather(
            self._group, padded_bytes(head, self._head_bytes), self.world_size, self._timeout_secs
        )
        keep_exchange(work)
        return _PendingGather(self, call, work, rows)

    def barrier(self, *, timeout_secs: float) -> None:
        """Return when every rank has called.

        Raises:
            RankFailed: naming the rank that is missing after ``timeout_secs``, or that failed.
        """
        self._meet(Call("barrier"), b"", Deadline(timeout_secs))

    def fail(self, error: BaseException) -> None:
        """Report an error, so that every other rank raises `RankFailed` from its current or next call.

        If another rank failed first, or the error comes from gloo because another rank failed, a note that names that rank is added to it.
        """
        if not self._faults:
            text = first_sentence(error_text(error))
            if is_of_transport(error):
                self._give_up(lambda: self._board.fault() or self._board.call_roll(text))
            else:
                self._give_up(lambda: self._board.post([self.rank], text))
        if self._faults and self.rank not in self._faults[0].ranks and not isinstance(error, RankFailed):
            error.add_note(str(self._faults[0].error()))

    def duplicate(self) -> "TorchCollectives":
        """The same ranks with another gloo group and the same timeouts; every rank of the group calls this.

        A failure of one of the two does not fail the other.
        """
        # Not `new_group`: torch names a group made by its own ranks after the number of groups in this process. The number differs between
        # ranks after one of them has released a group, and it repeats.
        name = self.broadcast(secrets.token_hex(_TOKEN_BYTES), doing="make a group for saves")
        copy = object.__new__(TorchCollectives)
        copy._dist, copy._grace_secs = self._dist, self._grace_secs
        copy._timeout_secs, copy._vote_secs = self._timeout_secs, self._vote_secs
        copy._calls, copy._bulletins, copy._faults, copy._own, copy._latest = 0, 0, [], None, None
        copy.rank, copy.world_size, copy._head_bytes = self.rank, self.world_size, self._head_bytes
        store = self._dist.PrefixStore(f"trainfold/{name}", default_store(self._dist))
        timeout = timedelta(seconds=self._timeout_secs)
        try:
            copy._group = self._dist.ProcessGroupGloo(
                self._dist.PrefixStore("group", store), self.rank, self.world_size, timeout
            )
        except RuntimeError as error:
            self._call_roll(f"it did not connect a group for saves: {first_sentence(error)}", error)
        copy._board = NoticeBoard(store, self.rank, self.world_size, grace_secs=self._grace_secs)
        return copy

    def bulletin(self) -> StoreBulletin | None:
        """A new bulletin, in the store at which the ranks have met; None if that is a file, which would grow with each number."""
        self._bulletins += 1
        is_cheap = is_of_tcp(self._dist, default_store(self._dist))
        return self._board.bulletin(f"bulletin/{self._bulletins}", self._check) if is_cheap else None

    def _check(self) -> None:
        if self._faults:
            raise self._faults[0].error()
        if self._board_says_trouble():
            self._call_roll("another rank had trouble", None)

    def _all_reduce(self, tensors: list[torch.Tensor], call: Call, until: Deadline) -> list[torch.Tensor]:
        """The sums of integers, which do not depend on the order."""
        total = torch.cat([tensor.detach().cpu().reshape(-1) for tensor in tensors])
        if total.numel():
            self._wait(start_all_reduce(self._group, total, until.left()), call, until)
        parts = torch.split(total, [tensor.numel() for tensor in tensors])
        pairs = zip(parts, tensors, strict=True)
        return [part.clone().view(tensor.shape).to(tensor.device) for part, tensor in pairs]

    # --- exchanges ---------------------------------------------------------------------------------------------------

    def _meet(self, call: Call, payload: bytes, until: Deadline) -> list[bytes]:
        """Check that all ranks make this call, and exchange their payloads."""
        sizes, starts = self._heads(call, payload, until)
        inline = self._head_bytes - _HEAD.size
        if max(sizes) <= inline:
            return starts
        rest = self._all_gather(padded_bytes(payload[inline:], max(sizes) - inline), call, until)
        rows = [start + bytes(row.numpy()) for start, row in zip(starts, rest, strict=True)]
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]

    def _heads(self, call: Call, payload: bytes, until: Deadline) -> tuple[list[int], list[bytes]]:
        """Check that all ranks make this call; return the size of each payload, and the part of it that lies in the head."""
        if self._faults:
            raise self._faults[0].error()
        head = _HEAD.pack(self._calls, _digest(call), len(payload)) + payload[: self._head_bytes - _HEAD.size]
        self._calls += 1
        heads = [bytes(row.numpy()) for row in self._all_gather(padded_bytes(head, self._head_bytes), call, until)]
        fields = [_HEAD.unpack_from(each) for each in heads]
        if len({each[:2] for each in fields}) > 1:
            self._disagree(call, until)
        sizes = [size for _, _, size in fields]
        return sizes, [each[_HEAD.size : _HEAD.size + size] for each, size in zip(heads, sizes, strict=True)]

    def _broadcast(self, data: bytes, size: int, source: int, call: Call, until: Deadline) -> bytes:
        """The bytes that rank ``source`` has. A rank receives them once, however many ranks there are."""
        if size <= 0:
            return b""
        tensor = padded_bytes(data, size)
        self._wait(start_broadcast(self._group, tensor, source, until.left()), call, until)
        return bytes(tensor.numpy())

    def _rows_of(self, pending: "_PendingGather") -> list[tuple[int, ...]]:
        """The numbers of all ranks, of a gather that was started."""
        if self._faults or pending.work is None:
            raise self._faults[0].error()
        until = Deadline(self._timeout_secs)
        self._wait(pending.work, pending.call, until)
        release_exchange(pending.work)
        fields = pending.rows.view(torch.int64)
        if not bool((fields[:, :_HEAD_FIELDS] == fields[0, :_HEAD_FIELDS]).all()):
            self._disagree(pending.call, until)
        count = int(fields[0, _HEAD_FIELDS - 1]) // _NUMBER_BYTES
        return [tuple(row) for row in fields[:, _HEAD_FIELDS : _HEAD_FIELDS + count].tolist()]

    def _all_gather(
        self, tensor: torch.Tensor, call: Call | None = None, until: Deadline | None = None
    ) -> torch.Tensor:
        """The bytes of all ranks, one row each."""
        if call is None or until is None:
            work, rows = start_all_gather(self._group, tensor, self.world_size, self._timeout_secs)
            work.wait()
        else:  # with a deadline, or it would outlive this call
            work, rows = start_all_gather(self._group, tensor, self.world_size, until.left())
            self._wait(work, call, until)
        return rows

    def _wait(self, work: Any, call: Call, until: Deadline) -> None:
        """Wait for an exchange.

        A thread of gloo must not free the tensors of an exchange: it would need Python for that, and abort the process while Python shuts down.
        So an exchange is kept until the next one, and for ever if it was abandoned.
        """
        self._latest = work
        try:
            self._look_until_done(work, call, until)
        except BaseException:  # interrupts too
            keep_exchange(work)
            raise
        try:
            work.wait()
        except RuntimeError as error:
            self._call_roll(f"{call} failed: {first_sentence(error)}", error)

    def _look_until_done(self, work: Any, call: Call, until: Deadline) -> None:
        """Poll the exchange, and check the notice board from time to time."""
        began = now = time.monotonic()
        look_at = began + _LOOK_SECS
        while not work.is_completed():  # no callback: it would abort the process if it came while Python shuts down
            time.sleep(_pause_secs(now - began))
            now = time.monotonic()
            if now >= until.at:
                self._call_roll(call.late(until.secs), None)
            if now >= look_at:
                look_at = now + _LOOK_SECS
                if self._board_says_trouble():
                    self._call_roll(f"another rank had trouble while this one waited in {call}", None)

    def _deadline(self, is_vote: bool) -> Deadline:  # noqa: FBT001 - of the calls
        return Deadline(self._vote_secs if is_vote else self._timeout_secs)

    # --- failures ----------------------------------------------------------------------------------------------------

    def _board_says_trouble(self) -> bool:
        try:
            return self._board.has_trouble()
        except RuntimeError:
            return True  # the roll call will report that the board is gone

    def _call_roll(self, occasion: str, cause: RuntimeError | None) -> NoReturn:
        raise self._give_up(lambda: self._board.fault() or self._board.call_roll(occasion)).error() from cause

    def _give_up(self, find: Any) -> Fault:
        try:
            fault: Fault = find()
            self._faults[:] = [fault]
            self._board.linger(fault)
        except RuntimeError as error:  # of the store
            text = f"its host has ended, which is rank 0 unless a launcher has it ({str(error).splitlines()[0]})"
            self._faults[:] = self._faults or [Fault((), f"the store of the process group cannot be asked: {text}")]
        return self._faults[0]

    def _disagree(self, call: Call, until: Deadline) -> NoReturn:
        """Raise with the calls of all ranks. Every rank has seen that they differ, so every rank gets here."""
        rows = self._all_gather(padded_bytes(str(call).encode()[: self._head_bytes], self._head_bytes), call, until)
        calls = [bytes(row.numpy()).rstrip(b"\0").decode(errors="replace") for row in rows]
        raise parted(f"rank {rank} calls {each}" for rank, each in enumerate(calls))

    def _bytes_of(self, value: Any) -> bytes:
        try:
            return to_wire(value)
        except InvalidArgument as error:
            self.fail(error)
            raise


@final
@attrs.frozen(eq=False)
class _PendingGather:
    owner: TorchCollectives
    call: Call
    work: Any
    rows: torch.Tensor

    @property
    def has_come(self) -> bool:
        return self.work is None or bool(self.work.is_completed())

    def wait(self) -> list[tuple[int, ...]]:
        return self.owner._rows_of(self)  # noqa: SLF001 - of this module


def _pause_secs(waited_secs: float) -> float:
    shortest, longest = _PAUSES_SECS
    return min(max(waited_secs * _PAUSE_SHARE, shortest), longest)


def _head_bytes(world_size: int) -> int:
    """The bytes of a rank in the first exchange of a call."""
    least, most = _HEAD_LIMITS
    return min(max(_ALL_HEADS_BYTES // world_size // _NUMBER_BYTES * _NUMBER_BYTES, least), most)


def _digest(call: Call) -> int:
    return int.from_bytes(hashlib.blake2b(str(call).encode(), digest_size=7).digest(), "little")
