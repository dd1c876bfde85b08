"""Reads the rows of an index: where a rank's part of a tensor is.

There may be one for each tensor and rank, so the usual rows are read column by column, and one that a rank does not need is not read beyond its place.
"""

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from operator import add, not_
from typing import Any, Final, final

from trainfold.core.format.dtypes import size_bytes
from trainfold.core.format.indexes.needed import TableNeeds
from trainfold.core.format.manifest import DIGEST_DIGITS, PIECE_BYTES, OtherShards, ShardRecord, box_by_rule
from trainfold.core.format.strict_json import are_digests, digest_text, hostile, int_of, list_of, sized, text_of
from trainfold.core.json_values import Json, shown
from trainfold.core.layout.slices import Box, intersect

_MOST_SIDES: Final = 64
_HEX: Final = re.compile("[0-9a-f]*")
_MOST_BYTES: Final = 2**61  # so that the end of a range fits a number of 64 bits too
_INT: Final = {int}


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

    def add(
        self,
        rows: list[Json],
        table: list[dict[str, Any]],
        file: int | None,
        needed: TableNeeds | None = None,
        component: str = "",
    ) -> OtherShards | None:
        """Read rows, and add their shards to the tensors that they name.

        Args:
            rows: of the index.
            table: the tensors of their component.
            file: the file of the rank and the component, by its index; None if there is none.
            needed: what is needed of the table; None for all of it.
            component: whose table it is, for the shards that are not needed.

        Returns:
            The shards that are not needed; None if all are.

        Raises:
            CheckpointHostile: if one is not a row of a shard of such a tensor, or its box does not lie inside of it.
        """
        others = None if needed is None or file is None else _Others(file, component)
        if file is not None:
            by_rule, rows = _apart(rows)
            if by_rule:
                self._add_by_rule(by_rule, table, file, needed, others)
        for row in rows:
            number, shard = self._shard(row, table, file)
            box = None if needed is None else needed.kinds[needed.groups[number]][1]
            if others is None or _is_needed(shard.box, shard.stop - shard.start, box):
                table[number]["shards"].append(shard)
            else:
                others.boxes[len(others.tensors)] = shard.box
                others.extend([number], [shard.start], [shard.stop])
        return None if others is None else others.done()

    def _add_by_rule(
        self,
        rows: list[list[Any]],
        table: list[dict[str, Any]],
        file: int,
        needed: TableNeeds | None,
        others: "_Others | None",
    ) -> None:
        """The same for rows of parts by rule: whether one is needed depends on its group alone."""
        numbers, starts, _, digests, pieces = zip(*rows, strict=True)
        if not (_are_below(numbers, len(table)) and _are_below(starts, _MOST_BYTES)):
            for row in rows:
                self._shard(row, table, file)  # raises
        groups = [id(table[each]["box"]) for each in numbers] if needed is None else [*map(needed.groups.__getitem__, numbers)]  # fmt: skip
        parts = {group: self._part(table[number]) for group, number in dict(zip(groups, numbers, strict=True)).items()}
        columns = zip(numbers, starts, map(parts.__getitem__, groups), digests, pieces, strict=True)
        if needed is None or others is None:
            self._put(file, columns, table)
            return
        needs = {group: _is_needed(*part, needed.kinds[group][1]) for group, part in parts.items()}
        here = [*map(needs.__getitem__, groups)]
        self._put(file, compress(columns, here), table)
        elsewhere = [*map(not_, here)]
        left, sizes = [*compress(starts, elsewhere)], {group: nbytes for group, (_, nbytes) in parts.items()}
        stops = map(add, left, map(sizes.__getitem__, compress(groups, elsewhere)))
        others.extend([*compress(numbers, elsewhere)], left, [*stops])

    def _put(
        self, file: int, rows: Iterable[tuple[int, int, tuple[Box, int], Json, Json]], table: list[dict[str, Any]]
    ) -> None:
        """Add shards: tensor, first byte, box and size, digest, and digests of pieces."""
        rows = [*rows]
        are_proved = are_digests([row[3] for row in rows])
        for number, start, (box, nbytes), digest, pieces in rows:
            record = table[number]
            one = nbytes <= PIECE_BYTES and pieces == "" and are_proved
            proof = (digest, "") if one else _proof(digest, pieces, nbytes, self._at(record))
            record["shards"].append(ShardRecord(file, start, start + nbytes, box, *proof))

    def _at(self, record: Mapping[str, Any]) -> str:
        return f"{self._where}: {record['path'][:200]}"

    def _shard(self, row: Json, table: list[dict[str, Any]], file: int | None) -> tuple[int, ShardRecord]:
        number, start, sides, digest, pieces, *more = sized(row, 5, self._where, more=1)
        if type(number) is not int or not 0 <= number < len(table) or file is None:
            wanted = f"a tensor below {len(table)} and a file of rank {self._rank}"
            raise hostile(self._where, wanted, f"{shown(number)}, file {file}")
        record = table[number]
        box, nbytes = self._part(record) if sides is None else self._given(sides, record)
        where = self._at(record)
        start = int_of(start, where)
        whole = None if not more else "" if more[0] == "" else digest_text(more[0], where)
        proof = _proof(digest, pieces, nbytes, where)
        return number, ShardRecord(file, start, start + nbytes, box, *proof, whole)

    def _part(self, record: Mapping[str, Any]) -> tuple[Box, int]:
        """The part of a tensor that the rule gives the rank, and its bytes."""
        return self._ruled.get(record["box"]) or self._by_rule(record)

    def _by_rule(self, record: Mapping[str, Any]) -> tuple[Box, int]:
        box = box_by_rule(record["sizes"], record["layout"], self._rank)
        if box is None:
            raise hostile(self._where, "a box, where no rule gives one", "none")
        found = self._ruled[record["box"]] = box, _bytes_of(box, record)
        return found

    def _given(self, sides: Json, record: Mapping[str, Any]) -> tuple[Box, int]:
        box, shape = _box(sides, self._where), record["sizes"]
        if len(box) != len(shape) or any(high > size for (_, high), size in zip(box, shape, strict=True)):
            raise hostile(self._at(record), f"a box inside {list(shape)}", box)
        return box, _bytes_of(box, record)


@final
class _Others:
    """Collects the shards of a file that are not needed."""

    def __init__(self, file: int, component: str) -> None:
        self.file, self._component = file, component
        self.tensors, self.starts, self.stops = array("q"), array("q"), array("q")
        self.boxes: dict[int, Box] = {}

    def extend(self, tensors: list[int], starts: list[int], stops: list[int]) -> None:
        """Add shards."""
        self.tensors.fromlist(tensors)
        self.starts.fromlist(starts)
        self.stops.fromlist(stops)

    def done(self) -> OtherShards | None:
        """The shards; None if there are none."""
        if not self.tensors:
            return None
        return OtherShards(self.file, self._component, self.tensors, self.starts, self.stops, self.boxes)


def _apart(rows: list[Json]) -> tuple[list[list[Any]], list[Json]]:
    """The rows of parts by rule, which are nearly all, and the others."""
    is_by_rule = [type(row) is list and len(row) == 5 and row[2] is None for row in rows]
    return [*compress(rows, is_by_rule)], [*compress(rows, map(not_, is_by_rule))]


def _are_below(values: Sequence[Any], most: int) -> bool:
    """Whether values are whole numbers from 0 to below another."""
    return not values or (set(map(type, values)) == _INT and min(values) >= 0 and max(values) < most)


def _is_needed(held: Box, nbytes: int, box: Box | None) -> bool:
    """Whether a part is read on: it is needed, or no file can hold it."""
    return nbytes > _MOST_BYTES or (box is not None and intersect(held, box) is not None)


def _proof(digest: Json, pieces: Json, nbytes: int, where: str) -> tuple[str, str]:
    """The checked digests of a row."""
    if pieces != "" or nbytes > PIECE_BYTES:
        pieces = _pieces(pieces, nbytes, where)
    return digest_text(digest, where), pieces


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
    if len(found) != count * DIGEST_DIGITS or _HEX.fullmatch(found) is None:
        raise hostile(where, f"{count} digests of pieces", f"{len(found)} characters")
    return found
