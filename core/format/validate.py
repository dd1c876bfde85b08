"""What may stand in the fields of trainfold's own nodes, derived from the types of their classes (U05).

The structure codec proves that a node is well formed; this proves that it is the node that it says it is: a parameter's
name is text, masters are tensors by name, a counter is an int. Nothing is built, and no tensor byte is read.
"""

import types
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Union, final, get_args, get_origin, get_type_hints

import attrs
import torch

from trainfold.core.errors import CheckpointHostile, InvalidState
from trainfold.core.format.rebuild import class_name, places, registered_classes
from trainfold.core.json_values import SCALAR_TAGS, Json, shown
from trainfold.core.state.components import BUILTIN_COMPONENTS
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import TrainState

_PAIRED = frozenset({"map", "odict"})


@final
@attrs.frozen
class Misfit:
    """A place of a structure that holds something else than its class says.

    Attributes:
        path: the place.
        expected: the kind that belongs there.
        found: what is there.
    """

    path: str
    expected: str
    found: str

    def below(self, place: str) -> "Misfit":
        """The same misfit as its parent sees it."""
        return attrs.evolve(self, path=place + self.path)


@final
@attrs.frozen
class _Kind:
    """What a type hint asks of a JSON node.

    Attributes:
        text: the kind in words.
        fits: whether a node is of the kind, seen from outside.
        inside: the first misfit in a node that is; None where there is no inside.
        is_closed: whether the hint says all of what is inside, so that nothing else needs to look there.
    """

    text: str
    fits: Callable[[Json], bool]
    inside: Callable[[Json], Misfit | None] | None = None
    is_closed: bool = True

    def misfit(self, node: Json) -> Misfit | None:
        if not self.fits(node):
            return Misfit("", self.text, shown(node))
        return None if self.inside is None else self.inside(node)


def misfit_of(node: Json, name: str) -> Misfit | None:
    """The first place of a component's structure that does not hold what its class says, or None.

    Args:
        node: the structure; well formed, as `trainfold.core.format.rebuild.places` proves.
        name: the component.

    Examples:
        >>> node = {"node": "trainfold.Progress", "fields": {"step": "three"}}
        >>> misfit_of(node, "trainer")
        Misfit(path='trainer.step', expected='an int', found="'three'")
        >>> misfit_of({"list": [node]}, "notes").path
        'notes[0].step'
    """
    found = _component_kind(name).misfit(node)
    return None if found is None else found.below(name)


def check_kinds(node: Json, name: str) -> None:
    """Check a component before it is saved: what is written must be what a reader will accept.

    Raises:
        InvalidState: naming the place.
    """
    misfit = misfit_of(node, name)
    if misfit is not None:
        raise InvalidState(
            f"state.{misfit.path}",
            expected=misfit.expected,
            found=misfit.found,
            fix="build this part as its class says; what is your own goes into `extra`",
        )


@cache
def _component_kind(name: str) -> _Kind:
    """What `TrainState` says of a component; a user's own may be anything."""
    if name not in BUILTIN_COMPONENTS:
        return _ANYTHING
    hint = get_type_hints(TrainState)[name]
    present = [_kind_of(each) for each in get_args(hint) or (hint,) if each is not types.NoneType]
    return _either(present)


def _kind_of(hint: Any) -> _Kind:
    """The kind of a type hint; the hints that the node classes use are known, and a new one must be added here."""
    plain = _PLAIN.get(hint)
    if plain is not None:
        return plain
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _either([_kind_of(each) for each in arguments])
    if origin is tuple:
        return _tuple(arguments)
    if origin is Leaves:
        return _mapping("tensors or values by name", ("leaves",), _kind_of(arguments[0]))
    if origin is Mapping and arguments[0] is str:
        return _mapping("a mapping of names", ("dict", "leaves", *sorted(_PAIRED)), _kind_of(arguments[1]))
    if attrs.has(hint):
        name = class_name(hint)
        return _Kind(f"a {name}", lambda node: type(node) is dict and node.get("node") == name, _in_node, False)  # noqa: FBT003
    raise TypeError(f"no kind for the type hint {hint!r}")


def _either(kinds: list[_Kind]) -> _Kind:
    if len(kinds) == 1:
        return kinds[0]

    def inside(node: Json) -> Misfit | None:
        return next(kind for kind in kinds if kind.fits(node)).misfit(node)

    return _Kind(
        " or ".join(kind.text for kind in kinds),
        lambda node: any(kind.fits(node) for kind in kinds),
        inside,
        all(kind.is_closed for kind in kinds),
    )


def _tuple(arguments: tuple[Any, ...]) -> _Kind:
    each = _kind_of(arguments[0])
    length = None if arguments[-1] is Ellipsis else len(arguments)
    assert length is None or set(arguments) == {arguments[0]}, "tuples of one type are all that there are"

    def fits(node: Json) -> bool:
        held = node.get("tuple") if type(node) is dict else None
        return type(held) is list and length in (None, len(held))

    def inside(node: Json) -> Misfit | None:
        return _first(enumerate(node["tuple"]), each)

    return _Kind(f"a tuple{'' if length is None else f' of {length}'}, each {each.text}", fits, inside, each.is_closed)


def _mapping(text: str, tags: tuple[str, ...], value: _Kind) -> _Kind:
    def fits(node: Json) -> bool:
        return type(node) is dict and len(node) == 1 and next(iter(node)) in tags

    def inside(node: Json) -> Misfit | None:
        ((tag, held),) = node.items()
        if tag not in _PAIRED:
            return _first(held.items(), value)
        return _first([(key, key) for key, _ in held], _TEXT) or _first(held, value)

    return _Kind(text, fits, inside, value.is_closed)


def _first(pairs: Iterable[tuple[Any, Json]], kind: _Kind) -> Misfit | None:
    fits, inside = kind.fits, kind.inside
    for key, node in pairs:  # 1e5 of them in a large model
        if not fits(node):
            return Misfit(f"[{shown(key)}]", kind.text, shown(node))
        if inside is not None and (found := inside(node)) is not None:
            return found.below(f"[{shown(key)}]")
    return None


def _in_anything(node: Json) -> Misfit | None:
    """The first misfit below a place that may hold anything: it may hold nodes, and those are checked."""
    if type(node) is not dict or "t" in node:
        return None
    if "node" in node:
        return _in_node(node)
    ((tag, held),) = node.items()
    if tag in SCALAR_TAGS:
        return None
    if tag in _PAIRED:
        held = [*([key, key] for key, _ in held), *held]
    for key, child in held.items() if type(held) is dict else held if tag in _PAIRED else enumerate(held):
        if type(child) is dict and "t" not in child:  # nothing can be wrong with the others, and they are many
            found = _in_anything(child)
            if found is not None:
                return found.below(f"[{shown(key)}]")
    return None


def _in_node(node: Mapping[str, Json]) -> Misfit | None:
    fields, static = node["fields"], node.get("static", {})
    known = _fields_of(node["node"])
    for name, held in fields.items():
        kind = _ANYTHING if known is None else known.trees.get(name)
        found = Misfit("", known.text, "a field that is none of them") if kind is None and known else None
        found = found or (kind.misfit(held) if kind is not None else None)
        if found is not None:
            return found.below(f".{name}")
    for name, held in static.items():
        kind = _ANYTHING if known is None else known.static.get(name)
        if kind is None:
            return Misfit(f".{name}", known.text if known else "", "a static field that is none of them")
        found = _in_static(held, name, kind)
        if found is not None:
            return found
    if known is not None and not known.required <= fields.keys() | static.keys():
        return Misfit("", known.text, shown(sorted({*fields, *static})))
    return None


def _in_static(node: Json, name: str, kind: _Kind) -> Misfit | None:
    """What is static holds no tensors; nothing else has looked inside it so far, where the hint says too little."""
    if not kind.is_closed:
        try:
            tensor = next((leaf for leaf in places(node, f".{name}") if leaf.tensor is not None), None)
        except CheckpointHostile as error:
            return Misfit(error.where, str(error.expected), str(error.found))
        if tensor is not None:
            return Misfit(tensor.path, "values that are no tensors", "a tensor")
    found = kind.misfit(node)
    return None if found is None else found.below(f".{name}")


@final
@attrs.frozen
class _Fields:
    """The fields of a node class."""

    text: str
    trees: Mapping[str, _Kind]
    static: Mapping[str, _Kind]
    required: frozenset[str]


def _fields_of(name: str) -> _Fields | None:
    """The fields of one of trainfold's own classes; None for a user's, whose hints promise nothing."""
    return _own_fields(name) if name.startswith("trainfold.") and name in registered_classes() else None


@cache
def _own_fields(name: str) -> _Fields:
    kind = registered_classes()[name]
    hints = get_type_hints(kind)
    fields = [field for field in attrs.fields(kind) if field.init]
    kinds = {field.name: _kind_of(hints[field.name]) for field in fields}
    static = {field.name for field in fields if not field.metadata.get("pytree_node", True)}
    return _Fields(
        f"the fields {sorted(kinds)} of {name}",
        {name: each for name, each in kinds.items() if name not in static},
        {name: each for name, each in kinds.items() if name in static},
        frozenset(field.name for field in fields if field.default is attrs.NOTHING),
    )


def _is_int(node: Json) -> bool:
    return type(node) is int or (type(node) is dict and "int" in node)


def _is_tensor(node: Json) -> bool:
    return type(node) is dict and "t" in node and "as" not in node


_ANYTHING = _Kind("anything", lambda _node: True, _in_anything, is_closed=False)
_TEXT = _Kind("text", lambda node: type(node) is str)
_PLAIN: Mapping[Any, _Kind] = {
    Any: _ANYTHING,
    str: _TEXT,
    int: _Kind("an int", _is_int),
    bool: _Kind("a bool", lambda node: type(node) is bool),
    types.NoneType: _Kind("None", lambda node: node is None),
    torch.Tensor: _Kind("a tensor", _is_tensor),
}
