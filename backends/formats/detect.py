"""`detect_format`: which format a path has, from names and first bytes. Nothing is run or trusted, and no file is read whole. `check_format`: that it is the one that is read."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from trainfold.backends.stores.local import open_store
from trainfold.backends.stores.place import is_object_url, local_path, split_checkpoint
from trainfold.backends.stores.protocol import glimpse
from trainfold.core.errors import CheckpointForeign, CheckpointHostile, CheckpointMissing
from trainfold.core.format.file_names import step_of
from trainfold.core.weights.detected import (
    FORMATS,
    HEAD_BYTES,
    READ_HEADS,
    Detected,
    Kind,
    NameSeen,
    detected_file,
    detected_of,
    reader_of,
)

_ENTRIES: Final = 200_000


def detect_format(path: str | Path) -> Detected:
    """Find out which format a file or directory has.

    It reads the names in a directory, and at most 4 KiB of three files. A path may be a link, as the files of a hub's cache are; a
    ``run.json`` or ``manifest.json`` that is one is not followed. Pipes and devices are not opened.

    Args:
        path: a file, a directory, or a ``file://`` URL of one; or the URL of a directory in a bucket.

    Returns:
        The format and what shows it. Two formats at once, and none, are answers too: see `Detected.agreed`.

    Raises:
        CheckpointMissing: if there is nothing, or it cannot be read.
        CheckpointHostile: if a directory has more than 200,000 entries.

    Examples:
        >>> import tempfile, trainfold, torch
        >>> with tempfile.TemporaryDirectory() as run:
        ...     _ = trainfold.save(trainfold.attach(torch.nn.Linear(2, 1)).capture(), run)
        ...     detect_format(run).format, detect_format(f"{run}/step-00000000").format
        ('run', 'checkpoint')
    """
    if is_object_url(str(path)):
        return _in_bucket(str(path))
    found = Path(local_path(path))
    try:
        mode = found.stat().st_mode
        if stat.S_ISDIR(mode):
            return detected_of(str(path), _entries(found))
        if not stat.S_ISREG(mode):
            return Detected(
                str(path), (), ("neither a file nor a directory: it is not opened",), "name a file or a directory"
            )
        head, size_bytes = _head(found)
        return detected_file(str(path), head, size_bytes)
    except (OSError, ValueError) as error:  # a name with a zero byte
        raise CheckpointMissing(
            str(path), expected="a file or directory that can be read", found=error, fix="correct the path"
        ) from error


def _in_bucket(url: str) -> Detected:
    """The format of a directory in a bucket: of a checkpoint through its run, whose lists hide no commit."""
    run, directory = split_checkpoint(url)
    store = open_store(run)
    where, seen = f"{store.url}/{directory}".rstrip("/"), glimpse(store, directory)
    above = f"{directory}/" if directory else ""
    entries = list[NameSeen]()
    for name in seen.list(directory):
        is_head = name in READ_HEADS
        head = store.read(above + name, start=0, stop=HEAD_BYTES) if is_head else b""
        entries.append(NameSeen(name, "directory" if step_of(name) is not None else "file", head))
    if not entries:
        raise CheckpointMissing(where, expected="a run, or a checkpoint of one", found="nothing", fix="correct the URL")
    return detected_of(where, entries)


def check_format(path: Path, reads: str) -> None:
    """Raise if a path shows another format than the one that the caller reads; what shows no format is left to the caller.

    Args:
        path: a file or a directory; it need not be there.
        reads: the format.

    Raises:
        CheckpointForeign: with what reads it.
    """
    found = detect_format(path) if path.exists() else None
    if found is not None and found.format in FORMATS and found.format != reads:
        reader = reader_of(found)
        raise CheckpointForeign(str(path), expected=FORMATS[reads], found=FORMATS[found.format],
                                fix=f"use {reader}" if reader else "name another path")  # fmt: skip


def _entries(directory: Path) -> Iterator[NameSeen]:
    with os.scandir(directory) as found:
        for number, each in enumerate(found):
            if number >= _ENTRIES:
                raise CheckpointHostile(
                    str(directory),
                    expected=f"at most {_ENTRIES} entries",
                    found="more",
                    fix="name the directory of one checkpoint",
                )
            kind = _kind(each)
            head = _head(Path(each.path))[0] if kind == "file" and each.name in READ_HEADS else b""
            yield NameSeen(each.name, kind, head)


def _kind(entry: "os.DirEntry[str]") -> Kind:
    try:
        if entry.is_dir():
            return "directory"
        if entry.is_file():
            return "link" if entry.is_symlink() else "file"
    except OSError:  # a link in a circle
        pass
    return "other"


def _head(file: Path) -> tuple[bytes, int]:
    """The first bytes of a file, and its size; nothing of what has become something else in the meantime."""
    opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            return b"", 0
        return os.read(opened, HEAD_BYTES), found.st_size
    finally:
        os.close(opened)
