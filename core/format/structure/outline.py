"""Outlines: a component's description as ranks compare it. It has the rules by which leaves are cut, so it is the same on all ranks.

Ranks exchange digests of outlines, and the text only where these differ: what a save exchanges depends on neither leaves nor ranks.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import final

import attrs

from trainfold.core.digest import digest_of
from trainfold.core.format.structure.described import Described
from trainfold.core.format.structure.ownership import belongs_to_rank, counts_on_rank_zero, share_of
from trainfold.core.json_values import Json, canonical_json
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.placement import placement_of
from trainfold.core.layout.stage import Stage
from trainfold.core.layout.world import World


@final
@attrs.frozen
class Announcement:
    """What a rank announces to all others of the components that it saves.

    Attributes:
        digests: component -> digest of its outline, in the order of the state.
        own: the components that are not the same on all ranks by intent: each rank's own, and rank 0's.
        shares: component -> the share of the data that it belongs to, and the number of shares.
        part: the stages of a pipeline that it holds, and the digest of its contract; None for the whole model.
    """

    digests: Mapping[str, str]
    own: frozenset[str]
    shares: Mapping[str, tuple[int, int]] = attrs.field(factory=dict)
    part: tuple[Stage, str] | None = None

    @property
    def stage(self) -> Stage | None:
        """The stages of a pipeline that it holds; None for the whole model."""
        return None if self.part is None else self.part[0]

    @property
    def contract(self) -> str:
        """For stages, the digest of the rank's contract."""
        return "" if self.part is None else self.part[1]

    def without(self, names: Collection[str]) -> "Announcement":
        """What it says of all but some components."""
        return attrs.evolve(self, digests={name: each for name, each in self.digests.items() if name not in names})


def announcement_of(
    described: Mapping[str, Described], *, stage: Stage | None = None, contract: str = ""
) -> Announcement:
    """What a rank announces.

    Args:
        described: component -> its description, from `by_rule`.
        stage: the stages of a pipeline that it holds; None for the whole model.
        contract: for stages, the digest of the rank's contract.
    """
    digests = {name: _digest(each) for name, each in described.items()}
    return Announcement(
        digests,
        frozenset(
            name
            for name, each in described.items()
            if belongs_to_rank(name, each.node) or counts_on_rank_zero(each.node)
        ),
        {name: share for name, each in described.items() if (share := share_of(each.node)) is not None},
        None if stage is None else (stage, contract),
    )


def by_rule(described: Described, world: World, *, is_spread: bool = False) -> Described:
    """The description without the slices that follow from a rule; a leaf whose rule does not hold on this rank has slices and no rule.

    Args:
        described: a description of this rank.
        world: this rank among the ranks of the save.
        is_spread: whether other ranks have other leaves, so that a rule may be over some of the ranks.

    Examples:
        >>> from trainfold.core.layout.mesh import make_mesh
        >>> from trainfold.core.layout.placement import make_placement
        >>> halves = make_placement(make_mesh((2,)), [[0]])
        >>> spec = LeafSpec("int8", (4,), (((2, 4),),), halves)
        >>> [by_rule(Described({"t": 0}, {"w": spec}), World(rank, 2)).tensors["w"].slices for rank in (1, 0)]
        [(), (((2, 4),),)]
    """
    few = {id(spec): spec for spec in described.tensors.values()}  # there are many leaves, and few specs
    ruled = {key: _ruled(spec, world, is_spread=is_spread) for key, spec in few.items() if spec.placement is not None}
    if not ruled:
        return described
    return Described(described.node, {path: ruled.get(id(spec), spec) for path, spec in described.tensors.items()})


def outline_of(described: Described) -> bytes:
    """The text of a description from `by_rule`; `described_by` reads it. Equal descriptions have equal texts."""
    return canonical_json(_outline(described))


def _digest(described: Described) -> str:
    """The digest of an outline."""
    # takes half the time of JSON; these bytes are never read
    return digest_of(repr(_outline(described)).encode("utf-8", "surrogatepass"))


def _outline(described: Described) -> list[Json]:
    """A description as plain values."""
    rows: dict[int, int] = {}
    numbers: dict[LeafSpec, int] = {}
    indices = []
    for spec in described.tensors.values():
        index = rows.get(id(spec))
        if index is None:
            index = rows[id(spec)] = numbers.setdefault(spec, len(numbers))
        indices.append(index)
    rules = {spec.placement: None for spec in numbers if spec.placement is not None}
    places = {rule: index for index, rule in enumerate(rules)}
    specs = [
        [spec.dtype, spec.shape, spec.slices, None if spec.placement is None else places[spec.placement]]
        for spec in numbers
    ]
    return [described.node, [*described.tensors], indices, specs, [rule.row for rule in rules]]


def described_by(text: bytes) -> Described:
    """The description with this text. The text comes from a rank of the same program.

    Law: ``described_by(outline_of(d)) == d``.
    """
    node, paths, indices, rows, rules = json.loads(text)
    placements = [placement_of(rule) for rule in rules]
    specs = [
        LeafSpec(
            dtype,
            tuple(shape),
            tuple(tuple((low, high) for low, high in box) for box in slices),
            None if place is None else placements[place],
        )
        for dtype, shape, slices, place in rows
    ]
    return Described(node, {path: specs[index] for path, index in zip(paths, indices, strict=True)})


def unequal(announced: Sequence[Announcement]) -> tuple[str, ...]:
    """The components that all ranks share and that some rank describes differently.

    Examples:
        >>> unequal([Announcement({"model": digest, "rng": digest}, frozenset({"rng"})) for digest in ("a", "b")])
        ('model',)
    """
    own = frozenset.intersection(*(each.own for each in announced))
    return tuple(name for name in _different(announced) if name not in own)


def own_components(announced: Sequence[Announcement], mine: Mapping[str, Described]) -> frozenset[str]:
    """The components of which each rank has its own. One without tensors that is the same on all ranks is shared.

    Args:
        announced: by each rank.
        mine: component -> description, of this rank.
    """
    own = frozenset.intersection(*(each.own for each in announced)) if len(announced) > 1 else frozenset()
    different = _different(announced)
    return frozenset(
        name
        for name in own
        if name in mine and not counts_on_rank_zero(mine[name].node) and (mine[name].tensors or name in different)
    )


def stored_by_earlier(announced: Sequence[Announcement], rank: int, own: Collection[str]) -> frozenset[str]:
    """The components whose value an earlier rank of the same share stores.

    Args:
        announced: by each rank.
        rank: this rank.
        own: the components of which each rank has its own.

    Examples:
        >>> ranks = [Announcement({}, frozenset(), {"queue": (share, 2)}) for share in (0, 0, 1, 1)]
        >>> [sorted(stored_by_earlier(ranks, rank, {"queue"})) for rank in range(4)]
        [[], ['queue'], [], ['queue']]
    """
    mine = announced[rank].shares
    return frozenset(
        name for name in mine if name in own and any(each.shares.get(name) == mine[name] for each in announced[:rank])
    )


def _different(announced: Sequence[Announcement]) -> list[str]:
    return [name for name in announced[0].digests if len({each.digests[name] for each in announced}) > 1]


def told_by(announced: Sequence[Announcement], rank: int) -> tuple[str, ...]:
    """The components whose text a rank sends: those of which it is the first to have this description.

    Examples:
        >>> ranks = [Announcement({"ema": digest}, frozenset()) for digest in ("a", "b", "b")]
        >>> [told_by(ranks, rank) for rank in range(3)]
        [('ema',), ('ema',), ()]
    """
    mine = announced[rank].digests
    return tuple(
        name for name in unequal(announced) if all(each.digests[name] != mine[name] for each in announced[:rank])
    )


def _ruled(spec: LeafSpec, world: World, *, is_spread: bool) -> LeafSpec:
    rule = spec.placement
    is_over_all = rule is not None and (is_spread or rule.mesh.covers(world.size))
    coordinate = rule.mesh.coordinate_of(world.rank) if rule is not None and is_over_all else None
    if rule is None or coordinate is None or (rule.box(spec.shape, coordinate),) != spec.slices:
        return LeafSpec(spec.dtype, spec.shape, spec.slices)
    return LeafSpec(spec.dtype, spec.shape, (), rule)
