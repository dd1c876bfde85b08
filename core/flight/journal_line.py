"""`JournalLine`: something that happened to a run at a moment, as a value and as a line of its journal."""

import json
import math
from collections.abc import Mapping
from typing import Any, Final, final

import attrs

LONGEST_LINE: Final = 2**16  # bytes; a longer one is not of this program
_MOST_TEXT: Final = 4000  # characters of a detail


@final
@attrs.frozen
class JournalLine:
    """Something that happened to a run.

    Attributes:
        at: when, in seconds since 1970 by the clock of the machine.
        kind: ``started``, ``called``, ``written``, ``evaluated``, ``warned``, ``closed``, or the kind of an `Event`.
        step: optimizer steps done; None if that has no meaning here.
        checkpoint: the directory of a checkpoint, or None.
        detail: more, in words.
        data: numbers and lists that the kind has.
    """

    at: float
    kind: str
    step: int | None = None
    checkpoint: str | None = None
    detail: str = ""
    data: Mapping[str, Any] = attrs.field(factory=dict)

    def moment(self, name: str) -> float | None:
        """A number of ``data`` that is finite; None if it has none of that name.

        Examples:
            >>> JournalLine(0.0, "called", data={"returned": 2.5}).moment("returned")
            2.5
        """
        return _number(self.data.get(name))


def encode_journal_line(line: JournalLine) -> bytes:
    r"""The bytes of a line, with its end.

    Law: ``decode_journal_line(encode_journal_line(line)) == line`` for data that JSON can hold, and texts of at most 4,000 characters.

    Examples:
        >>> encode_journal_line(JournalLine(1.5, "closed", 7))
        b'{"at":1.5,"kind":"closed","step":7}\n'
    """
    given: dict[str, Any] = {"at": line.at, "kind": line.kind}
    given |= {"step": line.step} if line.step is not None else {}
    given |= {"checkpoint": line.checkpoint} if line.checkpoint is not None else {}
    given |= {"detail": line.detail[:_MOST_TEXT]} if line.detail else {}
    given |= {"data": dict(line.data)} if line.data else {}
    return json.dumps(given, separators=(",", ":")).encode("ascii") + b"\n"


def decode_journal_line(data: bytes) -> JournalLine | None:
    """The line of these bytes; None if they are torn, damaged, or something else."""
    if len(data) > LONGEST_LINE:
        return None
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    at, kind, step = _number(found.get("at")), found.get("kind"), found.get("step")
    checkpoint, detail, more = found.get("checkpoint"), found.get("detail", ""), found.get("data", {})
    is_step = step is None or (type(step) is int and 0 <= step < 2**63)
    is_text = isinstance(kind, str) and isinstance(checkpoint, str | None) and isinstance(detail, str)
    if at is None or not 0 <= at < 1e11 or not is_step or not is_text or not isinstance(more, dict):
        return None
    assert isinstance(kind, str)
    return JournalLine(at, kind, step, checkpoint, detail, more)


def decode_journal(data: bytes) -> tuple[JournalLine, ...]:
    """The lines of a journal; what is not one is left out.

    Law: of a journal that was cut anywhere all whole lines are there.
    """
    return tuple(line for each in data.split(b"\n") if each and (line := decode_journal_line(each)) is not None)


def _number(value: object) -> float | None:
    """A finite number, as a float."""
    if type(value) is int and abs(value) < 2**63:
        return float(value)
    return value if type(value) is float and math.isfinite(value) else None
