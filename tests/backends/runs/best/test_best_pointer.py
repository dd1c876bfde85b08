"""The pointer to the best checkpoint and the file behind it, under crashes, failures and retention."""

import json
import math
import threading

import attrs
import pytest
import torch
from kit.backends import best_file_cases
from kit.backends.best_file_cases import LIKE, WANTED, best_name, best_names, save_at, won

from trainfold.adapters.cli import main
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.decide_best import decide_best
from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.backends.runs.api import load, plan, save
from trainfold.backends.runs.best.best_file import (
    load_best,
    save_best,
)
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import ErrorAt, MemoryStore
from trainfold.backends.tiers.pruner import Pruner
from trainfold.core.best.record import is_better, make_best_record, updated
from trainfold.core.best.top_n import BestEntry
from trainfold.core.errors import (
    CheckpointDamaged,
    CheckpointHostile,
    InvalidArgument,
    InvalidState,
    RankFailed,
    RunLocked,
    SaveFailed,
)
from trainfold.core.format.file_names import directory_of
from trainfold.core.save.retention import Saved, keep_last, plan_retention
from trainfold.core.state.state import Progress, TrainState

store = best_file_cases.store


@pytest.mark.parametrize(
    ("kept", "error", "words"),
    [
        ([BestEntry(0.5, 10), BestEntry(0.5, 11)], InvalidState, "expected a checkpoint of step 11 in the run"),
        ([BestEntry(0.5, 10), BestEntry(0.4, 10)], InvalidArgument, "kept: expected one entry for each step"),
        ([BestEntry(math.nan, 10)], InvalidArgument, r"kept\[0\]\.score"),
        ([(0.5, 10)], InvalidArgument, r"kept\[0\]: expected a BestEntry"),
        ("abc", InvalidArgument, "kept: expected entries"),
        (3, InvalidArgument, "kept: expected entries"),
        ([BestEntry(0.5, step) for step in range(501)], InvalidState, "a checkpoint of step"),
    ],
)
def test_n_best_that_cannot_be_are_refused(store, kept, error, words):
    save_at(store, 10)
    with pytest.raises(error, match=words):
        save_best(store, won(0.5, 10), kept=kept)
    assert store.size("best.json") is None


def test_retention_keeps_the_n_best_beside_the_last_k(store):
    """E02, E07: the plan lists the checkpoints that best.json protects, and the reasons."""
    save_at(store, 10, 20, 30, 40, 50)
    save_best(store, won(0.1, 20), kept=[BestEntry(0.1, 20), BestEntry(0.2, 40)])
    saved = [Saved(directory_of(step), step) for step in (10, 20, 30, 40, 50)]
    plan = plan_retention(saved, policy=keep_last(2), written=saved[-1], protected=best_names(store))
    assert plan.deleted == (directory_of(10),)
    assert plan.kept[directory_of(40)] == ("one of the best 2",)


# --- the pointer -----------------------------------------------------------------------------------------------------


def test_the_pointer_leads_to_the_best_and_moves_with_it(tmp_path):
    """E10, E14: it is relative, replaced in one step after the file, and made again if a crash left it outdated."""
    run = tmp_path / "run"
    save_at(run, 10, 20)
    best = save_best(run, won(0.5, 10))
    assert (run / "best").readlink().name == str((run / "best").readlink()) == directory_of(10)
    best = save_best(run, won(0.4, 20, best))
    assert str((run / "best").readlink()) == directory_of(20)
    (run / "best").unlink()
    save_best(run, best)
    assert str((run / "best").readlink()) == directory_of(20)
    assert load(run, like=LIKE).trainer.step == 20


def test_a_pointer_that_cannot_be_is_no_failed_save(tmp_path):
    """E13: it is a hint for users; a user's own file of that name stays."""
    run = tmp_path / "run"
    save_at(run, 10)
    (run / "best").write_text("my own notes")
    saved = save_best(run, won(0.5, 10))
    assert load_best(run, WANTED) == saved
    assert (run / "best").read_text() == "my own notes"


def test_a_pointer_that_leads_nowhere_disturbs_nothing(tmp_path):
    """E13: only the file and the checkpoint that it names count."""
    run = tmp_path / "run"
    save_at(run, 10, 20)
    saved = save_best(run, won(0.5, 10))
    (run / "best").unlink()
    (run / "best").symlink_to("step-00000099")
    assert load_best(run, WANTED) == saved
    assert load(run, like=LIKE).trainer.step == 20
    assert [entry.head.step for entry in read_inventory(LocalStore(run)).entries] == [10, 20]


def test_the_pointer_moves_only_after_the_file():
    """E10: on every disk that a crash could leave, it leads to what the file says or said before."""
    store = MemoryStore()
    save_at(store, 10, 20)
    best = save_best(store, won(0.5, 10))
    begun = len(store.effects)
    save_best(store, won(0.4, 20, best))
    for done in range(begun, len(store.effects) + 1):
        disk = store.after_crash(done)
        if disk.point_target("best") == directory_of(20):
            assert load_best(disk, WANTED).step == 20
    assert disk.point_target("best") == directory_of(20)


# --- what save_best refuses ------------------------------------------------------------------------------------------


def test_a_best_that_nobody_loaded_is_not_lost_to_a_worse_one(store):
    """P24: a restart that forgot load_best gets a warning, and its first score does not become the best."""
    save_at(store, 10, 20)
    before = save_best(store, won(0.5, 10))
    with pytest.raises(InvalidState, match=r"found 0\.5 at step 10; start with load_best"):
        save_best(store, won(0.6, 20))
    assert load_best(store, WANTED) == before
    assert save_best(store, won(0.5, 20)).step == 20  # as good: the caller's own decision


def test_a_best_without_a_checkpoint_is_refused(store):
    """The state of an unsaved score cannot be loaded, so the state must be saved first."""
    with pytest.raises(InvalidState, match=r"save the state of that step first.*manager\.drain\(\)"):
        save_best(store, won(0.5, 10))
    assert store.list() == []
    save_at(store, 10)
    with pytest.raises(InvalidState, match="expected a checkpoint of step 11"):
        save_best(store, won(0.5, 11))
    assert store.size("best.json") is None


@pytest.mark.parametrize("record", [WANTED, None, {"score": 0.5}])
def test_what_is_no_best_is_refused(store, record):
    save_at(store, 10)
    with pytest.raises(InvalidArgument, match="record"):
        save_best(store, record)
    with pytest.raises(InvalidArgument, match="wanted"):
        load_best(store, "loss")


def test_a_best_of_another_run_is_refused(store):
    save_at(store, 10)
    with pytest.raises(InvalidArgument, match=r"record\.run_id"):
        save_best(store, attrs.evolve(won(0.5, 10), run_id="b"))


def test_saving_an_equal_best_again_changes_nothing(tmp_path):
    save_at(tmp_path, 10)
    saved = save_best(tmp_path, won(0.5, 10))
    before = (tmp_path / "best.json").read_bytes()
    assert save_best(tmp_path, saved) == saved
    assert (tmp_path / "best.json").read_bytes() == before


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contents", ["", "{}", "0.5", "\x00" * 100, "x" * 20_000])
def test_a_best_that_cannot_be_read_is_an_error_and_never_a_fresh_start(tmp_path, contents):
    """E09: neither loading nor saving treats it as absent; and its fix works."""
    save_at(tmp_path, 10)
    (tmp_path / "best.json").write_text(contents)
    for action in (lambda: load_best(tmp_path, WANTED), lambda: save_best(tmp_path, won(0.5, 10))):
        with pytest.raises(CheckpointDamaged, match="or remove it: the best then starts without a score"):
            action()
    assert (tmp_path / "best.json").read_text() == contents
    (tmp_path / "best.json").unlink()
    assert load_best(tmp_path, WANTED).score is None


def test_a_best_that_is_a_link_is_refused(tmp_path):
    save_at(tmp_path / "run", 10)
    (tmp_path / "run" / "best.json").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointHostile):
        load_best(tmp_path / "run", WANTED)


@pytest.mark.parametrize("torn_write", [False, True])
@pytest.mark.parametrize("keep_unsynced", [False, True])
def test_a_crash_anywhere_in_a_save_leaves_the_old_best_or_the_new_one(keep_unsynced, torn_write):
    """On every disk that could be left behind between two effects; once it has returned, the new one."""
    store = MemoryStore()
    save_at(store, 10, 20)
    old = save_best(store, won(0.5, 10))
    begun = len(store.effects)
    new = save_best(store, won(0.4, 20))
    assert len(store.effects) > begun
    for done in range(begun, len(store.effects) + 1):
        disk = store.after_crash(done, keep_unsynced=keep_unsynced, torn_write=torn_write)
        assert load_best(disk, WANTED) in ([new] if done == len(store.effects) else [old, new])


# --- in the run's directory ------------------------------------------------------------------------------------------


def test_the_file_disturbs_nothing_that_reads_a_run(tmp_path, capsys):
    """Inventory, plan, load, ls, inspect, verify and diff give the same results with and without a best."""

    def told(run):
        said = []
        for words in (["ls"], ["plan"], ["verify"], ["inspect"]):
            code = main([*words, str(run), "--json"])
            out = capsys.readouterr()
            said.append((words, code, out.out, out.err))
        return said, read_inventory(LocalStore(run)), str(plan(run, like=LIKE)), load(run, like=LIKE)

    save_at(tmp_path, 10, 20)
    before = told(tmp_path)
    assert all(code == 0 for _, code, _, _ in before[0]), before[0]
    save_best(tmp_path, won(0.5, 10))
    after = told(tmp_path)
    assert after[1:] == before[1:]
    assert [each[:2] for each in after[0]] == [each[:2] for each in before[0]]

    def stays(text):  # all but the time that passes, and the pointer, which `ls` lists
        found = json.loads(text)
        for each in found.get("checkpoints", []):
            each.pop("age_secs", None)
            each["names"] = [name for name in each.get("names", []) if name != "best"]
        return found

    for (_, _, old, _), (_, _, new, _) in zip(before[0], after[0], strict=True):
        assert stays(new) == stays(old)


def test_the_manager_keeps_the_checkpoint_of_the_best(store):
    """E02: beside the last k, and until another one is the best."""
    model = torch.nn.Linear(1, 1)
    best = WANTED
    with CheckpointManager(store, every=1, keep_last=1) as manager:
        live = attach(model)
        for loss in (0.9, 0.5, 0.8, 0.7, 0.3, 0.4):
            live.advance(samples=1)
            manager.step(live)
            if is_better(best, {"loss": loss}):
                best = save_best(store, updated(best, {"loss": loss}, step=live.progress.step))
            assert best_name(store) == directory_of(best.step)
            assert load_best(store, WANTED) == best
    assert [entry.head.step for entry in read_inventory(store).entries] == [5, 6]


def test_the_manager_deletes_nothing_while_the_best_cannot_be_read(store, caplog):
    """It is not known which checkpoint the file names; the save itself continues."""
    with CheckpointManager(store, keep_last=1) as manager:
        for step in (1, 2):
            if step == 2:
                store.commit("best.json", b"{}")
            manager.save(TrainState(trainer=Progress(step=step)))
    assert len(read_inventory(store).entries) == 2
    assert "best.json" in caplog.text


def test_while_a_manager_has_the_run_open_its_store_is_needed(tmp_path):
    """A second store object of the same directory is another writer; the refusal says what to give instead, each time."""
    store = LocalStore(tmp_path / "run")
    with CheckpointManager(store) as manager:
        manager.save(TrainState(trainer=Progress(step=1)))
        with pytest.raises(RunLocked, match="pass save_best the store that the manager was made with"):
            save_best(tmp_path / "run", won(0.5, 1))
        save_best(store, won(0.5, 1))
        save_best(store, won(0.4, 1))
    assert save_best(tmp_path / "run", won(0.3, 1)).score == 0.3


# --- ranks -----------------------------------------------------------------------------------------------------------


def test_rank_0_reads_and_writes_for_all(store):
    """E08: one file, one verdict."""
    save_at(store, 10)
    saved = run_threads(3, lambda world: save_best(store, won(0.5, 10), collectives=world))
    assert saved == run_threads(3, lambda world: load_best(store, WANTED, collectives=world)) == [saved[0]] * 3


def test_a_failure_of_rank_0_is_raised_on_every_rank(store):
    save_at(store, 10)
    outcomes = thread_outcomes(2, lambda world: save_best(store, won(0.5, 11), collectives=world))
    assert [type(outcome.error) for outcome in outcomes] == [InvalidState, RankFailed]


def evaluated_and_saved(world, run):
    """What each process of a world does after a step: decides, and writes the best; what it measured differs by rank."""
    best = load_best(run, WANTED, collectives=world)
    best, _ = decide_best(best, {"loss": 0.5 + world.rank}, step=10, collectives=world)
    best = save_best(run, best, collectives=world)
    again, won = decide_best(best, {"loss": 0.9 - world.rank}, step=20, collectives=world)
    return best.score, best.run_id, again == best == load_best(run, WANTED, collectives=world), won


def test_processes_act_on_one_verdict(processes, tmp_path):
    """E08: real processes, of which each would have decided otherwise by itself."""
    save_at(tmp_path, 10)
    told = processes.run(2, evaluated_and_saved, str(tmp_path), collectives={})
    assert told == [(0.5, read_inventory(LocalStore(tmp_path)).run_id, True, False)] * 2


def test_a_best_whose_last_sync_failed_is_made_durable_by_the_next_try():
    """E09: equal bytes that can be read may still be taken back by a crash."""
    store = MemoryStore()
    save(TrainState(trainer=Progress(step=1)), store)
    record = updated(make_best_record(metric="loss", direction="min"), {"loss": 0.5}, step=1)
    store._fault = ErrorAt(store._attempts + 2)  # sync, sync, commit, and the last sync
    with pytest.raises(SaveFailed):
        save_best(store, record)
    store._fault = None
    save_best(store, record)
    assert best_name(store.after_crash(len(store.effects))) == "step-00000001"


def test_what_a_best_names_is_made_durable_before_it():
    """E02, E09: the last sync of a save failed, which a crash may take back, and its step is named the best."""
    store = MemoryStore()
    save_at(store, 1)
    save_best(store, won(0.5, 1))
    store._fault = lambda _, effect: OSError(5, "EIO") if (effect.kind, effect.name) == ("sync", "step-00000002") and (
        "step-00000002/manifest.json" in store._disk.files) else None  # fmt: skip
    with pytest.raises(SaveFailed):
        save_at(store, 2)
    store._fault = None
    save_best(store, won(0.4, 2))
    after = store.after_crash(len(store.effects))
    assert load_best(after, WANTED).step == 2


def test_what_an_earlier_best_names_goes_only_when_the_new_one_is_durable():
    """E02: the last sync of ``best.json`` failed, and a crash may bring the earlier one back."""
    store = MemoryStore()
    with CheckpointManager(store, keep_last=1) as manager:
        manager.save(TrainState(trainer=Progress(step=1)))
        save_best(store, won(0.5, 1))
        result = manager.save(TrainState(trainer=Progress(step=2))).result
        store._fault = lambda _, effect: OSError(5, "EIO") if (effect.kind, effect.name) == ("sync", "") and (
            b"0.4" in store._disk.files["best.json"]) else None  # fmt: skip
        with pytest.raises(SaveFailed):
            save_best(store, won(0.4, 2))
        store._fault = None
        store._disk.hints.pop("best")  # it would hold on to the first one, and is no more than a hint
        manager._saves._deletions._pruner.retain(result)
        begun = len(store.effects)
        manager._saves._deletions._pruner.retain(result)
        assert len(store.effects) == begun  # and it is made so once
    after = store.after_crash(len(store.effects))
    assert best_name(store) == "step-00000002"
    assert [entry.name for entry in read_inventory(store).entries] == ["step-00000002"]
    assert load_best(after, WANTED).step == 2


def test_no_checkpoint_is_deleted_while_it_is_being_named():
    """E02: retention works in a thread of its own."""
    entered, goes_on = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def commit(self, name, data, *, replaces=None):
            if name == "best.json":
                entered.set()
                assert goes_on.wait(20)
            self.inner.commit(name, data, replaces=replaces)

    store = Slow(MemoryStore())
    save_at(store, 1)
    newest = save(TrainState(trainer=Progress(step=2)), store)
    threads = [
        threading.Thread(target=action)
        for action in (lambda: save_best(store, won(0.5, 1)), lambda: Pruner(store, keep_last(1)).retain(newest))
    ]
    threads[0].start()
    assert entered.wait(20)
    threads[1].start()
    threads[1].join(0.2)
    goes_on.set()
    for thread in threads:
        thread.join()
    assert load_best(store, WANTED).step == 1
