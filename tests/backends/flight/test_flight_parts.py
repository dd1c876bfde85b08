"""Logs in stores that cannot append: what a kill leaves, where a resume cuts, which requests are made, and in which thread."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfold.backends.flight import log_parts, log_pieces
from trainfold.backends.flight.flight_file import FlightFile
from trainfold.backends.flight.flight_parts import FlightParts
from trainfold.backends.flight.flight_values import FlightValues
from trainfold.backends.flight.flights import flight_name, flight_writer, read_flights
from trainfold.backends.flight.journals import JOURNAL, journal_writer, note_in_journal, read_journal
from trainfold.backends.flight.log_parts import LogParts, part_numbers
from trainfold.backends.flight.log_pieces import read_log
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import CrashAt, MemoryStore, SimulatedCrash, read_only
from trainfold.core.errors import CheckpointMissing
from trainfold.core.flight.journal_line import JournalLine
from trainfold.core.flight.log_lines import LINE_BYTES, encode_lines
from trainfold.core.flight.step_record import StateDigest, StepRecord, float_bits_of

NAME = flight_name(0)


def lines_of(step):
    """What a step leaves: each third one has two lines."""
    more = [StateDigest(step, "model", bytes([step % 256] * 16))] if step % 3 == 0 else []
    return [StepRecord(step, samples=step * 4, loss=float_bits_of(step / 8)), *more]


def whole(steps):
    return b"".join(encode_lines(lines_of(step)) for step in range(1, steps + 1))


def bytes_in(store, name=NAME):
    return read_log(store, name, store.list())


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(log_parts, "PART_BYTES", 5 * LINE_BYTES)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 30)), max_size=5), st.integers(1, 4))
def test_a_log_in_parts_that_was_killed_and_resumed_is_that_of_the_unkilled_run(lives, lines_a_part):
    """R04: each process goes back to any step before its last save, and dies after it has trained on; with a put at each save, and none after it."""
    store, saved = MemoryStore(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_parts, "PART_BYTES", lines_a_part * LINE_BYTES)
        for back, more, lost in lives:
            file, first = FlightParts(store, NAME), max(0, saved - back)
            for step in range(first + 1, first + more + 1):
                file.append(lines_of(step))
            file.put()
            saved = first + more if more else saved
            for step in range(saved + 1, saved + lost + 1):
                file.append(lines_of(step))  # what a kill loses
            if file._parts._job is not None:
                file._parts._job.wait()  # a process that is dead puts nothing; what it has put may be more than at its save
        file = FlightParts(store, NAME)
        for step in range(saved + 1, 41):
            file.append(lines_of(step))
        file.close()
        assert bytes_in(store) == whole(40)
        assert part_numbers(NAME, store.list()) == [*range(-(-len(whole(40)) // (lines_a_part * LINE_BYTES)))]


@pytest.mark.usefixtures("small_parts")
def test_a_process_that_dies_inside_a_put_leaves_the_log_of_its_first_steps():
    """R04: an object is whole or absent, and parts are deleted from the last one on, so no step is missing between two others."""
    for crash in range(99):
        store = MemoryStore(fault=CrashAt(crash))
        try:
            for first, last in ((1, 20), (4, 9), (10, 30)):
                file = FlightParts(store, NAME)
                for step in range(first, last + 1):
                    file.append(lines_of(step))
                file.put()
        except SimulatedCrash:
            pass
        else:
            break
        for keeps in (False, True):
            left = store.after_crash(crash, keep_unsynced=keeps)
            assert whole(30).startswith(bytes_in(left))
            file = FlightParts(left, NAME)
            for step in range(4, 12):
                file.append(lines_of(step))
            file.close()
            kept = whole(3) if bytes_in(left).startswith(whole(3)) else b""  # a directory entry that a power cut took
            assert bytes_in(left).removeprefix(kept) == whole(11).removeprefix(whole(3))
    assert crash > 9


def test_a_store_that_refuses_is_a_warning_once_and_the_next_put_has_all(caplog):
    """A log must not end a run, and a network that comes back must not leave a hole in it."""
    store = MemoryStore(fault=read_only)
    file = FlightParts(store, NAME)
    for step in range(1, 5):
        file.append(lines_of(step))
        file.put()
    assert sum("not in the store yet" in each.getMessage() for each in caplog.records) == 1
    assert store.list() == []
    store._fault = None
    file.append(lines_of(5))
    file.close()
    assert bytes_in(store) == whole(5)


@pytest.mark.usefixtures("small_parts")
def test_the_loop_makes_no_request_and_a_put_few():
    """N06: the thread that appends never waits for a network, and a put sends the last part alone."""
    requests = []

    class Counted:
        def __init__(self, store):
            self._store = store

        def __getattr__(self, name):
            if name in ("read", "write", "list", "size", "delete", "committed_at"):
                requests.append((name, threading.current_thread() is threading.main_thread()))
            return getattr(self._store, name)

    store = Counted(MemoryStore())
    file = FlightParts(store, NAME)
    for step in range(1, 400):
        file.append(lines_of(step))
    file._parts._job.wait()
    assert {here for _, here in requests} == {False}
    file.put()
    requests.clear()
    file.append(lines_of(400))
    file.put()
    assert requests == [("write", True)]


def test_a_log_is_read_by_pieces_in_parts_as_it_is_read_at_once(monkeypatch):
    """W22: the page of a run in a bucket has the losses of all its parts, also while it goes on, and after a resume has cut it."""
    for module in (log_parts, log_pieces):
        monkeypatch.setattr(module, "PART_BYTES", 4 * LINE_BYTES)
    store, values = MemoryStore(), FlightValues(NAME)
    assert not values.read(store)
    for first, last in ((1, 10), (11, 12), (7, 30), (3, 4)):
        file = FlightParts(store, NAME)
        for step in range(first, last + 1):
            file.append(lines_of(step))
        file.close()
        assert values.read(store)
        assert list(values.loss[0]) == list(read_flights(store)[0].steps) == [*range(1, last + 1)]
        assert not values.damage
        assert not values.read(store)


@pytest.mark.usefixtures("small_parts")
def test_a_copy_of_a_bucket_goes_on_in_a_directory_and_back(tmp_path):
    """C13: the names in a bucket are those of a directory; a copy by hand loses no step, in either direction."""
    bucket, folder = MemoryStore(), LocalStore(tmp_path)
    file = FlightParts(bucket, NAME)
    for step in range(1, 20):
        file.append(lines_of(step))
    file.close()
    for name in bucket.list():
        folder.write(name, [bucket.read(name)], size_bytes=bucket.size(name))
    writer = flight_writer(folder, 0)
    writer.append(lines_of(18))
    writer.close()
    assert list(read_flights(tmp_path)[0].steps) == [*range(1, 19)]
    other = FlightFile(tmp_path / "b.log")
    for step in range(1, 20):
        other.append(lines_of(step))
    other.close()
    up = MemoryStore()
    up.write(NAME, [(tmp_path / "b.log").read_bytes()], size_bytes=len(whole(19)))
    writer = flight_writer(up, 0)
    writer.append(lines_of(12))
    writer.close()
    assert bytes_in(up) == whole(12)


def test_a_log_that_loses_a_part_in_the_middle_shows_the_hole():
    """Nothing is guessed: the steps of a lost object are not there, and those of the others are."""
    store = MemoryStore()
    log = LogParts(store, NAME)
    log.append(whole(9))
    log.close()
    store.write(
        "flight-00000-00007.log", [whole(30).removeprefix(whole(20))], size_bytes=len(whole(30)) - len(whole(20))
    )
    assert list(read_flights(store)[0].steps) == [*range(1, 10), *range(21, 31)]


def test_a_journal_in_parts_keeps_the_lines_of_every_process(monkeypatch):
    """W22: starts, with how far the process before came at least; notes of the same process; a torn end costs its line alone."""
    monkeypatch.setattr(log_parts, "PART_BYTES", 100)
    store = MemoryStore()
    flight, journal = flight_writer(store, 0), journal_writer(store)
    journal.start(JournalLine(1.0, "started", 0), flight.reached)
    flight.append(lines_of(1))
    note_in_journal(store, JournalLine(2.0, "best", 1))
    journal.close()
    flight.close()
    note_in_journal(store, JournalLine(3.0, "best", 1))  # no process writes it
    store.write("journal-00001.jsonl", [b'{"at": 9'], size_bytes=8)
    flight, journal = flight_writer(store, 0), journal_writer(store)
    flight.append(lines_of(1))
    flight.put()  # cuts the log before the journal has asked
    journal.start(JournalLine(4.0, "started", 0), flight.reached)
    journal.append([JournalLine(5.0, "warned", detail="x" * 300)])
    journal.close()
    lines = read_journal(store).lines
    assert [(line.kind, line.at) for line in lines] == [
        ("started", 1.0),
        ("best", 2.0),
        ("started", 4.0),
        ("warned", 5.0),
    ]
    assert lines[2].data == {"reached": 1, "is_least": True}
    assert len(part_numbers(JOURNAL, store.list())) > 3
    with pytest.raises(CheckpointMissing):
        read_flights(MemoryStore())
