"""`UnreadTensors`: the tensors of a resumed state that are read later, straight into memory that is there already."""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, final

import torch

from trainfold.core.format.codec import torch_dtype
from trainfold.core.history.quarantine import LoadOutcome
from trainfold.core.layout.slices import whole_box

if TYPE_CHECKING:
    from trainfold.backends.formats.native.plan_reader import PlanReader
    from trainfold.core.resume.reads import TensorRead


@final
class UnreadTensors:
    """What a resume leaves unread. A meta tensor stands for each tensor, so that specs can be checked before any memory is overwritten.

    Args:
        components: of which tensors are left unread.

    Attributes:
        components: the same.
        outcome: how all ranks have read them; None as long as no rank knows it of the others.
    """

    def __init__(self, components: Collection[str]) -> None:
        self.components = frozenset(components)
        self.outcome: LoadOutcome | None = None
        self._reads: dict[torch.Tensor, tuple[PlanReader, TensorRead]] = {}

    def stand_in(self, reader: "PlanReader", read: "TensorRead", target: object) -> torch.Tensor:
        """Return a meta tensor for a tensor that is not read now.

        Args:
            reader: what reads it.
            read: the reads that it needs.
            target: the tensor whose strides it gets, if the shapes agree; anything else for none.
        """
        box = whole_box(read.record.shape) if read.box is None else read.box
        shape, dtype = tuple(stop - start for start, stop in box), torch_dtype(read.record.dtype)
        if isinstance(target, torch.Tensor) and tuple(target.shape) == shape:
            made = torch.empty_strided(shape, target.stride(), dtype=dtype, device="meta")
        else:
            made = torch.empty(shape, dtype=dtype, device="meta")
        self._reads[made] = reader, read
        return made

    def forget(self) -> None:
        """Forget all stand-ins: another checkpoint is tried."""
        self._reads.clear()

    def write(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Give each tensor its value: read it there if it was left unread, else copy.

        Args:
            pairs: tensor and value, of the same shape and dtype.

        Raises:
            CheckpointTorn: if a file is missing or too short.
            CheckpointDamaged: if bytes have another digest; some tensors are overwritten then, and others are not.
        """
        found: dict[PlanReader, list[tuple[TensorRead, torch.Tensor]]] = {}
        with torch.no_grad():
            for memory, value in pairs:
                if value.is_meta and value in self._reads:
                    reader, read = self._reads[value]
                    found.setdefault(reader, []).append((read, memory))
                else:
                    memory.copy_(value)  # torch refuses a meta tensor that is not one of ours
        for reader, reads in found.items():
            reader.read_into(reads)
