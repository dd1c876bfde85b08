"""``quarantine.json`` of a run: which checkpoints did not load, recorded across the deaths of the loading processes.

Nothing here can stop a load. If the file cannot be read or written, a warning is logged and the load continues.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import final

import attrs

from trainfold.backends.stores.protocol import Store, glimpse
from trainfold.backends.user_warning import warn_user
from trainfold.core.digest import digest_of
from trainfold.core.errors import CheckpointError, CheckpointHostile, CheckpointMissing, CommitConflict, FutureVersion
from trainfold.core.format.file_names import MANIFEST
from trainfold.core.format.manifest import MANIFEST_LIMIT_BYTES
from trainfold.core.history.quarantine import (
    LIMIT,
    Attempts,
    LoadOutcome,
    after_attempt,
    after_outcome,
    check_limit,
    is_quarantined,
    only_present,
    quarantine_problems,
)
from trainfold.core.history.quarantine_json import (
    QUARANTINE_FILE,
    QUARANTINE_FIX,
    QUARANTINE_LIMIT_BYTES,
    quarantine_from_json,
    quarantine_to_json,
)
from trainfold.core.problem import Problem

_LOG = logging.getLogger("trainfold")
_TRIES = 5


class QuarantineIgnored(UserWarning):
    """The ``quarantine.json`` of a run cannot be read, so no checkpoint is passed over because of it."""


def quarantined(store: Store, *, limit: int = LIMIT) -> dict[str, Problem]:
    """The checkpoints of a run that must be passed over, and why; for `with_quarantined`.

    A checkpoint whose step was saved again has another manifest and is not among them. A file that cannot be read is ignored with a
    `QuarantineIgnored` warning, so that it never stops a run that is whole.

    Args:
        store: the run.
        limit: how many deaths while loading are enough; one proof of wrong bytes always is.

    Raises:
        InvalidArgument: for an invalid limit.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> from trainfold import Progress, TrainState, save
        >>> store = MemoryStore()
        >>> name = save(TrainState(trainer=Progress(step=3)), store).checkpoint
        >>> for _ in range(3):  # processes that died while loading
        ...     begin_attempt(store, name)
        >>> list(quarantined(store))
        ['step-00000003']
        >>> end_attempt(store, name)
        >>> quarantined(store)
        {}
    """
    check_limit(limit)
    found = _read(store)
    if found.error is not None:
        warn_user(f"{store.url}/{QUARANTINE_FILE} is not used: {found.error}", QuarantineIgnored)
    records = [record for record in found.attempts.records if is_quarantined(record, limit=limit)]
    now = {record.checkpoint: _manifest_digest(store, record.checkpoint) for record in records}
    return quarantine_problems(records, now, store.url)


def is_damaged(store: Store, name: str, digest: str) -> bool:
    """Whether the bytes of a checkpoint with this manifest are proved wrong: the deaths of loading processes prove nothing."""
    return _read(store).attempts.of(name, digest).is_damaged


def begin_attempt(store: Store, name: str) -> None:
    """Record, durably, that a load of a checkpoint starts. Only rank 0 calls this, under the run's lock.

    Args:
        store: the run.
        name: the checkpoint, ``step-00000120``.
    """
    seen = glimpse(store)
    digest = _manifest_digest(seen, name)
    if digest is not None:
        _change(store, seen, lambda attempts: after_attempt(attempts, name, digest))


def end_attempt(store: Store, name: str, outcome: LoadOutcome = LoadOutcome("loaded")) -> None:  # noqa: B008 (a frozen value)
    """Remove the record of an attempt, or record what failed.

    Args:
        store: the run.
        name: the checkpoint.
        outcome: how it ended: the `outcome_of` an error, or the `worst_outcome` of several ranks.
    """
    seen = glimpse(store)
    digest = _manifest_digest(seen, name)
    if digest is None:  # another process deleted it
        return
    if outcome.ending == "damaged":
        _LOG.warning("%s/%s is quarantined until it is saved again: %s", store.url, name, outcome.reason)
    _change(store, seen, lambda attempts: after_outcome(attempts, name, digest, outcome))


@final
@attrs.frozen
class _Found:
    """What the file of a run holds, its bytes, and the error if they cannot be read."""

    attempts: Attempts = attrs.field(factory=Attempts)
    data: bytes | None = None
    error: Exception | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this file may be replaced: not if a newer trainfold wrote it, or if it cannot be set aside."""
        return self.error is None or (self.data is not None and not isinstance(self.error, FutureVersion))


def _change(store: Store, seen: Store, change: Callable[[Attempts], Attempts]) -> None:
    """Read, change and write the record. A file that cannot be read is set aside under another name and never lost."""
    try:
        for _ in range(_TRIES):
            with suppress(CommitConflict):  # another process was faster, and its record counts too
                _changed(store, seen, _read(seen), change)
                return
            seen = glimpse(store)
        _LOG.warning(
            "%s/%s: other processes keep writing it, and an attempt is not recorded", store.url, QUARANTINE_FILE
        )
    except (CheckpointError, OSError) as error:
        _LOG.warning("%s: an attempt to load is not recorded: %s", store.url, error)


def _changed(store: Store, seen: Store, found: _Found, change: Callable[[Attempts], Attempts]) -> None:
    changed = only_present(change(found.attempts), seen.list())
    if changed == found.attempts:
        return
    if found.error is not None:
        if not found.is_ours or found.data is None:
            raise found.error
        _set_aside(store, found.data)
    if changed.records:
        replaces = None if found.data is None else digest_of(found.data)
        store.commit(QUARANTINE_FILE, quarantine_to_json(changed), replaces=replaces)
    else:
        store.delete(QUARANTINE_FILE)


def _set_aside(store: Store, data: bytes) -> None:
    name = f"quarantine-damaged-{digest_of(data)[-16:]}.json"
    with suppress(CommitConflict):  # it was set aside already
        store.commit(name, data)
        _LOG.warning(
            "%s/%s cannot be read and restarts empty; its old contents are in %s", store.url, QUARANTINE_FILE, name
        )


def _read(store: Store) -> _Found:
    data = None
    where = f"{store.url}/{QUARANTINE_FILE}"
    try:
        size = store.size(QUARANTINE_FILE)
        if size is None:
            return _Found()
        if size > QUARANTINE_LIMIT_BYTES:
            raise CheckpointHostile(
                where, expected=f"at most {QUARANTINE_LIMIT_BYTES} bytes", found=size, fix=QUARANTINE_FIX
            )
        data = store.read(QUARANTINE_FILE)  # all that is there now: a load beside this may have replaced it
        return _Found(quarantine_from_json(data, where), data)
    except CheckpointMissing:
        return _Found()  # a load beside this has ended
    except (CheckpointError, OSError) as error:
        return _Found(data=data, error=error)


def _manifest_digest(store: Store, name: str) -> str | None:
    """The digest of the manifest of a checkpoint now, or None."""
    with suppress(CheckpointError, OSError):
        size = store.size(f"{name}/{MANIFEST}")
        if size is not None and size <= MANIFEST_LIMIT_BYTES:
            return digest_of(store.read(f"{name}/{MANIFEST}", start=0, stop=size))
    return None
