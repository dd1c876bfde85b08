"""`united_run`: what ranks hold of a model in stages, put together: each rank sends its description, where no earlier rank has the same."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import attrs

from trainfold.core.errors import RanksDisagree
from trainfold.core.format.codec import leaf_digest
from trainfold.core.format.structure.described import Described
from trainfold.core.format.structure.outline import Announcement, by_rule, described_by, outline_of
from trainfold.core.format.structure.unite import NAMES_FIX, is_by_name, leaves_of_several, unite
from trainfold.core.format.structure.united_contract import PartOfRun, of_all_stages, shown_as_whole, united_contract
from trainfold.core.json_values import Json
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import Box, whole_box
from trainfold.core.layout.stage import Stage, ranks_by_stage
from trainfold.core.layout.world import Collectives, World
from trainfold.core.save.replicas import contracts_differ, differing, first_disagreement, structures_differ

_SHOWN: Final = 4  # parts of a weight, in an error


@final
@attrs.frozen
class UnitedRun:
    """A run whose model is in stages, as a whole.

    Attributes:
        described: component -> its description; the same on every rank for what is spread, and this rank's for anything else.
        contract: of the whole.
        several: leaf path -> the ranks of each part of the pipeline that has it, where several have it.
        spread: the components that are spread over stages.
    """

    described: Mapping[str, Described]
    contract: Mapping[str, Json]
    several: Mapping[str, tuple[tuple[int, ...], ...]]
    spread: frozenset[str]

    def without_spread(self, announced: Sequence[Announcement]) -> list[Announcement]:
        """What the ranks have announced, as if they had announced one description of what is spread."""
        alike = dict.fromkeys(self.spread, "")
        return [attrs.evolve(each, digests={**each.digests, **alike}) for each in announced]


def ruled(described: Mapping[str, Described], world: World, stage: Stage | None) -> dict[str, Described]:
    """The descriptions of a rank by the rules that cut its leaves.

    Args:
        described: component -> description.
        world: this rank among all ranks.
        stage: the stages of a pipeline that it holds; None for the whole model.
    """
    return {
        name: by_rule(each, world, is_spread=stage is not None and is_by_name(each.node))
        for name, each in described.items()
    }


def united_run(
    mine: Mapping[str, Described],
    contract: Mapping[str, Json],
    announced: Sequence[Announcement],
    world: Collectives,
) -> UnitedRun | None:
    """Put the stages of all ranks together; None if the model is not in stages. Every rank calls.

    Args:
        mine: component -> description, of this rank, from `by_rule`.
        contract: of this rank.
        announced: what each rank announced.
        world: the ranks.

    Raises:
        RanksDisagree: on every rank, naming the leaf and the ranks, if the stages do not make one model.
    """
    parts = ranks_by_stage([each.stage for each in announced])
    if not parts:
        return None
    spread = sorted(name for name, each in mine.items() if is_by_name(each.node))
    _check_names(announced, spread)
    told = world.gather(_first_told(mine, contract, announced, world.rank, spread), doing="describe its stages", is_vote=True)  # fmt: skip
    texts = {(name, announced[rank].digests[name]): text for rank, (each, _) in enumerate(told) for name, text in each.items()}  # fmt: skip
    contracts = {announced[rank].contract: found for rank, (_, found) in enumerate(told) if found is not None}
    read = {key: described_by(text.encode()) for key, text in texts.items()}
    held = {
        stage: {name: read[name, announced[ranks[0]].digests[name]] for name in spread}
        for stage, ranks in parts.items()
    }
    _check_replicas(announced, parts, read, spread)
    _check_contracts(announced, parts, contracts)
    united = {name: unite(name, [(ranks, held[stage][name]) for stage, ranks in parts.items()], world.world_size) for name in spread}  # fmt: skip
    whole = {name: each.described.node for name, each in united.items()}
    said = [
        PartOfRun(ranks[0], contracts[announced[ranks[0]].contract], {name: each.node for name, each in held[stage].items()})
        for stage, ranks in parts.items()
    ]  # fmt: skip
    shared = of_all_stages(contract)
    own = {key: value for key, value in contract.items() if key not in shared}
    return UnitedRun(
        {name: united[name].described if name in united else each for name, each in mine.items()},
        {**own, **united_contract(said, whole)},
        {path: ranks for each in united.values() for path, ranks in each.several.items()},
        frozenset(spread),
    )


def _first_told(
    mine: Mapping[str, Described],
    contract: Mapping[str, Json],
    announced: Sequence[Announcement],
    rank: int,
    spread: Sequence[str],
) -> tuple[dict[str, str], Mapping[str, Json] | None]:
    """The texts and the contract that no earlier rank sends."""
    me, before = announced[rank], announced[:rank]
    texts = {
        name: outline_of(mine[name]).decode()
        for name in spread
        if all(each.digests[name] != me.digests[name] for each in before)
    }
    return texts, of_all_stages(contract) if all(each.contract != me.contract for each in before) else None


def _check_names(announced: Sequence[Announcement], spread: Sequence[str]) -> None:
    for rank, each in enumerate(announced):
        missing = [name for name in spread if name not in each.digests]
        if missing or list(each.digests) != list(announced[0].digests):
            raise RanksDisagree(
                "components", expected=f"what rank 0 has: {list(announced[0].digests)}", found=f"on rank {rank}: {list(each.digests)}",
                fix="attach the same components on every rank of the pipeline: a loader too, with the same seed, although only the first and the last stage use its batches",
            )  # fmt: skip


def _check_replicas(
    announced: Sequence[Announcement],
    parts: Mapping[Stage, tuple[int, ...]],
    read: Mapping[tuple[str, str], Described],
    spread: Sequence[str],
) -> None:
    """Raise if ranks with the same stages describe them differently."""
    for ranks in parts.values():
        first = announced[ranks[0]]
        for rank in ranks[1:]:
            for name in spread:
                mine, theirs = first.digests[name], announced[rank].digests[name]
                if mine != theirs:
                    where, one, other = first_disagreement(name, read[name, mine], read[name, theirs])
                    raise structures_differ(where, f"{one} (rank {ranks[0]})", other, rank)


def _check_contracts(
    announced: Sequence[Announcement],
    parts: Mapping[Stage, tuple[int, ...]],
    contracts: Mapping[str, Mapping[str, Json]],
) -> None:
    """Raise if ranks with the same stages say different things of the run; what ranks may have of their own does not count."""
    for ranks in parts.values():
        first = announced[ranks[0]].contract
        odd = {announced[rank].contract: rank for rank in reversed(ranks) if announced[rank].contract != first}
        for digest, rank in sorted(odd.items(), key=lambda pair: pair[1]):
            mine, theirs = (shown_as_whole(contracts[each]) for each in (first, digest))
            if keys := differing(theirs, mine):
                raise contracts_differ(keys[0], (ranks[0], mine), (rank, theirs))


def check_several(
    several: Mapping[str, tuple[tuple[int, ...], ...]], tensors: Mapping[str, Mapping[str, Any]], world: Collectives
) -> None:
    """Raise on every rank unless a leaf that several parts of the pipeline have has the same value on all; all ranks call.

    Such a leaf is a weight that stages share. It may also be a name that two stages have for different tensors. One that stages cut over
    their ranks is compared part by part; of one that is whole on every rank of a stage, the first rank says the value.

    Args:
        several: from `united_run`.
        tensors: component -> leaf path -> value, of this rank.
        world: the ranks.

    Raises:
        RanksDisagree: naming the leaf and two ranks.
    """
    if not several:
        return
    leaves = {path: leaf for each in tensors.values() for path, leaf in each.items()}
    firsts = {path: {ranks[0] for ranks in parts} for path, parts in several.items()}
    mine = {
        path: _part(leaves[path], path)
        for path in leaves_of_several(leaves, several)
        if isinstance(leaves[path], Shard) or world.rank in firsts[path]
    }
    told = world.gather(mine, doing="compare what stages share", is_vote=True)
    for path, parts in several.items():
        held = [{told[rank][path][0]: (told[rank][path][1], rank) for rank in reversed(ranks) if path in told[rank]} for ranks in parts]  # fmt: skip
        first, *others = held
        for other in others:
            if first.keys() != other.keys():
                raise _cut_differently(path, first, other)
            for box, (digest, rank) in first.items():
                if other[box][0] != digest:
                    raise RanksDisagree(
                        path, expected=f"one tensor of this name: the bits that rank {rank} has, because its stage has it too",
                        found=f"others on rank {other[box][1]}", fix=NAMES_FIX,
                    )  # fmt: skip


def _part(leaf: Any, path: str) -> tuple[Box, str]:
    """What a rank holds of a leaf, and the digest of that."""
    if isinstance(leaf, Shard):
        return leaf.box, leaf_digest(leaf.tensor, path)
    return whole_box(tuple(leaf.shape)), leaf_digest(leaf, path)


def _cut_differently(path: str, mine: Mapping[Box, Any], theirs: Mapping[Box, Any]) -> RanksDisagree:
    (one, first), (other, rank) = (
        (sorted(held)[:_SHOWN], min(rank for _, rank in held.values())) for held in (mine, theirs)
    )
    return RanksDisagree(
        path, expected=f"the parts that stages cut it into alike: {one} on the ranks from {first}",
        found=f"{other} on the ranks from {rank}", fix="cut a weight that stages share in the same way on each stage, over as many ranks",
    )  # fmt: skip
