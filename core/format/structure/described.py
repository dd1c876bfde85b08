"""`Described`: a component without its tensor values. This module imports no torch: commands that plan a resume need it."""

from collections.abc import Mapping
from typing import final

import attrs

from trainfold.core.json_values import Json
from trainfold.core.layout.leaf_spec import LeafSpec


@final
@attrs.frozen
class Described:
    """A component without its tensor values. Ranks gather it, a save plans with it, and the manifest records it.

    Attributes:
        node: the JSON structure, scalars included.
        tensors: path -> spec, and not value, of each stored tensor, in the order of their indices; a tied tensor has its first path.
    """

    node: Json
    tensors: Mapping[str, LeafSpec]
