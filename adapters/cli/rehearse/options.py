"""`RehearsalSettings`: what is rehearsed and how, checked before anything is started."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

import attrs

from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown

PLACEHOLDER: Final = "{run}"
_SAVES: Final = 8
_MIN_STEPS: Final = 4


@final
@attrs.frozen
class RehearsalSettings:
    """What is rehearsed, and how. Make it with `make_settings`.

    Attributes:
        command: the program and its arguments; ``{run}`` in them stands for a directory.
        steps: after how many optimizer steps the program is to end.
        kills: how often the last run is killed.
        every: steps between two saves.
        seed: of the moments of the kills.
        tolerance: how far apart values may be after a resume, relative to the larger one, if the program does not
            repeat itself; None if none was given.
        patience_secs: how long a process may be silent before it counts as hanging.
        nproc: how many processes torchrun starts the command on, for the starts of a run in turn; None if the command starts its own.
    """

    command: tuple[str, ...]
    steps: int
    kills: int
    every: int
    seed: int
    tolerance: float | None
    patience_secs: float
    nproc: tuple[int, ...] | None = None

    @property
    def names_run(self) -> bool:
        """Whether the command names the directory for the program's files."""
        return any(PLACEHOLDER in word for word in self.command)

    @property
    def is_resized(self) -> bool:
        """Whether some starts have another number of processes."""
        return len(set(self.nproc or ())) > 1

    def command_for(self, run: Path, *, start: int = 1) -> list[str]:
        """The command with a directory in place of ``{run}``; torchrun starts it on several processes.

        Args:
            run: the directory.
            start: which start of the run it is, from 1.
        """
        command = [word.replace(PLACEHOLDER, str(run)) for word in self.command]
        if self.nproc is None:
            return command
        return under_torchrun(command, self.nproc[(start - 1) % len(self.nproc)])


def under_torchrun(command: Sequence[str], nproc: int) -> list[str]:
    """The command that starts another one on several processes of this machine."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    return [*torchrun, "--no-python", *command]


def make_settings(  # noqa: PLR0913 - keywords
    command: Sequence[str],
    *,
    steps: int = 40,
    kills: int = 3,
    every: int | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    patience_secs: float = 600.0,
    nproc: Sequence[int] | None = None,
) -> RehearsalSettings:
    """Return checked settings.

    Args:
        command: the program and its arguments.
        steps: of the whole run, at least 4.
        kills: at least 1.
        every: steps between two saves; None for an eighth of ``steps``.
        seed: of the moments of the kills, >= 0.
        tolerance: >= 0, or None.
        patience_secs: > 0.
        nproc: each at least 1, or None if the command starts its own processes.

    Raises:
        InvalidArgument: naming the argument; nothing was started.

    Examples:
        >>> make_settings(["python", "train.py", "--out", "{run}"]).every
        5
        >>> make_settings(["python", "train.py", "--out={run}/a"]).command_for(Path("/r"))
        ['python', 'train.py', '--out=/r/a']
    """
    if not command:
        raise _bad("COMMAND", "a command after --, such as -- python train.py --out {run}", "none", "name your program")
    if shutil.which(command[0]) is None:
        raise _bad("COMMAND", "a program that can be started", command[0], "correct the name, or give its path")
    if steps < _MIN_STEPS:
        raise _bad("--steps", f"{_MIN_STEPS} or more", steps, "pass more steps, so that there is something to resume")
    cadence = max(1, steps // _SAVES) if every is None else every
    if not 1 <= cadence <= steps // 2:
        raise _bad("--every", f"1 to {steps // 2}, half of the steps", every, "pass a lower --every, or more --steps")
    if kills < 1:
        raise _bad("--kills", "1 or more", kills, "kill it at least once")
    if not 0 <= seed < 2**63:
        raise _bad("--seed", "an int in [0, 2**63)", seed, "choose another seed")
    if tolerance is not None and not tolerance >= 0:
        raise _bad("--tolerance", "a number >= 0", tolerance, "1e-3 lets values differ by a thousandth")
    if not patience_secs > 0:
        raise _bad("--patience", "a duration above 0", patience_secs, "10m waits ten minutes")
    if nproc is not None and not (nproc and min(nproc) >= 1):
        raise _bad(
            "--nproc",
            "1 or more",
            min(nproc, default=0),
            "leave it out for a program that is one process, or starts its own",
        )
    return RehearsalSettings(
        tuple(command), steps, kills, cadence, seed, tolerance, patience_secs, None if nproc is None else tuple(nproc)
    )


def _bad(where: str, expected: str, found: Any, fix: str) -> InvalidArgument:
    return InvalidArgument(where, expected=expected, found=shown(found), fix=fix)
