"""`TorchFile`: the tensors of a file that `torch.save` has written, a part at a time. Its pickle is read as values, and nothing in it is run."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import copy, deepcopy
from pathlib import Path
from typing import Any, final

import attrs
import torch

from trainfold.backends.formats.detect import check_format
from trainfold.backends.formats.torch_save.archive import archive_values, is_archive, member_of, read_archive
from trainfold.backends.formats.torch_save.byte_range import ByteRange, OpenFiles
from trainfold.backends.formats.torch_save.small_tensors import with_numbers
from trainfold.backends.formats.torch_save.tensor_parts import read_box
from trainfold.backends.stores.place import local_path
from trainfold.core.errors import CheckpointForeign, CheckpointMissing, InvalidArgument
from trainfold.core.format.codec import torch_dtype
from trainfold.core.layout.leaf_spec import LeafSpec, leaf_specs
from trainfold.core.printable import printable
from trainfold.core.torch_files.other_tensors import OtherTensor, check_readable
from trainfold.core.torch_files.stored_values import StoredTensor, flattened
from trainfold.core.weights.open_weights import OpenWeights
from trainfold.core.weights.source import Wanted

_SHOWN = 8  # names in a message
_TENSORS = (StoredTensor, OtherTensor)


@final
@attrs.frozen
class OpenTorchFile:
    """A file of `torch.save` that is open.

    Attributes:
        values: what was saved, with a `StoredTensor` for each tensor.
        file: its bytes.
        members: the members of the archive.
    """

    values: Any
    file: ByteRange
    members: Mapping[str, ByteRange]

    def read(self, stored: StoredTensor, box: tuple[tuple[int, int], ...]) -> torch.Tensor:
        """Read a box of a tensor.

        Raises:
            CheckpointDamaged, CheckpointTorn: if its bytes are not there.
        """
        found = torch.empty([stop - start for start, stop in box], dtype=torch_dtype(stored.dtype))
        self.read_into(stored, box, found)
        return found

    def read_into(self, stored: StoredTensor, box: tuple[tuple[int, int], ...], into: torch.Tensor) -> None:
        """Read a box of a tensor into contiguous memory of its dtype and shape.

        Raises:
            CheckpointDamaged, CheckpointTorn: as in `read`.
        """
        read_box(member_of(self.file, self.members, stored), stored, box, into)


@contextmanager
def open_torch_file(path: Path) -> Iterator[OpenTorchFile]:
    """Open a file, and read what it holds, except for tensors.

    Raises:
        CheckpointMissing: if it is not there.
        CheckpointForeign: if it is not an archive, as torch has written since 1.6, or has another format.
        CheckpointHostile: if its pickle names what plain state does not need; the message says what.
        CheckpointDamaged: if it is cut off.
    """
    if not path.is_file():
        check_format(path, "torch")
        raise CheckpointMissing(str(path), expected="a file of torch.save", found="a directory" if path.is_dir() else "nothing", fix="correct the path")  # fmt: skip
    with OpenFiles(path.parent) as files:
        file = files.whole(path.name)
        if not is_archive(file):
            check_format(path, "torch")
            raise CheckpointForeign(
                str(path),
                expected="an archive, as torch.save has written since torch 1.6",
                found="another form",
                fix="write it again with a newer torch, which reads it with weights_only=True",
            )
        members = read_archive(file)
        yield OpenTorchFile(archive_values(file, members), file, members)


@final
class TorchFile:
    """The tensors of a file of `torch.save`: a state dict, or a checkpoint with one in it, such as a full state dict of FSDP.

    A name has the keys of nested dicts with dots between them. A rank reads only what it holds, and nothing is mapped or unpickled: a file
    that names any class or function but those of tensors and plain values is refused, and the message says which.

    Args:
        path: the file.
        prefix: the keys of the state dict in it, with dots between them, such as ``"model"`` or ``"state_dict"``. Empty if the file is the state dict.
        below: what the names in the state dict begin with, without its last dot, if only those are taken, and without it.

    Examples:
        >>> import tempfile, trainfold
        >>> model, path = torch.nn.Linear(2, 1), tempfile.mkdtemp() + "/last.pt"
        >>> from torch import save
        >>> save({"model": model.state_dict(), "epoch": 3}, path)
        >>> source = TorchFile(path, prefix="model")
        >>> sorted(source.specs()), TorchFile(path).objects()
        (['bias', 'weight'], {'epoch': 3})
        >>> live = trainfold.attach(torch.nn.Linear(2, 1), weights=source)
        >>> live.take_weights()
        >>> torch.equal(live.capture().model.params["weight"], model.weight)
        True
    """

    def __init__(self, path: str | Path, *, prefix: str = "", below: str = "") -> None:
        self._path = Path(local_path(path, argument="TorchFile.path"))
        self._prefix = prefix
        self._below = f"{below}." if below else ""
        self._last: tuple[Any, dict[str, Any]] = None, {}  # the values that were named last, and what they are called
        self._names: frozenset[str] | None = None

    def __repr__(self) -> str:
        prefix = f", prefix={self._prefix!r}" if self._prefix else ""
        below = f", below={self._below[:-1]!r}" if self._below else ""
        return f"TorchFile({str(self._path)!r}{prefix}{below})"

    def specs(self) -> dict[str, LeafSpec]:
        """Name -> dtype and shape of each tensor; no tensor is read.

        Raises:
            CheckpointMissing: if the file is not there.
            CheckpointForeign: if torch before 1.6 wrote it.
            CheckpointHostile: if it names what plain state does not need, such as a class of a program.
            UnsupportedLeaf: if a tensor is sparse or quantised, or overlaps itself; the message names it, and others can be taken.
            CheckpointDamaged: if it is cut off.
            InvalidArgument: if there is no dict under the prefix.
        """
        with open_torch_file(self._path) as opened:
            return leaf_specs(self._tensors(self._named(opened.values)))

    def supply(self, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the part of each tensor that this rank holds.

        Raises:
            CheckpointTorn: if bytes are not there.
            CheckpointMissing: as in `specs`, and so the others.
        """
        with open_torch_file(self._path) as opened:
            found = {name: each for name, each in self._named(opened.values).items() if name in wanted}
            for name, stored in self._tensors(found).items():
                each = wanted[name]
                if each.shape != stored.shape:
                    yield name, torch.empty(stored.shape, device="meta")  # it is refused for its shape, and not read
                    continue
                yield name, opened.read(stored, each.box)

    @contextmanager
    def opened(self) -> Iterator[OpenWeights]:
        """See `OpenSource`.

        Raises:
            CheckpointMissing: as in `specs`, and so the others.
        """
        with open_torch_file(self._path) as opened:
            tensors = self._tensors(self._named(opened.values))
            found = self._path.stat()
            yield OpenWeights(
                leaf_specs(tensors),
                lambda name, box: opened.read(tensors[name], box),
                read_into=lambda name, box, into: opened.read_into(tensors[name], box, into),
                identity=f"{self!r} {self._path.resolve()} {found.st_size} {found.st_mtime_ns}",
            )

    def objects(self) -> dict[str, Any]:
        """Name -> value of what is not a tensor, such as an epoch. Lists are values.

        Raises:
            CheckpointMissing: as in `specs`, and so the others.
        """
        with open_torch_file(self._path) as opened:
            found = {name: each for name, each in self._named(opened.values).items() if type(each) not in _TENSORS}
        return deepcopy(found)

    def at(self, keys: str) -> Any:
        """The value under keys with dots between them, and numbers for lists; None if there is none. A tensor of one element is its value.

        Inside of a dict or a list tensors are a `StoredTensor`; see `read_at`.

        Raises:
            CheckpointMissing: as in `specs`, and so the others.
        """
        with open_torch_file(self._path) as opened:
            found = _under(opened.values, keys)
            if type(found) is StoredTensor and found.shape in ((), (1,)):
                return opened.read(found, tuple((0, size) for size in found.shape)).item()
            return found

    def read_at(self, keys: str) -> Any:
        """The same as `at`, with the tensors of one element that are inside, such as learning rates in param groups.

        Raises:
            CheckpointMissing: as in `specs`, and so the others.
        """
        with open_torch_file(self._path) as opened:
            return with_numbers(_under(opened.values, keys), opened.file, opened.members)

    def tensor_names(self) -> list[str]:
        """The names of all tensors, of those too that are not read, such as sparse ones.

        Raises:
            CheckpointMissing: as in `specs`, and so the others.
        """
        with open_torch_file(self._path) as opened:
            return [name for name, each in self._named(opened.values).items() if type(each) in _TENSORS]

    def part(self, names: Collection[str]) -> "TorchFile":
        """The same file, of which only some tensors are taken.

        Args:
            names: of the tensors.
        """
        found = copy(self)
        found._names = frozenset(names)  # noqa: SLF001 - of the copy
        found._last = None, {}  # noqa: SLF001
        return found

    def _tensors(self, named: Mapping[str, Any]) -> dict[str, StoredTensor]:
        check_readable(named, str(self._path))
        return {name: each for name, each in named.items() if type(each) is StoredTensor}

    def _named(self, values: Any) -> dict[str, Any]:
        if self._last[0] is not values or values is None:
            self._last = values, self._named_in(values)
        return self._last[1]

    def _named_in(self, values: Any) -> dict[str, Any]:
        found = _under(values, self._prefix)
        if not isinstance(found, Mapping):
            keys = (
                [printable(str(each)) for each in values][:_SHOWN]
                if isinstance(values, Mapping)
                else type(values).__name__
            )
            raise InvalidArgument(
                "TorchFile.prefix", expected="the keys of a dict in the file", found=f"{self._prefix!r}, and at the top {keys}",
                fix=f"name the keys of the state dict in {self._path}")  # fmt: skip
        names = flattened(found, str(self._path))
        if self._below:
            names = {name[len(self._below) :]: each for name, each in names.items() if name.startswith(self._below)}
        return names if self._names is None else {name: each for name, each in names.items() if name in self._names}


def _under(values: Any, keys: str) -> Any:
    """The value under keys; None if there is none."""
    for key in keys.split(".") if keys else ():
        if isinstance(values, list) and key.isdecimal() and int(key) < len(values):
            values = values[int(key)]
        else:
            values = values.get(key) if isinstance(values, Mapping) else None
    return values
