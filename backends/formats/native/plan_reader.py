"""`PlanReader`: carries out a `ReadPlan` on a store. The plan decides which bytes are read."""

from collections.abc import Iterable, Mapping
from typing import Any, Final, final

import torch

from trainfold.backends.formats.native.header_check import HeaderCheck
from trainfold.backends.formats.native.reader import ReadRequest, fresh_tensor, read_tensors
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.stores.protocol import Store
from trainfold.core.format.dtypes import STORED
from trainfold.core.format.manifest import DIGEST_DIGITS, PIECE_BYTES, Manifest, TensorRecord
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import Box, intersect, whole_box
from trainfold.core.optim.slot_layout import laid_out_like
from trainfold.core.resume.reads import ComponentReads, ShardRead, TensorRead


@final
class PlanReader:
    """Reads the tensors of one checkpoint into fresh memory on the devices of their targets.

    Args:
        store: the run.
        directory: the checkpoint's.
        manifest: its proved manifest.
    """

    def __init__(self, store: Store, directory: str, manifest: Manifest) -> None:
        self._store: Final = store
        self._directory: Final = directory
        self._files: Final = manifest.files
        self._headers: Final = HeaderCheck(store, directory, manifest)

    def read(self, reads: ComponentReads, targets: Mapping[str, Any]) -> dict[int, torch.Tensor]:
        """Read the tensors of a component.

        Args:
            reads: the component's part of the plan.
            targets: leaf path -> the leaf of this run that decides the device and the memory layout.

        Returns:
            Index in the component's table -> tensor; a slice where a slice was planned.

        Raises:
            CheckpointTorn: if a file is missing or too short.
            CheckpointDamaged: if bytes that are used have another digest, or the header of their file is not the one that was written.
            CheckpointHostile: if what is needed does not fit into memory.
        """
        single = {index: each for index, each in reads.tensors.items() if each.is_one_read}
        requests = without_collecting(self._requests)(single.values())
        dense = dict(zip(single, read_tensors(self._store, requests), strict=True))
        found = {
            index: _onto(dense.pop(index) if index in single else self._assembled(each), targets.get(each.path))
            for index, each in reads.tensors.items()
        }
        self._headers.check(reads.files)  # last: a checkpoint that does not fit into memory is refused by then
        return found

    def _assembled(self, read: TensorRead) -> torch.Tensor:
        """A slice assembled from several reads, or from a part of one; what lies in one run of its memory is read there."""
        record = read.record
        box = whole_box(record.shape) if read.box is None else read.box
        where = f"{self._store.url}/{self._directory} {record.path}"
        out = fresh_tensor(tuple(stop - start for start, stop in box), record.dtype, where)
        common = [intersect(each.box, box) or () for each in read.shards]
        targets = [
            out[_within(part, box)] if part == each.box else None
            for part, each in zip(common, read.shards, strict=True)
        ]
        requests = [self._request(record, each, out) for each, out in zip(read.shards, targets, strict=True)]
        pieces = read_tensors(self._store, requests)
        for each, part, target, piece in zip(read.shards, common, targets, pieces, strict=True):
            if target is None:
                out[_within(part, box)] = piece[_within(part, each.box)]
        return out

    def _requests(self, reads: Iterable[TensorRead]) -> list[ReadRequest]:
        return [self._request(each.record, each.shards[0]) for each in reads]

    def _request(self, record: TensorRecord, read: ShardRead, out: torch.Tensor | None = None) -> ReadRequest:
        shard = record.shards[read.shard]
        first = (read.start - shard.start) // PIECE_BYTES * DIGEST_DIGITS
        last = -(-(read.stop - shard.start) // PIECE_BYTES) * DIGEST_DIGITS
        is_whole = (read.start, read.stop) == (shard.start, shard.stop)
        return ReadRequest(
            name=f"{self._directory}/{self._files[shard.file].name}",
            start=read.start,
            stop=read.stop,
            dtype=record.dtype,
            stored=STORED[record.dtype].name,
            shape=tuple(stop - start for start, stop in read.box),
            digest=shard.digest,
            path=record.path,
            out=out,
            skip=read.skip,
            pieces="" if is_whole else shard.pieces[first:last],
        )


def _within(part: Box, box: Box) -> tuple[slice, ...]:
    """The slices of a part of a box in the memory of the box."""
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(part, box, strict=True))


def _onto(value: torch.Tensor, target: Any) -> torch.Tensor:
    return laid_out_like(value, target.tensor if isinstance(target, Shard) else target)
