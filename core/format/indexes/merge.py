"""Puts the root of a checkpoint and the indexes of its ranks together, as the document that `parse_manifest` checks."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from trainfold.core.digest import digest_of
from trainfold.core.errors import CheckpointDamaged, CheckpointTorn, TrainfoldError
from trainfold.core.format.dtypes import STORED, size_bytes
from trainfold.core.format.manifest import INDEX_FORMAT, box_by_rule
from trainfold.core.format.strict_json import (
    digest_text,
    fields,
    hostile,
    int_of,
    list_of,
    object_of,
    single_name,
    sized,
    strict_json,
    text_of,
)
from trainfold.core.json_values import Json, shown
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import Placement, make_placement
from trainfold.core.layout.slices import Box

ReadIndex: TypeAlias = Callable[[str, int], bytes | None]
"""Returns the bytes of a file of the checkpoint by its name and size; None if there is no such file."""

_BODY_FIELDS: Final = {
    "world_size",
    "omitted",
    "contract",
    "versions",
    "files",
    "components",
    "layouts",
    "indexes",
    "index",
}
_MOST_SIDES: Final = 64
_OLDER: Final = "use an older checkpoint of the run"


def merged(document: Mapping[str, Any], head_fields: set[str], where: str, read: ReadIndex | None) -> dict[str, Any]:
    """The root with the shards of all ranks in its tables.

    Args:
        document: the root, version 2.
        head_fields: the fields of its head.
        where: its path, for errors.
        read: reads the indexes of other ranks; None for a checkpoint that must have none.

    Raises:
        CheckpointTorn: if an index is missing.
        CheckpointDamaged: if an index has another size or digest than the root says.
        CheckpointHostile: if the root or an index breaks the format.
    """
    fields(document, head_fields | _BODY_FIELDS, where, exact=True)
    layouts = [_layout(each, where) for each in list_of(document["layouts"], where)]
    rows = [_index_row(each, where) for each in list_of(document["indexes"], where)]
    indexes = {0: object_of(document["index"], where)}
    for row in rows:
        if row["rank"] in indexes:
            raise hostile(where, "each rank once among the indexes", row["rank"])
        indexes[row["rank"]] = _index(row, where, read)
    files = _files(document, where)
    components = [_component(each, indexes, files, layouts, where) for each in list_of(document["components"], where)]
    known = {each["name"] for each in components}
    for rank, index in indexes.items():
        fields(index, {"own", "shards"}, f"{where}: index of rank {rank}", exact=True)
        unknown = ({*object_of(index["own"], where)} | {*object_of(index["shards"], where)}) - known
        if unknown:
            raise hostile(where, f"components among {sorted(known)}", sorted(unknown)[:8])
    rest = {name: document[name] for name in document if name not in ("layouts", "index")}
    return {**rest, "components": components, "indexes": rows}


def _index_row(value: Json, where: str) -> dict[str, Any]:
    fields(value, {"name", "rank", "size_bytes", "digest"}, where, exact=True)
    return {
        "name": single_name(value["name"], where),
        "rank": int_of(value["rank"], where),
        "size_bytes": int_of(value["size_bytes"], where),
        "digest": digest_text(value["digest"], where),
    }


def _index(row: Mapping[str, Any], where: str, read: ReadIndex | None) -> dict[str, Any]:
    """The checked document of one rank's index."""
    place = f"{where}: {row['name']}"
    data = None if read is None else read(row["name"], row["size_bytes"])
    if data is None:
        raise CheckpointTorn(place, expected=f"{row['size_bytes']} bytes", found="no such file", fix=_OLDER)
    if len(data) != row["size_bytes"] or digest_of(data) != row["digest"]:
        raise CheckpointDamaged(
            place, expected=f"{row['size_bytes']} bytes, {row['digest']}", found=f"{len(data)} bytes, {digest_of(data)}",
            fix="use an older checkpoint of the run; `trainfold verify` names every damaged file",
        )  # fmt: skip
    document = strict_json(data, place)
    fields(document, {"format", "rank", "own", "shards"}, place, exact=True)
    if document["format"] != INDEX_FORMAT or document["rank"] != row["rank"] or type(document["rank"]) is not int:
        raise hostile(place, f"the index of rank {row['rank']}", shown([document["format"], document["rank"]]))
    return {"own": document["own"], "shards": document["shards"]}


def _files(document: Mapping[str, Any], where: str) -> dict[tuple[str, int], int]:
    """(component, rank) -> the index of the file; a rank has one file for each component."""
    found: dict[tuple[str, int], int] = {}
    for index, file in enumerate(list_of(document["files"], where)):
        each = object_of(file, where)
        key = text_of(each.get("component"), where), int_of(each.get("rank"), where)
        if key in found:
            raise hostile(where, "one file for each component and rank", f"two for {key[0][:40]} and rank {key[1]}")
        found[key] = index
    return found


def _component(
    value: Json,
    indexes: Mapping[int, Mapping[str, Any]],
    files: Mapping[tuple[str, int], int],
    layouts: list[Placement],
    where: str,
) -> dict[str, Any]:
    each = object_of(value, where)
    is_own = "node" not in each
    fields(each, {"name", "fingerprint"} if is_own else {"name", "fingerprint", "node", "tensors"}, where, exact=True)
    name = text_of(each["name"], where)
    if is_own:
        held = [_own(name, rank, indexes.get(rank), where) for rank in range(len(indexes))]
        nodes, tables = [node for node, _ in held], [_table(rows, [], where) for _, rows in held]
        if len(held) < 2:
            raise hostile(f"{where}: {name[:40]}", "a structure in the root", "one for a single rank")
    else:
        nodes, tables = [each["node"]], [_table(each["tensors"], layouts, where)]
    for rank, index in indexes.items():
        if not is_own and name in object_of(object_of(index, where).get("own"), where):
            raise hostile(f"{where}: {name[:40]}", "one structure for all ranks", f"another one of rank {rank}")
        rows = object_of(object_of(index, where).get("shards"), where).get(name, [])
        table = tables[rank] if is_own else tables[0]
        for row in list_of(rows, where):
            _add_shard(row, table, files.get((name, rank)), rank, where)
    for record in (record for table in tables for record in table):
        record["shards"].sort(key=lambda shard: shard[3])
        del record["sizes"]
    return {"name": each["name"], "fingerprint": each["fingerprint"], "nodes": nodes, "tensors": tables}


def _own(name: str, rank: int, index: Mapping[str, Any] | None, where: str) -> tuple[Json, Json]:
    place = f"{where}: {name[:40]} of rank {rank}"
    found = None if index is None else object_of(index.get("own"), place).get(name)
    if found is None:
        raise hostile(place, "its structure in the rank's index", "none")
    fields(found, {"node", "tensors"}, place, exact=True)
    return found["node"], found["tensors"]


def _table(rows: Json, layouts: list[Placement], where: str) -> list[dict[str, Any]]:
    table = []
    for row in list_of(rows, where):
        path, dtype, shape, layout = sized(row, 4, where)
        if not isinstance(dtype, str) or dtype not in STORED:
            raise hostile(where, "a known dtype", shown(dtype))
        sizes = tuple(int_of(size, where) for size in list_of(shape, where))
        if layout is not None and (type(layout) is not int or not 0 <= layout < len(layouts)):
            raise hostile(where, f"a layout below {len(layouts)}", shown(layout))
        rule = None if layout is None else layouts[layout]
        if rule is not None and len(rule.cuts) > len(sizes):
            raise hostile(where, f"a tensor of at least {len(rule.cuts)} dimensions", f"the shape {shown(shape)}")
        table.append({"path": path, "dtype": dtype, "shape": shape, "shards": [], "layout": rule, "sizes": sizes})
    return table


def _add_shard(row: Json, table: list[dict[str, Any]], file: int | None, rank: int, where: str) -> None:
    number, start, sides, digest, pieces = sized(row, 5, where)
    if type(number) is not int or not 0 <= number < len(table) or file is None:
        raise hostile(where, f"a tensor below {len(table)} and a file of rank {rank}", f"{shown(number)}, file {file}")
    record = table[number]
    box = box_by_rule(record["sizes"], record["layout"], rank) if sides is None else _box(sides, where)
    if box is None:
        raise hostile(where, "a box, where no rule gives one", "none")
    stop = int_of(start, where) + size_bytes(record["dtype"], tuple(high - low for low, high in box))
    record["shards"].append([file, start, stop, [list(side) for side in box], digest, pieces])


def _box(sides: Json, where: str) -> Box:
    found = list_of(sides, where)
    if len(found) > _MOST_SIDES:
        raise hostile(where, f"at most {_MOST_SIDES} sides", len(found))
    box = tuple((int_of(low, where), int_of(high, where)) for low, high in (sized(side, 2, where) for side in found))
    if any(high < low for low, high in box):
        raise hostile(where, "sides that end after they begin", shown(sides))
    return box


def _layout(value: Json, where: str) -> Placement:
    shape, first, strides, ranks, cuts = sized(value, 5, where)
    try:
        mesh = make_mesh(
            _ints(shape, where),
            first=int_of(first, where),
            **({"strides": _ints(strides, where)} if ranks is None else {"ranks": _ints(ranks, where)}),
        )
        return make_placement(mesh, [_ints(axes, where) for axes in list_of(cuts, where)])
    except TrainfoldError as error:
        raise hostile(where, "a layout", f"{error.found}") from None


def _ints(value: Json, where: str) -> list[int]:
    found = list_of(value, where)
    return [int_of(each, where) for each in found]
