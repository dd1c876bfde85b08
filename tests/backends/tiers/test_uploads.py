"""What waits for its upload is given up only where another try would fail in the same way; and the best is in the far tier too."""

import errno
import os
import shutil
import threading
from functools import partial
from pathlib import Path

import pytest
from kit.adapters.cli_cases import flip
from kit.backends.runs_cases import state_at
from kit.backends.tier_cases import until

import trainfold
from trainfold import CheckpointManager, SaveFailed
from trainfold.backends.runs.best.best_file import BestIgnored
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.runs.quarantine_file import end_attempt, quarantined
from trainfold.backends.stores import os_errors
from trainfold.backends.stores.memory import MemoryStore
from trainfold.backends.tiers import uploads
from trainfold.backends.tiers.two_tiers import TwoTiers
from trainfold.core.best.top_n import BestEntry
from trainfold.core.errors import CheckpointDamaged
from trainfold.core.format.sealed_json import SealedJson
from trainfold.core.history.quarantine import outcome_of
from trainfold.retention import keep_last, load_best_n, make_best_record, save_best, updated

WANTED = make_best_record(metric="loss", direction="min")


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.ESTALE])
def test_what_the_disk_does_not_give_for_a_while_is_uploaded_when_it_does(tmp_path, monkeypatch, code):
    """E01: it was taken for lost there, and given up: nothing kept it on the disk, and it was never in the far tier."""
    monkeypatch.setattr(uploads, "_FIRST_PAUSE_SECS", 0.001)
    far, events, failed = MemoryStore(), [], []
    pread = os.pread

    def read(fd, *more):
        if len(failed) < 6 and "model-" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            failed.append(fd)
            raise OSError(code, os.strerror(code))
        return pread(fd, *more)

    monkeypatch.setattr(os, "pread", read)
    run = TwoTiers(tmp_path / "near", far)
    with CheckpointManager(run, on_event=events.append) as manager:
        manager.save(state_at(1))
        until(lambda: not run.waiting)  # at its end a run tries only once more
    assert len(failed) == 6
    assert [each.kind for each in events if each.kind == "uploaded"] == ["uploaded"]
    assert all("tried again" in each.detail for each in events if each.kind == "not_uploaded")
    assert trainfold.load(far, like=state_at(0)).trainer.step == 1


class Slow(MemoryStore):
    """A far tier that takes nothing while its gate is closed."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()

    def write(self, name, parts, *, size_bytes):
        self.gate.wait(20)
        super().write(name, parts, size_bytes=size_bytes)


def test_the_far_tier_keeps_a_best_whose_record_still_waits(tmp_path):
    """E02: `best.json` is sent after each checkpoint that waits; a best that it did not name yet was deleted there, and then the file was never sent."""
    far = Slow()
    run = TwoTiers(tmp_path / "near", far, keep_far=keep_last(1))
    with CheckpointManager(run, keep_last=1) as manager:
        manager.save(state_at(1))
        best = save_best(run, updated(WANTED, {"loss": 0.1}, step=1), kept=[BestEntry(0.1, 1)])
        for step in (2, 3):
            manager.save(state_at(step))
        save_best(run, best, kept=[BestEntry(0.1, 1), BestEntry(0.2, 3)])
        manager.save(state_at(4))
        far.gate.set()
    assert [entry.step for entry in load_best_n(far, WANTED)] == [1, 3]
    assert [name for name in far.list() if name.startswith("step-")] == [f"step-0000000{step}" for step in (1, 3, 4)]


def test_a_checkpoint_that_proves_the_best_late_is_sent_again(tmp_path):
    """E02: it was evaluated when `keep_far` had deleted it in the far tier, where the best stayed an older one without a word."""
    far, events = MemoryStore(), []
    run = TwoTiers(tmp_path / "near", far, keep_far=keep_last(1))
    with CheckpointManager(run, keep_last=3, on_event=events.append) as manager:
        for step in (1, 2, 3):
            manager.save(state_at(step))
            run.wait()
        assert [name for name in far.list() if name.startswith("step-")] == ["step-00000003"]
        save_best(run, updated(WANTED, {"loss": 0.1}, step=2))
        manager.save(state_at(4))
    assert [name for name in far.list() if name.startswith("step-")] == ["step-00000002", "step-00000004"]
    assert [entry.step for entry in load_best_n(far, WANTED)] == [2]
    assert trainfold.load(far, like=state_at(0)).trainer.step == 4
    assert [each.step for each in events if each.kind == "uploaded"] == [1, 2, 3, 2, 4]


def trained_until(near, far, last, *, damaged):
    """Save steps, one of which a fault of the disk changes before it is sent."""
    with CheckpointManager(TwoTiers(near, far)) as manager:
        for step in range(1, last + 1):
            manager.save(state_at(step))
        flip(next((near / f"step-0000000{damaged}").glob("model-*")))
        far.gate.set()


def test_of_what_the_disk_has_not_whole_the_error_names_what_helps(tmp_path):
    """E01: it said to start again, or to copy: neither sends a damaged checkpoint, and a run that was over was to be started for nothing."""
    far, near = Slow(), tmp_path / "near"
    with pytest.raises(SaveFailed, match=r"step-00000002 in .*near alone") as failed:
        trained_until(near, far, 3, damaged=2)
    assert "check the disk" in failed.value.fix
    assert "no more is needed" in failed.value.fix
    assert "trainfold copy" not in failed.value.fix
    assert trainfold.load(far, like=state_at(0)).trainer.step == 3, "a newer one was sent"
    with CheckpointManager(TwoTiers(near, far)) as manager:
        assert manager.load(state_at(0)).trainer.step == 3


def test_a_start_after_a_damaged_newest_was_not_sent_trains_it_again(tmp_path):
    """The other half of what the error says, so that following it helps."""
    far, near = Slow(), tmp_path / "near"
    with pytest.raises(SaveFailed, match="step-00000002") as failed:
        trained_until(near, far, 2, damaged=2)
    assert "else start the program again" in failed.value.fix
    with CheckpointManager(TwoTiers(near, far)) as manager:
        with pytest.warns(CheckpointPassedOver):
            assert manager.load(state_at(0)).trainer.step == 1
        manager.save(state_at(2))
    assert trainfold.load(far, like=state_at(0)).trainer.step == 2


def sealed(**more):
    """Bytes of a `best.json` of a newer release, of another program, or that no release writes."""
    given = {"format_name": "trainfold-best", "version": 2} | more
    return SealedJson(given["format_name"], given["version"], 1 << 16, "-").encode({"a": 1}, version=given["version"])


@pytest.mark.parametrize(
    "data",
    [sealed(version=99), sealed(format_name="other"), sealed(), b'{"loss": 0.5}\n'],
    ids=["newer release", "foreign", "hostile", "own"],
)
def test_a_best_that_cannot_be_read_keeps_no_checkpoint_waiting_and_fails_no_end(tmp_path, data):
    """It stayed at the head of what is sent, with growing pauses, and each end said that what the far tier had was on the disk alone."""
    far, near, events = MemoryStore(), tmp_path / "near", []
    with CheckpointManager(TwoTiers(near, far)) as manager:
        manager.save(state_at(1))
    (near / "best.json").write_bytes(data)
    run = TwoTiers(near, far)
    with CheckpointManager(run, on_event=events.append) as manager:
        assert manager.load(state_at(0)).trainer.step == 1
        manager.save(state_at(2))
        until(lambda: not run.waiting)
        manager.save(state_at(3))
    assert [each.step for each in events if each.kind == "uploaded"] == [2, 3]
    (told,) = [each for each in events if each.kind == "not_uploaded"]
    assert told.checkpoint == "best.json"
    assert "tried again" not in told.detail
    assert far.size("best.json") is None


@pytest.mark.parametrize("tier", ["near", "far"])
def test_a_best_that_a_disk_has_lost_keeps_no_checkpoint_from_the_far_tier(tmp_path, monkeypatch, tier):
    """E01: it was read with each checkpoint, which was given up for it: none came into the far tier any more; and no start came past it."""
    near, far, events = tmp_path / "near", tmp_path / "far", []
    with CheckpointManager(TwoTiers(near, far)) as manager:
        manager.save(state_at(1))
    for place in (near, far):
        save_best(place, updated(WANTED, {"loss": 0.1 if place == near else 0.2}, step=1))
    pread, lost = os.pread, str(tmp_path / tier / "best.json")

    def read(fd, *more):
        if str(Path(f"/proc/self/fd/{fd}").readlink()) == lost:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, *more)

    monkeypatch.setattr(os, "pread", read)
    monkeypatch.setattr(os_errors, "is_own_disk", lambda _: True)
    with CheckpointManager(TwoTiers(near, far), on_event=events.append) as manager:
        assert manager.load(state_at(0)).trainer.step == 1
        for step in (2, 3):
            manager.save(state_at(step))
    assert [each.step for each in events if each.kind == "uploaded"] == [2, 3]
    (told,) = [each for each in events if each.kind == "not_uploaded"]
    assert told.checkpoint == "best.json"
    assert f"{lost}: expected a file that can be read" in told.detail
    assert trainfold.load(far, like=state_at(0)).trainer.step == 3


@pytest.fixture
def late_best(tmp_path):
    """A run of three steps, of which the far tier keeps the last; and a way to save 1 and 2 as its best."""
    far, events = MemoryStore(), []
    run = TwoTiers(tmp_path / "near", far, keep_far=keep_last(1))
    manager = CheckpointManager(run, on_event=events.append)
    for step in (1, 2, 3):
        manager.save(state_at(step))
        run.wait()
    events.clear()
    save = partial(save_best, run, updated(WANTED, {"loss": 0.1}, step=2), kept=[BestEntry(0.1, 2), BestEntry(0.2, 1)])
    yield run, manager, events, save
    manager.close()


@pytest.fixture
def gate(monkeypatch):
    """Nothing is sent before it is set."""
    gate, send = threading.Event(), uploads.Uploads._send
    monkeypatch.setattr(uploads.Uploads, "_send", lambda *given: gate.wait(20) and send(*given))
    return gate


@pytest.fixture
def denied(monkeypatch):
    """A list of paths, which are not read while they are in it; and of the tries to read them."""
    pread, denied, tries = os.pread, [], []

    def read(fd, *more):
        if str(Path(f"/proc/self/fd/{fd}").readlink()) in denied:
            tries.append(fd)
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return pread(fd, *more)

    monkeypatch.setattr(os, "pread", read)
    return denied, tries


def file_of(run, step):
    return next((Path(run.near.url) / f"step-0000000{step}").glob("model-*"))


def unsent(events):
    return [(each.checkpoint, each.detail) for each in events if each.kind == "not_uploaded"]


@pytest.mark.parametrize("is_gone", [True, False], ids=["file gone", "wrong bytes"])
def test_a_best_that_neither_tier_has_whole_is_told_once_and_the_advice_helps(late_best, gate, is_gone):
    """E01: nothing said that the record was not sent; or each end said to start again, and each start ended in the same way."""
    run, manager, events, save = late_best
    save()
    lost = file_of(run, 1)
    lost.unlink() if is_gone else flip(lost)
    gate.set()
    for step in (4, 5):
        manager.save(state_at(step))
    with pytest.raises(SaveFailed, match=r"step-00000001 in .*near alone") as failed:
        run.wait()
    ((told, detail),) = unsent(events)
    assert told == "step-00000001"
    assert "delete its manifest" in detail
    assert "delete its manifest" in failed.value.fix
    assert "start the program again" not in failed.value.fix
    assert run.far.size("step-00000002/manifest.json") is not None, "the other one is sent"
    assert run.far.size("best.json") is None
    (lost.parent / "manifest.json").unlink()
    manager.close()
    with CheckpointManager(run) as again:  # as it was advised
        assert again.load(state_at(0)).trainer.step == 5
        with pytest.warns(BestIgnored):
            best = load_best_n(run, WANTED)
        save_best(run, updated(WANTED, {"loss": 0.1}, step=2), kept=best)
    assert [entry.step for entry in load_best_n(run.far, WANTED)] == [2]


def test_a_best_with_wrong_bytes_fails_each_end_until_it_is_put_back_or_given_up(late_best, tmp_path):
    """It is on the disk alone, as far as it is there; a new save of what the best names ends it too."""
    run, manager, _, save = late_best
    whole = file_of(run, 1).read_bytes()
    flip(file_of(run, 1))
    save()
    with pytest.raises(SaveFailed, match="step-00000001"):
        manager.close()
    for mended in (False, True):
        if mended:
            file_of(run, 1).write_bytes(whole)
        again = CheckpointManager(TwoTiers(tmp_path / "near", run.far))
        if mended:
            again.close()
        else:
            with pytest.raises(SaveFailed, match="step-00000001"):
                again.close()
    assert [entry.step for entry in load_best_n(run.far, WANTED)] == [2, 1]


def test_a_best_that_was_given_up_is_forgotten_when_it_is_no_best_any_more(late_best):
    """An end would name what no record names."""
    run, manager, events, save = late_best
    flip(file_of(run, 1))
    save()
    until(lambda: manager.poll() or unsent(events))  # which reports them
    save_best(run, updated(WANTED, {"loss": 0.1}, step=2), kept=[BestEntry(0.1, 2)])
    run.wait()
    assert len(unsent(events)) == 1
    assert [entry.step for entry in load_best_n(run.far, WANTED)] == [2]


def test_a_best_of_which_the_far_tier_has_another_timeline_and_the_disk_nothing_is_told_and_fails_no_end(tmp_path):
    """Nothing is on the disk alone but the record, which was not sent, and nothing reported it."""
    far, near, events = MemoryStore(), tmp_path / "near", []
    with CheckpointManager(TwoTiers(near, far)) as manager:
        for step in (1, 2):
            manager.save(state_at(step))
    with CheckpointManager(near) as manager:
        manager.load(state_at(0), manager.should_load(state_at(0), step=1))
        for step in (2, 3):
            manager.save(state_at(step))
    save_best(near, updated(WANTED, {"loss": 0.1}, step=2))
    shutil.rmtree(near / "step-00000002")
    with CheckpointManager(TwoTiers(near, far), on_event=events.append) as manager:
        assert manager.load(state_at(0)).trainer.step == 3
        manager.save(state_at(4))
    ((told, detail),) = unsent(events)
    assert told == "step-00000002"
    assert "neither tier has it" in detail
    assert far.size("best.json") is None


def test_a_best_that_a_rewind_has_left_behind_is_not_told(tmp_path):
    """Its record is of no use in the far tier, and the run is healthy."""
    far, near, events = MemoryStore(), tmp_path / "near", []
    run = TwoTiers(near, far, keep_far=keep_last(1))
    with CheckpointManager(run) as manager:
        for step in (1, 2, 3):
            manager.save(state_at(step))
    save_best(near, updated(WANTED, {"loss": 0.1}, step=2))
    with CheckpointManager(near) as manager:
        manager.load(state_at(0), manager.should_load(state_at(0), step=1))
        manager.save(state_at(4))
    with CheckpointManager(run, on_event=events.append) as manager:
        manager.load(state_at(0))
        manager.save(state_at(5))
    assert unsent(events) == []
    assert trainfold.load(far, like=state_at(0)).trainer.step == 5


def test_a_best_in_quarantine_in_the_far_tier_is_sent_again(tmp_path):
    """Its manifest was there, so that it was not sent; and the record not without it, and nothing reported it."""
    far, events = MemoryStore(), []
    run = TwoTiers(tmp_path / "near", far)
    with CheckpointManager(run, on_event=events.append) as manager:
        for step in (1, 2):
            manager.save(state_at(step))
        run.wait()
        end_attempt(far, "step-00000001", outcome_of(CheckpointDamaged("x", expected="a", found="b", fix="c")))
        save_best(run, updated(WANTED, {"loss": 0.1}, step=1))
    assert unsent(events) == []
    assert far.size("best.json") is not None
    assert quarantined(far) == {}


def test_a_best_that_cannot_be_read_now_keeps_no_new_checkpoint_waiting(late_best, gate, denied):
    """It was tried again before all that came after it, with growing pauses; the checkpoints were on the disk alone meanwhile."""
    (run, manager, _, save), (denied, _) = late_best, denied
    save()
    denied.append(str(file_of(run, 1)))
    manager.save(state_at(4))
    gate.set()
    until(lambda: not run.waiting)
    denied.clear()
    run.wait()
    assert [entry.step for entry in load_best_n(run.far, WANTED)] == [2, 1]


def test_a_best_that_neither_tier_has_is_told_once_while_another_one_cannot_be_read(
    late_best, gate, denied, monkeypatch
):
    """Each try for the other one reported it again."""
    monkeypatch.setattr(uploads, "_FIRST_PAUSE_SECS", 0.001)
    (run, manager, events, save), (denied, tries) = late_best, denied
    save()
    shutil.rmtree(file_of(run, 2).parent)
    denied.append(str(file_of(run, 1)))
    gate.set()
    until(lambda: len(tries) >= 4)
    denied.clear()
    run.wait()
    manager.close()
    assert len(tries) >= 4
    assert [name for name, detail in unsent(events) if "neither tier has it" in detail] == ["step-00000002"]
    assert run.far.size("step-00000001/manifest.json") is not None


def test_what_is_added_while_another_thread_waits_has_been_tried(tmp_path):
    """The end of a wait between what is added and its thread was an `AssertionError`: it waited, and had not failed."""
    near = MemoryStore()
    with CheckpointManager(near) as manager:
        for step in (1, 2, 3):
            manager.save(state_at(step))
    waited = []

    def report(event):
        if event.kind == "not_uploaded":  # one that is given up for newer ones
            waited.append(sends.wait())

    sends = uploads.Uploads(near, MemoryStore(), keep=None, most_waiting=1, report=report)
    sends.add(*(f"step-0000000{step}" for step in (1, 2, 3)))
    assert waited == [None]
    assert sends.waiting == ()


def test_a_fault_of_the_uploads_themselves_is_raised_where_they_are_waited_for(tmp_path, monkeypatch):
    """It ended their thread, and each wait went on for good."""
    near = MemoryStore()
    with CheckpointManager(near) as manager:
        manager.save(state_at(1))
    monkeypatch.setattr(uploads, "planned_copy", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(uploads.Uploads, "_gives_up", lambda *_: {}["fault"])
    sends = uploads.Uploads(near, MemoryStore(), keep=None, most_waiting=None, report=lambda _: None)
    sends.add("step-00000001")
    with pytest.raises(SaveFailed, match="KeyError: 'fault'"):
        sends.wait()
