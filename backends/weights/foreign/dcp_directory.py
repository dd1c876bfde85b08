"""`DcpDirectory`: the tensors of a directory that `torch.distributed.checkpoint` has written, whatever the number of ranks, a part at a time."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter, le
from pathlib import Path
from typing import Any, final

import torch

from trainfold.backends.formats.dcp.dcp_reader import DcpReader
from trainfold.backends.formats.torch_save.byte_range import OpenFiles
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.stores.place import local_path
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import Box, intersect
from trainfold.core.torch_files.dcp_metadata import DcpMetadata, FileRange
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
        self._reader = DcpReader(Path(local_path(path, argument="DcpDirectory.path")))
        self._prefix = f"{prefix}." if prefix else ""

    def __repr__(self) -> str:
        prefix = f", prefix={self._prefix[:-1]!r}" if self._prefix else ""
        return f"DcpDirectory({str(self._reader.path)!r}{prefix})"

    def under(self, prefix: str) -> "DcpDirectory":
        """The same directory, of which the names with another prefix are taken. What was read of it is not read again."""
        found = DcpDirectory(self._reader.path, prefix=prefix)
        found._reader = self._now()
        return found

    @property
    def metadata(self) -> DcpMetadata:
        """What the directory holds, with the places of its chunks; under the names of the directory."""
        return self._now().metadata

    def specs(self) -> dict[str, LeafSpec]:
        """Name -> dtype and shape of each tensor, from `.metadata`.

        Raises:
            CheckpointMissing: if there is no `.metadata`.
            CheckpointHostile: if it names a class that metadata do not have, or a file outside of the directory.
            CheckpointDamaged: if it is cut off, or its chunks do not cover a tensor once.
        """
        return dict(self._now().under(self._prefix)[1])

    def supply(self, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the part of each tensor that this rank holds, in the order of the files.

        Raises:
            CheckpointMissing, CheckpointHostile, CheckpointDamaged: as in `specs`.
            CheckpointTorn: if a file is shorter than `.metadata` says; all files are looked at before anything is read.
            CheckpointForeign: if a chunk is compressed, or not written by `torch.save`.
        """
        reader = self._now()
        tensors, boxes = reader.metadata.tensors, {}
        for full, tensor in tensors.items():
            name = self._mine(full)
            each = wanted.get(name) if name else None
            if each is None:
                continue
            if each.shape != tensor.shape:
                yield name, torch.empty(tensor.shape, device="meta")  # it is refused for its shape, and not read
                continue
            boxes[full] = each.box
        needed = {
            full: [(chunk, place) for chunk, place in tensors[full].chunks if intersect(chunk, box) is not None]
            for full, box in boxes.items()
        }
        with OpenFiles(reader.path) as files:
            reader.check_files(files, needed)
            for full in sorted(boxes, key=lambda full: _begin(needed[full])):
                yield self._mine(full), reader.read_tensor(files, full, boxes[full])

    @contextmanager
    def opened(self) -> Iterator[OpenWeights]:
        """See `OpenSource`.

        Raises:
            CheckpointMissing: as in `supply`, and so the others.
        """
        reader = self._now()
        with OpenFiles(reader.path) as files:
            yield OpenWeights(
                self._checked(reader, files),
                lambda name, box: reader.read_tensor(files, self._prefix + name, box),
                read_into=lambda name, box, into: reader.read_into(files, self._prefix + name, box, into),
                identity=f"{reader.path.resolve()} {self._prefix} {files.stats()}",
            )

    @without_collecting
    def _checked(self, reader: DcpReader, files: OpenFiles) -> dict[str, LeafSpec]:
        """The specs in the order of the files, which have all chunks."""
        tensors, specs = reader.under(self._prefix)
        reader.check_files(files, {name: each.chunks for name, each in tensors.items()}, start=self._prefix)
        places = [*map(_begin, (each.chunks for each in tensors.values()))]
        if all(map(le, places, places[1:])):  # torch writes them so
            return dict(specs)
        return {name: specs[name] for _, name in sorted(zip(places, tensors, strict=True), key=itemgetter(0))}

    def objects(self) -> dict[str, Any]:
        """Name -> value of what is not a tensor, such as a step or the settings of an optimizer.

        Raises:
            CheckpointHostile: if a pickle would run something.
            CheckpointMissing, CheckpointTorn, CheckpointDamaged: as in `supply`.
        """
        reader = self._now()
        with OpenFiles(reader.path) as files:
            return {
                name: reader.read_object(files, full) for full in reader.metadata.objects if (name := self._mine(full))
            }

    def object_of(self, name: str) -> Any:
        """The value of one object; others may be of classes that are refused.

        Raises:
            KeyError: if there is no object of this name.
            CheckpointHostile: as in `objects`, and so the others.
        """
        reader = self._now()
        with OpenFiles(reader.path) as files:
            return reader.read_object(files, self._prefix + name)

    def _now(self) -> DcpReader:
        """What reads the directory as it is now; all of a call, or of a block, is read by one."""
        self._reader = self._reader.now()
        return self._reader

    def _mine(self, full: str) -> str:
        """The name without the prefix; empty if it has another one."""
        return full[len(self._prefix) :] if full.startswith(self._prefix) else ""


def _begin(chunks: Sequence[tuple[Box, FileRange]]) -> tuple[str, int]:
    """Where the first chunk of a tensor is; a tensor without elements has none."""
    return (chunks[0][1].file, chunks[0][1].start) if chunks else ("", 0)
