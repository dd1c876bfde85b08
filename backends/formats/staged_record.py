"""`StagedRecord`: what is durable of the files of a staged directory, line by line, and `own_file` and `digest_of_first`, which prove it."""

import json
import os
import stat
from contextlib import suppress
from typing import Any, Final, final

import attrs
import xxhash

from trainfold.core.digest import DIGEST_PREFIX
from trainfold.core.errors import CheckpointHostile
from trainfold.core.format.strict_json import strict_json

NOTE_BYTES: Final = 256 << 20
"""How much of a file is written before it is made durable and noted: what a killed process may lose."""

_RECORD: Final = (
    "record"  # a line with the plan, then one for what is durable of a file; of one file, the last one counts
)
_RECORD_BYTES: Final = 64 << 20
_READ_BYTES: Final = 4 << 20
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@final
@attrs.frozen
class Durable:
    """The first bytes of a file, which are durable.

    Attributes:
        size_bytes: how many.
        digest: of these bytes.
        is_whole: whether the file has no others.
    """

    size_bytes: int
    digest: str
    is_whole: bool


@final
class StagedRecord:
    """The record of a plan, open for more lines.

    Args:
        directory: an open directory, where it replaces another one.
        plan: of the writer.
        known: what of the files is durable already.
    """

    def __init__(self, directory: int, plan: str, known: dict[str, Durable]) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(f"{_RECORD}.new", flags, 0o666, dir_fd=directory)
        try:
            self._add({"plan": plan}, *({"name": name, **attrs.asdict(each)} for name, each in known.items()))
            os.rename(f"{_RECORD}.new", _RECORD, src_dir_fd=directory, dst_dir_fd=directory)
            os.fsync(directory)
        except BaseException:
            self.close()
            raise

    def note(self, name: str, durable: Durable) -> None:
        """Add what is durable of a file. It is itself when this returns."""
        self._add({"name": name, **attrs.asdict(durable)})

    def close(self) -> None:
        """Close it; it stays where it is."""
        os.close(self._fd)

    def _add(self, *entries: dict[str, object]) -> None:
        data = memoryview("".join(f"{json.dumps(each)}\n" for each in entries).encode())
        while data:
            data = data[os.write(self._fd, data) :]
        os.fsync(self._fd)


def read_record(directory: int) -> tuple[str | None, dict[str, Durable]]:
    """The plan of an earlier process, and what it has made durable: up to the first line that is not whole. None for no record.

    Args:
        directory: an open directory, with the record.
    """
    try:
        fd = os.open(_RECORD, _READ, dir_fd=directory)
    except OSError:
        return None, {}
    try:
        found = os.fstat(fd)
        size_bytes = min(found.st_size, _RECORD_BYTES) if stat.S_ISREG(found.st_mode) else 0
        first, *rest = os.pread(fd, size_bytes, 0).split(b"\n")[:-1] or [b""]
    finally:
        os.close(fd)
    plan, known = None, {}
    with suppress(CheckpointHostile, KeyError, TypeError, ValueError):
        plan = str(strict_json(first, _RECORD)["plan"])
        for line in rest:
            entry = strict_json(line, _RECORD)
            durable = Durable(int(entry["size_bytes"]), str(entry["digest"]), entry["is_whole"] is True)
            if durable.size_bytes < 0:
                break
            known[checked_file_name(str(entry["name"]))] = durable
    return plan, known


def remove_record(directory: int) -> None:
    """Remove the record of a directory, if there is one."""
    for name in (f"{_RECORD}.new", _RECORD):
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)


def checked_file_name(name: str) -> str:
    """The name of a file in a directory.

    Raises:
        CheckpointHostile: if it may lead somewhere else.
    """
    if name in ("", ".", "..") or not name.isprintable() or "/" in name:
        raise CheckpointHostile(
            repr(name[:200]), expected="the name of a file, without a directory", found="another text", fix="rename it"
        )
    return name


def own_file(directory: int, name: str, *, mode: int = os.O_RDONLY) -> int | None:
    """Open a plain file of this user that has one name; None if it is something else, or not there.

    Args:
        directory: an open directory.
        name: of the file.
        mode: how it is opened.
    """
    try:
        fd = os.open(name, mode | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return None
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid():
        return fd
    os.close(fd)
    return None


def digest_of_first(fd: int, size_bytes: int) -> tuple[str, Any]:
    """The digest of the first bytes of a file, and the state of the hash, which goes on with what comes after them.

    Args:
        fd: of the file.
        size_bytes: how many. If it has fewer, the digest is that of all.
    """
    whole, at, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(min(_READ_BYTES, size_bytes)))
    while at < size_bytes and (size := os.preadv(fd, [buffer[: size_bytes - at]], at)):
        whole.update(buffer[:size])
        at += size
    return DIGEST_PREFIX + whole.hexdigest(), whole
