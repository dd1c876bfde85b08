"""`AutoCadence`: measures what a save costs and how long a step takes, and chooses how often to save (W12)."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Final, final

from trainfold.adapters.manager.events import EventLog
from trainfold.core.layout.world import Collectives
from trainfold.core.save.auto_cadence import choose_cadence, describe_cadence

_REMEMBERED: Final = 64


def teller_of(announcer: EventLog, world: Collectives) -> Callable[[str], None]:
    """What tells of a cadence on rank 0, whom the others follow; it does not keep the manager alive."""
    return (lambda detail: announcer.tell("cadence", detail=detail)) if world.rank == 0 else (lambda _: None)


@final
class AutoCadence:
    """The cadence of ``every="auto"``: none until a save has been measured, and then the one that loses least.

    What it measures: the time from the end of one boundary to the beginning of the next, the median of which is a step; how long
    the call of a save takes; and by how much steps are longer than the median while a save goes on in the background.

    Args:
        say: is told what was chosen, in words.
        clock: seconds that only grow.

    Attributes:
        every: what was chosen, in optimizer steps; None until then.
    """

    def __init__(self, say: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.every: int | None = None
        self._say = say
        self._clock = clock
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)  # seconds each
        self._left: tuple[float, int] | None = None  # when the last boundary ended, and its step
        self._began: float | None = None  # of the save under way
        self._cost = 0.0  # of that save, or of the last one, until the choice
        self._write = 0.0
        self._is_measured = False

    def arrive(self, step: int) -> None:
        """A boundary begins."""
        if self._left is None or step <= self._left[1]:
            return
        left, done = self._clock() - self._left[0], step - self._left[1]
        if self._began is None:
            self._steps.append(left / done)
        elif self._steps:
            self._cost += max(0.0, left - done * statistics.median(self._steps))
        if self._is_measured and self._steps:
            self._choose()

    def leave(self, step: int) -> None:
        """A boundary, or a save at one, ends."""
        self._left = (self._clock(), step)

    def begun(self, call_secs: float, *, is_durable: bool) -> None:
        """A save was begun, in so many seconds; it may be durable already."""
        self._cost, self._began = call_secs, self._clock() - call_secs
        if is_durable:
            self.ended()

    def ended(self) -> None:
        """The save under way has ended."""
        if self._began is not None:
            self._write, self._began, self._is_measured = self._clock() - self._began, None, True

    def _choose(self) -> None:
        self._is_measured = False
        step_secs = statistics.median(self._steps)
        every = choose_cadence(self.every, save_secs=self._cost, step_secs=step_secs, write_secs=self._write)
        if every != self.every:
            self.every = every
            self._say(describe_cadence(every, save_secs=self._cost, step_secs=step_secs))
