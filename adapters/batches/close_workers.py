"""`closed_on_error`: ends the workers of an iterator if the block that reads it raises."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def closed_on_error(iterator: Iterator[Any], loader: Any) -> Iterator[None]:
    """Run a block that reads from an iterator; if it raises, the iterator's workers are ended at once.

    Otherwise they live as long as the error: its traceback holds the iterator.

    Args:
        iterator: of a loader, perhaps inside of another one, as ``_made``.
        loader: that made it; it forgets persistent workers.
    """
    try:
        yield
    except BaseException:
        close_workers(iterator)
        if vars(loader).get("_iterator") is not None:
            vars(loader)["_iterator"] = None
        raise


def close_workers(iterator: Iterator[Any]) -> None:
    """End the workers of an iterator, if it has any.

    Examples:
        >>> close_workers(iter([1]))
    """
    end = getattr(getattr(iterator, "_made", iterator), "_shutdown_workers", None)
    if end is not None:
        with suppress(Exception):
            end()
