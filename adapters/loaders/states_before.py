"""`StatesBefore`: keeps the states of a loader before its last batches, so that the data probe can draw these again."""

from collections import deque
from typing import Any, final

from trainfold.adapters.batches.hand_out import is_large
from trainfold.adapters.batches.pull_watch import is_foreign
from trainfold.adapters.components.component import Stateful, copied_containers
from trainfold.adapters.loaders.iterable import iterates, torchdatas


@final
class StatesBefore:
    """States of torchdata's loader, one before each of the last consumed batches: one for each worker.

    Args:
        loader: asked for its state before each batch, until a state turns out to be large. Only torchdata's is asked.
        workers: how many it has.
    """

    def __init__(self, loader: Any, workers: int) -> None:
        self._loader = loader
        self.known: deque[Any] = deque(maxlen=max(1, workers))
        self.is_asked = torchdatas(loader)
        self._asked = 0
        self._holds_the_users = not workers and _holds_the_users(loader)
        self._at_start: dict[str, Any] = {}

    def start_epoch(self, state: Any, samplers: dict[str, Any]) -> None:
        """Keep the loader's state between two epochs; it precedes the first batch of the next one."""
        if self.is_asked:
            self._at_start = {"state": state, "samplers": samplers, "first": True}

    def now(self, *, is_first: bool) -> Any:
        """The state before the next batch; None if the loader is not asked.

        Args:
            is_first: whether that batch is the first of its epoch.
        """
        if not self.is_asked:
            return None
        return self._at_start if is_first else self.between()

    def between(self) -> Any:
        """The state between two batches of an epoch; None if it is not known, or large."""
        state = self._loader.state_dict()
        if self._holds_the_users:
            state = copied_containers(state)
        self._asked += 1
        if self._asked.bit_count() == 1 and is_large(state):
            self.is_asked = False
        return (
            None
            if not self.is_asked or steps_since_snapshot(state)
            else {"state": state, "samplers": {}, "first": False}
        )

    def back(self, lasts: int) -> int:
        """How many of the last batches can be drawn again: those since the first one whose state is known.

        Args:
            lasts: batches whose digests are known.
        """
        found = [at for at, before in enumerate(self.known) if before is not None]
        return min(len(self.known) - found[0], lasts) if found else 0

    def take(self, before: Any, back: int) -> None:
        """Take from a position the state before the batch that is ``back`` batches behind."""
        self.known.clear()
        self.known.extend([before, *[None] * (back - 1)] if back else [])


def steps_since_snapshot(state: Any) -> int:
    """How many batches a state of torchdata's loader is behind.

    Examples:
        >>> steps_since_snapshot({"_steps_since_snapshot": 2}), steps_since_snapshot(None)
        (2, 0)
    """
    behind = state.get("_steps_since_snapshot", 0) if isinstance(state, dict) else 0
    return behind if type(behind) is int else 0


def _holds_the_users(loader: Any) -> bool:
    """Whether the state of torchdata's loader contains objects of the user's code, which may change them later."""
    return torchdatas(loader) and (iterates(loader) or isinstance(loader.dataset, Stateful) or is_foreign(loader))
