"""A disk that fails: one call, or every call from there on, raises an error; or a write is cut short."""

import os
from collections.abc import Callable
from typing import Any, Final, final

import attrs

from crash.disk.effects import Recorder

SHORT: Final = -1  # used as an error number: half of the bytes are written
_WRITES: Final = {"write", "pwrite"}


@final
@attrs.frozen
class Fault:
    """Which call fails, and how.

    Attributes:
        index: the index of the call among those that concern the run.
        code: the error number, or `SHORT`.
        lasting: whether every later call that changes something fails too.
    """

    index: int
    code: int
    lasting: bool = False


@final
@attrs.frozen
class Call:
    """A call that concerns the run.

    Attributes:
        name: the name of the function.
        path: the path below the recorder's top.
        changes: whether it changes anything on the disk; opening an existing file and closing do not.
    """

    name: str
    path: str
    changes: bool

    def __str__(self) -> str:
        return f"{self.name} {self.path}"

    @property
    def part(self) -> str:
        """The part of a save that makes the call: ``lock``, ``above`` (the run's own name), ``looking`` (reading the run), or ``writing``."""
        if self.path == "run/.lock":
            return "lock"
        if self.path == "." or (self.name == "mkdir" and self.path == "run"):
            return "above"
        return "writing" if self.changes else "looking"


@final
class FaultyDisk:
    """A handler for `watched`: counts the calls that concern the run, makes one fail, and records the rest."""

    def __init__(self, recorder: Recorder, fault: Fault | None = None) -> None:
        self.calls: list[Call] = []
        self.failed: list[Call] = []
        self.is_armed = False
        self._recorder = recorder
        self._fault = fault

    def __call__(self, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call, or make it fail."""
        path = self._recorder.target(name, args, kwargs) if self.is_armed else None
        if path is None:
            return self._recorder(name, real, args, kwargs)
        changes = name != "close" and not (name == "open" and not args[1] & (os.O_CREAT | os.O_TRUNC))
        call, index = Call(name, os.path.relpath(path, self._recorder.top), changes), len(self.calls)
        self.calls.append(call)
        if self._fault is None or not self._hits(self._fault, index, call):
            return self._recorder(name, real, args, kwargs)
        self.failed.append(call)
        if self._fault.code == SHORT:
            data = memoryview(args[1]).cast("B")
            return self._recorder(name, real, (args[0], data[: max(1, len(data) // 2)], *args[2:]), kwargs)
        if name == "close":
            self._recorder(name, real, args, kwargs)  # Linux releases the descriptor nevertheless
        if name in {"fsync", "fdatasync"}:
            self._recorder.sync_failed(args[0])
        raise OSError(self._fault.code, os.strerror(self._fault.code))

    def _hits(self, fault: Fault, index: int, call: Call) -> bool:
        if fault.code == SHORT and call.name not in _WRITES:
            return False
        return index == fault.index or (fault.lasting and index > fault.index and call.changes)
