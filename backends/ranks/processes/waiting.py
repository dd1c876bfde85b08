"""`Waiting`: how a rank waits for an exchange with other processes, and finds out which rank failed if it does not end."""

import copy
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn, final

from trainfold.backends.job import is_process_ending
from trainfold.backends.ranks.call import Call, Deadline, parted
from trainfold.backends.ranks.failure_board import Fault, NoticeBoard
from trainfold.backends.ranks.process_group import first_sentence, is_of_transport, keep_exchange
from trainfold.core.errors import RankFailed, RanksDisagree, error_text

_PAUSES_SECS: Final = (5e-5, 5e-3)  # the shortest and the longest between two looks at an exchange
_BACKGROUND_SECS: Final = 1e-3  # the shortest where the training goes on meanwhile
_PAUSE_SHARE: Final = 1 / 16  # of what was waited so far, so that an exchange is seen at most so much later
_LOOK_SECS: Final = 0.2  # how often a waiting rank checks the notice board
_LOOKS_A_SEC: Final = 5_000  # by all ranks together, of which a request takes the store some ten microseconds


@final
class Waiting:
    """What the exchanges of one rank with the others have in common. The first failure ends all of them.

    Args:
        board: where ranks report failures.
        world_size: the number of ranks.

    Attributes:
        faults: why the ranks cannot go on; at most one.
    """

    def __init__(self, board: NoticeBoard, world_size: int) -> None:
        self.board = board
        self._look_secs = look_secs(world_size)
        self._shortest_secs = _PAUSES_SECS[0]
        self._is_in_background = False
        self.faults: list[Fault] = []
        self._latest: Any = None

    def in_background(self) -> "Waiting":
        """Another one with the same failures, for a thread beside the training: it looks less often, and gives up when the process ends."""
        other = copy.copy(self)
        other._shortest_secs, other._is_in_background = _BACKGROUND_SECS, True  # noqa: SLF001 - of this class
        return other

    def check(self) -> None:
        """Raise the failure of a rank, if one is known here."""
        if self.faults:
            raise self.faults[0].error()

    def look(self) -> None:
        """Raise the failure of a rank, if one is known anywhere; one request."""
        self.check()
        if self._board_says_trouble():
            self.call_roll("another rank had trouble", None)

    def wait(self, work: Any, call: Call, until: Deadline) -> None:
        """Wait for an exchange.

        A thread of gloo must not free the tensors of an exchange: it would need Python for that, and abort the process while Python shuts down.
        So an exchange is kept until the next one, and for ever if it was abandoned.
        """
        self._latest = work
        try:
            self.look_until_done(work, call, until)
        except BaseException:  # interrupts too
            keep_exchange(work)
            raise
        try:
            work.wait()
        except RuntimeError as error:
            self.call_roll(f"{call} failed: {first_sentence(error)}", error)

    def look_until_done(self, work: Any, call: Call, until: Deadline) -> None:
        """Poll the exchange, and check the notice board from time to time."""
        began = now = time.monotonic()
        look_at = began + self._look_secs
        while not work.is_completed():  # no callback: it would abort the process if it came while Python shuts down
            time.sleep(max(_pause_secs(now - began), self._shortest_secs))
            now = time.monotonic()
            if self._is_in_background and is_process_ending():
                raise rank_ended(call)
            if now >= until.at:
                self.call_roll(call.late(until.secs), None)
            if now >= look_at:
                look_at = now + self._look_secs
                if self._board_says_trouble():
                    self.call_roll(f"another rank had trouble while this one waited in {call}", None)

    def fail(self, error: BaseException, rank: int) -> None:
        """Report an error of this rank; see `TorchCollectives.fail`."""
        if not self.faults:
            text = first_sentence(error_text(error))
            if is_of_transport(error):
                self._give_up(lambda: self.board.fault() or self.board.call_roll(text))
            else:
                self._give_up(lambda: self.board.post([rank], text))
        if self.faults and rank not in self.faults[0].ranks and not isinstance(error, RankFailed):
            error.add_note(str(self.faults[0].error()))

    def call_roll(self, occasion: str, cause: RuntimeError | None) -> NoReturn:
        """Find out which rank is missing, and raise."""
        raise self._give_up(lambda: self.board.fault() or self.board.call_roll(occasion)).error() from cause

    def _board_says_trouble(self) -> bool:
        try:
            return self.board.has_trouble()
        except RuntimeError:
            return True  # the roll call will report that the board is gone

    def _give_up(self, find: Callable[[], Fault]) -> Fault:
        try:
            fault = find()
            self.faults[:] = [fault]
            self.board.linger(fault)
        except RuntimeError as error:  # of the store
            text = f"its host has ended, which is rank 0 unless a launcher has it ({str(error).splitlines()[0]})"
            self.faults[:] = self.faults or [Fault((), f"the store of the process group cannot be asked: {text}")]
        return self.faults[0]


def look_secs(world_size: int) -> float:
    """How often a waiting rank checks the notice board.

    Examples:
        >>> look_secs(64), look_secs(1_000), look_secs(16_384)
        (0.2, 0.2, 3.2768)
    """
    return max(_LOOK_SECS, world_size / _LOOKS_A_SEC)


def rank_ended(call: Call) -> RankFailed:
    """The error of a call of which no rank reads the result any more."""
    return RankFailed(
        "this rank", expected=f"to wait for {call}", found="its process ends", fix="nothing: no rank waits for it"
    )


def differing_calls(calls: list[str]) -> RanksDisagree:
    """The error of all ranks if they do not make the same call; equal ones are named once.

    Examples:
        >>> differing_calls(["gather()", "barrier()", "barrier()"]).found
        'rank 0 calls gather(); ranks 1, 2 call barrier()'
    """
    ranks: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks.setdefault(call, []).append(rank)
    return parted(f"{_named(some)} {call}" for call, some in ranks.items())


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} calls"
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    return f"ranks {shown}{f' and {len(ranks) - _SHOWN} more' if len(ranks) > _SHOWN else ''} call"


_SHOWN: Final = 8


def _pause_secs(waited_secs: float) -> float:
    shortest, longest = _PAUSES_SECS
    return min(max(waited_secs * _PAUSE_SHARE, shortest), longest)
