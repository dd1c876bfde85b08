"""Checkpoints that do not load are skipped after a counted number of attempts, and the record never blocks a run (P07)."""

import os
import signal
import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.backends import quarantine_cases
from kit.backends.quarantine_cases import DAMAGED, EIGHT, SEVEN, SOME, die, document, save_at, sealed, usable

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.failure_board import Fault
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import load, save
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.runs.quarantine_file import (
    begin_attempt,
    end_attempt,
    quarantined,
)
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.digest import digest_of
from trainfold.core.errors import (
    CheckpointDamaged,
    CheckpointForeign,
    CheckpointHostile,
    CheckpointMissing,
    CheckpointTorn,
    CheckpointUnreadable,
    FutureVersion,
    InvalidArgument,
    RestoreRefused,
    ResumeRefused,
    RunNotRestored,
)
from trainfold.core.format.file_names import directory_of
from trainfold.core.history.next_checkpoint import next_head
from trainfold.core.history.quarantine import (
    LIMIT,
    MAX_REASONS,
    MAX_RECORDS,
    Attempts,
    LoadOutcome,
    after_attempt,
    after_outcome,
    after_success,
    is_quarantined,
    only_present,
    outcome_of,
    with_quarantined,
    worst_outcome,
)
from trainfold.core.history.quarantine_json import (
    QUARANTINE_FILE,
    QUARANTINE_LIMIT_BYTES,
    quarantine_from_json,
    quarantine_to_json,
)
from trainfold.core.state.state import Progress, TrainState

store = quarantine_cases.store


ENDINGS = ("loaded", "interrupted", "failed", "damaged")


@settings(max_examples=200)
@given(
    events=st.lists(
        st.tuples(st.sampled_from([SEVEN, EIGHT]), st.sampled_from([*ENDINGS, "died", "saved again"])), max_size=25
    ),
    limit=st.integers(1, 4),
)
def test_a_checkpoint_is_quarantined_when_it_is_proved_bad_or_has_failed_as_often_as_the_limit(events, limit):
    """P07: beside a count of failures since it was saved or has last loaded; the others are never touched by it."""
    attempts, revision = Attempts(), {SEVEN: 0, EIGHT: 0}
    failures, proved = {SEVEN: 0, EIGHT: 0}, {SEVEN: False, EIGHT: False}
    for name, event in events:
        if event == "saved again":
            revision[name] += 1
        else:
            digest = digest_of(bytes([revision[name]]))
            attempts = after_attempt(attempts, name, digest)
            if event != "died":
                attempts = after_outcome(attempts, name, digest, LoadOutcome(event, f"{event} é\ud800"))
        if event in {"saved again", "loaded"}:
            failures[name], proved[name] = 0, False
        failures[name] += event in {"died", "failed", "damaged"}
        proved[name] |= event == "damaged"
        for each, number in revision.items():
            known = attempts.of(each, digest_of(bytes([number])))
            assert is_quarantined(known, limit=limit) == (proved[each] or failures[each] >= limit)
        assert quarantine_from_json(quarantine_to_json(attempts)) == attempts


@given(outcomes=st.lists(st.sampled_from(ENDINGS), min_size=1, max_size=5))
def test_an_attempt_of_several_ranks_ended_as_for_the_worst(outcomes):
    """P07: one rank that saw wrong bytes is enough, and only a load of all is a load."""
    assert worst_outcome(map(LoadOutcome, outcomes)).ending == max(outcomes, key=ENDINGS.index)


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (None, "loaded"),
        (CheckpointDamaged("a", expected="b", found="c", fix="d"), "damaged"),
        (CheckpointTorn("a", expected="b", found="c", fix="d"), "damaged"),
        (CheckpointHostile("a", expected="b", found="c", fix="d"), "damaged"),
        (CheckpointUnreadable("a", expected="b", found="c", fix="d"), "interrupted"),
        (MemoryError(), "failed"),
        (RecursionError("deep"), "failed"),
        (FutureVersion("a", expected="b", found="c", fix="d"), "interrupted"),
        (CheckpointMissing("a", expected="b", found="c", fix="d"), "interrupted"),
        (RestoreRefused("a", ()), "interrupted"),
        (Fault((1,), "no sign of it within 3 s").error(), "failed"),
        (Fault((1,), "KeyboardInterrupt").error(), "interrupted"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(1), "interrupted"),
    ],
)
def test_only_what_speaks_against_a_checkpoint_counts_against_it(error, ending):
    """P07: not a refusal, not a newer version, not Ctrl-C; a store that does not answer proves nothing about the bytes in it."""
    assert outcome_of(error).ending == ending


@pytest.mark.parametrize("letter", ["é", "\x1b"])
def test_what_is_remembered_is_bounded(letter):
    """However long a run goes wrong, its record can be read and written."""
    attempts = Attempts()
    for step in range(MAX_RECORDS + 5):
        name, digest = directory_of(step), digest_of(bytes([step]))
        for reason in range(MAX_REASONS + 3):
            attempts = after_attempt(attempts, name, digest)
            attempts = after_outcome(attempts, name, digest, LoadOutcome("failed", f"{reason}" + letter * 10_000))
    data = quarantine_to_json(attempts)
    assert len(data) <= QUARANTINE_LIMIT_BYTES
    assert quarantine_from_json(data) == attempts
    assert len(attempts.records) == MAX_RECORDS
    assert attempts.records[-1].checkpoint == directory_of(MAX_RECORDS + 4)
    assert len(attempts.records[0].reasons) == MAX_REASONS


def test_a_reason_is_remembered_whole_and_a_cut_one_says_so():
    """W22: what was found in place of a digest was lost behind a path of 190 letters, and nothing said that the text went on."""
    error = CheckpointDamaged(f"/{'d' * 250}/model.safetensors model.params['bias']", expected="xxh3:" + "a" * 32, found="xxh3:" + "b" * 32, fix="see the disk")  # fmt: skip
    digest = digest_of(b"1")
    (kept,) = after_outcome(Attempts(), directory_of(1), digest, outcome_of(error)).records[0].reasons
    assert kept == f"CheckpointDamaged: {error}"
    (cut,) = after_outcome(Attempts(), directory_of(1), digest, LoadOutcome("failed", "x" * 10_000)).records[0].reasons
    assert len(cut) <= 1000
    assert cut.endswith("x...")


def test_what_was_deleted_is_forgotten():
    attempts = after_attempt(after_attempt(Attempts(), SEVEN, "a"), EIGHT, "b")
    assert only_present(attempts, [EIGHT, "logs"]) == after_attempt(Attempts(), EIGHT, "b")
    assert after_success(attempts, SEVEN) == after_attempt(Attempts(), EIGHT, "b")


# --- the file's bytes ------------------------------------------------------------------------------------------------


def test_every_byte_that_changes_and_every_cut_is_noticed():
    data = quarantine_to_json(SOME)
    for at in range(len(data)):
        for broken in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
            with pytest.raises(CheckpointDamaged, match="another digest"):
                quarantine_from_json(broken)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"format": "other"}, CheckpointForeign),
        ({"version": 2}, FutureVersion),
        ({"version": True}, CheckpointHostile),
        ({"more": 1}, CheckpointHostile),
        ({"attempts": {}}, CheckpointHostile),
        ({"attempts": [document()["attempts"][0]] * 2}, CheckpointHostile),
        ({"attempts": [{}]}, CheckpointHostile),
        ({"attempts": [7]}, CheckpointHostile),
        ({"record": {"checkpoint": "../../etc"}}, CheckpointHostile),
        ({"record": {"checkpoint": "latest"}}, CheckpointHostile),
        ({"record": {"digest": "md5:0"}}, CheckpointHostile),
        ({"record": {"attempts": 0}}, CheckpointHostile),
        ({"record": {"attempts": True}}, CheckpointHostile),
        ({"record": {"is_damaged": 1}}, CheckpointHostile),
        ({"record": {"reasons": [1]}}, CheckpointHostile),
        ({"record": {"reasons": ["a"] * (MAX_REASONS + 1)}}, CheckpointHostile),
        ({"record": {"more": 1}}, CheckpointHostile),
    ],
)
def test_contents_that_cannot_be_are_refused_although_the_digest_fits(changes, error):
    quarantine_from_json(sealed(document()))
    with pytest.raises(error):
        quarantine_from_json(sealed(document(**changes)))


# --- runs ------------------------------------------------------------------------------------------------------------


def test_after_so_many_deaths_the_next_older_one_is_used(store):
    """P07: not before; and nothing is deleted."""
    for death in range(LIMIT):
        assert usable(store) == [EIGHT, SEVEN], death
        die(store, EIGHT, times=1)
    assert usable(store) == [SEVEN]
    assert usable(store, limit=LIMIT + 1) == [EIGHT, SEVEN]
    (problem,) = quarantined(store).values()
    assert str(problem).startswith(
        f"CheckpointQuarantined: {store.url}/{EIGHT}: expected a checkpoint that loads, found tried 3 times"
    )
    assert "step=8" in problem.fix
    assert {SEVEN, EIGHT} <= set(store.list())


def test_wrong_bytes_are_enough_once(store):
    """P07: and the reason is kept for people."""
    begin_attempt(store, EIGHT)
    end_attempt(store, EIGHT, DAMAGED)
    assert usable(store) == [SEVEN]
    assert "a digest differs" in quarantined(store)[EIGHT].found


def test_a_load_that_succeeds_leaves_nothing_behind(store):
    """P07: neither in the record nor in the run's directory."""
    names = store.list()
    die(store, EIGHT, times=LIMIT - 1)
    begin_attempt(store, EIGHT)
    load(store, like=TrainState(trainer=Progress()), step=8)
    end_attempt(store, EIGHT)
    assert store.list() == names
    die(store, EIGHT, times=LIMIT - 1)
    assert usable(store) == [EIGHT, SEVEN]


def test_a_step_that_is_saved_again_is_free(store):
    """P07: it is another checkpoint, of the same name."""
    die(store, EIGHT)
    assert usable(store) == [SEVEN]
    save_at(store, 8)
    assert usable(store)[0] == EIGHT
    die(store, EIGHT, times=1)
    assert usable(store)[0] == EIGHT


def test_when_all_are_quarantined_the_run_is_not_taken_for_an_empty_one(store):
    """P07: a fresh start would hide everything that was trained; the refusal names the way back."""
    die(store, SEVEN)
    die(store, EIGHT)
    assert usable(store) == []
    found = with_quarantined(read_inventory(store), quarantined(store))
    assert [entry.problem.error for entry in found.entries] == ["CheckpointQuarantined"] * 2
    assert next_head(found, "r", 9).timeline == 0  # what is saved next does not collide with them


def test_retention_neither_counts_nor_deletes_a_quarantined_one(store):
    """P07, E01: with it counted, keeping the last one would delete the only one that loads."""
    save_at(store, 9)
    begin_attempt(store, EIGHT)
    end_attempt(store, EIGHT, DAMAGED)
    assert usable(store) == [directory_of(9), SEVEN]  # what a retention gets to see


def test_what_is_known_of_a_deleted_checkpoint_goes_with_the_next_change(store):
    die(store, SEVEN)
    store.delete(f"{SEVEN}/")
    assert quarantined(store) == {}
    begin_attempt(store, SEVEN)  # nothing is there to be tried
    die(store, EIGHT, times=1)
    recorded = quarantine_from_json(store.read(QUARANTINE_FILE))
    assert [record.checkpoint for record in recorded.records] == [EIGHT]
    end_attempt(store, SEVEN)


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyboardInterrupt(), CheckpointDamaged("a", expected="", found="", fix="")]
)
def test_what_ended_an_attempt_is_recorded_unless_it_was_interrupted(store, error):
    begin_attempt(store, EIGHT)
    end_attempt(store, EIGHT, outcome_of(error))
    ending = outcome_of(error).ending
    recorded = QUARANTINE_FILE in store.list() and quarantine_from_json(store.read(QUARANTINE_FILE)).records
    assert bool(recorded) == (ending != "interrupted")
    assert (usable(store) == [SEVEN]) == (ending == "damaged")


def test_a_limit_that_cannot_be_is_refused(store):
    for limit in (0, True, 1.5, "3"):
        with pytest.raises(InvalidArgument, match="limit"):
            quarantined(store, limit=limit)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_that_are_killed_in_loading_are_counted(tmp_path):
    """P07: by SIGKILL, as the kernel does without memory; a manager's lock is held until its process dies."""
    run = tmp_path / "run"
    save_at(LocalStore(run), 7, 8)
    program = f"""
import os, signal
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.ranks.failure_board import Fault
from trainfold.backends.runs.quarantine_file import begin_attempt, quarantined
for _ in range({LIMIT}):
    assert not quarantined(LocalStore({str(run)!r}))
    if (pid := os.fork()) == 0:
        store = LocalStore({str(run)!r})
        with store.lock():
            begin_attempt(store, {EIGHT!r})
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert usable(LocalStore(run)) == [SEVEN]
    assert signal.SIGKILL == 9


# --- with a manager --------------------------------------------------------------------------------------------------


def weights(step):
    return TrainState(trainer=Progress(step=step), extra={"w": torch.full((4,), float(step))})


def flip(directory):
    """Change the last byte of a checkpoint's only file of tensors."""
    (file,) = directory.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_manager_remembers_wrong_bytes_and_a_person_can_ask_for_them_again(tmp_path):
    """P07, V03: passed over with a warning each time, read once; free when it has loaded."""
    for step in (7, 8):
        save(weights(step), tmp_path)
    flip(tmp_path / EIGHT)
    with CheckpointManager(tmp_path) as manager:
        with pytest.warns(CheckpointPassedOver, match="CheckpointDamaged"):
            assert manager.load(weights(0)).trainer.step == 7
        with pytest.warns(CheckpointPassedOver, match="CheckpointQuarantined"):
            assert manager.load(weights(0)).trainer.step == 7
        assert manager.should_load(weights(0)).step == 7
        flip(tmp_path / EIGHT)  # a person has fixed it
        assert manager.should_load(weights(0)).step == 7
        assert manager.load(weights(0), manager.should_load(weights(0), step=8)).trainer.step == 8
        assert manager.load(weights(0)).trainer.step == 8
    assert not (tmp_path / QUARANTINE_FILE).exists()


def test_a_manager_does_not_begin_anew_where_all_that_there_is_is_quarantined(tmp_path):
    """P07: nor does it delete any of it, and what it saves next is a checkpoint like others."""
    save_at(LocalStore(tmp_path), 7)
    die(LocalStore(tmp_path), SEVEN)
    live = attach(torch.nn.Linear(1, 1))
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        with pytest.raises(ResumeRefused, match="CheckpointQuarantined"):
            manager.restore(live)
        assert not manager.should_load(live)
        with pytest.raises(RunNotRestored):
            manager.save(TrainState(trainer=Progress(step=9)))
    with CheckpointManager(tmp_path, keep_last=1, start_over=True) as manager:
        manager.save(TrainState(trainer=Progress(step=9)))
        manager.save(TrainState(trainer=Progress(step=10)))
        assert LocalStore(tmp_path).list() == sorted([QUARANTINE_FILE, "run.json", SEVEN, directory_of(10)])


def test_a_retention_does_not_count_a_quarantined_one(tmp_path):
    """P07, E01: with it counted, keeping the last two would delete the only other one that loads."""
    for step in (7, 8):
        save(weights(step), tmp_path)
    flip(tmp_path / EIGHT)
    with CheckpointManager(tmp_path, keep_last=2) as manager:
        with pytest.warns(CheckpointPassedOver):
            manager.load(weights(0))
        manager.save(weights(9))
    assert {SEVEN, EIGHT, directory_of(9)} <= {each.name for each in tmp_path.iterdir()}


def test_ranks_agree_on_what_is_quarantined():
    """P07, V05: rank 0 keeps the record, and one rank's wrong bytes are enough for all."""
    store = MemoryStore()
    save_at(store, 7, 8)
    die(store, EIGHT)

    def loaded(world):
        with CheckpointManager(store, collectives=world) as manager:
            return manager.load(TrainState(trainer=Progress())).trainer.step

    with warnings.catch_warnings():  # of both threads
        warnings.simplefilter("ignore")
        assert run_threads(2, loaded) == [7, 7]
    assert usable(store) == [SEVEN]


# --- crashes and faults ----------------------------------------------------------------------------------------------
