"""`DcpDirectory`: the tensors of a directory that `torch.distributed.checkpoint` has written, whatever the number of ranks, a part at a time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch

from trainfold.backends.formats.dcp.dcp_reader import DcpReader
from trainfold.backends.formats.torch_save.byte_range import OpenFiles
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import intersect
from trainfold.core.torch_files.dcp_metadata import DcpMetadata
from trainfold.core.weights.open_weights import OpenWeights
from trainfold.core.weights.source import Wanted


@final
class DcpDirectory:
    """A directory of `torch.distributed.checkpoint.save`, as FSDP2 programs and torchtitan have them.

    A name is that of the directory: the keys of the saved state with dots between them, such as ``model.layers.0.weight``. A rank reads those
    chunks that its parts are made of. `.metadata` is a pickle; it is read as values, and one that names anything but the classes of
    such metadata is refused, and nothing of it is run.

    Args:
        path: the directory.
        prefix: of the names that are taken, without its dot: ``"model"`` takes ``model.w`` as ``w``. Empty for all names.

    Examples:
        >>> import tempfile, trainfold
        >>> from trainfold.weights import write_dcp_directory
        >>> model, folder = torch.nn.Linear(2, 1), tempfile.mkdtemp()
        >>> write_dcp_directory(folder, trainfold.attach(model).capture())
        >>> source = DcpDirectory(folder, prefix="model")
        >>> sorted(source.specs()), DcpDirectory(folder).objects()
        (['bias', 'weight'], {'step': 0})
        >>> live = trainfold.attach(torch.nn.Linear(2, 1), weights=source)
        >>> live.take_weights()
        >>> torch.equal(live.capture().model.params["weight"], model.weight)
        True
    """

    def __init__(self, path: str | Path, *, prefix: str = "") -> None:
        self._reader = DcpReader(Path(path))
        self._prefix = f"{prefix}." if prefix else ""

    def __repr__(self) -> str:
        prefix = f", prefix={self._prefix[:-1]!r}" if self._prefix else ""
        return f"DcpDirectory({str(self._reader.path)!r}{prefix})"

    @property
    def metadata(self) -> DcpMetadata:
        """What the directory holds, with the places of its chunks; under the names of the directory."""
        return self._reader.metadata

    def specs(self) -> dict[str, LeafSpec]:
        """Name -> dtype and shape of each tensor, from `.metadata`.

        Raises:
            CheckpointMissing: if there is no `.metadata`.
            CheckpointHostile: if it names a class that metadata do not have, or a file outside of the directory.
            CheckpointDamaged: if it is cut off, or its chunks do not cover a tensor once.
        """
        tensors = self.metadata.tensors
        return {name: LeafSpec(each.dtype, each.shape) for full, each in tensors.items() if (name := self._mine(full))}

    def supply(self, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the part of each tensor that this rank holds, in the order of the files.

        Raises:
            CheckpointMissing, CheckpointHostile, CheckpointDamaged: as in `specs`.
            CheckpointTorn: if a file is shorter than `.metadata` says; all files are looked at before anything is read.
            CheckpointForeign: if a chunk is compressed, or not written by `torch.save`.
        """
        tensors = self.metadata.tensors
        boxes = {}
        for full, tensor in tensors.items():
            name = self._mine(full)
            each = wanted.get(name) if name else None
            if each is None:
                continue
            if each.shape != tensor.shape:
                yield name, torch.empty(tensor.shape, device="meta")  # it is refused for its shape, and not read
                continue
            boxes[full] = each.box
        places = {
            full: [stretch for chunk, stretch in tensors[full].chunks if intersect(chunk, box) is not None]
            for full, box in boxes.items()
        }
        with OpenFiles(self._reader.path) as files:
            self._reader.check_files(files, places)
            for full in sorted(boxes, key=lambda full: [(each.file, each.start) for each in places[full][:1]]):
                yield self._mine(full), self._reader.read_tensor(files, full, boxes[full])

    @contextmanager
    def opened(self) -> Iterator[OpenWeights]:
        """See `OpenSource`.

        Raises:
            CheckpointMissing: as in `supply`, and so the others.
        """
        specs = self.specs()
        with OpenFiles(self._reader.path) as files:
            chunks = {
                full: [stretch for _, stretch in each.chunks]
                for full, each in self.metadata.tensors.items()
                if self._mine(full)
            }
            self._reader.check_files(files, chunks)
            order = sorted(
                specs, key=lambda name: [(each.file, each.start) for each in chunks[self._prefix + name][:1]]
            )
            yield OpenWeights(
                {name: specs[name] for name in order},
                lambda name, box: self._reader.read_tensor(files, self._prefix + name, box),
                read_into=lambda name, box, into: self._reader.read_into(files, self._prefix + name, box, into),
                identity=f"{self._reader.path.resolve()} {self._prefix} {files.stats()}",
            )

    def objects(self) -> dict[str, Any]:
        """Name -> value of what is not a tensor, such as a step or the settings of an optimizer.

        Raises:
            CheckpointHostile: if a pickle would run something.
            CheckpointMissing, CheckpointTorn, CheckpointDamaged: as in `supply`.
        """
        with OpenFiles(self._reader.path) as files:
            return {
                name: self._reader.read_object(files, full)
                for full in self.metadata.objects
                if (name := self._mine(full))
            }

    def object_of(self, name: str) -> Any:
        """The value of one object; others may be of classes that are refused.

        Raises:
            KeyError: if there is no object of this name.
            CheckpointHostile: as in `objects`, and so the others.
        """
        with OpenFiles(self._reader.path) as files:
            return self._reader.read_object(files, self._prefix + name)

    def _mine(self, full: str) -> str:
        """The name without the prefix; empty if it has another one."""
        return full[len(self._prefix) :] if full.startswith(self._prefix) else ""
