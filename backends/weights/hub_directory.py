"""`HubDirectory`: the weights in a directory of safetensors files, as model hubs have them, mapped into memory."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

import attrs
import torch

from trainfold.backends.formats.detect import detect_format
from trainfold.backends.formats.native.scatter import Inside, can_scatter
from trainfold.backends.formats.shared_read import Read, read_shared
from trainfold.backends.formats.torch_save.byte_range import OpenFiles
from trainfold.backends.stores.place import file_state, local_path
from trainfold.core.errors import CheckpointDamaged, CheckpointForeign, CheckpointHostile, CheckpointMissing
from trainfold.core.format.codec import torch_dtype
from trainfold.core.format.dtypes import size_bytes
from trainfold.core.format.strict_json import strict_json
from trainfold.core.layout.leaf_spec import LeafSpec, leaf_specs
from trainfold.core.layout.slices import Box, whole_box
from trainfold.core.tensor_memory import tensor_bytes
from trainfold.core.weights.detected import FORMATS, NATIVE, reader_of
from trainfold.core.weights.hub.file_header import HUB_DTYPES, LENGTH_BYTES
from trainfold.core.weights.hub.hub_config import HUB_CONFIG, config_of
from trainfold.core.weights.hub.hub_plan import HUB_INDEX
from trainfold.core.weights.open_weights import OpenWeights
from trainfold.core.weights.source import MemoryOf, Wanted, without_memory

_MODEL_FILE: Final = "model.safetensors"
_SECOND_COPY: Final = "consolidated"  # the same weights under the names of their authors' own code
_DTYPES: Final = {stored: name for name, stored in HUB_DTYPES.items()}


@final
@attrs.frozen
class _Place:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@final
@attrs.frozen
class _Header:
    places: Mapping[str, _Place]
    about: Mapping[str, str]


@final
class HubDirectory:
    """The tensors of ``*.safetensors`` in a directory, with ``model.safetensors.index.json`` if there are several files.

    A rank reads only what it holds: into the memory of the model where it has the dtype of the file, and otherwise from files that are mapped into memory. Their contents have no digests; the fingerprint of what was loaded is in each
    checkpoint of a run whose frozen weights come from here. Files of pickles are not read.

    Without an index, all files of the directory are read together; beside ``model.safetensors``, ``consolidated*.safetensors`` are the same weights under other names, and left out.

    Links to files are followed inside the directory, and into the ``blobs`` of a hub's own cache. Nothing else outside it is opened.

    Args:
        path: the directory, or one safetensors file; or the ``file://`` URL of one.

    Raises:
        InvalidArgument: for another URL.

    Examples:
        >>> HubDirectory("models/base")
        HubDirectory('models/base')
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(local_path(path, argument="HubDirectory.path"))
        self._headers: dict[Path, tuple[tuple[int, ...], _Header]] = {}  # of files as they were

    def __repr__(self) -> str:
        return f"HubDirectory({str(self._path)!r})"

    def supply(self, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each wanted tensor that is there, whole, in memory that is read when it is used.

        Raises:
            CheckpointMissing: if there is no safetensors file.
            CheckpointDamaged: if a file is too short, or its header is not one of safetensors.
            CheckpointHostile: if the index names a file outside the directory.
        """
        return self.supply_into(wanted, without_memory)

    def supply_into(self, wanted: Mapping[str, Wanted], memory: MemoryOf) -> Iterator[tuple[str, torch.Tensor]]:
        """See `FillingSource`: a part that lies in one piece in its file is read into its memory.

        Raises:
            CheckpointMissing: as in `supply`, and so the others.
            CheckpointTorn: if a file is cut short meanwhile.
        """
        direct: list[tuple[str, torch.Tensor]] = []
        mapped: list[tuple[str, _Place]] = []
        reads: list[Read] = []
        with OpenFiles(self._path.parent if self._path.is_file() else self._path) as files:
            for name, place in self._all_places():
                each = wanted.get(name)
                if each is None:
                    continue
                into = memory(name) if each.shape == place.shape else None
                run = None if into is None else _run(place, each.box, into)
                if into is None or run is None:
                    mapped.append((name, place))
                    continue
                direct.append((name, into))
                start = place.start + run[0] * into.dtype.itemsize
                reads.append((files.whole(place.file.name), start, tensor_bytes(into)))
            read_shared(reads)
            torch.autograd.graph.increment_version([into for _, into in direct])  # other writes are torch's own
        yield from direct
        yield from ((name, _mapped(place)) for name, place in mapped)

    def specs(self) -> dict[str, LeafSpec]:
        """Name -> dtype and shape of each tensor, from the headers of the files.

        Raises:
            CheckpointMissing: as in `supply`, and so the others.
        """
        return leaf_specs(dict(self._all_places()))

    @contextmanager
    def opened(self) -> Iterator[OpenWeights]:
        """See `OpenSource`. Tensors are in memory that is read when it is used.

        Raises:
            CheckpointMissing: as in `supply`, and so the others.
        """
        places = dict(self._all_places())
        specs = leaf_specs(places)
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in self._files()]

        def read(name: str, box: Box) -> torch.Tensor:
            whole = _mapped(places[name])
            return whole if box == whole_box(specs[name].shape) else whole[tuple(slice(*each) for each in box)]

        yield OpenWeights(specs, read, identity=f"{self._path.resolve()} {stats}")

    def weight_map(self) -> dict[str, str]:
        """Name of a tensor -> the file that it is in.

        Raises:
            CheckpointMissing: as in `supply`, and so the others.
        """
        return {name: place.file.name for name, place in self._all_places()}

    def config(self) -> dict[str, Any]:
        """What is in ``config.json``, for `hub_rules_of`.

        Raises:
            CheckpointMissing: if there is none.
            CheckpointHostile: if it is not one object of JSON.
        """
        found = self.beside([HUB_CONFIG])
        if not found:
            raise CheckpointMissing(
                str(self._path / HUB_CONFIG), expected="a configuration", found="none", fix="download it again"
            )
        return config_of(found[HUB_CONFIG], str(self._path / HUB_CONFIG))

    def beside(self, names: Iterable[str]) -> dict[str, bytes]:
        """The contents of other files of the directory, by name.

        Args:
            names: patterns, such as ``tokenizer*``. What is not there is left out.

        Raises:
            CheckpointHostile: for a link that leads out of the directory.
        """
        files = sorted({file for name in names for file in self._path.glob(name) if file.is_file()})
        return {file.name: self._inside(file.name).read_bytes() for file in files}

    def files(self) -> dict[Path, list[str] | None]:
        """Each file, with the tensors that the index has in it; None for all that are in it, if there is no index.

        Raises:
            CheckpointMissing: as in `supply`, and so the others.
        """
        return self._files()

    def about(self) -> dict[str, str]:
        """The texts in the header of its first file, such as the step of the checkpoint of which it was made.

        Raises:
            CheckpointMissing: as in `supply`, and so the others.
        """
        return dict(self._header(next(iter(self._files()))).about)

    def ranges(self) -> dict[str, tuple[Path, int, int]]:
        """Name of a tensor -> its file, its first byte there, and one past its last.

        Raises:
            CheckpointMissing: as in `supply`, and so the others.
        """
        return {name: (place.file, place.start, place.stop) for name, place in self._all_places()}

    def names_in(self, file: Path) -> list[str]:
        """The tensors in a file, by its header.

        Raises:
            CheckpointMissing: if there is no such file.
            CheckpointDamaged: if it is not whole.
        """
        return list(self._header(file).places)

    def _all_places(self) -> Iterator[tuple[str, _Place]]:
        files: dict[str, Path] = {}
        listed = self._files()
        indexed = {name for names in listed.values() for name in names or ()}
        for file, names in listed.items():
            places = self._header(file).places
            for name in places if names is None else names:
                if (other := files.setdefault(name, file)) is not file:
                    raise CheckpointDamaged(
                        str(self._path),
                        expected="each tensor in one file",
                        found=f"{name} in {other.name} and in {file.name}",
                        fix=f"leave one set of files in the directory, or an {HUB_INDEX}; if they are parts of ranks, use trainfold.weights.DcpDirectory",
                    )
                if name not in places:
                    raise CheckpointDamaged(
                        str(file),
                        expected=f"the tensor {name}, as {HUB_INDEX} says",
                        found="none",
                        fix="download it again",
                    )
                yield name, places[name]
            if names is not None and (more := next((name for name in places if name not in indexed), None)) is not None:
                raise CheckpointDamaged(
                    str(file),
                    expected=f"no tensor that {HUB_INDEX} does not have",
                    found=more,
                    fix=f"download {HUB_INDEX} again; or remove it, then all tensors of all files are read",
                )

    def _header(self, file: Path) -> "_Header":
        """What a file says that it has. It is read again if the file is another one."""
        try:
            state = file_state(file)
        except OSError as error:
            raise _unreadable(file, error) from error
        held = self._headers.get(file)
        if held is None or held[0] != state:
            self._headers[file] = held = state, _header_of(file)
        return held[1]

    def _files(self) -> dict[Path, list[str] | None]:
        """Each file, with the tensors that are taken from it; None for all."""
        if self._path.is_file():
            self._check_foreign()
            return {self._path: None}
        index = self._path / HUB_INDEX
        if not index.is_file():
            self._check_foreign()
            names = sorted(each.name for each in self._path.glob("*.safetensors"))
            if _MODEL_FILE in names:
                names = [each for each in names if not each.startswith(_SECOND_COPY)]
            files = list(map(self._inside, names))
            if not files:
                raise CheckpointMissing(
                    str(self._path),
                    expected="a safetensors file",
                    found="none",
                    fix="name a directory with model.safetensors; convert files of pickles first, as with save_pretrained",
                )
            return dict.fromkeys(files)
        found: dict[Path, list[str] | None] = {}
        for name, file in _weight_map(self._inside(HUB_INDEX)).items():
            found.setdefault(self._inside(file), []).append(name)  # type: ignore[union-attr]
        return found

    def _check_foreign(self) -> None:
        """Raise if it is a run of trainfold, a checkpoint of one, or what torch has written.

        Raises:
            CheckpointForeign: with the source that reads it.
        """
        if not self._path.exists():
            return
        found = detect_format(self._path)
        if found.format in (*NATIVE, "dcp", "torch"):
            raise CheckpointForeign(str(self._path), expected="a directory of a model hub, or a safetensors file", found=FORMATS[found.format], fix=f"use {reader_of(found)}")  # fmt: skip

    def _inside(self, name: object) -> Path:
        if not isinstance(name, str) or name != Path(name).name or "\0" in name or name in ("", ".", ".."):
            raise CheckpointHostile(
                str(self._path / HUB_INDEX),
                expected="names of files in its directory",
                found=name,
                fix="do not use this directory",
            )
        file = self._path / name
        if file.is_fifo() or file.is_socket() or file.is_char_device() or file.is_block_device():
            raise CheckpointHostile(str(file), expected="a file", found="a pipe, a socket or a device", fix="do not use this directory")  # fmt: skip
        if file.is_symlink():
            home, real = self._path.resolve(), file.resolve()
            if real.parent not in (home, home.parent.parent / "blobs"):
                raise CheckpointHostile(str(file), expected="a file of its directory", found=f"a link to {real}",
                                        fix="copy the file there if you trust where the link points")  # fmt: skip
        return file


def _weight_map(index: Path) -> dict[str, Any]:
    """What the index says. Unlike a manifest it may have letters of all languages."""
    try:
        text = index.read_bytes().decode()
        ascii_only = re.sub(r"[^\x00-\x7f]", lambda each: json.dumps(each[0])[1:-1], text)
        found = strict_json(ascii_only.encode(), str(index)).get("weight_map")
    except (UnicodeDecodeError, CheckpointHostile) as error:
        found = error.found if isinstance(error, CheckpointHostile) else error
    except OSError as error:
        raise CheckpointMissing(
            str(index), expected="a file that can be read", found=error, fix="download it again"
        ) from error
    if not isinstance(found, dict):
        shown = "another document" if found is None or isinstance(found, list) else found
        raise CheckpointDamaged(
            str(index), expected="an object with a weight_map", found=shown, fix="download it again"
        )
    return found


def _header_of(file: Path) -> "_Header":
    """Where each tensor of a file is, and the texts about it. The header is read and checked by the library whose format it is."""
    from safetensors import SafetensorError, safe_open

    try:
        with file.open("rb") as opened:
            begin = LENGTH_BYTES + int.from_bytes(opened.read(LENGTH_BYTES), "little")
        with safe_open(file, framework="pt") as tensors:
            about = dict(tensors.metadata() or {})
            slices = [(name, tensors.get_slice(name)) for name in tensors.offset_keys()]
            forms = [(name, each.get_dtype(), tuple(each.get_shape())) for name, each in slices]
    except SafetensorError as error:
        raise _damaged(file, "a file of safetensors", error) from error
    except OSError as error:
        raise _unreadable(file, error) from error
    found = {}
    for name, stored, shape in forms:
        dtype = _DTYPES.get(stored)
        if dtype is None:
            raise _damaged(file, f"{name} of one of {', '.join(_DTYPES)}", stored)
        stop = begin + size_bytes(dtype, shape)  # one after the other, without gaps: the library has checked it
        found[name] = _Place(file, dtype, shape, begin, stop)
        begin = stop
    # empty tensors have one place, and the library gives them in an order of chance
    found = dict(sorted(found.items(), key=lambda each: (each[1].start, each[1].stop, each[0])))
    return _Header(found, about)


def _unreadable(file: Path, error: OSError) -> CheckpointMissing:
    return CheckpointMissing(str(file), expected="a file that can be read", found=error, fix="download it again")


def _damaged(file: Path, expected: str, found: object) -> CheckpointDamaged:
    return CheckpointDamaged(str(file), expected=expected, found=found, fix="download it again")


def _run(place: _Place, box: Box, into: torch.Tensor) -> tuple[int, int] | None:
    """The elements of a stored tensor that a box is, if they lie in one run, and memory can be filled with them; else None."""
    held = tuple(stop - start for start, stop in box)
    if into.dtype != torch_dtype(place.dtype) or tuple(into.shape) != held or not can_scatter(into) or not into.is_contiguous():  # fmt: skip
        return None
    return Inside(place.shape, tuple(start for start, _ in box)).run(held)


def _mapped(place: _Place) -> torch.Tensor:
    if place.start == place.stop:
        return torch.empty(place.shape, dtype=torch_dtype(place.dtype))
    storage = torch.UntypedStorage.from_file(str(place.file), shared=False, nbytes=place.stop)
    part = torch.empty(0, dtype=torch.uint8).set_(storage, place.start, (place.stop - place.start,))  # type: ignore[call-overload]
    dtype = torch_dtype(place.dtype)
    is_aligned = part.data_ptr() % dtype.itemsize == 0 and place.start % dtype.itemsize == 0
    found: torch.Tensor = (part if is_aligned else part.clone()).view(dtype).view(place.shape)
    return found
