"""Reads JSON that may be hostile: one object, no duplicate keys, and checked fields."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from trainfold.core.digest import DIGEST_PREFIX
from trainfold.core.errors import CheckpointHostile
from trainfold.core.json_values import Json, shown
from trainfold.core.printable import printable

_NAME = re.compile("[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_DIGEST = re.compile(f"{DIGEST_PREFIX}[0-9a-f]{{32}}")
_DIGESTS = re.compile(f"(?:{_DIGEST.pattern})*+")
_DIGEST_LENGTH = len(DIGEST_PREFIX) + 32
_MAX_COUNT = 2**62

Read: TypeAlias = Callable[[Any, str], Any]
"""Checks one JSON value and returns what it stands for; the text says where the value is, for messages."""
Table: TypeAlias = Mapping[str, Read]
"""Field name -> how to read it: the whole schema of an object."""


def strict_json(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object; duplicate keys, NaN, other encodings than ASCII and absurd depths are refused.

    Raises:
        CheckpointHostile: for anything but one plain object.

    Examples:
        >>> strict_json(b'{"a": 1, "a": 2}', "manifest.json")
        Traceback (most recent call last):
            ...
        trainfold.core.errors.CheckpointHostile: manifest.json: expected one JSON object, found the key 'a' twice; do not \
use this checkpoint; fall back to an older one
    """
    try:
        found = json.loads(text.decode("ascii"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise hostile(where, "one JSON object", str(error)[:120]) from None
    if not isinstance(found, dict):
        raise hostile(where, "one JSON object", type(found).__name__)
    return found


def hostile(where: str, expected: object, found: object) -> CheckpointHostile:
    """The error for contents that no version of trainfold writes. Text from the file cannot add lines to it."""
    shown_where, shown_found = printable(where), printable(found) if isinstance(found, str) else found
    return CheckpointHostile(
        shown_where, expected=expected, found=shown_found, fix="do not use this checkpoint; fall back to an older one"
    )


def single_name(value: object, where: str) -> str:
    """A checked single path component: no separator, no leading dot, plain ASCII.

    Examples:
        >>> single_name("model-00000-of-00001.safetensors", "manifest.json")
        'model-00000-of-00001.safetensors'
    """
    if not isinstance(value, str) or _NAME.fullmatch(value) is None:
        raise hostile(where, "a plain name in one directory", shown(value))
    return value


def fields(document: Json, names: set[str], where: str, *, exact: bool) -> None:
    """Check that an object has these fields (and, if exact, no others)."""
    if isinstance(document, dict) and document.keys() == names:
        return
    if not isinstance(document, Mapping):
        raise hostile(where, "an object", type(document).__name__)
    missing, unknown = sorted(names - set(document)), sorted(set(document) - names)
    if missing or (exact and unknown):
        raise hostile(
            where, f"the fields {sorted(names)}", f"missing {missing}, unknown {[u[:40] for u in unknown[:8]]}"
        )


def read_fields(document: Json, table: Table, where: str) -> dict[str, Any]:
    """Read an object that has exactly the fields of a table.

    Examples:
        >>> read_fields({"step": 7, "scores": [0.5]}, {"step": int_of, "scores": items(finite, most=3)}, "best.json")
        {'step': 7, 'scores': (0.5,)}
        >>> read_fields({"step": -1}, {"step": int_of}, "best.json")
        Traceback (most recent call last):
            ...
        trainfold.core.errors.CheckpointHostile: best.json: step: expected an int in 0..2**62, found -1; do not use this \
checkpoint; fall back to an older one
    """
    values = object_of(document, where)
    fields(values, set(table), where, exact=True)
    return {name: read(values[name], f"{where}: {name}") for name, read in table.items()}


def items(read: Read, *, most: int, least: int = 0) -> Read:
    """How to read a list of ``least`` to ``most`` values of one kind; it becomes a tuple.

    Examples:
        >>> items(int_of, most=2)([1, 2, 3], "best.json: kept")
        Traceback (most recent call last):
            ...
        trainfold.core.errors.CheckpointHostile: best.json: kept: expected 0 to 2 items, found 3; do not use this \
checkpoint; fall back to an older one
    """

    def read_items(value: Any, where: str) -> tuple[Any, ...]:
        found = list_of(value, where)
        if not least <= len(found) <= most:
            raise hostile(where, f"{least} to {most} items", len(found))
        return tuple(read(each, f"{where}[{index}]") for index, each in enumerate(found))

    return read_items


def row(*reads: Read) -> Read:
    """How to read a list of fixed length, each place in its own way; it becomes a tuple.

    Examples:
        >>> row(finite, int_of)([0.5, 7], "best.json: kept[0]")
        (0.5, 7)
    """

    def read_row(value: Any, where: str) -> tuple[Any, ...]:
        found = sized(value, len(reads), where)
        return tuple(read(each, where) for read, each in zip(reads, found, strict=True))

    return read_row


def int_of(value: object, where: str, *, least: int = 0) -> int:
    """A checked int in ``least..2**62``."""
    if type(value) is not int or not least <= value <= _MAX_COUNT:
        raise hostile(where, f"an int in {least}..2**62", shown(value))
    return value


def positive_int_of(value: object, where: str) -> int:
    """A checked int in ``1..2**62``."""
    return int_of(value, where, least=1)


def finite(value: object, where: str) -> float:
    """A checked finite float; an int is not one."""
    if type(value) is not float or not math.isfinite(value):
        raise hostile(where, "a finite float", shown(value))
    return value


def yes_or_no(value: object, where: str) -> bool:
    """A checked bool; 0 and 1 are not bools."""
    if not isinstance(value, bool):
        raise hostile(where, "true or false", shown(value))
    return value


def text_of(value: object, where: str) -> str:
    """A checked string."""
    if not isinstance(value, str):
        raise hostile(where, "text", type(value).__name__)
    return value


def list_of(value: object, where: str) -> list[Any]:
    """A checked list."""
    if not isinstance(value, list):
        raise hostile(where, "a list", type(value).__name__)
    return value


def sized(value: object, length: int, where: str, *, more: int = 0) -> list[Any]:
    """A checked list of one length, or of up to ``more`` items more."""
    found = list_of(value, where)
    if not length <= len(found) <= length + more:
        raise hostile(where, f"a list of {length}", f"{len(found)} items")
    return found


def object_of(value: object, where: str) -> dict[str, Any]:
    """A checked object."""
    if not isinstance(value, dict):
        raise hostile(where, "an object", type(value).__name__)
    return value


def digest_text(value: object, where: str) -> str:
    """A checked digest in text form."""
    if not isinstance(value, str) or _DIGEST.fullmatch(value) is None:
        raise hostile(where, "a digest xxh3:<32 hex digits>", shown(value))
    return value


def are_digests(values: Sequence[object]) -> bool:
    """Whether each is a digest in text form: one look at all of them.

    Examples:
        >>> one = "xxh3:" + "0a" * 16
        >>> are_digests([one, one]), are_digests([one + "0", one[:-1]]), are_digests([one, None])
        (True, False, False)
    """
    if {*map(type, values)} != {str} or {*map(len, values)} != {_DIGEST_LENGTH}:  # type: ignore[arg-type] # all are texts
        return False
    return _DIGESTS.fullmatch("".join(values)) is not None  # type: ignore[arg-type]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:40]!r} twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"the constant {name}")
