"""`Workplace`: a directory that a command fills and replaces, and that may hold nothing else."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import attrs

from trainfold.core.errors import CheckpointForeign, NotWritable, RunLocked


@final
@attrs.frozen
class Workplace:
    """What a command's directory looks like.

    Attributes:
        made_by: the command, such as ``trainfold demo``, as recorded in the marker.
        noun: what the command makes, for messages: ``demo``.
        option: the option that names the directory.
        marker: the file that marks a directory as the command's own.
        lock: the file that keeps a second process out.
        names: everything that the command writes there, marker and lock included.
    """

    made_by: str
    noun: str
    option: str
    marker: str
    lock: str
    names: frozenset[str]

    @contextlib.contextmanager
    def prepared(self, directory: Path) -> Iterator[None]:
        """Empty the directory and lock it for this process.

        Args:
            directory: absent, empty, or with the files of an earlier run of the command, which are removed.

        Raises:
            CheckpointForeign: if the directory has other files in it; nothing is touched.
            NotWritable: if it cannot be written.
            RunLocked: if another process of the command works there.
        """
        self._check_ours(directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(directory / self.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise NotWritable(
                str(directory),
                expected="a directory that can be written",
                found=error.strerror,
                fix=f"name another: {self.option}",
            ) from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunLocked(
                    str(directory),
                    expected=f"no {self.noun} running there",
                    found="one",
                    fix=f"wait for it, or name another: {self.option}",
                ) from None
            for name in sorted(self.names - {self.lock}):
                path = directory / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            yield
        finally:
            os.close(lock)

    def mark(self, directory: Path, about: Mapping[str, Any]) -> None:
        """Write the marker, with details of the work."""
        text = json.dumps({"made_by": self.made_by, **about}, indent=2)
        (directory / self.marker).write_text(text + "\n", encoding="utf-8")

    def _check_ours(self, directory: Path) -> None:
        if not directory.exists():
            return
        found = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else ["a file"]
        foreign = [name for name in found if name not in self.names or (directory / name).is_symlink()]
        if set(found) - {self.lock} and not foreign and not self._is_marked(directory / self.marker):
            foreign = found
        if foreign:
            shown = ", ".join(foreign[:4]) + (f" and {len(foreign) - 4} more" if len(foreign) > 4 else "")
            raise CheckpointForeign(
                str(directory),
                expected=f"no directory, an empty one, or one with an earlier {self.noun}",
                found=shown,
                fix=f"name another directory: {self.option} DIR; nothing was touched",
            )

    def _is_marked(self, path: Path) -> bool:
        try:
            return bool(json.loads(path.read_text(encoding="utf-8"))["made_by"] == self.made_by)
        except (OSError, ValueError, KeyError, TypeError):
            return False
