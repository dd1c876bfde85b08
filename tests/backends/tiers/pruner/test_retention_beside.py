"""Retention and the neighbours of checkpoints: sidecars, abandoned timelines, and the pointers `best` and `latest`."""

import itertools
import logging
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.adapters.manager.config import CheckpointConfig, create_checkpoint_manager
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.api import load, plan
from trainfold.backends.runs.best.best_file import save_best
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.best.record import make_best_record, updated
from trainfold.core.best.top_n import BestEntry
from trainfold.core.errors import InvalidArgument
from trainfold.core.save.retention import Saved, keep_all, keep_every, keep_last, keep_newer, plan_left_behind
from trainfold.core.state.state import Progress, TrainState

WANTED = make_best_record(metric="loss", direction="min")


def state_at(step):
    return TrainState(trainer=Progress(step=step), extra={"w": torch.full((40,), float(step))})


def steps_left(store):
    return [int(name[5:]) for name in store.list() if name.startswith("step-")]


def rewound(store, **options):
    """Steps 1 to 5; then a rewind to step 2, and 6 and 7 from there: 3, 4 and 5 are left behind."""
    with CheckpointManager(store, **options) as manager:
        for step in range(1, 6):
            manager.save(state_at(step))
    with CheckpointManager(store, **options) as manager:
        manager.load(state_at(0), manager.should_load(state_at(0), step=2))
        manager.save(state_at(6))
        manager.save(state_at(7))


# --- sidecars --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_a_user_puts_beside_a_checkpoint_goes_with_it(mode, tmp_path):
    """E05: exports and data states in their own folders; such a folder once stopped retention after the manifest was deleted."""
    with CheckpointManager(tmp_path / "run", mode=mode, keep_last=1) as manager:
        for step in (1, 2, 3):
            manager.save(state_at(step))
            manager.drain()
            folder = tmp_path / "run" / f"step-{step:08d}" / "export" / "tokenizer"
            folder.mkdir(parents=True)
            (folder / "vocab.json").write_text("{}")
            (folder / "link").symlink_to(tmp_path)
            (folder.parent.parent / "notes.txt").write_text("mine")
    assert steps_left(LocalStore(tmp_path / "run")) == [3]
    assert (tmp_path / "run" / "step-00000003" / "export" / "tokenizer" / "vocab.json").exists()
    assert tmp_path.exists(), "nothing is followed"


def test_a_sidecar_that_cannot_be_removed_leaves_its_checkpoint_whole(tmp_path, monkeypatch, caplog):
    run = tmp_path / "run"
    with CheckpointManager(run, keep_last=1) as manager:
        manager.save(state_at(1))
        (run / "step-00000001" / "export").mkdir()

        def busy(*_, **__):
            raise OSError(16, "Device or resource busy")

        with monkeypatch.context() as patch:
            patch.setattr("trainfold.backends.stores.local.shutil.rmtree", busy)
            manager.save(state_at(2))
        assert "could not be deleted, and will be tried again" in caplog.text
        assert load(run, like=state_at(0), step=1).trainer.step == 1
        manager.save(state_at(3))
    assert steps_left(LocalStore(run)) == [3]


def test_a_folder_in_a_step_that_is_saved_again_does_not_keep_its_old_files(tmp_path):
    run = tmp_path / "run"
    with CheckpointManager(run) as manager:
        manager.save(state_at(1))
        before = set((run / "step-00000001").iterdir())
        (run / "step-00000001" / "a-folder").mkdir()
        manager.save(state_at(1))
    assert len(list((run / "step-00000001").iterdir())) == len(before) + 1


# --- left behind -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "stays"),
    [
        (None, [1, 2, 3, 4, 5, 6, 7]),
        (keep_all(), [1, 2, 3, 4, 5, 6, 7]),
        (keep_last(1), [1, 2, 5, 6, 7]),
        (keep_every(2), [1, 2, 3, 4, 6, 7]),
        (keep_newer(3600.0), [1, 2, 3, 4, 5, 6, 7]),
        (keep_newer(0.0), [1, 2, 6, 7]),
    ],
)
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_left_behind_checkpoints_go_by_a_rule_and_stay_without_one(policy, stays, place, tmp_path):
    """E16: no other rule counts them, and this rule deletes nothing of the present lineage."""
    if place == "memory":
        clock = iter(float(second) for second in range(1000))
        store = MemoryStore(clock=lambda: next(clock))
    else:
        store = LocalStore(tmp_path / "run")
    rewound(store, keep_left_behind=policy)
    assert steps_left(store) == stays
    assert load(store, like=state_at(0)).trainer.step == 7


@pytest.mark.parametrize("ahead_secs", [-1e6, 1e6])
def test_a_clock_of_this_machine_that_is_wrong_deletes_no_young_checkpoint(ahead_secs, monkeypatch):
    """C03, E16: a day ahead of the store's, it made all but the newest old at once. The ages are those by the clock of the store."""
    ticks, now = itertools.count(1_000_000, 60), time.time()
    store = MemoryStore(clock=lambda: float(next(ticks)))
    monkeypatch.setattr(time, "time", lambda: now + ahead_secs)
    with CheckpointManager(store, keep=keep_newer(3600.0)) as manager:
        for step in (1, 2, 3):
            manager.save(state_at(step))
    assert steps_left(store) == [1, 2, 3]
    with CheckpointManager(store, keep=keep_newer(0.0)) as manager:
        manager.load(state_at(0))
        manager.save(state_at(4))
    assert steps_left(store) == [4]


def test_what_a_pointer_or_the_best_names_stays_although_it_was_left_behind(tmp_path):
    store = LocalStore(tmp_path / "run")
    with CheckpointManager(store) as manager:
        for step in range(1, 6):
            manager.save(state_at(step))
    save_best(store, updated(WANTED, {"loss": 0.1}, step=4))
    store.point("mine", "step-00000003")
    with CheckpointManager(store, keep_left_behind=keep_newer(0.0)) as manager:
        manager.load(state_at(0), manager.should_load(state_at(0), step=2))
        manager.save(state_at(6))
    assert steps_left(store) == [1, 2, 3, 4, 6]


@given(st.lists(st.builds(Saved, st.uuids().map(str), st.integers(0, 50), st.integers(0, 3)), max_size=8, unique_by=lambda one: one.name),
       st.sampled_from([None, keep_last(1), keep_every(7), keep_last(2) | keep_every(3)]), st.data())  # fmt: skip
def test_each_left_behind_checkpoint_stays_or_goes_and_a_second_look_deletes_nothing(checkpoints, policy, data):
    protected = dict.fromkeys(
        data.draw(st.sets(st.sampled_from([one.name for one in checkpoints]))) if checkpoints else [], "a pointer"
    )
    planned = plan_left_behind(checkpoints, policy=policy, protected=protected)
    assert sorted([*planned.kept, *planned.deleted]) == sorted(one.name for one in checkpoints)
    assert not set(protected) & set(planned.deleted)
    assert policy is not None or not planned.deleted
    left = [one for one in checkpoints if one.name in planned.kept]
    assert not plan_left_behind(left, policy=policy, protected=protected).deleted


def test_the_rule_for_what_was_left_behind_is_an_argument_and_a_field_of_the_config(tmp_path):
    with pytest.raises(InvalidArgument, match="keep_left_behind"):
        CheckpointManager(tmp_path / "a", keep_left_behind=3)
    with create_checkpoint_manager(CheckpointConfig(run=tmp_path / "a", keep_left_behind=keep_last(1))) as manager:
        manager.save(state_at(1))


# --- pointers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("kept", [None, (BestEntry(0.1, 4), BestEntry(0.2, 5), BestEntry(0.3, 2), BestEntry(0.4, 1))])
def test_after_a_rewind_the_pointer_leads_to_the_best_that_is_left_or_goes(place, kept, tmp_path, caplog):
    """E12: users and serving scripts follow it; the file itself names its timeline."""
    store = MemoryStore() if place == "memory" else LocalStore(tmp_path / "run")
    with CheckpointManager(store) as manager:
        for step in range(1, 6):
            manager.save(state_at(step))
        save_best(store, updated(WANTED, {"loss": 0.1}, step=4), kept=kept)
        assert store.pointers()["best"] == "step-00000004"
    with CheckpointManager(store, keep_last=9) as manager:
        manager.load(state_at(0), manager.should_load(state_at(0), step=2))
        assert store.pointers()["best"] == "step-00000004", "nothing is saved yet: a crash goes on from step 5"
        manager.save(state_at(6))
        assert store.pointers().get("best") == (None if kept is None else "step-00000002")
        assert "left the best, step-00000004, behind" in caplog.text
        caplog.clear()
        manager.save(state_at(7))
        assert not caplog.text
        save_best(store, updated(WANTED, {"loss": 0.2}, step=7))
        assert store.pointers()["best"] == "step-00000007"
        manager.save(state_at(8))
        assert store.pointers()["best"] == "step-00000007"


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("thing", ["directory", "file"])
def test_a_latest_of_the_users_own_fails_no_save_and_is_said_once(mode, thing, tmp_path, caplog):
    """E13: such as a materialised copy of a checkpoint; it decides nothing, and stays as it is."""
    run = tmp_path / "run"
    run.mkdir()
    if thing == "directory":
        (run / "latest").mkdir()
        (run / "latest" / "model.txt").write_text("mine")
    else:
        (run / "latest").write_text("mine")
    with (
        caplog.at_level(logging.WARNING, logger="trainfold"),
        CheckpointManager(run, mode=mode, keep_last=2) as manager,
    ):
        for step in (1, 2, 3):
            manager.save(state_at(step))
            manager.drain()
    said = [record.getMessage() for record in caplog.records if "latest" in record.getMessage()]
    assert len(said) == 1
    assert thing in said[0]
    assert plan(run, like=state_at(0)).step == 3
    assert steps_left(LocalStore(run)) == [2, 3]
    assert (run / "latest").is_dir() if thing == "directory" else (run / "latest").read_text() == "mine"
    assert not list(run.glob(".tmp*"))
