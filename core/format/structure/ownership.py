"""Whose a component is: each rank's own, or one for all; said by the structure that describes it (B05)."""

from collections.abc import Iterator
from typing import Any, Final

from trainfold.core.json_values import Json

_OPAQUE: Final = "trainfold.Opaque"


def belongs_to_rank(name: str, node: Json) -> bool:
    """Whether a component is each rank's own: random streams, and the position of a loader, which has a share of the data.

    A position in global units, such as a `DataCursor`, is the same on all ranks.

    Examples:
        >>> belongs_to_rank("rng", {}), belongs_to_rank("dataset", {"node": "trainfold.DataCursor"}), belongs_to_rank("ema", {})
        (True, False, False)
    """
    return name == "rng" or (name == "dataset" and is_opaque(node))


def is_opaque(node: Json) -> bool:
    """Whether a structure is somebody else's, such as captured streams or a loader's position."""
    return isinstance(node, dict) and node.get("node") == _OPAQUE


def is_between_epochs(node: Json) -> bool:
    """Whether the position of a loader is certain to be between two epochs: a share of the data ends there for every rank.

    Examples:
        >>> is_between_epochs({"node": "trainfold.Opaque", "fields": {"value": {"dict": {"epoch": 1, "batches": 0}}}})
        True
    """
    counts = list(_counts(node))
    return bool(counts) and all(type(count) is int and count == 0 for count in counts)


def _counts(node: Json) -> Iterator[Any]:
    if isinstance(node, dict):
        if "batches" in node:
            yield node["batches"]
        for child in node.values():
            yield from _counts(child)
    elif isinstance(node, list):
        for child in node:
            yield from _counts(child)
