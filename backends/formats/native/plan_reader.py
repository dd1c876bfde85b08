"""`PlanReader`: carries out a `ReadPlan` on a store. The plan decides which bytes are read."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, final

import torch

from trainfold.backends.formats.native.header_check import HeaderCheck
from trainfold.backends.formats.native.reader import ReadRequest, ReadsInOrder, check_memory, fresh_tensor, read_tensors
from trainfold.backends.formats.native.scatter import Inside, can_scatter
from trainfold.backends.formats.native.small_shards import SMALL_BYTES, SmallShards
from trainfold.backends.formats.native.unread import UnreadTensors
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.stores.protocol import Store
from trainfold.core.format.dtypes import STORED, size_bytes
from trainfold.core.format.manifest import DIGEST_DIGITS, PIECE_BYTES, Manifest, TensorRecord
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import Box
from trainfold.core.optim.slot_layout import laid_out_like
from trainfold.core.resume.reads import ComponentReads, ShardRead, TensorRead


@final
class PlanReader:
    """Reads the tensors of one checkpoint, into fresh memory on the devices of their targets or into memory that is there.

    Args:
        store: the run.
        directory: the checkpoint's.
        manifest: its proved manifest.
    """

    def __init__(self, store: Store, directory: str, manifest: Manifest) -> None:
        self._store: Final = store
        self._directory: Final = directory
        self._files: Final = manifest.files
        self._headers: Final = HeaderCheck(store, directory, manifest.written or manifest)

    def read(
        self,
        reads: ComponentReads,
        targets: Mapping[str, Any],
        *,
        unread: UnreadTensors | None = None,
        later: Collection[int] = (),
    ) -> dict[int, torch.Tensor]:
        """Read the tensors of a component.

        Args:
            reads: the component's part of the plan.
            targets: leaf path -> the leaf of this run that decides the device and the memory layout.
            unread: gets what is not read now; None for nothing.
            later: the tensors that are not read now, by index.

        Returns:
            Index in the component's table -> tensor; a slice where a slice was planned; for what is read later, a meta tensor.

        Raises:
            CheckpointTorn: if a file is missing or too short.
            CheckpointDamaged: if bytes that are used have another digest, or the header of their file is not the one that was written.
            CheckpointHostile: if what is needed does not fit into memory.
        """
        waits = frozenset() if unread is None else frozenset(later)
        now = {index: each for index, each in reads.tensors.items() if index not in waits}
        dense = dict(zip(now, without_collecting(self._fresh)(now.values()), strict=True))
        found = {}
        for index, each in reads.tensors.items():
            target = _memory_of(targets.get(each.path))
            if unread is not None and index in waits:
                found[index] = unread.stand_in(self, each, target)
            else:
                found[index] = laid_out_like(dense.pop(index), target)
        self._headers.check(reads.files)  # last: a checkpoint that does not fit into memory is refused by then
        return found

    def read_into(self, reads: Sequence[tuple[TensorRead, torch.Tensor]]) -> None:
        """Read tensors straight into memory that is there.

        No other memory is used, except for a tensor on another device: it is read into memory of its own, one tensor after the other, and copied.

        Args:
            reads: the reads of a tensor, and its memory, of the planned shape and the stored dtype.

        Raises:
            CheckpointTorn: if a file is missing or too short.
            CheckpointDamaged: if bytes have another digest; some of the memory is overwritten then.
        """
        here = [(read, out.detach()) for read, out in reads if can_scatter(out)]
        read_tensors(self._store, [request for read, out in here for request in self._requests(read, out)])
        for read, out in reads:
            if not can_scatter(out):
                read_tensors(self._store, self._requests(read, out.detach()))
        torch.autograd.graph.increment_version([out for _, out in here])  # other writes are torch's own

    def _fresh(self, reads: Iterable[TensorRead]) -> list[torch.Tensor]:
        """The tensors in memory of their own."""
        requests: list[ReadRequest] = []
        found: list[torch.Tensor | None] = []
        small, in_order = SmallShards(self._store, self._directory, self._files), isinstance(self._store, ReadsInOrder)
        planned = list(reads)
        shapes = [tuple(stop - start for start, stop in each.wanted) for each in planned]
        sizes = [size_bytes(each.record.dtype, shape) for each, shape in zip(planned, shapes, strict=True)]
        check_memory(self._store, sizes, lambda i: f"{self._first_file(planned[i])} {planned[i].record.path}")
        for each, shape, size in zip(planned, shapes, sizes, strict=True):
            if each.is_one_read and size > SMALL_BYTES:
                requests.append(self._request(each.record, each.shards[0]))
                found.append(None)
                continue
            out = fresh_tensor(shape, each.record.dtype, f"{self._store.url}/{self._directory} {each.record.path}")
            if in_order or not small.take(each, out):
                requests += self._requests(each, out)
            found.append(out)
        small.check()
        given = (
            tensor
            for request, tensor in zip(requests, read_tensors(self._store, requests), strict=True)
            if request.out is None
        )
        small.read()
        return [next(given) if out is None else out for out in found]

    def _first_file(self, read: TensorRead) -> str:
        return self._files[read.shards[0].file].path(self._directory) if read.shards else self._directory

    def _requests(self, read: TensorRead, out: torch.Tensor) -> list[ReadRequest]:
        """The requests that read a tensor into its memory."""
        return [self._request(read.record, each, out[_within(each.box, read.wanted)]) for each in read.shards]

    def _request(self, record: TensorRecord, read: ShardRead, out: torch.Tensor | None = None) -> ReadRequest:
        shard = record.shards[read.shard]
        first = (read.start - shard.start) // PIECE_BYTES * DIGEST_DIGITS
        last = -(-(read.stop - shard.start) // PIECE_BYTES) * DIGEST_DIGITS
        is_whole = (read.start, read.stop) == (shard.start, shard.stop)
        sizes = tuple(stop - start for start, stop in shard.box)
        starts = tuple(start - low for (start, _), (low, _) in zip(read.box, shard.box, strict=True))
        return ReadRequest(
            name=self._files[shard.file].path(self._directory),
            start=read.start,
            stop=read.stop,
            dtype=record.dtype,
            stored=STORED[record.dtype].name,
            shape=tuple(stop - start for start, stop in read.box),
            digest=shard.digest,
            path=record.path,
            out=out,
            inside=None if is_whole and read.box == shard.box else Inside(sizes, starts, read.start - shard.start),
            pieces="" if is_whole else shard.pieces[first:last],
        )


def _within(part: Box, box: Box) -> tuple[slice, ...]:
    """The slices of a part of a box in the memory of the box."""
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(part, box, strict=True))


def _memory_of(target: Any) -> Any:
    return target.tensor if isinstance(target, Shard) else target
