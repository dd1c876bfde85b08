"""`Program`: one process of the user's program and all processes that it starts: watched through its record, killed as a whole."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, final

from trainfold.adapters.cli.rehearse.scan import Scan
from trainfold.backends.flight.record_file import Tail
from trainfold.core.rehearsal.entry import RecordedLine

_LOOK_SECS: Final = 0.002
_GONE_SECS: Final = 10.0
_LAUNCHER_SECS: Final = 45.0  # torchrun gives the others 30 s to end


@final
class Program:
    """A program that was started; leaving the ``with`` block ends it and all processes that it started.

    Args:
        command: the program and its arguments.
        environment: of the process.
        record: the file that its managers write entries to.
        output: the file that its standard output and error are appended to.
        scan: looks for checkpoints of a program without a manager; None to look for none.
    """

    def __init__(
        self, command: list[str], *, environment: Mapping[str, str], record: Path, output: Path, scan: Scan | None
    ) -> None:
        self._command = command
        self._environment = dict(environment)
        self._tail = Tail(record)
        self._output = output
        self._scan = scan
        self._pids: set[int] = set()
        self._rank_pids: dict[int, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._rest: list[RecordedLine] = []
        self._signal_is_sent = self._is_one_rank = False

    def __enter__(self) -> "Program":
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - the command that the user asks to have run
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # so that the kill reaches its loader workers too, as a lost machine would
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    @property
    def code(self) -> int:
        """The exit code; negative for the signal that ended it."""
        assert self._process is not None
        return self._process.wait()

    @property
    def was_killed(self) -> bool:
        """Whether it ended because of `kill`, and not by itself just before."""
        return self._signal_is_sent and (self.code == -signal.SIGKILL or (self._is_one_rank and self.code != 0))

    def kill(self, rank: int | None = None) -> None:
        """Send SIGKILL: no handler runs and nothing is flushed, as when the kernel runs out of memory.

        Args:
            rank: the one to kill; the launcher then ends the others, in its way. None, or a rank that has no manager: all at once.
        """
        self._signal_is_sent = True
        victim = None if rank is None else self._rank_pids.get(rank)
        if victim is not None and self._process is not None:
            self._is_one_rank = True
            kill_each([victim])
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAUNCHER_SECS)
        self._end()

    def entries(self, *, patience_secs: float) -> Iterator[RecordedLine | None]:
        """Yield each entry as it is written, until the program ends; None each time that it was silent for too long.

        Args:
            patience_secs: how long it may be silent.
        """
        assert self._process is not None
        heard = time.monotonic()
        while True:
            is_over = self._process.poll() is not None  # asked before reading, so that no entry is missed
            found = self._tail.new()
            if self._scan is not None and not self._pids:
                found += self._scan.new()
            self._take(found)
            while self._rest:
                heard = time.monotonic()
                yield self._rest.pop(0)
            if is_over:
                return
            if time.monotonic() - heard > patience_secs:
                yield None
                heard = time.monotonic()
            time.sleep(_LOOK_SECS)

    def rest(self) -> list[RecordedLine]:
        """The entries that it wrote before its death and that `entries` has not yielded."""
        return self._rest

    def _end(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._take_rest()
        kill_each(self._pids - {self._process.pid})
        self._process.wait()
        self._pids.discard(self._process.pid)
        late = time.monotonic() + _GONE_SECS
        while any(map(_is_there, self._pids)) and time.monotonic() < late:
            time.sleep(_LOOK_SECS)
        self._take_rest()

    def _take_rest(self) -> None:
        self._take(self._tail.new())

    def _take(self, found: list[RecordedLine]) -> None:
        self._rest += found
        starts = [entry for entry in found if entry.kind == "start"]
        self._pids |= {entry.pid for entry in starts}
        self._rank_pids |= {entry.data["rank"]: entry.pid for entry in starts if "rank" in entry.data}


def kill_each(pids: Iterable[int]) -> None:
    """Send SIGKILL to each process that is still there: torchrun starts ranks in sessions of their own, so no signal to a group reaches them."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _is_there(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
