"""Shows the progress of runs in other processes: bars in a terminal, a few plain lines in a pipe."""

import contextlib
from collections.abc import Iterator
from typing import Protocol, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trainfold.core.rehearsal.entry import RecordedLine

_PLAIN_LINES = 4  # for each run


class Display(Protocol):
    """Shows the progress of runs."""

    def watch(self, run: str, event: RecordedLine) -> None:
        """Show an event of a run."""

    def say(self, text: str) -> None:
        """Show a line that stays."""


@contextlib.contextmanager
def display(console: Console, *, steps: int) -> Iterator[Display]:
    """The display that suits the console.

    Args:
        console: of rich; bars if it is a terminal.
        steps: of each run.

    Yields:
        A display.
    """
    if not console.is_terminal:
        yield _Lines(console, steps)
        return
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        yield _Bars(progress, steps)


@final
class _Bars:
    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress = progress
        self._steps = steps
        self._tasks: dict[str, object] = {}

    def watch(self, run: str, event: RecordedLine) -> None:
        if run not in self._tasks:
            self._tasks[run] = self._progress.add_task(run, total=self._steps, loss="     ")
        task = self._tasks[run]
        loss = f"{event.data['loss']:.3f}" if event.kind == "step" and "loss" in event.data else None
        fields = {"loss": loss} if loss else {}
        self._progress.update(task, completed=event.step, **fields)  # type: ignore[arg-type]
        if event.kind == "done":
            self._progress.stop_task(task)  # type: ignore[arg-type]

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)


@final
class _Lines:
    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._every = max(1, steps // _PLAIN_LINES)
        self._steps = steps
        self._shown: set[tuple[str, int]] = set()

    def watch(self, run: str, event: RecordedLine) -> None:
        if event.kind == "step" and event.step % self._every == 0 and (run, event.step) not in self._shown:
            self._shown.add((run, event.step))
            loss = f", loss {event.data['loss']:.3f}" if "loss" in event.data else ""
            self.say(f"{run}: step {event.step} of {self._steps}{loss}")

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
