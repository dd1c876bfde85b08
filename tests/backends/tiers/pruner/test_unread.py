"""A checkpoint whose manifest cannot be read may refer to files of any other one, so nothing goes as long as that is not known."""

import errno
import logging
import os
import shutil

import pytest
import torch
from kit.adapters import cli_cases

import trainfold
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.backends.tiers.two_tiers import TwoTiers
from trainfold.core.errors import CheckpointDamaged, CheckpointUnreadable, FutureVersion
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Progress, TrainState

call, answered = cli_cases.call, cli_cases.answered
BASES = {1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1}  # step -> the version of what is reused: 2 and 3 refer to 1, 5 and 6 to 4
THIRD = "step-00000003/manifest.json"


class Failing:
    """A store of which one manifest cannot be read while there is an error."""

    def __init__(self, inner):
        self.inner, self.error = inner, None

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def read(self, name, *, start=0, stop=None):
        if name == THIRD and self.error is not None:
            raise self.error
        return self.inner.read(name, start=start, stop=stop)


def unreadable():
    return CheckpointUnreadable(f"memory://run/{THIRD}", expected="bytes from the store", found="503", fix="try again")


def state_at(step):
    base = torch.full((10_000,), float(BASES.get(step, 1)))
    return TrainState(
        ModelState(Leaves({"base": base, "head": torch.full((3,), float(step))}), Leaves()),
        trainer=Progress(step=step),
    )


def save(store, steps, **options):
    with trainfold.CheckpointManager(store, reuse_unchanged=True, **options) as manager:
        if steps[0] > 1:
            manager.load(state_at(0))
        for step in steps:
            manager.save(state_at(step))


def steps_of(store):
    return [int(name[5:]) for name in store.list() if name.startswith("step-")]


@pytest.mark.parametrize("is_newer", [False, True])
def test_a_manager_deletes_nothing_while_a_manifest_cannot_be_read_and_says_so(caplog, is_newer):
    """E02, E04: step 1 was deleted because step 3, which refers to it, could not be read for a moment; step 3 was lost with it. A disk filled up where a newer release had saved, and only a log said why."""
    store, events = Failing(MemoryStore()), []
    save(store, range(1, 7))
    options = {"keep": trainfold.retention.keep_every(3), "reuse_unchanged": True, "on_event": events.append}
    with trainfold.CheckpointManager(store, **options) as manager:
        manager.load(state_at(0))
        store.error = FutureVersion(THIRD, expected="1", found="9", fix="update") if is_newer else unreadable()
        with caplog.at_level(logging.WARNING, logger="trainfold"):
            manager.save(state_at(7))
        assert steps_of(store) == [1, 2, 3, 4, 5, 6, 7]
        assert "old checkpoints could not be deleted, and will be tried again" in caplog.text
        (event,) = [each for each in events if each.kind == "not_pruned"]
        assert (event.run, event.step, event.checkpoint) == (store.url, 7, None)
        assert "step-00000003 may refer to files of the others" in event.detail
        store.error = None
        manager.save(state_at(8))
    assert steps_of(store) == [1, 3, 4, 6, 8]
    assert trainfold.load(store, like=state_at(0), step=3).trainer.step == 3


def test_what_keeps_the_far_tier_from_deleting_is_an_event_too(tmp_path):
    """E02: `keep_far` deletes nothing as long as one manifest there cannot be read."""
    far, events = Failing(MemoryStore()), []
    run = TwoTiers(tmp_path / "near", far, keep_far=trainfold.retention.keep_last(1))
    with trainfold.CheckpointManager(run, on_event=events.append) as manager:
        for step in (3, 4, 5):
            manager.save(state_at(step))
            run.wait()
            far.error = unreadable()
    (event,) = [each for each in events if each.kind == "not_pruned"]
    assert (event.run, event.step) == (far.url, 5)
    assert "503" in event.detail
    assert steps_of(far) == [3, 4, 5]


@pytest.fixture
def run(tmp_path):
    save(LocalStore(tmp_path / "a"), range(1, 7))
    return tmp_path / "a"


def fail(monkeypatch, error):
    read = LocalStore.read

    def reads(store, name, *, start=0, stop=None):
        if name == THIRD:
            raise error
        return read(store, name, start=start, stop=stop)

    monkeypatch.setattr(LocalStore, "read", reads)


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--flatten"]])
def test_prune_deletes_nothing_names_the_manifest_and_ends_with_its_exit_code(run, answered, monkeypatch, options):
    """E02, R09: and the rows say of each checkpoint why it is still there."""
    fail(monkeypatch, unreadable())
    found, error = answered("prune", run, "--keep-every", "3", *options, code=CheckpointUnreadable.exit_code)
    assert found["deleted"] == found["torn"] == found["leftovers"] == found["flattened"] == []
    alone = {each["name"]: each["why"] for each in found["left_alone"]}
    assert alone["step-00000001"] == "would go, but step-00000003 cannot be read now, and may refer to its files"
    assert error["where"].endswith(THIRD)
    assert error["fix"].startswith(
        "try again; nothing was deleted, because step-00000003 may refer to files of the others"
    )
    assert steps_of(LocalStore(run)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_prune_on_a_disk_that_does_not_give_a_manifest_deletes_nothing_and_says_why(run, answered, monkeypatch, code):
    """E02, R09: it was a traceback."""
    fail(monkeypatch, OSError(code, os.strerror(code), str(run / THIRD)))
    _, error = answered("prune", run, "--keep-every", "3", code=CheckpointUnreadable.exit_code)
    assert os.strerror(code) in error["found"]
    assert THIRD in error["found"]
    assert steps_of(LocalStore(run)) == [1, 2, 3, 4, 5, 6]


def test_a_manifest_with_wrong_bytes_holds_everything_back_only_where_checkpoints_refer_to_others(
    run, answered, tmp_path
):
    """E01, E02: what it referred to is kept for the day on which a copy of it is put back. Elsewhere it neither counts nor protects."""
    (run / THIRD).write_bytes(b"\0" * 5_000)
    _, error = answered("prune", run, "--keep-last", "1", code=15)
    assert f"if it is lost for good, delete {THIRD}" in error["fix"]
    assert steps_of(LocalStore(run)) == [1, 2, 3, 4, 5, 6]
    other = tmp_path / "b"
    for step in range(1, 7):
        trainfold.save(state_at(step), other)
    (other / THIRD).write_bytes(b"\0" * 5_000)
    answered("prune", other, "--keep-last", "1")
    assert steps_of(LocalStore(other)) == [3, 6]


def test_who_deletes_what_the_error_says_loses_no_other_checkpoint(run, answered):
    """E02: it named the directory, to whose files others refer: all of those were lost."""
    first = run / "step-00000004" / "manifest.json"
    first.write_bytes(b"\0" * 5_000)
    _, error = answered("prune", run, "--keep-last", "1", code=15)
    (run / error["fix"].rpartition("delete ")[2].partition(",")[0]).unlink()
    assert not first.exists()
    answered("prune", run, "--keep-last", "1")
    assert steps_of(LocalStore(run)) == [4, 6], "6 refers to files of 4"
    assert trainfold.load(run, like=state_at(0)).trainer.step == 6


def test_a_manifest_of_a_newer_trainfold_holds_everything_back(run, answered):
    """E02: an older release cannot know to what it refers."""
    text = (run / THIRD).read_bytes()
    (run / THIRD).write_bytes(text.replace(b'"schema_version":4', b'"schema_version":99'))
    answered("prune", run, "--keep-last", "1", code=16)
    assert steps_of(LocalStore(run)) == [1, 2, 3, 4, 5, 6]


def test_files_of_an_earlier_revision_stay_while_a_manifest_cannot_be_read(run, answered, monkeypatch):
    """E02: step 1 is saved again, and step 3 refers to its old files."""
    shutil.rmtree(run / "step-00000002")  # which refers to them too
    fail(monkeypatch, unreadable())
    trainfold.save(state_at(1), run)
    monkeypatch.undo()
    assert trainfold.load(run, like=state_at(0), step=3).trainer.step == 3
    _, error = answered("verify", run / "step-00000003")
    assert error is None


def test_the_damage_of_a_checkpoint_itself_protects_nothing(run, answered):
    """E01: its first line says to what it refers, and that counts."""
    data = bytearray((run / THIRD).read_bytes())
    data[-40] ^= 1
    (run / THIRD).write_bytes(bytes(data))
    answered("verify", run / "step-00000003", code=CheckpointDamaged.exit_code)
    answered("prune", run, "--keep-last", "1")
    assert steps_of(LocalStore(run)) == [1, 3, 4, 6]
