"""`leaf_distances`: by how much the tensors of two checkpoints of runs differ; `first_nonfinite`: the first of one that is not finite. One or two are in memory at a time."""

from collections.abc import Collection

import torch

from trainfold.adapters.cli.locate import Checkpoint
from trainfold.adapters.cli.terminal.reading import reading
from trainfold.backends.formats.native.plan_reader import PlanReader
from trainfold.core.exact.distance import Distance, distance
from trainfold.core.format.dtypes import size_bytes
from trainfold.core.format.leaf_texts import stored_tensors
from trainfold.core.format.manifest import TensorRecord
from trainfold.core.resume.reads import ComponentReads, tensor_reads


def leaf_distances(a: Checkpoint, b: Checkpoint, leaves: Collection[str]) -> dict[str, Distance]:
    """Read the leaves that are tensors of one dtype and shape on both sides, and compare their values.

    Args:
        a: one checkpoint.
        b: the other.
        leaves: their paths.

    Raises:
        CheckpointDamaged: if bytes are not those that were written.
    """
    mine, theirs = stored_tensors(a.manifest), stored_tensors(b.manifest)
    both = [path for path in leaves if path in mine and path in theirs and mine[path].spec == theirs[path].spec]
    readers = PlanReader(a.store, a.name, a.manifest), PlanReader(b.store, b.name, b.manifest)
    found = {}
    with reading("comparing", sum(2 * size_bytes(mine[path].dtype, mine[path].shape) for path in both)) as advance:
        for path in both:
            one, other = _read(readers[0], mine[path]), _read(readers[1], theirs[path])
            advance(one.nbytes + other.nbytes)
            found[path] = distance(one, other)
    return found


def first_nonfinite(checkpoint: Checkpoint) -> str | None:
    """The path of the first tensor with a NaN, or of the first parameter with an infinity, which buffers such as masks may have; None if there is none.

    Raises:
        CheckpointDamaged: if bytes are not those that were written.
    """
    reader = PlanReader(checkpoint.store, checkpoint.name, checkpoint.manifest)
    found = stored_tensors(checkpoint.manifest)
    with reading("looking for a NaN", sum(size_bytes(each.dtype, each.shape) for each in found.values())) as advance:
        for path, record in found.items():
            value = _read(reader, record)
            advance(value.nbytes)
            if value.is_floating_point() or value.is_complex():
                value = value.float() if value.itemsize == 1 else value
                bad = ~value.isfinite() if ".params[" in path else value.isnan()
                if bad.any():
                    return path
    return None


def _read(reader: PlanReader, record: TensorRecord) -> torch.Tensor:
    return reader.read(ComponentReads({}, tensor_reads([record], {0: (record.path, None)})), {})[0]
