"""`Attempts` as the bytes of a run's ``quarantine.json``: strict, versioned, and sealed by a digest at the end."""

from typing import Any, Final

import attrs

from trainfold.core.format.file_names import step_of
from trainfold.core.format.sealed_json import SEAL, SealedJson
from trainfold.core.format.strict_json import (
    Table,
    digest_text,
    hostile,
    items,
    positive_int_of,
    read_fields,
    single_name,
    text_of,
    yes_or_no,
)
from trainfold.core.history.quarantine import MAX_REASONS, MAX_RECORDS, Attempts, Tried
from trainfold.core.json_values import shown

QUARANTINE_FILE: Final = "quarantine.json"
QUARANTINE_FORMAT: Final = "trainfold-quarantine"
QUARANTINE_VERSION: Final = 1
QUARANTINE_LIMIT_BYTES: Final = 2**21  # more than all reasons can have, each character as an escape of six
QUARANTINE_FIX: Final = (
    f"no action is needed, because no checkpoint is passed over for it; remove {QUARANTINE_FILE} when you have seen it"
)
_FILE: Final = SealedJson(QUARANTINE_FORMAT, QUARANTINE_VERSION, QUARANTINE_LIMIT_BYTES, QUARANTINE_FIX)


def quarantine_to_json(attempts: Attempts) -> bytes:
    """The file's bytes.

    Law: ``quarantine_from_json(quarantine_to_json(attempts)) == attempts``; equal values give equal bytes.

    Examples:
        >>> quarantine_from_json(quarantine_to_json(Attempts()))
        Attempts(records=())
    """
    return _FILE.encode({"attempts": [attrs.asdict(record) for record in attempts.records]})


def quarantine_from_json(data: bytes, where: str = QUARANTINE_FILE) -> Attempts:
    """Read a file's bytes.

    Raises:
        CheckpointDamaged: if the digest at the end does not fit the bytes before it.
        CheckpointForeign: if another program wrote it.
        FutureVersion: if a newer trainfold wrote it.
        CheckpointHostile: if the digest fits and the contents are not what trainfold writes.

    Examples:
        >>> quarantine_from_json(b"{}")
        Traceback (most recent call last):
            ...
        trainfold.core.errors.CheckpointDamaged: quarantine.json: expected the digest of its own bytes at its end, found 2 \
bytes that have another digest; no action is needed, because no checkpoint is passed over for it; remove quarantine.json when \
you have seen it
    """
    return _FILE.decode(data, where, lambda document, _: _read(document, where))


def _checkpoint_name(value: Any, where: str) -> str:
    name = single_name(value, where)
    if step_of(name) is None:
        raise hostile(where, "the name of a checkpoint", shown(name))
    return name


def _tried(value: Any, where: str) -> Tried:
    return Tried(**read_fields(value, _TRIED, where))


_TRIED: Final[Table] = {
    "checkpoint": _checkpoint_name,
    "digest": digest_text,
    "attempts": positive_int_of,
    "is_damaged": yes_or_no,
    "reasons": items(text_of, most=MAX_REASONS),
}
_FIELDS: Final[Table] = SEAL | {"attempts": items(_tried, most=MAX_RECORDS)}


def _read(document: dict[str, Any], where: str) -> Attempts:
    records = read_fields(document, _FIELDS, where)["attempts"]
    names = [record.checkpoint for record in records]
    if names != sorted(set(names)):
        raise hostile(where, "each checkpoint once, in order", shown(names))
    return Attempts(records)
