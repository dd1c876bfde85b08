"""A run as a crash left it, for reading: a `Store` in memory over the files of a `CrashState`, and the same files on a real disk."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, final

from crash.disk.extents import FILE, Data
from trainfold.backends.stores.names import is_component, prefix_directory, split_name
from trainfold.backends.stores.os_errors import missing, not_a_directory, torn
from trainfold.core.errors import CheckpointHostile

Files = Mapping[str, Data | str | None]


@final
class FrozenStore:
    """Reads like a `LocalStore`; nothing can be written.

    Args:
        files: path -> bytes of a file, None for a directory, a string for the target of a link.
        run: the path of the run's directory.
    """

    def __init__(self, files: Files, run: str = "run") -> None:
        self._run = run
        self.files = {path.removeprefix(f"{run}/"): data for path, data in files.items() if path.startswith(f"{run}/")}
        self._is_a_file = isinstance(files.get(run), FILE)

    @property
    def url(self) -> str:
        return self._run

    def read(self, name: str, *, start: int = 0, stop: int | None = None) -> bytes:
        data = self._data(name)
        return data[start : len(data) if stop is None else max(start, stop)]

    def read_into(self, name: str, buffer: memoryview, *, start: int = 0) -> None:
        data, wanted = self._data(name), buffer.cast("B")
        if start + len(wanted) > len(data):
            raise torn(name, expected_bytes=start + len(wanted), found_bytes=len(data))
        wanted[:] = data[start : start + len(wanted)]

    def size(self, name: str) -> int | None:
        split_name(name)
        data = self.files.get(name)
        if isinstance(data, str):
            raise CheckpointHostile(name, expected="a file", found="a link", fix="")
        return None if data is None else len(data)

    def list(self, prefix: str = "") -> list[str]:
        if self._is_a_file:
            raise not_a_directory(self._run)
        directory = prefix_directory(prefix)
        found = [path.rpartition("/") for path in self.files]
        return sorted(
            name
            for above, _, name in found
            if above == directory
            and is_component(name)
            and not isinstance(self.files[f"{above}/{name}".lstrip("/")], str)
        )

    def committed_at(self, name: str) -> float | None:
        del name
        return None

    def pointers(self) -> dict[str, str]:
        return {}

    def _data(self, name: str) -> Data:
        split_name(name)
        data = self.files.get(name)
        if not isinstance(data, FILE):
            raise missing(name)
        return data

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError(f"recovery wrote: {args} {kwargs}")

    write = commit = delete = point = lock = reserve = _refuse


def visible(files: Files) -> dict[str, Data | str | None]:
    """The files that a reader of the run can see: without staged files, the lock and the hints."""
    return {
        path: data
        for path, data in files.items()
        if not isinstance(data, str) and not any(part.startswith(".") for part in path.split("/"))
    }


def materialise(files: Files, top: str | os.PathLike[str]) -> None:
    """Write the files into an empty directory."""
    for path in sorted(files):
        data, place = files[path], Path(top, path)
        if data is None:
            place.mkdir()
        elif isinstance(data, str):
            place.symlink_to(data)
        else:
            place.write_bytes(bytes(data))


def files_in(top: str | os.PathLike[str]) -> dict[str, bytes | str | None]:
    """The contents of a directory, in the form that `materialise` takes."""
    found: dict[str, bytes | str | None] = {}
    for place in Path(top).rglob("*"):
        path = str(place.relative_to(top))
        found[path] = str(place.readlink()) if place.is_symlink() else None if place.is_dir() else place.read_bytes()
    return found
