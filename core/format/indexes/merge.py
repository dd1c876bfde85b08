"""Puts the root of a checkpoint and the indexes of its ranks together, as the document that `parse_manifest` checks."""

from collections.abc import Collection, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NamedTuple, final

from trainfold.core.errors import TrainfoldError
from trainfold.core.format.indexes.files import RootFiles
from trainfold.core.format.indexes.needed import Missing, Needs, TableNeeds, Tables, needs_of_tables, ranks_that_meet
from trainfold.core.format.indexes.proved import OF_ONE_RANK, ReadIndex, index_of, index_rows
from trainfold.core.format.indexes.shard_rows import ShardRows
from trainfold.core.format.indexes.summary import summary_of
from trainfold.core.format.indexes.tables import ReadTable, table_of_kinds, table_of_rows
from trainfold.core.format.manifest import REFERENCES_VERSION, SUMMARY_VERSION, OtherShards
from trainfold.core.format.strict_json import (
    fields,
    hostile,
    int_of,
    list_of,
    object_of,
    sized,
    text_of,
)
from trainfold.core.json_values import Json, shown
from trainfold.core.layout.placement import Placement, placement_of

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
_BOX: Final = attrgetter("box")


@final
class Merged(NamedTuple):
    """A root with the shards of ranks in its tables.

    Attributes:
        document: the root.
        opened: the ranks whose indexes are in it; None for all of them.
        is_whole: whether all of their shards are in the tables.
        others: the other ones.
    """

    document: dict[str, Any]
    opened: frozenset[int] | None
    is_whole: bool
    others: tuple[OtherShards, ...]


def merged(
    document: Mapping[str, Any], head_fields: set[str], where: str, read: ReadIndex | None, needs: Needs | None = None
) -> Merged:
    """The root with the shards of all ranks in its tables, or of as many ranks as have what is needed.

    Args:
        document: the root, from version 2 on.
        head_fields: the fields of its head.
        where: its path, for errors.
        read: reads the indexes of other ranks; None for a checkpoint that must have none.
        needs: what a rank needs; None for everything.

    Raises:
        CheckpointTorn: if an index is missing.
        CheckpointDamaged: if an index has another size or digest than the root says.
        CheckpointHostile: if the root or an index breaks the format.
    """
    has_summary = (
        document["schema_version"] >= SUMMARY_VERSION
    )  # and with it an index of rank 0 in a file, and kinds of tensors
    if has_summary:
        document = _with_fingerprints(document, where)
    more = {"references"} if document["schema_version"] >= REFERENCES_VERSION else set()
    fields(document, head_fields | _BODY_FIELDS | more, where, exact=True)
    layouts = [_layout(each, where) for each in list_of(document["layouts"], where)]
    rows = index_rows(document, where)
    by_rank = {row["rank"]: row for row in rows}
    if len(by_rank) != len(rows) or (0 in by_rank) != (document["index"] is None and has_summary):
        raise hostile(where, "each rank once among the indexes", [row["rank"] for row in rows][:8])
    row_of_zero = by_rank.pop(0, None)
    files = RootFiles(document, where)
    described = _described(document["components"], where)
    names = frozenset(each["name"] for each in described)
    table_of: ReadTable = table_of_kinds if has_summary else table_of_rows
    tables = {
        each["name"]: table_of(each["tensors"], each["node"], each["name"], layouts, where)
        for each in described
        if "node" in each
    }
    needed = None if needs is None else needs_of_tables(tables, needs)
    indexes: dict[int, dict[str, Any]] = {}
    others: list[OtherShards] = []

    def add(rank: int) -> None:
        known = None if needs is None else needs.opened.get(rank)
        if known is None:
            row = by_rank.get(rank, row_of_zero)
            known = object_of(document["index"], where) if row is None else index_of(row, where, read)
        _check_names(rank, known, names, where)
        others.extend(_add_shards(rank, known, tables, files, where, needed))
        rest = {
            key: {name: each for name, each in known.get(key, {}).items() if name not in tables}
            for key in ("shards", "references")
        }
        indexes[rank] = {**known, **rest}

    add(0)
    if needs is None or needed is None:
        for rank in by_rank:
            add(rank)
    else:
        writers = {name: ranks & by_rank.keys() for name, ranks in files.writers.items()}
        for rank in sorted(_opened_for_own(document, by_rank, needs) | ranks_that_meet(needed, writers)):
            add(rank)
        missing = Missing(tables, needed)
        for rank in missing.ranks(writers, indexes):
            add(rank)
        missing.check(where)
    told = None if needs is None else needs.own
    components = [
        _component(each, indexes, told or {}, table_of, by_rank=by_rank, shared=tables, files=files, where=where)
        for each in described
    ]
    rest = {"references": [], **{name: document[name] for name in document if name not in ("layouts", "index")}}
    opened = None if len(indexes) == len(by_rank) + 1 else frozenset(indexes)
    return Merged({**rest, "components": components, "indexes": rows}, opened, needs is None, tuple(others))


def _check_names(rank: int, index: Mapping[str, Any], known: Collection[str], where: str) -> None:
    more = {"references"} & index.keys()
    fields(index, {"own", "shards"} | more, f"{where}: index of rank {rank}", exact=True)
    unknown = {name for each in index.values() for name in object_of(each, where)} - {*known}
    if unknown:
        raise hostile(where, f"components among {sorted(known)}", sorted(unknown)[:8])


def _opened_for_own(document: Mapping[str, Any], by_rank: Collection[int], needs: Needs) -> set[int]:
    """The ranks whose indexes are opened for what each has of its own: that of this rank, and those of which no rank has sent it."""
    own = {each["name"] for each in document["components"] if "node" not in each}
    mine = {needs.rank} & {*by_rank} if own and document["world_size"] == needs.world_size else set()
    return mine if needs.own is None or not own - OF_ONE_RANK else mine | ({*by_rank} - needs.own.keys())


def _with_fingerprints(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A root from version 3 on without its summary: a component has its fingerprint itself, as in version 2."""
    given = summary_of(document, where)
    found = [object_of(each, where) for each in list_of(document.get("components"), where)]
    names = [each.get("name") for each in found]
    if names != [*given.fingerprints] or any("fingerprint" in each for each in found):
        raise hostile(where, f"the components {[*given.fingerprints][:8]}", [shown(name) for name in names[:8]])
    size = sum(
        int_of(object_of(file, where).get("size_bytes"), where) for file in list_of(document.get("files"), where)
    )
    if size != given.size_bytes:
        raise hostile(where, f"files of {given.size_bytes} bytes", size)
    components = [each | {"fingerprint": given.fingerprints[each["name"]]} for each in found]
    references = document.get("references", []) if document["schema_version"] >= REFERENCES_VERSION else []
    referred = {text_of(object_of(each, where).get("checkpoint"), where) for each in list_of(references, where)}
    if [*given.refers] != sorted(referred):
        raise hostile(where, f"files of the checkpoints {[*given.refers][:8]}", shown([*referred][:8]))
    summary = ("size_bytes", "fingerprints", *(["refers"] if document["schema_version"] >= REFERENCES_VERSION else []))
    rest = {name: value for name, value in document.items() if name not in summary}
    return rest | {"components": components}


def _described(value: Json, where: str) -> list[dict[str, Any]]:
    """The components of the root, each with the fields that it must have, and each once."""
    found = [object_of(each, where) for each in list_of(value, where)]
    for each in found:
        more = {"node", "tensors"} if "node" in each else set()
        fields(each, {"name", "fingerprint", *more}, where, exact=True)
    names = [text_of(each["name"], where) for each in found]
    if len({*names}) != len(names):
        raise hostile(where, "each component once", [shown(name) for name in names[:8]])
    return found


def _add_shards(  # noqa: PLR0913, PLR0917 - private
    rank: int,
    index: Mapping[str, Any],
    tables: Tables,
    files: RootFiles,
    where: str,
    needed: Mapping[str, TableNeeds] | None = None,
) -> list[OtherShards]:
    """Add the shards of a rank to tables, as far as they are needed; return the others."""
    rows = ShardRows(rank, where)
    found = [
        rows.add(each, table, file, None if needed is None else needed[name], name)
        for name, table in tables.items()
        for file, each in files.rows(index, name, rank)
    ]
    return [each for each in found if each is not None]


def _component(  # noqa: PLR0913 - private
    each: Mapping[str, Any],
    indexes: Mapping[int, Mapping[str, Any]],
    told: Mapping[int, Mapping[str, Any]],
    table_of: ReadTable,
    *,
    by_rank: Collection[int],
    shared: Tables,
    files: RootFiles,
    where: str,
) -> dict[str, Any]:
    name = each["name"]
    if "node" in each:
        for rank, index in indexes.items():
            if name in object_of(index.get("own"), where):
                raise hostile(f"{where}: {name[:40]}", "one structure for all ranks", f"another one of rank {rank}")
        nodes, tables = [each["node"]], [shared[name]]
    else:
        count = len(by_rank) + 1
        if count < 2:
            raise hostile(f"{where}: {name[:40]}", "a structure in the root", "one for a single rank")
        read = indexes if name in OF_ONE_RANK else {**told, **indexes}
        unread = {rank for rank in by_rank if rank not in read}
        held = [(None, []) if rank in unread else _own(name, rank, read.get(rank), where) for rank in range(count)]
        nodes = [node for node, _ in held]
        tables = [
            [] if rank in unread else table_of(rows, node, name, [], where) for rank, (node, rows) in enumerate(held)
        ]
        for rank, table in enumerate(tables):
            if rank in read:
                _add_shards(rank, read[rank], {name: table}, files, where)
    for record in chain.from_iterable(tables):
        if len(record["shards"]) > 1:
            record["shards"].sort(key=_BOX)
    return {"name": name, "fingerprint": each["fingerprint"], "nodes": nodes, "tensors": tables}


def _own(name: str, rank: int, index: Mapping[str, Any] | None, where: str) -> tuple[Json, Json]:
    place = f"{where}: {name[:40]} of rank {rank}"
    found = None if index is None else object_of(index.get("own"), place).get(name)
    if found is None:
        raise hostile(place, "its structure in the rank's index", "none")
    fields(found, {"node", "tensors"}, place, exact=True)
    return found["node"], found["tensors"]


def _layout(value: Json, where: str) -> Placement:
    shape, first, strides, ranks, cuts = sized(value, 5, where)
    try:
        reach = (_ints(strides, where), None) if ranks is None else (None, _ints(ranks, where))
        axes = [_ints(each, where) for each in list_of(cuts, where)]
        return placement_of([_ints(shape, where), int_of(first, where), *reach, axes])
    except TrainfoldError as error:
        raise hostile(where, "a layout", f"{error.found}") from None


def _ints(value: Json, where: str) -> list[int]:
    found = list_of(value, where)
    return [int_of(each, where) for each in found]
