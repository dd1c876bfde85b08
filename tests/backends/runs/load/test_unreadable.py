"""Which checkpoint is resumed if some are damaged, and others cannot be read now: the newest that can be had, or none."""

import errno
import itertools
import os
import re
import warnings
from collections import Counter
from contextlib import contextmanager, suppress
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kit.backends.runs_cases import saved_run, state_at

import trainfold
from trainfold import CheckpointManager, Progress
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores import local, os_errors, staged_files
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import (
    CheckpointMissing,
    CheckpointUnreadable,
    HalfRestored,
    ResumeRefused,
    RunNotRestored,
    SaveFailed,
    TrainfoldError,
)
from trainfold.core.format.file_names import MANIFEST, step_of
from trainfold.core.format.manifest import HEAD_BYTES
from trainfold.core.history.inventory import lineage
from trainfold.core.history.quarantine_json import QUARANTINE_FILE

STEPS = (2, 4, 6)
PLACES = ("first line", "manifest", "length of a header", "tensors")
WHOLE = saved_run(*STEPS)


class Faulty:
    """A run of which some checkpoints have wrong bytes at one place, and others cannot be read there."""

    def __init__(self, faults, *, inner=WHOLE, has_hint=True):
        self.inner, self.faults, self.has_hint, self.tried = inner, faults, has_hint, Counter()

    def __getattr__(self, verb):
        return getattr(self.inner, verb)

    def committed_at(self, name):
        return float(step_of(name.partition("/")[0]))

    def pointers(self):
        return self.inner.pointers() if self.has_hint else {}

    def read(self, name, *, start=0, stop=None):
        data = bytearray(self.inner.read(name, start=start, stop=stop))
        if name.endswith(MANIFEST):
            place = "first line" if stop == HEAD_BYTES else "manifest"
        else:
            place = "length of a header" if stop == 8 else "header"
        return bytes(self._met(name, place, data))

    def read_into(self, name, buffer, *, start=0):
        self.inner.read_into(name, buffer, start=start)
        self._met(name, "tensors", buffer)

    def _met(self, name, place, data):
        kind, where = self.faults.get(step_of(name.partition("/")[0]), (None, None))
        if where == place and kind == "unreadable":
            raise CheckpointUnreadable(
                f"{self.url}/{name}", expected="bytes from the store", found="503", fix="try again"
            )
        if where == place and kind == "damaged" and len(data):
            data[1 if place == "first line" else len(data) // 2] ^= 0x10
        return data


def resumed(faults, has_hint):
    """The law: the step that is resumed, or those for which the resume is refused; with none if none can be used."""
    unread = [
        step for step in STEPS if faults.get(step) == ("unreadable", "first line")
    ]  # of each, not even that it is older
    for step in reversed(STEPS):
        kind, _ = faults.get(step, (None, None))
        if kind == "unreadable":
            return "refused", [step] if has_hint else [step, *unread]
        if kind is None:
            return ("resumed", step) if has_hint or not unread else ("refused", unread)
    return "refused", []


FAULTS = st.dictionaries(
    st.sampled_from(STEPS), st.tuples(st.sampled_from(["damaged", "unreadable"]), st.sampled_from(PLACES))
)


@given(FAULTS, st.booleans())
@example({6: ("unreadable", "tensors")}, True)
@example({6: ("unreadable", "length of a header")}, True)
@example({6: ("damaged", "tensors"), 4: ("unreadable", "first line")}, True)
@example({6: ("unreadable", "tensors"), 4: ("damaged", "tensors")}, True)
@example({6: ("unreadable", "first line"), 4: ("damaged", "tensors"), 2: ("damaged", "tensors")}, True)
def test_a_resume_takes_the_newest_that_is_not_damaged_or_is_refused(faults, has_hint):
    """E01, P07: an older checkpoint is taken only for one that is proved bad."""
    what, steps = resumed(faults, has_hint)
    store = Faulty(faults, has_hint=has_hint)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointPassedOver)
        if what == "resumed":
            assert trainfold.load(store, like=state_at(0)).trainer.step == steps
            return
        with pytest.raises(ResumeRefused) as refused:
            trainfold.load(store, like=state_at(0))
    reasons = refused.value.refusal.reasons
    named = [step_of(each.where.split("/")[1]) for each in reasons if each.error == "CheckpointUnreadable"]
    assert set(named) & set(steps) if steps else not named
    assert not refused.value.refusal.finds_nothing, "a program would start from scratch"


def outcome_of(store, world):
    """What a rank has loaded, or the name of its error; the same store can be read by the other rank."""
    try:
        return trainfold.load(store, like=state_at(0), collectives=world).trainer.step
    except TrainfoldError as error:
        return f"{type(error).__name__} of 503" if "503" in str(error) else str(error)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bad", [0, 1])
def test_no_rank_goes_on_from_an_older_one_where_another_cannot_read(place, bad):
    """V05: all ranks load the newest, or all raise."""
    stores = [Faulty({6: ("unreadable", place)} if rank == bad else {}) for rank in (0, 1)]
    found = run_threads(2, lambda world: outcome_of(stores[world.rank], world))
    assert found == [6, 6] if place == "first line" and bad else all(str(each).endswith(" of 503") for each in found)
    if place in ("length of a header", "tensors"):
        assert found == ["ResumeRefused of 503"] * 2, "and not that they see other files"


@pytest.mark.parametrize("place", ["length of a header", "tensors"])
def test_damage_that_one_rank_proves_counts_although_another_cannot_read(place):
    """V05, P07: with the checkpoint before it, on all ranks."""
    stores = [Faulty({6: (kind, place)}) for kind in ("unreadable", "damaged")]
    with pytest.warns(CheckpointPassedOver, match="CheckpointDamaged"):
        assert run_threads(2, lambda world: outcome_of(stores[world.rank], world)) == [4, 4]


def load_where_rank_one_cannot_read(collectives, folder):
    """A disk that gives rank 1 the tensors of step 2 only after a while."""
    store, read = LocalStore(folder), os.preadv
    away = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    told = []
    for is_away in (True, False):
        preadv = mock.Mock(side_effect=away if is_away and collectives.rank == 1 else read)
        with mock.patch("os.preadv", preadv), CheckpointManager(store, collectives=collectives) as manager:
            try:
                told.append(manager.load(state_at(0)).trainer.step)
            except TrainfoldError as error:
                told.append(type(error).__name__)
    return told


def test_ranks_that_are_processes_are_refused_together_and_load_the_newest_afterwards(processes, tmp_path):
    """V05, P07: over gloo; none hangs, and nothing is put into quarantine."""
    for step in (1, 2):
        trainfold.save(state_at(step), tmp_path / "run")
    found = processes.run(2, load_where_rank_one_cannot_read, str(tmp_path / "run"), collectives={"timeout_secs": 60.0})
    assert found == [["ResumeRefused", 2]] * 2


# --- a disk ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    for step in (1, 2):
        trainfold.save(state_at(step), tmp_path / "run")
    return tmp_path / "run"


def failing(monkeypatch, code, *, of="step-00000002", is_own=True):
    """The disk does not give the files of a checkpoint but its manifest."""
    read, opened = os.preadv, []
    open_file = local.open_file

    @contextmanager
    def noted(root, directory, last):
        with open_file(root, directory, last) as (fd, size):
            if directory == of and last != MANIFEST:
                opened.append(fd)
            yield fd, size
            if fd in opened:
                opened.remove(fd)

    def preadv(fd, *more):
        if fd in opened:
            raise OSError(code, os.strerror(code))
        return read(fd, *more)

    monkeypatch.setattr(local, "open_file", noted)
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os_errors, "is_own_disk", lambda _: is_own)


def opened(run, **options):
    """What a manager loads in a start of a program."""
    with CheckpointManager(run) as manager:
        return manager.load(state_at(0), **options).trainer.step


@pytest.mark.parametrize(
    "code", [errno.EACCES, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EMFILE, errno.ENOMEM]
)
def test_however_often_a_disk_does_not_give_the_newest_it_is_neither_passed_over_nor_quarantined(
    run, monkeypatch, code
):
    """E01, P07: it was passed over each time, and three starts put it into quarantine."""
    with monkeypatch.context() as patch:
        failing(patch, code)
        for _ in range(4):
            with pytest.raises(ResumeRefused) as refused:
                opened(run)
            (reason,) = refused.value.refusal.reasons
            assert (reason.error, reason.exit_code) == ("CheckpointUnreadable", CheckpointUnreadable.exit_code)
            assert reason.where.startswith(f"{run}/step-00000002/")
            assert reason.where.endswith(".safetensors")
            assert os.strerror(code) in reason.found
            assert "this does not prove damage" in reason.fix
            assert "step=1" in reason.fix
        assert not (run / QUARANTINE_FILE).exists()
    assert opened(run) == 2


def test_an_older_one_is_taken_on_purpose_and_is_what_the_run_goes_on_from(run, monkeypatch):
    """P07: what could not be read is left behind then, and a later start does not come back to it."""
    with monkeypatch.context() as patch:
        failing(patch, errno.EACCES)
        with CheckpointManager(run) as manager:
            like = state_at(0)
            state = manager.load(like, manager.should_load(like, step=1))
            assert state.trainer.step == 1
            manager.save(state.evolve(trainer=Progress(step=3)))
    assert opened(run) == 3
    with CheckpointManager(run) as manager:
        manager.save(manager.load(state_at(0)).evolve(trainer=Progress(step=4)))
    assert opened(run) == 4


@pytest.mark.parametrize("code", [errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA])
def test_what_a_disk_of_this_machine_has_lost_is_damage(run, monkeypatch, code):
    """P07: a bad sector will not pass, so the run goes on from the one before it, and does not try it again."""
    failing(monkeypatch, code)
    with pytest.warns(CheckpointPassedOver, match="CheckpointDamaged.*step-00000002/.*safetensors.*Errno"):
        assert opened(run) == 1
    with pytest.warns(CheckpointPassedOver, match="CheckpointQuarantined"):
        assert opened(run) == 1


def test_the_same_error_over_a_network_may_pass(run, monkeypatch):
    """P07: a soft mount answers EIO while its server is away."""
    failing(monkeypatch, errno.EIO, is_own=False)
    with pytest.raises(ResumeRefused, match="CheckpointUnreadable"):
        opened(run)


def test_a_manifest_that_a_disk_does_not_give_is_refused_by_name(run, monkeypatch):
    """P07: it was an OSError, with the name of the file alone."""
    read = LocalStore._read

    def failing_read(store, name, start=0, stop=None):
        if name == f"step-00000002/{MANIFEST}":
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), MANIFEST)
        return read(store, name, start, stop)

    monkeypatch.setattr(LocalStore, "_read", failing_read)
    with pytest.raises(ResumeRefused, match="step=1") as refused:
        opened(run)
    assert refused.value.refusal.reasons[0].where == f"{run}/step-00000002/{MANIFEST}"
    assert trainfold.load(run, like=state_at(0), step=1).trainer.step == 1


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
def test_a_run_of_which_the_disk_gives_no_list_is_refused_by_name(run, monkeypatch, code):
    """P07: it was an OSError without the name of a file; and nothing begins from scratch there."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", mock.Mock(side_effect=OSError(code, os.strerror(code))))
        with pytest.raises(ResumeRefused, match=re.escape(f"{run}: expected a file that can be read")) as refused:
            trainfold.load(run, like=state_at(0))
        assert not refused.value.refusal.finds_nothing
        with pytest.raises(SaveFailed, match=re.escape(os.strerror(code))), CheckpointManager(run) as manager:
            manager.save(state_at(1))
    assert opened(run) == 2


@pytest.mark.parametrize("shut", [1, 2])
def test_a_directory_without_rights_stops_a_resume_only_if_it_may_be_the_newest(run, monkeypatch, shut):
    """P07: one of another user, which is older, stopped each start for good: not even the time of its manifest is given."""
    opened_directory = local.open_directory

    def denied(root, directory):
        if directory == f"step-0000000{shut}":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"{root}/{directory}")
        return opened_directory(root, directory)

    monkeypatch.setattr(local, "open_directory", denied)
    monkeypatch.setattr(staged_files, "open_directory", denied)
    if shut == 2:
        with pytest.raises(ResumeRefused, match="step=1"):
            opened(run)
    else:
        with pytest.warns(CheckpointPassedOver, match="step-00000001"):
            assert opened(run) == 2


def test_a_step_that_is_asked_for_and_cannot_be_read_is_that_error(run, monkeypatch):
    failing(monkeypatch, errno.EACCES)
    with pytest.raises(CheckpointUnreadable, match="this does not prove damage"):
        trainfold.load(run, like=state_at(0), step=2)


def test_live_objects_that_are_read_in_place_count_no_attempt(tmp_path, monkeypatch):
    """P07: they hold parts of two states, and the next start tries the same checkpoint again, however often."""

    def restored():
        model = torch.nn.Linear(200, 200)
        live = trainfold.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with CheckpointManager(tmp_path / "run", every=1) as manager:
            manager.restore(live, in_place=True)
            if live.progress.step < 2:
                live.advance(samples=1)
                manager.step(live)
            return live.progress.step

    assert [restored(), restored()] == [1, 2]
    with monkeypatch.context() as patch:
        failing(patch, errno.EACCES)
        for _ in range(4):
            with pytest.raises((HalfRestored, ResumeRefused), match="Permission denied"):
                restored()
    assert restored() == 2


def test_a_checkpoint_that_is_deleted_and_saved_again_during_a_load_is_the_newest_all_the_same():
    """E01: by its head it is the one that had lost its files, and the older one was loaded, with a warning."""
    store = saved_run(4, 6)
    done = []

    class SavedAgain(Faulty):
        def read_into(self, name, buffer, *, start=0):
            if name.startswith("step-00000006/") and not done:
                done.append(name)
                store.delete("step-00000006/")
                with pytest.raises(CheckpointMissing):
                    self.inner.read_into(name, buffer, start=start)
                trainfold.save(state_at(7).evolve(trainer=Progress(step=6)), store)
                raise CheckpointMissing(name, expected="a file", found="none", fix="list the run")
            self.inner.read_into(name, buffer, start=start)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trainfold.load(SavedAgain({}, inner=store), like=state_at(0)).trainer.step == 6
    assert done


@pytest.mark.parametrize("others", [(4,), (4, 8)])
def test_a_reader_whose_checkpoint_is_deleted_looks_for_a_newer_one_before_it_takes_an_older_one(others):
    """E01: a program that evaluates, beside one that trains and deletes; it took the older one, with a warning."""
    store = saved_run(4, 6)
    done = []

    class Deleted(Faulty):
        def read_into(self, name, buffer, *, start=0):
            if name.startswith("step-00000006/"):
                if not done and 8 in others:
                    trainfold.save(state_at(8), store)
                done.append(name)
                store.delete("step-00000006/")
            self.inner.read_into(name, buffer, start=start)

    with warnings.catch_warnings():
        warnings.simplefilter("error" if 8 in others else "ignore")
        assert trainfold.load(Deleted({}, inner=store), like=state_at(0)).trainer.step == others[-1]
    assert done


# --- what a run goes on with -----------------------------------------------------------------------------------------


class Timed(MemoryStore):
    """A store that knows when something was committed, and that does not give one manifest for a while."""

    def __init__(self):
        ticks = itertools.count(1000)
        super().__init__(clock=lambda: float(next(ticks)))
        self.part, self.is_zeroed = "", False

    def read(self, name, *, start=0, stop=None):
        if self.part and self.part in name and self.is_zeroed:
            return bytes(len(super().read(name, start=start, stop=stop)))
        if self.part and self.part in name:
            raise CheckpointUnreadable(
                f"{self.url}/{name}", expected="bytes from the store", found="503", fix="try again"
            )
        return super().read(name, start=start, stop=stop)


@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.CheckpointPassedOver")
@pytest.mark.parametrize("steps", [(5,), (5, 6, 7), (8,), (5, 7, 20)])
@pytest.mark.parametrize("unread", [6, 9])
@pytest.mark.parametrize("is_zeroed", [False, True])
def test_a_run_that_went_on_from_an_older_one_does_not_come_back_to_what_could_not_be_read(steps, unread, is_zeroed):
    """E01, A14: the other branch was taken at the next start, and what was saved since was left behind in silence; also where wrong bytes were put right later."""
    store = Timed()
    store.is_zeroed = is_zeroed
    with CheckpointManager(store) as manager:
        for step in (2, 4, unread):
            manager.save(state_at(step))
    store.part = f"step-0000000{unread}/"
    with CheckpointManager(store) as manager:
        state = manager.load(like := state_at(0), manager.should_load(like, step=4))
        saved = [step for step in steps if step != unread]
        for step in saved:
            manager.save(state.evolve(trainer=Progress(step=step)))
    assert opened(store) == saved[-1], "without a step, although that is still not read"
    store.part = ""
    assert opened(store) == saved[-1]
    found = read_inventory(store)
    assert [entry.head.step for entry in lineage(found)] == [*reversed(saved), 4, 2]
    assert len({entry.head.timeline for entry in found.entries}) == 2, "one new timeline, and not one for each save"


@pytest.mark.parametrize("start_over", [False, True])
def test_a_run_of_which_nothing_can_be_read_now_is_not_taken_for_a_new_one(start_over):
    """A14: a program that does not restore began from scratch beside it, and the next start took the old one."""
    store = Timed()
    with CheckpointManager(store) as manager:
        manager.save(state_at(100))
    store.part = "step-00000100/"
    with CheckpointManager(store, start_over=start_over) as manager:
        if not start_over:
            with pytest.raises(RunNotRestored):
                manager.save(state_at(1))
            return
        manager.save(state_at(1))
    store.part = ""
    assert opened(store) == 1


@pytest.mark.parametrize("verb", ["list", "size"])
def test_a_run_that_does_not_answer_for_a_moment_is_not_taken_for_a_new_one(run, monkeypatch, verb):
    """A14: a program that does not restore saved beside it, as the manager saw no checkpoint when it looked once."""
    call = getattr(LocalStore, verb)
    for failing_call in (1, 2, 3):
        calls = itertools.count(1)

        def once(store, *args, calls=calls, failing_call=failing_call):
            if next(calls) == failing_call:
                raise CheckpointUnreadable(store.url, expected="an answer", found="503", fix="try again")
            return call(store, *args)

        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, verb, once)
            with pytest.raises(SaveFailed), CheckpointManager(run) as manager:
                manager.save(state_at(9))
    assert opened(run) == 2


@pytest.mark.parametrize("verb", ["list", "size", "read"])
def test_a_save_whose_run_cannot_be_read_for_a_moment_fails_as_a_save(run, monkeypatch, verb):
    """C15: a loop that catches `SaveFailed` and goes on ended with the error of the read, if the list or the run file was refused once."""
    call = getattr(LocalStore, verb)
    for failing_call in itertools.count(1):
        calls = itertools.count(1)

        def once(store, *args, calls=calls, failing_call=failing_call, **kwargs):
            if next(calls) == failing_call:
                raise CheckpointUnreadable(store.url, expected="an answer", found="503", fix="try again")
            return call(store, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, verb, once)
            with suppress(SaveFailed):
                trainfold.save(state_at(3), run)
        if next(calls) <= failing_call:
            break
        assert opened(run) in (2, 3)
    assert failing_call > 1


def test_a_step_whose_manifest_cannot_be_read_is_not_saved_again_and_the_error_says_what_helps(run, monkeypatch):
    """C15: a rewound run that came to such a step each time ended there for good, with the words `try again`, or that a right to write is missing."""
    read, name = LocalStore.read, f"step-00000002/{MANIFEST}"

    def denied(store, asked, **limits):
        if asked == name:
            raise CheckpointUnreadable(asked, expected="a file that can be read", found="EACCES", fix="wait")
        return read(store, asked, **limits)

    monkeypatch.setattr(LocalStore, "read", denied)
    with pytest.raises(SaveFailed, match="EACCES; wait; this step cannot be saved again while its manifest cannot be read: if it is lost for good, delete"):  # fmt: skip
        trainfold.save(state_at(2), run)
    trainfold.save(state_at(3), run)
    (run / "step-00000002" / MANIFEST).unlink()
    monkeypatch.undo()
    trainfold.save(state_at(2), run)


@pytest.mark.parametrize("code", [errno.EIO, errno.EUCLEAN])
def test_a_save_of_a_step_whose_manifest_a_disk_has_lost_deletes_nothing_and_says_what_to_delete(
    run, monkeypatch, code
):
    """P07, C15: an error may pass, and a save that deletes the manifest and fails then has lost what was acknowledged."""
    read, lost = os.pread, (run / "step-00000002" / MANIFEST).open("rb")  # open: no later file has its number

    def pread(fd, *more):
        if os.path.sameopenfile(fd, lost.fileno()):
            raise OSError(code, os.strerror(code))
        return read(fd, *more)

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(os_errors, "is_own_disk", lambda _: True)
    with lost:
        with CheckpointManager(run) as manager:
            with pytest.warns(CheckpointPassedOver, match="step-00000002/manifest.json"):
                state = manager.load(state_at(0))
            assert state.trainer.step == 1
            state = state.evolve(trainer=Progress(step=2))
            with pytest.raises(SaveFailed, match=f"if it is lost for good, delete {run}/step-00000002/{MANIFEST}"):  # fmt: skip
                manager.save(state)
            (run / "step-00000002" / MANIFEST).unlink()
            manager.save(state)
        assert opened(run) == 2
