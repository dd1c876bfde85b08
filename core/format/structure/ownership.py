"""Whether each rank has its own copy of a component, or all ranks share one. The component's structure decides."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from trainfold.core.json_values import Json, decode_scalar

_OPAQUE: Final = "trainfold.Opaque"
_PER_RANK: Final = "trainfold.PerRank"
_OF_RANK_ZERO: Final = "trainfold.OfRankZero"


def belongs_to_rank(name: str, node: Json) -> bool:
    """Whether each rank has its own: random streams, the position of a loader, which reads a share of the data, and what is declared so.

    A position in global units, such as a `DataCursor`, is the same on all ranks.

    Examples:
        >>> belongs_to_rank("rng", {}), belongs_to_rank("dataset", {"node": "trainfold.DataCursor"}), belongs_to_rank("ema", {})
        (True, False, False)
    """
    return name == "rng" or (name == "dataset" and is_opaque(node)) or is_per_rank(node)


def is_per_rank(node: Json) -> bool:
    """Whether a component is declared to be each rank's own.

    Examples:
        >>> is_per_rank({"node": "trainfold.PerRank"}), is_per_rank({"dict": {}})
        (True, False)
    """
    return isinstance(node, dict) and node.get("node") == _PER_RANK


def counts_on_rank_zero(node: Json) -> bool:
    """Whether a component is declared to be rank 0's.

    Examples:
        >>> counts_on_rank_zero({"node": "trainfold.OfRankZero"})
        True
    """
    return isinstance(node, dict) and node.get("node") == _OF_RANK_ZERO


def share_of(node: Json) -> tuple[int, int] | None:
    """The share of the data that a component belongs to, and the number of shares; None if it belongs to a rank, or to all.

    Examples:
        >>> share_of({"node": "trainfold.PerRank", "static": {"share": 1, "shares": 2}})
        (1, 2)
    """
    known = node.get("static") if is_per_rank(node) and isinstance(node, dict) else None
    found = (known.get("share"), known.get("shares")) if isinstance(known, dict) else (None, None)
    return found if isinstance(found[0], int) and isinstance(found[1], int) else None  # type: ignore[return-value]


def without_value(node: Json) -> Json:
    """The structure of a component of a share, as a rank has it whose value an earlier rank of the share stores.

    Examples:
        >>> without_value({"node": "trainfold.PerRank", "fields": {"value": 7}, "static": {"share": 1, "shares": 2}})["fields"]
        {'value': None}
    """
    assert isinstance(node, dict)
    return {**node, "fields": {"value": None}}


def share_of_position(node: Json) -> tuple[int, int] | None:
    """The share of the data that a loader's position, or random streams, belong to, and the number of shares; None if they do not say it.

    Examples:
        >>> position = {"epoch": 1, "batches": 3, "share": 0, "shares": 2}
        >>> share_of_position({"node": "trainfold.Opaque", "fields": {"value": {"dict": position}}}), share_of_position({})
        ((0, 2), None)
    """
    known = _own_position(node)
    found = (known.get("share"), known.get("shares"))
    return found if type(found[0]) is int and type(found[1]) is int else None  # type: ignore[return-value]


def continues_by_share(node: Json) -> bool:
    """Whether each loader of a position has a state of its own, for its share, or is read over all ranks: then other shares may continue.

    Examples:
        >>> one = {"node": "trainfold.Opaque", "fields": {"value": {"dict": {"kind": "stateful"}}}}
        >>> continues_by_share(one), continues_by_share({})
        (True, False)
    """
    found = _loaders(node).values()
    return bool(found) and all(each.get("kind") == "stateful" or _is_shared(each) for each in found)


def unread_by_share(node: Json) -> str:
    """What the share of a position has not read; empty if it is between two epochs, or all of it is read over all ranks.

    Examples:
        >>> position = {"kind": "stateful", "epoch": 1, "batches": 3}
        >>> unread_by_share({"node": "trainfold.Opaque", "fields": {"value": {"dict": position}}})
        'epoch 1, after 3 batches'
    """
    return " and ".join(
        f"epoch {each.get('epoch')}, after {each['batches']} batches" + (f", of the loader {name!r}" if name else "")
        for name, each in _loaders(node).items()
        if each.get("batches") and not _is_shared(each)
    )


def are_alike_but_for_shares(nodes: Sequence[Json]) -> bool:
    """Whether the positions of all ranks say the same, except for the share of each."""
    first, *others = [_without_shares(_own_position(node)) for node in nodes]
    return bool(first) and all(each == first for each in others)


def _without_shares(position: Mapping[str, Json]) -> dict[str, Json]:
    """The position without its share, and without whether this rank's random streams moved: the streams have a component."""
    kept = {name: value for name, value in position.items() if name not in ("share", "shares")}
    draws = kept.get("draws")
    if isinstance(draws, dict) and isinstance(seen := draws.get("dict"), dict):
        kept["draws"] = {"dict": {name: value for name, value in seen.items() if name != "moved"}}
    return kept


def _own_position(node: Json) -> Mapping[str, Json]:
    fields = node.get("fields") if is_opaque(node) and isinstance(node, dict) else None
    return _dict_of(fields.get("value")) if isinstance(fields, dict) else {}


def _loaders(node: Json) -> dict[str, Mapping[str, Json]]:
    """Loader -> its position; ``""`` for the only one."""
    own = _own_position(node)
    if own.get("kind") != "group":
        return {"": own} if own else {}
    return {name: each for name, found in _dict_of(own.get("loaders")).items() if (each := _dict_of(found))}


def _dict_of(value: Json) -> Mapping[str, Json]:
    found = value.get("dict") if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _is_shared(position: Mapping[str, Json]) -> bool:
    return isinstance(position.get("shared"), dict)


def is_opaque(node: Json) -> bool:
    """Whether a structure belongs to other code, such as captured streams or a loader's position."""
    return isinstance(node, dict) and node.get("node") == _OPAQUE


def seed_of_streams(node: Json) -> int | None:
    """The seed of saved random streams; None if they are not those of a live run.

    Examples:
        >>> seed_of_streams({"node": "trainfold.Opaque", "fields": {"value": {"dict": {"seed": {"int": "9007199254740993"}}}}})
        9007199254740993
        >>> seed_of_streams({"node": "trainfold.Key", "fields": {"bits": 5}}) is None
        True
    """
    seed = _own_position(node).get("seed")
    found = decode_scalar(seed, "rng") if isinstance(seed, dict) and list(seed) == ["int"] else seed
    return found if type(found) is int else None


def is_between_epochs(node: Json) -> bool:
    """Whether a loader is certainly between two epochs: every rank's share of the data ends there.

    Examples:
        >>> is_between_epochs({"node": "trainfold.Opaque", "fields": {"value": {"dict": {"epoch": 1, "batches": 0}}}})
        True
    """
    counts = [each["batches"] for each in _positions(node)]
    return bool(counts) and all(type(count) is int and count == 0 for count in counts)


def is_over_all_ranks(node: Json) -> bool:
    """Whether every loader of a position is read by a `GlobalBatchSampler`, so that any number of ranks can continue from it.

    Examples:
        >>> position = {"epoch": 1, "batches": 3, "shared": {"dict": {"next": 24}}}
        >>> is_over_all_ranks({"node": "trainfold.Opaque", "fields": {"value": {"dict": position}}}), is_over_all_ranks({})
        (True, False)
    """
    found = list(_positions(node))
    return bool(found) and all(map(_is_shared, found))


def _positions(node: Json) -> Iterator[Mapping[str, Json]]:
    """The position of each loader: what has a count of batches."""
    if isinstance(node, dict):
        if "batches" in node:
            yield node
        for child in node.values():
            yield from _positions(child)
    elif isinstance(node, list):
        for child in node:
            yield from _positions(child)
