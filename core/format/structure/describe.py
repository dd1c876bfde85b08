"""The structure of a component as a JSON node with numbered tensors, without pickle.

`trainfold.core.format.structure.rebuild` reads the node back.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import chain, islice
from operator import attrgetter
from typing import Any, Final, TypeAlias, final

import attrs
import numpy as np
import torch

from trainfold.core import tree
from trainfold.core.errors import UnsupportedLeaf
from trainfold.core.format.codec import DENSE, as_tensor, check_type, is_tensor_leaf
from trainfold.core.format.structure.described import Described
from trainfold.core.format.structure.places import KEYS, MAX_DEPTH
from trainfold.core.format.structure.rebuild import class_name
from trainfold.core.json_values import SCALARS, Json, encode_scalar
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.shard import Shard
from trainfold.core.leaf_path import join
from trainfold.core.printable import with_article
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.spec import leaf_spec

_STR: Final = frozenset({str})
_DICT: Final = frozenset({dict})
# in `map`, these are twice as fast as a loop
_ADDRESS, _VALUES = torch.Tensor.data_ptr, dict.values
_DTYPE, _SHAPE = map(attrgetter, ("dtype", "shape"))


Describe: TypeAlias = Callable[[tree.Tree, str], tuple[Described, dict[str, Any]]]


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
    return _Encoder(None).describe(component, name)


@final
class Describer:
    """Describes the same run repeatedly, such as at each save, and does not walk unchanged `Leaves` again.

    Parameters and slots are nearly all leaves of a state, and their names, dtypes and shapes hardly ever change. So they are only
    compared with those of the last time, and the description of them is used again. Everything else in a component is described
    each time.

    Law: it returns what `describe` returns, whatever it has described before.

    Examples:
        >>> describer = Describer()
        >>> states = [{"slots": Leaves({"w": {"momentum": torch.full((2,), value)}}), "lr": value} for value in (0.5, 0.25)]
        >>> nodes = [describer.describe(state, "optimizer")[0].node["dict"] for state in states]
        >>> nodes[0]["slots"]["leaves"] is nodes[1]["slots"]["leaves"], [node["lr"] for node in nodes]
        (True, [0.5, 0.25])
    """

    def __init__(self) -> None:
        self._outlines: dict[str, _Outline] = {}

    def describe(self, component: tree.Tree, name: str) -> tuple[Described, dict[str, Any]]:
        """As `describe`. The result shares structure with earlier results, so the caller must not change it."""
        return _Encoder(self._outlines).describe(component, name)


Signature: TypeAlias = tuple[list[str], list[int], list[torch.dtype], list[torch.Size], list[Any]]


@final
@attrs.frozen(eq=False)
class _Outline:
    """The description of `Leaves` with a certain signature."""

    signature: Signature
    node: Json
    specs: Mapping[str, LeafSpec]


class _Encoder:
    """One walk over a component: numbers its tensors and recognises the tied ones."""

    def __init__(self, outlines: dict[str, _Outline] | None) -> None:
        self.tensors: dict[str, Any] = {}
        self._outlines = outlines
        self._specs: Mapping[str, LeafSpec] = {}  # of the first tensors, if an earlier walk described them
        self._first: dict[int, tuple[int, Any]] = {}  # address -> the first tensor there, almost always the only one
        self._others: dict[int, list[tuple[int, Any]]] = {}
        # addresses and tensors from an earlier walk, not yet in `_first`
        self._unmet: tuple[list[int], list[Any]] | None = None
        self._kept_types = 0  # depth inside `Leaves`, whose owners keep their own tensor objects at a restore

    def describe(self, component: tree.Tree, name: str) -> tuple[Described, dict[str, Any]]:
        node = self.node(component, name, 0)
        known = self._specs
        specs = known if len(known) == len(self.tensors) else {**known, **self._specs_from(len(known))}
        return Described(node, specs), self.tensors

    def _specs_from(self, start: int) -> dict[str, LeafSpec]:
        pairs = ((path, leaf_spec(leaf, path)) for path, leaf in islice(self.tensors.items(), start, None))
        return {path: spec for path, spec in pairs if isinstance(spec, LeafSpec)}

    def node(self, value: Any, path: str, depth: int) -> Json:  # noqa: PLR0911 - one return for each container
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        kind = type(value)
        if value is None or kind in SCALARS:
            return encode_scalar(value, path)
        if depth > MAX_DEPTH:
            raise UnsupportedLeaf(path, expected=f"at most {MAX_DEPTH} levels", found="more", fix="flatten the tree")
        if kind in (dict, OrderedDict):
            return self._dict(value, path, depth, "dict" if kind is dict else "odict")
        if kind is Leaves:
            return {"leaves": self._leaves(value.alive(path), path, depth)}
        if kind in (list, tuple):
            if set(map(type, value)) <= _STR:  # the names of parameters: there are many
                return {kind.__name__: list(value)}
            children = [self.node(child, f"{path}[{i}]", depth + 1) for i, child in enumerate(value)]
            return {kind.__name__: children}
        if is_tensor_leaf(value):
            return self._tensor(value, path)
        level = tree.one_level(value)
        if level is None:
            return encode_scalar(value, path)
        return self._registered(value, level, path, depth)

    def _leaves(self, items: dict[str, Any], path: str, depth: int) -> Json:
        """Only the first tensors of a component can come from an earlier walk: later indices depend on the tensors before them."""
        seen = None if self._outlines is None or self.tensors else _seen(items)
        if self._outlines is None or seen is None:
            return self._kept(items, path, depth)
        leaves, addresses, signature = seen
        known = self._outlines.get(path)
        if known is None or known.signature != signature:
            node = self._kept(items, path, depth)
            known = self._outlines[path] = _Outline(signature, node, self._specs_from(0))
        else:
            self.tensors = dict(zip(known.specs, leaves, strict=True))
            self._unmet = addresses, leaves
        self._specs = known.specs
        return known.node

    def _kept(self, items: dict[str, Any], path: str, depth: int) -> Json:
        self._kept_types += 1
        try:
            return self._items(items.items(), Leaves, path, depth)
        finally:
            self._kept_types -= 1

    def _dict(self, value: Mapping[Any, Any], path: str, depth: int, tag: str) -> Json:
        if tag == "dict" and all(type(key) is str for key in value):
            return {"dict": self._items(value.items(), dict, path, depth)}
        pairs = []
        for key, child in value.items():
            place = join(path, dict, key)
            if type(key) not in KEYS:
                raise UnsupportedLeaf(place, expected="a plain key", found=repr(key), fix="use str or int keys")
            pairs.append([self.node(key, place, depth + 1), self.node(child, place, depth + 1)])
        return {"map" if tag == "dict" else "odict": pairs}

    def _items(self, items: Any, kind: type[Any], path: str, depth: int) -> Json:
        if kind is dict or kind is Leaves:
            return {key: self.node(child, f"{path}[{key!r}]", depth + 1) for key, child in items}
        return {key: self.node(child, join(path, kind, key), depth + 1) for key, child in items}

    def _registered(self, value: Any, level: tree.OneLevel, path: str, depth: int) -> Json:
        kind, entries, children = level
        if not attrs.has(kind) or not all(isinstance(entry, str) for entry in entries):
            raise UnsupportedLeaf(
                path,
                expected="dict, list, tuple, OrderedDict, or a registered attrs class",
                found=f"{kind.__module__}.{kind.__qualname__}",
                fix="hold it as one of these in the state",
            )
        fields = zip(entries, children, strict=True)
        static = {f.name: getattr(value, f.name) for f in attrs.fields(kind) if f.name not in entries and f.init}
        node: dict[str, Json] = {
            "node": class_name(kind),
            "fields": {key: self.node(child, join(path, kind, key), depth + 1) for key, child in fields},
        }
        if static:
            node["static"] = {name: self.node(held, f"{path}.{name}", depth + 1) for name, held in static.items()}
        return node

    def _tensor(self, leaf: Any, path: str) -> Json:
        if self._unmet is not None:
            addresses, tensors = self._unmet
            self._first, self._unmet = dict(zip(addresses, enumerate(tensors), strict=True)), None
        address = _address(leaf, path)
        if not self._kept_types:
            check_type(leaf, path)
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


def _seen(items: dict[str, Any]) -> tuple[list[Any], list[int], Signature] | None:
    """The leaves of plain `Leaves`, their addresses, and everything that a description says of them; None for other `Leaves`.

    `Leaves` are plain if they map text to dense tensors or shards of them, or to dicts of text to these, and no two share an address.
    """
    names, leaves = list(items), list(items.values())
    counts: list[int] = []
    if set(map(type, leaves)) == _DICT:
        counts = list(map(len, leaves))
        names += chain.from_iterable(leaves)
        leaves = list(chain.from_iterable(map(_VALUES, leaves)))
    kinds, tensors, cuts = set(map(type, leaves)), leaves, []
    if Shard in kinds:
        kinds.remove(Shard)
        cuts = [(each.shape, each.starts, each.placement) if type(each) is Shard else None for each in leaves]
        tensors = [each.tensor if type(each) is Shard else each for each in leaves]
        kinds |= set(map(type, tensors))
    if not (set(map(type, names)) <= _STR and kinds <= DENSE):
        return None
    try:
        addresses, shapes = list(map(_ADDRESS, tensors)), list(map(_SHAPE, tensors))
    except RuntimeError:  # a sparse tensor has no address, and a nested one no shape
        return None
    if cuts and 0 in addresses:  # ranks without a row are common
        addresses = [
            found or (id(leaf) if not shape.numel() else 0)
            for found, leaf, shape in zip(addresses, leaves, shapes, strict=True)
        ]
    distinct = set(addresses)
    if 0 in distinct or len(distinct) != len(tensors):
        return None
    return leaves, addresses, (names, counts, list(map(_DTYPE, tensors)), shapes, cuts)


def _address(leaf: Any, path: str) -> int:
    """The address of a leaf's values; the identity of a leaf without values."""
    try:
        dense = as_tensor(leaf, path)
        address = dense.data_ptr()
    except (RuntimeError, ValueError) as error:  # lazy parameters, and tensors inside a transform
        raise _without_memory(leaf, path, f": {str(error)[:200]}") from error
    if address == 0 and dense.numel():  # a wrapper, such as a fake one
        raise _without_memory(leaf, path, "")
    return address or id(leaf)


def _without_memory(leaf: Any, path: str, why: str) -> UnsupportedLeaf:
    return UnsupportedLeaf(
        path,
        expected="a tensor with values",
        found=f"{with_article(type(leaf).__qualname__)} without memory of its own{why}",
        fix="save outside of torch's transforms; save the tensors that a wrapper is made of; run a lazy module once before",
    )


def _same_tensor(one: Any, other: Any) -> bool:
    """Whether two leaves at one address are tied, so that they always have the same values: not views of different shapes."""
    if one is other:
        return True
    if not (type(one) is type(other) or {type(one), type(other)} <= DENSE):
        return False
    if not isinstance(one, torch.Tensor) or one.numel() == 0:
        return False
    same_memory = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
    return bool(same_memory) and one.is_conj() == other.is_conj() and one.is_neg() == other.is_neg()
