"""`DiskSpace`: estimates the disk space of a rehearsal from the first checkpoint of the first run, and checks that it is free."""

from collections.abc import Callable
from pathlib import Path
from typing import final

from trainfold.adapters.cli.rehearse.errors import NoDiskSpace
from trainfold.adapters.cli.rehearse.kept import KeptCheckpoints
from trainfold.adapters.cli.rehearse.options import RehearsalSettings
from trainfold.backends.stores.place import free_bytes_at
from trainfold.core.printable import bytes_text


def most_kept(settings: RehearsalSettings) -> int:
    """The largest number of checkpoints on the disk at once: all of the whole run, and four of the run beside it.

    These four are the two that a manager keeps, one that is being written, and the first that differs. A program that saves without a
    manager, or whose manager keeps more, has more.

    Examples:
        >>> from trainfold.adapters.cli.rehearse.options import make_settings
        >>> most_kept(make_settings(["python", "train.py"], steps=40))
        12
    """
    return -(-settings.steps // settings.every) + 4


@final
class DiskSpace:
    """Looks at the disk once, after the first checkpoint.

    Args:
        kept: the checkpoints of the first run.
        settings: of the rehearsal.
        directory: of the rehearsal.
        say: shows a line.
    """

    def __init__(
        self, kept: KeptCheckpoints, settings: RehearsalSettings, directory: Path, say: Callable[[str], None]
    ) -> None:
        self._kept = kept
        self._settings = settings
        self._directory = directory
        self._say = say
        self.facts: dict[str, int] = {}

    def look(self) -> None:
        """Print what the rehearsal needs; later calls do nothing.

        Raises:
            NoDiskSpace: if the disk has less.
        """
        if self.facts or not (size_bytes := self._kept.size_bytes()):
            return
        needed, free = most_kept(self._settings) * size_bytes, free_bytes_at(self._directory) + size_bytes
        self.facts = {"checkpoint_bytes": size_bytes, "needed_bytes": needed, "free_bytes": free}
        a, b = bytes_text(size_bytes), bytes_text(needed)
        self._say(f"  a checkpoint has {a}: the rehearsal needs about {b} of {bytes_text(free)}")
        if free < needed:
            raise NoDiskSpace(
                str(self._directory),
                expected=f"about {b} for {most_kept(self._settings)} checkpoints of {a}",
                found=f"{bytes_text(free)} free",
                fix="name a directory on another disk: --dir; or save less often: --every, half of --steps at most",
            )
