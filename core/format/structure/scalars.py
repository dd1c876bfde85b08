"""`read_scalars`: a component's scalars from its JSON node, without its tensors and its classes.

This module imports no torch: commands that plan a resume need it.
"""

from collections.abc import Mapping
from typing import Any, final

import attrs

from trainfold.core.format.structure.places import Walk
from trainfold.core.json_values import Json


@final
@attrs.frozen
class Unbuilt:
    """A node of a class, which is not built.

    Attributes:
        kind: the class, as the format names it.
        fields: name -> value, of all fields.
    """

    kind: str
    fields: Mapping[str, Any]


def read_scalars(node: Json, name: str) -> Any:
    """The containers and scalars of a component; None for each tensor, and `Unbuilt` for each node of a class.

    Args:
        node: the JSON structure.
        name: the component's name.

    Raises:
        CheckpointHostile: for a node that no trainfold writes.

    Examples:
        >>> read_scalars({"node": "trainfold.Opaque", "fields": {"value": {"dict": {"w": {"t": 0}, "n": {"tuple": [1]}}}}}, "rng")
        Unbuilt(kind='trainfold.Opaque', fields={'value': {'w': None, 'n': (1,)}})
    """
    return Walk(lambda leaf: leaf.value, make=_unbuilt).node(node, name, 0)


def _unbuilt(name: str, values: Mapping[str, Any], static: Mapping[str, Any], _path: str) -> Unbuilt:
    return Unbuilt(name, {**values, **static})
