"""`DcpReader`: what is in a directory of torch's distributed checkpoints, and boxes of its tensors, put together from the chunks of the ranks that wrote it."""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final, final

import torch

from trainfold.backends.formats.dcp.safetensors_shards import shards_metadata
from trainfold.backends.formats.detect import check_format
from trainfold.backends.formats.torch_save.archive import (
    archive_values,
    check_sums,
    is_archive,
    member_of,
    read_archive,
)
from trainfold.backends.formats.torch_save.byte_range import ByteRange, OpenFiles
from trainfold.backends.formats.torch_save.small_tensors import with_numbers
from trainfold.backends.formats.torch_save.tensor_parts import read_box
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.stores.place import file_state
from trainfold.core.errors import CheckpointDamaged, CheckpointForeign, CheckpointMissing
from trainfold.core.format.codec import torch_dtype
from trainfold.core.layout.leaf_spec import LeafSpec, leaf_specs
from trainfold.core.layout.slices import Box, intersect
from trainfold.core.printable import printable
from trainfold.core.torch_files.dcp_metadata import DcpMetadata, DcpTensor, FileRange, read_dcp_metadata
from trainfold.core.torch_files.dcp_plan import METADATA
from trainfold.core.torch_files.stored_values import StoredTensor, row_major

_METADATA_LIMIT: Final = 1 << 30
_PIECE_BYTES: Final = 1 << 22
_OBJECT_LIMIT: Final = 1 << 28


@final
class DcpReader:
    """Reads a directory. Pickles in it are read as values: nothing in them is run.

    Args:
        path: the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self._state: list[tuple[str, int, int, int, int]] | None = None
        self._under: dict[str, tuple[dict[str, DcpTensor], dict[str, LeafSpec]]] = {}

    def now(self) -> "DcpReader":
        """This reader; or a new one, if what says where the tensors are is another file than this one has read."""
        return self if self._state in (None, _state_of(self.path)) else DcpReader(self.path)

    @cached_property
    def metadata(self) -> DcpMetadata:
        """What the directory holds.

        Raises:
            CheckpointMissing: if there is neither `.metadata` nor a safetensors file that says where its parts belong.
            CheckpointForeign: if it has another format.
            CheckpointHostile, CheckpointDamaged: as `read_dcp_metadata` raises them.
        """
        self._state = _state_of(self.path)
        if not (self.path / METADATA).is_file():
            shards = shards_metadata(self.path)
            if shards is not None:
                return shards
            check_format(self.path, "dcp")
            alone = sorted(each.name for each in self.path.glob("__*.metadata"))
            found = f"{alone[0]}, which one rank has written for itself" if alone else "none"
            raise CheckpointMissing(
                str(self.path),
                expected=f"a {METADATA}, as torch.distributed.checkpoint.save writes it last",
                found=found,
                fix="load it with torch on as many ranks, and save it with use_collectives=True"
                if alone
                else "name the directory of one whole checkpoint; a save of several ranks writes it with a process group",
            )
        with OpenFiles(self.path) as files:
            file = files.whole(METADATA)
            if file.size > _METADATA_LIMIT:
                raise CheckpointDamaged(file.name, expected=f"at most {_METADATA_LIMIT} bytes", found=file.size, fix="write it again")  # fmt: skip
            return _read(file.read(0, file.size), file.name)

    def under(self, start: str) -> tuple[Mapping[str, DcpTensor], Mapping[str, LeafSpec]]:
        """The tensors whose names start so, under the rest of their names; and the dtype and shape of each. They are looked for once.

        Raises:
            CheckpointMissing: and others, as `metadata` raises them.
        """
        found = self._under.get(start)
        if found is None:
            tensors, at = self.metadata.tensors, len(start)
            mine = dict(tensors) if not start and "" not in tensors else {full[at:]: each for full, each in tensors.items() if len(full) > at and full.startswith(start)}  # fmt: skip
            self._under[start] = found = mine, leaf_specs(mine)
        return found

    def check_files(
        self, files: OpenFiles, chunks: Mapping[str, Iterable[tuple[Box, FileRange]]], *, start: str = ""
    ) -> None:
        """Check that every range that is to be read is there.

        Args:
            files: of this directory.
            chunks: name -> the chunks of it that are to be read, with their ranges.
            start: of the names, where it is left out.

        Raises:
            CheckpointMissing, CheckpointTorn: if a file is not there, or too short.
            CheckpointForeign: if a range is compressed, or changed by another extension.
        """
        sizes: dict[str, int] = {}
        for name, each in chunks.items():
            for _, stretch in each:
                size = sizes.get(stretch.file)
                if size is None or stretch.transforms or stretch.start + stretch.size > size:
                    self._range(files, stretch, start + name)
                    sizes[stretch.file] = files.whole(stretch.file).size

    def read_tensor(self, files: OpenFiles, name: str, box: Box) -> torch.Tensor:
        """A box of a tensor.

        Raises:
            CheckpointDamaged: if a chunk is not what the metadata say.
        """
        found = torch.empty([stop - start for start, stop in box], dtype=torch_dtype(self.metadata.tensors[name].dtype))
        self.read_into(files, name, box, found)
        return found

    def read_into(self, files: OpenFiles, name: str, box: Box, found: torch.Tensor) -> None:
        """Read a box of a tensor into contiguous memory of its dtype and shape.

        Raises:
            CheckpointDamaged: as in `read_tensor`.
        """
        tensor = self.metadata.tensors[name]
        for chunk, stretch in tensor.chunks:
            common = intersect(chunk, box)
            if common is None:
                continue
            member, stored = self._stored(
                files, name, stretch, tensor.dtype, tuple(stop - start for start, stop in chunk)
            )
            inside = tuple((start - at, stop - at) for (start, stop), (at, _) in zip(common, chunk, strict=True))
            part = found[
                tuple(slice(start - at, stop - at) for (start, stop), (at, _) in zip(common, box, strict=True))
            ]
            read_box(member, stored, inside, part)

    def read_object(self, files: OpenFiles, name: str) -> Any:
        """A value that is not a tensor: numbers, tensors of one element, text, lists and dicts of them. A larger tensor inside is a `StoredTensor`.

        Raises:
            CheckpointHostile: if its pickle would run something.
            CheckpointDamaged: if it is cut off, or not a pickle.
        """
        file = self._range(files, self.metadata.objects[name], name)
        if file.size > _OBJECT_LIMIT:
            raise CheckpointDamaged(
                file.name, expected=f"at most {_OBJECT_LIMIT} bytes", found=file.size, fix="save tensors as tensors"
            )
        members = read_archive(file)
        return with_numbers(archive_values(file, members), file, members)

    def check_values(self, files: OpenFiles, name: str, *, advance: Callable[[int], None]) -> bool:
        """Read all that was written under a name, and compare it with its sums.

        Args:
            files: of this directory.
            name: of a tensor or an object. An object may be of any class: its pickle is not looked at.
            advance: called with the number of bytes of each piece.

        Returns:
            Whether all of it has sums.

        Raises:
            CheckpointDamaged, CheckpointMissing, CheckpointTorn, CheckpointForeign: for what is not as it was written.
        """
        tensor = self.metadata.tensors.get(name)
        if tensor is None:
            return check_sums(self._range(files, self.metadata.objects[name], name), advance=advance)
        has_sums = True
        for chunk, stretch in tensor.chunks:
            self._stored(files, name, stretch, tensor.dtype, tuple(stop - start for start, stop in chunk))
            file = self._range(files, stretch, name)
            if stretch.is_raw:
                for _, piece in file.pieces(0, file.size, _PIECE_BYTES):
                    advance(len(piece))
            has_sums &= not stretch.is_raw and check_sums(file, advance=advance)
        return has_sums

    def _range(self, files: OpenFiles, stretch: FileRange, name: str) -> ByteRange:
        file = files.whole(stretch.file)
        where = f"{file.name}: {printable(name)}"
        if stretch.transforms:
            raise CheckpointForeign(
                where,
                expected="bytes as torch writes them without extensions",
                found=", ".join(map(printable, stretch.transforms)),
                fix="load it with torch and save it again without extensions",
            )
        return file.inside(stretch.start, stretch.size, where)

    def _stored(
        self, files: OpenFiles, name: str, stretch: FileRange, dtype: str, shape: tuple[int, ...]
    ) -> tuple[ByteRange, StoredTensor]:
        """Where the bytes of a chunk are, and how they are to be seen."""
        file = self._range(files, stretch, name)
        if stretch.is_raw:
            return file, StoredTensor("", dtype, shape, row_major(shape), 0, file.size)
        if not is_archive(file):
            raise CheckpointForeign(file.name, expected="a tensor that torch.save has written", found="other bytes",
                                    fix="load it with the program that saved it, and save it again as torch does by default")  # fmt: skip
        members = read_archive(file)
        stored = archive_values(file, members)
        if type(stored) is not StoredTensor or (stored.dtype, stored.shape) != (dtype, shape):
            found = f"{stored.dtype} of {list(stored.shape)}" if type(stored) is StoredTensor else type(stored).__name__
            raise CheckpointDamaged(file.name, expected=f"{dtype} of {list(shape)}, as {METADATA} says", found=found, fix="copy the directory again")  # fmt: skip
        return member_of(file, members, stored), stored


def _state_of(path: Path) -> list[tuple[str, int, int, int, int]]:
    """Which files say where the tensors are, and as of when."""
    files = [path / METADATA] if (path / METADATA).is_file() else sorted(path.glob("*.safetensors"))
    return [(each.name, *file_state(each)) for each in files]


_read = without_collecting(read_dcp_metadata)
