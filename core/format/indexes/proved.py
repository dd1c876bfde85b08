"""Reads the indexes of ranks and proves them by the root; and what of them all ranks need, so that each index is opened by one rank for all."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, TypeAlias

from trainfold.core.digest import digest_of
from trainfold.core.errors import CheckpointDamaged, CheckpointTorn, TrainfoldError
from trainfold.core.format.manifest import INDEX_FORMAT
from trainfold.core.format.strict_json import (
    digest_text,
    fields,
    hostile,
    int_of,
    list_of,
    single_name,
    strict_json,
)
from trainfold.core.json_values import Json, shown

ReadIndex: TypeAlias = Callable[[str, int], bytes | None]
"""Returns the bytes of a file of the checkpoint by its name and size; None if there is no such file."""
OF_ONE_RANK: Final = frozenset({"rng"})  # of what ranks have of their own, a plan looks at the part of one rank only
_OLDER: Final = "use an older checkpoint of the run"


def index_rows(document: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The checked rows of the indexes in a root."""
    return [_row(each, where) for each in list_of(document["indexes"], where)]


def _row(value: Json, where: str) -> dict[str, Any]:
    fields(value, {"name", "rank", "size_bytes", "digest"}, where, exact=True)
    return {
        "name": single_name(value["name"], where),
        "rank": int_of(value["rank"], where),
        "size_bytes": int_of(value["size_bytes"], where),
        "digest": digest_text(value["digest"], where),
    }


def index_of(row: Mapping[str, Any], where: str, read: ReadIndex | None) -> dict[str, Any]:
    """The checked document of one rank's index.

    Args:
        row: from `index_rows`.
        where: the path of the root, for errors.
        read: reads it; None for a checkpoint that must have none.

    Raises:
        CheckpointTorn: if it is missing.
        CheckpointDamaged: if it has another size or digest than the root says.
        CheckpointHostile: if it breaks the format.
    """
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
    more = {"references"} & document.keys()
    fields(document, {"format", "rank", "own", "shards"} | more, place, exact=True)
    if document["format"] != INDEX_FORMAT or document["rank"] != row["rank"] or type(document["rank"]) is not int:
        raise hostile(place, f"the index of rank {row['rank']}", shown([document["format"], document["rank"]]))
    return {name: document[name] for name in ("own", "shards", *more)}


def compared_by_all(document: Mapping[str, Any]) -> frozenset[str]:
    """The components of a root of which each rank has its own and whose parts a plan compares, so that each rank needs those of all.

    Examples:
        >>> sorted(compared_by_all({"components": [{"name": "rng"}, {"name": "dataset"}, {"name": "model", "node": None}]}))
        ['dataset']
    """
    found = document.get("components")
    described = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    names = {each["name"] for each in described if "node" not in each and isinstance(each.get("name"), str)}
    return frozenset(names - OF_ONE_RANK)


def opened_share(
    document: Mapping[str, Any], where: str, read: ReadIndex, *, rank: int, world_size: int
) -> dict[int, dict[str, Any]]:
    """The indexes that a rank opens for all ranks: each index is opened by one of them.

    Args:
        document: the root, whose digest fits.
        where: its path, for errors.
        read: reads an index.
        rank: this rank.
        world_size: the ranks that load.

    Returns:
        Rank that saved -> its index. What is missing or wrong is left out: any rank that needs it opens it again, and says why.
    """
    found = {}
    try:
        for row in index_rows(document, where):
            if row["rank"] % world_size == rank:
                found[row["rank"]] = index_of(row, where, read)
    except TrainfoldError:
        return found
    return found


def only_own(index: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """An index without what all ranks share.

    Examples:
        >>> only_own({"own": {"dataset": 1, "rng": 2}, "shards": {"model": [3], "dataset": [4]}}, {"dataset"})
        {'own': {'dataset': 1}, 'shards': {'dataset': [4]}}
    """
    return {
        key: {name: each for name, each in held.items() if name in names} if isinstance(held := index[key], dict) else held
        for key in index
    }  # fmt: skip
