"""`PullWatch`: whether a sampler draws from a global random stream as an epoch goes on, so that its order cannot be drawn again."""

import logging
from collections.abc import Callable
from typing import Any, final

from trainfold.adapters.draws.feed import mismatch
from trainfold.adapters.streams.stream_reader import StreamReader
from trainfold.core.errors import TrainfoldError

_LOG = logging.getLogger("trainfold")
_CURE = (
    "draw the whole order at the start of the sampler's __iter__, or draw from a generator that is seeded there; or resume from the end "
    "of an epoch"
)


@final
class PullWatch:
    """Looks at the global streams before and after an index is asked for.

    A resume starts the sampler again with the streams that the epoch began with. What a sampler draws at its start is drawn again like
    that. What it draws later came from streams that the training had moved meanwhile; with workers, it was drawn ahead of the training.

    Args:
        kind: what the sampler is called.
        is_ahead: whether indices are asked for ahead of the training, as loader workers need them.
    """

    def __init__(self, kind: str, *, is_ahead: bool) -> None:
        self._kind = kind
        self._is_ahead = is_ahead
        self._reader = StreamReader()
        self._own: set[str] = set()
        self._of_others: set[str] = set()
        self._has_said = False

    @property
    def late(self) -> list[str]:
        """The streams that stand in the way of a resume inside an epoch."""
        return sorted(self._own if self._is_ahead else self._own & self._of_others)

    def pull(self, ask: Callable[[], Any], *, is_first: bool) -> Any:
        """Ask for an index.

        Args:
            ask: asks the sampler.
            is_first: whether the sampler has been started just now, and draws what it draws at its start.
        """
        of_others = self._reader.moved()
        item = ask()
        own = self._reader.moved()
        if not is_first:
            self._of_others.update(of_others)
            self._own.update(own)
            if self.late and not self._has_said:
                self._has_said = True
                _LOG.warning(
                    "the sampler %s draws from the global random streams of %s while an epoch goes on, and so does the training or the "
                    "dataset, or loader workers are ahead of them. A resume inside an epoch could not draw the same order again, and will "
                    "be refused: %s",
                    self._kind,
                    ", ".join(self.late),
                    _CURE,
                )
        return item


def late_problems(saved: Any) -> list[TrainfoldError]:
    """The refusal of a position inside an epoch whose order cannot be drawn again."""
    if not saved:
        return []
    found = ", ".join(map(str, saved))[:80] if isinstance(saved, list) else repr(saved)[:80]
    return [
        mismatch(
            "state.dataset.late",
            "an order that the sampler draws when the epoch begins",
            f"one that it drew from the global random streams of {found} while the epoch went on",
            _CURE,
        )
    ]


def is_foreign(loader: Any) -> bool:
    """Whether a sampler of a loader is a class of the user's; those of torch draw at their start, or from generators of their own.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> is_foreign(DataLoader([1])), is_foreign(DataLoader([1], sampler=[0]))
        (False, True)
    """
    outer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    parts = (outer, getattr(outer, "sampler", outer))
    return any(type(part).__module__.split(".")[0] not in ("torch", "torchdata") for part in parts)
