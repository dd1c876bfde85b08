"""`Bucket`: the few requests that a run in an object store needs, with errors that have names. The only module that calls obstore, or what stands for it."""

import time
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, final

import attrs

from trainfold.backends.stores.object_store.errors.bucket_errors import (
    BucketErrors,
    NoCredentials,
    NotThere,
    Refused,
    raise_alone,
)
from trainfold.backends.stores.object_store.errors.shown_errors import is_panic
from trainfold.backends.stores.object_store.fed import fed
from trainfold.backends.stores.object_store.over_fsspec.calls import FsspecCalls, FsspecPrefix
from trainfold.backends.stores.os_errors import missing
from trainfold.backends.stores.stand_in import check_only_read
from trainfold.core.errors import (
    CheckpointError,
    SaveFailed,
)

T = TypeVar("T")
Version: TypeAlias = dict[str, str]
"""What identifies the contents of an object to its store: an entity tag, a generation, or both."""

_TOKEN: Final = "trainfoldtoken"  # noqa: S105  # letters alone: Azure takes nothing else in the name of metadata
_TRIES: Final = 5
_AGAIN_SECS: Final = 10.0
_PAGE: Final = 1000
_CHUNK_BYTES: Final = 1 << 20


@final
@attrs.frozen
class Found:
    """An object as a list shows it.

    Attributes:
        size_bytes: its size.
        modified: when it was put, in whole seconds since 1970 by the store's clock.
        tag: what its version has alone; "" if the store does not say.
    """

    size_bytes: int
    modified: float
    tag: str


@final
@attrs.frozen
class Stored:
    """An object as it was read.

    Attributes:
        data: its bytes, or a range of them.
        version: what a conditional put compares.
        token: the mark of the put that made it; None if another program did.
        modified: when, in seconds since 1970 by the store's clock.
    """

    data: bytes
    version: Version
    token: str | None
    modified: float

    @property
    def tag(self) -> str:
        """That of the version, as `Found` has it."""
        return tag_of(self.version)


@final
class Bucket:
    """A prefix of an object store.

    Args:
        store: a store of obstore, whose prefix is that of the run; or an `FsspecPrefix`.
        url: the location in messages.
    """

    def __init__(self, store: Any, url: str) -> None:
        self._api = calls_of(store)
        self._errors = self._api.exceptions
        self._named = BucketErrors(self._errors, url)
        self._store = store
        self.url = url

    # --- reading ---------------------------------------------------------------------------------------------------

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> Stored | None:
        """An object with its version, or the bytes ``[start, stop)`` of it, fewer if it ends before; None if there is no such object."""
        options: Any = (
            None if (start, stop) == (0, None) else {"range": {"offset": start} if stop is None else (start, stop)}
        )

        def got() -> Stored | None:
            try:
                found = self._api.get(self._store, key, options=options)
                data = bytes(found.bytes())
            except FileNotFoundError:
                return None
            except self._errors.GenericError:  # a range that begins behind the end is an error to some stores
                if options is None or ((size := self._head(key)) is not None and start < size["size"]):
                    raise
                return None if size is None else Stored(b"", _version(size), None, size["last_modified"].timestamp())
            modified = found.meta["last_modified"].timestamp()
            return Stored(data, _version(found.meta), found.attributes.get(_TOKEN), modified)

        if stop is not None and stop <= start:
            found = self.head(key)
            return None if found is None else Stored(b"", {}, None, found.modified)
        with self._named.reading(key):
            return self._again(got)

    def head(self, key: str) -> Found | None:
        """The size, time and tag of an object; None if there is no such object."""
        with self._named.reading(key):
            found = self._again(lambda: self._head(key))
        return None if found is None else _found(found)

    def _head(self, key: str) -> Any:
        try:
            return self._api.head(self._store, key)
        except FileNotFoundError:
            return None

    def chunks(self, key: str, start: int, stop: int) -> Generator[memoryview]:
        """The bytes ``[start, stop)`` of an object as they come, fewer if it ends before; a stream that breaks goes on where it broke.

        Raises:
            CheckpointMissing: if there is no such object.
        """
        tries = 0
        while start < stop:
            try:
                found = self._api.get(self._store, key, options={"range": (start, stop)})
                for chunk in found.stream(min_chunk_size=_CHUNK_BYTES):
                    start, tries = start + len(chunk), 0
                    yield memoryview(chunk)
            except FileNotFoundError:
                raise_alone(missing(self.where(key)))
            except BaseException as error:
                if not (isinstance(error, self._errors.BaseError) or is_panic(error)):
                    raise
                size = self.head(key)  # a range that begins behind the end is an error to some stores
                if size is None:
                    raise_alone(missing(self.where(key)))
                if start >= size.size_bytes:
                    return
                tries += 1
                if tries >= _TRIES:
                    raise_alone(self._named.unreadable(key, error))
            else:
                return

    def fill(self, key: str, memory: memoryview, start: int) -> int:
        """Read from ``start`` on until the memory is full or the object ends.

        Returns:
            How many bytes were read.

        Raises:
            CheckpointMissing: if there is no such object.
        """
        done = 0
        for chunk in self.chunks(key, start, start + len(memory)):
            part = chunk[: len(memory) - done]
            memory[done : done + len(part)] = part
            done += len(part)
        return done

    def names(self, directory: str = "") -> tuple[list[str], list[str]]:
        """The names of objects, and of directories, one level below a directory of the run or at its top."""
        with self._named.reading(directory):
            found = self._again(lambda: self._api.list_with_delimiter(self._store, directory or None))
        above = len(directory) + 1 if directory else 0
        objects = [each["path"][above:] for each in found["objects"]]
        return objects, [path.rstrip("/")[above:] for path in found["common_prefixes"]]

    def below(self, directory: str, *, most: int | None = None) -> dict[str, Found] | None:
        """All objects below a directory, at any depth, by their keys; None if there are more than ``most``."""

        def listed() -> dict[str, Found] | None:
            found: dict[str, Found] = {}
            for page in self._api.list(self._store, directory or None, chunk_size=_PAGE):
                found.update((each["path"], _found(each)) for each in page)
                if most is not None and len(found) > most:
                    return None
            return found

        with self._named.reading(directory):
            return self._again(listed)

    # --- writing ---------------------------------------------------------------------------------------------------

    def put(self, key: str, data: bytes) -> str:
        """Put an object, whatever is there; returns its tag."""
        check_only_read(self.url)
        with self._named.writing(key):
            given = self._again(lambda: self._api.put(self._store, key, data, use_multipart=False))
        return tag_of(_version(given))

    def put_parts(self, key: str, parts: Iterable[bytearray], *, chunk_bytes: int, at_once: int) -> str:
        """Put an object in parts, which are sent while later ones are made, and return its tag; nothing is left if ``parts`` raises."""
        check_only_read(self.url)

        def send(given: Iterable[bytearray]) -> Any:
            return self._api.put(
                self._store, key, given, use_multipart=True, chunk_size=chunk_bytes, max_concurrency=at_once
            )

        with self._named.writing(key):
            return tag_of(_version(fed(send, parts)))

    def put_if(self, key: str, data: bytes, expected: Version | None) -> Version | None:
        """Put an object if its contents are those of a version, or if there is none.

        A client sends a put again whose answer was lost, and the second one is refused if the first one was carried out. So each put has a mark of its own.

        Returns:
            The new version; None if the object has another version.
        """
        check_only_read(self.url)
        token, late = uuid.uuid4().hex, time.monotonic() + _AGAIN_SECS
        mode: Any = "create" if expected is None else expected
        for tries in range(1, _TRIES + 1):
            try:
                with self._named.writing(key):
                    given = self._api.put(
                        self._store, key, data, mode=mode, attributes={_TOKEN: token}, use_multipart=False
                    )
                return _version(given)
            except (Refused, NotThere) as error:
                found = self.get(key)
                if found is None and expected is None and isinstance(error, NotThere):
                    raise
                return found.version if found is not None and found.token == token else None
            except NoCredentials:
                raise
            except SaveFailed:  # carried out or not
                found = self._get_quietly(key)
                if found is not None and found.token == token:
                    return found.version
                if tries == _TRIES or time.monotonic() > late:
                    raise
        raise AssertionError

    def takes(self, key: str, data: bytes, expected: Version | None) -> bool:
        """Whether the store carries out a put that it must refuse, because there is another version."""
        try:
            with self._named.writing(key):
                mode: Any = "create" if expected is None else expected
                self._again(lambda: self._api.put(self._store, key, data, mode=mode, use_multipart=False))
        except (Refused, NotThere):
            return False
        return True

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there are fine."""
        if not keys:
            return
        check_only_read(self.url)
        with self._named.writing(keys[0]):
            try:
                self._again(lambda: self._api.delete(self._store, list(keys)))
            except FileNotFoundError:  # of one of them; the others may be there
                for key in keys:
                    with suppress(FileNotFoundError):
                        self._again(partial(self._api.delete, self._store, key))

    def delete_own(self, key: str) -> None:
        """Delete an object that was put for a look at the store; one that may not be deleted stays, and is never worth a failed save."""
        with suppress(SaveFailed):
            self.delete([key])

    # --- errors ----------------------------------------------------------------------------------------------------

    def where(self, key: str) -> str:
        """An object in messages."""
        return self._named.where(key)

    def _again(self, call: Callable[[], T]) -> T:
        """Call what may be called twice; again if it fails soon: the client itself tries again, but not when an answer breaks off in the middle."""
        late = time.monotonic() + _AGAIN_SECS
        for _ in range(_TRIES):
            try:
                return call()
            except BaseException as error:
                is_brief = isinstance(error, self._errors.GenericError) or is_panic(error)
                if not is_brief or time.monotonic() > late or self._named.is_final(error):
                    raise
        return call()

    def _get_quietly(self, key: str) -> Stored | None:
        try:
            return self.get(key)
        except CheckpointError:
            return None


def calls_of(store: Any) -> Any:
    """The module of obstore, or what has the calls of it that are made here."""
    if isinstance(store, FsspecPrefix):
        return FsspecCalls()
    import obstore  # late: an extra, and only runs in object stores need it

    return obstore


def tag_of(version: Version) -> str:
    """What a version has alone, as lists show it: they write entity tags with and without quotation marks.

    Examples:
        >>> tag_of({"e_tag": 'W/"0x1"'}), tag_of({"e_tag": "0x1"}), tag_of({})
        ('0x1', '0x1', '')
    """
    return version.get("e_tag", "").removeprefix("W/").strip('"') or version.get("version", "")


def _found(listed: Any) -> Found:
    return Found(listed["size"], float(int(listed["last_modified"].timestamp())), tag_of(_version(listed)))


def _version(found: Any) -> Version:
    return {key: found[key] for key in ("e_tag", "version") if found[key] is not None}
