"""Kinds of JSON nodes: what each position of a structure may hold, and the first position that holds something else.

A kind is built from smaller ones, as a type hint is. Nothing is rebuilt, and no tensor byte is read. This module imports no torch.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias, final

import attrs

from trainfold.core.errors import CheckpointHostile
from trainfold.core.format.structure.places import places
from trainfold.core.json_values import SCALAR_TAGS, Json, shown
from trainfold.core.printable import with_article

_PAIRED = frozenset({"map", "odict"})


@final
@attrs.frozen
class Misfit:
    """A position of a structure whose node does not match the type hints of its class.

    Attributes:
        path: the position.
        expected: the kind that belongs there.
        found: what is there.
    """

    path: str
    expected: str
    found: str

    def below(self, place: str) -> "Misfit":
        """The same misfit, seen from the parent node."""
        return attrs.evolve(self, path=place + self.path)


@final
@attrs.frozen
class Kind:
    """The requirement of a position on its JSON node.

    Attributes:
        hint: the kind as a type hint, such as ``"Leaves[Tensor]"``; kinds with equal hints are equal.
        text: the kind in words, for messages.
        fits: whether a node is of the kind, seen from outside.
        inside: the first misfit in a node that fits; None if a node of the kind has no inside.
        is_closed: whether ``inside`` proves that no tensor is in there that the kind does not name.
    """

    hint: str
    text: str = attrs.field(eq=False)
    fits: Callable[[Json], bool] = attrs.field(eq=False, repr=False)
    inside: "Callable[[Json, Nodes], Misfit | None] | None" = attrs.field(default=None, eq=False, repr=False)
    is_closed: bool = attrs.field(default=True, eq=False)

    def misfit(self, node: Json, nodes: "Nodes") -> Misfit | None:
        """The first misfit in a node; the node itself has the path ``""``."""
        if not self.fits(node):
            return Misfit("", self.text, shown(node))
        return None if self.inside is None else self.inside(node, nodes)


@final
@attrs.frozen
class NodeKind:
    """The fields of a node class.

    Attributes:
        text: the fields in words, for messages.
        trees: the fields that are part of the tree, each with its kind.
        static: the other fields, each with its kind.
        required: the fields that have no default.
    """

    text: str
    trees: Mapping[str, Kind]
    static: Mapping[str, Kind]
    required: frozenset[str]


Nodes: TypeAlias = Mapping[str, NodeKind]
"""Name of a node class in the format -> its fields. The fields of a class that is not in here may hold anything."""


def either(*kinds: Kind) -> Kind:
    """A node of any of these kinds; the first kind that fits from outside decides."""

    def inside(node: Json, nodes: Nodes) -> Misfit | None:
        return next(kind for kind in kinds if kind.fits(node)).misfit(node, nodes)

    return Kind(
        " | ".join(kind.hint for kind in kinds),
        " or ".join(kind.text for kind in kinds),
        lambda node: any(kind.fits(node) for kind in kinds),
        inside,
        all(kind.is_closed for kind in kinds),
    )


def tuple_of(each: Kind, length: int | None = None) -> Kind:
    """A tuple of nodes of one kind.

    Args:
        each: the kind.
        length: how many there are; None for any number.
    """

    def fits(node: Json) -> bool:
        held = node.get("tuple") if type(node) is dict else None
        return type(held) is list and length in (None, len(held))

    def inside(node: Json, nodes: Nodes) -> Misfit | None:
        return _first(enumerate(node["tuple"]), each, nodes)

    hint = f"tuple[{each.hint}, {'...' if length is None else length}]"
    return Kind(hint, f"a tuple{'' if length is None else f' of {length}'}, each {each.text}", fits, inside, each.is_closed)  # fmt: skip


def leaves_of(value: Kind) -> Kind:
    """`Leaves` with values of one kind."""
    return _mapping(f"Leaves[{value.hint}]", "tensors or values by name", ("leaves",), value)


def mapping_kind(value: Kind) -> Kind:
    """A mapping of text to values of one kind."""
    return _mapping(f"Mapping[{value.hint}]", "a mapping of names", ("dict", "leaves", *sorted(_PAIRED)), value)


def node_of(name: str) -> Kind:
    """A node of one class."""
    return Kind(name, with_article(name), lambda node: type(node) is dict and node.get("node") == name, _in_node, False)  # noqa: FBT003


def fields_of(name: str, *, trees: Mapping[str, Kind], static: Mapping[str, Kind], required: Iterable[str]) -> NodeKind:
    """The fields of a node class; see `NodeKind`."""
    names = sorted({**trees, **static})
    return NodeKind(f"the fields {names} of {name}", trees, static, frozenset(required))


def _mapping(hint: str, text: str, tags: tuple[str, ...], value: Kind) -> Kind:
    def fits(node: Json) -> bool:
        return type(node) is dict and len(node) == 1 and next(iter(node)) in tags

    def inside(node: Json, nodes: Nodes) -> Misfit | None:
        ((tag, held),) = node.items()
        if tag not in _PAIRED:
            return _first(held.items(), value, nodes)
        return _first([(key, key) for key, _ in held], TEXT, nodes) or _first(held, value, nodes)

    return Kind(hint, text, fits, inside, value.is_closed)


def _first(pairs: Iterable[tuple[object, Json]], kind: Kind, nodes: Nodes) -> Misfit | None:
    fits, inside = kind.fits, kind.inside
    for key, node in pairs:  # 1e5 of them in a large model
        if not fits(node):
            return Misfit(f"[{shown(key)}]", kind.text, shown(node))
        if inside is not None and (found := inside(node, nodes)) is not None:
            return found.below(f"[{shown(key)}]")
    return None


def _in_anything(node: Json, nodes: Nodes) -> Misfit | None:
    """The first misfit below a position that may hold anything: the nodes in it are checked."""
    if type(node) is not dict or "t" in node:
        return None
    if "node" in node:
        return _in_node(node, nodes)
    ((tag, held),) = node.items()
    if tag in SCALAR_TAGS:
        return None
    if tag in _PAIRED:
        held = [*([key, key] for key, _ in held), *held]
    for key, child in held.items() if type(held) is dict else held if tag in _PAIRED else enumerate(held):
        if type(child) is dict and "t" not in child:  # scalars and tensors fit anywhere, and there are many of them
            found = _in_anything(child, nodes)
            if found is not None:
                return found.below(f"[{shown(key)}]")
    return None


def _in_node(node: Mapping[str, Json], nodes: Nodes) -> Misfit | None:
    fields, static = node["fields"], node.get("static", {})
    known = nodes.get(node["node"])
    for name, held in fields.items():
        kind = ANYTHING if known is None else known.trees.get(name)
        found = Misfit("", known.text, "another field") if kind is None and known else None
        found = found or (kind.misfit(held, nodes) if kind is not None else None)
        if found is not None:
            return found.below(f".{name}")
    for name, held in static.items():
        kind = ANYTHING if known is None else known.static.get(name)
        if kind is None:
            return Misfit(f".{name}", known.text if known else "", "another static field")
        found = _in_static(held, name, kind, nodes)
        if found is not None:
            return found
    if known is not None and not known.required <= fields.keys() | static.keys():
        return Misfit("", known.text, shown(sorted({*fields, *static})))
    return None


def _in_static(node: Json, name: str, kind: Kind, nodes: Nodes) -> Misfit | None:
    """The misfit of a static field that holds a tensor, or None. The field is walked if its kind does not rule tensors out."""
    if not kind.is_closed:
        try:
            tensor = next((leaf for leaf in places(node, f".{name}") if leaf.tensor is not None), None)
        except CheckpointHostile as error:
            return Misfit(error.where, str(error.expected), str(error.found))
        if tensor is not None:
            return Misfit(tensor.path, "values that are not tensors", "a tensor")
    found = kind.misfit(node, nodes)
    return None if found is None else found.below(f".{name}")


def _is_int(node: Json) -> bool:
    return type(node) is int or (type(node) is dict and "int" in node)


def _is_tensor(node: Json) -> bool:
    return type(node) is dict and "t" in node and "as" not in node


ANYTHING = Kind("Any", "anything", lambda _node: True, _in_anything, is_closed=False)
TEXT = Kind("str", "text", lambda node: type(node) is str)
INT = Kind("int", "an int", _is_int)
BOOL = Kind("bool", "a bool", lambda node: type(node) is bool)
NONE = Kind("None", "None", lambda node: node is None)
TENSOR = Kind("Tensor", "a tensor", _is_tensor)
