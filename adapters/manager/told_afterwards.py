"""`told_afterwards`: failures of what was begun before are raised when what is due now is done, and none is lost (D05)."""

from collections.abc import Iterator
from contextlib import contextmanager

from trainfold.core.errors import error_text


@contextmanager
def told_afterwards() -> Iterator[list[Exception]]:
    """Raise what was added to the list at the end; what fails in between is raised first, with a note about each of them.

    Examples:
        >>> with told_afterwards() as failures:
        ...     failures.append(ValueError("the save before"))
        ...     print("the next one is begun")
        Traceback (most recent call last):
            ...
        ValueError: the save before
    """
    failures: list[Exception] = []
    try:
        yield failures
    except BaseException as error:
        _note(error, failures)
        raise
    if failures:
        _note(failures[0], failures[1:])
        raise failures[0]


def _note(error: BaseException, others: list[Exception]) -> None:
    for other in others:
        error.add_note(f"and besides: {error_text(other)}")
