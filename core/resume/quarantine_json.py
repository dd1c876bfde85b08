"""`Attempts` as the bytes of a run's ``quarantine.json``: strict, versioned, and ended by the digest of what is before it."""

from typing import Any, Final

import attrs

from trainfold.core.format.file_names import step_of
from trainfold.core.format.sealed_json import SealedJson
from trainfold.core.format.strict_json import (
    count,
    digest_text,
    fields,
    hostile,
    list_of,
    mapping_of,
    single_name,
    text_of,
)
from trainfold.core.resume.quarantine import MAX_REASONS, MAX_RECORDS, Attempts, Tried
from trainfold.core.scalars import shown

QUARANTINE_FILE: Final = "quarantine.json"
QUARANTINE_FORMAT: Final = "trainfold-quarantine"
QUARANTINE_VERSION: Final = 1
QUARANTINE_LIMIT_BYTES: Final = 2**18
QUARANTINE_FIX: Final = (
    f"nothing has to be done: no checkpoint is passed over for it; remove {QUARANTINE_FILE} when you have seen it"
)
_FIELDS = {"format", "version", "attempts", "digest"}
_RECORD_FIELDS = {"checkpoint", "digest", "attempts", "is_damaged", "reasons"}
_FILE: Final = SealedJson(QUARANTINE_FORMAT, QUARANTINE_VERSION, QUARANTINE_LIMIT_BYTES, QUARANTINE_FIX)


def quarantine_to_json(attempts: Attempts) -> bytes:
    """The file's bytes.

    Law: ``quarantine_from_json(quarantine_to_json(attempts)) == attempts``; equal values give equal bytes.

    Examples:
        >>> quarantine_from_json(quarantine_to_json(Attempts()))
        Attempts(records=())
    """
    records = [attrs.asdict(record) for record in attempts.records]
    return _FILE.encode({"attempts": records})


def quarantine_from_json(data: bytes, where: str = QUARANTINE_FILE) -> Attempts:
    """What a file's bytes say.

    Raises:
        CheckpointDamaged: if the digest at the end does not fit the bytes before it.
        CheckpointForeign: if another program wrote it.
        FutureVersion: if a newer trainfold wrote it.
        CheckpointHostile: if the digest fits and the contents cannot be all the same.

    Examples:
        >>> quarantine_from_json(b"{}")
        Traceback (most recent call last):
            ...
        trainfold.core.errors.CheckpointDamaged: quarantine.json: expected the digest of its own bytes at its end, found 2 \
bytes that have another digest; nothing has to be done: no checkpoint is passed over for it; remove quarantine.json when you \
have seen it
    """
    return _FILE.decode(data, where, lambda document, _: _read(document, where))


def _read(document: dict[str, Any], where: str) -> Attempts:
    fields(document, _FIELDS, where, exact=True)
    records = tuple(
        _record(each, f"{where}: attempts[{i}]")
        for i, each in enumerate(_list(document["attempts"], MAX_RECORDS, where))
    )
    names = [record.checkpoint for record in records]
    if names != sorted(set(names)):
        raise hostile(where, "each checkpoint once, in order", shown(names))
    return Attempts(records)


def _record(document: Any, where: str) -> Tried:
    fields(mapping_of(document, where), _RECORD_FIELDS, where, exact=True)
    name = single_name(document["checkpoint"], where)
    if step_of(name) is None:
        raise hostile(where, "the name of a checkpoint", shown(name))
    if type(document["is_damaged"]) is not bool:
        raise hostile(where, "true or false", shown(document["is_damaged"]))
    return Tried(
        name,
        digest_text(document["digest"], where),
        count(document["attempts"], where, least=1),
        document["is_damaged"],
        tuple(text_of(reason, where) for reason in _list(document["reasons"], MAX_REASONS, where)),
    )


def _list(value: Any, most: int, where: str) -> list[Any]:
    found = list_of(value, where)
    if len(found) > most:
        raise hostile(where, f"at most {most}", f"{len(found)} items")
    return found
