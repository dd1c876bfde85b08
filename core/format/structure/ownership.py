"""Whether each rank has its own copy of a component, or all ranks share one. The component's structure decides."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from trainfold.core.json_values import Json

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


def share_of_position(node: Json) -> tuple[int, int] | None:
    """The share of the data that a loader's position is in, and the number of shares; None if it does not say it.

    Examples:
        >>> position = {"epoch": 1, "batches": 3, "share": 0, "shares": 2}
        >>> share_of_position({"node": "trainfold.Opaque", "fields": {"value": {"dict": position}}}), share_of_position({})
        ((0, 2), None)
    """
    known = _own_position(node)
    found = (known.get("share"), known.get("shares"))
    return found if type(found[0]) is int and type(found[1]) is int else None  # type: ignore[return-value]


def is_of_stateful_loader(node: Json) -> bool:
    """Whether a position is that of a loader with a state of its own."""
    return _own_position(node).get("kind") == "stateful"


def are_alike_but_for_shares(nodes: Sequence[Json]) -> bool:
    """Whether the positions of all ranks say the same, except for the share of each."""
    first, *others = [{k: v for k, v in _own_position(node).items() if k not in ("share", "shares")} for node in nodes]
    return bool(first) and all(each == first for each in others)


def _own_position(node: Json) -> Mapping[str, Json]:
    fields = node.get("fields") if is_opaque(node) and isinstance(node, dict) else None
    value = fields.get("value") if isinstance(fields, dict) else None
    found = value.get("dict") if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def is_opaque(node: Json) -> bool:
    """Whether a structure belongs to other code, such as captured streams or a loader's position."""
    return isinstance(node, dict) and node.get("node") == _OPAQUE


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
    return bool(found) and all(isinstance(each.get("shared"), dict) for each in found)


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
