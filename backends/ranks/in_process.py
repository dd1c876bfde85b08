"""Ranks without processes of their own: a world of one rank, and N ranks as threads of one process, for tests and laws."""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar, final

import attrs
import torch

from trainfold.backends.ranks.call import Call, check_broadcast
from trainfold.backends.ranks.ordered_sum import added
from trainfold.backends.ranks.thread_room import Room, left_by
from trainfold.core.errors import InvalidArgument, RankFailed, TrainfoldError
from trainfold.core.state.spec import dtype_name

T = TypeVar("T")
TIMEOUT_SECS = 60.0


@final
@attrs.frozen
class SingleProcess:
    """The collectives of a world of one rank. Every call returns at once.

    Examples:
        >>> SingleProcess().gather("a")
        ['a']
    """

    rank: int = 0
    world_size: int = 1

    def all_sum(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of the tensors."""
        return [tensor.clone() for tensor in tensors]

    def broadcast(self, value: T, *, source: int = 0, doing: str = "", is_vote: bool = False) -> T:
        """The value itself."""
        del doing, is_vote
        check_broadcast(source, self.world_size)
        return value

    def gather(self, value: T, *, doing: str = "", is_vote: bool = False) -> list[T]:
        """The value itself, in a list."""
        del doing, is_vote
        return [value]

    def start_gather(self, numbers: Sequence[int], *, doing: str = "") -> "_Row":
        """The numbers, in a list."""
        del doing
        return _Row(tuple(numbers))

    def barrier(self, *, timeout_secs: float) -> None:
        """Return at once."""

    def fail(self, error: BaseException) -> None:
        """Does nothing: there is no other rank."""

    def duplicate(self) -> "SingleProcess":
        """Itself, because no call waits."""
        return self


ALONE: Final = SingleProcess()


@final
@attrs.frozen
class _Row:
    numbers: tuple[int, ...]

    def wait(self) -> list[tuple[int, ...]]:
        return [self.numbers]


@final
@attrs.frozen
class RankFault:
    """A fault to inject: a rank fails in its call number ``call_index`` (from 0).

    Attributes:
        rank: the rank that fails.
        call_index: the call in which it fails.
        silent: whether it fails without a report, like a machine that loses power, so that the others wait for a deadline.
    """

    rank: int
    call_index: int
    silent: bool = False


class InjectedFailure(TrainfoldError):
    """The error of a rank with a `RankFault`."""


@final
@attrs.frozen
class RankOutcome(Generic[T]):
    """How one rank ended.

    Attributes:
        rank: the rank.
        value: what its function returned; None if it raised.
        error: what it raised, or None.
        schedule: its collective calls; the last one may not have completed.
    """

    rank: int
    value: T | None
    error: BaseException | None
    schedule: tuple[Call, ...]


@final
class ThreadCollectives:
    """The collectives of a rank that is a thread. `run_threads` makes them."""

    def __init__(self, rank: int, room: Room, fault: RankFault | None) -> None:
        self.rank = rank
        self.world_size = room.world_size
        self.schedule: list[Call] = []
        self._room = room
        self._fault = fault
        self._copies = self._boards = 0

    def __repr__(self) -> str:
        return f"ThreadCollectives(rank={self.rank}, world_size={self.world_size})"

    def all_sum(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The sums over the ranks, added in rank order, so that every rank has the same bits."""
        detail = ", ".join(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}" for tensor in tensors)
        given: list[list[torch.Tensor]] = self._meet(Call("all_sum", detail), [tensor.clone() for tensor in tensors])
        return [added(list(same)) for same in zip(*given, strict=True)]

    def broadcast(self, value: T, *, source: int = 0, doing: str = "", is_vote: bool = False) -> T:
        """A copy of the value that rank ``source`` has."""
        check_broadcast(source, self.world_size)
        mine = copy.deepcopy(value) if self.rank == source else None
        found: T = copy.deepcopy(
            self._meet(Call("broadcast", f"source={source}", doing), mine, is_vote=is_vote)[source]
        )
        return found

    def gather(self, value: T, *, doing: str = "", is_vote: bool = False) -> list[T]:
        """Copies of the values of all ranks, in rank order."""
        return copy.deepcopy(self._meet(Call("gather", "", doing), copy.deepcopy(value), is_vote=is_vote))

    def exchange(
        self,
        parts: Sequence[Sequence[memoryview]],
        sizes: Sequence[int],
        *,
        among: Sequence[int] | None = None,
        doing: str = "",
    ) -> list[bytes]:
        """Copies of what each rank has for this one."""
        del sizes
        ranks = range(self.world_size) if among is None else among
        mine = {rank: b"".join(each) for rank, each in zip(ranks, parts, strict=True)}
        given = self._meet(Call("exchange", "", doing), mine)
        return [given[rank][self.rank] for rank in ranks]

    def start_gather(self, numbers: Sequence[int], *, doing: str = "") -> "_PendingInRoom":
        """Start to gather the numbers of all ranks."""
        index = self._arrive(Call("start_gather", f"{len(numbers)} numbers", doing), tuple(numbers))
        return _PendingInRoom(self._room, self.rank, index)

    def barrier(self, *, timeout_secs: float) -> None:
        """Return when every rank has called.

        Raises:
            RankFailed: naming the rank that is missing after ``timeout_secs``, or that failed.
        """
        self._meet(Call("barrier"), None, timeout_secs=timeout_secs)

    def fail(self, error: BaseException) -> None:
        """Make every other rank raise `RankFailed` from its current or next call."""
        self._room.fail(self.rank, error)

    def duplicate(self) -> "ThreadCollectives":
        """The same ranks in another room, which fails if this room does."""
        numbers = self._meet(Call("duplicate"), self._copies)
        self._copies += 1
        return ThreadCollectives(self.rank, self._room.copy(numbers[0]), None)

    def bulletin(self) -> "_RoomBulletin":
        """A new bulletin."""
        self._boards += 1
        return _RoomBulletin(self._room, self.rank, self._room.bulletin(self._boards))

    def _meet(self, call: Call, payload: Any, *, timeout_secs: float | None = None, is_vote: bool = False) -> list[Any]:
        secs = self._room.vote_secs if is_vote else timeout_secs
        return self._room.wait(self.rank, self._arrive(call, payload), secs)

    def _arrive(self, call: Call, payload: Any) -> int:
        index = len(self.schedule)
        self.schedule.append(call)
        if self._fault is not None and (self._fault.rank, self._fault.call_index) == (self.rank, index):
            raise InjectedFailure(
                f"rank {self.rank}", expected=f"call {index}, {call}", found="an injected fault", fix="survive it"
            )
        self._room.arrive(self.rank, index, call, payload)
        return index


@final
@attrs.frozen(eq=False)
class _RoomBulletin:
    room: Room
    rank: int
    board: list[int]

    def put(self, number: int) -> None:
        self.board[self.rank] = number

    def check(self) -> None:
        self.room.check()

    def numbers(self) -> list[int]:
        return list(self.board)


@final
@attrs.frozen
class _PendingInRoom:
    room: Room
    rank: int
    index: int

    def wait(self) -> list[tuple[int, ...]]:
        return list(self.room.wait(self.rank, self.index, None))


def run_threads(
    world_size: int,
    function: Callable[[ThreadCollectives], T],
    *,
    timeout_secs: float = TIMEOUT_SECS,
    fail_at: RankFault | None = None,
) -> list[T]:
    """Run a function on every rank of a world of threads.

    Args:
        world_size: the number of ranks, >= 1.
        function: called once for each rank, with the collectives of that rank.
        timeout_secs: how long a rank waits for the others in one call.
        fail_at: which rank fails, and when.

    Returns:
        What the function returned, in rank order.

    Raises:
        BaseException: the error of the lowest rank that failed by itself; a `RankFailed` counts only if no rank has another error.

    Examples:
        >>> run_threads(3, lambda collectives: collectives.gather(collectives.rank ** 2))
        [[0, 1, 4], [0, 1, 4], [0, 1, 4]]
    """
    outcomes = thread_outcomes(world_size, function, timeout_secs=timeout_secs, fail_at=fail_at)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, RankFailed)):  # a stable sort: causes first
        raise error
    return [outcome.value for outcome in outcomes]  # type: ignore[misc]  # no error: the value is a T


def thread_outcomes(
    world_size: int,
    function: Callable[[ThreadCollectives], T],
    *,
    timeout_secs: float = TIMEOUT_SECS,
    fail_at: RankFault | None = None,
) -> list[RankOutcome[T]]:
    """Like `run_threads`, but return how each rank ended, even if ranks failed.

    Examples:
        >>> def work(collectives):
        ...     collectives.barrier(timeout_secs=5.0)
        >>> [type(outcome.error).__name__ for outcome in thread_outcomes(2, work, fail_at=RankFault(1, 0))]
        ['RankFailed', 'InjectedFailure']
    """
    if world_size < 1:
        raise InvalidArgument("world_size", expected=">= 1", found=world_size, fix="a world has at least one rank")
    room = Room(world_size, timeout_secs)
    ranks = [ThreadCollectives(rank, room, fail_at) for rank in range(world_size)]
    values: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def work(collectives: ThreadCollectives) -> None:
        try:
            values[collectives.rank] = function(collectives)
        except BaseException as error:  # noqa: BLE001  # a rank's error is its outcome
            errors[collectives.rank] = error
            if not (isinstance(error, InjectedFailure) and fail_at is not None and fail_at.silent):
                collectives.fail(error)
        else:
            room.leave(collectives.rank)

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank-{rank.rank}", daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        while thread.is_alive():
            thread.join(timeout_secs)
            if thread.is_alive() and room.failure is not None and not room.is_waiting(rank):
                errors[rank] = left_by(rank, "to end after another rank failed", f"it still runs: {room.failure}")
                break
    return [
        RankOutcome(rank, values.get(rank), errors.get(rank), tuple(collectives.schedule))
        for rank, collectives in enumerate(ranks)
    ]
