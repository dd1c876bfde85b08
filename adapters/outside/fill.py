"""`fill`: writes what a source of weights supplies into the memory of a model."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any

from trainfold.adapters.components.component import copy_values
from trainfold.adapters.sharded.parts import memory_of
from trainfold.backends.ranks.all_ranks import on_all_ranks
from trainfold.backends.weights.plan import PlannedWeights, planned
from trainfold.backends.weights.take import received
from trainfold.core.layout.world import Collectives
from trainfold.core.weights.asked import asked_of, left_to
from trainfold.core.weights.source import WeightSource


def fill(
    leaves: Mapping[str, Any],
    ties: Iterable[tuple[str, str]],
    source: WeightSource,
    world: Collectives,
    *,
    begins: Callable[[], None] = lambda: None,
) -> PlannedWeights:
    """Write what a source supplies into the memory of tensors; every rank calls, and a failure on one is raised on all.

    Where each of them comes from is decided first, so that only bytes that cannot be read leave some of them written and others not.

    Args:
        leaves: this rank's part of each tensor, by its first name.
        ties: pairs of another name and a first one.
        source: of the weights.
        world: the ranks.
        begins: called when memory is about to be overwritten.

    Returns:
        What was decided, and done.

    Raises:
        InvalidState: for a tensor that is missing, that was not asked for, or has another dtype or shape.
    """
    wanted = asked_of(leaves, ties)
    plan = planned(source, wanted, world)

    def write() -> None:
        supplied = received(plan.source, left_to(wanted, plan.coverage), lambda name: memory_of(leaves[name]))
        with closing(supplied) as parts:
            copy_values((memory_of(leaves[name]), part) for name, part in parts)

    begins()
    on_all_ranks(world, write, doing="take its weights from outside")
    return plan
