"""Cuts batches along dimension 0 and copies them, for the law and the contract of metrics."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument

__all__ = ["OutputsOf", "cuts_of", "fresh", "need_rows", "row_count", "taken"]

OutputsOf: TypeAlias = Callable[[Any], Any]

_NO_SIZE = (type(None), str, bytes)  # neither a count nor a total, so that a part of a batch has the same


def row_count(sample: Any) -> int | None:
    """How many rows a sample has; None if it cannot be cut.

    A number, or a tensor without dimensions, belongs to the batch as a whole: its value for a part is not known.

    Examples:
        >>> row_count({"logits": torch.zeros(4, 3), "targets": [torch.zeros(4)]}), row_count((torch.zeros(4), 4))
        (4, None)
    """
    sizes = {
        leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.dim() else None
        for leaf in tree.leaves(sample)
        if not isinstance(leaf, _NO_SIZE)
    }
    return sizes.pop() if len(sizes) == 1 else None


def need_rows(where: str, samples: list[Any]) -> None:
    """Refuse samples if none has two rows to cut between, because a law about parts would hold for anything.

    Raises:
        InvalidArgument: describing each of them, and how to pass samples that can be cut.
    """
    if not any((row_count(sample) or 0) > 1 for sample in samples):
        raise InvalidArgument(
            where,
            expected="two rows or more that can be cut: tensors with the same size in dimension 0, also in tuples, lists and dicts",
            found="; ".join(map(_described, samples)),
            fix="pass torch.ones(n) for a count of n, and rows for a total; or values that can be cut, with outputs_of to make outputs of them",
        )


def taken(sample: Any, rows: slice | torch.Tensor) -> Any:
    """Some rows of a sample.

    Examples:
        >>> taken({"x": torch.arange(4)}, slice(1, 3))
        {'x': tensor([1, 2])}
    """
    return tree.map_tensors(
        lambda tensor: tensor[rows.to(tensor.device) if isinstance(rows, torch.Tensor) else rows], sample
    )


def cuts_of(sample: Any) -> Iterator[tuple[int, Any, Any]]:
    """A sample cut in two at some places, if it can be cut; a part may be empty."""
    size = row_count(sample)
    if size is not None:
        for cut in sorted({0, 1, size // 2, size - 1} & set(range(size + 1))):
            yield cut, taken(sample, slice(cut)), taken(sample, slice(cut, None))


def fresh(sample: Any) -> Any:
    """A copy of a sample in new memory, without a graph.

    Examples:
        >>> weights = torch.ones(2, requires_grad=True)
        >>> fresh((2 * weights, "a"))
        (tensor([2., 2.]), 'a')
    """
    return tree.map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf), sample
    )


def _described(sample: Any) -> str:
    parts = (
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if isinstance(leaf, torch.Tensor)
        else f"{type(leaf).__name__} {leaf!r}"[:40]
        for leaf in tree.leaves(sample)
    )
    return f"({', '.join(parts)})"
