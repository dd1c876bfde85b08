"""`HubDirectory`: the weights in a directory of safetensors files, as model hubs have them, mapped into memory."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, final

import attrs
import torch

from trainfold.core.errors import CheckpointDamaged, CheckpointHostile, CheckpointMissing
from trainfold.core.format.codec import torch_dtype
from trainfold.core.format.dtypes import STORED, size_bytes
from trainfold.core.format.strict_json import strict_json
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.weights.source import Wanted

_INDEX: Final = "model.safetensors.index.json"
_LENGTH_BYTES: Final = 8
_HEADER_LIMIT: Final = 100_000_000  # as in the reference implementation of safetensors
_DTYPES: Final = {
    each.name: name
    for name, each in STORED.items()
    if each.parts == 1 and name not in ("float8_e8m0fnu", "float4_e2m1fn_x2")
}


@final
@attrs.frozen
class _Place:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@final
class HubDirectory:
    """The tensors of ``*.safetensors`` in a directory, with ``model.safetensors.index.json`` if there are several files.

    Files are mapped into memory, so that a rank reads only what it holds. Their contents have no digests; the fingerprint of what was loaded is in each
    checkpoint of a run whose frozen weights come from here. Files of pickles are not read.

    Args:
        path: the directory.

    Examples:
        >>> HubDirectory("models/base")
        HubDirectory('models/base')
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def __repr__(self) -> str:
        return f"HubDirectory({str(self._path)!r})"

    def supply(self, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each wanted tensor that is there, whole, in memory that is read when it is used.

        Raises:
            CheckpointMissing: if there is no safetensors file.
            CheckpointDamaged: if a file is too short, or its header is not one of safetensors.
            CheckpointHostile: if the index names a file outside the directory.
        """
        yield from ((name, _mapped(place)) for name, place in self._all_places() if name in wanted)

    def specs(self) -> dict[str, LeafSpec]:
        """Name -> dtype and shape of each tensor, from the headers of the files.

        Raises:
            CheckpointMissing: as in `supply`, and so the others.
        """
        return {name: LeafSpec(place.dtype, place.shape) for name, place in self._all_places()}

    def _all_places(self) -> Iterator[tuple[str, _Place]]:
        for file, names in self._files().items():
            places = _places(file)
            for name in places if names is None else names:
                if name not in places:
                    raise CheckpointDamaged(
                        str(file),
                        expected=f"the tensor {name}, as {_INDEX} says",
                        found="none",
                        fix="download it again",
                    )
                yield name, places[name]

    def _files(self) -> dict[Path, list[str] | None]:
        """Each file, with the tensors that are taken from it; None for all."""
        index = self._path / _INDEX
        if not index.is_file():
            files = sorted(self._path.glob("*.safetensors"))
            if not files:
                raise CheckpointMissing(
                    str(self._path),
                    expected="a safetensors file",
                    found="none",
                    fix="name a directory with model.safetensors; convert files of pickles first, as with save_pretrained",
                )
            return dict.fromkeys(files)
        found: dict[Path, list[str] | None] = {}
        for name, file in _weight_map(index).items():
            found.setdefault(self._inside(file), []).append(name)  # type: ignore[union-attr]
        return found

    def _inside(self, name: object) -> Path:
        if not isinstance(name, str) or name != Path(name).name or name in ("", ".", ".."):
            raise CheckpointHostile(
                str(self._path / _INDEX),
                expected="names of files in its directory",
                found=name,
                fix="do not use this directory",
            )
        return self._path / name


def _weight_map(index: Path) -> dict[str, Any]:
    try:
        found = strict_json(index.read_bytes(), str(index))["weight_map"]
        if isinstance(found, dict):
            return found
    except (KeyError, TypeError, json.JSONDecodeError):
        pass
    raise CheckpointDamaged(
        str(index), expected="an object with a weight_map", found="another document", fix="download it again"
    )


def _places(file: Path) -> dict[str, _Place]:
    """Where each tensor of a file is."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            if length > min(size - _LENGTH_BYTES, _HEADER_LIMIT):
                raise _damaged(file, f"a header of at most {size - _LENGTH_BYTES} bytes", length)
            header = strict_json(opened.read(length), str(file))
    except OSError as error:
        raise CheckpointMissing(
            str(file), expected="a file that can be read", found=error, fix="download it again"
        ) from error
    if not isinstance(header, dict):
        raise _damaged(file, "a header that is an object", type(header).__name__)
    begin, found = _LENGTH_BYTES + length, {}
    for name, each in header.items():
        if name != "__metadata__":
            found[name] = _place(file, name, each, begin, size)
    return found


def _place(file: Path, name: str, given: Any, begin: int, size: int) -> _Place:
    try:
        dtype, shape = _DTYPES[given["dtype"]], tuple(given["shape"])
        start, stop = (begin + each for each in given["data_offsets"])
        is_sound = all(type(each) is int and each >= 0 for each in shape) and begin <= start <= stop <= size
        if is_sound and stop - start == size_bytes(dtype, shape):
            return _Place(file, dtype, shape, start, stop)
    except (KeyError, TypeError, ValueError):
        pass
    raise _damaged(file, f"a dtype, a shape and a range in {size} bytes for {name}", given)


def _damaged(file: Path, expected: str, found: object) -> CheckpointDamaged:
    return CheckpointDamaged(str(file), expected=expected, found=found, fix="download it again")


def _mapped(place: _Place) -> torch.Tensor:
    if place.start == place.stop:
        return torch.empty(place.shape, dtype=torch_dtype(place.dtype))
    storage = torch.UntypedStorage.from_file(str(place.file), shared=False, nbytes=place.stop)
    part = torch.empty(0, dtype=torch.uint8).set_(storage, place.start, (place.stop - place.start,))  # type: ignore[call-overload]
    dtype = torch_dtype(place.dtype)
    is_aligned = part.data_ptr() % dtype.itemsize == 0 and place.start % dtype.itemsize == 0
    found: torch.Tensor = (part if is_aligned else part.clone()).view(dtype).view(place.shape)
    return found
