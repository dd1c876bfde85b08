"""`StopFile`: files that somebody puts into a run's directory, as requests to save or to stop (R02)."""

import logging
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import final

from trainfold.backends.stores.place import local_path
from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown
from trainfold.core.save.requests import StopRequest, checked_request

_LOG = logging.getLogger("trainfold")

FILES: Mapping[str, StopRequest] = MappingProxyType({"STOP": "save_and_stop", "SAVE": "save", "ABORT": "abort"})


@final
class StopFile:
    """Files in a run's directory as requests: ``touch run/STOP``. Made by rank 0 alone, which removes what it has seen.

    Not on the other ranks: one that is made a little later takes a fresh file for an old one, and removes it unheard. The
    manager tells all ranks what rank 0 was asked for.

    A file is looked for at most each ``every_secs``, and removed when it is taken, so that it asks once. One that is there
    already when this is made was meant for an earlier process that died before it saw it: it is removed, and a warning says
    so. What the files hold does not matter. They are no part of a run: nothing else in trainfold looks at them.

    Args:
        run: the run's directory; it need not be there yet.
        files: name -> request; None for ``STOP`` -> ``save_and_stop``, ``SAVE`` -> ``save``, ``ABORT`` -> ``abort``.
        every_secs: how long not to look again.
        clock: seconds that only grow.

    Raises:
        InvalidArgument: for a name that is not one in a directory, a request that is none, or a run that is a URL.

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
        self._run = Path(local_path(os.fspath(run))).absolute()  # a later chdir must not move it
        self._wanted = {_file_name(name): checked_request(asked) for name, asked in (files or FILES).items()}
        self._every_secs = every_secs
        self._clock = clock
        self._next_look: float | None = None
        self._stuck: dict[str, tuple[int, int]] = {}
        self._is_blind = False
        if left := self._look():
            _LOG.warning("%s: %s left by an earlier process: removed and not done; make it anew if it is meant for this one",
                         self._run, ", ".join(name for name, _ in left))  # fmt: skip

    def take(self) -> tuple[StopRequest, ...]:
        """See `RequestSource.take`. It never fails: a disk that cannot be asked for a while asks for nothing."""
        now = self._clock()
        if self._next_look is not None and now < self._next_look:
            return ()
        self._next_look = now + self._every_secs
        found = self._look()
        for name, asked in found:
            _LOG.info("%s/%s: %s", self._run, name, asked)
        return tuple(dict.fromkeys(asked for _, asked in found))

    def close(self) -> None:
        """Look no more; a file that is there stays, and is removed by whoever comes next."""
        self._wanted = {}

    def _look(self) -> list[tuple[str, StopRequest]]:
        found, error = [], None
        for name, asked in self._wanted.items():
            try:
                if self._consumed(self._run / name):
                    found.append((name, asked))
            except OSError as caught:  # the others are looked for all the same: what was removed must not be lost
                error = caught
        if error is not None and not self._is_blind:
            _LOG.warning("%s: control files cannot be looked for now: %s", self._run, error)
        self._is_blind = error is not None
        return found

    def _consumed(self, path: Path) -> bool:
        """Whether a file is there that has not asked yet; it is removed, or remembered where it cannot be."""
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
