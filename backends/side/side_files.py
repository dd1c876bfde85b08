"""`SideFiles`: files on the user's disk as a component of a run, so that each checkpoint has their bytes."""

import os
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, final

import torch

from trainfold.backends.ranks.launcher import is_first_rank, log_for_all, warn_for_all
from trainfold.backends.side.file_reads import FileIdentity, WholeFile, file_identity, files_below, read_whole
from trainfold.backends.stores.place import local_path
from trainfold.core.checks import count
from trainfold.core.digest import digest_of
from trainfold.core.errors import InvalidArgument, InvalidState, TrainfoldError
from trainfold.core.json_values import Json, shown
from trainfold.core.side.side_file import FILES, KIND, check_side_names
from trainfold.core.state.state import OfRankZero, Opaque
from trainfold.core.tensor_memory import tensor_bytes

_MAX_BYTES: Final = 256 << 20
_MOST_KEYS: Final = 64  # of the contract; of more files it has one digest


@final
class SideFiles:
    """Files that belong to each checkpoint: tokenizer, configuration, samples of an evaluation. Attach it under ``extra``.

    Their bytes are saved as tensors, so each checkpoint has them whole, with their digests, or does not exist. A file that is not there, or cannot be read, is an error of the save, with its
    path; list the component in ``optional=`` of `attach` to save without it, with a warning. A resume leaves the files on the disk alone: `write_side_files` puts those of a checkpoint somewhere.

    Files that a run reads are read once, at the attach. If they change meanwhile, a warning names them, and checkpoints have the bytes that the run began with. At a resume they are compared with
    those of the checkpoint: other bytes are refused, unless ``policy={"files": ...}`` lets them pass. Files that the run writes itself (``changes=True``) are read at each save, if they have
    changed since the last one; they are not compared.

    On several ranks those of rank 0 count. The others need not have them.

    Args:
        files: a directory with all files in it, or the name in the checkpoint -> the path of each.
        changes: whether the run writes them.
        max_bytes: how many they may have together. They are held in memory.

    Raises:
        InvalidArgument: for a name that leads out of a directory, and for anything but a directory or a dict of paths.

    Examples:
        >>> import tempfile, torch, trainfold
        >>> from trainfold.stores import MemoryStore
        >>> run = MemoryStore()
        >>> with tempfile.TemporaryDirectory() as top:
        ...     _ = Path(top, "tokenizer.json").write_text("{}")
        ...     live = trainfold.attach(torch.nn.Linear(2, 1), extra={"tokenizer": SideFiles(top)})
        ...     _ = trainfold.save(live.capture(), run)
        >>> trainfold.states.read_side_files(run)
        {'tokenizer/tokenizer.json': b'{}'}
    """

    may_refuse = False  # a restore writes nothing

    def __init__(
        self, files: str | Path | Mapping[str, str | Path], *, changes: bool = False, max_bytes: int = _MAX_BYTES
    ) -> None:
        self._directory, self._named = _places(files)
        self._changes = bool(changes)
        self._max_bytes = count("SideFiles.max_bytes", max_bytes, fix="count bytes")
        self._held: dict[str, tuple[FileIdentity | None, torch.Tensor]] = {}
        self._first: TrainfoldError | None = None
        self._has_begun = False
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"SideFiles({', '.join(self._held) or self._directory or ', '.join(self._named)})"

    def capture(self) -> OfRankZero:
        """The files as they are saved.

        Raises:
            InvalidState: if one is not there, cannot be read, or changes while it is read; and if they are too large.
            CheckpointHostile: for a link that leads out of the directory.
        """
        if self._changes:
            self._read()
        else:
            self._begin()
            if self._first is not None:
                raise self._first
            self._warn_of_changes()
        return OfRankZero(Opaque({FILES: {name: data for name, (_, data) in self._held.items()}}))

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Why a value is not one of files; whether they are the same was compared by the contract."""
        if isinstance(_files_of(saved), Mapping):
            return []
        found = type(saved).__qualname__
        return [InvalidState(repr(self), expected="files of a checkpoint", found=found, fix="attach what was saved under this name")]  # fmt: skip

    def write(self, saved: Any) -> Callable[[], None]:
        """Leave the files on the disk as they are, and log those that the run has written since."""
        if self._changes and is_first_rank(os.environ):
            try:
                places = self._places_now()
            except TrainfoldError:
                places = {}
            files = _files_of(saved)
            names = sorted({*places, *files})
            others = [
                name
                for name in names
                if name not in places or name not in files or _same(places[name], files[name]) is None
            ]
            if others:
                log_for_all("%s: not as in the checkpoint, because the run wrote on; left as they are. "
                            "`trainfold files` puts those of the checkpoint into a directory", ", ".join(others))  # fmt: skip
        return lambda: None

    def settings(self, path: str) -> dict[str, Json]:
        """What must be the same at a resume: of files that the run reads, their sizes and digests.

        Args:
            path: the prefix of the keys.
        """
        found: dict[str, Json] = {f"{path}.kind": KIND}
        if self._changes:
            return found
        self._begin()
        texts = {name: f"{len(data)} bytes, {digest_of(tensor_bytes(data))}" for name, (_, data) in self._held.items()}
        if len(texts) > _MOST_KEYS:
            whole = digest_of("\n".join(f"{name} {text}" for name, text in texts.items()).encode())
            texts = {"*": f"{len(texts)} files, {whole}"}
        return found | {f"{path}.{FILES}[{name!r}]": text for name, text in texts.items()}

    def beside(self, names: Iterable[str]) -> dict[str, bytes]:
        """The contents of files by name, for ``like=`` of `write_hub_directory`.

        Args:
            names: patterns, such as ``tokenizer*``. What is not there is left out.

        Raises:
            InvalidState: as `capture` does.
        """
        patterns, files = tuple(names), _files_of(self.capture())
        return {
            name: bytes(tensor_bytes(data))
            for name, data in files.items()
            if any(fnmatch(name, pattern) for pattern in patterns)
        }

    def _begin(self) -> None:
        """Read files that the run reads, once. What is not there then is an error of each save, for what the run has read is not known."""
        if not self._has_begun:
            self._has_begun = True
            try:
                self._read()
            except TrainfoldError as error:
                self._first = error

    def _read(self) -> None:
        """Read what has changed. On other ranks than the first what cannot be read is left out, because only rank 0's files count."""
        is_first = is_first_rank(os.environ)
        held: dict[str, tuple[FileIdentity | None, torch.Tensor]] = {}
        left_bytes = self._max_bytes
        try:
            places = self._places_now()
        except TrainfoldError:
            if is_first:
                raise
            places = {}
        for name, place in places.items():
            try:
                held[name] = self._current(name, place, left_bytes)
            except TrainfoldError:
                if is_first:
                    raise
                continue
            left_bytes -= held[name][1].numel()
        self._held = held

    def _current(self, name: str, place: Path, most_bytes: int) -> tuple[FileIdentity | None, torch.Tensor]:
        known = self._held.get(name)
        if known is not None and known[0] is not None and known[0] == file_identity(place):
            return known
        found: WholeFile = read_whole(place, most_bytes=most_bytes)
        if known is not None and tensor_bytes(known[1]) == found.data:
            return found.identity, known[1]
        return found.identity, _tensor(found.data)

    def _places_now(self) -> dict[str, Path]:
        if self._directory is None:
            return self._named
        found = files_below(self._directory)
        check_side_names(found, str(self._directory), fix="rename it, or name the files that are meant one by one")
        if not found:
            raise InvalidState(str(self._directory), expected="a directory with files", found="an empty one" if self._directory.is_dir() else "none",
                               fix="put them there, or name the component in optional= of attach")  # fmt: skip
        return found

    def _warn_of_changes(self) -> None:
        for name, (identity, data) in list(self._held.items()):
            place = self._named[name] if self._directory is None else self._directory / name
            if name in self._warned or (identity is not None and identity == file_identity(place)):
                continue
            if (found := _same(place, data)) is not None:
                self._held[name] = found.identity, data
                continue
            self._warned.add(name)
            warn_for_all(f"{place} is not as it was when the run began: its checkpoints have the bytes that it began with, and a resume with others is refused; "
                         "for a file that the run itself writes, pass SideFiles(..., changes=True)")  # fmt: skip


def _places(files: Any) -> tuple[Path | None, dict[str, Path]]:
    if isinstance(files, str | os.PathLike):
        return Path(local_path(os.fspath(files), argument="SideFiles.files")), {}
    if not isinstance(files, Mapping) or not files or not all(isinstance(each, str) for each in files):
        raise InvalidArgument("SideFiles.files", expected="a directory, or name -> path of each file", found=shown(files),
                              fix='pass such as {"tokenizer.json": "models/base/tokenizer.json"}')  # fmt: skip
    check_side_names(files, "SideFiles.files")
    return None, {name: Path(local_path(os.fspath(each), argument=f"SideFiles.files[{name!r}]")) for name, each in sorted(files.items())}  # fmt: skip


def _files_of(saved: Any) -> Any:
    while isinstance(saved, OfRankZero | Opaque):
        saved = saved.value
    return saved.get(FILES) if isinstance(saved, Mapping) else None


def _same(place: Path, data: torch.Tensor) -> WholeFile | None:
    """The file at a place, if it has these bytes."""
    try:
        found = read_whole(place, most_bytes=data.numel())
    except InvalidState:
        return None
    return found if tensor_bytes(data) == found.data else None


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
