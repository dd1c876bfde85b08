"""`NoticeBoard`: records in a key-value store which rank failed and why, and which ranks are still alive.

A transport reports that a peer is gone, but not which one or why. A failing rank posts its error on the board before it ends. If no rank has
posted one, the ranks call the roll there.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, final

import attrs

from trainfold.core.errors import RankFailed

_TROUBLE = "trouble"
_FAULT = "fault"
_NO_SIGN = "no sign"
_KEEPER = "keeper"
_ROLL_SECS = 0.02  # between two looks at the roll
_KEEPER_TAKES = 1.5  # times as long as a roll call, at most
_ROLL_SECS_A_RANK = 2e-5  # at least, because a look has as many keys as there are ranks


class KeyValues(Protocol):
    """The part of `torch.distributed.Store` that is used here."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""

    def get(self, key: str, /) -> bytes:
        """The value of an existing key."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all these keys exist."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """With an empty ``expected``, set the value unless the key exists; return the value that the key has then."""


@final
@attrs.frozen
class Fault:
    """Why a world ended: the same on every rank.

    Attributes:
        ranks: the ranks that failed, or gave no sign; empty if the transport failed although all ranks are alive.
        found: what is known about it.
    """

    ranks: tuple[int, ...]
    found: str

    def error(self) -> RankFailed:
        """The error that every other rank raises."""
        some = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        error = RankFailed(
            some if self.ranks else "the ranks",
            expected="every rank to take part",
            found=self.found,
            fix=f"{self._fix()}; no rank has gone on alone",
        )
        error.rank = self.ranks[0] if len(self.ranks) == 1 else None
        error.is_silent = self._is_silent
        return error

    @property
    def _is_silent(self) -> bool:
        return bool(self.ranks) and self.found.startswith(_NO_SIGN)

    def _fix(self) -> str:
        if not self.ranks:
            return "look at the network between them, and raise timeout_secs if one was only slow"
        return "fix that rank" + (", or raise timeout_secs or vote_secs if it was only slow" if self._is_silent else "")


@final
@attrs.frozen(eq=False)
class StoreBulletin:
    """A `Bulletin` in a store.

    Args:
        store: shared by the ranks.
        name: of this bulletin.
        rank: this rank.
        world_size: the number of ranks.
        check: raises if a rank has reported a failure; one request.
    """

    store: KeyValues
    name: str
    rank: int
    world_size: int
    check: Callable[[], None]

    def put(self, number: int) -> None:
        """Set that of this rank; the request is not waited for."""
        with suppress(RuntimeError):  # the store has gone with its host: the next call reports it
            self.store.set(f"{self.name}/{self.rank}", str(number))

    def numbers(self) -> list[int]:
        """The number of each rank; -1 where there is none."""
        keys = [f"{self.name}/{rank}" for rank in range(self.world_size)]
        try:
            return [int(self.store.get(key)) if self.store.check([key]) else -1 for key in keys]
        except RuntimeError:  # as above
            return [-1] * self.world_size


@final
class NoticeBoard:
    """The board as one rank sees it. The first fault that is posted counts.

    Args:
        store: shared by the ranks, and empty.
        rank: this rank.
        world_size: the number of ranks.
        grace_secs: how long a roll call takes at most.
    """

    def __init__(self, store: KeyValues, rank: int, world_size: int, *, grace_secs: float) -> None:
        self._store = store
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._grace_secs = grace_secs

    def bulletin(self, name: str, check: Callable[[], None]) -> StoreBulletin:
        """A bulletin beside the notices."""
        return StoreBulletin(self._store, name, self._rank, len(self._others) + 1, check)

    def has_trouble(self) -> bool:
        """Whether a fault was posted or a roll call has started; one request to the store."""
        return self._store.check([_TROUBLE])

    def fault(self) -> Fault | None:
        """The fault that was posted, or None."""
        return _fault_of(self._store.get(_FAULT)) if self._store.check([_FAULT]) else None

    def post(self, ranks: Sequence[int], found: str) -> Fault:
        """Post a fault unless there is one already; return the fault that counts."""
        note = json.dumps([list(ranks), found])
        stands = _fault_of(self._store.compare_set(_FAULT, "", note))
        self._store.set(_TROUBLE, "1")
        return stands

    def call_roll(self, occasion: str) -> Fault:
        """Find the ranks that are missing. Every rank that sees trouble takes part, and all get the same answer.

        Args:
            occasion: what went wrong on this rank, for the text of the fault.
        """
        self._store.set(f"here/{self._rank}", "1")
        self._store.set(_TROUBLE, "1")
        # One rank looks who is there, and the others wait for what it finds: a look at N keys by N ranks would keep the store from answering.
        is_keeper = self._store.compare_set(_KEEPER, "", str(self._rank)) == str(self._rank).encode()
        fault = None if is_keeper else self._found_by_keeper()
        return fault or self._kept(occasion)

    def _found_by_keeper(self) -> Fault | None:
        """What the keeper of the roll has found; None if it has ended before."""
        deadline = time.monotonic() + _KEEPER_TAKES * self._grace_secs
        while time.monotonic() < deadline and not self._store.check([_FAULT]):
            time.sleep(_ROLL_SECS)
        return self.fault()

    def _kept(self, occasion: str) -> Fault:
        self._wait_for("here")
        fault = self.fault()
        if fault is None:
            missing = [other for other in self._others if not self._store.check([f"here/{other}"])]
            sign = f"{_NO_SIGN} of it within {self._grace_secs:g} s (ended, hung, or busy elsewhere)"
            fault = self.post(missing, f"{sign}: {occasion}" if missing else f"all ranks there, but {occasion}")
        return fault

    def linger(self, fault: Fault) -> None:
        """Acknowledge a fault. Rank 0, which may host the store, waits for the ranks that can still read the fault."""
        self._store.set(f"heard/{self._rank}", "1")
        if self._rank == 0:
            self._wait_for("heard", without=fault.ranks)

    def _wait_for(self, what: str, without: Sequence[int] = ()) -> None:
        keys = [f"{what}/{other}" for other in self._others if other not in without]
        deadline = time.monotonic() + self._grace_secs
        while time.monotonic() < deadline and keys and not self._store.check(keys):
            if what == "here" and self._store.check([_FAULT]):
                return
            time.sleep(max(_ROLL_SECS, _ROLL_SECS_A_RANK * len(keys)))


def _fault_of(note: bytes) -> Fault:
    ranks, found = json.loads(note)
    return Fault(tuple(ranks), found)
