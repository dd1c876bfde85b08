"""`link_directory`: a directory whose large files are second names of files elsewhere on the same filesystem."""

import errno
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, final

import attrs

from trainfold.backends.stores.os_errors import named_failures
from trainfold.backends.stores.staged_files import make_directories, sync_above
from trainfold.core.errors import InvalidArgument, NotWritable

_NO_LINK: Final = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES, errno.ENOSYS}
_WRITABLE: Final = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


@final
@attrs.frozen
class NamedFile:
    """A file that gets a second name.

    Attributes:
        name: the second name.
        source: the path of the file.
        size_bytes: its size.
    """

    name: str
    source: str
    size_bytes: int


@final
@attrs.frozen
class LinkedDirectory:
    """A directory of linked files.

    Attributes:
        path: the directory.
        files: the linked ones.
        beside: name -> size of each file of its own.
    """

    path: str
    files: tuple[NamedFile, ...]
    beside: Mapping[str, int]


def link_directory(
    target: str | Path, files: Sequence[NamedFile], beside: Mapping[str, bytes], *, dry_run: bool = False
) -> LinkedDirectory:
    """Make a directory of hard links, which is absent until it is whole. The files are made read-only, because a write through either name changes both.

    Args:
        target: the directory, which does not exist yet, or is empty.
        files: those that get second names.
        beside: name -> contents of the files of its own.
        dry_run: whether nothing is made.

    Raises:
        InvalidArgument: if there is something at the target.
        NotWritable: if the filesystem is another one, or has no links.
        SaveFailed: if something cannot be written.
    """
    real = os.path.realpath(target)
    found = LinkedDirectory(str(target), tuple(files), {name: len(data) for name, data in beside.items()})
    with named_failures(real):
        if os.path.lexists(real) and (not os.path.isdir(real) or os.listdir(real)):  # noqa: PTH112, PTH208
            raise InvalidArgument(str(target), expected="a directory that does not exist yet, or is empty", found="something else",
                                  fix="choose another path, or remove what is there; nothing is overwritten")  # fmt: skip
        if dry_run:
            return found
        above, name = os.path.split(real)
        make_directories(above, "")
        staging = f"{above}/.{name}.linked"
        shutil.rmtree(staging, ignore_errors=True)  # of a killed process: its second names, and small files
        os.mkdir(staging)  # noqa: PTH102
        try:
            for each in files:
                link_file(each.source, f"{staging}/{each.name}")
            for short, data in beside.items():
                with Path(staging, short).open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            _sync(staging)
            os.rename(staging, real)  # noqa: PTH104
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        sync_above(real)
    return found


def link_file(source: str, target: str) -> None:
    """Give a file a second name, and make it read-only.

    Raises:
        NotWritable: if the filesystem is another one, has no links, or the file belongs to another user.
    """
    try:
        os.link(os.path.realpath(source), target)
        os.chmod(target, stat.S_IMODE(os.stat(target).st_mode) & ~_WRITABLE)  # noqa: PTH101, PTH116
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        raise NotWritable(target, expected="a second name for a file of the same user and filesystem", found=error,
                          fix="choose a path on that filesystem, or copy the tensors with trainfold convert") from None  # fmt: skip


def _sync(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
