"""Whether each rank has its own copy of a component, or all ranks share one. The component's structure decides."""

from collections.abc import Iterator, Mapping
from typing import Final

from trainfold.core.json_values import Json

_OPAQUE: Final = "trainfold.Opaque"


def belongs_to_rank(name: str, node: Json) -> bool:
    """Whether each rank has its own: random streams, and the position of a loader, which reads a share of the data.

    A position in global units, such as a `DataCursor`, is the same on all ranks.

    Examples:
        >>> belongs_to_rank("rng", {}), belongs_to_rank("dataset", {"node": "trainfold.DataCursor"}), belongs_to_rank("ema", {})
        (True, False, False)
    """
    return name == "rng" or (name == "dataset" and is_opaque(node))


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
