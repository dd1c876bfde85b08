"""`Writes`: files whose bytes are written one after the other, and which become durable together.

A disk takes about as long to sync one file as several: what is synced first takes the others along. And it does not write while it syncs.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import cast, final

from trainfold.backends.stores.protocol import Buffer, Store, SyncsLater


@final
class Writes:
    """The files of a block, which are durable after `finish`. Without it, the block leaves none.

    Law: after `finish` the store holds what calls of its ``write`` would have left. A store without `SyncsLater` gets these calls.

    Args:
        store: where to.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> store = MemoryStore()
        >>> with Writes(store) as writes:
        ...     writes.write("step-1/a", [b"12"], size_bytes=2)
        ...     writes.finish()
        >>> store.read("step-1/a")
        b'12'
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        # of the class: an object that forwards to a store what it does not have itself may have a `write` of its own, which must be called
        self._syncs_later = hasattr(type(store), "written_unsynced")
        self._opened = ExitStack()
        self._finish: list[Callable[[], None]] = []

    @property
    def url(self) -> str:
        """That of the store."""
        return self._store.url

    def __enter__(self) -> "Writes":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Drop the files that are not finished."""
        self._opened.close()

    def write(self, name: str, parts: Iterable[Buffer], *, size_bytes: int) -> None:
        """Write the bytes of a file, as `Store.write` does.

        Raises:
            SaveFailed: as from `Store.write`.
        """
        if self._syncs_later:
            file = cast("SyncsLater", self._store).written_unsynced(name, parts, size_bytes=size_bytes)
            self._finish.append(self._opened.enter_context(file))
        else:
            self._store.write(name, parts, size_bytes=size_bytes)

    def finish(self) -> None:
        """Make all files durable under their names.

        Raises:
            SaveFailed: as from `Store.write`, for the first file that fails.
        """
        for finish in self._finish:
            finish()
