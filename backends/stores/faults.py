"""A simulated disk in memory: the effects of stores, the faults that stop them, and the files that a crash leaves."""

import errno
from collections.abc import Callable
from typing import TypeAlias, final

import attrs

from trainfold.backends.stores.names import split_name


@final
@attrs.frozen
class Effect:
    """One change that a store made to its disk.

    Attributes:
        kind: ``reserve``, ``begin``, ``part``, ``finish``, ``sync`` (of a directory), ``commit``, ``delete``,
            ``point``, ``abandon`` (of a write that failed).
        name: the file or directory.
        data: the bytes of a part or a commit, the target of a hint.
        writer: which `write` of this store it belongs to, counted from 0.
    """

    kind: str
    name: str
    data: bytes = attrs.field(default=b"", repr=lambda data: f"<{len(data)} bytes>")
    writer: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.name or '.'}" + (f" {len(self.data)} bytes" if self.data else "")


Fault: TypeAlias = Callable[[int, Effect], BaseException | None]
"""Returns the error with which an effect fails, or None, from its index (failed ones count too) and the effect. Pure."""


class SimulatedCrash(BaseException):
    """The machine died. No handler of the program under test may run after that, so this is not an `Exception`."""


@final
@attrs.frozen
class CrashAt:
    """A fault: the machine dies just before its effect number ``index``."""

    index: int

    def __call__(self, index: int, effect: Effect) -> BaseException | None:
        """The crash, from effect ``index`` on."""
        return SimulatedCrash(f"before effect {index}: {effect}") if index >= self.index else None


@final
@attrs.frozen
class ErrorAt:
    """A fault: effect number ``index`` raises the `OSError` with number ``code``, such as ``errno.ENOSPC``.

    Attributes:
        index: which effect fails.
        code: the error number.
        lasting: whether all later effects that add something fail too, as on a disk that stays full.
    """

    index: int
    code: int = errno.EIO
    lasting: bool = False

    def __call__(self, index: int, effect: Effect) -> BaseException | None:
        """The error, at its effect."""
        hit = index == self.index or (self.lasting and index > self.index and effect.kind not in {"delete", "sync"})
        return OSError(self.code, errno.errorcode.get(self.code, "unknown")) if hit else None


def read_only(index: int, effect: Effect) -> BaseException | None:
    """A fault: every effect fails, as on a filesystem that is mounted read-only."""
    del index, effect
    return OSError(errno.EROFS, "Read-only file system")


@final
class Disk:
    """The visible files, which of them a crash may take back, and the files being written."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.hints: dict[str, str] = {}
        self.open: dict[int, tuple[str, bytearray]] = {}  # by writer
        self.unsynced: dict[str, bytes | None] = {}  # a name, and what was there when its directory was last synced

    def do(self, effect: Effect) -> None:
        """Carry out an effect."""
        kind, name = effect.kind, effect.name
        if kind == "begin":
            self.open[effect.writer] = (name, bytearray())
        elif kind == "part":
            self.open[effect.writer][1].extend(effect.data)
        elif kind == "finish":
            self._enter(name, bytes(self.open.pop(effect.writer)[1]))
        elif kind == "abandon":
            self.open.pop(effect.writer, None)
        elif kind == "commit":
            self._enter(name, effect.data)
        elif kind == "delete":
            if self.hints.pop(name, None) is None:
                self._enter(name, None)
        elif kind == "point":
            self.hints[name] = effect.data.decode()
        elif kind == "sync":
            self.unsynced = {known: old for known, old in self.unsynced.items() if split_name(known)[0] != name}

    def crash(self, *, keep_unsynced: bool, torn_write: bool) -> None:
        """Change to the disk that the next boot finds; see `MemoryStore.after_crash`."""
        if not keep_unsynced:
            for name, old in self.unsynced.items():
                self._set(name, old)
        if torn_write:
            for name, data in self.open.values():
                self.files[name] = bytes(data[: len(data) - len(data) // 3])
        self.unsynced, self.open = {}, {}

    def names_below(self, directory: str) -> list[str]:
        """The visible names one level below a directory, or at the top."""
        if directory == "":
            return sorted({name.split("/")[0] for name in self.files})
        return sorted(name.split("/")[1] for name in self.files if name.startswith(directory + "/"))

    def used_bytes(self) -> int:
        """Bytes of all files, those being written included."""
        return sum(map(len, self.files.values())) + sum(len(data) for _, data in self.open.values())

    def _enter(self, name: str, data: bytes | None) -> None:
        self.unsynced.setdefault(name, self.files.get(name))
        self._set(name, data)

    def _set(self, name: str, data: bytes | None) -> None:
        if data is None:
            self.files.pop(name, None)
        else:
            self.files[name] = data
