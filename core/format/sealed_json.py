"""Sealed JSON: a small file of a run: one object with its format and version, and then the digest of all preceding bytes."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, final

import attrs

from trainfold.core.digest import digest_of
from trainfold.core.errors import CheckpointDamaged, CheckpointForeign, CheckpointHostile, FutureVersion
from trainfold.core.format.manifest import END, TAIL
from trainfold.core.format.strict_json import Read, digest_text, int_of, positive_int_of, strict_json, text_of
from trainfold.core.json_values import Json, canonical_json, shown

T = TypeVar("T")
SEAL: Final[dict[str, Read]] = {"format": text_of, "version": positive_int_of, "digest": digest_text}
"""The fields that every sealed object has; a reader's own table is ``SEAL | {...}``, for `read_fields`."""
_TAIL_BYTES: Final = len(TAIL) + len(digest_of(b"")) + len(END)


@final
@attrs.frozen
class SealedJson:
    """A kind of file.

    Attributes:
        name: the value of its first field.
        version: the newest version that can be read.
        limit_bytes: the largest size of a file.
        fix: what to do about a file that cannot be read.
    """

    name: str
    version: int
    limit_bytes: int
    fix: str

    def encode(self, document: Mapping[str, Json], *, version: int | None = None) -> bytes:
        """The file's bytes; equal documents give equal bytes.

        Args:
            document: the fields beside format, version and digest.
            version: an older version that can hold all of them; None for the newest.
        """
        covered = canonical_json({"format": self.name, "version": version or self.version, **document})[:-1]
        return covered + TAIL + digest_of(covered).encode() + END

    def decode(self, data: bytes, where: str, read: Callable[[dict[str, Any], int], T]) -> T:
        """The value in a file's bytes.

        Args:
            data: all bytes of the file.
            where: the file, for messages.
            read: makes a value of the object and its version.

        Raises:
            CheckpointDamaged: if the digest at the end does not fit the bytes before it.
            CheckpointForeign: if another program wrote it.
            FutureVersion: if a newer trainfold wrote it.
            CheckpointHostile: if the digest fits and the contents are invalid nevertheless.

        Examples:
            >>> notes = SealedJson("notes", 1, 100, "remove it")
            >>> notes.decode(notes.encode({"n": 3}), "notes.json", lambda document, version: document["n"] + version)
            4
        """
        covered = data[: max(0, len(data) - _TAIL_BYTES)]
        if len(data) > self.limit_bytes or data[len(covered) :] != TAIL + digest_of(covered).encode() + END:
            raise CheckpointDamaged(where, expected="the digest of its own bytes at its end",
                                    found=f"{len(data)} bytes that have another digest", fix=self.fix)  # fmt: skip
        try:
            document = strict_json(data, where)
            if document.get("format") != self.name:
                raise CheckpointForeign(where, expected=self.name, found=shown(document.get("format")), fix=self.fix)
            version = int_of(document.get("version"), where, least=1)
            if version > self.version:
                raise FutureVersion(where, expected=f"version {self.version}", found=version, fix="upgrade trainfold")
            return read(document, version)
        except CheckpointHostile as error:
            raise CheckpointHostile(error.where, expected=error.expected, found=error.found, fix=self.fix) from None
