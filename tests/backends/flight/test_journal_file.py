"""The file of a journal: a torn end stays the only line that is lost."""

import pytest

from trainfold.backends.flight.flights import flight_name, flight_writer
from trainfold.backends.flight.journal_file import JournalFile
from trainfold.backends.flight.journals import JOURNAL, journal_writer, note_in_journal, read_journal
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import CheckpointHostile
from trainfold.core.flight.journal_line import JournalLine
from trainfold.core.flight.step_record import StepRecord

ONE, TWO, THREE = JournalLine(1.0, "started", 0), JournalLine(2.0, "closed"), JournalLine(3.0, "started", 5)


def test_a_process_begins_a_line_of_its_own_after_a_torn_one(tmp_path):
    """R04: a kill in the middle of a write loses that line, and not the first of the next process."""
    path = tmp_path / JOURNAL
    JournalFile(path).append([ONE, TWO])
    path.write_bytes(path.read_bytes()[:-3])
    JournalFile(path).append([THREE])
    assert read_journal(LocalStore(tmp_path)).lines == (ONE, THREE)


def test_only_a_run_that_has_a_journal_gets_a_note(tmp_path):
    """`save_best` of a run that does not record writes no journal."""
    for store in (LocalStore(tmp_path), MemoryStore()):
        note_in_journal(store, ONE)
        assert read_journal(store).lines == ()
    JournalFile(tmp_path / JOURNAL).append([ONE])
    note_in_journal(LocalStore(tmp_path), TWO)
    assert read_journal(LocalStore(tmp_path)).lines == (ONE, TWO)


def test_a_store_that_does_not_answer_has_no_run_to_write_beside(monkeypatch):
    """A resume that was refused there ends with the refusal, and not with an error of its journal."""
    store = MemoryStore()
    journal = journal_writer(store)
    assert not journal.is_in_run()
    store.commit("run.json", b"{}")
    assert journal.is_in_run()
    monkeypatch.setattr(store, "size", lambda name: 1 / 0)
    assert not journal.is_in_run()


def test_a_log_that_is_a_link_is_neither_written_nor_read(tmp_path, caplog):
    """A journal through a link was written where no reader follows it."""
    (tmp_path / "run").mkdir()
    for name in (JOURNAL, flight_name(0)):
        (tmp_path / "run" / name).symlink_to(tmp_path / f"elsewhere-{name}")
    store = LocalStore(tmp_path / "run")
    journal_writer(store).append([ONE])
    flight_writer(store, 0).append([StepRecord(1)])
    assert [each.getMessage().partition(": ")[0] for each in caplog.records] == [
        str(tmp_path / "run" / name) for name in (JOURNAL, flight_name(0))
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    with pytest.raises(CheckpointHostile):
        read_journal(store)
