"""`fsspec_store`: the store of a run under a path of a filesystem of fsspec, for the settings and the schemes that obstore does not have."""

import importlib.util
from typing import Any

from trainfold.backends.stores.object_store.errors.bucket_errors import raise_alone
from trainfold.backends.stores.object_store.errors.shown_errors import without_secrets
from trainfold.backends.stores.object_store.object_store import ObjectStore
from trainfold.backends.stores.object_store.over_fsspec.calls import FsspecPrefix
from trainfold.backends.stores.object_store.over_fsspec.library import check_class
from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown


def fsspec_store(filesystem: Any, path: str) -> ObjectStore:
    """Open the store of a run in a bucket that a filesystem of `fsspec <https://filesystem-spec.readthedocs.io>`_ reaches. Nothing is asked of it yet.

    Only filesystems that send the condition of a commit with the put are taken: those of s3fs, gcsfs and adlfs, and the one in the memory of this process. Its credentials, time limits and tries are used as
    they are.

    Args:
        filesystem: such a filesystem, made by you; not asynchronous.
        path: of the run in it, such as ``bucket/runs/a``.

    Returns:
        The store, which stands wherever a run is named.

    Raises:
        InvalidArgument: for any other filesystem, with its class; and if the path does not name a run in a bucket.

    Examples:
        >>> import fsspec
        >>> store = fsspec_store(fsspec.filesystem("memory"), "bucket/runs/a")
        >>> store.commit("step-1/manifest.json", b"{}")
        >>> store, store.list()
        (ObjectStore('memory://bucket/runs/a'), ['step-1'])
    """
    if not callable(getattr(filesystem, "pipe_file", None)) or not isinstance(path, str):
        raise InvalidArgument("fsspec_store", expected="a filesystem of fsspec, and a path in it", found=f"{shown(filesystem)}, {shown(path)}",
                              fix='pass one, as in fsspec_store(s3fs.S3FileSystem(profile="lab"), "bucket/runs/a")')  # fmt: skip
    prefix = FsspecPrefix(filesystem, path)
    bucket, _, run = prefix.path.strip("/").partition("/")
    if not bucket or not run.strip("/") or any(part in {"", ".", ".."} for part in run.split("/")):
        raise InvalidArgument("fsspec_store", expected="the path of a run in a bucket, such as bucket/runs/a", found=repr(path),
                              fix="name the run: the top of a bucket cannot be one")  # fmt: skip
    scheme = filesystem.protocol if isinstance(filesystem.protocol, str) else filesystem.protocol[0]
    return ObjectStore(prefix, url=f"{scheme}://{bucket}/{run}")


def open_foreign_url(scheme: str, path: str) -> ObjectStore:
    """The store of a run whose URL has a scheme that only fsspec knows, with what its filesystem finds in the environment.

    Raises:
        InvalidArgument: if fsspec does not know it either, or its filesystem is not one for `fsspec_store`.
    """
    url = f"{scheme}://{path}"
    if importlib.util.find_spec("fsspec") is None:
        raise InvalidArgument("run", expected="fsspec, which this URL needs", found="it is not installed", fix="pip install 'trainfold[fsspec]'")  # fmt: skip
    import fsspec  # late: few runs need it

    try:
        kind = fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise InvalidArgument("run", expected="a path, file://, the URL of a bucket (s3://, gs://, az://), or one that a filesystem of fsspec has",
                              found=f"{url!r}: {error}", fix="install what has it, name a mounted directory, or pass a store of your own") from None  # fmt: skip
    check_class(kind, argument="run", given=f"{url!r}: ")
    try:
        return fsspec_store(kind(), path)
    except InvalidArgument:
        raise
    except Exception as error:  # noqa: BLE001  # whatever its library says of settings
        raise_alone(InvalidArgument("run", expected="a filesystem that the settings describe", found=without_secrets(error),
                                    fix=f"make the filesystem, whose own words are not shown here, and pass fsspec_store(filesystem, {path!r})"))  # fmt: skip
