"""The walk over a JSON node: every leaf with its path, and the containers around the leaves if the caller builds them.

Containers carry a tag, so that tuple and list, int and string keys, and trainfold's own nodes come back as they were. A tensor stands
as ``{"t": index}`` into the component's tensor table; tied tensors share an index. This module imports no torch: commands that read a
run need it.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, final

from trainfold.core.errors import CheckpointHostile
from trainfold.core.json_values import SCALAR_TAGS, Json, decode_scalar, shown
from trainfold.core.leaf_path import join
from trainfold.core.printable import printable

MAX_DEPTH = 64
KEYS = frozenset({tuple, str, int, bool, float, bytes, type(None)})  # what keys of a dict may be


class Leaf(NamedTuple):
    """A leaf of a decoded structure: its path and its content.

    Attributes:
        path: the leaf path.
        tensor: the tensor's index, or None for a scalar.
        value: the scalar, or None for a tensor.
        as_numpy: whether the tensor is a numpy array there.
    """

    path: str
    tensor: int | None
    value: Any = None
    as_numpy: bool = False


def places(node: Json, name: str) -> list[Leaf]:
    """Every leaf of a node with its path, in the node's order.

    Node classes that this process does not know can be walked too: nothing is built, except a key of a dict.

    Raises:
        CheckpointHostile: for a node that no trainfold writes.

    Examples:
        >>> [(leaf.path, leaf.tensor, leaf.value) for leaf in places({"list": [{"t": 0}, 5]}, "extra")]
        [('extra[0]', 0, None), ('extra[1]', None, 5)]
    """
    found: list[Leaf] = []
    Walk(found.append, make=None).node(node, name, 0)
    return found


_new: Final = tuple.__new__  # of a leaf, in a third of the time
Make: TypeAlias = Callable[[str, Mapping[str, Any], Mapping[str, Any], str], Any]


@final
class Walk:
    """One walk over a node.

    Args:
        visit: called with each leaf; what it returns stands in the containers.
        make: makes a node of its class's name, the fields that are part of the tree, the other fields, and its path. Without it the
            walk only visits.
        leaves: makes `Leaves` of a dict.
    """

    def __init__(
        self,
        visit: Callable[[Leaf], Any],
        *,
        make: Make | None,
        leaves: Callable[[dict[str, Any]], Any] = dict,
    ) -> None:
        self._visit = visit
        self._make, self._leaves = make, leaves

    def node(self, node: Json, path: str, depth: int) -> Any:  # noqa: PLR0911, C901 - one return for each tag
        """Walk over a node, and return the value that it represents.

        Raises:
            CheckpointHostile: for a node that no trainfold writes.
            UnsupportedLeaf: for a node class that is not registered in this process, if it is to be built.
        """
        if depth > MAX_DEPTH:
            raise hostile_node(path, f"at most {MAX_DEPTH} levels", "more")
        if not isinstance(node, dict):
            return self._visit(Leaf(path, None, decode_scalar(node, path)))
        tag = next(iter(node), None)
        if tag == "t":
            index = node["t"]
            if len(node) == 1 and type(index) is int and index >= 0:  # nearly all of 1e5 leaves
                return self._visit(_new(Leaf, (path, index, None, False)))
            if type(index) is not int or index < 0 or set(node) - {"t", "as"} or node.get("as", "numpy") != "numpy":
                raise hostile_node(path, "a tensor's index", shown(node))
            return self._visit(Leaf(path, index, None, "as" in node))
        if tag == "node":
            return self._registered(node, path, depth)
        if len(node) != 1 or tag is None:
            raise hostile_node(path, "one tag", shown(node))
        held = node[tag]
        if tag in SCALAR_TAGS:
            return self._visit(Leaf(path, None, decode_scalar(node, path)))
        if tag in ("dict", "leaves") and isinstance(held, dict):
            items = {key: self.node(child, f"{path}[{key!r}]", depth + 1) for key, child in held.items()}
            return self._leaves(items) if tag == "leaves" else items
        if tag in ("list", "tuple") and isinstance(held, list):
            children = [self.node(child, f"{path}[{i}]", depth + 1) for i, child in enumerate(held)]
            return tuple(children) if tag == "tuple" else children
        if tag in ("map", "odict") and isinstance(held, list):
            return self._pairs(held, path, depth, dict if tag == "map" else OrderedDict)
        raise hostile_node(path, "a known tag", shown(tag))

    def _pairs(self, held: list[Any], path: str, depth: int, kind: type[Any]) -> Any:
        built = kind()
        for pair in held:
            if not (isinstance(pair, list) and len(pair) == 2):
                raise hostile_node(path, "pairs of key and value", shown(pair))
            try:
                key = Walk(_plain, make=_no_key).node(pair[0], path, depth + 1)
                twice = key in built
            except TypeError:
                raise hostile_node(path, "a key that can be hashed", shown(pair[0])) from None
            if type(key) not in KEYS:
                raise hostile_node(path, "a plain key", shown(key))
            if twice:
                raise hostile_node(path, "each key once", shown(key))
            built[key] = self.node(pair[1], join(path, dict, key), depth + 1)
        return built

    def _registered(self, node: Mapping[str, Json], path: str, depth: int) -> Any:
        name, fields, static = node["node"], node.get("fields"), node.get("static", {})
        named = isinstance(name, str) and len(node) == 2 + ("static" in node)
        if not (named and isinstance(fields, dict) and isinstance(static, dict) and fields.keys().isdisjoint(static)):
            raise hostile_node(path, "a node with fields", shown(node))
        values = {key: self.node(child, f"{path}.{key}", depth + 1) for key, child in fields.items()}
        if self._make is None:
            return None
        plain = Walk(_plain, make=self._make, leaves=self._leaves)
        held = {key: plain.node(child, f"{path}.{key}", depth + 1) for key, child in static.items()}
        return self._make(name, values, held, path)


def _plain(leaf: Leaf) -> Any:
    """The value of a leaf in a place that holds no tensors: a key of a dict, a static field."""
    if leaf.tensor is not None:
        raise hostile_node(leaf.path, "a value that is not a tensor", "a tensor")
    return leaf.value


def _no_key(name: str, _fields: Mapping[str, Any], _static: Mapping[str, Any], path: str) -> Any:
    """Refuse a node where a key of a dict should be."""
    raise hostile_node(path, "a plain key", shown(name))


def hostile_node(path: str, expected: str, found: object) -> CheckpointHostile:
    """The error for a node that no version of trainfold writes."""
    return CheckpointHostile(
        printable(path), expected=expected, found=found, fix="do not use this checkpoint; fall back to an older one"
    )
