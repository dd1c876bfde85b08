"""The structure codec: a component as a JSON node with numbered tensors, and back, without pickle (U01).

Containers carry a tag, so that tuple and list, int and string keys, and trainfold's own nodes come back as they were.
A tensor stands as ``{"t": index}`` into the component's tensor table; tied tensors share an index (B19). Decoding
creates only plain containers and node classes that are registered already: a checkpoint cannot name code to import.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import attrs
import numpy as np
import torch

from trainfold.core import tree
from trainfold.core.codec import as_tensor, is_tensor_leaf
from trainfold.core.collecting import without_collecting
from trainfold.core.cursor import DataCursor
from trainfold.core.errors import CheckpointHostile, UnsupportedLeaf
from trainfold.core.eval_cursor import DistributedEvalCursor
from trainfold.core.leaves import Leaves
from trainfold.core.metrics.nodes import ACCUMULATORS
from trainfold.core.rng import Key
from trainfold.core.scalars import SCALAR_TAGS, Json, decode_scalar, encode_scalar, shown
from trainfold.core.spec import LeafSpec, leaf_spec
from trainfold.core.state import TrainState
from trainfold.core.suite import Tally

MAX_DEPTH = 64
_KEYS = frozenset({tuple, str, int, bool, float, bytes, type(None)})  # what keys of a dict may be
# named here so that they are registered wherever a checkpoint is read
OWN_NODES = (TrainState, Key, DataCursor, DistributedEvalCursor, Tally, *ACCUMULATORS)


@final
@attrs.frozen
class Described:
    """A component without its values: what is gathered from the ranks, planned with, and written in the manifest.

    Attributes:
        node: the JSON structure, scalars included.
        tensors: path -> spec of each stored tensor, in the order of their indices; a tied tensor has its first path.
    """

    node: Json
    tensors: Mapping[str, LeafSpec]


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


@without_collecting
def describe(component: tree.Tree, name: str) -> tuple[Described, dict[str, Any]]:
    """Split a component into its description and its tensors.

    Args:
        component: any tree of leaves that the format can hold.
        name: the component's name, the root of its leaf paths.

    Returns:
        The description, and path -> tensor leaf (a tensor, a `Shard` or an array) for each stored tensor.

    Raises:
        UnsupportedLeaf: naming the leaf, for one that would need pickle.

    Examples:
        >>> described, tensors = describe({"w": torch.zeros(2), "n": (1, None)}, "ema")
        >>> described.node
        {'dict': {'w': {'t': 0}, 'n': {'tuple': [1, None]}}}
        >>> list(tensors)
        ["ema['w']"]
    """
    encoder = _Encoder()
    node = encoder.node(component, name, 0)
    specs = {path: leaf_spec(leaf, path) for path, leaf in encoder.tensors.items()}
    return Described(node, {path: spec for path, spec in specs.items() if isinstance(spec, LeafSpec)}), encoder.tensors


class _Encoder:
    """One walk over a component: numbers its tensors and recognises the tied ones."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self._first: dict[int, tuple[int, Any]] = {}  # address -> the first tensor there, almost always the only one
        self._others: dict[int, list[tuple[int, Any]]] = {}

    def node(self, value: Any, path: str, depth: int) -> Json:  # noqa: PLR0911 - one return for each container
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        kind = type(value)
        if kind in (int, str, float, bool):
            return encode_scalar(value, path)
        if depth > MAX_DEPTH:
            raise UnsupportedLeaf(path, expected=f"at most {MAX_DEPTH} levels", found="more", mend="flatten the tree")
        if kind in (dict, OrderedDict):
            return self._dict(value, path, depth, "dict" if kind is dict else "odict")
        if kind is Leaves:
            return {"leaves": self._items(value.alive(path).items(), Leaves, path, depth)}
        if kind in (list, tuple):
            children = [self.node(child, f"{path}[{i}]", depth + 1) for i, child in enumerate(value)]
            return {kind.__name__: children}
        if is_tensor_leaf(value):
            return self._tensor(value, path)
        level = tree.one_level(value)
        if level is None:
            return encode_scalar(value, path)
        return self._registered(value, level, path, depth)

    def _dict(self, value: Mapping[Any, Any], path: str, depth: int, tag: str) -> Json:
        if tag == "dict" and all(type(key) is str for key in value):
            return {"dict": self._items(value.items(), dict, path, depth)}
        pairs = []
        for key, child in value.items():
            place = tree.join(path, dict, key)
            if type(key) not in _KEYS:
                raise UnsupportedLeaf(place, expected="a plain key", found=repr(key), mend="use str or int keys")
            pairs.append([self.node(key, place, depth + 1), self.node(child, place, depth + 1)])
        return {"map" if tag == "dict" else "odict": pairs}

    def _items(self, items: Any, kind: type[Any], path: str, depth: int) -> Json:
        if kind is dict or kind is Leaves:
            return {key: self.node(child, f"{path}[{key!r}]", depth + 1) for key, child in items}
        return {key: self.node(child, tree.join(path, kind, key), depth + 1) for key, child in items}

    def _registered(self, value: Any, level: tree.OneLevel, path: str, depth: int) -> Json:
        kind, entries, children = level
        if not attrs.has(kind) or not all(isinstance(entry, str) for entry in entries):
            raise UnsupportedLeaf(
                path,
                expected="dict, list, tuple, OrderedDict, or a registered attrs class",
                found=f"{kind.__module__}.{kind.__qualname__}",
                mend="hold it as one of these in the state",
            )
        fields = zip(entries, children, strict=True)
        static = {f.name: getattr(value, f.name) for f in attrs.fields(kind) if f.name not in entries and f.init}
        node: dict[str, Json] = {
            "node": class_name(kind),
            "fields": {key: self.node(child, tree.join(path, kind, key), depth + 1) for key, child in fields},
        }
        if static:
            node["static"] = {name: self.node(held, f"{path}.{name}", depth + 1) for name, held in static.items()}
        return node

    def _tensor(self, leaf: Any, path: str) -> Json:
        address = as_tensor(leaf, path).data_ptr() or id(leaf)
        index = len(self.tensors)
        first = self._first.setdefault(address, (index, leaf))
        if first[1] is not leaf:
            others = self._others.setdefault(address, [])
            index = next((i for i, other in (first, *others) if _same_tensor(leaf, other)), index)
            others.append((index, leaf))
        else:
            index = first[0]
        if index == len(self.tensors):
            self.tensors[path] = leaf
        return {"t": index, "as": "numpy"} if isinstance(leaf, np.ndarray) else {"t": index}


def _same_tensor(one: Any, other: Any) -> bool:
    """Whether two leaves at one address are the same values for good: a tie, not a view of another shape."""
    if one is other:
        return True
    if type(one) is not type(other) or not isinstance(one, torch.Tensor) or one.numel() == 0:
        return False
    same_memory = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
    return bool(same_memory) and one.is_conj() == other.is_conj() and one.is_neg() == other.is_neg()


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
            if type(key) not in _KEYS:
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
                mend="import the module that defines the class",
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
        path, expected=expected, found=found, mend="do not use this checkpoint; fall back to an older one"
    )
