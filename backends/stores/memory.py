"""`MemoryStore`: a store in memory that logs its effects, fails on demand, and shows the disk after any crash."""

import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, final

from trainfold.backends.stores.faults import CrashAt, Disk, Effect, ErrorAt, Fault, SimulatedCrash, read_only
from trainfold.backends.stores.names import prefix_directory, split_name
from trainfold.backends.stores.os_errors import missing, no_space, save_failure, torn, wrong_size
from trainfold.backends.stores.protocol import Buffer
from trainfold.core.digest import digest_of
from trainfold.core.errors import CommitConflict, RunLocked, SaveFailed
from trainfold.core.format.file_names import MANIFEST

__all__ = ["CrashAt", "Effect", "ErrorAt", "Fault", "MemoryStore", "SimulatedCrash", "read_only"]

_ADDRESSABLE_BYTES: Final = 1 << 57  # the largest address space that there is: five levels of page tables


@final
class MemoryStore:
    """A `Store` in a dict. Each effect is logged before it happens and can be made to fail.

    It models a disk that keeps what was synced and may lose the rest. A crash (`after_crash`) rolls back the
    directory entries made since the last sync of their directory, or keeps them, or shows the file that was being
    written cut off in the middle. Recovery must cope with each.

    Args:
        fault: decides which effect fails, such as `CrashAt`, `ErrorAt`, `read_only`, or any pure function.
        capacity_bytes: how much fits; None for what a process can address.
        clock: the time, for `committed_at`; None if the time of a commit is not known.

    Examples:
        >>> store = MemoryStore()
        >>> store.write("step-1/a", [b"12", b"3"], size_bytes=3)
        >>> store.commit("step-1/manifest.json", b"{}")
        >>> store.list("step-1"), store.read("step-1/a", start=1)
        (['a', 'manifest.json'], b'23')
        >>> [str(effect) for effect in store.effects][-3:]
        ['sync .', 'commit step-1/manifest.json 2 bytes', 'sync step-1']
        >>> store.after_crash(4).list("step-1"), store.after_crash(4, keep_unsynced=True).list("step-1")
        ([], ['a'])
    """

    def __init__(
        self, *, fault: Fault | None = None, capacity_bytes: int | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        self._fault = fault
        self._clock = clock
        self._committed: dict[str, float] = {}
        self._capacity_bytes = capacity_bytes
        self._mutex = threading.RLock()
        self._disk = Disk()
        self._effects: list[Effect] = []
        self._locked = False
        self._next_writer = 0
        self._attempts = 0
        self._crash: BaseException | None = None

    def __repr__(self) -> str:
        with self._mutex:
            sizes = [len(data) for data in self._disk.files.values()]
        return f"MemoryStore({len(sizes)} files, {sum(sizes)} bytes)"

    @property
    def url(self) -> str:
        """Always ``memory:``."""
        return "memory:"

    @property
    def effects(self) -> tuple[Effect, ...]:
        """All effects on the disk so far."""
        with self._mutex:
            return tuple(self._effects)

    # --- the verbs -----------------------------------------------------------------------------------------------

    def write(self, name: str, parts: Iterable[Buffer], *, size_bytes: int) -> None:
        """See `Store.write`."""
        split_name(name)
        with self._mutex:
            writer = self._next_writer
            self._next_writer += 1
        self._do(Effect("begin", name, writer=writer))
        try:
            self._write_parts(name, parts, size_bytes, writer)
        except BaseException:
            self._abandon(name, writer)
            raise

    def read(self, name: str, *, start: int = 0, stop: int | None = None) -> bytes:
        """See `Store.read`."""
        data = self._data(name)
        return data[min(start, len(data)) : len(data) if stop is None else max(start, stop)]

    def read_into(self, name: str, buffer: memoryview, *, start: int = 0) -> None:
        """See `Store.read_into`."""
        data, wanted = self._data(name), buffer.cast("B")
        if start + len(wanted) > len(data):
            raise torn(self._where(name), expected_bytes=start + len(wanted), found_bytes=len(data))
        wanted[:] = memoryview(data)[start : start + len(wanted)]

    def size(self, name: str) -> int | None:
        """See `Store.size`."""
        split_name(name)
        with self._mutex:
            self._check_alive()
            data = self._disk.files.get(name)
        return None if data is None else len(data)

    def committed_at(self, name: str) -> float | None:
        """See `Store.committed_at`: by the clock. After a crash no time is known."""
        return None if self.size(name) is None else self._committed.get(name)

    def list(self, prefix: str = "") -> list[str]:
        """See `Store.list`."""
        directory = prefix_directory(prefix)
        with self._mutex:
            self._check_alive()
            return self._disk.names_below(directory)

    def commit(self, name: str, data: bytes, *, replaces: str | None = None) -> None:
        """See `Store.commit`."""
        self._commit(name, data, replaces=replaces, is_as_old=replaces == digest_of(data))

    def commit_as_old(self, name: str, data: bytes, *, replaces: str) -> None:
        """See `KeepsTime`."""
        self._commit(name, data, replaces=replaces, is_as_old=True)

    def _commit(self, name: str, data: bytes, *, replaces: str | None, is_as_old: bool) -> None:
        directory, _ = split_name(name)
        with self._mutex:
            self._check_commit(name, replaces)
            for synced in dict.fromkeys((directory, "")):
                self._do(Effect("sync", synced))
            self._do(Effect("commit", name, bytes(data)))
            if self._clock is not None and not is_as_old:
                self._committed[name] = self._clock()
            self._do(Effect("sync", directory))

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        with self._mutex:
            self._check_alive()
            if not name.endswith("/"):
                split_name(name)
                names = [name] if name in self._disk.files or name in self._disk.hints else []
            else:
                directory = prefix_directory(name)
                found = self._disk.names_below(directory)
                names = [f"{directory}/{below}" for below in sorted(found, key=lambda below: below != MANIFEST)]
            for victim in names:
                self._do(Effect("delete", victim))
                if victim.endswith("/" + MANIFEST) or victim == names[-1]:
                    self._do(Effect("sync", split_name(victim)[0]))

    def point(self, name: str, target: str) -> None:
        """See `Store.point`."""
        split_name(name)
        split_name(target)
        with suppress(SaveFailed):  # a hint is never worth a failed save
            self._do(Effect("point", name, target.encode()))

    def pointers(self) -> dict[str, str]:
        """See `Store.pointers`."""
        with self._mutex:
            return dict(sorted(self._disk.hints.items()))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """See `Store.lock`."""
        with self._mutex:
            self._check_alive()
            if self._locked:
                raise RunLocked(
                    self.url,
                    expected="no other writer",
                    found="a writer of this process",
                    fix="let one writer save into a run, or use another run",
                )
            self._locked = True
        try:
            yield
        finally:
            self._locked = False

    def reserve(self, size_bytes: int) -> None:
        """See `Store.reserve`."""
        self._do(Effect("reserve", ""))
        capacity = _ADDRESSABLE_BYTES if self._capacity_bytes is None else self._capacity_bytes
        with self._mutex:
            free = capacity - self._disk.used_bytes()
        if size_bytes > free:
            raise no_space(self.url, needed_bytes=size_bytes, free_bytes=free)

    # --- crashes -------------------------------------------------------------------------------------------------

    def point_target(self, name: str) -> str | None:
        """The target of a hint, for tests."""
        with self._mutex:
            return self._disk.hints.get(name)

    def after_crash(
        self, prefix_length: int, *, keep_unsynced: bool = False, torn_write: bool = False
    ) -> "MemoryStore":
        """The disk after a crash that came after the first ``prefix_length`` effects.

        Args:
            prefix_length: how many effects happened.
            keep_unsynced: whether directory entries made or removed since the last sync of their directory survive.
            torn_write: whether a file that was being written has its name and is cut off, as on a store that does
                not stage its writes.

        Returns:
            A new store with an empty log and no fault.
        """
        disk = Disk()
        with self._mutex:
            for effect in self._effects[:prefix_length]:
                disk.do(effect)
        disk.crash(keep_unsynced=keep_unsynced, torn_write=torn_write)
        survivor = MemoryStore(capacity_bytes=self._capacity_bytes)
        survivor._disk = disk
        return survivor

    def crash_states(self) -> "Iterator[tuple[str, MemoryStore]]":
        """Every disk that a crash during the logged effects can leave, each with a description: three for each prefix."""
        for length in range(len(self.effects) + 1):
            for kwargs in ({}, {"keep_unsynced": True}, {"torn_write": True, "keep_unsynced": True}):
                yield f"{length} effects, {', '.join(kwargs) or 'unsynced lost'}", self.after_crash(length, **kwargs)

    # --- inside --------------------------------------------------------------------------------------------------

    def _where(self, name: str) -> str:
        return f"{self.url}{name}"

    def _check_alive(self) -> None:
        if self._crash is not None:
            raise SimulatedCrash(*self._crash.args)

    def _do(self, effect: Effect) -> None:
        with self._mutex:
            self._check_alive()
            error = self._fault(self._attempts, effect) if self._fault is not None else None
            self._attempts += 1
            if error is None and effect.kind in {"part", "commit"} and self._is_full(len(effect.data)):
                error = OSError(errno.ENOSPC, "No space left on device")
            if isinstance(error, OSError):
                raise save_failure(error, self._where(effect.name)) from error
            if error is not None:
                self._crash = error if isinstance(error, SimulatedCrash) else None
                raise error
            self._effects.append(effect)
            self._disk.do(effect)

    def _is_full(self, more_bytes: int) -> bool:
        return self._capacity_bytes is not None and self._disk.used_bytes() + more_bytes > self._capacity_bytes

    def _write_parts(self, name: str, parts: Iterable[Buffer], size_bytes: int, writer: int) -> None:
        written = 0
        for part in parts:
            written += memoryview(part).nbytes
            if written > size_bytes:
                raise wrong_size(self._where(name), planned_bytes=size_bytes, given=f"{written} bytes or more")
            self._do(Effect("part", name, bytes(part), writer))
        if written < size_bytes:
            raise wrong_size(self._where(name), planned_bytes=size_bytes, given=f"{written} bytes")
        self._do(Effect("finish", name, writer=writer))

    def _abandon(self, name: str, writer: int) -> None:
        with self._mutex:
            if self._crash is None:
                effect = Effect("abandon", name, writer=writer)
                self._effects.append(effect)
                self._disk.do(effect)

    def _data(self, name: str) -> bytes:
        split_name(name)
        with self._mutex:
            self._check_alive()
            data = self._disk.files.get(name)
        if data is None:
            raise missing(self._where(name))
        return data

    def _check_commit(self, name: str, replaces: str | None) -> None:
        self._check_alive()
        present = self._disk.files.get(name)
        found = None if present is None else digest_of(present)
        if found != replaces:
            raise CommitConflict(
                self._where(name),
                expected="no such name" if replaces is None else replaces,
                found=found or "no such name",
                fix="another writer was first: read what it committed, and plan again",
            )
