"""`WriterLease`: the lock of a run in an object store. An object that its holder renews; who takes it over raises a count, so that a late holder is refused.

No clock that can be set decides: ages are differences of the store's own times, and a holder measures the time since its boot.
"""

import json
import os
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, final

import attrs

from trainfold.backends.lock_holder import is_dead, myself, pid_of, start_of, this_machine, was_there, writer_in_words
from trainfold.backends.stores.object_store.bucket import Bucket, Stored, Version
from trainfold.backends.stores.object_store.errors.bucket_errors import raise_alone
from trainfold.core.errors import CheckpointError, CheckpointHostile, RunLocked, RunReplaced

LEASE: Final = ".lease"
_CLOCK: Final = ".clock-"
_LOOK_SECS: Final = 0.5
_TIME_STEP_SECS: Final = 2.0  # of the times of most stores
_LIMIT_BYTES: Final = 16 << 10
_RECENT: Final = 8
_CLOCKS_SECS: Final = 60.0  # by which those of a machine and a store may differ
_HELD: Final[set[str]] = set()  # the tokens of the leases that this process holds, or is about to take


@final
@attrs.frozen
class LeaseRecord:
    """What the object says.

    Attributes:
        holder: the process, for messages; "" if the lease is free.
        token: a random name of the holding; a new one at each taking.
        taken: how often the lease was taken, this time included.
        lasts_secs: how long it is valid after its last renewal.
        broken: how many of the holders before this one have not given it back; those may still be writing.
        recent: what was committed last, as (name, tag of its version), with the name that is being committed, whose tag is "". A reader whose list
            lags asks for these by name.
        started: when the process started, as `start_of` says; "" if that is not known.
    """

    holder: str
    token: str
    taken: int
    lasts_secs: float
    broken: int
    recent: tuple[tuple[str, str], ...] = ()
    started: str = ""

    @property
    def pid(self) -> int:
        """The number of the process; 0 if the holder has none."""
        return pid_of(self.holder)

    def committing(self, name: str, tag: str = "") -> "LeaseRecord":
        """The record with a name that is committed, or is about to be.

        Examples:
            >>> LeaseRecord("a", "t", 1, 30.0, 0, (("x", "1"), ("y", "2"))).committing("x").recent
            (('y', '2'), ('x', ''))
        """
        others = tuple(each for each in self.recent if each[0] != name)
        return attrs.evolve(self, recent=(*others, (name, tag))[-_RECENT:])

    def encoded(self, beat: int) -> bytes:
        """The bytes of the object; each renewal has others, so that its version changes."""
        return json.dumps({**attrs.asdict(self), "beat": beat}).encode()

    @staticmethod
    def decoded(data: bytes, where: str) -> "LeaseRecord":
        """The record in an object.

        Raises:
            CheckpointHostile: if it is not one.
        """
        try:
            found = json.loads(data[:_LIMIT_BYTES])
            return LeaseRecord(
                str(found["holder"]),
                str(found["token"]),
                int(found["taken"]),
                float(found["lasts_secs"]),
                int(found["broken"]),
                tuple((str(name), str(tag)) for name, tag in found.get("recent", ())),
                str(found.get("started", "")),
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            raise_alone(CheckpointHostile(where, expected="a lease of trainfold", found=f"{len(data)} bytes of something else",
                                          fix="find out what put it there, and remove it"))  # fmt: skip


@final
class WriterLease:
    """The right of one process to write into a run. Made once for each store object; `acquire` and `release` may follow each other.

    Args:
        bucket: the run.
        lasts_secs: how long the lease is valid after each renewal; it is renewed three times as often.
    """

    def __init__(self, bucket: Bucket, lasts_secs: float) -> None:
        self._bucket = bucket
        self._lasts_secs = lasts_secs
        self._mutex = threading.RLock()
        self._record: LeaseRecord | None = None
        self._version: Version = {}
        self._pid = 0
        self._beat = 0
        self._until = 0.0  # of the monotonic clock; the store counts from a later moment
        self._loss: str = ""
        self._stop = threading.Event()

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lease, or has lost it without a `release`."""
        return self._record is not None

    @property
    def broken(self) -> int:
        """How many holders of the lease that this object holds have not given it back; 0 if it holds none."""
        record = self._record
        return 0 if record is None else record.broken

    def acquire(self) -> bool:
        """Take the lease.

        Returns:
            Whether the holder before has not given it back.

        Raises:
            RunLocked: if a living process holds it. One that cannot be seen, such as that of another machine, is watched until its next renewal
                shows that it lives.
        """
        where = self._bucket.where("")
        first: Stored | None = None
        while True:
            found, record = self._there()
            if (
                found is not None
                and record is not None
                and record.holder
                and not (over := self._is_over(record, found))
            ):
                if over is False or (first is not None and first.version != found.version):
                    raise _locked(where, record)
                first = found
                time.sleep(min(_LOOK_SECS, self._lasts_secs / 10))
                continue
            if self._take(found, record):
                return record is not None and record.holder != ""
            first = None

    def _there(self) -> tuple[Stored | None, LeaseRecord | None]:
        """The object as it is now, and what it says."""
        found = self._bucket.get(LEASE)
        return found, None if found is None else LeaseRecord.decoded(found.data, self._bucket.where(LEASE))

    def _is_over(self, record: LeaseRecord, found: Stored) -> bool | None:
        """Whether the holder is gone; None if only its next renewal can show it."""
        over = _is_gone(record)
        if over is None and self._now() - found.modified > record.lasts_secs + _TIME_STEP_SECS:
            return True
        return over

    def _now(self) -> float:
        """The time of the store: that of an object put now."""
        key = f"{_CLOCK}{uuid.uuid4().hex}"
        self._bucket.put(key, b"")
        try:
            head = self._bucket.head(key)
        finally:
            self._bucket.delete_own(key)
        return 0.0 if head is None else head.modified

    def _take(self, found: Stored | None, old: LeaseRecord | None) -> bool:
        taken, broken = (old.taken, old.broken + bool(old.holder)) if old is not None else (0, 0)
        record = LeaseRecord(f"{myself()} ({this_machine()})", uuid.uuid4().hex, taken + 1, self._lasts_secs, broken,
                             () if old is None else old.recent, start_of(os.getpid()))  # fmt: skip
        began = _now_here()
        _HELD.add(record.token)
        version = None
        try:
            version = self._bucket.put_if(LEASE, record.encoded(0), None if found is None else found.version)
        finally:
            if version is None:
                _HELD.discard(record.token)
        if version is None:
            return False
        with self._mutex:
            self._record, self._version, self._pid, self._loss = record, version, os.getpid(), ""
            self._until = began + self._lasts_secs
            self._stop = threading.Event()
        threading.Thread(
            target=self._renew_until, args=(self._stop, record.token), name="trainfold-lease", daemon=True
        ).start()
        return True

    def check(self) -> None:
        """Check that the lease is still held; asks the store only if the last renewal is too long ago. Does nothing if it was never taken.

        Raises:
            RunLocked: if it is lost, or belongs to the process that this one was forked from.
            RunReplaced: if the run is gone.
        """
        if self._record is not None and (self._loss or self._pid != os.getpid() or _now_here() > self._until):
            self.confirm()

    @property
    def recent(self) -> tuple[tuple[str, str], ...]:
        """What was committed last, by this holder and those before it; what the store says if this object does not hold the lease."""
        record = self._record or self._there()[1]
        return () if record is None else record.recent

    def writers(self, changed_at: Mapping[str, float]) -> dict[str, str]:
        """The directories into which the holder may be writing now, each with that process in words. It is not watched, and nothing is put; so a clock that is wrong makes the words wrong.

        Args:
            changed_at: directory -> when an object was put there last; 0 if that is not known.
        """
        try:
            found, record = self._there()
        except CheckpointError:  # it may not be read, or is something else
            return {}
        if found is None or record is None or not record.holder:
            return {}
        is_gone, is_fresh = _is_gone(record), time.time() - found.modified < 2 * record.lasts_secs + _CLOCKS_SECS
        words = writer_in_words(_process(record.holder), is_gone=is_gone, is_fresh=is_fresh)
        if words is None:
            return {}
        return {
            name: words for name, at in changed_at.items() if is_gone is None or not at or was_there(record.pid, at)
        }

    def committed(self, name: str, tag: str) -> None:
        """Note that a name was committed; the next renewal says it."""
        with self._mutex:
            if self._record is not None:
                self._record = self._record.committing(name, tag)

    def forget(self, start: str) -> None:
        """Note that names that begin like this are deleted; the next renewal says it."""
        with self._mutex:
            if self._record is not None:
                recent = tuple(each for each in self._record.recent if not each[0].startswith(start))
                self._record = attrs.evolve(self._record, recent=recent)

    def confirm(self, committing: str = "") -> None:
        """Renew the lease now, which shows that no other process has it. Does nothing if it was never taken.

        Args:
            committing: the name that is committed then.

        Raises:
            RunLocked, RunReplaced: as `check` does.
            SaveFailed: if the store cannot be reached.
        """
        with self._mutex:
            record = self._record
            if record is None:
                return
            where = self._bucket.where("")
            if self._pid != os.getpid():
                raise RunLocked(where, expected=f"process {self._pid}, which took the lease", found=f"process {os.getpid()}, which was forked from it",
                                fix="save in that process, or make a manager in this one after the other is closed")  # fmt: skip
            if not self._loss:
                if committing:
                    record = self._record = record.committing(committing)
                self._renew(record)
            if self._loss == "gone":
                raise RunReplaced(where, expected="the lease that this process has taken", found="none: the run was removed",
                                  fix="make another manager and restore, to go on at this place")  # fmt: skip
            if self._loss:
                raise RunLocked(where, expected="the lease that this process has taken", found=f"that of {self._loss}",
                                fix="stop one of the two programs; what this one has committed stays")  # fmt: skip

    def release(self) -> None:
        """Give the lease back; never raises for what the store does. Nothing is deleted: the next holder replaces what is there."""
        with self._mutex:
            record, self._record = self._record, None
            self._stop.set()
            if record is None:
                return
            try:
                if self._pid == os.getpid() and not self._loss:
                    with suppress(Exception):  # what was to be written is durable; a lease that is not given back ends
                        self._renew(attrs.evolve(record, holder=""))
            finally:
                _HELD.discard(record.token)

    def _renew_until(self, stop: threading.Event, token: str) -> None:
        while not stop.wait(self._lasts_secs / 3):
            with self._mutex:
                if self._record is None or self._record.token != token or self._loss:
                    return
                with suppress(Exception):  # the next check says it; without this thread, another process takes the run
                    self._renew(self._record)

    def _renew(self, record: LeaseRecord) -> None:
        for _ in range(2):
            began = _now_here()
            self._beat += 1
            version = self._bucket.put_if(LEASE, record.encoded(self._beat), self._version)
            if version is not None:
                self._version, self._until = version, began + self._lasts_secs
                return
            found, other = self._there()
            if found is None or other is None:
                self._loss = "gone"
                return
            if other.token != record.token:
                self._loss = other.holder or "a process that has ended"
                return
            self._version = found.version  # of a renewal whose answer was lost


def _now_here() -> float:
    """Seconds by a clock that nothing sets, and that goes on while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _locked(where: str, record: LeaseRecord) -> RunLocked:
    fix = f"wait for it or stop it (the lease ends {record.lasts_secs:g} s after the process), or save into another run"
    holder = _process(record.holder)
    if record.token in _HELD:
        holder, fix = f"{holder}, which is this one", "close the manager that holds it, or leave its with block"
    return RunLocked(where, expected="no other writer", found=holder, fix=fix)


def _process(holder: str) -> str:
    return holder.partition(" (")[0]


def _is_gone(record: LeaseRecord) -> bool | None:
    """Whether the holder lives no more; None if this process cannot see it: numbers of processes are those of one boot and namespace, and are used again."""
    if not (record.started and record.pid and record.holder.endswith(f" ({this_machine()})")):
        return None
    if record.pid == os.getpid() and record.started == start_of(record.pid):
        return record.token not in _HELD  # it could not be given back, or its taker had no answer
    return is_dead(record.pid, record.started)
