"""A component from its JSON node and its tensors, without pickle. `trainfold.core.format.structure.describe` goes the other way.

Rebuilding creates plain containers, and node classes that are already registered: a checkpoint cannot name code to import.
"""

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from trainfold.core import tree
from trainfold.core.data.cursor import DataCursor
from trainfold.core.data.eval_cursor import DistributedEvalCursor
from trainfold.core.errors import UnsupportedLeaf
from trainfold.core.evaluate.suite import Tally
from trainfold.core.format.structure.places import Walk, hostile_node
from trainfold.core.json_values import Json, shown
from trainfold.core.metrics.registry import ACCUMULATORS
from trainfold.core.rng import Key
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import TrainState

# named here so that they are registered wherever a checkpoint is loaded
OWN_NODES = (TrainState, Key, DataCursor, DistributedEvalCursor, Tally, *ACCUMULATORS)


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
    return Walk(
        lambda leaf: leaf.value if leaf.tensor is None else tensor(leaf.tensor, leaf.as_numpy),
        make=make_node,
        leaves=Leaves,
    ).node(node, name, 0)


def make_node(name: str, values: Mapping[str, Any], static: Mapping[str, Any], path: str) -> Any:
    """An object of a registered node class.

    Args:
        name: the class, as the format names it.
        values: the fields that are part of the tree.
        static: the other fields.
        path: its path, for errors.

    Raises:
        CheckpointHostile: for other fields than the class has, or values that it refuses.
        UnsupportedLeaf: for a class that is not registered in this process.
    """
    kind = classes_by_name().get(name)
    if kind is None:
        raise UnsupportedLeaf(
            path,
            expected="a registered node class",
            found=shown(name),
            fix="import the module that defines the class",
        )
    names = {field.name for field in attrs.fields(kind) if field.init}
    if not set(values) | set(static) <= names:
        raise hostile_node(path, f"the fields {sorted(names)}", sorted({*values, *static}))
    try:
        return kind(**values, **static)
    except Exception as error:  # the class is a user's, and its checks may raise anything
        raise hostile_node(path, f"the fields {sorted(names)} with values that {name} takes", shown(error)) from error


def class_name(kind: type[Any]) -> str:
    """The name of a node class in the format. Names of trainfold's own classes omit the module, so that the classes can move."""
    module = "trainfold" if kind.__module__.startswith("trainfold.") else kind.__module__
    return f"{module}.{kind.__qualname__}"


def classes_by_name() -> dict[str, type[Any]]:
    """Name in the format -> class, for every node class of this process that a checkpoint may name."""
    return {class_name(kind): kind for kind in tree.registered_classes() if attrs.has(kind)}
