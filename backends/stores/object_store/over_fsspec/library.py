"""`Library`: what the filesystem of one library says of objects, and how it puts them under a condition; `library_of` finds it by the class."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from importlib import import_module
from typing import Any, Final, Literal, Protocol, TypeAlias, TypedDict

from trainfold.backends.stores.object_store.over_fsspec.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
)
from trainfold.core.errors import InvalidArgument

Condition: TypeAlias = Literal["create"] | Mapping[str, str] | None
"""Of a put: that there is no object, that its contents are those of a version, or none."""


class ObjectDescription(TypedDict):
    """An object, as obstore describes it; and what was put with it, in ``attributes``."""

    size: int
    last_modified: datetime
    e_tag: str | None
    version: str | None
    attributes: Mapping[str, str]


class Upload(Protocol):
    """An object that is put in parts, and appears when it is committed."""

    def write(self, part: bytearray) -> None:
        """Send a part."""
        ...

    def commit(self) -> None:
        """Put them together."""
        ...

    def abort(self) -> None:
        """Leave nothing."""
        ...


class Library(Protocol):
    """One request each, over paths of the filesystem. What a path is in a list, `described` says; nothing is remembered.

    A put carries its condition to the store: none looks first and writes then.
    """

    def get(self, path: str, span: str | None) -> tuple[bytes, ObjectDescription]:
        """The bytes of an object, of the version that is described; or those of a range, as HTTP writes it."""
        ...

    def head(self, path: str) -> ObjectDescription:
        """An object without its bytes."""
        ...

    def put(self, path: str, data: bytes, condition: Condition, attributes: Mapping[str, str]) -> Mapping[str, Any]:
        """Put an object, and return its new ``e_tag`` or ``version``."""
        ...

    def upload(self, path: str, part_bytes: int) -> Upload:
        """Begin an object of several parts, all but the last of this size."""
        ...

    def described(self, info: Mapping[str, Any]) -> ObjectDescription:
        """What a list says of an object."""
        ...

    def error_of(self, error: Exception) -> BaseError | None:
        """What an error of this library means; None if nothing is known of it."""
        ...


_LIBRARIES: Final = {
    "s3fs.core.S3FileSystem": ("s3_library", "S3Library"),
    "gcsfs.core.GCSFileSystem": ("gcs_library", "GcsLibrary"),
    "adlfs.spec.AzureBlobFileSystem": ("azure_library", "AzureLibrary"),
    "fsspec.implementations.memory.MemoryFileSystem": ("memory_library", "MemoryLibrary"),
}
"""Class of a filesystem -> the module here that knows it, and its class."""

_FIX: Final = {
    "fsspec.implementations.local.LocalFileSystem": "name the directory itself",
    "fsspec.implementations.dirfs.DirFileSystem": "pass the filesystem inside, and the whole path",
    "fsspec.implementations.cached.CachingFileSystem": "pass the filesystem inside: a cache may show what has been replaced",
}


def library_of(filesystem: Any) -> Library:
    """What is known of the library of a filesystem.

    Raises:
        InvalidArgument: if it cannot put under a condition, or nothing is known of that: most write after they have looked, and two writers then overwrite each other.
    """
    kind = type(filesystem)
    check_class(kind)
    if getattr(filesystem, "asynchronous", False):
        raise InvalidArgument("filesystem", expected="a filesystem that threads can call", found=f"{kind.__name__} with asynchronous=True",
                              fix="make it without that argument")  # fmt: skip
    module, name = next(_LIBRARIES[each] for each in _names(kind) if each in _LIBRARIES)
    library: Library = getattr(import_module(f"{__package__}.{module}"), name)(
        filesystem
    )  # late: each needs its own package
    return library


def check_class(kind: type, *, argument: str = "filesystem", given: str = "") -> None:
    """Check that filesystems of a class can put under a condition.

    Args:
        kind: the class.
        argument: what is refused, and...
        given: ...what it was, if that is not the filesystem itself.

    Raises:
        InvalidArgument: see `library_of`.
    """
    names = list(_names(kind))
    if any(name in _LIBRARIES for name in names):
        return
    fix = next(
        (_FIX[name] for name in names if name in _FIX),
        "use one of these, name a mounted directory, or pass a store of your own",
    )
    raise InvalidArgument(argument, expected="a filesystem whose puts carry a condition: of s3fs, gcsfs or adlfs, or in memory",
                          found=f"{given}{kind.__module__}.{kind.__qualname__}, of which none is known: it may look first and write then", fix=fix)  # fmt: skip


def _names(kind: type) -> Iterator[str]:
    return (f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__)


@contextmanager
def as_obstore(library: Library) -> Iterator[None]:
    """Raise what a filesystem raises as an error of this room, or as the FileNotFoundError or PermissionError that it is."""
    try:
        yield
    except (BaseError, FileNotFoundError, PermissionError):
        raise
    except FileExistsError as error:
        raise AlreadyExistsError(str(error)) from error
    except Exception as error:  # a filesystem raises what its library raises
        raise (library.error_of(error) or GenericError(f"{type(error).__name__}: {error}")) from error
