"""What all ranks have is written by one of them: digests show before a save that it is the same on each (W24, B06)."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainfold.backends.protocols import Collectives
from trainfold.core.codec import leaf_digest
from trainfold.core.description import Described
from trainfold.core.replicas import Leaves, belongs_to_rank, differing, disagreement, first_in_doubt, is_buffer
from trainfold.core.scalars import Json


def copies_of(
    described: Mapping[str, Described], tensors: Mapping[str, Mapping[str, Any]], *, whole: bool
) -> dict[str, dict[str, str]]:
    """The digest of every tensor that all ranks are to have alike; scalars are in the descriptions, which are compared anyway.

    Args:
        described: component -> its structure.
        tensors: component -> leaf path -> tensor; none is changed.
        whole: False for buffers alone: they are small, and the only ones that data-parallel training does not keep alike.

    Returns:
        Component -> leaf path -> digest, without shards, which are each rank's own.
    """
    return {
        name: {
            path: leaf_digest(tensors[name][path], path)
            for path, spec in each.tensors.items()
            if not spec.slices and (whole or is_buffer(path))
        }
        for name, each in described.items()
        if not belongs_to_rank(name, each.node)
    }


def check_copies(
    leaves: Leaves, contract: Mapping[str, Json], summaries: Sequence[Mapping[str, str]], world: Collectives
) -> None:
    """Raise on every rank if not all have told the same; they say then which leaf it is.

    Args:
        leaves: this rank's digests.
        contract: this rank's.
        summaries: what each rank told.
        world: the ranks; all of them call.

    Raises:
        RanksDisagree: naming the first leaf, or key of the contract, that differs.
    """
    name = first_in_doubt(summaries)
    if name is None:
        return
    mine: Mapping[str, Any] = contract if name == "contract" else leaves.get(name, {})
    first = world.broadcast(dict(mine) if world.rank == 0 else {})
    names = differing(mine, first)
    path = names[0] if names else ""
    told = world.gather((len(names), path, repr(mine.get(path, "nothing"))[:80]))
    odd = next(each[1] for each in told if each[0])
    raise disagreement(name, told, repr(first.get(odd, "nothing"))[:80])
