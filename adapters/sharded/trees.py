"""Trees of a user's object that have DTensors, such as an average of sharded weights: as leaves for a save, and back for its owner."""

from collections.abc import Callable
from typing import Any

from trainfold.adapters.sharded.dtensor import is_dtensor, leaf_of, like_parameter
from trainfold.adapters.sharded.parts import cut_differs, part_for
from trainfold.core import tree
from trainfold.core.errors import InvalidState, TrainfoldError
from trainfold.core.layout.shard import Shard


def as_leaves(value: Any, path: str) -> Any:
    """Return a tree with a leaf for each DTensor; a tree without DTensors is returned as it is.

    Raises:
        InvalidState: for a DTensor that cannot be saved.

    Examples:
        >>> as_leaves({"mean": 0.5}, "ema")
        {'mean': 0.5}
    """
    if not any(map(is_dtensor, tree.leaves(value))):
        return value
    return tree.map(lambda leaf: leaf_of(leaf, path) if is_dtensor(leaf) else leaf, value)


def as_owned(saved: Any, own: Any, path: str) -> Any:
    """Return a saved tree with a DTensor where its owner has one now; no rank waits for another one.

    Args:
        saved: the tree, without problems; the result shares the memory of its other leaves.
        own: what the owner has now.
        path: of the tree.
    """
    cut = _dtensors(own, path)
    if not cut:
        return saved
    leaves = [
        like_parameter(part_for(leaf, leaf_of(cut[name], name)), cut[name]) if name in cut else leaf
        for name, leaf in tree.named_leaves(saved, path)
    ]
    return tree.unflatten(tree.structure(saved), leaves)


def tree_cut_problems(saved: Any, own: Callable[[], Any], path: str) -> list[TrainfoldError]:
    """Return a problem for each shard in a saved tree that is not the part that this rank holds.

    Args:
        saved: the tree.
        own: returns what the owner has now; called only if there are shards.
        path: of the tree.

    Examples:
        >>> import torch
        >>> shard = Shard(torch.ones(1), (2,), (0,))
        >>> [error.where for error in tree_cut_problems({"mean": shard}, lambda: {"mean": torch.ones(2)}, "ema")]
        ["ema['mean']"]
    """
    shards = {name: leaf for name, leaf in tree.named_leaves(saved, path) if isinstance(leaf, Shard)}
    cut = _dtensors(own(), path) if shards else {}
    return [
        InvalidState(
            name,
            expected="the part that this rank holds",
            found=found,
            fix="build the object as it was when the state was saved, on as many ranks, or load it from its checkpoint",
        )
        for name, leaf in shards.items()
        if (found := cut_differs(leaf, leaf_of(cut[name], name) if name in cut else None)) is not None
    ]


def _dtensors(value: Any, path: str) -> dict[str, Any]:
    return {name: leaf for name, leaf in tree.named_leaves(value, path) if is_dtensor(leaf)}
