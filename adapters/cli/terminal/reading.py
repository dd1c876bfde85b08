"""`reading`: a bar for bytes that are read, on the standard error."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


class Advance(Protocol):
    """Counts the bytes that were read."""

    def __call__(self, size_bytes: int, /) -> None:
        """Add to the count."""


@contextmanager
def reading(what: str, size_bytes: int) -> Iterator[Advance]:
    """A bar on the standard error; nothing if that is not a terminal.

    Args:
        what: the word before the bar, such as ``verifying``.
        size_bytes: how much will be read.
    """
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=size_bytes)
        yield lambda size_bytes: progress.advance(task, size_bytes)
