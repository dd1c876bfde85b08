"""`told_afterwards`: failures of what was begun before are raised when what is due now is done, and none is lost (D05)."""

from types import TracebackType
from typing import final

from trainfold.core.errors import error_text


@final
class told_afterwards:  # noqa: N801 (used as a function; a generator would cost each boundary ten times as much)
    """Raise what was added to the list at the end; what fails in between is raised first, with a note about each of them.

    Examples:
        >>> with told_afterwards() as failures:
        ...     failures.append(ValueError("the save before"))
        ...     print("the next one is begun")
        Traceback (most recent call last):
            ...
        ValueError: the save before
    """

    def __init__(self) -> None:
        self._failures: list[Exception] = []

    def __enter__(self) -> list[Exception]:
        return self._failures

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            _note(error, self._failures)
        elif self._failures:
            _note(self._failures[0], self._failures[1:])
            raise self._failures[0]


def _note(error: BaseException, others: list[Exception]) -> None:
    for other in others:
        error.add_note(f"and besides: {error_text(other)}")
