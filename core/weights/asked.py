"""`asked_of`: what a source of weights is asked for, from the leaves of a model. `left_to`: the same without what the script keeps."""

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import whole_box
from trainfold.core.state.spec import dtype_name
from trainfold.core.weights.several.cover import Coverage
from trainfold.core.weights.source import Wanted


def asked_of(leaves: Mapping[str, Any], ties: Iterable[tuple[str, str]]) -> dict[str, Wanted]:
    """What a source is asked for: each tensor under all of its names.

    Args:
        leaves: first name -> this rank's part, which may be a `Shard`.
        ties: pairs of another name and a first one.
    """
    wanted = {name: _wanted(leaf) for name, leaf in leaves.items()}
    return wanted | {alias: attrs.evolve(wanted[name], tied_to=name) for alias, name in ties if name in wanted}


def left_to(wanted: Mapping[str, Wanted], coverage: Coverage) -> dict[str, Wanted]:
    """What a source is asked for: all but what keeps the values of the script."""
    kept = frozenset(coverage.by_script)
    return {name: each for name, each in wanted.items() if (each.tied_to or name) not in kept}


def _wanted(leaf: Any) -> Wanted:
    if isinstance(leaf, Shard):
        return Wanted(dtype_name(leaf.tensor.dtype), tuple(leaf.shape), leaf.box)
    return Wanted(dtype_name(leaf.dtype), tuple(leaf.shape), whole_box(tuple(leaf.shape)))
