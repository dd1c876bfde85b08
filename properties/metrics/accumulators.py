"""Compares accumulators of metrics and adds them up as integers, for the laws and the contract of metrics."""

from collections.abc import Sequence
from typing import Any

from trainfold.core import tree
from trainfold.core.format.codec import is_tensor_leaf
from trainfold.core.metrics.counts import add_counts
from trainfold.properties.differences import tensor_difference

__all__ = ["difference_of", "leafwise_sum", "result_text"]


def difference_of(one: Any, other: Any) -> str | None:
    """The first leaf in which two trees differ in a bit, and both sides; None if they are the same.

    Examples:
        >>> import torch
        >>> difference_of({"a": torch.tensor([1, 2])}, {"a": torch.tensor([1, 3])})
        "['a']: element 1 is 2 against 3"
        >>> difference_of({"a": torch.tensor([1])}, {"a": torch.tensor([1])}) is None
        True
    """
    if tree.structure(one) != tree.structure(other):
        return f"the trees are {tree.structure(one)} and {tree.structure(other)}"
    for (path, mine), theirs in zip(tree.named_leaves(one), tree.leaves(other), strict=True):
        found = _leaf_difference(mine, theirs)
        if found is not None:
            return f"{path or 'it'}: {found}"
    return None


def leafwise_sum(accs: Sequence[Any]) -> Any:
    """The sum of accumulators as an all-reduce computes it: leaf by leaf, the shorter ones padded with zeros.

    Examples:
        >>> import torch
        >>> leafwise_sum([(torch.tensor([1]),), (torch.tensor([2, 3]),)])
        (tensor([3, 3]),)
    """
    first, *others = accs
    for other in others:
        first = tree.map(add_counts, first, other)
    return first


def result_text(result: Any) -> str:
    """A result as text in which NaN equals NaN, and 0.0 differs from -0.0.

    Examples:
        >>> result_text([1.0, float("nan")])
        '[1.0, nan]'
    """
    return repr(result)


def _leaf_difference(one: Any, other: Any) -> str | None:
    if is_tensor_leaf(one) and is_tensor_leaf(other):
        return tensor_difference(one.cpu(), other.cpu())
    same = type(one) is type(other) and (one is other or result_text(one) == result_text(other))
    return None if same else f"{one!r} against {other!r}"
