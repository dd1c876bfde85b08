"""`SavePlan`: what a save writes, rank by rank and byte by byte, decided before anything is written.

Law: the plan is a function of the descriptions of all ranks, so every rank that gathers them computes the same plan.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Final, final

import attrs

from trainfold.core.errors import InvalidArgument
from trainfold.core.format.dtypes import STORED, size_bytes
from trainfold.core.format.file_names import directory_of
from trainfold.core.format.manifest import FileRecord, ShardRecord
from trainfold.core.format.structure.described import Described
from trainfold.core.format.structure.ownership import belongs_to_rank, counts_on_rank_zero
from trainfold.core.json_values import Json
from trainfold.core.layout.file_preference import NO_PREFERENCE, FilePreference
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.replica_shares import Piece, box_of, written_by
from trainfold.core.layout.slices import Box, check_cover, volume, whole_box
from trainfold.core.markup.html_table import html_table, notebook
from trainfold.core.save.file_layout import FilePlan, plan_file
from trainfold.core.save.replicas import first_disagreement, is_same, structures_differ

RANK_FILE: Final = "rank"
"""What the name of a file begins with that has the tensors of all components of a rank."""


@final
@attrs.frozen
class ComponentPlan:
    """One component of a save.

    Attributes:
        name: the component.
        is_own: whether each rank has its own.
        node: its structure; that of the rank itself, if each has its own.
        tensors: path -> spec of its tensors, in the order of their indices.
    """

    name: str
    is_own: bool
    node: Json
    tensors: Mapping[str, LeafSpec]


@final
@attrs.frozen
class Reference:
    """Bytes of a leaf that are not written, because a file of another checkpoint has them.

    Attributes:
        path: the leaf path.
        file: the file, with its checkpoint.
        shard: where they are in it, and their digests; its ``file`` says nothing.
    """

    path: str
    file: FileRecord
    shard: ShardRecord


@final
@attrs.frozen
class SavePlan:
    """What a save writes. Prints as a table.

    Attributes:
        step: the step of the state.
        directory: the name of the checkpoint, ``step-00000120``.
        world_size: the number of ranks that take part.
        components: in the order of the state.
        files: every file of every rank, or of one.
        suffix: what the names of its files have before their extension.
        references: what this rank does not write, because another checkpoint has it.
    """

    step: int
    directory: str
    world_size: int
    components: tuple[ComponentPlan, ...]
    files: tuple[FilePlan, ...]
    suffix: str = ""
    references: tuple[Reference, ...] = attrs.field(default=(), repr=False)

    @property
    def size_bytes(self) -> int:
        """The size of all files together, without what is referred to."""
        return sum(file.size_bytes for file in self.files)

    @property
    def whole_bytes(self) -> int:
        """What the files of all ranks hold, as far as one rank knows it: the headers of its own files, and every tensor of the state once.

        Of what each rank has of its own, that of this rank counts alone. So this is never more than what is written, and a rank need not be
        asked for it. If it refers to other checkpoints, it knows of its own files alone.
        """
        if self.references:
            return self.size_bytes
        specs = [spec for each in self.components for spec in each.tensors.values()]
        often = Counter(map(id, specs))  # there are many tensors, and few specs
        one_each = dict(zip(map(id, specs), specs, strict=True))
        tensors = sum(often[key] * size_bytes(spec.dtype, spec.shape) for key, spec in one_each.items())
        return tensors + sum(len(file.header) for file in self.files)

    def files_of(self, rank: int) -> tuple[FilePlan, ...]:
        """The files that one rank writes."""
        return tuple(file for file in self.files if file.rank == rank)

    def revised(self, revision: int) -> "SavePlan":
        """The same plan as that of another revision: only the names of files differ.

        Law: ``plan_save(ranks, step=s).revised(r) == plan_save(ranks, step=s, revision=r)``.
        """
        suffix = suffix_of(revision)
        if suffix == self.suffix:
            return self
        renamed = (
            attrs.evolve(each, name=data_file_name(each.name.split("-")[0], each.rank, self.world_size, suffix))
            for each in self.files
        )
        return attrs.evolve(self, files=tuple(renamed), suffix=suffix)

    def _referred(self) -> list[tuple[str, int, int, int]]:
        """Of each file of another checkpoint: its name, its rank, and how many tensors and bytes of it this one has."""
        held: dict[FileRecord, list[ShardRecord]] = {}
        for each in self.references:
            held.setdefault(each.file, []).append(each.shard)
        return [
            (file.label, file.rank, len(shards), sum(shard.stop - shard.start for shard in shards))
            for file, shards in held.items()
        ]

    def __str__(self) -> str:
        rows = [
            f"{f.name:44} rank {f.rank:<4} {len(f.tensors):>7} tensors {f.size_bytes:>15,} bytes" for f in self.files
        ]
        rows += [
            f"{name:44} rank {rank:<4} {count:>7} tensors {size:>15,} bytes, not written again"
            for name, rank, count, size in self._referred()
        ]
        names = ", ".join(component.name for component in self.components)
        return "\n".join([f"save {self.directory}: {names}; {self.world_size} ranks, {self.size_bytes:,} bytes", *rows])

    def _repr_html_(self) -> str:
        names = ", ".join(component.name for component in self.components)
        title = f"save {self.directory}: {names}; {self.world_size} ranks, {self.size_bytes:,} bytes"
        rows = [(f.name, str(f.rank), str(len(f.tensors)), f"{f.size_bytes:,}") for f in self.files]
        rows += [(name, str(rank), str(count), f"{size:,}, not written again") for name, rank, count, size in self._referred()]  # fmt: skip
        return notebook(html_table(title, ("file", "rank", "tensors", "bytes"), rows, numbers=("rank", "tensors")))


def plan_save(  # noqa: PLR0913 - keywords
    ranks: Sequence[Mapping[str, Described]],
    *,
    step: int,
    revision: int = 0,
    of_rank_zero: Collection[str] = (),
    only: int | None = None,
    own: Collection[str] | None = None,
    prefers: FilePreference = NO_PREFERENCE,
) -> SavePlan:
    """Decide which rank writes which bytes into which file.

    Replicated tensors are written once. Ranks share them, so that the bytes of the ranks are balanced. A slice is written by a rank that holds
    it. A component that belongs to each rank, such as its random streams, is stored once for each rank; the structure of a component says
    whether it does.

    Law: ``plan_save(ranks, only=r).files == plan_save(ranks).files_of(r)``. It takes as long as rank r has leaves, however many ranks there are, if
    the ranks share one description and every leaf is whole or cut by a rule.

    Args:
        ranks: for each rank, component name -> description, from `by_rule`. Ranks with equal descriptions share one object.
        step: the step of the state, >= 0.
        revision: how often this step has been saved before. Later saves use new file names, so that the old checkpoint stays whole until the
            new manifest replaces the old one.
        of_rank_zero: paths of replicated leaves that rank 0 writes, because its value counts.
        only: the rank whose files are planned; None for all.
        own: components of which each rank has its own, if that is known already; None to find it in the descriptions.
        prefers: from how many ranks on a rank has one file for all components, and how large files should be; the same on all ranks.

    Returns:
        The plan; equal on every rank, but for what each has of its own.

    Raises:
        InvalidArgument: if the step or the revision is negative, or ``ranks`` is empty.
        RanksDisagree: if a component that must be the same on all ranks is not, naming the first leaf.
        InvalidState: if the slices of a tensor overlap or do not cover it.

    Examples:
        >>> import torch
        >>> from trainfold.core.format.structure.describe import describe
        >>> plan = plan_save([{"ema": describe({"w": torch.zeros(3)}, "ema")[0]}], step=7)
        >>> plan.directory, plan.files[0].name, plan.files[0].size_bytes
        ('step-00000007', 'ema-00000-of-00001.safetensors', 4108)
    """
    if not ranks or step < 0 or revision < 0 or step >= 10**18:
        raise InvalidArgument(
            "plan_save", expected="ranks, 0 <= step < 10**18 and revision >= 0", found=f"step {step}, {len(ranks)} ranks",
            fix="save a state whose trainer component counts steps from 0",
        )  # fmt: skip
    names = list(ranks[0])
    for rank, described in enumerate(ranks):
        if described is not ranks[0] and list(described) != names:
            raise structures_differ("components", names, list(described), rank)
    by_component = {name: [described[name] for described in ranks] for name in names}
    components = tuple(_component(name, each, only or 0, own) for name, each in by_component.items())
    suffix = suffix_of(revision)
    parts = [
        (component.name, rank, pieces)
        for component in components
        for rank, pieces in _written(component, by_component[component.name], frozenset(of_rank_zero), only, prefers)
    ]
    files = files_of_parts(parts, len(ranks), suffix, prefers)
    return SavePlan(step, directory_of(step), len(ranks), components, tuple(files), suffix)


def files_of_parts(
    parts: Iterable[tuple[str, int, list[Piece]]], world_size: int, suffix: str, prefers: FilePreference
) -> list[FilePlan]:
    """The files of what ranks write: one for each component and rank, or for each rank where these are many.

    Args:
        parts: component, rank and what it writes, in the order of the components.
        world_size: the number of ranks.
        suffix: of the names, from `suffix_of`.
        prefers: from how many ranks on a rank has one file.
    """
    if world_size < prefers.one_a_rank_from:
        return [
            plan_file(data_file_name(name, rank, world_size, suffix), (name,), rank, pieces)
            for name, rank, pieces in parts
        ]
    by_rank: dict[int, dict[str, list[Piece]]] = {}
    for name, rank, pieces in parts:
        by_rank.setdefault(rank, {})[name] = pieces
    return [
        plan_file(
            data_file_name(RANK_FILE, rank, world_size, suffix), tuple(held), rank, chain.from_iterable(held.values())
        )
        for rank, held in sorted(by_rank.items())
    ]


def _component(name: str, ranks: list[Described], this: int, own: Collection[str] | None) -> ComponentPlan:
    first, mine = ranks[0], ranks[this]
    if own is not None and name in own:
        return ComponentPlan(name, is_own=True, node=mine.node, tensors=mine.tensors)
    if counts_on_rank_zero(first.node):
        return ComponentPlan(name, is_own=False, node=first.node, tensors=first.tensors)
    different = {id(each): (rank, each) for rank, each in reversed(list(enumerate(ranks)))}  # each with its first rank
    is_own = all(belongs_to_rank(name, each.node) for _, each in different.values())
    shapes = {path: (spec.dtype, spec.shape) for path, spec in first.tensors.items()} if len(different) > 1 else {}
    for rank, other in sorted(different.values(), key=lambda pair: pair[0])[1:]:
        if (
            is_same(other.node, first.node)
            and shapes == {path: (spec.dtype, spec.shape) for path, spec in other.tensors.items()}
            and list(other.tensors) == list(first.tensors)
        ):
            continue
        if is_own:
            break
        raise structures_differ(*first_disagreement(name, first, other), rank)
    # Equal structures may hold unequal tensors, so only a component without tensors is known to be the same on all ranks.
    if is_own and len(ranks) > 1 and (first.tensors or not all(is_same(other.node, first.node) for _, other in different.values())):  # fmt: skip
        return ComponentPlan(name, is_own=True, node=mine.node, tensors=mine.tensors)
    return ComponentPlan(name, is_own=False, node=first.node, tensors=first.tensors)


def _written(
    component: ComponentPlan,
    ranks: list[Described],
    of_rank_zero: Collection[str],
    only: int | None,
    prefers: FilePreference,
) -> Iterable[tuple[int, list[Piece]]]:
    """What each rank writes of a component, for the ranks that write any of it."""
    chosen = range(len(ranks)) if only is None else [only]
    if component.is_own:
        for rank in chosen:
            tensors = ranks[rank].tensors.items()
            yield from _some(rank, [Piece(path, spec, whole_box(spec.shape)) for path, spec in tensors])
        return
    if counts_on_rank_zero(component.node):
        whole = [Piece(path, spec, whole_box(spec.shape)) for path, spec in component.tensors.items()]
        yield from _some(0, whole) if 0 in chosen else ()
        return
    different = list({id(each): each for each in ranks}.values())
    specs = component.tensors
    listed = {path for each in different for path, spec in each.tensors.items() if spec.slices}
    ruled = specs if not listed else {path: spec for path, spec in specs.items() if path not in listed}
    shared = _assign(listed, ranks, of_rank_zero, prefers.object_bytes) if listed else {}
    order = {path: place for place, path in enumerate(specs)} if listed else {}
    for rank in chosen:
        mine = written_by(rank, len(ranks), ruled, item_bytes=_item_bytes, of_rank_zero=of_rank_zero, prefers=prefers)
        # in the order of the table, as `header_of` has empty tensors that share a place
        both = sorted(mine + shared[rank], key=lambda piece: order[piece.path]) if rank in shared else mine
        yield from _some(rank, both)


def suffix_of(revision: int) -> str:
    """What the names of the files of a revision have before their extension."""
    return f".r{revision}" if revision else ""


def data_file_name(held: str, rank: int, world_size: int, suffix: str) -> str:
    """The name of the file of a rank: of a component, or of `RANK_FILE` for all of them."""
    return f"{held}-{rank:05d}-of-{world_size:05d}{suffix}.safetensors"


def _item_bytes(dtype: str) -> int:
    return STORED[dtype].itemsize


def _some(rank: int, pieces: list[Piece]) -> Iterable[tuple[int, list[Piece]]]:
    if pieces:
        yield rank, pieces


def _assign(
    paths: Collection[str], ranks: list[Described], of_rank_zero: Collection[str], object_bytes: int
) -> dict[int, list[Piece]]:
    """Which rank writes what of leaves whose slices are listed, the largest slice first: balanced by bytes, where ranks have what an object should have."""
    pieces = [
        piece
        for path in ranks[0].tensors
        if path in paths
        for piece in _pieces(path, [each.tensors[path] for each in ranks])
    ]
    load = [0] * len(ranks)
    mine: dict[int, list[Piece]] = defaultdict(list)
    for path, spec, box, holders, nbytes in sorted(pieces, key=lambda piece: -piece[4]):
        rank = 0 if path in of_rank_zero else min(holders, key=lambda holder: (max(load[holder], object_bytes), holder))
        load[rank] += nbytes
        mine[rank].append(Piece(path, spec, box))
    return mine


def _pieces(path: str, specs: list[LeafSpec]) -> list[tuple[str, LeafSpec, Box, list[int], int]]:
    spec = specs[0]
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank, other in enumerate(specs):
        for box in other.slices or (box_of(other, rank),):
            if volume(box) or not volume(whole_box(spec.shape)):
                holders[box].append(rank)
    check_cover(path, list(holders), spec.shape)
    itemsize = STORED[spec.dtype].itemsize
    return [(path, spec, box, ranks, volume(box) * itemsize) for box, ranks in holders.items()]
