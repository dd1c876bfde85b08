"""`Room`: where ranks that are threads meet."""

import copy
import threading
import time
from typing import Any, Final, final

import attrs

from trainfold.backends.ranks.call import Call, parted
from trainfold.core.errors import RankFailed, TrainfoldError, error_text

VOTE_SECS: Final = 60.0


@final
@attrs.define
class _Round:
    """One call of every rank: what each has called, what it gave, and how many have taken what all gave."""

    calls: dict[int, Call] = attrs.field(factory=dict)
    payloads: dict[int, Any] = attrs.field(factory=dict)
    is_over: bool = False
    takers: int = 0


@final
class Room:
    """Where the threads meet, under one condition variable. A rank may be at a later round than another."""

    def __init__(self, world_size: int, timeout_secs: float) -> None:
        self.world_size = world_size
        self.vote_secs = min(VOTE_SECS, timeout_secs)
        self.failure: TrainfoldError | None = None
        self._cause: tuple[int, BaseException] | None = None
        self._timeout_secs = timeout_secs
        self._changed = threading.Condition()
        self._rounds: dict[int, _Round] = {}
        self._waiting: set[int] = set()
        self._left: set[int] = set()
        self._copies: dict[int, Room] = {}
        self._bulletins: dict[int, list[int]] = {}

    def copy(self, number: int) -> "Room":
        """The copy with a number, which is the same for all ranks."""
        with self._changed:
            room = self._copies.setdefault(number, Room(self.world_size, self._timeout_secs))
            room.failure = room.failure or self.failure
            return room

    def bulletin(self, number: int) -> list[int]:
        """The bulletin with a number, which is the same for all ranks: the numbers that they have put up."""
        with self._changed:
            return self._bulletins.setdefault(number, [-1] * self.world_size)

    def check(self) -> None:
        """Raise what has ended the room."""
        with self._changed:
            self._raise_failure()

    def arrive(self, rank: int, index: int, call: Call, payload: Any) -> None:
        """Give what a rank has for its call number ``index``."""
        with self._changed:
            here = self._rounds.setdefault(index, _Round())
            if self.failure is not None:
                return  # `wait` raises it
            here.calls[rank], here.payloads[rank] = call, payload
            self._check(here)
            here.is_over = self.failure is None and len(here.calls) == self.world_size
            self._changed.notify_all()

    def wait(self, rank: int, index: int, timeout_secs: float | None) -> list[Any]:
        """What all ranks gave in a round, in rank order, when all of them have arrived."""
        secs = self._timeout_secs if timeout_secs is None else timeout_secs
        deadline = time.monotonic() + secs
        with self._changed:
            here = self._rounds[index]
            self._waiting.add(rank)
            while not here.is_over and self.failure is None:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    missing = sorted(set(range(self.world_size)) - set(here.calls))
                    call = here.calls[rank]
                    late = left_by(
                        missing[0], f"all ranks in {call}", f"ranks {missing} missing in time: {call.late(secs)}"
                    )
                    late.is_silent = True
                    self._fail(late)
                    break
                self._changed.wait(remaining)
            self._waiting.discard(rank)
            if not here.is_over:
                self._raise_failure()
            here.takers += 1
            if here.takers == self.world_size:
                del self._rounds[index]
            return [here.payloads[each] for each in range(self.world_size)]

    def leave(self, rank: int) -> None:
        """Note that a rank makes no further call."""
        with self._changed:
            self._left.add(rank)
            for here in self._rounds.values():
                self._check(here)
            copies = list(self._copies.values())
        for room in copies:
            room.leave(rank)

    def fail(self, rank: int, error: BaseException) -> None:
        """Make the other ranks raise, in this room and in its copies."""
        with self._changed:
            self._left.add(rank)
            if self.failure is None:
                self._cause = (rank, error)
                self._fail(left_by(rank, "every rank to take part", error_text(error)))
            copies = list(self._copies.values())
        for room in copies:
            room.fail(rank, error)

    def is_waiting(self, rank: int) -> bool:
        """Whether a rank waits for the others."""
        with self._changed:
            return rank in self._waiting

    def _check(self, here: _Round) -> None:
        """Fail the world if the ranks have called different things, or one has left before a call of others."""
        absent = sorted(self._left - set(here.calls))
        if len(set(here.calls.values())) > 1 or absent:
            shown = [f"rank {rank} calls {call}" for rank, call in sorted(here.calls.items())]
            shown += [f"rank {rank} has returned" for rank in absent]
            self._fail(parted(shown))

    def _fail(self, failure: TrainfoldError) -> None:
        with self._changed:
            if self.failure is None:
                self.failure = failure
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise copy.copy(self.failure) from (self._cause[1] if self._cause else None)


def left_by(rank: int, expected: str, found: str) -> RankFailed:
    """The error of the ranks that a failed one has left behind."""
    fix = "fix that rank; no rank has gone on without it"
    error = RankFailed(f"rank {rank}", expected=expected, found=found, fix=fix)
    error.rank = rank
    return error
