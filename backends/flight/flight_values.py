"""`FlightValues`: the losses and norms of a flight log that may still grow, each read once."""

from array import array
from collections.abc import Iterator
from functools import partial
from typing import Final, TypeAlias, final

from trainfold.backends.flight.log_parts import PART_BYTES, part_name, part_numbers
from trainfold.backends.side_by_side import side_by_side
from trainfold.backends.stores.protocol import Store
from trainfold.core.flight.damage import Damage
from trainfold.core.flight.line_scanner import LineScanner
from trainfold.core.flight.log_lines import LINE_BYTES, line_numbers

Span: TypeAlias = tuple[str, int, int]
_AT_ONCE: Final = 16  # pieces of `PART_BYTES` that are in memory


@final
class FlightValues:
    """What the steps of a log have recorded, in order.

    A log that a resume has cut is read again from its start, unless its last line is as it was: then the run has done again what it did before.

    Args:
        name: of the log.

    Attributes:
        loss: (steps, values) of the losses.
        norm: the same of the norms.
        first: the first step; None of an empty log.
        last: the last one.
        damage: what could not be read.
        written_at: when the log was written, in seconds since 1970; None if that is not known.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._forget()

    def _forget(self) -> None:
        self._lines = LineScanner(line_numbers)
        self.damage = Damage()
        self.loss = array("Q"), array("d")
        self.norm = array("Q"), array("d")
        self.first: int | None = None
        self.last: int | None = None
        self.written_at: float | None = None

    def read(self, store: Store) -> bool:
        """Read what is new, up to a torn end; whether there was anything.

        Args:
            store: the run, as it is now.

        Raises:
            CheckpointError: the matching subclass, if the log is there and cannot be read.
        """
        names = [part_name(self._name, number) for number in part_numbers(self._name, store.list())]
        if not names:
            had_some = self._lines.offset > 0
            self._forget()
            return had_some
        sizes = [(name, store.size(name) or 0) for name in names]
        if self._was_cut(store, sizes):
            self._forget()
        began = self._lines.offset
        self.written_at = store.committed_at(names[-1])
        self._lines.go_on()
        spans = [piece for span in _spans(sizes, began) for piece in _pieces(span)]
        for at in range(0, len(spans), _AT_ONCE):
            for data in side_by_side([partial(_read, store, *span) for span in spans[at : at + _AT_ONCE]]):
                self._take(data)
        self.damage = self._lines.damage
        return self._lines.offset > began

    def _was_cut(self, store: Store, sizes: list[tuple[str, int]]) -> bool:
        offset = self._lines.offset
        if not offset:
            return False
        span = next(iter(_spans(sizes, offset - LINE_BYTES)), None)
        return span is None or _read(store, span[0], span[1], span[1] + LINE_BYTES) != self._lines.last

    def _take(self, data: bytes) -> None:
        for is_step, step, loss, norm in self._lines.take(data):
            if is_step:
                self.first = step if self.first is None else self.first
                self.last = step
                if loss is not None:
                    self.loss[0].append(step)
                    self.loss[1].append(loss)
                if norm is not None:
                    self.norm[0].append(step)
                    self.norm[1].append(norm)


def _spans(sizes: list[tuple[str, int]], start: int) -> Iterator[Span]:
    """The bytes from ``start`` on, by the parts in which they are."""
    for name, size in sizes:
        if start < size:
            yield name, max(0, start), size
        start -= size


def _pieces(span: Span) -> Iterator[Span]:
    name, start, stop = span
    for at in range(start, stop, PART_BYTES):
        yield name, at, min(stop, at + PART_BYTES)


def _read(store: Store, name: str, start: int, stop: int) -> bytes:
    return store.read(name, start=start, stop=stop)
