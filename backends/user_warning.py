"""`warn_user`: a warning at the line of the user's program that led to it, not at a line of trainfold."""

import sys
import warnings
from collections.abc import Callable
from typing import Final

WARNED: Final[list[Callable[[str], object]]] = []  # what else gets each warning, such as the journal of a run
_NOT_THE_USERS: Final = ("trainfold.", "contextlib")


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost call that is not trainfold's own. Python then names the user's file and line, and a filter by module works."""
    level, frame = 1, sys._getframe()  # noqa: SLF001 (the way to the caller's frame)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_NOT_THE_USERS):
        level, frame = level + 1, frame.f_back
    for listener in tuple(WARNED):
        listener(f"{category.__name__}: {text}")
    warnings.warn(text, category, stacklevel=level)
