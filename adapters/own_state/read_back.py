"""`first_unequal`: checks a restore: finds the first bitwise difference between two captures of one object."""

from collections import Counter
from typing import Any, TypeAlias

import numpy as np
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidState
from trainfold.core.format.codec import as_tensor, is_tensor_leaf
from trainfold.core.json_values import shown
from trainfold.core.leaf_path import join
from trainfold.core.printable import with_article
from trainfold.core.tensor_memory import byte_view

Difference: TypeAlias = tuple[str, str, str]


def first_unequal(saved: Any, found: Any, path: str) -> Difference | None:
    """Return the first leaf that differs between two trees, with both values; None if all are equal to the bit.

    Examples:
        >>> first_unequal({"a": [1, 2.0]}, {"a": [1, 2]}, "extra")
        ("extra['a'][1]", '2.0', '2')
        >>> first_unequal({"a": torch.ones(2)}, {"a": torch.ones(2)}, "extra") is None
        True
    """
    if is_tensor_leaf(saved) or is_tensor_leaf(found):
        return None if _same_tensor(saved, found) else (path, _text_of(saved), _text_of(found))
    one, other = tree.one_level(saved), tree.one_level(found)
    if one is None or other is None:
        same = (
            one is other and type(saved) is type(found) and (repr(saved) == repr(found) or _same_counts(saved, found))
        )
        return None if same else (path, _text_of(saved), _text_of(found))
    kind, entries, children = one
    theirs = dict(zip(other[1], other[2], strict=True))
    if kind is not other[0] or set(entries) != set(theirs):
        return path, _keys(one), _keys(other)
    for entry, child in zip(entries, children, strict=True):
        difference = first_unequal(child, theirs[entry], join(path, kind, entry))
        if difference is not None:
            return difference
    return None


def unlike_saved(difference: Difference, *, after: str, fix: str) -> InvalidState:
    """The error for an object that does not return what was written into it."""
    where, was, now = difference
    return InvalidState(where, expected=f"{was}, as it was saved", found=f"{now}, after {after}", fix=fix)


def _same_counts(saved: Any, found: Any) -> bool:
    return isinstance(saved, Counter) and bool(saved == found)  # their keys may be in another order


def _same_tensor(saved: Any, found: Any) -> bool:
    if not (is_tensor_leaf(saved) and is_tensor_leaf(found)) or isinstance(saved, np.ndarray) != isinstance(
        found, np.ndarray
    ):
        return False
    one, other = as_tensor(saved, "saved"), as_tensor(found, "found")
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(torch.equal(byte_view(one).cpu(), byte_view(other).cpu()))


def _text_of(value: Any) -> str:
    if is_tensor_leaf(value):
        dense = as_tensor(value, "leaf")
        return f"{dense.dtype}{list(dense.shape)} with the values {shown(dense.flatten()[:4].tolist())}"
    return shown(value)


def _keys(level: tree.OneLevel) -> str:
    kind, entries, _ = level
    return f"{with_article(kind.__name__)} of {shown(sorted(map(str, entries)))}"
