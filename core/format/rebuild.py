"""The structure codec: a JSON node with numbered tensors as a component again, without pickle (U01).

The other way is `trainfold.core.format.describe.describe`.

Containers carry a tag, so that tuple and list, int and string keys, and trainfold's own nodes come back as they were.
A tensor stands as ``{"t": index}`` into the component's tensor table; tied tensors share an index (B19). Decoding
creates only plain containers and node classes that are registered already: a checkpoint cannot name code to import.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import attrs

from trainfold.core import tree
from trainfold.core.data.cursor import DataCursor
from trainfold.core.data.eval_cursor import DistributedEvalCursor
from trainfold.core.errors import CheckpointHostile, UnsupportedLeaf
from trainfold.core.evaluate.suite import Tally
from trainfold.core.json_values import SCALAR_TAGS, Json, decode_scalar, shown
from trainfold.core.metrics.nodes import ACCUMULATORS
from trainfold.core.printable import printable
from trainfold.core.rng import Key
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import TrainState

MAX_DEPTH = 64
KEYS = frozenset({tuple, str, int, bool, float, bytes, type(None)})  # what keys of a dict may be
# named here so that they are registered wherever a checkpoint is read
OWN_NODES = (TrainState, Key, DataCursor, DistributedEvalCursor, Tally, *ACCUMULATORS)


class Leaf(NamedTuple):
    """A place in a decoded structure: where it is and what stands there.

    Attributes:
        path: the leaf path.
        tensor: the tensor's index, or None for a scalar.
        value: the scalar, or None for a tensor.
        as_numpy: whether the tensor stands there as a numpy array.
    """

    path: str
    tensor: int | None
    value: Any = None
    as_numpy: bool = False


def rebuild(node: Json, name: str, tensor: Callable[[int, bool], Any]) -> tree.Tree:
    """Build a component from its node.

    Args:
        node: the JSON structure.
        name: the component's name.
        tensor: called with (index, as_numpy) for each place of a tensor; called twice with one index for a tied one.

    Raises:
        CheckpointHostile: for a node that no trainfold writes.
        UnsupportedLeaf: for a node class that is not registered in this process.

    Examples:
        >>> rebuild({"dict": {"w": {"t": 0}, "n": {"tuple": [1, None]}}}, "ema", lambda index, as_numpy: f"tensor {index}")
        {'w': 'tensor 0', 'n': (1, None)}
    """
    return _Decoder(lambda leaf, as_numpy: leaf.value if leaf.tensor is None else tensor(leaf.tensor, as_numpy)).node(
        node, name, 0
    )


def places(node: Json, name: str) -> list[Leaf]:
    """Every leaf of a node with its path, in the node's order; nothing is built that a user could see.

    Examples:
        >>> [(leaf.path, leaf.tensor, leaf.value) for leaf in places({"list": [{"t": 0}, 5]}, "extra")]
        [('extra[0]', 0, None), ('extra[1]', None, 5)]
    """
    found: list[Leaf] = []
    _Decoder(lambda leaf, _as_numpy: found.append(leaf), build=False).node(node, name, 0)
    return found


class _Decoder:
    """One walk over a node; with ``build=False`` it only visits, so that unknown classes can be inspected."""

    def __init__(self, visit: Callable[[Leaf, bool], Any], *, build: bool = True) -> None:
        self._visit = visit
        self._build = build

    def node(self, node: Json, path: str, depth: int) -> Any:  # noqa: PLR0911, C901 - one return for each tag
        if depth > MAX_DEPTH:
            raise _hostile(path, f"at most {MAX_DEPTH} levels", "more")
        if not isinstance(node, dict):
            return self._visit(Leaf(path, None, decode_scalar(node, path)), False)  # noqa: FBT003
        tag = next(iter(node), None)
        if tag == "t":
            index = node["t"]
            if type(index) is not int or index < 0 or set(node) - {"t", "as"} or node.get("as", "numpy") != "numpy":
                raise _hostile(path, "a tensor's index", shown(node))
            return self._visit(Leaf(path, index, None, "as" in node), "as" in node)
        if tag == "node":
            return self._registered(node, path, depth)
        if len(node) != 1 or tag is None:
            raise _hostile(path, "one tag", shown(node))
        held = node[tag]
        if tag in SCALAR_TAGS:
            return self._visit(Leaf(path, None, decode_scalar(node, path)), False)  # noqa: FBT003
        if tag in ("dict", "leaves") and isinstance(held, dict):
            items = {key: self.node(child, f"{path}[{key!r}]", depth + 1) for key, child in held.items()}
            return Leaves(items) if tag == "leaves" else items
        if tag in ("list", "tuple") and isinstance(held, list):
            children = [self.node(child, f"{path}[{i}]", depth + 1) for i, child in enumerate(held)]
            return tuple(children) if tag == "tuple" else children
        if tag in ("map", "odict") and isinstance(held, list):
            return self._pairs(held, path, depth, dict if tag == "map" else OrderedDict)
        raise _hostile(path, "a known tag", shown(tag))

    def _pairs(self, held: list[Any], path: str, depth: int, kind: type[Any]) -> Any:
        built = kind()
        for pair in held:
            if not (isinstance(pair, list) and len(pair) == 2):
                raise _hostile(path, "pairs of key and value", shown(pair))
            try:
                key = _Decoder(_plain).node(pair[0], path, depth + 1)
                twice = key in built
            except TypeError:
                raise _hostile(path, "a key that can be hashed", shown(pair[0])) from None
            if type(key) not in KEYS:
                raise _hostile(path, "a plain key", shown(key))
            if twice:
                raise _hostile(path, "each key once", shown(key))
            built[key] = self.node(pair[1], tree.join(path, dict, key), depth + 1)
        return built

    def _registered(self, node: Mapping[str, Json], path: str, depth: int) -> Any:
        name, fields, static = node["node"], node.get("fields"), node.get("static", {})
        named = isinstance(name, str) and len(node) == 2 + ("static" in node)
        if not (named and isinstance(fields, dict) and isinstance(static, dict) and fields.keys().isdisjoint(static)):
            raise _hostile(path, "a node with fields", shown(node))
        values = {key: self.node(child, f"{path}.{key}", depth + 1) for key, child in fields.items()}
        if not self._build:
            return None
        quiet = _Decoder(_plain)
        held = {key: quiet.node(child, f"{path}.{key}", depth + 1) for key, child in static.items()}
        kind = registered_classes().get(name)
        if kind is None:
            raise UnsupportedLeaf(
                path,
                expected="a registered node class",
                found=shown(name),
                fix="import the module that defines the class",
            )
        names = {field.name for field in attrs.fields(kind) if field.init}
        if not set(values) | set(held) <= names:
            raise _hostile(path, f"the fields {sorted(names)}", sorted({*values, *held}))
        try:
            return kind(**values, **held)
        except Exception as error:  # the class is a user's, and its checks may raise anything
            raise _hostile(path, f"the fields {sorted(names)} with values that {name} takes", shown(error)) from error


def _plain(leaf: Leaf, _as_numpy: bool) -> Any:  # noqa: FBT001 - a visitor of _Decoder
    """The value of a leaf in a place that holds no tensors: a key of a dict, a static field."""
    if leaf.tensor is not None:
        raise _hostile(leaf.path, "a value that is no tensor", "a tensor")
    return leaf.value


def class_name(kind: type[Any]) -> str:
    """The name of a node class in the format; trainfold's own have no module in it, so that they can move."""
    module = "trainfold" if kind.__module__.startswith("trainfold.") else kind.__module__
    return f"{module}.{kind.__qualname__}"


def registered_classes() -> dict[str, type[Any]]:
    """Name in the format -> class, for every node class of this process that a checkpoint may name."""
    return {class_name(kind): kind for kind in tree.registered_classes() if attrs.has(kind)}


def _hostile(path: str, expected: str, found: object) -> CheckpointHostile:
    return CheckpointHostile(
        printable(path), expected=expected, found=found, fix="do not use this checkpoint; fall back to an older one"
    )
