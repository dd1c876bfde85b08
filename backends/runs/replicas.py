"""What all ranks have is written by one of them: digests show before a save that it is the same on each (W24, B06)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainfold.core.digest import digest_of
from trainfold.core.format.codec import leaf_digest
from trainfold.core.format.structure.describe import Described
from trainfold.core.format.structure.ownership import belongs_to_rank
from trainfold.core.json_values import Json
from trainfold.core.layout.world import Collectives
from trainfold.core.save.replicas import (
    SMALL_BYTES,
    TURNS,
    Leaves,
    Proof,
    differing,
    disagreement,
    first_in_doubt,
    is_trained,
)
from trainfold.core.tensor_memory import tensor_bytes


def copies_of(
    described: Mapping[str, Described],
    tensors: Mapping[str, Mapping[str, Any]],
    *,
    proof: Proof,
    sent: Mapping[str, str] | None = None,
) -> dict[str, dict[str, str]]:
    """The digest of every tensor that all ranks are to have alike; scalars are in the descriptions, which are compared anyway.

    Args:
        described: component -> its structure.
        tensors: component -> leaf path -> tensor; none is changed.
        proof: how much of each tensor is compared.
        sent: leaf path -> who sends it to the other ranks before it is used: that is compared then, and not the value.

    Returns:
        Component -> leaf path -> digest, without shards, which are each rank's own.
    """
    known = sent or {}
    return (
        {
            name: {
                path: known.get(path) or _digest(tensors[name][path], path, proof)
                for path, spec in each.tensors.items()
                if not spec.slices
            }
            for name, each in described.items()
            if not belongs_to_rank(name, each.node)
        }
        if proof.level != "none"
        else {}
    )


def _digest(leaf: Any, path: str, proof: Proof) -> str:
    """The digest of the piece of a leaf that a turn compares; of all of it where it is small or no step keeps it alike."""
    if proof.turn is None or not isinstance(leaf, torch.Tensor) or leaf.nbytes <= SMALL_BYTES:
        return leaf_digest(leaf, path)
    if not is_trained(path) or not leaf.is_contiguous():
        return leaf_digest(leaf, path)
    if leaf.is_cpu:  # a look at its memory costs less than a view of it
        start, stop = (leaf.nbytes * (proof.turn + side) // TURNS for side in (0, 1))
        return digest_of(tensor_bytes(leaf)[start:stop])
    start, stop = (leaf.numel() * (proof.turn + side) // TURNS for side in (0, 1))
    return leaf_digest(leaf.detach().view(-1)[start:stop], path)


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
