"""The notice board of a world: who failed and why, and who is still there, told through a key-value store.

A transport says that a peer is gone, not which one nor why. The board is where a failing rank leaves its error before it goes, and
where the others call the roll when nobody left one.
"""

import json
import time
from collections.abc import Sequence
from typing import Protocol, final

import attrs

from trainfold.core.errors import RankFailed

_TROUBLE = "trouble"
_FAULT = "fault"
_NO_SIGN = "no sign"
_ROLL_SECS = 0.02


class KeyValues(Protocol):
    """What is used of a `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""

    def get(self, key: str, /) -> bytes:
        """A value that is there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all these keys are there."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a value that is not there yet, if ``expected`` is empty; return the one that is there afterwards."""


@final
@attrs.frozen
class Fault:
    """Why a world ended: the same on every rank.

    Attributes:
        ranks: who failed, or gave no sign; empty where the transport failed between ranks that are all there.
        found: what is known of it.
    """

    ranks: tuple[int, ...]
    found: str

    def error(self) -> RankFailed:
        """What a rank raises that hears of it."""
        some = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        return RankFailed(
            some if self.ranks else "the ranks",
            expected="every rank to take part",
            found=self.found,
            fix=f"{self._fix()}; no rank has gone on alone",
        )

    def _fix(self) -> str:
        if not self.ranks:
            return "look at the network between them, and raise timeout_secs if one was only slow"
        return "fix that rank" + (
            ", or raise timeout_secs if it was only slow" if self.found.startswith(_NO_SIGN) else ""
        )


@final
class NoticeBoard:
    """The board as one rank sees it; the first fault that is posted stands.

    Args:
        store: shared by the ranks, and empty.
        rank: this one.
        world_size: how many there are.
        grace_secs: how long a roll is called.
    """

    def __init__(self, store: KeyValues, rank: int, world_size: int, *, grace_secs: float) -> None:
        self._store = store
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._grace_secs = grace_secs

    def has_trouble(self) -> bool:
        """Whether a fault was posted or a roll is being called: one question to the store."""
        return self._store.check([_TROUBLE])

    def fault(self) -> Fault | None:
        """The fault that was posted, if there is one."""
        return _fault_of(self._store.get(_FAULT)) if self._store.check([_FAULT]) else None

    def post(self, ranks: Sequence[int], found: str) -> Fault:
        """Post a fault, unless there is one already; return the one that stands."""
        note = json.dumps([list(ranks), found])
        stands = _fault_of(self._store.compare_set(_FAULT, "", note))
        self._store.set(_TROUBLE, "1")
        return stands

    def call_roll(self, occasion: str) -> Fault:
        """Find out who is missing; every rank that sees trouble takes part, and all get the same answer.

        Args:
            occasion: what went wrong here, for the text of the fault.
        """
        self._store.set(f"here/{self._rank}", "1")
        self._store.set(_TROUBLE, "1")
        self._wait_for("here")
        fault = self.fault()
        if fault is None:
            missing = [other for other in self._others if not self._store.check([f"here/{other}"])]
            sign = f"{_NO_SIGN} of it within {self._grace_secs:g} s (ended, hung, or busy elsewhere)"
            fault = self.post(missing, f"{sign}: {occasion}" if missing else f"all ranks there, but {occasion}")
        return fault

    def linger(self, fault: Fault) -> None:
        """Acknowledge a fault; rank 0, which may be the host of the store, waits for those who can still read it."""
        self._store.set(f"heard/{self._rank}", "1")
        if self._rank == 0:
            self._wait_for("heard", without=fault.ranks)

    def _wait_for(self, what: str, without: Sequence[int] = ()) -> None:
        keys = [f"{what}/{other}" for other in self._others if other not in without]
        deadline = time.monotonic() + self._grace_secs
        while time.monotonic() < deadline and keys and not self._store.check(keys):
            if what == "here" and self._store.check([_FAULT]):
                return
            time.sleep(_ROLL_SECS)


def _fault_of(note: bytes) -> Fault:
    ranks, found = json.loads(note)
    return Fault(tuple(ranks), found)
