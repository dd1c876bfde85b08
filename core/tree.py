"""The trees of state. This is the only module that imports optree, so that it can fix the namespace and the rule for None.

None is a leaf, so an empty slot of an optimizer is kept. Dict keys are visited in sorted order if they can be sorted, otherwise in
the order of insertion; a rebuilt tree has its dicts in their original order.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import optree
import torch
from optree.integrations.attrs import register_node as _register_node

from trainfold.core.leaf_path import join

NAMESPACE = "trainfold"
Tree: TypeAlias = Any
Spec: TypeAlias = optree.PyTreeSpec
OneLevel: TypeAlias = tuple[type[Any], tuple[Any, ...], tuple[Any, ...]]

register_node = _register_node


def leaves(tree: Tree) -> list[Any]:
    """The leaves of a tree, in tree order.

    Examples:
        >>> leaves({"b": [1, None], "a": 2})
        [2, 1, None]
    """
    return optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE)


def flatten(tree: Tree, *, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Spec]:
    """Split a tree into its leaves and its structure; a node for which ``is_leaf`` returns True is a leaf too.

    Examples:
        >>> flat, spec = flatten({"a": (1, 2)})
        >>> flat, unflatten(spec, [3, 4])
        ([1, 2], {'a': (3, 4)})
    """
    return optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)


def unflatten(spec: Spec, flat: list[Any]) -> Tree:
    """Rebuild a tree from its structure and its leaves."""
    return optree.tree_unflatten(spec, flat)


def map(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:  # noqa: A001
    """Apply a function to each leaf (and the leaves at the same place of other trees); the structure is kept.

    Examples:
        >>> map(lambda x: x + 1, {"a": 1, "b": (2,)})
        {'a': 2, 'b': (3,)}
    """
    return optree.tree_map(function, tree, *rest, none_is_leaf=True, namespace=NAMESPACE)


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """Apply a function to each tensor of a tree; other leaves are kept."""
    return map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def structure(tree: Tree) -> Spec:
    """The structure of a tree, comparable with ``==``."""
    return optree.tree_structure(tree, none_is_leaf=True, namespace=NAMESPACE)


def one_level(tree: Tree) -> OneLevel | None:
    """Split one node into (type, entries, children), or None for a leaf.

    An entry is a key, an index, or an attribute's name.

    Examples:
        >>> one_level({"a": 1})
        (<class 'dict'>, ('a',), (1,))
        >>> one_level(3) is None
        True
    """
    if tree is None or optree.tree_is_leaf(tree, none_is_leaf=True, namespace=NAMESPACE):
        return None
    level = optree.tree_flatten_one_level(tree, none_is_leaf=True, namespace=NAMESPACE)
    return level.type, tuple(level.entries), tuple(level.children)


def paths(tree: Tree, prefix: str = "") -> list[str]:
    """The text path of every leaf, in tree order: ``model.params['h.0.attn.weight']``.

    Examples:
        >>> paths({"a": [1, 2]}, prefix="extra")
        ["extra['a'][0]", "extra['a'][1]"]
    """
    found: list[str] = []
    _collect(tree, prefix, found)
    return found


def _collect(tree: Tree, prefix: str, found: list[str]) -> None:
    level = one_level(tree)
    if level is None:
        found.append(prefix)
        return
    kind, entries, children = level
    for entry, child in zip(entries, children, strict=True):
        _collect(child, join(prefix, kind, entry), found)


def named_leaves(tree: Tree, prefix: str = "") -> list[tuple[str, Any]]:
    """Each leaf with its path, in tree order."""
    return list(zip(paths(tree, prefix), leaves(tree), strict=True))


def registered_classes() -> list[type[Any]]:
    """The node classes in trainfold's namespace and in optree's global one."""
    known: Any = optree.register_pytree_node
    return [*known.get(namespace=NAMESPACE)]
