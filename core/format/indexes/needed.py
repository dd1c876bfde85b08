"""Which indexes a rank has to open: those of ranks whose boxes meet its own, by the rules in the root; and others until all that it needs is found."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

import attrs

from trainfold.core.format.manifest import box_by_rule
from trainfold.core.format.strict_json import hostile
from trainfold.core.layout.placement import Placement
from trainfold.core.layout.slices import Box, intersect, volume, whole_box

Tables: TypeAlias = Mapping[str, list[dict[str, Any]]]
"""Component -> the rows of its tensors, as `merge` has them while it adds shards."""


def nowhere_else(_component: str, _path: str) -> bool:
    """Say that this rank needs a tensor."""
    return False


@final
@attrs.frozen
class Needs:
    """What a rank needs of a checkpoint, whatever it finds there.

    Attributes:
        rank: the rank.
        world_size: the ranks that load.
        box: (component, leaf path, shape) -> the slice of a tensor that the rank needs; None for all of it.
        own: rank that saved -> `only_own` of its index, as another rank has sent it: then it is not opened for what that rank has of its own.
            None for a reader that does not look at this.
        opened: rank that saved -> its index, if this rank has opened it already.
        elsewhere: (component, leaf path) -> whether only other ranks need a tensor.
        most_files: how many files a reader that shares them with no other rank looks at: all of a checkpoint that has no more, and else those of
            the ranks whose indexes it has opened. None for one that shares them.
    """

    rank: int
    world_size: int
    box: Callable[[str, str, tuple[int, ...]], Box | None]
    own: Mapping[int, Any] | None = attrs.field(factory=dict, repr=False)
    opened: Mapping[int, Any] = attrs.field(factory=dict, repr=False)
    elsewhere: Callable[[str, str], bool] = nowhere_else
    most_files: int | None = None

    def looks_at(self, number: int, rank: int, opened: Collection[int] | None) -> bool:
        """Whether this rank looks at a file: at those of the ranks whose indexes it has opened, and at its share of all.

        Args:
            number: of the file.
            rank: that wrote it.
            opened: the ranks whose indexes are opened; None for all.
        """
        shares = self.most_files is None and number % self.world_size == self.rank
        return opened is None or rank in opened or shares

    def needed_box(self, component: str, record: Mapping[str, Any]) -> Box:
        """The box of a tensor that the rank needs."""
        found = self.box(component, record["path"], record["sizes"])
        return whole_box(record["sizes"]) if found is None else found


def nothing_needed(*, most_files: int) -> Needs:
    """The needs of a reader that wants no tensor, only what the root says: fingerprints, sizes, files.

    Args:
        most_files: as in `Needs`. Of a checkpoint that has more, it looks at those of rank 0.

    Examples:
        >>> nothing_needed(most_files=0).box("model", "model.params['w']", (4, 2))
        ((0, 0), (0, 0))
    """
    return Needs(0, 1, _empty, own=None, elsewhere=lambda *_: True, most_files=most_files)


def _empty(_component: str, _path: str, shape: tuple[int, ...]) -> Box:
    return ((0, 0),) * len(shape)


@final
@attrs.frozen
class TableNeeds:
    """What a rank needs of a table of tensors. Tensors of one kind of which it needs the same box are a group: there are many tensors, and few groups.

    Attributes:
        groups: of each tensor, the number of its group.
        kinds: of each group, a row of the table, and the box that is needed; None for nothing of its tensors.
    """

    groups: Sequence[int] = attrs.field(repr=False)
    kinds: Sequence[tuple[Mapping[str, Any], Box | None]]


def needs_of_tables(tables: Tables, needs: Needs) -> dict[str, TableNeeds]:
    """What a rank needs of each component that all ranks share."""
    found = {}
    for name, table in tables.items():
        numbers: dict[Any, int] = {}
        groups: list[int] = []
        kinds: list[tuple[Mapping[str, Any], Box | None]] = []
        for record in table:
            box = None if needs.elsewhere(name, record["path"]) else needs.needed_box(name, record)
            number = numbers.setdefault((record["box"], box), len(kinds))
            if number == len(kinds):
                kinds.append((record, box))
            groups.append(number)
        found[name] = TableNeeds(groups, kinds)
    return found


def ranks_that_meet(needed: Mapping[str, TableNeeds], writers: Mapping[str, Collection[int]]) -> set[int]:
    """The ranks that hold a part of what is needed by the rule of its tensor, and wrote something of its component.

    Args:
        needed: of the components that all ranks share.
        writers: component -> the ranks that have a file of it.
    """
    found: set[int] = set()
    for name, each in needed.items():
        ranks = writers.get(name, ())
        for record, box in each.kinds:
            rule = record["layout"]
            if box is not None and rule is not None and rule.cuts:
                found.update(_meeting(rule, box, record["sizes"], ranks))
            # all ranks that have another leaf hold all of it: `Missing` looks for those that wrote it
    return found


def _meeting(rule: Placement, box: Box, shape: tuple[int, ...], ranks: Collection[int]) -> Iterator[int]:
    """Those of some ranks whose boxes meet a box, in steps for each such box, or for each of the ranks if these are few."""
    if rule.mesh.size > 2 * len(ranks):  # a forged root may name any number
        held = ((rank, box_by_rule(shape, rule, rank)) for rank in ranks)
        return (rank for rank, each in held if each is not None and intersect(each, box) is not None)
    return (rank for rank in rule.ranks_meeting(box, shape) if rank in ranks)


@final
class Missing:
    """What is needed and not found yet.

    Args:
        tables: the components that all ranks share; rows get their shards as indexes are opened.
        needed: of the rank that loads.
    """

    def __init__(self, tables: Tables, needed: Mapping[str, TableNeeds]) -> None:
        self._left: list[tuple[str, Mapping[str, Any], Box, int]] = [
            (name, record, box, -1)
            for name, table in tables.items()
            for record, group in zip(table, needed[name].groups, strict=True)
            if (box := needed[name].kinds[group][1]) is not None
        ]
        self._known: dict[Any, int] = {}  # many tensors are cut alike

    def ranks(self, writers: Mapping[str, Collection[int]], opened: Collection[int]) -> Iterator[int]:
        """The ranks that may have it, in their order, until everything is found; ``opened`` must grow in between."""
        orders: dict[tuple[str, int], Iterator[int]] = {}
        while self._look():
            name, record, *_ = self._left[0]
            key = name, id(record["layout"])
            if key not in orders:
                orders[key] = _in_order(record["layout"], writers.get(name, ()))
            rank = next((rank for rank in orders[key] if rank not in opened), None)
            if rank is None:
                return
            yield rank

    def check(self, where: str) -> None:
        """Check that nothing is missing.

        Raises:
            CheckpointHostile: naming a tensor of which a part is missing, or twice there.
        """
        if self._look():
            _, record, box, _ = self._left[0]
            raise hostile(
                f"{where}: {record['path'][:200]}",
                f"shards that hold {box} once",
                f"{self._held(record, box)} of {volume(box)} elements",
            )

    def _look(self) -> bool:
        """Whether anything is missing. Only tensors that have more shards than at the last look are looked at."""
        self._left = [
            each if each[3] == len(each[1]["shards"]) else (*each[:3], len(each[1]["shards"]))
            for each in self._left
            if each[3] == len(each[1]["shards"]) or self._held(each[1], each[2]) != volume(each[2])
        ]
        return bool(self._left)

    def _held(self, record: Mapping[str, Any], box: Box) -> int:
        """How many elements of a box the shards of a row hold."""
        shards = record["shards"]
        if len(shards) == 1 and shards[0].box == box:
            return volume(box)
        key = box, *[shard.box for shard in shards]
        found = self._known.get(key)
        if found is None:
            common = (intersect(each, box) for each in key[1:])
            found = self._known[key] = sum(volume(each) for each in common if each is not None)
        return found


def _in_order(rule: Placement | None, ranks: Collection[int]) -> Iterator[int]:
    """Ranks in their order; first those that held a tensor."""
    ordered = sorted(ranks)
    held = [] if rule is None else [rank for rank in ordered if rule.mesh.coordinate_of(rank) is not None]
    return iter(dict.fromkeys(held + ordered))
