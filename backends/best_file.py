"""``best.json`` of a run: `save_best` and `load_best`, so that a restart goes on from the best and not from nothing (E09)."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import attrs

from trainfold.backends.collectives import SingleProcess
from trainfold.backends.inventory import examine, read_inventory, read_run_id
from trainfold.backends.protocols import Collectives, Store
from trainfold.backends.runs import Run, open_store
from trainfold.backends.together import on_rank_zero
from trainfold.core.best import BestRecord, carried_best
from trainfold.core.best_json import BEST_FILE, BEST_LIMIT_BYTES, best_from_json, best_to_json
from trainfold.core.codec import digest_of
from trainfold.core.errors import InvalidArgument, InvalidState, RunLocked
from trainfold.core.inventory import lineage
from trainfold.core.manifest import Head
from trainfold.core.save_plan import directory_of
from trainfold.core.scalars import shown
from trainfold.core.score import beats


class BestIgnored(UserWarning):
    """A run's ``best.json`` is about something else, or its checkpoint is gone: the best begins anew."""


def save_best(run: Run, record: BestRecord, *, collectives: Collectives | None = None) -> BestRecord:
    """Write the best into its run, atomically and durably; after the checkpoint of its step was saved (E10).

    It names a step and no path, so that it stays true when the run is moved. A `CheckpointManager` of the run keeps the
    checkpoint that it names, whatever ``keep_last`` says (E02). Saving an equal record again does nothing.

    Args:
        run: a directory, or a store; the manager's own store while a manager has the run open.
        record: a best with a score; its ``run_id`` may be None.
        collectives: the ranks, all of which call: rank 0 writes, and a failure is raised on all. None for a single process.

    Returns:
        The record with the run's id.

    Raises:
        InvalidArgument: if it has no score, or is of another run.
        InvalidState: if the run has no checkpoint of its step; or if an earlier best there is better, which a restart
            that did not `load_best` would lose.
        CheckpointDamaged: if there is a best that cannot be read: it is never replaced silently.
        RunLocked: if another process, or a manager with another store object, saves into the run.
        SaveFailed: if it could not be written; what was there is untouched.

    Examples:
        >>> from trainfold.backends.memory import MemoryStore
        >>> from trainfold.backends.runs import save
        >>> from trainfold.core.best import make_best_record, updated
        >>> from trainfold.core.state import Progress, TrainState
        >>> store = MemoryStore()
        >>> best = make_best_record(metric="loss", direction="min")
        >>> saved = save(TrainState(trainer=Progress(step=10)), store)
        >>> kept = save_best(store, updated(best, {"loss": 0.5}, step=saved.step))
        >>> kept == load_best(store, best)
        True
    """
    if not isinstance(record, BestRecord) or record.score is None:
        raise InvalidArgument("record", expected="a BestRecord with a score", found=shown(record),
                              mend="save it when a result has won")  # fmt: skip
    store = open_store(run)
    is_path = isinstance(run, str | Path)
    return on_rank_zero(collectives or SingleProcess(), lambda: _save(store, record, takes_lock=is_path))


def load_best(run: Run, wanted: BestRecord, *, collectives: Collectives | None = None) -> BestRecord:
    """The best that a run goes on with: the saved one, or ``wanted`` as it is if there is none.

    The saved one counts only if it is of the same run, metric, direction and ``min_delta``, and the checkpoint that it
    names can still be loaded: deleted, damaged, or left behind by a rewind (E12), it is not. A `BestIgnored` warning says
    each of these reasons. A file that cannot be read is an error and not a fresh start: a worse score would win.

    Args:
        run: a directory, or a store.
        wanted: a record without a score; where its ``run_id`` is None, the run's own is meant.
        collectives: the ranks, all of which call: rank 0 reads, and all get what it read. None for a single process.

    Returns:
        The record to compare the next evaluation with.

    Raises:
        InvalidArgument: if ``wanted`` is no record.
        CheckpointDamaged: if the file is torn or altered; `CheckpointHostile` or `CheckpointForeign` if it is no such file.
        FutureVersion: if a newer trainfold wrote it.

    Examples:
        >>> from trainfold.backends.memory import MemoryStore
        >>> from trainfold.core.best import make_best_record
        >>> load_best(MemoryStore(), make_best_record(metric="loss", direction="min")).score is None
        True
    """
    if not isinstance(wanted, BestRecord):
        raise InvalidArgument("wanted", expected="a BestRecord", found=shown(wanted),
                              mend="make it with make_best_record(metric=..., direction=...)")  # fmt: skip
    store = open_store(run)
    record, reasons = on_rank_zero(collectives or SingleProcess(), lambda: _load(store, wanted))
    if reasons:
        warnings.warn(f"{store.url}/{BEST_FILE} is not used: {'; '.join(reasons)}", BestIgnored, stacklevel=2)
    return record


def best_checkpoint(store: Store) -> str | None:
    """The name of the checkpoint that the run's best names, whether it is there or not; None without a best.

    Raises:
        CheckpointError: if there is a best that cannot be read.

    Examples:
        >>> from trainfold.backends.memory import MemoryStore
        >>> best_checkpoint(MemoryStore()) is None
        True
    """
    data = _read(store)
    return None if data is None else directory_of(_step(_parsed(store, data)[0]))


def _load(store: Store, wanted: BestRecord) -> tuple[BestRecord, tuple[str, ...]]:
    meant = attrs.evolve(wanted, run_id=read_run_id(store)) if wanted.run_id is None else wanted
    data = _read(store)
    return _carried(store, data, meant)


def _save(store: Store, record: BestRecord, *, takes_lock: bool) -> BestRecord:
    own = read_run_id(store)
    head = None if own is None else _head_at(store, _step(record))
    if own is None or head is None:
        raise InvalidState(f"{store.url}/{BEST_FILE}", expected=f"a checkpoint of step {record.step} in the run", found="none",
                           mend="save the state of that step first, and then the best")  # fmt: skip
    if record.run_id not in {None, own}:
        raise InvalidArgument("record.run_id", expected=f"{own!r}, the run's, or None", found=repr(record.run_id),
                              mend="begin with load_best of this run")  # fmt: skip
    mine = attrs.evolve(record, run_id=own)
    data = best_to_json(mine, timeline=head.timeline)
    with _locked(store) if takes_lock else nullcontext():
        old = _read(store)
        if old == data:
            return mine
        _check_no_better(store, old, mine)
        store.commit(BEST_FILE, data, replaces=None if old is None else digest_of(old))
    return mine


def _check_no_better(store: Store, old: bytes | None, mine: BestRecord) -> None:
    """An earlier step with a better score, still there, means that nobody has loaded it (P24)."""
    found, _ = _carried(store, old, mine)
    if found.score is None or _step(mine) <= _step(found):
        return
    assert mine.score is not None
    if beats(found.score, mine.score, direction=mine.direction):
        raise InvalidState(
            f"{store.url}/{BEST_FILE}",
            expected=f"no better {mine.metric} than {mine.score!r}",
            found=f"{found.score!r} at step {found.step}",
            mend="begin with load_best after a restart; remove the file, or name the metric anew, if the measure has changed",
        )


def _carried(store: Store, data: bytes | None, wanted: BestRecord) -> tuple[BestRecord, tuple[str, ...]]:
    if data is None:
        return carried_best(None, wanted, steps_present=())
    found, timeline = _parsed(store, data)
    head = _head_at(store, _step(found))
    present = () if head is None or head.timeline != timeline else (head.step,)
    return carried_best(found, wanted, steps_present=present)


def _head_at(store: Store, step: int) -> Head | None:
    """The head of the step's checkpoint, if it is of the run's lineage and whole; None otherwise."""
    inventory = read_inventory(store)
    name = directory_of(step)
    if all(entry.name != name for entry in lineage(inventory)):
        return None
    entry = examine(store, inventory, name).entry(name)
    return None if entry is None or entry.problem is not None else entry.head


def _read(store: Store) -> bytes | None:
    size = store.size(BEST_FILE)
    return None if size is None else store.read(BEST_FILE, start=0, stop=min(size, BEST_LIMIT_BYTES + 1))


def _parsed(store: Store, data: bytes) -> tuple[BestRecord, int]:
    return best_from_json(data, f"{store.url}/{BEST_FILE}")


def _step(record: BestRecord) -> int:
    assert record.step is not None  # it goes with the score
    return record.step


@contextmanager
def _locked(store: Store) -> Iterator[None]:
    with ExitStack() as held:
        try:
            held.enter_context(store.lock())
        except RunLocked as error:
            mend = f"{error.mend}; or give save_best the store that the manager was made with"
            raise RunLocked(error.where, expected=error.expected, found=error.found, mend=mend) from None
        yield
