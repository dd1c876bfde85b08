"""Several processes that write one log in a bucket, of which one was taken for dead; and lists that lag."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.backends.buckets.lagging_bucket import Lagging, opened
from obstore.store import MemoryStore as Bucket

from trainfold.backends.flight import log_parts
from trainfold.backends.flight.flight_parts import FlightParts
from trainfold.backends.flight.flights import flight_name, read_flights
from trainfold.backends.flight.journals import JOURNAL, journal_writer, read_journal
from trainfold.backends.flight.log_parts import LogParts
from trainfold.backends.flight.log_pieces import read_log
from trainfold.backends.stores.object_store.object_store import ObjectStore
from trainfold.core.errors import SaveFailed
from trainfold.core.flight.journal_line import JournalLine
from trainfold.core.flight.log_lines import LINE_BYTES, encode_lines
from trainfold.core.flight.step_record import StepRecord

NAME = flight_name(1)


def record(file, first, last, mark):
    """Append steps that cannot be taken for those of another process."""
    for step in range(first, last + 1):
        file.append([StepRecord(step, samples=mark)])


def marks_in(store):
    """The process that each step of the log is of."""
    return {step: found.samples for step, found in read_flights(store)[1].steps.items()}


def marks(*spans):
    return {step: mark for mark, first, last in spans for step in range(first, last + 1)}


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(log_parts, "PART_BYTES", 4 * LINE_BYTES)


def by_hand(store):
    """A writer that puts where its test does, and not in a thread."""
    file = FlightParts(store, NAME)
    file._parts._due_at = float("inf")
    return file


def bucket():
    client = Bucket()
    return lambda: ObjectStore(client, url="memory://run")


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("puts", [5, 8, 9])
@pytest.mark.parametrize("resumed", [0, 2, 4, 5])
def test_a_rank_that_wakes_late_leaves_the_log_of_the_run_that_followed(puts, resumed, caplog):
    """R04: rank 0 was killed; rank 1, which holds no lock, wakes when the next run is over, and closes its log."""
    store = bucket()
    late = FlightParts(store(), NAME)
    record(late, 1, puts, 1)
    late.put()
    record(late, puts + 1, puts + 3, 1)
    new = FlightParts(store(), NAME)
    record(new, resumed + 1, 20, 2)
    new.close()
    late.close()
    late.append([StepRecord(puts + 4, samples=1)])
    late.close()
    assert marks_in(store()) == marks((1, 1, resumed), (2, resumed + 1, 20))
    warned = [each.getMessage() for each in caplog.records]
    assert [NAME in text and "another process has continued this log" in text for text in warned] == [True]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("gap", range(4))
def test_a_run_goes_on_after_the_last_words_of_the_one_before(gap):
    """A process that is killed slowly puts its end when the next one has read the log, and has put nothing yet: the next one reads it again."""
    store = bucket()
    old, new = FlightParts(store(), NAME), FlightParts(store(), NAME)
    record(old, 1, 6, 1)
    old.put()
    record(old, 7, 7 + gap, 1)
    new.reached()  # has read the log
    old.close()
    record(new, 6, 12, 2)
    new.close()
    assert marks_in(store()) == marks((1, 1, 5), (2, 6, 12))


@settings(max_examples=80)
@given(st.data(), st.integers(1, 4))
def test_of_processes_that_write_one_log_the_last_one_has_its_steps(data, lines_a_part):
    """Whenever each of them puts: once the last one has put something, no other one that has put before changes the log."""
    store = bucket()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_parts, "PART_BYTES", lines_a_part * LINE_BYTES)
        writers, steps = [], []
        for mark in range(data.draw(st.integers(1, 3))):
            writers.append(by_hand(store()))
            steps.append(0)
            for at in [mark, *data.draw(st.lists(st.integers(0, mark), max_size=6))]:
                record(writers[at], steps[at] + 1, steps[at] + 3, at)
                steps[at] += 3
                writers[at].put()
        last = by_hand(store())
        record(last, 1, 2, 9)
        last.put()
        for step in range(3, 9):
            for at, writer in enumerate(writers):
                steps[at] = data.draw(st.integers(1, steps[at] + 1))  # may go back, and cut what it has put
                record(writer, steps[at], steps[at], at)
                if data.draw(st.booleans()):
                    writer.put()
            record(last, step, step, 9)
            last.put()
    assert marks_in(store()) == marks((9, 1, 8))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("lag", [1, 12])
@pytest.mark.parametrize("killed", [3, 7, 8, 12])
def test_a_list_that_lags_hides_no_part(lag, killed):
    """C03: parts are asked for by name after the last one that is listed, and listed ones that are gone are passed over."""
    for seed in range(3):
        api = Lagging(Bucket(), seed, lag)
        for first, last, mark in ((1, killed, 1), (killed, killed + 9, 2), (2, 6, 3), (6, 19, 4)):
            file = FlightParts(opened(api), NAME)
            for step in range(first, last + 1):
                record(file, step, step, mark)
                file.put()
        assert marks_in(ObjectStore(api.client, url="memory://run")) == marks((1, 1, 1), (3, 2, 5), (4, 6, 19))


def test_a_journal_of_which_two_processes_write_has_the_lines_of_the_later_one():
    """W22: what the earlier one has put before stays, and the ends of neither are lost in a put of the other."""
    store = bucket()
    old, new = journal_writer(store()), journal_writer(store())
    old.append([JournalLine(1.0, "started", 0)])
    old.put()
    new.append([JournalLine(2.0, "started", 0)])
    new.put()
    old.append([JournalLine(3.0, "closed")])
    new.append([JournalLine(4.0, "closed")])
    old.close()
    new.close()
    assert [line.at for line in read_journal(store()).lines] == [1.0, 2.0, 4.0]
    assert store().list() == [JOURNAL]


def test_a_put_whose_answer_was_lost_is_not_taken_for_another_process():
    """A network that breaks after a put was carried out costs no line."""
    store = bucket()()
    swap, broken = store.swap, []

    def breaks(*args):
        found = swap(*args)
        if broken:
            broken.clear()
            raise SaveFailed("a", expected="an answer", found="none", fix="wait")
        return found

    store.swap = breaks
    file = FlightParts(store, NAME)
    for step in range(1, 12):
        broken += [1] * (step % 3 == 1)
        record(file, step, step, 0)
        file.put()
    file.close()
    assert read_log(store, NAME, store.list()) == encode_lines(StepRecord(step) for step in range(1, 12))


class Unsteady:
    """A store whose next swaps are carried out and not answered, or fail, or are refused while the version stays."""

    url = "memory://b/r"

    def __init__(self):
        self.found, self.next, self.asked = {}, [], 0

    def list(self, directory=""):
        return [*self.found]

    def committed_at(self, name):
        return 0.0

    def read_version(self, name):
        return self.found.get(name)

    def swap(self, name, data, version):
        self.asked += 1
        kind = self.next.pop(0) if self.next else "answered"
        failed = SaveFailed(name, expected="an answer", found="timeout", fix="wait")
        if kind == "refused" or (self.found[name][1] if name in self.found else None) != version:
            return None
        if kind == "down":
            raise failed
        self.found[name] = (data, self.asked)
        if kind == "unanswered":
            raise failed
        return self.asked


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    "kinds", [["unanswered", "down"], ["unanswered", "down", "down"], ["down", "unanswered", "down"]]
)
def test_puts_of_ones_own_are_known_after_several_that_failed(first, kinds):
    """Only the last attempt was remembered, so a process took its own lines for those of another one, or put them twice."""
    store = Unsteady()
    log = LogParts(store, "a.log", every_secs=1e9)
    for line in range(6):
        if line == first:
            store.next = [*kinds]
        log.append(b"%d\n" % line)
        log.put()
    assert store.found["a.log"][0] == b"0\n1\n2\n3\n4\n5\n"


def test_a_store_that_refuses_for_ever_is_asked_a_few_times(caplog):
    """A policy that denies writes looks like another writer whose version does not change: a save never ended."""
    store = Unsteady()
    store.next = ["refused"] * 1000
    log = LogParts(store, "a.log", every_secs=1e9)
    log.append(b"1\n")
    log.put()
    assert store.asked <= 16
    assert "8 refusals" in caplog.text
    store.next = []
    log.append(b"2\n")
    log.put()
    assert store.found["a.log"][0] == b"1\n2\n"


class Denied:
    """A store that takes no log until the test lets it."""

    def __init__(self, store, method):
        self._store, self._method, self.is_denied = store, method, True

    def __getattr__(self, name):
        real = getattr(self._store, name)
        if name != self._method or not self.is_denied:
            return real

        def denied(*_, **__):
            raise SaveFailed("run", expected="leave to write", found="none", fix="ask for it")

        return denied


@pytest.mark.parametrize(("denied", "had_put"), [("list", False), ("swap", False), ("swap", True)])
def test_a_log_that_is_denied_for_long_keeps_no_more_than_it_says(denied, had_put, caplog, monkeypatch):
    """R04: every line was kept in memory, and until the first put twice; then the log ended for good. What is kept is put when it can be, and the log goes on."""
    monkeypatch.setattr(log_parts, "_MOST_BYTES", 100 * LINE_BYTES)
    store = Denied(bucket()(), denied)
    file = by_hand(store)
    store.is_denied = not had_put
    if had_put:
        record(file, 1, 1, 1)
        file.put()
        store.is_denied = True
    for step in range(2, 1000, 10):
        record(file, step, step + 9, 1)
        file.put()
    parts = file._parts
    held = len(parts._waiting) + len(parts._tail.data) // LINE_BYTES
    assert 100 < held <= 110
    assert len(parts._taken) <= held
    said = [each.getMessage() for each in caplog.records]
    assert ["is not in the store yet" in each for each in said] == [True, False]
    assert "no more lines are added" in said[1]
    assert NAME in said[1]
    store.is_denied = False
    file.put()
    record(file, 2_000, 2_004, 1)
    file.close()
    assert sorted(marks_in(store)) == [*range(1 if had_put else 2, held + (1 if had_put else 2)), *range(2_000, 2_005)]
    assert "goes on" in caplog.records[2].getMessage()
    assert len(caplog.records) == 3


def test_a_log_that_was_denied_for_long_has_no_step_that_was_undone_meanwhile(caplog, monkeypatch):
    """R04: a cut is kept where lines are not, or those after it would follow what it cuts."""
    monkeypatch.setattr(log_parts, "_MOST_BYTES", 100 * LINE_BYTES)
    store = Denied(bucket()(), "swap")
    file = by_hand(store)
    for step in range(1, 200, 10):
        record(file, step, step + 9, 1)
        file.put()
    record(file, 50, 60, 2)  # after a step back
    store.is_denied = False
    file.put()
    record(file, 61, 62, 2)
    file.close()
    assert marks_in(store) == {**dict.fromkeys(range(1, 50), 1), 50: 2, 61: 2, 62: 2}


def test_lines_that_never_reached_the_store_are_said_at_the_end(caplog):
    """The store began to deny them long before, which one warning says."""
    file = by_hand(Denied(bucket()(), "swap"))
    for step in (1, 2):
        record(file, step, step, 1)
        file.put()
    file.close()
    said = [each.getMessage() for each in caplog.records]
    assert ["is not in the store yet" in each for each in said] == [True, False]
    assert "its last lines are lost" in said[1]
