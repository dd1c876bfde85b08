"""`local_path` turns a user's path or ``file://`` URL into a path of this machine; `is_object_url` finds the URL of a bucket; `free_path` refuses the directory of a checkpoint; `free_bytes_at` is the room there; `is_own_disk` says whether it is on a disk of this machine.

Here a place is the location of a run, as in `Store.url`; a `Place` of `stores.protocol` is memory for bytes.
"""

import os
import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from trainfold.core.errors import InvalidArgument
from trainfold.core.format.file_names import MANIFEST, RUN_FILE, step_of
from trainfold.core.json_values import shown

PROVIDERS: Final = {
    "s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "azure": "az", "abfs": "az", "abfss": "az", "adl": "az",
}  # fmt: skip
"""Scheme of a URL that names a bucket -> the name of its provider."""

_ALIKE: Final = {**PROVIDERS, "gcs": "gs"}
_DISK: Final = re.compile(
    r"bcachefs|btrfs|exfat|ext[234]|f2fs|jfs|ntfs3|overlay|vfat|xfs|zfs"
)  # kinds of filesystems, as Linux names them

# Two letters at least, so that C:/ is a drive; one slash is enough, because pathlib makes s3:/ of s3://.
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+._-]+):(//?)")
_CHAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+._-]*:.*?(?<=::)[A-Za-z][A-Za-z0-9+._-]+:/", re.DOTALL)
# A URL that is not written as one, and would be the name of a directory: without a slash; with a blank or a quotation mark before it; or with any other sign, such as
# a bracket or an invisible mark of direction, if the scheme is a provider's or a password may follow.
_KNOWN: Final = "|".join((*_ALIKE, "file"))
_MISWRITTEN: Final = re.compile(
    rf"(?:[\s\u200b\u2060\ufeff'\"`<“”\u2018\u2019«]+|[^\w/.~]+(?=(?:{_KNOWN}):/|[^/]*:/.*[@?]))([A-Za-z][A-Za-z0-9+._-]+):/|({_KNOWN}):(?!/)",
    re.IGNORECASE | re.DOTALL,
)


def is_object_url(place: str) -> bool:
    """Whether a run's location is a URL of anything but this machine; pathlib makes ``s3:/`` of ``s3://``, and that is one too.

    Examples:
        >>> is_object_url("s3://bucket/run"), is_object_url("s3:/bucket/run"), is_object_url("file:///run"), is_object_url("runs/a")
        (True, True, False, False)
    """
    found = _SCHEME.match(place)
    return is_chain(place) or (found is not None and found[1].lower() != "file")


def settled_place(url: str) -> str:
    """The URL of a store, or of a directory its one path, by which two of one machine are known to be the same.

    Examples:
        >>> settled_place("s3://bucket/run"), settled_place("/runs/./a")
        ('s3://bucket/run', '/runs/a')
    """
    return url if is_object_url(url) else os.path.realpath(url)


def is_chain(place: str) -> bool:
    """Whether a location is a chain of URLs, as fsspec has them: a cache or an archive in front of another store.

    Examples:
        >>> is_chain("simplecache::s3://bucket/run"), is_chain("zip://a::s3:/bucket/a.zip"), is_chain("runs/a::b"), is_chain("s3://bucket/a::b")
        (True, True, False, False)
    """
    return _CHAIN.match(place) is not None


def shown_url(url: str) -> str:
    """A URL that is refused, as an error shows it: without a name, a password or a query.

    Examples:
        >>> shown_url("ftp://user:secret@host/run?key=secret"), shown_url("hdfs://host/run"), shown_url("user:sec ret@host")
        ('ftp://…@host/run?…', 'hdfs://host/run', '…@host')
    """
    return re.sub(r"[?#].*", "?…", re.sub(r"^([^/@]*:/{1,2})?.*@", r"\1…@", url, flags=re.DOTALL), flags=re.DOTALL)


def url_text(url: str) -> str:
    """The URL as it was typed, of which pathlib has removed a slash.

    Examples:
        >>> url_text("s3:/bucket/run"), url_text("s3://bucket/run"), url_text("runs/a")
        ('s3://bucket/run', 's3://bucket/run', 'runs/a')
        >>> url_text("file:/data/run"), url_text("file:/localhost/data/run")
        ('file:///data/run', 'file://localhost/data/run')
    """
    url = re.sub(r"^file:/(?!/|localhost/)", "file:///", url)
    return re.sub(r"^([A-Za-z][A-Za-z0-9+.-]+):/{1,2}", r"\1://", url)


def url_parts(url: str) -> tuple[str, ...]:
    """The provider, the bucket and the parts of the run that a URL names, whatever way it is written: empty parts and ``.`` say nothing.

    Examples:
        >>> url_parts("s3a:/bucket//runs/./a/"), url_parts("gcs://bucket/a")
        (('s3', 'bucket', 'runs', 'a'), ('gs', 'bucket', 'a'))
    """
    scheme, _, rest = url.partition(":")
    return (_ALIKE.get(scheme.lower(), scheme.lower()), *(part for part in rest.split("/") if part not in {"", "."}))


def split_checkpoint(url: str) -> tuple[str, str]:
    """The URL of the run, and the name of the checkpoint that a URL names; "" if it names a run.

    Examples:
        >>> split_checkpoint("s3:/bucket/run/step-00000007/"), split_checkpoint("s3://bucket/run")
        (('s3:/bucket/run', 'step-00000007'), ('s3://bucket/run', ''))
    """
    run, _, name = url.rstrip("/").rpartition("/")
    return (url, "") if step_of(name) is None else (run, name)


def local_path(place: str | os.PathLike[str], *, argument: str = "run") -> str:
    """Return the path on this machine of a run's location, or of a directory that is written.

    Args:
        place: a path, or a ``file://`` URL of this machine.
        argument: what the caller calls it, for the error.

    Returns:
        The path.

    Raises:
        InvalidArgument: for any other URL, and for anything but a path. Otherwise a folder named after it would be created.

    Examples:
        >>> local_path("runs/a"), local_path("file:///data/run%201")
        ('runs/a', '/data/run 1')
        >>> local_path("hdfs://host/run")
        Traceback (most recent call last):
            ...
        trainfold.core.errors.InvalidArgument: run: expected a path or a file:// URL, found 'hdfs://host/run'; name a local \
or mounted directory; for a run, pass a store of your own
    """
    text = os.fspath(place) if isinstance(place, os.PathLike) else place
    if not isinstance(text, str):
        raise InvalidArgument(argument, expected="a path or a file:// URL", found=shown(place), fix="pass a str or a pathlib.Path")  # fmt: skip
    found = _SCHEME.match(text)
    if found is None and not is_chain(text):
        wrong = _MISWRITTEN.match(text)
        if wrong and (any(mark in text for mark in "@?#") or not os.path.lexists(text.split("/")[0])):
            scheme = wrong[1] or wrong[2]
            raise InvalidArgument(argument, expected="a path or a URL", found=f"{scheme}: and what it names, which is neither; it is not shown, as it may hold a password",
                                  fix=f"begin with {scheme}:// and nothing before it, without a name and a password; or give the absolute path of a directory of that name")  # fmt: skip
        return text
    scheme, rest = ("", "") if found is None else (found[1].lower(), text[found.end() :])
    if found is None or scheme != "file" or is_chain(text):
        raise InvalidArgument(argument, expected="a path or a file:// URL", found=repr(shown_url(text)), fix="name a local or mounted directory; for a run, pass a store of your own")  # fmt: skip
    host, slash, path = ("", "/", rest) if found[2] == "/" else rest.partition("/")
    if host not in {"", "localhost"} or not slash:
        raise InvalidArgument(argument, expected="a file:// URL with an absolute path of this machine", found=repr(shown_url(text)),
                              fix="write three slashes, as in file:///data/runs/a, or give the path itself")  # fmt: skip
    return "/" + unquote(path, errors="surrogateescape")


def free_path(place: str, *, argument: str = "path") -> str:
    """The path of a directory that is written, which is not a checkpoint, nor in one: a checkpoint holds what its manifest lists. Names beside the checkpoints of a run are free.

    Args:
        place: see `local_path`; it need not be there.
        argument: what the caller calls it.

    Raises:
        InvalidArgument: if it is; and as `local_path` raises it.
    """
    path = local_path(place, argument=argument)
    real = Path(path).resolve()
    for each in (real, *real.parents):
        if step_of(each.name) is not None and ((each / MANIFEST).is_file() or (each.parent / RUN_FILE).is_file()):
            raise InvalidArgument(argument, expected="a directory that is not in a checkpoint", found=f"{path}, in {each}",
                                  fix="name another one, such as one beside the run")  # fmt: skip
    return path


def free_bytes_at(path: str | Path) -> int:
    """How much this user can still write where a path is, or will be.

    Args:
        path: it need not be there.

    Examples:
        >>> free_bytes_at("/no/such/directory") == free_bytes_at("/")
        True
    """
    existing = os.path.realpath(path)
    while not os.path.exists(existing):  # noqa: PTH110
        existing = os.path.dirname(existing)  # noqa: PTH120
    found = os.statvfs(existing)
    return found.f_bavail * found.f_frsize


def is_own_disk(path: str | Path) -> bool:
    """Whether a path is on a disk of this machine, whose errors are its own. Of a filesystem that is not known it is not.

    Args:
        path: it need not be there.
    """
    try:
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()]
    except OSError:
        return False
    real = Path(os.path.realpath(path))
    above = {str(each): len(each.parts) for each in (real, *real.parents)}
    found = (0, "")
    for fields in mounts:
        depth = above.get(_unescaped(fields[4]), 0)
        if depth >= found[0]:  # of two at one place the later one hides the other
            found = depth, fields[fields.index("-") + 1]
    return _DISK.fullmatch(found[1]) is not None


def _unescaped(place: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), place)


def file_state(path: Path) -> tuple[int, int, int, int]:
    """What is another one when a file was written or replaced: its number, its size, and when it was changed.

    Args:
        path: of the file.
    """
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def bytes_on_disk(path: str | Path) -> int:
    """How much of its disk the files below a path take; 0 if nothing is there.

    Args:
        path: a directory.

    Examples:
        >>> bytes_on_disk("/no/such/directory")
        0
    """
    return sum(each.lstat().st_blocks * 512 for each in Path(path).rglob("*"))
