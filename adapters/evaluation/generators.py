"""`close_generators`: closes the generators of an evaluation at once; what they restore must not wait for a garbage collection."""

import gc
import itertools
from collections.abc import Generator, Iterator
from typing import Any, Final

LAZY: Final[tuple[type, ...]] = (  # Python's iterators over other iterators
    *(map, filter, zip, enumerate),
    *(kind for kind in vars(itertools).values() if isinstance(kind, type)),
)


def close_generators(iterator: Iterator[Any]) -> None:
    """Close a generator, or those that a map, a slice or the like draws from; leave any other iterator as it is.

    A generator inside a ``with`` block, such as ``torch.no_grad()``, leaves the block when it is closed.

    Examples:
        >>> def some():
        ...     try:
        ...         yield from range(3)
        ...     finally:
        ...         print("closed")
        >>> batches = map(str, some())
        >>> next(batches)
        '0'
        >>> close_generators(batches)
        closed
    """
    if isinstance(iterator, Generator):
        iterator.close()
    elif isinstance(iterator, LAZY):
        for inner in gc.get_referents(iterator):
            for each in inner if type(inner) is tuple else (inner,):  # a map and a zip keep theirs in a tuple
                if isinstance(each, Iterator):
                    close_generators(each)
