"""`StopFile`: files in a run's directory as requests to save or to stop."""

import logging
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import final

from trainfold.backends.stores.place import local_path
from trainfold.backends.stores.stand_in import stand_in
from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown
from trainfold.core.save.requests import StopRequest, checked_request

_LOG = logging.getLogger("trainfold")

FILES: Mapping[str, StopRequest] = MappingProxyType({"STOP": "save_and_stop", "SAVE": "save", "ABORT": "abort"})


@final
class StopFile:
    """Files in a run's directory as requests: ``touch run/STOP``. Only rank 0 makes it; it removes the files that it has seen.

    Do not make it on other ranks: one that is made a little later takes a fresh file for an old one, and removes it. The manager passes
    rank 0's requests to all ranks.

    It looks for files at most once in ``every_secs``, and removes a file when it takes it, so that each file is one request. A file that is
    there when this is made was meant for an earlier process that died before it saw it: it is removed with a warning. The
    contents of the files do not matter, and nothing else in trainfold looks at them. In a replay of the run, they are those of its copy.

    Args:
        run: the run's directory, which may not exist yet.
        files: name -> request; None for ``STOP`` -> ``save_and_stop``, ``SAVE`` -> ``save``, ``ABORT`` -> ``abort``.
        every_secs: the least time between two looks.
        clock: seconds that only increase.

    Raises:
        InvalidArgument: for a name that is not a file name, an unknown request, or a run that is a URL.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as run:
        ...     source = StopFile(run, every_secs=0)
        ...     Path(run, "STOP").touch()
        ...     source.take(), source.take(), os.listdir(run)
        (('save_and_stop',), (), [])
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        files: Mapping[str, StopRequest] | None = None,
        *,
        every_secs: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        given = local_path(os.fspath(run))
        self._run = Path(stand_in(given) or given).absolute()  # a later chdir must not move it
        self._wanted = {_file_name(name): checked_request(asked) for name, asked in (files or FILES).items()}
        self._every_secs = every_secs
        self._clock = clock
        self._next_look: float | None = None
        self._stuck: dict[str, tuple[int, int]] = {}
        self._is_blind = False
        if left := self._look():
            _LOG.warning("%s: %s left by an earlier process: removed and not done; create it again if it is meant for this one",
                         self._run, ", ".join(name for name, _ in left))  # fmt: skip

    def __repr__(self) -> str:
        wanted = ", ".join(f"{name}: {asked}" for name, asked in self._wanted.items())
        return f"StopFile({str(self._run)!r}, {wanted or 'closed'})"

    def take(self) -> tuple[StopRequest, ...]:
        """See `RequestSource.take`. It never fails: while the disk cannot be read, there are no requests."""
        now = self._clock()
        if self._next_look is not None and now < self._next_look:
            return ()
        self._next_look = now + self._every_secs
        found = self._look()
        for name, asked in found:
            _LOG.info("%s/%s: %s", self._run, name, asked)
        return tuple(dict.fromkeys(asked for _, asked in found))

    def close(self) -> None:
        """Stop looking. A file that is there stays, and the next `StopFile` removes it."""
        self._wanted = {}

    def _look(self) -> list[tuple[str, StopRequest]]:
        found, error = [], None
        for name, asked in self._wanted.items():
            try:
                if self._consumed(self._run / name):
                    found.append((name, asked))
            except OSError as caught:  # look for the others all the same: a file that was removed must not be lost
                error = caught
        if error is not None and not self._is_blind:
            _LOG.warning("%s: cannot look for control files now: %s", self._run, error)
        self._is_blind = error is not None
        return found

    def _consumed(self, path: Path) -> bool:
        """Whether there is a file that was not taken yet. It is removed, or remembered if it cannot be removed."""
        try:
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            self._stuck.pop(path.name, None)
            return False
        mark = (status.st_ino, status.st_mtime_ns)
        if stat.S_ISDIR(status.st_mode) or self._stuck.get(path.name) == mark:
            return False
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._stuck[path.name] = mark
            _LOG.warning("%s cannot be removed: it counts once, until it is touched again: %s", path, error)
        return True


def _file_name(name: str) -> str:
    if not isinstance(name, str) or name in {"", ".", ".."} or "/" in name or "\0" in name:
        raise InvalidArgument("files", expected="names of files in the run's directory", found=shown(name),
                              fix="name one without a path, such as 'STOP'")  # fmt: skip
    return name
