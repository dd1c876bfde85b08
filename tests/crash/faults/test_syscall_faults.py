"""Every call of a save fails in turn: the save raises the right error, or did not need the call; nothing else is harmed."""

import errno
import shutil
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import pytest

import trainfold
from crash.disk.disk import Disk
from crash.disk.effects import Mark, Recorder
from crash.disk.frozen_store import files_in
from crash.disk.states import Budget, crash_states, live
from crash.disk.syscalls import watched
from crash.effort import IS_SOAK, say
from crash.faults.faulty_disk import SHORT, Fault, FaultyDisk
from crash.saves.recovery import Examiner, Promised, broken, look, promises, staged
from crash.saves.scenarios import SHM, Doing, digest_of_state, state_at
from trainfold.backends.stores.local import LocalStore
from trainfold.core.errors import NoSpace, NotWritable, SaveFailed, TrainfoldError
from trainfold.core.format.file_names import directory_of

KINDS = {errno.EIO: SaveFailed, errno.ENOSPC: NoSpace, errno.EROFS: NotWritable}
STEPS = {"first": (), "next": (1,), "again": (1, 2), "rewind": (2, 4), "prune": (1, 2)}  # saved before
SAVED = {"first": 1, "next": 2, "again": 2, "rewind": 2, "prune": 3}  # saved then, with a fault


@attrs.frozen
class Outcome:
    """The results of a save with a fault and of a later save without one."""

    calls: list
    failed: list
    error: Exception | None
    effects: list
    before: dict
    promised: Promised
    litter: list
    wrong: list


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with a run for each way to save, and the promises made for it."""
    made = {}
    for name, steps in STEPS.items():
        top, promised = tmp_path_factory.mktemp(name), Promised()
        for step in steps:
            state = state_at(step)
            trainfold.save(state, top / "run")
            digest = digest_of_state(state)
            standing = tuple(pair for pair in promised.standing if pair[0] != directory_of(step))
            pair = (directory_of(step), digest)
            promised = Promised(digest, (*standing, pair), saved=(*promised.saved, pair))
        made[name] = top, promised
    shutil.copytree(made["prune"][0], (copy := tmp_path_factory.mktemp("loaded")), dirs_exist_ok=True, symlinks=True)
    made["origin"] = trainfold.load(copy / "run", like=state_at(SAVED["prune"])).origin
    return made


def save_with(fault, name, prepared):
    """Make a save during which a call fails, and then a save on a disk that works again."""
    source, promised = prepared[name]
    with TemporaryDirectory(dir=SHM) as top:
        shutil.copytree(source, top, dirs_exist_ok=True, symlinks=True)
        before = files_in(top)
        there = Disk.of(before)
        recorder, run = Recorder(top, live(there)[1], max(there.kinds)), Path(top, "run")
        disk = FaultyDisk(recorder, fault)
        state, error, wrong = state_at(SAVED[name], variant=5), None, []
        doing = Doing(SAVED[name], digest_of_state(state), (directory_of(1),) if name == "prune" else ())
        with watched(disk), warnings.catch_warnings():
            warnings.simplefilter("error")
            recorder.mark("begin", doing)
            disk.is_armed = True
            try:
                if name == "prune":
                    with trainfold.CheckpointManager(run, keep_last=2, mode="sync") as manager:
                        manager.save(
                            attrs.evolve(state, origin=prepared["origin"])
                        )  # like a state that was loaded from the run
                else:
                    trainfold.save(state, run)
            except Exception as raised:  # noqa: BLE001  # what it is is looked at below
                error = raised
            disk.is_armed = False
            recorder.mark("fail" if error else "ack", doing)
        then = promises(recorder.effects, promised)[-1]
        wrong += [f"at once: {each}" for each in broken(look(LocalStore(run)), then)]
        further = state_at(50)
        doing = Doing(50, digest_of_state(further), tuple(name for name, _ in then.saved))
        with watched(recorder):
            recorder.mark("begin", doing)
            try:
                trainfold.save(further, run)
            except TrainfoldError as still:
                wrong.append(f"the next save, on a disk that is well again: {still}")
                recorder.mark("fail", doing)
            else:
                recorder.mark("ack", doing)
        wrong += [f"later: {each}" for each in broken(look(LocalStore(run)), promises(recorder.effects, promised)[-1])]
        litter = list(staged(run))
        return Outcome(disk.calls, disk.failed, error, recorder.effects, before, promised, litter, wrong)


def codes_of(call):
    """The faults that a call may have: opening an existing file needs no space, and closing a file that was only read never fails."""
    if call.name == "close":
        return []
    codes = list(KINDS) if call.changes else [errno.EIO]
    return [*codes, SHORT] if call.name in {"write", "pwrite"} else codes


def is_seen_torn(wrong, name):
    """Whether a message only says that the checkpoint of a failed save is torn and was rejected."""
    return "CheckpointTorn" in wrong and f"run/{name}/" in wrong


def check(outcome, fault, examiner):
    """Check that a save that could not do its work raised an error, and that one that returned is as safe as any other."""
    where = f"{errno.errorcode.get(fault.code, 'short')} at call {fault.index}: {outcome.calls[fault.index]}"
    if fault.lasting:
        where = f"from there on: {where}"
    assert outcome.failed, where
    if outcome.error is not None:
        assert fault.code != SHORT, f"{where}: a short write is not an error: {outcome.error!r}"
        found = type(outcome.error)
        assert found is KINDS[fault.code], f"{where}: raised {found.__name__}: {outcome.error}"
    # a failed save may leave a torn checkpoint that it could neither finish nor remove; readers detect and skip it
    own = directory_of(next(e.value.step for e in outcome.effects if isinstance(e, Mark)))
    assert not outcome.wrong, f"{where}, raised {outcome.error!r}: {outcome.wrong}"
    assert not outcome.litter, f"{where}: {outcome.litter}"
    promised = promises(outcome.effects, outcome.promised)
    count = 0
    budget, every = (Budget(32, 4), 1) if IS_SOAK else (Budget(4, 2), 40)
    places = range(0, len(outcome.effects), every)
    for state in crash_states(outcome.effects, budget, Disk.of(outcome.before), places=places):
        wrong = [each for each in examiner.wrong(state, promised[state.done]) if not is_seen_torn(each, own)]
        assert not wrong, f"{where}, raised {outcome.error!r}; and then a crash: {state}: {wrong}"
        count += 1
    return count


def run_faults(name, prepared, part, *, lasting=False, codes=(*KINDS, SHORT)):
    """Make each call of a part fail in each way; return how many faults there were, and how many of them raised an error."""
    clean = save_with(None, name, prepared)
    assert clean.error is None
    assert not clean.wrong
    examiner, runs, raised, states = Examiner(go_on_share=0), 0, 0, 0
    for index, call in enumerate(clean.calls):
        for code in codes_of(call):
            if call.part == part and code in codes and (call.changes or not lasting):
                fault = Fault(index, code, lasting=lasting)
                outcome = save_with(fault, name, prepared)
                states += check(outcome, fault, examiner)
                runs, raised = runs + 1, raised + (outcome.error is not None)
    say(f"{name}, {part}: {len(clean.calls)} calls, {runs} faults, {raised} raised, {states} states after a crash")
    return runs, raised


@pytest.mark.parametrize("name", STEPS)
def test_each_way_to_save_succeeds_where_no_call_fails(name, prepared):
    """The usual run tries faults for only some of these ways; this test shows that the others work at all."""
    clean = save_with(None, name, prepared)
    assert (clean.error, clean.wrong, clean.litter) == (None, [], [])


@pytest.mark.parametrize("name", STEPS if IS_SOAK else ["again"])
@pytest.mark.timeout(0 if IS_SOAK else 120)
def test_whatever_call_fails_that_writes_the_save_says_so_or_did_not_need_it(name, prepared):
    """C15, C16, C17: the error has the right kind, the earlier checkpoints load, and the next lock collects all leftovers.

    A crash at any later point still leaves what was acknowledged, so no failed sync was ignored.
    """
    runs, raised = run_faults(name, prepared, "writing", codes=(*KINDS, SHORT) if IS_SOAK else (errno.EIO, SHORT))
    assert 0 < raised < runs


@pytest.mark.parametrize("name", STEPS if IS_SOAK else ["next"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS] if IS_SOAK else [errno.ENOSPC])
@pytest.mark.timeout(0 if IS_SOAK else 120)
def test_a_disk_that_stays_full_or_read_only_harms_nothing_that_is_there(name, code, prepared):
    """C15, C16: files that could not even be removed are collected by the next process that locks the run."""
    runs, raised = run_faults(name, prepared, "writing", lasting=True, codes=(code,))
    assert 0 < raised <= runs


def test_a_lock_whose_holder_cannot_be_written_down_is_let_go(prepared):
    """C15: a disk that is full just when the holder's name is written into ``.lock`` costs one save and no more."""
    runs, _ = run_faults("next", prepared, "lock")
    assert runs


def test_a_run_whose_own_name_could_not_be_made_durable_is_made_so_by_the_next_save(prepared):
    """C02: otherwise a crash could take away the whole run after that save is acknowledged."""
    runs, _ = run_faults("first", prepared, "above")
    assert runs


def test_a_save_that_cannot_look_at_the_run_says_so_as_any_other_that_failed(prepared):
    """C15: an error while reading the run is a failed save, and the message has the file and the fix."""
    runs, _ = run_faults("next", prepared, "looking")
    assert runs


def test_a_manifest_that_is_taken_back_is_gone_before_the_files_that_it_names(prepared):
    """C01: otherwise a crash leaves a committed half. Readers detect that it is torn, but if it is the first, no resume is possible."""
    calls = save_with(None, "first", prepared).calls
    last = max(i for i, call in enumerate(calls) if call.name == "fsync" and call.path.startswith("run/step-"))
    outcome = save_with(Fault(last, errno.EIO), "first", prepared)
    assert type(outcome.error) is SaveFailed
    promised, examiner = promises(outcome.effects, outcome.promised), Examiner(go_on_share=0)
    for state in crash_states(outcome.effects, Budget(32, 2), Disk.of(outcome.before)):
        assert not examiner.wrong(state, promised[state.done])
