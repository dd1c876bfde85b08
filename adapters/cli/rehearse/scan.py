"""`Scan`: finds new checkpoints in a directory, for programs that save without a manager."""

import os
import shutil
import time
from pathlib import Path
from typing import Final, final

from trainfold.backends.stores.kept_checkpoint import keep_checkpoint
from trainfold.core.format.file_names import MANIFEST, step_of
from trainfold.core.rehearsal.entry import RecordedLine
from trainfold.core.rehearsal.orders import KEPT_NAME, MANIFESTS_NAME

_DEPTH: Final = 3


@final
class Scan:
    """Looks for checkpoints that a program saves, and keeps a copy of each manifest and links to its data.

    Checkpoints that are there when it is created count as old.

    Args:
        home: the directory that the program was given.
        notes: where the copies and links go, in a directory for each run in ``home``.
    """

    def __init__(self, home: Path, notes: Path) -> None:
        self._home = home
        self._notes = notes
        self._seen = {path: path.stat().st_mtime_ns for path in self._manifests()}
        self.newest = max((_step(path) for path in self._seen), default=0)

    def new(self) -> list[RecordedLine]:
        """The checkpoints that appeared since the last call, oldest first."""
        found = []
        for path in self._manifests():
            try:
                changed = path.stat().st_mtime_ns
                if self._seen.get(path) != changed:
                    self._keep(path)
                    self._seen[path] = changed
                    found.append((_step(path), path.parent.name))
            except FileNotFoundError:
                continue  # deleted meanwhile
        return [RecordedLine("saved", step, 0, time.monotonic(), {"checkpoint": name}) for step, name in sorted(found)]

    def _manifests(self) -> list[Path]:
        found = []
        for folder, below, files in os.walk(self._home):  # a directory that is deleted meanwhile is skipped
            path = Path(folder)
            depth = len(path.relative_to(self._home).parts)
            below[:] = [name for name in below if depth < _DEPTH and not name.startswith(".")]
            if MANIFEST in files and step_of(path.name) is not None:
                found.append(path / MANIFEST)
        return found

    def _keep(self, path: Path) -> None:
        name = "-".join(path.parent.parent.relative_to(self._home.parent).parts)
        keep_checkpoint(path.parent, self._notes / KEPT_NAME / name)
        kept = self._notes / MANIFESTS_NAME / name
        kept.mkdir(parents=True, exist_ok=True)
        for index in path.parent.glob("index-*.json"):  # of the ranks of a save on several
            (kept / path.parent.name).mkdir(exist_ok=True)
            shutil.copyfile(index, kept / path.parent.name / index.name)
        shutil.copyfile(path, kept / f".{path.parent.name}")
        (kept / f".{path.parent.name}").replace(kept / f"{path.parent.name}.json")


def _step(path: Path) -> int:
    return step_of(path.parent.name) or 0
