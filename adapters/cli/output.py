"""`Answer`: what a command found, and how it is shown: tables in a terminal, aligned text in a pipe, or JSON."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO, final

import attrs
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from trainfold.core.errors import InvalidArgument, TrainfoldError

INTERRUPTED = 130


class UsageError(TrainfoldError):
    """A command line that cannot be read: an unknown command or option, a value missing, too many, or of a wrong kind."""

    exit_code = 2


@final
@attrs.frozen
class Table:
    """Rows of text under a heading.

    Attributes:
        title: the heading.
        columns: their names; all empty for a list of names and values.
        rows: as many cells each as there are columns.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@final
@attrs.frozen
class Answer:
    """What a command found.

    Attributes:
        data: all of it, as JSON can hold it.
        tables: the same for people.
        error: why the exit code is not 0, although there is something to show.
    """

    data: Mapping[str, Any]
    tables: tuple[Table, ...] = ()
    error: TrainfoldError | None = None


def deliver(make: Callable[[], Answer], *, as_json: bool) -> int:
    """Run a command and show what it found, or why it could not.

    Args:
        make: the command.
        as_json: one JSON object on the standard output, whatever happens; an error is its field ``error``.

    Returns:
        The exit code: 0, or that of the error, which people read on the standard error.
    """
    try:
        answer = make()
    except TrainfoldError as error:
        answer = Answer({}, error=error)
    if as_json:
        failed = {} if answer.error is None else {"error": error_fields(answer.error)}
        sys.stdout.write(json.dumps({**answer.data, **failed}, indent=2, allow_nan=True) + "\n")
    else:
        show_tables(answer.tables, sys.stdout)
    if answer.error is None:
        return 0
    sys.stdout.flush()  # so that the error comes last where both go to one place
    show_error(answer.error)
    return exit_code(type(answer.error))


def exit_code(kind: type[TrainfoldError]) -> int:
    """The exit code of a kind of error: its own; that of a usage error for arguments that can never work.

    Examples:
        >>> exit_code(InvalidArgument), exit_code(UsageError)
        (2, 2)
    """
    return UsageError.exit_code if issubclass(kind, InvalidArgument) else kind.exit_code


def show_tables(tables: tuple[Table, ...], stream: TextIO) -> None:
    """Write tables: drawn in a terminal, else columns that two or more spaces keep apart and nothing truncates."""
    console = Console(file=stream)
    for number, table in enumerate(tables):
        if number:
            stream.write("\n")
        if console.is_terminal:
            console.print(
                _drawn(table) if any(table.columns) else "\n".join(aligned(table)), markup=False, highlight=False
            )
        else:
            stream.write("\n".join(aligned(table)) + "\n")


def aligned(table: Table) -> list[str]:
    """The lines of a table as plain text.

    Examples:
        >>> aligned(Table("A run", ("step", "size"), (("8", "1 kB"), ("120", "1 MB"))))
        ['A run', 'step  size', '8     1 kB', '120   1 MB']
    """
    rows = [row for row in (table.columns, *table.rows) if any(row)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [table.title, *lines] if table.title else lines


def show_error(error: TrainfoldError) -> None:
    """Write an error to the standard error: what it concerns, what was expected and found, and the next move."""
    console = Console(stderr=True)
    console.print(Text(f"{type(error).__name__}: {error.where}", style="bold red"), soft_wrap=True)
    for name, value in (("expected", error.expected), ("found", error.found), ("mend", error.mend)):
        console.print(Text(f"  {name:<9} {value}"), soft_wrap=True)


def error_fields(error: TrainfoldError) -> dict[str, Any]:
    """An error as JSON can hold it."""
    return {
        "kind": type(error).__name__,
        "exit_code": exit_code(type(error)),
        "where": error.where,
        "expected": str(error.expected),
        "found": str(error.found),
        "mend": error.mend,
    }


def size_text(size_bytes: int) -> str:
    """A size for people.

    Examples:
        >>> size_text(999), size_text(61_234_567)
        ('999 B', '61.2 MB')
    """
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _drawn(table: Table) -> RichTable:
    drawn = RichTable(title=table.title or None, title_justify="left", show_header=any(table.columns))
    for column in table.columns:
        drawn.add_column(column, overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    return drawn
