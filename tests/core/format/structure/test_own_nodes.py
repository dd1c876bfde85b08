"""The table of the format's own node classes agrees with the classes."""

import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

import attrs
import torch

from trainfold.core.component_names import BUILTIN_COMPONENTS
from trainfold.core.format.structure import kinds
from trainfold.core.format.structure.own_nodes import COMPONENTS, NODES
from trainfold.core.format.structure.rebuild import class_name, classes_by_name
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import TrainState

PLAIN = {
    Any: kinds.ANYTHING, str: kinds.TEXT, int: kinds.INT, bool: kinds.BOOL, types.NoneType: kinds.NONE, torch.Tensor: kinds.TENSOR,
}  # fmt: skip


def kind_of(hint):
    """The kind of a type hint."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in PLAIN:
        return PLAIN[hint]
    if origin in (Union, types.UnionType):
        return kinds.either(*map(kind_of, arguments))
    if origin is tuple:
        assert len(set(arguments) - {...}) == 1, "tuples of one type are all that the format knows"
        return kinds.tuple_of(kind_of(arguments[0]), None if arguments[-1] is ... else len(arguments))
    if origin is Leaves:
        return kinds.leaves_of(kind_of(arguments[0]))
    if origin is Mapping and arguments[0] is str:
        return kinds.mapping_kind(kind_of(arguments[1]))
    assert attrs.has(hint), hint
    return kinds.node_of(class_name(hint))


def fields_of(name, kind):
    """The fields of a class, in the form of the table."""
    hints, fields = get_type_hints(kind), [field for field in attrs.fields(kind) if field.init]
    static = {field.name for field in fields if not field.metadata.get("pytree_node", True)}
    each = {field.name: kind_of(hints[field.name]) for field in fields}
    return kinds.fields_of(
        name,
        trees={name: kind for name, kind in each.items() if name not in static},
        static={name: kind for name, kind in each.items() if name in static},
        required=[field.name for field in fields if field.default is attrs.NOTHING],
    )


def test_the_table_has_every_class_of_trainfold_that_a_checkpoint_may_name():
    """U05: a class missing from the table would be read without checks of its fields."""
    own = {name: kind for name, kind in classes_by_name().items() if name.startswith("trainfold.")}
    assert NODES.keys() == own.keys()
    for name, kind in own.items():
        assert NODES[name] == fields_of(name, kind), name


def test_the_components_of_the_table_are_those_of_a_state():
    hints = get_type_hints(TrainState)
    for name in BUILTIN_COMPONENTS:
        present = [kind_of(each) for each in get_args(hints[name]) or (hints[name],) if each is not types.NoneType]
        assert [COMPONENTS.get(name, kinds.ANYTHING)] == present, name
