"""`TorchCollectives`: ranks that are processes, over torch.distributed on the CPU. They fail together and name the rank that failed."""

import logging
import os
import secrets
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any, Final, Literal, TypeVar, final

import attrs
import torch

from trainfold.backends.ranks.call import Call, Deadline, check_broadcast
from trainfold.backends.ranks.failure_board import NoticeBoard, StoreBulletin
from trainfold.backends.ranks.launcher import restart_trap
from trainfold.backends.ranks.ordered_sum import sum_plan
from trainfold.backends.ranks.process_group import (
    Arrivals,
    checked_group,
    default_store,
    first_sentence,
    initialised,
    is_of_tcp,
    not_made,
    padded_bytes,
    start_all_gather,
    start_all_to_all,
)
from trainfold.backends.ranks.processes.edges import connect
from trainfold.backends.ranks.processes.left_in_children import keep_in_children
from trainfold.backends.ranks.processes.mesh import Exchange, MeshExchange, PendingNumbers
from trainfold.backends.ranks.processes.tree import TreeExchange
from trainfold.backends.ranks.processes.waiting import Waiting, look_secs
from trainfold.backends.ranks.wire import all_from_wire, from_wire, to_wire
from trainfold.core.digest import digest_of
from trainfold.core.errors import InvalidArgument
from trainfold.core.layout.agreement.rank_tree import SAME_NODE, RankTree, rank_tree
from trainfold.core.state.spec import dtype_name
from trainfold.core.tensor_memory import tensor_bytes

T = TypeVar("T")
_LOG: Final = logging.getLogger("trainfold")

_MOST_MESH_RANKS: Final = (
    8  # by default: up to a node, where a tree has as many sockets, and a gather takes some ms less (ADR-0042)
)
_TOKEN_BYTES: Final = 8
_LOOKS_A_ROLL: Final = 2  # at least
_MOST_BULLETIN_RANKS: Final = 1024  # who waits reads the number of each rank


@final
class TorchCollectives:
    """The collectives of the rank of this process. The constructor is a collective call: every rank of the group makes it at the same point.

    In a mesh, where each rank is connected to each, a call starts with one small all-gather, in which the ranks check that all make the same call.
    What a value has beyond 4 KiB, or half a KiB where there are thousands of ranks, follows in a second exchange: an all-gather, or a broadcast of
    what one rank gives. In a tree the ranks of a node are connected to its first one, and that to a few others: values go up to rank 0, and come
    down. Sums of floats and exchanges of all ranks make a mesh there too, when the first of them is called, and exchanges of groups a mesh of each group. A waiting rank also watches for trouble. If a rank raises (and reports it with `fail`), dies, or is late, every other rank raises `RankFailed`, with the same text
    everywhere. A rank that posted no error is named after a roll call of ``grace_secs``; a rank that is only busy elsewhere cannot be
    distinguished from it and is named too. Afterwards every call raises that error again: restart the job.

    Integers of 64 bits are summed by one all-reduce, or up and down the tree. Other sums are added in rank order, which the all-reduce of gloo does not do: with 1e8, 1
    and -1e8 on three ranks, it returned 0 in some parts of one float32 vector and 1 in others. The two exchanges move as many bytes as an
    all-reduce. With the copies around them they take about twice as long for a million floats, and four times as long for ten million. Tensors
    of another device go through the CPU and back. Use it for evaluations and saves, and for gradients if equal bits matter more than speed.

    Values travel as JSON (``trainfold.backends.ranks.wire``), not as pickle.

    Args:
        group: a process group with a CPU backend, which also gives the ranks; by default a gloo group of all ranks, which no training uses and
            which ends with these collectives.
        topology: how the ranks are connected: "mesh", "tree", or this tree of them; by default a mesh of up to 8 ranks or of the group, and a tree of more
            (ADR-0042). A tree that is not given has nodes of ``LOCAL_WORLD_SIZE`` ranks, or of 8 if rank 0 has no such variable.
        timeout_secs: how long a rank waits for the others in a call before which they may read, write or train.
        vote_secs: how long it waits in a vote, before which they have little to do, such as that on the result of a commit.
        grace_secs: how long a roll call takes at most.

    Raises:
        InvalidArgument: if torch.distributed is not initialised, or the group has no CPU backend, or this process is not in it, or the tree has another
            number of ranks.
        RankFailed: if not all ranks call it, naming those that do not.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        topology: Literal["mesh", "tree"] | RankTree | None = None,
        timeout_secs: float = 600.0,
        vote_secs: float = 60.0,
        grace_secs: float = 3.0,
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
        self._own: Any = None
        self._given: Any = group
        if group is not None:
            checked_group(dist, group)
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)
        if topology is None:
            topology = "mesh" if group is not None or self.world_size <= _MOST_MESH_RANKS else "tree"
        _check_topology(topology, self.world_size)
        arrivals = Arrivals(dist, group)
        try:
            if topology == "mesh":
                if group is None:
                    self._own = group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_secs))
                token = padded_bytes(secrets.token_bytes(_TOKEN_BYTES), _TOKEN_BYTES)
                work, tokens = start_all_gather(group, token, self.world_size, timeout_secs)
                work.wait()
                self._connect(bytes(tokens[0].tolist()).hex(), None, group)
            else:
                name, tree = self._met_at_the_store(arrivals.place, topology)
                self._connect(name, tree)
                # no rank returns, and may end, before all are connected
                self._exchange.meet(Call("make", doing="make its TorchCollectives"), b"", Deadline(timeout_secs))
        except RuntimeError as error:
            raise not_made(error, arrivals.missing()) from error
        if self.rank == 0 and (trap := restart_trap(os.environ)):
            _LOG.warning(trap)

    def _met_at_the_store(self, place: str, topology: object) -> tuple[str, RankTree]:
        """The name under which ranks without a group meet, and their tree: rank 0 has both, and writes them where the others look."""
        store = default_store(self._dist)
        if self.rank == 0:
            node_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
            tree = rank_tree(self.world_size, node_ranks=int(node_ranks) if node_ranks.isdecimal() and int(node_ranks) else SAME_NODE)  # fmt: skip
            if isinstance(topology, RankTree):
                tree = topology
            store.set(place, f"{secrets.token_hex(_TOKEN_BYTES)} {tree.node_ranks} {tree.fan_out}")
        store.wait([place], timedelta(seconds=self._timeout_secs))
        name, node_ranks, fan_out = store.get(place).decode().split()
        return name, rank_tree(self.world_size, node_ranks=int(node_ranks), fan_out=int(fan_out))

    def _connect(self, name: str, tree: RankTree | None, group: Any = None) -> None:
        """Connect this rank with others, for calls that begin now.

        Args:
            name: of these collectives, the same on all ranks and never used before.
            tree: how the ranks are connected; None for a mesh.
            group: the mesh, if there is one; otherwise it is made, in a tree when it is needed.
        """
        keep_in_children(self)
        store = self._dist.PrefixStore(f"trainfold/{name}", default_store(self._dist))
        self._tree, self._bulletins = tree, 0
        least_secs = _LOOKS_A_ROLL * look_secs(self.world_size)  # or a rank would not have heard of it
        grace_secs = max(self._grace_secs, least_secs)
        board = NoticeBoard(store, self.rank, self.world_size, grace_secs=grace_secs)
        self._waiting = Waiting(board, self.world_size)

        timeout = timedelta(seconds=self._timeout_secs)
        dist, rank, world_size = (
            self._dist,
            self.rank,
            self.world_size,
        )  # not `self`, or its sockets would wait for the garbage collector

        def make_group(name: str, index: int, size: int) -> Any:
            # Not `new_group`: torch names a group made by its own ranks after the number of groups in this process. The number differs between
            # ranks after one of them has released a group, and it repeats.
            return dist.ProcessGroupGloo(dist.PrefixStore(name, store), index, size, timeout)

        def mesh() -> Any:
            return make_group("group", rank, world_size)

        self._make_group = make_group
        self._groups: dict[tuple[int, ...], Any] = {}

        if tree is None:
            self._exchange: Exchange = MeshExchange(self._waiting, mesh() if group is None else group, self.world_size)
            keep_in_children(self._exchange)  # as a number that it passes on may be the last that refers to it
            return
        place = tree.place(self.rank)
        edges = connect(self._dist, store, place, self._timeout_secs)
        given = self._given
        self._exchange = TreeExchange(
            self._waiting, place, edges, self.world_size, mesh if given is None else lambda: given
        )
        keep_in_children(self._exchange)

    def __repr__(self) -> str:
        return f"TorchCollectives(rank={self.rank}, world_size={self.world_size})"

    def __del__(self) -> None:
        """Release the sockets of a group made here, unless an exchange is running or Python is shutting down.

        Not `weakref.finalize`: its registry would keep the group until torch is unloaded, and abort the process.
        """
        own, waiting = getattr(self, "_own", None), getattr(self, "_waiting", None)
        if own is None or waiting is None or waiting.faults or sys.is_finalizing() or not self._dist.is_initialized():
            return
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
        self._exchange.meet(call, b"", until)
        if tensors and all(tensor.dtype == torch.int64 for tensor in tensors):
            return self._all_reduce(tensors, call, until)
        plan = sum_plan(tensors, self.world_size)
        if not plan.part_bytes:
            return [tensor.detach().clone() for tensor in tensors]
        mine = plan.cut(tensors)
        parts = torch.empty_like(mine)
        group = self._mesh(call)
        self._waiting.wait(start_all_to_all(group, parts, mine, until.left()), call, until)
        work, rows = start_all_gather(group, plan.add(parts), self.world_size, until.left())
        self._waiting.wait(work, call, until)
        sums = plan.join(rows)
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
        found: T = from_wire(self._exchange.give(call, given, source, until))
        return found

    def gather(self, value: T, *, doing: str = "", is_vote: bool = False) -> list[T]:
        """Copies of the values of all ranks, in rank order.

        Raises:
            RankFailed: if a rank failed or was late.
            RanksDisagree: if a rank calls something else.
            InvalidArgument: if the value cannot be encoded.
        """
        call, until = Call("gather", "", doing), self._deadline(is_vote)
        return all_from_wire(self._exchange.meet(call, self._bytes_of(value), until))

    def exchange(
        self,
        parts: Sequence[Sequence[memoryview]],
        sizes: Sequence[int],
        *,
        among: Sequence[int] | None = None,
        doing: str = "",
    ) -> list[memoryview]:
        """What each rank has sent to this one. A rank sends and receives what it has to, and no more.

        The ranks of a group are connected to each other when they first exchange something.

        Raises:
            RankFailed: if a rank failed or was late.
            RanksDisagree: if a rank calls something else.
        """
        call, until = Call("exchange", "", doing), Deadline(self._timeout_secs)
        self._exchange.meet(call, b"", until)
        here = self.rank if among is None else among.index(self.rank)
        # a byte to itself: gloo wants something from each rank
        go, come = [sum(map(len, each)) for each in parts], list(sizes)
        go[here] = come[here] = 1
        given, received = (torch.empty(sum(each), dtype=torch.uint8) for each in (go, come))
        memory, place = tensor_bytes(given), 0
        for rank, each in enumerate(parts):
            for part in each:
                memory[place : place + len(part)] = part
                place += len(part)
            place += rank == here
        work = start_all_to_all(self._mesh(call, among), received, given, until.left(), (come, go))
        self._waiting.wait(work, call, until)
        data, ends = tensor_bytes(received), [0, *accumulate(come)]
        found = [data[start:stop] for start, stop in pairwise(ends)]
        return [each[: size if rank != here else 0] for rank, (each, size) in enumerate(zip(found, sizes, strict=True))]

    def start_gather(self, numbers: Sequence[int], *, doing: str = "") -> "_PendingGather":
        """Start to gather whole numbers below 2**63 of all ranks, at most 60. What goes wrong is raised when they are waited for."""
        call = Call("start_gather", f"{len(numbers)} numbers", doing)
        if self._waiting.faults:
            return _PendingGather(self, None)
        payload = struct.pack(f"<{len(numbers)}q", *numbers)
        return _PendingGather(self, self._exchange.start(call, payload, self._timeout_secs))

    def barrier(self, *, timeout_secs: float) -> None:
        """Return when every rank has called.

        Raises:
            RankFailed: naming the rank that is missing after ``timeout_secs``, or that failed.
        """
        self._exchange.meet(Call("barrier"), b"", Deadline(timeout_secs))

    def fail(self, error: BaseException) -> None:
        """Report an error, so that every other rank raises `RankFailed` from its current or next call.

        If another rank failed first, or the error comes from gloo because another rank failed, a note that names that rank is added to it.
        """
        self._waiting.fail(error, self.rank)

    def duplicate(self) -> "TorchCollectives":
        """The same ranks with another gloo group and the same timeouts; every rank of the group calls this.

        A failure of one of the two does not fail the other.
        """
        name = self.broadcast(secrets.token_hex(_TOKEN_BYTES), doing="make a group for saves")
        copy = object.__new__(TorchCollectives)
        copy._dist, copy._own, copy._given = self._dist, None, None
        copy._timeout_secs, copy._vote_secs, copy._grace_secs = self._timeout_secs, self._vote_secs, self._grace_secs
        copy.rank, copy.world_size = self.rank, self.world_size
        try:
            copy._connect(name, self._tree)
        except RuntimeError as error:
            self._waiting.call_roll(f"it did not connect a group for saves: {first_sentence(error)}", error)
        return copy

    def bulletin(self) -> StoreBulletin | None:
        """A new bulletin, in the store at which the ranks have met; None if that is a file, which would grow with each number, or on more than 1,024 ranks."""
        self._bulletins += 1
        is_cheap = self.world_size <= _MOST_BULLETIN_RANKS and is_of_tcp(self._dist, default_store(self._dist))
        return self._waiting.board.bulletin(f"bulletin/{self._bulletins}", self._waiting.look) if is_cheap else None

    def _mesh(self, call: Call, among: Sequence[int] | None = None) -> Any:
        """A group in which each rank is connected to each, of all ranks or of some, for a call that all ranks make."""
        try:
            if among is None:
                return self._exchange.group()
            if (ranks := tuple(among)) not in self._groups:
                self._groups[ranks] = self._make_group(
                    f"among/{digest_of(repr(ranks).encode())}", ranks.index(self.rank), len(ranks)
                )
            return self._groups[ranks]
        except RuntimeError as error:
            self._waiting.call_roll(f"it did not connect a mesh for {call}: {first_sentence(error)}", error)

    def _all_reduce(self, tensors: list[torch.Tensor], call: Call, until: Deadline) -> list[torch.Tensor]:
        """The sums of integers, which do not depend on the order."""
        total = torch.cat([tensor.detach().cpu().reshape(-1) for tensor in tensors])
        if total.numel():
            self._exchange.add(total, call, until)
        parts = torch.split(total, [tensor.numel() for tensor in tensors])
        pairs = zip(parts, tensors, strict=True)
        return [part.clone().view(tensor.shape).to(tensor.device) for part, tensor in pairs]

    def _deadline(self, is_vote: bool) -> Deadline:  # noqa: FBT001 - of the calls
        return Deadline(self._vote_secs if is_vote else self._timeout_secs)

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
    numbers: PendingNumbers | None

    @property
    def has_come(self) -> bool:
        return self.numbers is None or self.numbers.has_come

    def wait(self) -> list[tuple[int, ...]]:
        waiting = self.owner._waiting  # noqa: SLF001 - of this module
        if self.numbers is None:
            raise waiting.faults[0].error()
        return self.numbers.rows(Deadline(self.owner._timeout_secs))  # noqa: SLF001 - as above


def _check_topology(topology: object, world_size: int) -> None:
    if topology in ("mesh", "tree") or (isinstance(topology, RankTree) and topology.size == world_size):
        return
    raise InvalidArgument(
        "TorchCollectives.topology",
        expected=f'"mesh", "tree", or a tree of {world_size} ranks',
        found=str(topology),
        fix="make a tree with trainfold.ranks.rank_tree(world_size)",
    )
