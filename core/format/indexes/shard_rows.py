"""Reads the rows of an index: where a rank's part of a tensor is. There may be one for each tensor and rank, so the usual row is read with few steps."""

from collections.abc import Mapping
from typing import Any, Final, final

from trainfold.core.format.dtypes import size_bytes
from trainfold.core.format.manifest import DIGEST_DIGITS, PIECE_BYTES, ShardRecord, box_by_rule
from trainfold.core.format.strict_json import digest_text, hostile, int_of, list_of, sized, text_of
from trainfold.core.json_values import Json, shown
from trainfold.core.layout.slices import Box

_MOST_SIDES: Final = 64
_HEX: Final = frozenset("0123456789abcdef")


@final
class ShardRows:
    """Reads the rows of one rank.

    Args:
        rank: the rank.
        where: the place of the root, for errors.
    """

    def __init__(self, rank: int, where: str) -> None:
        self._rank, self._where = rank, where
        self._ruled: dict[Any, tuple[Box, int]] = {}  # there are many rows, and few shapes

    def add(self, row: Json, table: list[dict[str, Any]], file: int | None) -> None:
        """Read a row, and add its shard to the tensor that it names.

        Args:
            row: of the index.
            table: the tensors of its component.
            file: the file of the rank and the component, by its index; None if there is none.

        Raises:
            CheckpointHostile: if it is not a row of a shard of such a tensor, or its box does not lie inside of it.
        """
        number, start, sides, digest, pieces, *more = sized(row, 5, self._where, more=1)
        if type(number) is not int or not 0 <= number < len(table) or file is None:
            wanted = f"a tensor below {len(table)} and a file of rank {self._rank}"
            raise hostile(self._where, wanted, f"{shown(number)}, file {file}")
        record = table[number]
        if sides is not None:
            box, nbytes = self._given(sides, record)
        elif (found := self._ruled.get(record["box"])) is not None:
            box, nbytes = found
        else:
            box, nbytes = self._by_rule(record)
        start = int_of(start, record["where"])
        if pieces != "" or nbytes > PIECE_BYTES:
            pieces = _pieces(pieces, nbytes, record["where"])
        whole = None if not more else "" if more[0] == "" else digest_text(more[0], record["where"])
        digest = digest_text(digest, record["where"])
        record["shards"].append(ShardRecord(file, start, start + nbytes, box, digest, pieces, whole))

    def _by_rule(self, record: Mapping[str, Any]) -> tuple[Box, int]:
        box = box_by_rule(record["sizes"], record["layout"], self._rank)
        if box is None:
            raise hostile(self._where, "a box, where no rule gives one", "none")
        found = self._ruled[record["box"]] = box, _bytes_of(box, record)
        return found

    def _given(self, sides: Json, record: Mapping[str, Any]) -> tuple[Box, int]:
        box, shape = _box(sides, self._where), record["sizes"]
        if len(box) != len(shape) or any(high > size for (_, high), size in zip(box, shape, strict=True)):
            raise hostile(record["where"], f"a box inside {list(shape)}", box)
        return box, _bytes_of(box, record)


def _bytes_of(box: Box, record: Mapping[str, Any]) -> int:
    return size_bytes(record["dtype"], tuple(high - low for low, high in box))


def _box(sides: Json, where: str) -> Box:
    found = list_of(sides, where)
    if len(found) > _MOST_SIDES:
        raise hostile(where, f"at most {_MOST_SIDES} sides", len(found))
    box = tuple((int_of(low, where), int_of(high, where)) for low, high in (sized(side, 2, where) for side in found))
    if any(high < low for low, high in box):
        raise hostile(where, "sides that end after they begin", shown(sides))
    return box


def _pieces(value: Json, size: int, where: str) -> str:
    """The checked digests of pieces: none for a single piece."""
    count = -(-size // PIECE_BYTES) if size > PIECE_BYTES else 0
    found = text_of(value, where)
    if len(found) != count * DIGEST_DIGITS or not set(found) <= _HEX:
        raise hostile(where, f"{count} digests of pieces", f"{len(found)} characters")
    return found
