"""A run's ``best.json``: `save_best`, `load_best` and `load_best_n`, so that a restarted run still knows its best."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import attrs

from trainfold.backends.flight.journals import note_in_journal
from trainfold.backends.ranks.all_ranks import on_rank_zero
from trainfold.backends.ranks.launcher import world_given
from trainfold.backends.runs.best.best_reader import (
    BEST_POINTER,
    best_bytes,
    best_json_lock,
    carried_entries,
    parsed_best,
    read_best,
    timelines_at,
)
from trainfold.backends.runs.scan import read_run_id
from trainfold.backends.stores.local import Run, open_store
from trainfold.backends.stores.os_errors import locked
from trainfold.backends.stores.protocol import Store
from trainfold.backends.user_warning import warn_user
from trainfold.core.best.best_json import BEST_FILE, BestFile, Placed, best_to_json
from trainfold.core.best.record import BestRecord
from trainfold.core.best.score import beats
from trainfold.core.best.top_n import BestEntry, ranked
from trainfold.core.digest import digest_of
from trainfold.core.errors import CommitConflict, InvalidArgument, InvalidState, RunLocked, placed
from trainfold.core.flight.journal_line import JournalLine
from trainfold.core.format.file_names import MANIFEST, directory_of
from trainfold.core.json_values import shown
from trainfold.core.layout.world import Collectives


class BestIgnored(UserWarning):
    """An entry of a run's ``best.json`` does not count: it has another run, metric or direction, or its checkpoint cannot be used.

    If no entry counts, the best starts without a score.
    """


def save_best(
    run: Run,
    record: BestRecord,
    *,
    kept: Iterable[BestEntry] | None = None,
    collectives: Collectives | None = None,
) -> BestRecord:
    """Write the best into its run, atomically and durably, after the checkpoint of its step was saved.

    The file names steps and no path, so it stays valid when the run is moved. A `CheckpointManager` of the run keeps the
    checkpoints that it names, whatever ``keep_last`` says. Saving an equal record again changes nothing. Afterwards the pointer
    ``best`` leads to the checkpoint of the best: a hint for people, relative and replaced atomically.

    Args:
        run: a directory, or a store; the manager's own store while a manager has the run open.
        record: a best with a score; its ``run_id`` may be None.
        kept: the N best, as `plan_best` keeps them, in any order; None for those already in the file.
        collectives: the ranks, all of which call: rank 0 writes, and a failure is raised on all. None for a single process.

    Returns:
        The record with the run's id.

    Raises:
        InvalidArgument: if it has no score, or is of another run; or if no plan could keep ``kept``.
        InvalidState: if the run has no checkpoint of a named step; or if an earlier best there is better, so that a restart
            without `load_best`, or `load_best_n`, would lose it.
        CheckpointDamaged: if the existing best cannot be read: it is never replaced silently. `CheckpointUnreadable` where the store does not
            give a checkpoint now that it names, or that is named here.
        RunLocked: if another process, or a manager with another store object, saves into the run.
        SaveFailed: if it could not be written; the existing file is untouched.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> from trainfold import save
        >>> from trainfold.retention import make_best_record, updated
        >>> from trainfold import Progress, TrainState
        >>> store = MemoryStore()
        >>> best = make_best_record(metric="loss", direction="min")
        >>> saved = save(TrainState(trainer=Progress(step=10)), store)
        >>> kept = save_best(store, updated(best, {"loss": 0.5}, step=saved.step))
        >>> kept == load_best(store, best)
        True
    """
    if not isinstance(record, BestRecord) or record.score is None:
        raise InvalidArgument("record", expected="a BestRecord with a score", found=shown(record),
                              fix="save it when a result has won")  # fmt: skip
    places = None if kept is None else ranked(kept, direction=record.direction)
    store = open_store(run)
    is_path = isinstance(run, str | Path)
    world = world_given(collectives, os.environ, where="save_best.collectives")
    with placed(step=record.step):
        return on_rank_zero(world, lambda: _save(store, record, places, takes_lock=is_path), doing="write best.json")


def load_best(run: Run, wanted: BestRecord, *, collectives: Collectives | None = None) -> BestRecord:
    """The best that a run continues with: the saved one, or ``wanted`` itself if there is no saved one.

    The saved one counts only if it is of the same run, metric and direction, and if the checkpoint that it names can still be
    loaded, and was not deleted, damaged, or left behind by a rewind. It gets the ``min_delta`` of ``wanted``. A `BestIgnored`
    warning lists each reason against it. A file that cannot be read is an error and not a fresh start, because a worse score
    would win then.

    Args:
        run: a directory, or a store.
        wanted: a record without a score; where its ``run_id`` is None, the run's own is meant.
        collectives: the ranks, all of which call: rank 0 reads, and all get its result. None for a single process.

    Returns:
        The record to compare the next evaluation with.

    Raises:
        InvalidArgument: if ``wanted`` is not a `BestRecord`.
        CheckpointDamaged: if the file is torn or altered; `CheckpointHostile` or `CheckpointForeign` if it is another file.
            `CheckpointUnreadable` where the store does not give a checkpoint now that it names: it may be whole, and still the best.
        FutureVersion: if a newer trainfold wrote it.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> from trainfold.retention import make_best_record
        >>> load_best(MemoryStore(), make_best_record(metric="loss", direction="min")).score is None
        True
    """
    meant, there = _loaded(run, wanted, lambda file: (file.best,), collectives)
    score, step = (there[0].score, there[0].step) if there else (None, None)
    return attrs.evolve(meant, score=score, step=step)


def load_best_n(run: Run, wanted: BestRecord, *, collectives: Collectives | None = None) -> tuple[BestEntry, ...]:
    """The N best that a run continues with, for `plan_best`: the saved ones whose checkpoints can still be loaded.

    The rules of `load_best` apply to each; a `BestIgnored` warning names each that does not count. If only the one best was
    saved, it is the only entry.

    Args:
        run: a directory, or a store.
        wanted: a record without a score; where its ``run_id`` is None, the run's own is meant.
        collectives: the ranks, all of which call: rank 0 reads, and all get its result. None for a single process.

    Returns:
        The entries, the best one first.

    Raises:
        InvalidArgument: if ``wanted`` is not a `BestRecord`.
        CheckpointError: as `load_best`.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> from trainfold.retention import make_best_record
        >>> load_best_n(MemoryStore(), make_best_record(metric="loss", direction="min"))
        ()
    """
    return _loaded(run, wanted, lambda file: file.entries, collectives)[1]


def _loaded(
    run: Run,
    wanted: BestRecord,
    entries: Callable[[BestFile], Sequence[Placed]],
    collectives: Collectives | None,
) -> tuple[BestRecord, tuple[BestEntry, ...]]:
    """The wanted record with its run, and those of the entries with which the run continues."""
    if not isinstance(wanted, BestRecord):
        raise InvalidArgument("wanted", expected="a BestRecord", found=shown(wanted),
                              fix="make it with make_best_record(metric=..., direction=...)")  # fmt: skip
    store, world = open_store(run), world_given(collectives, os.environ, where="load_best.collectives")

    def load() -> tuple[BestRecord, tuple[BestEntry, ...], tuple[str, ...]]:
        meant = attrs.evolve(wanted, run_id=read_run_id(store)) if wanted.run_id is None else wanted
        file = read_best(store)
        there, reasons = ((), ()) if file is None else carried_entries(store, file, entries(file), meant)
        return meant, tuple(entry for entry, _ in there), reasons

    meant, there, reasons = on_rank_zero(world, load, doing="read best.json")
    if reasons:
        text = f"{store.url}/{BEST_FILE} is not used: {'; '.join(reasons)}"
        # once a run; it may raise
        on_rank_zero(world, lambda: warn_user(text, BestIgnored), doing="warn", is_vote=True)
    return meant, there


def _save(store: Store, record: BestRecord, places: tuple[BestEntry, ...] | None, *, takes_lock: bool) -> BestRecord:
    with locked(store, _fix_of_lock) if takes_lock else nullcontext(), best_json_lock():
        return _save_locked(store, record, places)


def _save_locked(store: Store, record: BestRecord, places: tuple[BestEntry, ...] | None) -> BestRecord:
    own = read_run_id(store)
    named = {_step(record), *(entry.step for entry in places or ())}
    timelines = {} if own is None else timelines_at(store, named)
    if own is None or (missing := sorted(named - timelines.keys())):
        steps = ", ".join(map(str, missing if own is not None else sorted(named)))
        raise InvalidState(f"{store.url}/{BEST_FILE}", expected=f"a checkpoint of step {steps} in the run", found="none",
                           fix="save the state of that step first, and then the best; "
                                "one that is being saved in the background is there after manager.drain()")  # fmt: skip
    if record.run_id not in {None, own}:
        raise InvalidArgument("record.run_id", expected=f"{own!r}, the run's, or None", found=repr(record.run_id),
                              fix="start with load_best of this run")  # fmt: skip
    mine = attrs.evolve(record, run_id=own)
    old = best_bytes(store)
    was = None if old is None else parsed_best(store, old)
    if places is None:
        kept = carried_entries(store, was, was.kept, mine)[0] if was is not None else ()
    else:
        kept = tuple((entry, timelines[entry.step]) for entry in places)
    data = best_to_json(mine, timeline=timelines[_step(mine)], kept=kept)
    if old != data:
        if was is not None:
            _check_none_lost(store, was, mine, [entry for entry, _ in kept])
        _make_durable(store, named - {entry.step for entry, _ in (was.entries if was is not None else ())})
    # also if the bytes are equal: they may not be durable yet
    store.commit(BEST_FILE, data, replaces=None if old is None else digest_of(old))
    if BEST_POINTER not in store.list(""):  # a file of the user's with that name is not replaced
        store.point(BEST_POINTER, directory_of(_step(mine)))
    data_of = {"metric": mine.metric, "direction": mine.direction, "score": mine.score}
    note_in_journal(store, JournalLine(time.time(), "best", _step(mine), directory_of(_step(mine)), data=data_of))
    return mine


def _step(record: BestRecord) -> int:
    assert record.step is not None  # a record with a score has a step
    return record.step


def _make_durable(store: Store, steps: Iterable[int]) -> None:
    """Commit their manifests again: after a failed last sync a manifest can be read, but a crash would lose it."""
    for step in sorted(steps):
        name = f"{directory_of(step)}/{MANIFEST}"
        data = store.read(name)
        with suppress(CommitConflict):  # another save replaces it, durably
            store.commit(name, data, replaces=digest_of(data))


def _check_none_lost(store: Store, was: BestFile, mine: BestRecord, kept: list[BestEntry]) -> None:
    """Refuse to replace a better score of an earlier step that still exists: no plan does this, so the caller has not loaded it."""
    (best, _), step = was.best, _step(mine)
    assert best.score is not None
    assert mine.score is not None
    is_better = best.step < step and beats(best.score, mine.score, direction=mine.direction)
    if is_better and carried_entries(store, was, [was.best], mine)[0]:
        raise InvalidState(
            f"{store.url}/{BEST_FILE}",
            expected=f"no better {mine.metric} than {mine.score!r}",
            found=f"{best.score!r} at step {best.step}",
            fix="start with load_best after a restart; if the measure has changed, remove the file or rename the metric",
        )
    steps = {entry.step for entry in kept}
    for entry, _ in carried_entries(store, was, was.entries, mine)[0] if kept else ():
        is_dropped = entry.step < max(steps) and entry.step not in steps
        if is_dropped and ranked([entry, kept[-1]], direction=mine.direction)[0] == entry:
            raise InvalidState(
                f"{store.url}/{BEST_FILE}",
                expected=f"the N best without one that is worse than a dropped one, such as {kept[-1].score!r} at step {kept[-1].step}",
                found=f"{entry.score!r} at step {entry.step}, which would be dropped",
                fix="start with load_best_n after a restart, and pass the kept of a plan_best that had it",
            )


def _fix_of_lock(error: RunLocked) -> str:
    return f"{error.fix}; or pass save_best the store that the manager was made with"
