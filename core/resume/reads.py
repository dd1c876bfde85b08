"""`plan_reads`: which stored bytes a restore reads, and for which tensors; decided before any byte is read.

Of a shard whose pieces have digests, only the pieces are read in which needed elements lie. So a run of needed bytes costs at most a piece more at each of its
ends. Inside of rows that are smaller than a piece every piece holds needed elements, and whole rows are read: a rank that needs 1/n of each row reads n times
what it needs. A shard without pieces (a small one, and one of version 1) is read whole, because its digest covers all of it. The cost is linear in the shards
of needed tensors, and boxes are compared once for all tensors that are cut and needed alike. The number of ranks does not enter.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import attrs

from trainfold.core import tree
from trainfold.core.errors import InvalidState
from trainfold.core.format.dtypes import STORED
from trainfold.core.format.indexes.needed import Needs, nowhere_else
from trainfold.core.format.manifest import PIECE_BYTES, ShardRecord, TensorRecord
from trainfold.core.format.structure.places import Leaf, places
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import Box, intersect, volume, whole_box
from trainfold.core.layout.world import World
from trainfold.core.resume.resume_plan import ComponentAction, ResumePlan
from trainfold.core.state.state import ModelState, OptimizerState, OwnOptimizerState

_Known: TypeAlias = dict[Any, list[tuple[int, int, int, Box]]]
Boxes: TypeAlias = Mapping[str, Box | None]
"""Leaf path -> the slice of the global tensor that this rank holds; None for all of it."""


class ShardRead(NamedTuple):
    """One stored shard to read. Reads sort in the order of their bytes.

    Attributes:
        file: the index of its file in the manifest.
        start: first byte in the file.
        stop: one past the last.
        tensor: the index of the tensor in the component's table.
        shard: the index of the shard in the tensor's record.
        box: the needed part of the shard; these bytes hold all of it, or some of it if there are several reads of the shard.
    """

    file: int
    start: int
    stop: int
    tensor: int
    shard: int
    box: Box = ()


@final
class TensorRead(NamedTuple):
    """One stored tensor, needed whole or in part.

    Attributes:
        path: the first leaf that it is for; tied leaves share one tensor.
        record: the tensor in the manifest.
        box: the slice that is needed; None for all of it.
        shards: what is read for it, in the order of the record.
    """

    path: str
    record: TensorRecord
    box: Box | None
    shards: tuple[ShardRead, ...]

    @property
    def wanted(self) -> Box:
        """The slice that is needed, if it is all of the tensor too."""
        return whole_box(self.record.shape) if self.box is None else self.box

    @property
    def is_one_read(self) -> bool:
        """Whether one read gives exactly the needed tensor, so that nothing has to be assembled."""
        return len(self.shards) == 1 and self.shards[0].box == self.wanted


@final
@attrs.frozen
class ComponentReads:
    """The reads of one component.

    Attributes:
        leaves: leaf path -> the saved leaf, in the order of the saved structure.
        tensors: index in the component's table -> its read, in the order of the bytes of the first shard.
    """

    leaves: Mapping[str, Leaf] = attrs.field(repr=False)
    tensors: Mapping[int, TensorRead]

    @property
    def shards(self) -> Iterable[ShardRead]:
        """Every read of the component; no shard twice."""
        return (shard for tensor in self.tensors.values() for shard in tensor.shards)

    @property
    def files(self) -> frozenset[int]:
        """The files that are read, by their index in the manifest."""
        return frozenset(shard.file for shard in self.shards)


@final
@attrs.frozen
class ReadPlan:
    """Everything that one rank reads at a restore. Prints as a table of its files.

    Attributes:
        checkpoint: the directory.
        files: the name of each file, in the order of the manifest; that of a file of another checkpoint begins with its directory.
        components: component -> its reads, in the order of the plan.
    """

    checkpoint: str
    files: tuple[str, ...]
    components: Mapping[str, ComponentReads]

    @property
    def size_bytes(self) -> int:
        """Bytes that are read."""
        return sum(shard.stop - shard.start for reads in self.components.values() for shard in reads.shards)

    @property
    def ranges(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """File name -> the byte ranges that are read: sorted, disjoint, and merged where they touch."""
        return self.ranges_of(shard for reads in self.components.values() for shard in reads.shards)

    def ranges_of(self, shards: Iterable[ShardRead]) -> dict[str, tuple[tuple[int, int], ...]]:
        """The same of some of its reads."""
        found: dict[str, list[tuple[int, int]]] = {}
        for shard in sorted(shards):
            spans = found.setdefault(self.files[shard.file], [])
            if spans and spans[-1][1] >= shard.start:
                spans[-1] = (spans[-1][0], max(spans[-1][1], shard.stop))
            elif shard.start < shard.stop:
                spans.append((shard.start, shard.stop))
        return {name: tuple(spans) for name, spans in found.items()}

    def __str__(self) -> str:
        rows = [
            f"{name:44} {len(spans):>7} ranges {sum(stop - start for start, stop in spans):>15,} bytes"
            for name, spans in self.ranges.items()
        ]
        return "\n".join([f"read {self.checkpoint}: {len(rows)} files, {self.size_bytes:,} bytes", *rows])


def plan_reads(
    plan: ResumePlan, targets: Mapping[str, Boxes], *, elsewhere: Callable[[str, str], bool] = nowhere_else
) -> ReadPlan:
    """Decide which shards a restore reads.

    Laws: the reads of a tensor cover the slice that is needed; no byte is read twice; every shard that is read holds a part of the
    slice; leaves that keep the target's value, and components that are kept or reset, are not read.

    Args:
        plan: the resume, as decided.
        targets: component -> the leaves of this rank's state and the slice of each that it holds, None for the whole tensor. Leaves
            that hold no tensor may be in it or not.
        elsewhere: (component, leaf path) -> whether only other ranks hold a leaf, which this rank does not read, from `held_elsewhere`.

    Returns:
        The reads of this rank.

    Examples:
        >>> from trainfold.core.format.manifest import FileRecord, Head, Manifest, ComponentRecord, ShardRecord
        >>> shards = tuple(ShardRecord(rank, 8, 16, ((2 * rank, 2 * rank + 2),), "xxh3:") for rank in range(4))
        >>> table = (TensorRecord("ema['w']", "float32", (8,), shards),)
        >>> files = tuple(FileRecord(f"ema-{rank}", ("ema",), rank, 16, "xxh3:") for rank in range(4))
        >>> ema = ComponentRecord("ema", ({"dict": {"w": {"t": 0}}},), (table,), "xxh3:")
        >>> manifest = Manifest(Head("r", 7), 4, (ema,), (), {}, {}, files)
        >>> plan = ResumePlan("runs/a", "step-00000007", manifest, (ComponentAction("ema", "load"),), (), ())
        >>> print(plan_reads(plan, {"ema": {"ema['w']": ((3, 6),)}}))
        read step-00000007: 2 files, 16 bytes
        ema-1                                              1 ranges               8 bytes
        ema-2                                              1 ranges               8 bytes
    """
    manifest = plan.manifest
    components: dict[str, ComponentReads] = {}
    for action in plan.actions:
        saved = manifest.component(action.name)
        if saved is not None and action.verb in ("load", "adopt"):
            leaves = {leaf.path: leaf for leaf in places(saved.nodes[action.part], action.name)}
            records = saved.tensors[action.part]
            needed = _needed(action, leaves, targets.get(action.name, {}), records, elsewhere)
            components[action.name] = ComponentReads(leaves, tensor_reads(records, needed))
    return ReadPlan(plan.checkpoint, tuple(file.label for file in manifest.files), components)


def _needed(
    action: ComponentAction,
    leaves: Mapping[str, Leaf],
    boxes: Boxes,
    records: Sequence[TensorRecord],
    elsewhere: Callable[[str, str], bool],
) -> dict[int, tuple[str, Box | None]]:
    """Tensor index -> the first leaf that needs it, and which slice; an adopted component needs every saved leaf.

    Raises:
        InvalidState: for a leaf that was saved as one tensor with another leaf, of which this rank holds another slice.
    """
    kept = frozenset(action.kept)
    found: dict[int, tuple[str, Box | None]] = {}
    for path, leaf in leaves.items():
        is_needed = path in boxes or (action.verb == "adopt" and not elsewhere(action.name, path))
        if leaf.tensor is None or path in kept or not is_needed:
            continue
        box = boxes.get(path)
        first, other = found.setdefault(leaf.tensor, (path, box))
        if box != other and {box, other} != {None, whole_box(records[leaf.tensor].shape)}:
            raise InvalidState(
                path,
                expected=f"the slice that this rank holds of {first}: the checkpoint has one tensor for both",
                found="another slice",
                fix="cut both alike, or tie them as they were when they were saved",
            )
    return found


def tensor_reads(
    records: Sequence[TensorRecord], needed: Mapping[int, tuple[str, Box | None]]
) -> dict[int, TensorRead]:
    """The reads of one table of tensors, in the order of their bytes.

    Args:
        records: of the table.
        needed: index in the table -> the leaf that it is for, and the slice that is needed; None for all of it.
    """
    known: _Known = {}  # many tensors are cut alike, and needed alike
    found = [
        (index, TensorRead(path, records[index], box, _shard_reads(index, records[index], box, known)))
        for index, (path, box) in needed.items()
    ]
    return dict(sorted(found, key=lambda pair: pair[1].shards[:1]))


def _shard_reads(index: int, record: TensorRecord, box: Box | None, known: _Known) -> tuple[ShardRead, ...]:
    shards = record.shards
    if len(shards) == 1 and box is None:  # nearly all of them
        return (ShardRead(*shards[0][:3], index, 0, shards[0].box),)
    key = box, record.dtype, *[(shard.box, not shard.pieces) for shard in shards]
    parts = known[key] if key in known else known.setdefault(key, [*_parts(record, box)])
    return tuple([
        ShardRead((shard := shards[number]).file, shard.start + low, shard.start + high, index, number, common)
        for number, low, high, common in parts
    ])  # fmt: skip


def _parts(record: TensorRecord, box: Box | None) -> Iterator[tuple[int, int, int, Box]]:
    """What is read of each shard: its index, the first byte, one past the last, and the needed part."""
    for number, shard in enumerate(record.shards):
        common = shard.box if box is None or not record.shape else intersect(shard.box, box)
        if common is not None and volume(common):  # replicas that hold no row may have written an empty part
            for low, high in _ranges(shard, common, STORED[record.dtype].itemsize):
                yield number, low, high, common


def _ranges(shard: ShardRecord, common: Box, itemsize: int) -> list[tuple[int, int]]:
    """The bytes that give a part of a shard: whole pieces, because these have digests.

    Pieces that touch are one read, and nothing else is: a read of its own costs 34 us of CPU time, a piece between two others 163 us
    (``benchmarks/gaps.py``).
    """
    size = shard.stop - shard.start
    if not shard.pieces or common == shard.box:
        return [(0, size)]
    ranges: list[tuple[int, int]] = []
    for low, high in _spans(shard.box, common, itemsize, 0):
        start, stop = low // PIECE_BYTES * PIECE_BYTES, min(-(-high // PIECE_BYTES) * PIECE_BYTES, size)
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], stop
        else:
            ranges.append((start, stop))
    return ranges


def _spans(outer: Box, common: Box, itemsize: int, offset: int) -> Iterator[tuple[int, int]]:
    """The runs of bytes in a shard that hold a part of it. Rows that are not larger than a piece are one run: each piece holds some of them."""
    (low, _), (start, stop), inner = outer[0], common[0], outer[1:]
    row_bytes = volume(inner) * itemsize
    if common[1:] == inner or row_bytes <= PIECE_BYTES:
        first, last, step = 0, 0, itemsize
        for (side, end), (begin, finish) in zip(outer[::-1], common[::-1], strict=True):
            first, last, step = first + (begin - side) * step, last + (finish - 1 - side) * step, step * (end - side)
        yield offset + first, offset + last + itemsize
        return
    for row in range(start, stop):
        yield from _spans(inner, common[1:], itemsize, offset + (row - low) * row_bytes)


def sharded_params(components: Mapping[str, Any]) -> dict[str, Shard]:
    """Return the name of each parameter of which a rank holds a part -> that part; parameters of other modules begin with the component.

    Args:
        components: component -> value, of the run that resumes.

    Examples:
        >>> sharded_params({"trainer": 1})
        {}
    """
    leaves: dict[str, Any] = {
        name if component == "model" else f"{component}.{name}": leaf
        for component, each in components.items()
        if isinstance(each, ModelState)
        for name, leaf in each.params.items()
    }
    return {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Shard)}


def held_elsewhere(components: Mapping[str, Any]) -> Callable[[str, str], bool]:
    """Return (component, leaf path) -> whether a leaf belongs to a parameter or buffer that only other stages of a pipeline have.

    Args:
        components: component -> value, of a stage that resumes.

    Examples:
        >>> from trainfold.core.state.leaves import Leaves
        >>> stage = {"model": ModelState(params=Leaves({"w": 1}), buffers=Leaves({}))}
        >>> elsewhere = held_elsewhere(stage)
        >>> elsewhere("model", "model.params['w']"), elsewhere("model", "model.params['v']"), elsewhere("trainer", "trainer.step")
        (False, True, False)
    """
    held: dict[str, tuple[tuple[str, ...], set[str]]] = {}
    for name, each in components.items():
        base = each.base if isinstance(each, OwnOptimizerState) else each
        if isinstance(base, ModelState):
            rooms = {f"{name}.params": base.params, f"{name}.buffers": base.buffers}
            held[name] = tuple(rooms), {f"{room}[{key!r}]" for room, leaves in rooms.items() for key in leaves}
        elif isinstance(base, OptimizerState):
            roots = tuple(f"{name}{inner}.{room}" for inner in ("", ".base") for room in ("slots", "masters"))
            names = [key for group in base.groups for key in group.params]
            held[name] = roots, {f"{root}[{key!r}]" for root in roots for key in names}

    def elsewhere(component: str, path: str) -> bool:
        if component not in held:
            return False
        roots, owners = held[component]
        root = next((root for root in roots if path.startswith(f"{root}[")), None)
        if root is None:
            return False
        quote = path[len(root) + 1]
        end = path.find(f"{quote}]", len(root) + 2)
        return path[: end + 2] not in owners

    return elsewhere


def needs_of(components: Mapping[str, Any], world: World, *, is_stage: bool = False) -> Needs:
    """What a rank needs of a checkpoint, as `run_resume` will read it.

    Args:
        components: component -> value, of the run that resumes.
        world: the rank, and the ranks that load.
        is_stage: whether other ranks hold other leaves.

    Examples:
        >>> import torch
        >>> from trainfold.core.state.leaves import Leaves
        >>> half = ModelState(params=Leaves({"w": Shard(torch.zeros(2), (4,), (2,))}), buffers=Leaves({}))
        >>> needs = needs_of({"model": half}, World(1, 2))
        >>> needs.box("model", "model.params['w']", (4,)), needs.box("optimizer", "optimizer.slots['w']['exp_avg']", (4,))
        (((2, 4),), ((2, 4),))
    """
    parts = {
        (name, path): leaf
        for name, each in components.items()
        for path, leaf in tree.named_leaves(each, name)
        if isinstance(leaf, Shard)
    }
    params = sharded_params(components)
    owners: dict[str, dict[str, Shard]] = {}

    def box(component: str, path: str, shape: tuple[int, ...]) -> Box | None:
        leaf = parts.get((component, path))
        if leaf is None and params:
            if component not in owners:
                owners[component] = _slot_owners(component, params)
            leaf = owners[component].get(path.rpartition("[")[0])
        return leaf.box if leaf is not None and leaf.shape == shape else None

    return Needs(world.rank, world.size, box, elsewhere=held_elsewhere(components) if is_stage else nowhere_else)


def _slot_owners(component: str, params: Mapping[str, Shard]) -> dict[str, Shard]:
    return {f"{component}{inner}.slots[{name!r}]": leaf for name, leaf in params.items() for inner in ("", ".base")}


def slot_boxes(component: str, records: Iterable[TensorRecord], params: Mapping[str, Shard]) -> dict[str, Box]:
    """Return leaf path -> box, for each saved slot with the shape of a parameter of which this rank holds a part.

    Args:
        component: the component of the optimizer.
        records: its saved tensors.
        params: from `sharded_params`.

    Examples:
        >>> import torch
        >>> half = Shard(torch.zeros(2), (4,), (2,))
        >>> saved = [TensorRecord(f"optimizer.slots['w'][{key!r}]", "float32", shape, ()) for key, shape in (("exp_avg", (4,)), ("step", ()))]
        >>> slot_boxes("optimizer", saved, {"w": half})
        {"optimizer.slots['w']['exp_avg']": ((2, 4),)}
    """
    if not params:
        return {}
    owners = _slot_owners(component, params)
    found: dict[str, Box] = {}
    for record in records:
        owner = owners.get(record.path.rpartition("[")[0])
        if owner is not None and record.shape == owner.shape:
            found[record.path] = owner.box
    return found
