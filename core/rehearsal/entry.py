"""`RecordedLine`: one line in the record of a program that may die at any moment."""

import json
from typing import Any, Literal, TypeAlias, final, get_args

import attrs

EntryKind: TypeAlias = Literal["start", "step", "values", "save", "saved", "done"]
"""``start``: a process started, maybe from a checkpoint. ``step``: an optimizer step is done. ``values``: the program recorded
values. ``save``: a save started. ``saved``: it is durable. ``done``: the run has ended."""


@final
@attrs.frozen
class RecordedLine:
    """One thing that happened in a run.

    Attributes:
        kind: what happened.
        step: optimizer steps done by then; for ``values``, the step that they belong to.
        pid: of the process.
        secs: since the process opened its record.
        data: details, as JSON can hold them.
    """

    kind: EntryKind
    step: int
    pid: int
    secs: float
    data: dict[str, Any] = attrs.field(factory=dict)


def encode_entry(entry: RecordedLine) -> bytes:
    r"""The line of an entry.

    Examples:
        >>> encode_entry(RecordedLine("step", 3, 1, 0.5))
        b'{"kind": "step", "step": 3, "pid": 1, "secs": 0.5, "data": {}}\n'
    """
    return json.dumps(attrs.asdict(entry)).encode() + b"\n"


def decode_entry(line: bytes) -> RecordedLine | None:
    """The entry of a line; None if the line is torn.

    Examples:
        >>> decode_entry(b'{"kind": "step", "step": 3, "pid": 1, "secs": 0.5, "data": {"lo') is None
        True
        >>> decode_entry(b'{"kind": "step", "step": 3, "pid": 1, "secs": 0.5, "data": {}}').step
        3
    """
    try:
        found = json.loads(line)
        entry = RecordedLine(**found)
    except (ValueError, TypeError):
        return None
    return entry if entry.kind in get_args(EntryKind) else None
