"""The scalars of a structure are those of the component that is built from it."""

import attrs
from hypothesis import HealthCheck, given, settings

from trainfold.core import tree
from trainfold.core.format.structure.describe import describe
from trainfold.core.format.structure.rebuild import class_name, rebuild
from trainfold.core.format.structure.scalars import Unbuilt, read_scalars
from trainfold.core.state.leaves import Leaves
from trainfold.properties import strategies


def unbuilt(value):
    """A component as `read_scalars` has it."""
    if value is None or isinstance(value, str | int | float | bytes):
        return value
    if isinstance(value, Leaves | dict):
        made = {key: unbuilt(each) for key, each in value.items()}
        return made if isinstance(value, Leaves) else type(value)(made)
    if isinstance(value, list | tuple):
        return type(value)(map(unbuilt, value))
    if tree.one_level(value) is not None:
        held = {each.name: unbuilt(getattr(value, each.name)) for each in attrs.fields(type(value)) if each.init}
        return Unbuilt(class_name(type(value)), held)
    return value


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(strategies.trees())
def test_the_scalars_of_a_tree_are_read_without_its_tensors_and_classes(value):
    """V18: for all trees, the containers and scalars are those of the tree that is built, and None stands for each tensor."""
    node = describe(value, "part")[0].node
    built = rebuild(node, "part", lambda _index, _as_numpy: None)
    assert repr(read_scalars(node, "part")) == repr(unbuilt(built))
