"""Outlines: a component's description as ranks compare it. It has the rules by which leaves are cut, so it is the same on all ranks.

Ranks exchange digests of outlines, and the text only where these differ: what a save exchanges depends on neither leaves nor ranks.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import final

import attrs

from trainfold.core.digest import digest_of
from trainfold.core.format.structure.describe import Described
from trainfold.core.format.structure.ownership import belongs_to_rank, counts_on_rank_zero
from trainfold.core.json_values import canonical_json
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import Placement, make_placement
from trainfold.core.layout.world import World


@final
@attrs.frozen
class Announcement:
    """What a rank announces to all others of the components that it saves.

    Attributes:
        digests: component -> digest of its outline, in the order of the state.
        own: the components that are not the same on all ranks by intent: each rank's own, and rank 0's.
    """

    digests: Mapping[str, str]
    own: frozenset[str]

    def without(self, names: Collection[str]) -> "Announcement":
        """What it says of all but some components."""
        return Announcement({name: each for name, each in self.digests.items() if name not in names}, self.own)


def announcement_of(described: Mapping[str, Described]) -> Announcement:
    """What a rank announces.

    Args:
        described: component -> its description, from `by_rule`.
    """
    digests = {name: digest_of(outline_of(each)) for name, each in described.items()}
    return Announcement(
        digests,
        frozenset(
            name
            for name, each in described.items()
            if belongs_to_rank(name, each.node) or counts_on_rank_zero(each.node)
        ),
    )


def by_rule(described: Described, world: World) -> Described:
    """The description without the slices that follow from a rule; a leaf whose rule does not hold on this rank has slices and no rule.

    Args:
        described: a description of this rank.
        world: this rank among the ranks of the save.

    Examples:
        >>> halves = make_placement(make_mesh((2,)), [[0]])
        >>> spec = LeafSpec("int8", (4,), (((2, 4),),), halves)
        >>> [by_rule(Described({"t": 0}, {"w": spec}), World(rank, 2)).tensors["w"].slices for rank in (1, 0)]
        [(), (((2, 4),),)]
    """
    few = {id(spec): spec for spec in described.tensors.values()}  # there are many leaves, and few specs
    ruled = {key: _ruled(spec, world) for key, spec in few.items() if spec.placement is not None}
    if not ruled:
        return described
    return Described(described.node, {path: ruled.get(id(spec), spec) for path, spec in described.tensors.items()})


def outline_of(described: Described) -> bytes:
    """The text of a description from `by_rule`; `described_by` reads it. Equal descriptions have equal texts."""
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
    return canonical_json([described.node, [*described.tensors], indices, specs, [*map(_rule_json, rules)]])


def described_by(text: bytes) -> Described:
    """The description with this text. The text comes from a rank of the same program.

    Law: ``described_by(outline_of(d)) == d``.
    """
    node, paths, indices, rows, rules = json.loads(text)
    placements = [_rule_of(rule) for rule in rules]
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


def _ruled(spec: LeafSpec, world: World) -> LeafSpec:
    rule = spec.placement
    coordinate = None if rule is None or not rule.mesh.covers(world.size) else rule.mesh.coordinate_of(world.rank)
    if rule is None or coordinate is None or (rule.box(spec.shape, coordinate),) != spec.slices:
        return LeafSpec(spec.dtype, spec.shape, spec.slices)
    return LeafSpec(spec.dtype, spec.shape, (), rule)


def _rule_json(rule: Placement) -> list[object]:
    mesh = rule.mesh
    return [mesh.shape, mesh.first, mesh.strides, mesh.ranks, rule.cuts]


def _rule_of(document: list[list[int]]) -> Placement:
    shape, first, strides, ranks, cuts = document
    mesh = make_mesh(shape, ranks=ranks) if ranks else make_mesh(shape, first=first, strides=strides)  # type: ignore[arg-type]
    return make_placement(mesh, cuts)  # type: ignore[arg-type]
