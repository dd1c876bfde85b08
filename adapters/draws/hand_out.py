"""`HandedOut`: how a loader with a state of its own gave a batch, so that it can give it once more."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, final

import attrs

from trainfold.adapters.draws.draws import Drawn
from trainfold.core import tree
from trainfold.core.state.state import Opaque

_MOST_LEAVES: Final = 2000
_MOST_BYTES: Final = 1 << 20


@final
@attrs.frozen
class Mark:
    """Where a loader stood before it gave a batch while the loop had not counted the one before.

    Attributes:
        place: what a position says of the loader.
        streams: everything that the batch was drawn from.
    """

    place: Mapping[str, Any]
    streams: Opaque


@final
@attrs.frozen
class HandedOut:
    """How a batch was given.

    Attributes:
        drawn: its digest and streams; None where nobody looks at them.
        before: the state that the loader had before it; None where that is not known.
        mark: where the loader stood, if the loop is ahead.
    """

    drawn: Drawn | None = None
    before: Any = None
    mark: Mark | None = None


@final
class Counted:
    """A ``collate_fn`` that knows how many samples its last batch had.

    Args:
        collate: the loader's own.
        counts: whether it gets a list of samples.
    """

    def __init__(self, collate: Any, *, counts: bool) -> None:
        self._collate = collate
        self._counts = counts
        self.samples: int | None = None

    def __call__(self, samples: Any) -> Any:
        """Collate."""
        self.samples = len(samples) if self._counts else None
        return self._collate(samples)


@final
class Unreported:
    """An iterator without the reports that come with its batches; the last one is kept.

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
    """Whether a loader's state is too large to be taken for each batch, such as that of a shuffle buffer.

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
