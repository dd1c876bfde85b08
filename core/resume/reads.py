"""`plan_reads`: which stored bytes a restore reads, and for which tensors; decided before any byte is read.

Of a shard whose pieces have digests, only the pieces are read in which needed elements lie. A shard without them (a small one, and one of version 1)
is read whole, because its digest covers all of it. The cost is linear in the shards of the tensors that are needed. The number of ranks, of the saved run
or of this one, does not enter.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import attrs

from trainfold.core.format.dtypes import STORED
from trainfold.core.format.manifest import PIECE_BYTES, ShardRecord, TensorRecord
from trainfold.core.format.structure.places import Leaf, places
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import Box, intersect, volume, whole_box
from trainfold.core.resume.resume_plan import ComponentAction, ResumePlan
from trainfold.core.state.state import ModelState

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
        box: the part of the tensor that is taken from these bytes.
        skip: how many of the bytes come before those of the box.
    """

    file: int
    start: int
    stop: int
    tensor: int
    shard: int
    box: Box = ()
    skip: int = 0


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
    def is_one_read(self) -> bool:
        """Whether one read gives exactly the needed tensor, so that nothing has to be assembled."""
        wanted = whole_box(self.record.shape) if self.box is None else self.box
        return len(self.shards) == 1 and self.shards[0].box == wanted


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
        files: the name of each file of the checkpoint, in the order of the manifest.
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
        found: dict[str, list[tuple[int, int]]] = {}
        for shard in sorted(shard for reads in self.components.values() for shard in reads.shards):
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


def plan_reads(plan: ResumePlan, targets: Mapping[str, Boxes]) -> ReadPlan:
    """Decide which shards a restore reads.

    Laws: the reads of a tensor cover the slice that is needed; no byte is read twice; every shard that is read holds a part of the
    slice; leaves that keep the target's value, and components that are kept or reset, are not read.

    Args:
        plan: the resume, as decided.
        targets: component -> the leaves of this rank's state and the slice of each that it holds, None for the whole tensor. Leaves
            that hold no tensor may be in it or not.

    Returns:
        The reads of this rank.

    Examples:
        >>> from trainfold.core.format.manifest import FileRecord, Head, Manifest, ComponentRecord, ShardRecord
        >>> shards = tuple(ShardRecord(rank, 8, 16, ((2 * rank, 2 * rank + 2),), "xxh3:") for rank in range(4))
        >>> table = (TensorRecord("ema['w']", "float32", (8,), shards),)
        >>> files = tuple(FileRecord(f"ema-{rank}", "ema", rank, 16, "xxh3:") for rank in range(4))
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
            needed = _needed(action, leaves, targets.get(action.name, {}))
            components[action.name] = ComponentReads(leaves, _tensor_reads(saved.tensors[action.part], needed))
    return ReadPlan(plan.checkpoint, tuple(file.name for file in manifest.files), components)


def _needed(action: ComponentAction, leaves: Mapping[str, Leaf], boxes: Boxes) -> dict[int, tuple[str, Box | None]]:
    """Tensor index -> the first leaf that needs it, and which slice; an adopted component needs every saved leaf."""
    kept = frozenset(action.kept)
    found: dict[int, tuple[str, Box | None]] = {}
    for path, leaf in leaves.items():
        if leaf.tensor is None or leaf.tensor in found or path in kept:
            continue
        if action.verb == "adopt" or path in boxes:
            found[leaf.tensor] = (path, boxes.get(path))
    return found


def _tensor_reads(
    records: Sequence[TensorRecord], needed: Mapping[int, tuple[str, Box | None]]
) -> dict[int, TensorRead]:
    """The reads of one table of tensors, in the order of their bytes."""
    found = [
        (index, TensorRead(path, records[index], box, _shard_reads(index, records[index], box)))
        for index, (path, box) in needed.items()
    ]
    return dict(sorted(found, key=lambda pair: pair[1].shards[:1]))


def _shard_reads(index: int, record: TensorRecord, box: Box | None) -> tuple[ShardRead, ...]:
    shards = record.shards
    if len(shards) == 1 and box is None:  # nearly all of them
        (only,) = shards
        return (ShardRead(only.file, only.start, only.stop, index, 0, only.box),)
    found: list[ShardRead] = []
    for number, shard in enumerate(shards):
        common = shard.box if box is None or not record.shape else intersect(shard.box, box)
        if common is not None:
            found.extend(_part_reads(index, number, shard, common, STORED[record.dtype].itemsize))
    return tuple(found)


def _part_reads(index: int, number: int, shard: ShardRecord, common: Box, itemsize: int) -> list[ShardRead]:
    """The reads that give a part of a shard: whole pieces, because these have digests; all of the shard where that is no more."""
    whole = [ShardRead(shard.file, shard.start, shard.stop, index, number, shard.box)]
    if not shard.pieces or common == shard.box:
        return whole
    size, parts = shard.stop - shard.start, []
    for low, high, box in _spans(shard.box, common, itemsize, 0):
        start, stop = low // PIECE_BYTES * PIECE_BYTES, min(-(-high // PIECE_BYTES) * PIECE_BYTES, size)
        parts.append(ShardRead(shard.file, shard.start + start, shard.start + stop, index, number, box, low - start))
    return parts if sum(part.stop - part.start for part in parts) < size else whole


def _spans(outer: Box, common: Box, itemsize: int, offset: int) -> Iterator[tuple[int, int, Box]]:
    """The runs of bytes in a shard that hold a part of it, and the box that each holds; rows are taken whole unless they are larger than a piece."""
    (low, _), (start, stop), inner = outer[0], common[0], outer[1:]
    row_bytes = volume(inner) * itemsize
    if common[1:] == inner or row_bytes <= PIECE_BYTES:
        yield offset + (start - low) * row_bytes, offset + (stop - low) * row_bytes, ((start, stop), *inner)
        return
    for row in range(start, stop):
        for first, last, box in _spans(inner, common[1:], itemsize, offset + (row - low) * row_bytes):
            yield first, last, ((row, row + 1), *box)


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
    owners = {f"{component}{inner}.slots[{name!r}]": leaf for name, leaf in params.items() for inner in ("", ".base")}
    found: dict[str, Box] = {}
    for record in records:
        owner = owners.get(record.path.rpartition("[")[0])
        if owner is not None and record.shape == owner.shape:
            found[record.path] = owner.box
    return found
