"""A run in two tiers: durable on the disk first, then in the far store, in the background; nothing is lost but what was said not to be uploaded."""

import errno
import itertools
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from kit.backends.tier_cases import until
from kit.laws.manager_machine_cases import GatedStore

import trainfold
from trainfold.adapters.guards.rehearsal import rehearsal_of
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.flight.flights import file_for_log, flight_name
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.backends.tiers import uploads
from trainfold.backends.tiers.compare_runs import planned_copy
from trainfold.backends.tiers.copy_checkpoints import carry_out
from trainfold.backends.tiers.sent_logs import SentLogs
from trainfold.backends.tiers.two_tiers import TwoTiers
from trainfold.core.digest import digest_of
from trainfold.core.errors import (
    CheckpointForeign,
    CheckpointUnreadable,
    InvalidArgument,
    ResumeRefused,
    RunLocked,
    SaveFailed,
)
from trainfold.core.rehearsal.orders import VARIABLE, Orders, encode_orders
from trainfold.core.save.retention import keep_last
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Progress, TrainState
from trainfold.properties import contracts
from trainfold.retention import load_best, make_best_record, save_best, updated

LIKE = TrainState(ModelState(Leaves({"w": torch.zeros(1000)}), Leaves()), trainer=Progress())


def at(step, value=None):
    weights = torch.full((1000,), float(step if value is None else value))
    return LIKE.evolve(model=ModelState(Leaves({"w": weights}), Leaves()), trainer=Progress(step=step))


def steps_in(store):
    """The steps that a store has, each as it was saved."""
    found = [int(name[5:]) for name in store.list() if name.startswith("step-") and store.size(f"{name}/manifest.json")]
    for step in found:
        assert trainfold.load(store, like=LIKE, step=step).trainer.step == step
    return found


class Failing(GatedStore):
    """A store whose writes fail while ``error`` is set."""

    error = None

    def write(self, name, parts, *, size_bytes):
        if self.error is not None:
            raise self.error
        super().write(name, parts, size_bytes=size_bytes)


@pytest.fixture
def far(monkeypatch):
    monkeypatch.setattr(uploads, "_FIRST_PAUSE_SECS", 0.01)
    return Failing(MemoryStore())


@pytest.fixture
def near(tmp_path):
    return LocalStore(tmp_path / "near")


def test_two_tiers_keep_the_contract_of_a_store(tmp_path):
    counter = itertools.count()
    contracts.check_store(lambda: TwoTiers(tmp_path / f"run-{next(counter)}", MemoryStore()))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_is_durable_here_and_then_there_and_each_tier_has_its_retention(near, far, mode):
    """Both moments are events, in this order, with their durations."""
    events = []
    run = TwoTiers(near.url, far, keep_far=keep_last(3))
    with CheckpointManager(run, keep_last=1, mode=mode, on_event=events.append) as manager:
        for step in range(1, 6):
            manager.save(at(step))
        manager.drain()
        run.wait()
        assert run.waiting == ()
        manager.save(at(6))
    assert steps_in(far) == [4, 5, 6]
    assert steps_in(near)[-1:] == [6]
    assert near.read("step-00000006/manifest.json") == far.read("step-00000006/manifest.json")
    for step in range(1, 7):
        kinds = [each.kind for each in events if each.step == step and each.kind in ("committed", "uploaded")]
        assert kinds == ["committed", "uploaded"]
    assert all(each.secs > 0 for each in events if each.kind in ("committed", "uploaded"))
    assert {each.run for each in events if each.kind == "uploaded"} == {far.url}
    assert {each.checkpoint for each in events if each.kind == "pruned" and each.run == far.url} == {
        f"step-0000000{step}" for step in (1, 2, 3)
    }


def test_the_loop_goes_on_while_a_checkpoint_is_sent_and_the_disk_keeps_what_waits(near, far):
    """The gate of the far tier is closed: no save waits for it, and retention deletes nothing that is not there."""
    run = TwoTiers(near, far)
    with CheckpointManager(run, keep_last=1) as manager:
        manager.save(at(1))
        run.wait()
        far.gate.clear()
        for step in (2, 3, 4):
            manager.save(at(step))
        assert run.waiting == ("step-00000002", "step-00000003", "step-00000004")
        assert steps_in(near) == [2, 3, 4]
        assert steps_in(far) == [1]
        far.gate.set()
        run.wait()
        manager.save(at(5))
        run.wait()
        manager.save(at(6))
        assert steps_in(near)[0] >= 5
    assert steps_in(far) == [1, 2, 3, 4, 5, 6]


def test_those_that_wait_longest_are_given_up_where_the_policy_says_so(near, far, caplog):
    """Loudly: each is an event and a warning, and the others are sent."""
    run, events = TwoTiers(near, far, most_waiting=1), []
    with CheckpointManager(run, keep_last=1, on_event=events.append) as manager:
        far.gate.clear()
        manager.save(at(1))
        until(lambda: far.is_waiting)
        for step in (2, 3, 4):
            manager.save(at(step))
        assert run.waiting == ("step-00000001", "step-00000004")
        far.gate.set()
    assert steps_in(far) == [1, 4]
    assert [each.step for each in events if each.kind == "not_uploaded"] == [2, 3]
    assert sum(record.levelno == logging.WARNING and "most_waiting" in record.message for record in caplog.records) == 2


def test_an_upload_that_fails_is_tried_again_and_the_end_names_what_is_not_there(near, far, caplog):
    run, events = TwoTiers(near, far), []
    broken = SaveFailed("far", expected="bytes", found="a network that is down", fix="look at it")
    manager = CheckpointManager(run, on_event=events.append)
    far.error = broken
    manager.save(at(1))
    until(lambda: manager.poll() or "tried again" in caplog.text)
    far.error = None
    run.wait()
    assert steps_in(far) == [1]
    far.error = broken
    for step in (2, 3):
        manager.save(at(step))
    with pytest.raises(SaveFailed, match=r"step-00000002, step-00000003 in .*near alone, because of .*down"):
        manager.close()
    assert [each.step for each in events if each.kind == "uploaded"] == [1]
    assert {each.step for each in events if each.kind == "not_uploaded"} >= {1, 2}
    far.error = None
    with CheckpointManager(TwoTiers(near, far), on_event=events.append):
        pass
    assert steps_in(far) == [1, 2, 3], "the next program sends what was left"
    assert [each.step for each in events if each.kind == "uploaded"] == [1, 2, 3]


class Away(MemoryStore):
    """A bucket behind a network that is down."""

    def lock(self):
        raise SaveFailed("s3://bucket/run/.probe", expected="the planned bytes to be stored", found="a network that is down", fix="look at the network")  # fmt: skip


def test_a_run_does_not_begin_while_the_far_tier_is_away(near, far):
    """E01: that may have a newer step than the disk, so nothing is restored, nothing is saved, and nothing is guessed; the disk alone is the way out, and goes back later."""
    with CheckpointManager(TwoTiers(near, far)) as manager:
        manager.save(at(1))
    for act in (lambda manager: manager.load(LIKE), lambda manager: manager.save(at(2))):
        with pytest.raises(SaveFailed) as refused, CheckpointManager(TwoTiers(near, Away())) as manager:
            act(manager)
        assert "expected a far tier that answers: it may have a newer checkpoint than the near one, found" in str(
            refused.value
        )
        assert "a network that is down" in str(refused.value)
        assert (
            f"use {near.url} by itself as the run: what it saves is sent when both are used again" in refused.value.fix
        )
    assert steps_in(near) == steps_in(far) == [1]
    with CheckpointManager(near) as manager:
        assert manager.load(LIKE).trainer.step == 1
        manager.save(at(2))
    with CheckpointManager(TwoTiers(near, far)):
        pass
    assert steps_in(far) == [1, 2]


class Unread(MemoryStore):
    """A bucket that answers, and whose reads of some names fail for a while, as with a 503."""

    part = ""

    def read(self, name, *, start=0, stop=None):
        if self.part and self.part in name:
            raise CheckpointUnreadable(f"{self.url}/{name}", expected="bytes from the store", found="503 SlowDown", fix="try again; this does not prove damage")  # fmt: skip
        return super().read(name, start=start, stop=stop)


@pytest.mark.parametrize("has_older", [False, True])
@pytest.mark.parametrize("part", ["model-", "step-00000004/manifest", "manifest.json", "run.json", "best.json"])
def test_a_far_tier_that_answers_and_cannot_be_read_is_not_taken_for_an_older_one(near, part, has_older):
    """E01: the run started from scratch on a disk that was lost, and parted in two on one that was behind."""
    far = Unread()
    with CheckpointManager(TwoTiers(near, far)) as manager:
        for step in (2, 4):
            manager.save(at(step))
        if part == "best.json":
            save_best(
                manager._saves._store, updated(make_best_record(metric="loss", direction="min"), {"loss": 0.1}, step=4)
            )
    shutil.rmtree(near.url)
    if has_older:
        carry_out(planned_copy(far, near, steps=[2]), far, near)
    far.part, before = part, far.list()
    for act in (lambda manager: manager.load(LIKE), lambda manager: manager.save(at(6))):
        with (
            pytest.raises(SaveFailed, match="a far tier that can be read: it may have a newer checkpoint") as refused,
            CheckpointManager(TwoTiers(near, far)) as manager,
        ):
            act(manager)
        assert "503 SlowDown" in str(refused.value)
        assert f"use {near.url} by itself as the run" in refused.value.fix
        is_named = "step-00000004 can be read there, or was deleted there" in refused.value.fix
        assert is_named == ("manifest" in part), "or it would be refused at each start if that stays"
    assert steps_in(near) == [2] * has_older
    assert far.list() == before
    far.part = ""
    with CheckpointManager(TwoTiers(near, far)) as manager:
        assert manager.load(LIKE).trainer.step == 4


def test_what_is_damaged_here_and_cannot_be_read_there_now_is_not_given_up_for_an_older_one(near):
    """E01: only the load finds the damage, so the start has fetched nothing."""
    far = Unread()
    with CheckpointManager(TwoTiers(near, far)) as manager:
        for step in (2, 4):
            manager.save(at(step))
    flip(near, 4)
    far.part = "step-00000004/model"
    with pytest.raises(SaveFailed, match="503 SlowDown"), CheckpointManager(TwoTiers(near, far)) as manager:
        manager.load(LIKE)
    far.part = ""
    with CheckpointManager(TwoTiers(near, far)) as manager:
        assert manager.load(LIKE).trainer.step == 4


def test_a_resume_takes_the_newest_that_can_be_had_from_both(near, far, tmp_path):
    """The disk is lost; the far tier is behind; files of the newest are lost here, or it was damaged; the newest there is damaged."""

    def resumed():
        events = []
        with CheckpointManager(TwoTiers(near, far), on_event=events.append) as manager:
            found = manager.load(LIKE)
        assert torch.equal(found.model.params["w"], at(found.trainer.step).model.params["w"])
        return found.trainer.step, sorted(each.kind for each in events)

    record = make_best_record(metric="loss", direction="min")
    with CheckpointManager(TwoTiers(near, far)) as manager:
        for step in (1, 2, 3):
            manager.save(at(step))
        save_best(manager._saves._store, updated(record, {"loss": 0.1}, step=1))
    shutil.rmtree(near.url)
    assert resumed() == (3, ["fetched", "restored"])
    assert steps_in(near) == [1, 3], "and the best"
    assert load_best(near, record).step == 1
    trainfold.save(at(4), near)
    assert resumed() == (4, ["restored", "uploaded"])
    data = next(iter((tmp_path / "near/step-00000004").glob("model*")))
    data.unlink()
    assert resumed() == (4, ["fetched", "restored"])
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + b"\1")
    assert resumed() == (4, ["fetched", "restored"]), "the load finds that"
    assert data.read_bytes() == whole
    (tmp_path / "near/step-00000004/manifest.json").write_bytes(b"torn")
    assert resumed() == (4, ["fetched", "restored"])
    shutil.rmtree(near.url)
    far.write(f"step-00000004/{data.name}", [whole[:-1] + b"\1"], size_bytes=len(whole))
    with pytest.warns(CheckpointPassedOver, match="did not finish"):  # what came of step 4 is not a checkpoint
        assert resumed() == (3, ["fetched", "not_fetched", "restored"])


def flip(store, step):
    """Other bytes in the file of a model, in the same size."""
    name = next(each for each in store.list(f"step-{step:08d}") if each.startswith("model"))
    data = store.read(f"step-{step:08d}/{name}")
    store.write(f"step-{step:08d}/{name}", [data[:-1] + b"\1"], size_bytes=len(data))


@pytest.mark.parametrize("there", ["absent", "damaged"])
def test_a_resume_goes_on_from_an_older_one_there_where_the_newest_can_be_had_from_no_tier(near, far, there):
    """Here is nothing but damage, and there is it not, or damaged too: the newest of the far tier that loads is fetched, and the other is named."""
    with CheckpointManager(TwoTiers(near, far), keep_last=1) as manager:
        for step in (1, 2, 3, 4):
            manager.save(at(step))
            manager.drain()
            manager._saves._store.wait()
    flip(near, 4)
    flip(far, 3)
    flip(far, 4)
    if there == "absent":
        far.delete("step-00000004/")
    for name in [each for each in near.list() if each.startswith("step-") and each != "step-00000004"]:
        near.delete(f"{name}/")
    events = []
    with CheckpointManager(TwoTiers(near, far), on_event=events.append) as manager:
        with pytest.warns(CheckpointPassedOver) as told:  # also of what came of step 3
            assert manager.load(LIKE).trainer.step == 2
        assert any("step-00000004" in str(each.message) for each in told)
        for step in (3, 4, 5):
            manager.save(at(step, value=step + 0.5))
    assert [each.step for each in events if each.kind == "fetched"] == [2]
    assert [each.step for each in events if each.kind == "not_fetched"] == [4, 3]
    for step in (3, 4, 5):
        found = trainfold.load(far, like=LIKE, step=step)
        assert found.model.params["w"][0] == step + 0.5


@pytest.mark.parametrize("is_same", [True, False])
def test_what_is_uploaded_is_whole_there_also_where_a_start_has_found_damage(near, far, is_same):
    """E01: the far tier had the manifest and files of the sizes, so the step was said to be uploaded, and stayed damaged."""
    with CheckpointManager(TwoTiers(near, far)) as manager:
        for step in (2, 4):
            manager.save(at(step))
    shutil.rmtree(near.url)
    flip(far, 4)
    events = []
    with CheckpointManager(TwoTiers(near, far), on_event=events.append) as manager:
        with pytest.warns(CheckpointPassedOver, match="did not finish"):  # what came of step 4 is not a checkpoint
            assert manager.load(LIKE).trainer.step == 2
        assert [each.step for each in events if each.kind == "not_fetched"] == [4]
        manager.save(at(4, value=4 if is_same else 7))
    assert [each.step for each in events if each.kind == "uploaded"] == [4]
    shutil.rmtree(near.url)
    with CheckpointManager(TwoTiers(near, far)) as manager:
        found = manager.load(LIKE)
    assert found.trainer.step == 4
    assert found.model.params["w"][0] == (4 if is_same else 7)


def test_a_damaged_best_in_the_far_tier_keeps_no_newer_checkpoint_there(near, far):
    """E02: they are fetched together."""
    record = make_best_record(metric="loss", direction="min")
    with CheckpointManager(TwoTiers(near, far)) as manager:
        for step in (1, 2):
            manager.save(at(step))
        save_best(manager._saves._store, updated(record, {"loss": 0.1}, step=1))
    shutil.rmtree(near.url)
    flip(far, 1)
    events = []
    with CheckpointManager(TwoTiers(near, far), on_event=events.append) as manager:
        assert manager.load(LIKE).trainer.step == 2
    assert [(each.kind, each.step) for each in events] == [("not_fetched", 1), ("fetched", 2), ("restored", 2)]
    shutil.rmtree(near.url)  # the best is in quarantine there now
    events.clear()
    with CheckpointManager(TwoTiers(near, far), on_event=events.append) as manager:
        assert manager.load(LIKE).trainer.step == 2, "it was as if the far tier had nothing"
    assert [(each.kind, each.step) for each in events] == [("fetched", 2), ("not_fetched", None), ("restored", 2)]


@pytest.mark.parametrize("start_over", [False, True])
def test_a_run_does_not_begin_again_where_all_of_the_far_tier_is_damaged(near, far, start_over):
    """E02, A14: the disk is lost, and a start found nothing, as in a new run. On purpose it begins beside another far tier, where no old step can come back."""
    with CheckpointManager(TwoTiers(near, far)) as manager:
        for step in (1, 2):
            manager.save(at(step))
    shutil.rmtree(near.url)
    for step in (1, 2):
        flip(far, step)
    for _ in range(2):
        with pytest.raises(SaveFailed, match=r"expected a whole checkpoint.*none.*step-00000002.*a new place as far="):
            CheckpointManager(TwoTiers(near, far), start_over=start_over).__enter__()
        assert steps_in(near) == []
    other = MemoryStore()
    with CheckpointManager(TwoTiers(near, other), start_over=start_over) as manager:
        manager.save(at(1, value=7))
    assert trainfold.load(other, like=LIKE).model.params["w"][0] == 7


class Archived(Unread):
    """One that knows when something was committed."""

    def __init__(self):
        self.ticks = itertools.count(1000)
        super().__init__(clock=lambda: float(next(self.ticks)))


@pytest.mark.parametrize("step", [2, 4, 6])
def test_an_old_manifest_that_can_never_be_read_stops_no_run(near, step):
    """E01, V03: an object that a rule has archived can never be read; what may be the newest is still not passed over."""
    far = Archived()
    with CheckpointManager(TwoTiers(near, far)) as manager:
        for each in (2, 4, 6):
            manager.save(at(each))
    shutil.rmtree(near.url)
    far.part = f"step-0000000{step}/manifest.json"
    if step == 6:
        with pytest.raises(SaveFailed, match="503 SlowDown"):
            CheckpointManager(TwoTiers(near, far)).__enter__()
        with pytest.raises(ResumeRefused, match="may be the newest"):
            trainfold.load(far, like=LIKE)
        return
    with CheckpointManager(TwoTiers(near, far)) as manager:
        assert manager.load(LIKE).trainer.step == 6
    with CheckpointManager(far) as manager, pytest.warns(CheckpointPassedOver, match="503 SlowDown"):
        assert manager.load(LIKE).trainer.step == 6


def test_what_is_older_than_a_damaged_newest_is_not_passed_over_for_one_before_that(near):
    """E01: the newest was found damaged when it came, and the one before that, of which a 503 hid the manifest, was skipped in silence."""
    far = Archived()
    with CheckpointManager(TwoTiers(near, far)) as manager:
        for each in (2, 4, 6):
            manager.save(at(each))
    shutil.rmtree(near.url)
    flip(far, 6)
    far.part = "step-00000004/manifest.json"
    for _ in range(2):
        with pytest.raises(SaveFailed, match="503 SlowDown"):
            CheckpointManager(TwoTiers(near, far)).__enter__()
        assert steps_in(near) == []
    far.part = ""
    with CheckpointManager(TwoTiers(near, far)) as manager, pytest.warns(CheckpointPassedOver):
        assert manager.load(LIKE).trainer.step == 4


@pytest.mark.parametrize("there", ["whole", "damaged", "absent"])
def test_what_the_disk_does_not_give_now_comes_from_the_far_tier_or_is_refused(near, far, there, monkeypatch):
    """E01: it went on from the older one that the far tier has, and a third start put the newest into quarantine."""
    with CheckpointManager(TwoTiers(near, far)) as manager:
        for step in (2, 4):
            manager.save(at(step))
    if there == "damaged":
        flip(far, 4)
    if there == "absent":
        far.delete("step-00000004/")
    near.delete("step-00000002/")
    before = near.list()
    away, preadv = {path.stat().st_ino for path in Path(near.url).glob("step-*/model*")}, os.preadv

    def read(fd, *more):
        if os.fstat(fd).st_ino in away:  # and not what is written in its place
            raise OSError(errno.EACCES, "Permission denied")
        return preadv(fd, *more)

    monkeypatch.setattr(os, "preadv", read)
    if there == "whole":
        with CheckpointManager(TwoTiers(near, far)) as manager:
            assert manager.load(LIKE).trainer.step == 4
        return
    for _ in range(4):
        with (
            pytest.raises((ResumeRefused, SaveFailed), match="Permission denied"),
            CheckpointManager(TwoTiers(near, far)) as manager,
        ):
            manager.load(LIKE)
    assert near.list() == before
    away.clear()
    with CheckpointManager(TwoTiers(near, far)) as manager:
        assert manager.load(LIKE).trainer.step == 4


def test_a_far_tier_without_a_run_has_nothing_to_fetch_again(near, far):
    """R09: it was "a far tier that cannot be read", to be waited for."""
    with CheckpointManager(near) as manager:
        for step in (1, 2):
            manager.save(at(step))
    flip(near, 2)
    empty = MemoryStore()
    tiers = TwoTiers(near, empty)
    with tiers.near.lock():
        fetches = tiers._fetches(SentLogs(near, empty))
        assert fetches.fetched_again("step-00000002", or_older=False) is None


def test_a_log_that_could_not_be_fetched_is_not_replaced_by_an_older_one_of_the_disk(near):
    """E01: one failed read, and the next upload put the log that was left behind in its place."""
    far = Unread()
    with CheckpointManager(TwoTiers(near, far)) as manager:
        for step in (1, 2):
            manager.save(at(step))
    log = flight_name(0)
    far.write(log, [b"a" * 200], size_bytes=200)
    near.write(log, [b"a" * 100], size_bytes=100)
    near.delete("step-00000002/")
    far.part = log
    with CheckpointManager(TwoTiers(near, far)) as manager:  # its start has read the log
        far.part = ""
        manager.save(manager.load(LIKE).evolve(trainer=Progress(step=3)))
    assert far.read(log) == b"a" * 200


def test_a_step_that_is_saved_again_replaces_the_one_there(near, far):
    """After a rewind; its files of the earlier revision go."""
    with CheckpointManager(TwoTiers(near, far)) as manager:
        for step in (1, 2, 3):
            manager.save(at(step))
    with CheckpointManager(TwoTiers(near, far)) as manager:
        state = manager.load(LIKE, manager.should_load(LIKE, step=1))
        assert state.trainer.step == 1
        manager.save(at(2))
    assert {name: near.read(f"step-00000002/{name}") for name in near.list("step-00000002")} == {
        name: far.read(f"step-00000002/{name}") for name in far.list("step-00000002")
    }
    assert trainfold.load(far, like=LIKE).trainer.step == 2


def test_another_checkpoint_of_a_step_in_the_far_tier_is_never_overwritten(near, far):
    """Two machines went on from step 1; the second one comes back with its own step 2."""
    with CheckpointManager(TwoTiers(near, far)) as manager:
        manager.save(at(1))
    other = LocalStore(f"{near.url}-other")
    shutil.copytree(near.url, other.url, symlinks=True)
    trainfold.save(at(2, value=7), other)
    trainfold.save(at(3, value=7), other)
    with CheckpointManager(TwoTiers(near, far)) as manager:
        manager.load(LIKE)
        manager.save(at(2))
    before = digest_of(far.read("step-00000002/manifest.json"))
    events = []
    manager = CheckpointManager(TwoTiers(other, far), on_event=events.append)
    assert manager.load(LIKE).trainer.step == 3
    assert [each.step for each in events if each.kind == "not_uploaded"] == [2]
    manager.save(at(4))
    run = LocalStore(f"{near.url}-third")
    shutil.copytree(other.url, run.url, symlinks=True)
    trainfold.save(at(5, value=8), run)
    far.inner.commit("step-00000005/manifest.json", run.read("step-00000005/manifest.json"))  # without the lock
    manager.save(at(5))
    with pytest.raises(
        SaveFailed, match=r"step-00000005 in .*other alone, because of CommitConflict.*new place as far="
    ):
        manager.close()
    assert "it is not tried again" in next(
        each.detail for each in events if each.step == 5 and each.kind == "not_uploaded"
    )
    assert digest_of(far.read("step-00000002/manifest.json")) == before
    assert far.read("step-00000005/manifest.json") == run.read("step-00000005/manifest.json")
    place = MemoryStore()
    with CheckpointManager(TwoTiers(other, place)):
        pass
    assert steps_in(place) == [1, 2, 3, 4, 5], "what the error names helps"


def test_files_have_the_revision_that_the_far_tier_demands(near, far):
    """A late file of a writer that has lost the far tier has the name of no file there."""
    far.least_revision = 2
    with CheckpointManager(TwoTiers(near, far)) as manager:
        manager.save(at(1))
    assert "model-00000-of-00001.r2.safetensors" in far.list("step-00000001")


def test_a_flight_log_and_a_rehearsal_know_the_near_tier_alone(near, far, tmp_path):
    """Nothing of a rehearsal is uploaded."""
    run = TwoTiers(near, far)
    assert file_for_log(run, "a.log") == tmp_path / "near" / "a.log"
    orders = Orders(str(tmp_path), str(tmp_path / "notes"), every=1, steps=2, linger_after=2)
    rehearsal = rehearsal_of({VARIABLE: encode_orders(orders)}, rank=0)
    assert rehearsal.place(run) is near


def test_tiers_of_two_runs_and_places_that_cannot_be_tiers_are_refused(near, far, tmp_path):
    trainfold.save(at(1), near)
    trainfold.save(at(1), far)
    with pytest.raises(CheckpointForeign, match="the far tier of this run"):
        CheckpointManager(TwoTiers(near, far))
    for arguments, given in (
        ((near, near), {}),
        ((near, f"{near.url}/far"), {}),
        ((f"{near.url}/near", near), {}),
        ((MemoryStore(), far), {}),
        ((near, far), {"keep_far": 3}),
        ((near, far), {"most_waiting": 0}),
    ):
        with pytest.raises(InvalidArgument):
            TwoTiers(*arguments, **given)
    other = MemoryStore()
    with other.lock(), pytest.raises(RunLocked):
        CheckpointManager(TwoTiers(tmp_path / "new", other))
