"""`Problem`: an error as a value, for plans, reports and other ranks."""

from collections.abc import Sequence
from typing import final

import attrs

from trainfold.core import errors
from trainfold.core.errors import LISTING, TrainfoldError
from trainfold.core.printable import printable


@final
@attrs.frozen
class Problem:
    """Why something cannot be used: the name of the error and its four fields."""

    error: str
    where: str
    expected: str
    found: str
    fix: str
    exit_code: int = attrs.field(default=1, eq=False)

    def __str__(self) -> str:
        return self._printable(f"{self.difference}; {self.fix}")

    @property
    def is_unreadable(self) -> bool:
        """Whether something could not be read here and now, which proves nothing against it: the store did not give it, or a newer trainfold wrote it."""
        return self.error in (errors.CheckpointUnreadable.__name__, errors.FutureVersion.__name__)

    @property
    def difference(self) -> str:
        """Its text without the fix."""
        return self._printable(f"{self.error}: {self.where}: expected {self.expected}, found {self.found}")

    def _printable(self, text: str) -> str:
        return printable(text, keep="\n" if self.error in LISTING else "")


def problem_of(error: TrainfoldError) -> Problem:
    """The problem described by an error.

    Examples:
        >>> from trainfold.errors import CheckpointTorn
        >>> print(problem_of(CheckpointTorn("step-7", expected="a manifest", found="none", fix="use an older one")))
        CheckpointTorn: step-7: expected a manifest, found none; use an older one
    """
    name = type(error).__name__
    return Problem(name, error.where, str(error.expected), str(error.found), error.fix, type(error).exit_code)


def error_from(problem: Problem) -> TrainfoldError:
    """The error that a problem describes.

    Examples:
        >>> from trainfold.errors import CheckpointTorn
        >>> torn = CheckpointTorn("step-7", expected="a manifest", found="none", fix="use an older one")
        >>> type(error_from(problem_of(torn))).__name__, error_from(problem_of(torn)).exit_code
        ('CheckpointTorn', 13)
    """
    kind = getattr(errors, problem.error, errors.CheckpointError)
    made: TrainfoldError = kind(problem.where, expected=problem.expected, found=problem.found, fix=problem.fix)
    return made


def worst_problem(problems: Sequence[Problem]) -> Problem:
    """What is wrong with something in which several ranks have found problems: what one has proved, before what another could not read now.

    Args:
        problems: at least one.

    Examples:
        >>> denied, torn = (Problem(error, "step-7", "bytes", "none", "wait") for error in ("CheckpointUnreadable", "CheckpointTorn"))
        >>> worst_problem([denied, torn]) is torn, worst_problem([denied]) is denied
        (True, True)
    """
    return min(problems, key=lambda each: each.is_unreadable)
