"""`FlightValues`: the losses and norms of a flight log that may still grow, each read once."""

from array import array
from typing import TypeAlias, final

from trainfold.backends.flight.log_pieces import Sizes, read_pieces, sizes_of
from trainfold.backends.stores.protocol import Store
from trainfold.core.flight.damage import Damage
from trainfold.core.flight.line_scanner import LineScanner
from trainfold.core.flight.log_lines import LINE_BYTES, line_numbers

Values: TypeAlias = "tuple[array[int], array[float]]"
"""Steps, and the value of each."""


@final
class FlightValues:
    """What the steps of a log have recorded, in order.

    A log that a resume has cut is read again from its start, unless its last line is as it was: then the run has done again what it did before.

    Args:
        name: of the log.

    Attributes:
        steps: those of which it has a record.
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
        self.steps = array("Q")
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
        sizes = sizes_of(store, self._name, store.list())
        if not sizes:
            had_some = self._lines.offset > 0
            self._forget()
            return had_some
        if self._was_cut(store, sizes):
            self._forget()
        began = self._lines.offset
        self.written_at = store.committed_at(sizes[-1][0])
        self._lines.go_on()
        for data in read_pieces(store, sizes, start=began):
            self._take(data)
        self.damage = self._lines.damage
        return self._lines.offset > began

    def _was_cut(self, store: Store, sizes: Sizes) -> bool:
        offset = self._lines.offset
        if not offset:
            return False
        for name, size in sizes:
            if offset <= size:
                return store.read(name, start=offset - LINE_BYTES, stop=offset) != self._lines.last
            offset -= size
        return True

    def _take(self, data: bytes) -> None:
        for is_step, step, loss, norm in self._lines.take(data):
            if is_step:
                self.first = step if self.first is None else self.first
                self.last = step
                self.steps.append(step)
                if loss is not None:
                    self.loss[0].append(step)
                    self.loss[1].append(loss)
                if norm is not None:
                    self.norm[0].append(step)
                    self.norm[1].append(norm)
