"""`JournalLine`: something that happened to a run at a moment, as a value and as a line of its journal."""

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, final

import attrs

LONGEST_LINE: Final = 2**16  # bytes; a longer one is not of this program
_MOST_TEXT: Final = 4000  # characters of a detail
MOST_LINES: Final = 200_000  # of a journal, that are kept; each takes some 300 bytes of memory
_START: Final = b'"kind":"started"'  # as it is written; in a text, quotes are escaped
ALWAYS_KEPT: Final = ("started", "closed", "reopened", "restored")
"""Kinds of lines that are read of a long journal, however old they are."""
UNSTARTED: Final[Mapping[str, Any]] = {"started": False}
"""The ``data`` of a line of a process that has not started, as its resume was refused: it is not a sign of the one whose lines are before it."""
_KEPT: Final = tuple(f'"kind":"{kind}"'.encode() for kind in ALWAYS_KEPT)
_MOST_DRIFTS: Final = 40
_DRIFT_TEXT: Final = 120  # ASCII characters, so that 40 of five texts fit a line


@final
@attrs.frozen
class JournalLine:
    """Something that happened to a run.

    Attributes:
        at: when, in seconds since 1970 by the clock of the machine.
        kind: ``started``, ``called``, ``written``, ``evaluated``, ``warned``, ``met``, ``closed``, ``reopened``, or the kind of an `Event`.
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


def drift_data(drifts: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The ``data`` of a line of kind ``met``: what differed at a resume, as (verdict, kind, where, saved, now); a line has at most 40, shortened.

    Examples:
        >>> drift_data([("adapt", "world", "ranks", "4", "2")])
        {'drifts': [['adapt', 'world', 'ranks', '4', '2']], 'count': 1}
    """
    shown = [[text.encode("ascii", "backslashreplace").decode()[:_DRIFT_TEXT] for text in each] for each in drifts]
    return {"drifts": shown[:_MOST_DRIFTS], "count": len(drifts)}


def drifts_of(line: JournalLine) -> tuple[tuple[str, ...], ...]:
    """What differed at a resume, of a line of kind ``met``; anything else is left out.

    Law: ``drifts_of(JournalLine(0.0, "met", data=drift_data(drifts))) == tuple(drifts)`` for at most 40 short ones.
    """
    found = line.data.get("drifts")
    if line.kind != "met" or not isinstance(found, list):
        return ()
    return tuple(
        tuple(each)
        for each in found
        if isinstance(each, list) and len(each) == 5 and all(isinstance(text, str) for text in each)
    )


@final
@attrs.frozen
class JournalLines:
    """What is read of a journal.

    Attributes:
        lines: in their order. Of a long journal, the newest, and of those before them the starts and the ends of processes, and where they went back, alone.
        left_out: how many lines before the newest ones are not here.
        unreadable: how many lines cannot be read: a kill may tear one, and damage others.
    """

    lines: tuple[JournalLine, ...] = ()
    left_out: int = 0
    unreadable: int = 0


def decode_journal(pieces: Iterable[bytes], *, most: int | None = None) -> JournalLines:
    """A journal from its bytes.

    Law: of a journal that was cut anywhere all whole lines are there.

    Args:
        pieces: its bytes, in order.
        most: lines that are kept, the newest; None for 200,000. Of those before them, the starts and ends of processes, where they went back, and the last line before each start are kept too.

    Examples:
        >>> lines = [encode_journal_line(JournalLine(1.0, kind, 3)) for kind in ("started", "called", "called", "written", "closed")]
        >>> found = decode_journal(lines, most=2)
        >>> [line.kind for line in found.lines], found.left_out
        (['started', 'written', 'closed'], 2)
    """
    newest, kept, rest, passed, left_out = deque[bytes](), list[bytes](), b"", b"", 0
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        rest = rest[
            : LONGEST_LINE + 1
        ]  # what is longer cannot be read, and joining it with each piece would take its square
        newest.extend(filter(None, whole))
        while len(newest) > (MOST_LINES if most is None else most):
            line = newest.popleft()
            if _START in line and passed:
                kept.append(passed)
                left_out -= 1
            is_kept = any(kind in line for kind in _KEPT)
            passed = b"" if is_kept else line
            left_out += not is_kept
            kept += [line] * is_kept
    texts = [*kept, *newest, *filter(None, [rest])]
    lines = tuple(found for each in texts if (found := decode_journal_line(each)) is not None)
    return JournalLines(lines, left_out, len(texts) - len(lines))


def _number(value: object) -> float | None:
    """A finite number, as a float."""
    if type(value) is int and abs(value) < 2**63:
        return float(value)
    return value if type(value) is float and math.isfinite(value) else None
