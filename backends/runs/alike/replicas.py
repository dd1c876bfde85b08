"""What ranks have alike: they exchange digests, and texts only where these differ; digests prove that replicated tensors are equal."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainfold.core.digest import digest_of
from trainfold.core.format.codec import leaf_digest
from trainfold.core.format.structure.described import Described
from trainfold.core.format.structure.outline import Announcement, described_by, outline_of, told_by, unequal
from trainfold.core.format.structure.ownership import belongs_to_rank, counts_on_rank_zero, share_of
from trainfold.core.format.structure.unite import is_by_name
from trainfold.core.json_values import Json, canonical_json
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.stage import Stage
from trainfold.core.layout.world import Collectives
from trainfold.core.save.replicas import (
    SMALL_BYTES,
    TURNS,
    Leaves,
    Proof,
    component_of_settings,
    differing,
    first_in_doubt,
    is_of_parts,
    is_trained,
    parts_differ,
    parts_name,
    replicas_differ,
    settings_differ,
    structures_differ,
)
from trainfold.core.tensor_memory import tensor_bytes


def descriptions(
    mine: Mapping[str, Described], announced: Sequence[Announcement], world: Collectives
) -> list[Mapping[str, Described]]:
    """Return for each rank component -> description; ranks with equal descriptions share one object.

    What each rank has of its own is not exchanged: for it the description of this rank stands.

    Args:
        mine: the descriptions of this rank, from `by_rule`.
        announced: what each rank announced.
        world: the ranks; all of them call.

    Raises:
        RanksDisagree: on every rank, if they save other components.
    """
    first = announced[0]
    for rank, each in enumerate(announced):
        if list(each.digests) != list(first.digests):
            raise structures_differ("components", list(first.digests), list(each.digests), rank)
    doubtful = unequal(announced)
    if not doubtful:
        return [mine] * world.world_size
    told = {name: outline_of(mine[name]).decode() for name in told_by(announced, world.rank)}
    texts = {
        (name, announced[rank].digests[name]): text
        for rank, each in enumerate(world.gather(told, doing="describe what differs", is_vote=True))
        for name, text in each.items()
    }
    known = announced[world.rank].digests
    read = {key: described_by(text.encode()) for key, text in texts.items() if known[key[0]] != key[1]}
    return [{name: read.get((name, digest), mine[name]) for name, digest in each.digests.items()} for each in announced]


def replicated(
    described: Mapping[str, Described],
    tensors: Mapping[str, Mapping[str, Any]],
    *,
    sent: Mapping[str, str] | None = None,
    stage: Stage | None = None,
) -> dict[str, dict[str, Any]]:
    """Every tensor that must be equal on several ranks. Scalars need no comparison: they are in the descriptions, which are compared.

    Args:
        described: component -> its structure.
        tensors: component -> leaf path -> tensor.
        sent: leaf path -> what sends it to the other ranks before it is used. This is compared instead of the value.
        stage: the stages of a pipeline that this rank holds.

    Returns:
        Component -> leaf path -> the tensor in this rank's memory, or the text that is compared in its place. Of shards, it has those that
        other ranks hold too, under a name for each set of ranks that do. What only the ranks of a stage hold is under the name of the stage.
    """
    known = sent or {}
    widest = 0 if stage is None else _widest(tensors)
    found: dict[str, dict[str, Any]] = {}
    for name, each in described.items():
        leaves = tensors[name]
        if belongs_to_rank(name, each.node) or counts_on_rank_zero(each.node):
            if (share := share_of(each.node)) is not None:  # it is compared between the ranks of the share
                path = f"{name}.value"
                structure = digest_of(canonical_json(each.node))
                found[parts_name(name, {path: share})] = {
                    path: structure,
                    **{leaf: leaves[leaf] for leaf in each.tensors},
                }
            continue
        parts = {path: spec.slices for path, spec in each.tensors.items() if spec.slices}
        everywhere = name if stage is None or not is_by_name(each.node) else parts_name(name, {str(stage): None})
        found[everywhere] = {path: known.get(path) or leaves[path] for path in each.tensors if path not in parts}
        held: dict[Any, dict[str, torch.Tensor]] = {}
        for path in parts:
            if (
                isinstance(leaf := leaves[path], Shard)
                and leaf.is_copied
                and (stage is None or _is_of_few(leaf, widest))
            ):
                held.setdefault(_holders(leaf), {})[path] = leaf.tensor
        for shards in held.values():
            found[parts_name(name, {path: parts[path] for path in shards})] = shards
    return found


def _widest(tensors: Mapping[str, Mapping[str, Any]]) -> int:
    """The ranks of the widest mesh over which a leaf is cut: all that train these stages."""
    rules = {
        leaf.placement
        for leaves in tensors.values()
        for leaf in leaves.values()
        if isinstance(leaf, Shard) and leaf.placement is not None
    }
    return max((rule.mesh.size for rule in rules), default=0)


def _is_of_few(leaf: Shard, ranks: int) -> bool:
    """Whether another one of these ranks may hold the same part. The ranks outside are of other stages, which hold other leaves."""
    rule = leaf.placement
    return rule is None or rule.mesh.size < ranks or any(rule.mesh.shape[axis] > 1 for axis in rule.replica_axes)


def _holders(leaf: Shard) -> Any:
    """What is different for each set of ranks that hold the same parts: ranks of one mesh that differ only along axes that cut nothing."""
    return None if leaf.placement is None else (leaf.placement.mesh, leaf.placement.replica_axes)


def copies_of(found: Mapping[str, Mapping[str, Any]], *, proof: Proof) -> dict[str, dict[str, str]]:
    """The digest of every tensor that must be equal on several ranks.

    Args:
        found: from `replicated`; no tensor is changed.
        proof: how much of each tensor is compared.
    """
    if proof.level == "none":
        return {}
    return {
        name: {path: leaf if isinstance(leaf, str) else _digest(leaf, path, proof) for path, leaf in leaves.items()}
        for name, leaves in found.items()
    }


def _digest(leaf: Any, path: str, proof: Proof) -> str:
    """The digest of the part of a leaf that a turn compares; of the whole leaf if it is small or if steps do not keep it equal."""
    if proof.turn is None or not isinstance(leaf, torch.Tensor) or leaf.nbytes <= SMALL_BYTES:
        return leaf_digest(leaf, path)
    if not is_trained(path) or not leaf.is_contiguous():
        return leaf_digest(leaf, path)
    if leaf.is_cpu:  # reading its memory costs less than a view of it
        start, stop = (leaf.nbytes * (proof.turn + side) // TURNS for side in (0, 1))
        return digest_of(tensor_bytes(leaf)[start:stop])
    start, stop = (leaf.numel() * (proof.turn + side) // TURNS for side in (0, 1))
    return leaf_digest(leaf.detach().view(-1)[start:stop], path)


def check_copies(
    leaves: Leaves,
    contract: Mapping[str, Json],
    settings: Mapping[str, Mapping[str, Json]],
    summaries: Sequence[Mapping[str, str]],
    world: Collectives,
) -> None:
    """Raise on every rank if the summaries differ, after the ranks have found the first leaf that does.

    Args:
        leaves: the digests of this rank.
        contract: the contract of this rank.
        settings: component -> the settings of this rank.
        summaries: the summary of each rank.
        world: the ranks; all of them call.

    Raises:
        RanksDisagree: naming the first leaf, or key of the contract, that differs.
    """
    name = first_in_doubt(summaries)
    if name is None:
        return
    if (component := component_of_settings(name)) is not None:
        held = world.gather(settings.get(component), doing="compare its settings", is_vote=True)
        raise settings_differ(component, held)
    if is_of_parts(name):
        raise parts_differ(world.gather(leaves.get(name), doing="compare its parts", is_vote=True))
    mine: Mapping[str, Any] = contract if name == "contract" else leaves.get(name, {})
    first = world.broadcast(dict(mine) if world.rank == 0 else {}, doing="compare its copies", is_vote=True)
    names = differing(mine, first)
    path = names[0] if names else ""
    found = world.gather(
        (len(names), path, repr(mine.get(path, "nothing"))[:80]), doing="compare its copies", is_vote=True
    )
    odd = next(each[1] for each in found if each[0])
    raise replicas_differ(name, found, repr(first.get(odd, "nothing"))[:80])
