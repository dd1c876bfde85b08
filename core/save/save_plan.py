"""`SavePlan`: what a save will write, rank by rank and byte by byte, decided before anything is touched.

Law: the plan is a function of the ranks' descriptions alone, so every rank that gathers them computes the same plan.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import final

import attrs

from trainfold.core.errors import InvalidArgument, RanksDisagree
from trainfold.core.format.dtypes import STORED, size_bytes, stored_shape
from trainfold.core.format.file_names import directory_of, storage_key
from trainfold.core.format.manifest import Manifest
from trainfold.core.format.structure.describe import Described
from trainfold.core.format.structure.ownership import belongs_to_rank
from trainfold.core.json_values import Json, canonical_json
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import Box, check_cover, volume, whole_box

ALIGNMENT_BYTES = 4096
_LENGTH_BYTES = 8  # before the header's text


@final
@attrs.frozen
class TensorPlacement:
    """Where a tensor, or a slice of one, lies in a file.

    Attributes:
        path: the leaf path.
        dtype: torch's name of the dtype.
        stored: the safetensors dtype.
        shape: the shape of what is stored, in torch's dtype.
        start: first byte in the file.
        stop: one past its last byte.
        box: the part of the global tensor, one (start, stop) pair a dimension.
    """

    path: str
    dtype: str
    stored: str
    shape: tuple[int, ...]
    start: int
    stop: int
    box: Box


@final
@attrs.frozen
class FilePlan:
    """One safetensors file: its name, its writer and its exact size.

    Attributes:
        name: a single path component.
        component: the component whose tensors it holds.
        rank: the rank that writes it.
        header: the 8-byte length and the JSON header, padded so that the data begins at a multiple of 4096.
        size_bytes: of the whole file.
        tensors: in the order of their bytes.
    """

    name: str
    component: str
    rank: int
    header: bytes
    size_bytes: int
    tensors: tuple[TensorPlacement, ...]


@final
@attrs.frozen
class ComponentPlan:
    """One component of a save.

    Attributes:
        name: the component.
        nodes: its structure; one for all ranks, or one for each rank where its pattern is per-rank.
        tensors: for each node, path -> spec of its tensors, in the order of their indices.
    """

    name: str
    nodes: tuple[Json, ...]
    tensors: tuple[Mapping[str, LeafSpec], ...]


@final
@attrs.frozen
class SavePlan:
    """What a save will write. Prints as a table.

    Attributes:
        step: the step that the state is at.
        directory: the checkpoint's name, ``step-00000120``.
        world_size: ranks that take part.
        components: in the state's order.
        files: every file of every rank.
    """

    step: int
    directory: str
    world_size: int
    components: tuple[ComponentPlan, ...]
    files: tuple[FilePlan, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size_bytes for file in self.files)

    def files_of(self, rank: int) -> tuple[FilePlan, ...]:
        """The files that one rank writes."""
        return tuple(file for file in self.files if file.rank == rank)

    def __str__(self) -> str:
        rows = [
            f"{f.name:44} rank {f.rank:<4} {len(f.tensors):>7} tensors {f.size_bytes:>15,} bytes" for f in self.files
        ]
        names = ", ".join(component.name for component in self.components)
        return "\n".join([f"save {self.directory}: {names}; {self.world_size} ranks, {self.size_bytes:,} bytes", *rows])


def plan_save(
    ranks: Sequence[Mapping[str, Described]],
    *,
    step: int,
    revision: int = 0,
    per_rank: Collection[str] = ("rng", "dataset"),
    of_rank_zero: Collection[str] = (),
) -> SavePlan:
    """Decide which rank writes which bytes into which file.

    Replicated tensors are written once, each by one rank, so that the ranks' bytes are balanced; a slice is written by a
    rank that has it.

    Args:
        ranks: for each rank, component name -> description, as `describe` made it.
        step: the state's step, >= 0.
        revision: how often this step has been saved before; later saves use new file names, so that the old
            checkpoint stays whole until the new manifest replaces the old one (C08).
        per_rank: components that may differ between ranks, and are then stored once for each rank (B05, G05); the data position
            of a state only if it is a loader's own, and not one in global units.
        of_rank_zero: paths of replicated leaves of which rank 0 has the value that counts, so that it writes them.

    Returns:
        The plan; equal on every rank.

    Raises:
        InvalidArgument: if the step or the revision is negative, or there is no rank.
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
        if list(described) != names:
            raise _disagree("components", names, list(described), rank)
    components = tuple(_component(name, [described[name] for described in ranks], per_rank) for name in names)
    files = [
        file
        for component in components
        for file in _files(
            component, [described[component.name] for described in ranks], revision, frozenset(of_rank_zero)
        )
    ]
    return SavePlan(step, directory_of(step), len(ranks), components, tuple(files))


def _component(name: str, ranks: list[Described], per_rank: Collection[str]) -> ComponentPlan:
    first = ranks[0]
    is_own = name in per_rank and (name != "dataset" or all(belongs_to_rank(name, each.node) for each in ranks))
    shapes = {path: (spec.dtype, spec.shape) for path, spec in first.tensors.items()}
    for rank, other in enumerate(ranks[1:], start=1):
        if other is first or (
            _is_same(other.node, first.node)
            and shapes == {path: (spec.dtype, spec.shape) for path, spec in other.tensors.items()}
            and list(other.tensors) == list(first.tensors)
        ):
            continue
        if is_own:
            break
        raise _disagree(*_first_difference(name, first, other), rank)
    # Equal structures may hold unequal tensors, so only what has no tensors at all can be known to be the same.
    if is_own and len(ranks) > 1 and (first.tensors or not all(_is_same(other.node, first.node) for other in ranks)):
        return ComponentPlan(name, tuple(each.node for each in ranks), tuple(each.tensors for each in ranks))
    return ComponentPlan(name, (first.node,), (first.tensors,))


def _files(
    component: ComponentPlan, ranks: list[Described], revision: int, of_rank_zero: Collection[str]
) -> Iterable[FilePlan]:
    suffix = f".r{revision}" if revision else ""
    for rank, held in sorted(_assign(component, ranks, of_rank_zero).items()):
        if held:
            name = f"{component.name}-{rank:05d}-of-{len(ranks):05d}{suffix}.safetensors"
            yield _file(name, component.name, rank, held)


def _assign(
    component: ComponentPlan, ranks: list[Described], of_rank_zero: Collection[str]
) -> dict[int, list[tuple[str, LeafSpec, Box]]]:
    """Which rank writes what: its own where components are per rank, else balanced by bytes, the largest first."""
    sharded = any(spec.slices for each in ranks for spec in each.tensors.values())
    if len(component.nodes) > 1 or (len(ranks) == 1 and not sharded):
        return {
            rank: [(path, spec, whole_box(spec.shape)) for path, spec in tensors.items()]
            for rank, tensors in enumerate(component.tensors)
        }
    pieces = [piece for path in component.tensors[0] for piece in _pieces(path, [each.tensors[path] for each in ranks])]
    load = [0] * len(ranks)
    mine: dict[int, list[tuple[str, LeafSpec, Box]]] = defaultdict(list)
    for path, spec, box, holders, nbytes in sorted(pieces, key=lambda piece: -piece[4]):
        rank = 0 if path in of_rank_zero else min(holders, key=lambda holder: (load[holder], holder))
        load[rank] += nbytes
        mine[rank].append((path, spec, box))
    return mine


def _pieces(path: str, specs: list[LeafSpec]) -> list[tuple[str, LeafSpec, Box, list[int], int]]:
    spec = specs[0]
    if not any(other.slices for other in specs):
        return [(path, spec, whole_box(spec.shape), list(range(len(specs))), size_bytes(spec.dtype, spec.shape))]
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank, other in enumerate(specs):
        for box in other.slices or (whole_box(other.shape),):
            if volume(box) or not volume(whole_box(spec.shape)):
                holders[box].append(rank)
    check_cover(path, list(holders), spec.shape)
    itemsize = STORED[spec.dtype].itemsize
    return [(path, spec, box, ranks, volume(box) * itemsize) for box, ranks in holders.items()]


def _file(name: str, component: str, rank: int, held: list[tuple[str, LeafSpec, Box]]) -> FilePlan:
    # Wide dtypes first: with no gaps allowed between tensors, this alone keeps each one aligned to its item size.
    held = sorted(held, key=lambda piece: -STORED[piece[1].dtype].itemsize)
    offset = 0
    spans = []
    for path, spec, box in held:
        shape, stored, listed, nbytes = _layout(spec.dtype, box)
        end = offset + nbytes
        spans.append((path, spec.dtype, stored, shape, listed, offset, end, box))
        offset = end
    header = _header(
        component, ((path, stored, listed, start, end) for path, _, stored, _, listed, start, end, _ in spans)
    )
    base = len(header)
    placements = tuple(
        TensorPlacement(path, dtype, stored_name, shape, base + start, base + stop, box)
        for path, dtype, stored_name, shape, _, start, stop, box in spans
    )
    return FilePlan(name, component, rank, header, base + offset, placements)


def _header(component: str, spans: Iterable[tuple[str, str, list[int], int, int]]) -> bytes:
    """The first bytes of a file: path, stored dtype, listed shape, start and stop of each tensor, in the order of the bytes."""
    header: dict[str, Json] = {"__metadata__": {"format": "pt", "trainfold": component}}
    for path, stored, listed, start, stop in spans:
        key = storage_key(path)
        header[path if key in header else key] = {"dtype": stored, "shape": listed, "data_offsets": [start, stop]}
    text = canonical_json(header)
    text += b" " * (-(_LENGTH_BYTES + len(text)) % ALIGNMENT_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def header_of(manifest: Manifest, index: int) -> bytes | None:
    """The header that a save writes into a file, made again from what the manifest says of it; None for a file without tensors.

    Law: for each file of a plan it is the plan's header. So the bytes of a header, spare ones included, can be compared at a load, which
    reads no other byte that it does not use.

    Args:
        manifest: the checkpoint's.
        index: of the file in it.
    """
    file = manifest.files[index]
    component = manifest.component(file.component)
    found = [
        (shard.start, shard.stop, record.path, record.dtype, shard.box)
        for table in (() if component is None else component.tensors)
        for record in table
        for shard in record.shards
        if shard.file == index
    ]
    # empty tensors may share a start: then the wider ones come first, and else the order of the table, as `_file` has them
    found.sort(key=lambda piece: (piece[0], piece[1], -STORED[piece[3]].itemsize))
    if not found:
        return None
    base = found[0][0]
    return _header(
        file.component,
        ((path, *_layout(dtype, box)[1:3], start - base, stop - base) for start, stop, path, dtype, box in found),
    )


@lru_cache(maxsize=4096)
def _layout(dtype: str, box: Box) -> tuple[tuple[int, ...], str, list[int], int]:
    """Shape, safetensors dtype, listed shape and bytes of a box; the same for all leaves of a kind."""
    shape = tuple(stop - start for start, stop in box)
    return shape, STORED[dtype].name, list(stored_shape(dtype, shape)), size_bytes(dtype, shape)


def _first_difference(name: str, one: Described, other: Described) -> tuple[str, str, str]:
    """The first leaf that two ranks describe otherwise, and what each has there."""
    if not _is_same(one.node, other.node):
        return _first_node(name, one.node, other.node)
    mine, theirs = (
        {path: f"a tensor of {spec.dtype} {[*spec.shape]}" for path, spec in each.tensors.items()}
        for each in (one, other)
    )
    paths = [path for path in {**mine, **theirs} if mine.get(path) != theirs.get(path)]
    if not paths:  # the same tensors, in another order
        return name, _short([*mine]), _short([*theirs])
    return paths[0], mine.get(paths[0], "nothing"), theirs.get(paths[0], "nothing")


def _first_node(path: str, one: Json, other: Json, tag: str = "") -> tuple[str, str, str]:
    """As `_first_difference`, of two nodes of the form of `trainfold.core.format.structure.rebuild`; ``tag`` is the one above."""
    if isinstance(one, dict) and isinstance(other, dict) and list(one) == list(other):
        for key in one:
            if not _is_same(one[key], other[key]):
                step = {"dict": f"[{key!r}]", "leaves": f"[{key!r}]", "fields": f".{key}", "static": f".{key}"}.get(tag)
                return _first_node(path + (step or ""), one[key], other[key], "" if step else key)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            if not _is_same(mine, theirs):
                return _first_node(f"{path}[{index}]" if tag in ("list", "tuple") else path, mine, theirs)
    return path, _short(one), _short(other)


def _is_same(one: Json, other: Json) -> bool:
    """Whether two nodes are the same to the bit; ``==`` alone takes 0.0 for -0.0, and 1 for True."""
    return one is other or (one == other and repr(one) == repr(other))


def _short(value: object, limit: int = 80) -> str:
    return repr(value)[:limit]


def _disagree(where: str, mine: object, theirs: object, rank: int) -> RanksDisagree:
    return RanksDisagree(
        where,
        expected=f"what rank 0 has: {mine}",
        found=f"on rank {rank}: {theirs}",
        fix="make it equal on all ranks, a count by summing it over them; what each rank has of its own is saved for its random streams and its loader alone",
    )
