"""`HandedOut`: records how a loader with its own state delivered a batch, so that it can deliver the batch again."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, final

import attrs

from trainfold.adapters.batches.draws import Drawn
from trainfold.core import tree
from trainfold.core.state.state import Opaque

_MOST_LEAVES: Final = 2000
_MOST_BYTES: Final = 1 << 20


@final
@attrs.frozen
class Mark:
    """The state of a loader before a batch that it delivered while the loop had not yet counted the one before.

    Attributes:
        place: the loader's part of a position.
        streams: everything that the batch was drawn from.
    """

    place: Mapping[str, Any]
    streams: Opaque


@final
@attrs.frozen
class HandedOut:
    """How a batch was delivered.

    Attributes:
        drawn: its digest and streams; None if they are not recorded.
        before: the state that the loader had before it; None if that is not known.
        mark: the state of the loader, if batches were delivered ahead of the count.
    """

    drawn: Drawn | None = None
    before: Any = None
    mark: Mark | None = None


@final
class Counted:
    """A ``collate_fn`` that remembers how many samples its last batch had.

    Args:
        collate: the loader's own function.
        counts: whether it is called with a list of samples.
    """

    def __init__(self, collate: Any, *, counts: bool) -> None:
        self._collate = collate
        self._counts = counts
        self.samples: int | None = None

    def __call__(self, samples: Any) -> Any:
        """Collate a batch and count its samples."""
        self.samples = len(samples) if self._counts else None
        return self._collate(samples)


@final
class Unreported:
    """An iterator over batches without their reports; the last report is kept.

    Args:
        made: an iterator of pairs of a batch and its report.
    """

    def __init__(self, made: Iterator[Any]) -> None:
        self._made = made
        self.drawn: Drawn | None = None
        self.samples: int | None = None

    def __iter__(self) -> "Unreported":
        return self

    def __next__(self) -> Any:
        batch, report = next(self._made)
        self.drawn, self.samples = Drawn.by_worker(report), report.samples
        return batch


def is_large(state: Any) -> bool:
    """Whether a loader's state is too large to read for each batch, such as that of a shuffle buffer.

    Examples:
        >>> is_large({"at": 5}), is_large({"buffer": list(range(5000))}), is_large({"buffer": [bytes(2_000_000)]})
        (False, True, True)
    """
    leaves = tree.leaves(state)
    if len(leaves) > _MOST_LEAVES:
        return True
    sizes = (
        len(leaf) if isinstance(leaf, str | bytes) else getattr(leaf, "nbytes", 8)
        for leaf in leaves
        if leaf is not None
    )
    return sum(sizes) > _MOST_BYTES
