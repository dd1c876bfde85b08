"""The record of load attempts under crashes, failing disks and odd files."""

import errno

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.backends import quarantine_cases
from kit.backends.quarantine_cases import DAMAGED, EIGHT, SEVEN, SOME, die, document, save_at, sealed, usable

from trainfold.backends.runs.api import load
from trainfold.backends.runs.quarantine_file import (
    QuarantineIgnored,
    begin_attempt,
    end_attempt,
    quarantined,
)
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import CrashAt, ErrorAt, MemoryStore, SimulatedCrash, read_only
from trainfold.core.errors import CheckpointError, CheckpointUnreadable, ResumeRefused
from trainfold.core.history.quarantine import (
    LIMIT,
    LoadOutcome,
    Tried,
)
from trainfold.core.history.quarantine_json import (
    QUARANTINE_FILE,
    QUARANTINE_LIMIT_BYTES,
    quarantine_from_json,
    quarantine_to_json,
)
from trainfold.core.state.state import Progress, TrainState

store = quarantine_cases.store


def test_after_any_crash_the_record_is_whole_and_counts_each_attempt_that_was_acknowledged():
    """P07: a begin that returned is counted until its end; one that did not may be; nothing torn is ever seen."""
    store = MemoryStore()
    save_at(store, 7, 8)
    least, most = [], []  # before and after each effect: what may be counted for step 8
    counts = [0, 1, 2, 1, 2, 0, 1, 1]
    actions = [
        lambda: begin_attempt(store, EIGHT),
        lambda: begin_attempt(store, EIGHT),
        lambda: end_attempt(store, EIGHT, LoadOutcome("interrupted")),
        lambda: begin_attempt(store, EIGHT),
        lambda: end_attempt(store, EIGHT),
        lambda: begin_attempt(store, EIGHT),
        lambda: end_attempt(store, EIGHT, DAMAGED),
    ]
    first = len(store.effects)
    marks = [first]
    for action in actions:
        action()
        marks.append(len(store.effects))
    assert len(set(marks)) == len(marks), "each of them has an effect"
    for length in range(first, len(store.effects) + 1):
        done = sum(mark <= length for mark in marks) - 1
        allowed = {counts[done], counts[min(done + 1, len(actions))]}
        for how in ({}, {"keep_unsynced": True}, {"keep_unsynced": True, "torn_write": True}):
            survivor = store.after_crash(length, **how)
            quarantined(survivor)  # warns of nothing
            known = QUARANTINE_FILE in survivor.list() and quarantine_from_json(survivor.read(QUARANTINE_FILE)).records
            found = known[0].attempts if known else 0
            if length in marks:
                assert found == counts[marks.index(length)], (length, how)
            assert found in allowed, (length, how)
            least.append(found)
            most.append(found)
    assert (min(least), max(most)) == (0, 2)


@settings(max_examples=150)
@given(data=st.data())
def test_whatever_crashes_and_fails_the_record_never_stops_a_load_and_never_quarantines_the_innocent(data):
    """P07: across restarts at any effect, with any error of the disk: at most as many are counted as were begun."""
    store = MemoryStore()
    save_at(store, 7, 8)
    begun = {SEVEN: 0, EIGHT: 0}
    for _ in range(data.draw(st.integers(1, 5))):
        kind = data.draw(st.sampled_from(["none", "crash", "error", "read only"]))
        at = data.draw(st.integers(0, 9))
        faults = {"none": None, "crash": CrashAt(at), "read only": read_only}
        lasting = data.draw(st.booleans())
        machine = MemoryStore(fault=faults[kind] if kind in faults else ErrorAt(at, errno.ENOSPC, lasting=lasting))
        machine._disk = store._disk
        name = data.draw(st.sampled_from([SEVEN, EIGHT]))
        died = False
        try:
            begun[name] += 1
            begin_attempt(machine, name)
            died = data.draw(st.booleans())
            if not died:
                end_attempt(machine, name)
        except SimulatedCrash:
            machine._disk.crash(keep_unsynced=data.draw(st.booleans()), torn_write=False)
        store = MemoryStore()
        store._disk = machine._disk
        known = QUARANTINE_FILE in store.list() and quarantine_from_json(store.read(QUARANTINE_FILE)).records
        for record in known or ():
            assert 1 <= record.attempts <= begun[record.checkpoint]
        assert all(begun[each] >= LIMIT for each in quarantined(store))
        if kind == "none":
            counted = {record.checkpoint: record.attempts for record in known or ()}
            assert bool(counted.get(name)) == died


def test_a_disk_that_cannot_be_written_is_said_and_nothing_is_raised(caplog):
    """P07: a run on a full disk still loads."""
    store = MemoryStore()
    save_at(store, 7)
    store._fault = read_only
    begin_attempt(store, SEVEN)
    end_attempt(store, SEVEN)
    assert "an attempt to load is not recorded" in caplog.text
    assert QUARANTINE_FILE not in store.list()


# --- a record that is bad itself -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\xff" * 100, quarantine_to_json(SOME)[:-5], sealed(document(format="other"))]
)
def test_a_record_that_cannot_be_read_stops_nothing_and_is_kept_aside(store, data, caplog):
    """P07: a warning names it, the run loads, and the bytes are kept for inspection."""
    store.commit(QUARANTINE_FILE, data)
    with pytest.warns(QuarantineIgnored, match="is not used"):
        assert usable(store) == [EIGHT, SEVEN]
    assert store.read(QUARANTINE_FILE) == data  # reading changes nothing
    die(store, EIGHT)
    (aside,) = [name for name in store.list() if name.startswith("quarantine-damaged-")]
    assert store.read(aside) == data
    assert f"its old contents are in {aside}" in caplog.text
    assert usable(store) == [SEVEN]
    assert read_inventory(store).problem is None


@pytest.mark.parametrize("becomes", ["gone", "longer"])
@pytest.mark.filterwarnings("error")
def test_a_record_that_a_load_beside_this_changes_is_what_it_is_then(store, monkeypatch, becomes):
    """P07: an upload looked at the run while a load ended in it, and warned of a file that it had not found."""
    die(store, EIGHT)
    size, whole = store.size, store.read(QUARANTINE_FILE)

    def changed(name):
        found = size(name)
        if name == QUARANTINE_FILE:
            store.delete(name)
            if becomes == "longer":
                store.commit(name, whole)
                return found - 9
        return found

    monkeypatch.setattr(store, "size", changed)
    assert list(quarantined(store)) == ([] if becomes == "gone" else [EIGHT])


def test_a_record_of_a_newer_version_is_left_alone(store, caplog):
    data = sealed(document(version=2))
    store.commit(QUARANTINE_FILE, data)
    with pytest.warns(QuarantineIgnored, match="upgrade trainfold"):
        assert usable(store) == [EIGHT, SEVEN]
    die(store, EIGHT, times=1)
    assert store.read(QUARANTINE_FILE) == data
    assert "not recorded" in caplog.text


def test_a_record_that_is_a_link_a_folder_or_absurd_stops_nothing(tmp_path, caplog):
    """U05: it is neither followed nor read whole nor replaced."""
    outside = tmp_path / "outside"
    outside.write_bytes(quarantine_to_json(SOME))
    for index, make in enumerate(
        [
            lambda path: path.symlink_to(outside),
            lambda path: path.write_bytes(b" " * (QUARANTINE_LIMIT_BYTES + 1)),
        ]
    ):
        store = LocalStore(tmp_path / f"run{index}")
        save_at(store, 7)
        make(tmp_path / f"run{index}" / QUARANTINE_FILE)
        with pytest.warns(QuarantineIgnored):
            assert usable(store) == [SEVEN]
        caplog.clear()
        begin_attempt(store, SEVEN)
        end_attempt(store, SEVEN)
        assert "not recorded" in caplog.text
    assert outside.read_bytes() == quarantine_to_json(SOME)
    folder = LocalStore(tmp_path / "folder")
    save_at(folder, 7)
    (tmp_path / "folder" / QUARANTINE_FILE).mkdir()
    begin_attempt(folder, SEVEN)
    end_attempt(folder, SEVEN)
    assert usable(folder) == [SEVEN]


def test_a_record_that_another_wrote_in_the_meantime_is_not_overwritten():
    """Both attempts count."""

    @attrs.frozen
    class Racing:
        """A store in which another process is always a little faster, `left` times."""

        store: MemoryStore
        left: list

        def __getattr__(self, name):
            return getattr(self.store, name)

        def commit(self, name, data, *, replaces=None):
            if self.left:
                self.left.pop()
                begin_attempt(self.store, SEVEN)
            self.store.commit(name, data, replaces=replaces)

    for times in (1, 2):
        store = MemoryStore()
        save_at(store, 7, 8)
        die(store, SEVEN, times=1)
        begin_attempt(Racing(store, [0] * times), EIGHT)
        counted = {
            record.checkpoint: record.attempts for record in quarantine_from_json(store.read(QUARANTINE_FILE)).records
        }
        assert counted == {SEVEN: 1 + times, EIGHT: 1}
    assert not isinstance(Tried(SEVEN, "d"), CheckpointError)


class Away:
    """A store that does not answer the first so many looks."""

    def __init__(self, inner, looks):
        self._inner, self.left, self.asked = inner, looks, []

    def __getattr__(self, name):
        found = getattr(self._inner, name)
        if name not in {"size", "list", "read"}:
            return found

        def look(*args, **how):
            self.asked.append(args[0])
            self.left -= 1
            if self.left >= 0:
                raise CheckpointUnreadable("store", expected="an answer", found="none", fix="try again")
            return found(*args, **how)

        return look


@pytest.mark.parametrize("looks", range(1, 7))
@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.CheckpointPassedOver")
@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.quarantine_file.QuarantineIgnored")
def test_a_store_that_answers_at_the_second_look_has_its_quarantine_all_the_same(looks):
    """P07: a load lists a run that did not answer once more, and took a checkpoint at which three processes had died."""
    store = MemoryStore()
    save_at(store, 7, 8)
    die(store, EIGHT)
    try:
        found = load(Away(store, looks), like=TrainState(trainer=Progress()))
    except ResumeRefused:
        return
    assert found.trainer.step == 7


def test_a_run_that_does_not_answer_is_asked_for_nothing_else():
    """W22: through gcsfs each request takes half a minute without a network, and the warning was of the quarantine."""
    store = Away(MemoryStore(), 1000)
    with pytest.raises(ResumeRefused, match="CheckpointUnreadable"):
        load(store, like=TrainState(trainer=Progress()))
    assert store.asked == ["run.json"] * 2
