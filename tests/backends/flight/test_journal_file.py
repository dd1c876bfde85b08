"""The file of a journal: a torn end stays the only line that is lost."""

from trainfold.backends.flight.journal_file import JOURNAL, JournalFile, note_in_journal, read_journal
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.flight.journal_line import JournalLine

ONE, TWO, THREE = JournalLine(1.0, "started", 0), JournalLine(2.0, "closed"), JournalLine(3.0, "started", 5)


def test_a_process_begins_a_line_of_its_own_after_a_torn_one(tmp_path):
    """R04: a kill in the middle of a write loses that line, and not the first of the next process."""
    path = tmp_path / JOURNAL
    JournalFile(path).append([ONE, TWO])
    path.write_bytes(path.read_bytes()[:-3])
    JournalFile(path).append([THREE])
    assert read_journal(LocalStore(tmp_path)) == (ONE, THREE)


def test_only_a_run_that_has_a_journal_gets_a_note(tmp_path):
    """`save_best` of a run that does not record writes no journal."""
    for store in (LocalStore(tmp_path), MemoryStore()):
        note_in_journal(store, ONE)
        assert read_journal(store) == ()
    JournalFile(tmp_path / JOURNAL).append([ONE])
    note_in_journal(LocalStore(tmp_path), TWO)
    assert read_journal(LocalStore(tmp_path)) == (ONE, TWO)
