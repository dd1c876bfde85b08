"""`Answer`: the result of a command, shown as tables in a terminal, as aligned text in a pipe, or as JSON."""

import errno
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TextIO, final

import attrs
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from trainfold.core.errors import InvalidArgument, TrainfoldError
from trainfold.core.printable import printable

INTERRUPTED = 130
_UNBOUNDED = 10_000  # columns: wider than any row


class UsageError(TrainfoldError):
    """A command line that cannot be parsed: an unknown command or option, or a value that is missing, superfluous or of a wrong kind."""

    exit_code = 2


class OutputFailed(TrainfoldError):
    """The output could not be written, as with a file on a full disk."""

    exit_code = 4


class Different(TrainfoldError):
    """Two checkpoints do not hold the same state of the same run."""

    exit_code = 3


class PackageMissing(TrainfoldError):
    """A command needs a package that is not installed, such as torch."""

    exit_code = 5


@final
@attrs.frozen
class Table:
    """Rows of text under a heading.

    Attributes:
        title: the heading.
        columns: their names; all empty for a list of names and values.
        rows: as many cells each as there are columns.
        spare: columns that a narrow terminal leaves out, the first one first. In a terminal, a table with spare columns has one
            line for each row, and cuts its last column short.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    spare: tuple[str, ...] = ()


@final
@attrs.frozen
class Answer:
    """The result of a command.

    Attributes:
        data: the whole result, as JSON can hold it.
        tables: the same for people.
        error: why the exit code is not 0, although there is a result to show.
    """

    data: Mapping[str, Any]
    tables: tuple[Table, ...] = ()
    error: TrainfoldError | None = None


@final
class Screen(Console):
    """A console that raises `OutputFailed`, where rich would end the program if a pipe is closed."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; see `rich.console.Console.print`."""
        try:
            super().print(*objects, **options)
        except OSError as error:
            raise _output_failed(error) from error

    def on_broken_pipe(self) -> None:
        """Raise the error again."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def deliver(make: Callable[[], Answer], *, as_json: bool) -> int:
    """Run a command and show its result, or why it failed.

    Args:
        make: the command.
        as_json: print one JSON object on the standard output in every case; an error is its field ``error``.

    Returns:
        The exit code: 0, or that of the error, which is also printed on the standard error.
    """
    try:
        answer = make()
    except TrainfoldError as error:
        answer = Answer({}, error=error)
    code = 0 if answer.error is None else exit_code(type(answer.error))
    failed_code = written(lambda: _show(answer, as_json=as_json))
    if answer.error is not None and failed_code is None:  # after the flush: the error is last if both go to one place
        with suppress(OSError):
            show_error(answer.error)
    return code if failed_code is None else failed_code


def written(show: Callable[[], None]) -> int | None:
    """Write to the standard output, to the end.

    It is not a failure if the reader closes the pipe early (``| head -1``): the rest is dropped without a message.

    Args:
        show: writes the output.

    Returns:
        None; or, if it could not be written, the exit code for that, after a line on the standard error.
    """
    if sys.stdout is None:
        return give_up(_output_failed(OSError(errno.EBADF, "it is closed")))
    try:
        show()
        sys.stdout.flush()
    except OutputFailed as failed:
        return give_up(failed)
    except OSError as error:
        return give_up(_output_failed(error))
    return None


def give_up(failed: OutputFailed) -> int | None:
    """Print on the standard error why the output stops, unless its reader has closed the pipe.

    Returns:
        The exit code; None if the reader has closed the pipe.
    """
    _send_nowhere(sys.stdout)
    if isinstance(failed.found, BrokenPipeError):
        return None
    try:
        print(f"{type(failed).__name__}: {failed}", file=sys.stderr, flush=True)
    except OSError:
        _send_nowhere(sys.stderr)
    return failed.exit_code


def _output_failed(error: OSError) -> OutputFailed:
    fix = "write it elsewhere, or free some space"
    return OutputFailed("standard output", expected="room for the answer", found=error, fix=fix)


def _send_nowhere(stream: TextIO | None) -> None:
    """Drop what is left in a stream: Python would try to write it again at exit, and raise again."""
    with suppress(OSError, ValueError):  # it is closed, or not a file
        if stream is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _show(answer: Answer, *, as_json: bool) -> None:
    if as_json:
        failed = {} if answer.error is None else {"error": error_fields(answer.error)}
        sys.stdout.write(json.dumps({**answer.data, **failed}, indent=2, allow_nan=True) + "\n")
    else:
        show_tables(answer.tables, sys.stdout)


def exit_code(kind: type[TrainfoldError]) -> int:
    """The exit code of a class of errors; that of a usage error for arguments that can never work.

    Examples:
        >>> exit_code(InvalidArgument), exit_code(UsageError)
        (2, 2)
    """
    return UsageError.exit_code if issubclass(kind, InvalidArgument) else kind.exit_code


def show_tables(tables: tuple[Table, ...], stream: TextIO) -> None:
    """Write tables: with lines in a terminal; elsewhere as columns separated by two or more spaces, never truncated."""
    console = Screen(file=stream)
    for number, table in enumerate(map(_printable, tables)):
        if number:
            stream.write("\n")
        if console.is_terminal:
            console.print(
                _drawn(table, console) if any(table.columns) else "\n".join(aligned(table)),
                markup=False,
                highlight=False,
            )
        else:
            stream.write("\n".join(aligned(table)) + "\n")


def _printable(table: Table) -> Table:
    """The table without characters that a terminal would act on, which files may contain."""
    rows = tuple(tuple(map(printable, row)) for row in table.rows)
    return attrs.evolve(table, title=printable(table.title), columns=tuple(map(printable, table.columns)), rows=rows)


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
    """Write an error to the standard error: what it concerns, what was expected and found, and the fix."""
    console = Console(stderr=True)
    console.print(Text(f"{type(error).__name__}: {printable(error.where)}", style="bold red"), soft_wrap=True)
    for name, value in (("expected", error.expected), ("found", error.found), ("fix", error.fix)):
        # a refusal lists its reasons
        text = printable(str(value).strip("\n"), keep="\n") if error.has_lines else printable(str(value))
        console.print(Text(f"  {name:<9} {text}"), soft_wrap=True)


def error_fields(error: TrainfoldError) -> dict[str, Any]:
    """An error as JSON can hold it."""
    return {
        "kind": type(error).__name__,
        "exit_code": exit_code(type(error)),
        "where": error.where,
        "expected": str(error.expected),
        "found": str(error.found),
        "fix": error.fix,
    }


def _drawn(table: Table, console: Console) -> RichTable:
    if table.spare:
        return _fitted(table, console)
    drawn = RichTable(title=table.title or None, title_justify="left", show_header=any(table.columns))
    for column in table.columns:
        drawn.add_column(column, overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    return drawn


def _fitted(table: Table, console: Console) -> RichTable:
    """A table with one line for each row, without the spare columns that do not fit."""
    for count in range(len(table.spare) + 1):
        hidden = table.spare[:count]
        caption = f"in a wider terminal, or with --json: {', '.join(hidden)}" if hidden else None
        drawn = RichTable(title=table.title or None, title_justify="left", caption=caption, caption_justify="left")
        kept = [index for index, name in enumerate(table.columns) if name not in hidden]
        for index in kept:
            is_last = index == kept[-1]
            drawn.add_column(table.columns[index], no_wrap=not is_last, overflow="fold")
        for row in table.rows:
            *cells, last = (row[index] for index in kept)
            drawn.add_row(*map(Text, cells), Text(last, no_wrap=True, overflow="ellipsis"))
        if drawn.__rich_measure__(console, console.options.update(max_width=_UNBOUNDED)).maximum <= console.width:
            break
    return drawn
