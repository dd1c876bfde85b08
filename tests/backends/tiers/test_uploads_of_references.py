"""What refers to files of a checkpoint that is not whole keeps nothing else from the far tier, and what is said of it loses nothing."""

import re
import threading

import pytest
import torch
from kit.adapters.cli_cases import flip
from kit.backends.tier_cases import until

import trainfold
from trainfold import CheckpointManager, SaveFailed
from trainfold.adapters.cli import main
from trainfold.backends.runs.quarantine_file import begin_attempt, end_attempt
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.backends.tiers import uploads
from trainfold.backends.tiers.two_tiers import TwoTiers
from trainfold.core.best.top_n import BestEntry
from trainfold.core.errors import CheckpointQuarantined
from trainfold.core.history.quarantine import LoadOutcome
from trainfold.retention import keep_last, load_best, make_best_record, save_best, updated

WANTED = make_best_record(metric="loss", direction="min")
passed_over = pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.CheckpointPassedOver")  # at each start


@pytest.fixture
def live():
    return trainfold.attach(torch.nn.Linear(1, 1), extra={"frozen": torch.nn.Linear(128, 128).requires_grad_(False)})


def saved(live, run, count, *, events=None, reuses=True):
    """Go on from where a run is, and save some steps, all but the first of which refer to files of it."""
    report = None if events is None else events.append
    with CheckpointManager(run, mode="sync", reuse_unchanged=reuses, on_event=report) as manager:
        manager.restore(live)
        for _ in range(count):
            live.advance(samples=1)
            manager.save(live)


def steps_in(store):
    return [int(name[5:]) for name in store.list() if name.startswith("step-")]


def file_of(near, step):
    return next((near / f"step-0000000{step}").glob("model-*"))


def lose(near, loss):
    """Lose the first checkpoint of a run, or what makes it one."""
    manifest, file = near / "step-00000001" / "manifest.json", file_of(near, 1)
    if loss == "quarantine":
        begin_attempt(LocalStore(near), "step-00000001")
        end_attempt(LocalStore(near), "step-00000001", LoadOutcome("damaged", "its digest is another one"))
    elif loss.startswith("no "):
        (manifest if loss == "no manifest" else file).unlink()
    elif loss == "wrong bytes":
        flip(file)
    else:
        manifest.write_bytes(MANIFESTS[loss])


MANIFESTS = {"empty": b"", "zeros": bytes(100), "foreign": b'{"a": 1}\n', "cut": b'{"format'}


@passed_over
@pytest.mark.parametrize("loss", ["no manifest", *MANIFESTS, "quarantine"])
def test_one_that_refers_to_files_of_a_lost_checkpoint_keeps_no_newer_one_waiting(live, tmp_path, loss):
    """E01: with `reuse_unchanged` each save went on referring to them, so that none was ever sent, and each end said to start again."""
    far, near = MemoryStore(), tmp_path / "near"
    saved(live, near, 2)
    lose(near, loss)
    with pytest.raises(SaveFailed, match=r"step-00000002.* in .*near alone") as failed:
        saved(live, TwoTiers(near, far), 2, reuses=False)
    assert "no more is needed" in failed.value.fix
    assert steps_in(far) == [3, 4]
    assert trainfold.load(far, like=live.capture()).trainer.step == 4


def test_a_save_does_not_refer_to_a_checkpoint_without_a_manifest(live, tmp_path):
    """E01: so that what comes after a loss can be sent."""
    far, near = MemoryStore(), tmp_path / "near"
    saved(live, near, 2)
    lose(near, "no manifest")
    with pytest.raises(SaveFailed, match="found step-00000002 in"):
        saved(live, TwoTiers(near, far), 2)
    assert steps_in(far) == [3, 4]


class Busy(MemoryStore):
    """A far tier that does not take so many files of checkpoints."""

    refuses = 0

    def write(self, name, parts, *, size_bytes):
        if self.refuses and name.startswith("step-"):
            self.refuses -= 1
            raise SaveFailed(self.url, expected="an answer", found="503", fix="wait")
        super().write(name, parts, size_bytes=size_bytes)


def test_what_the_far_tier_has_is_not_needed_of_the_disk_when_a_try_fails(live, tmp_path, monkeypatch):
    """E01: after one failure of the far tier a whole checkpoint was given up for a file of another one, which the far tier had."""
    monkeypatch.setattr(uploads, "_FIRST_PAUSE_SECS", 0.001)
    far, near = Busy(), tmp_path / "near"
    run = TwoTiers(near, far)
    saved(live, run, 2)
    file_of(near, 1).unlink()
    with CheckpointManager(run, mode="sync", reuse_unchanged=True) as manager:
        manager.restore(live)
        live.advance(samples=1)
        far.refuses = 1
        manager.save(live)
        until(lambda: not run.waiting)
    assert not far.refuses
    assert steps_in(far) == [1, 2, 3]


@passed_over
@pytest.mark.parametrize("loss", ["wrong bytes", "no file", "no manifest", "empty", "foreign"])
def test_a_whole_best_that_refers_to_a_lost_one_is_not_said_to_be_deleted(live, tmp_path, capsys, loss):
    """E02: the advice was to delete the manifest of a best that the disk has whole; and one such best kept the others and the record from the far tier."""
    far, near, events = MemoryStore(), tmp_path / "near", []
    saved(live, near, 2)
    saved(live, near, 1, reuses=False)
    lose(near, loss)
    run = TwoTiers(near, far, keep_far=keep_last(1))
    with pytest.raises(SaveFailed):
        saved(live, run, 1, reuses=False)  # 2 cannot be sent, whether it is the best or not
    best = updated(WANTED, {"loss": 0.1}, step=2)
    save_best(near, best, kept=[BestEntry(0.1, 2), BestEntry(0.2, 3)])
    with pytest.raises(SaveFailed, match=r"step-00000002 in .*near alone"):
        saved(live, run, 1, events=events, reuses=False)
    assert steps_in(far) == [3, 5], "the other best, and the newest"
    told = [each.detail for each in events if each.kind == "not_uploaded" and each.step == 2]
    assert not [detail for detail in told if "neither tier has it whole" in detail]
    assert load_best(near, WANTED).step == 2
    (advice,) = {found for detail in told for found in re.findall(r"trainfold (prune RUN [^,]*--flatten)", detail)}
    main([str(near) if word == "RUN" else word for word in advice.split()])
    capsys.readouterr()
    saved(live, run, 1, reuses=False)
    assert load_best(far, WANTED).step == 2


def test_one_that_was_given_up_is_not_forgotten_when_it_was_a_best_for_a_while(live, tmp_path):
    """E01: the end of the run went well, and a checkpoint was on the disk alone."""
    far, near = MemoryStore(), tmp_path / "near"
    saved(live, near, 3, reuses=False)
    flip(file_of(near, 2))
    run = TwoTiers(near, far)
    manager = CheckpointManager(run, mode="sync")
    manager.restore(live)
    for best in (2, 3):
        until(lambda: not run.waiting)
        save_best(run, updated(WANTED, {"loss": 0.3 - best / 10}, step=best))
    with pytest.raises(SaveFailed, match="step-00000002"):
        manager.close()


def test_one_that_is_being_loaded_is_not_given_up(live, tmp_path, monkeypatch):
    """E01: after two processes had died in loading it, it was in quarantine while the third one did; it was given up, and `keep_last` could delete it on the disk."""
    monkeypatch.setattr(uploads, "_FIRST_PAUSE_SECS", 0.001)
    tried, gives_up = [], uploads.Uploads._gives_up
    monkeypatch.setattr(
        uploads.Uploads, "_gives_up", lambda self, *given: tried.append(type(given[-1])) or gives_up(self, *given)
    )
    far, near, opened = Busy(), tmp_path / "near", LocalStore.opened
    saved(live, near, 2, reuses=False)
    for _ in range(2):
        begin_attempt(LocalStore(near), "step-00000002")

    def slowly(store, name):
        if threading.current_thread() is threading.main_thread() and name.startswith("step-00000002/model"):
            far.refuses = 0
            until(lambda: CheckpointQuarantined in tried)
        return opened(store, name)

    far.refuses = 10**6
    monkeypatch.setattr(LocalStore, "opened", slowly)
    saved(live, TwoTiers(near, far), 0)
    assert CheckpointQuarantined in tried
    assert steps_in(far) == [1, 2]


def test_a_best_in_quarantine_for_deaths_is_not_said_to_be_lost(live, tmp_path):
    """E02: its bytes may be whole, and the advice was to delete its manifest; a load of it by its step ends the quarantine."""
    far, near, events = MemoryStore(), tmp_path / "near", []
    saved(live, near, 3, reuses=False)
    run = TwoTiers(near, far, keep_far=keep_last(1))
    saved(live, run, 0)
    save_best(near, updated(WANTED, {"loss": 0.1}, step=2))
    for _ in range(3):
        begin_attempt(LocalStore(near), "step-00000002")
    with pytest.raises(SaveFailed, match="ask for it with step=2"):
        saved(live, run, 0, events=events)
    assert not [each for each in events if "neither tier" in str(each.detail)]
    with CheckpointManager(near) as manager:
        manager.restore(live, step=2)
    saved(live, run, 0)
    assert load_best(far, WANTED).step == 2
