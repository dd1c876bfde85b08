"""`PageReader`: reads the facts of a run for its page; again and again, if the run goes on."""

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import attrs

from trainfold.adapters.cli.locate import open_run
from trainfold.adapters.cli.ls import committed_at, pointed_names, proved
from trainfold.adapters.cli.page.opened_indexes import OpenedIndexes
from trainfold.adapters.cli.page.undone_steps import Resumed, without
from trainfold.adapters.cli.plan import planned_resume
from trainfold.backends.flight.flight_values import FlightValues
from trainfold.backends.flight.flights import flight_name, ranks_with_log
from trainfold.backends.flight.journals import JOURNAL, read_journal
from trainfold.backends.flight.log_pieces import sizes_of
from trainfold.backends.lock_holder import still_runs
from trainfold.backends.runs.best.best_reader import read_best
from trainfold.backends.runs.quarantine_file import quarantined
from trainfold.backends.side_by_side import side_by_side
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.place import settled_place
from trainfold.backends.stores.protocol import Store
from trainfold.core.best.best_json import BEST_FILE, BestFile
from trainfold.core.errors import CheckpointError, TrainfoldError
from trainfold.core.flight.journal_line import JournalLines
from trainfold.core.history.inventory import Inventory
from trainfold.core.history.quarantine import with_quarantined
from trainfold.core.markup.curve import curve_of
from trainfold.core.markup.texts import count_text
from trainfold.core.page.run_page import FlightFacts, ResumeFacts, RunPage
from trainfold.core.resume.request import resume_request
from trainfold.core.resume.resume_plan import Refusal

_MOST_RANKS: Final = 8  # whose logs are read
_COPIED_SECS: Final = 600.0  # a line is written when its save has been collected, after its step
_MOST_FLIGHT: Final = 2**27  # bytes of their logs: two million steps; that of rank 0 is read whatever it has


@final
class PageReader:
    """Reads a run, in a directory or a bucket. It writes nothing there.

    Args:
        run: the location.

    Raises:
        CheckpointError: the matching subclass, if it is not a run.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._store, _ = open_run(run, begun=JOURNAL)
        self._indexes = OpenedIndexes()
        self._logs: dict[int, FlightValues] = {}
        self._seen: object = None  # as the files were before the last read in which none failed
        self._has_failed = False
        self._is_copied = False
        self._started: Mapping[str, Any] = {}  # the last process

    def has_changed(self) -> bool:
        """Whether there is something new since the last read, or that one failed; always of a bucket, whose answer would cost as much as the facts."""
        return not isinstance(self._store, LocalStore) or self._stamps(self._store) != self._seen

    def _stamps(self, store: LocalStore) -> list[tuple[int, int] | bool | None]:
        place = Path(store.url)
        names = ("", JOURNAL, BEST_FILE, *map(flight_name, range(_MOST_RANKS)))
        return [self._runs(), *(_stamp(place / name) for name in names)]

    def _runs(self) -> bool | None:
        """Whether the last process runs, which leaves no file when it is killed; None of a copy, and in a bucket: it may have ended well since the journal was put there."""
        if not isinstance(self._store, LocalStore) or self._started.get("place") != settled_place(self._store.url):
            return None
        try:
            journal = Path(self._store.url, JOURNAL).stat()
        except OSError:
            return None
        is_copy = journal.st_ctime_ns > journal.st_mtime_ns  # one that keeps times
        return None if is_copy or self._is_copied else still_runs(self._started)

    def read(self) -> RunPage:
        """The facts as they are now.

        Raises:
            CheckpointError: the matching subclass, if it is not a run any more.
        """
        self._seen, self._has_failed = None, False
        seen = self._stamps(self._store) if isinstance(self._store, LocalStore) else None
        page = self._read()
        if not self._has_failed:
            self._seen = seen
        return page

    def _read(self) -> RunPage:
        now = time.time()
        store, inventory = open_run(self._run, begun=JOURNAL)
        roots: dict[str, bytes] = {}
        inventory = proved(store, inventory, roots=roots)
        inventory = with_quarantined(self._indexes.of(store, inventory, roots), quarantined(store))
        times = side_by_side([partial(committed_at, store, entry) for entry in inventory.entries])
        unread: list[str] = []
        journal = self._journal(store, unread)
        self._started = next((each.data for each in reversed(journal.lines) if each.kind == "started"), {})
        self._is_copied = is_copied = _is_copied(store, journal)
        return RunPage(
            inventory,
            now,
            {entry.name: at for entry, at in zip(inventory.entries, times, strict=True) if at is not None},
            pointed_names(store, inventory),
            _best(store, unread),
            journal.lines,
            _own_times(self._flight(store, Resumed(inventory, journal, is_copied), unread), is_copied=is_copied),
            _resume(store, inventory),
            tuple(unread),
            journal.left_out,
            is_copied,
            settled_place(store.url),
            self._runs(),
        )

    def _journal(self, store: Store, unread: list[str]) -> JournalLines:
        try:
            found = read_journal(store)
        except (CheckpointError, OSError) as error:
            unread.append(f"the journal: {error}")
            self._has_failed = True
            return JournalLines()
        if found.unreadable:
            unread.append(
                f"{count_text(found.unreadable, 'line')} of the journal: torn, as a kill may leave one, or damaged"
            )
        return found

    def _flight(self, store: Store, resumed: Resumed, unread: list[str]) -> FlightFacts | None:
        """The log of rank 0, and those of the others that fit."""
        names, left, shown = store.list(), _MOST_FLIGHT, dict[int, FlightFacts]()
        ranks = ranks_with_log(names)
        for rank in ranks[:_MOST_RANKS]:
            left -= sum(size for _, size in sizes_of(store, flight_name(rank), names))
            if left < 0 and shown:
                break
            facts = self._log(store, rank, resumed, unread)
            if facts is not None:
                shown[rank] = facts
        own = shown.pop(0, None)
        if own is None and not shown:
            return None
        return attrs.evolve(own or FlightFacts(), others=shown, not_shown=len(ranks) - len(shown) - (0 in ranks))

    def _log(self, store: Store, rank: int, resumed: Resumed, unread: list[str]) -> FlightFacts | None:
        log = self._logs.setdefault(rank, FlightValues(flight_name(rank)))
        try:
            log.read(store)
        except (CheckpointError, OSError) as error:
            unread.append(f"the flight log of rank {rank}: {error}")
            self._has_failed = True
            return None
        damage = log.damage.text_of(flight_name(rank)) if log.damage else ""
        if damage:
            unread.append(damage)
        if log.last is None and not damage:
            return None
        spans, undone = resumed.undone(log, flight_name(rank))
        return FlightFacts(
            curve_of(*without(log.loss, spans)),
            curve_of(*without(log.norm, spans)),
            log.first,
            log.last,
            log.written_at,
            damage=damage,
            undone=undone,
        )


def _is_copied(store: Store, journal: JournalLines) -> bool:
    """Whether the journal got its contents long after its last line: then the times of the logs' files are those of their copying."""
    sizes = sizes_of(store, JOURNAL, store.list()) if journal.lines else []
    changed_at = store.committed_at(sizes[-1][0]) if sizes else None
    return changed_at is not None and changed_at > max(line.at for line in journal.lines) + _COPIED_SECS


def _own_times(flight: FlightFacts | None, *, is_copied: bool) -> FlightFacts | None:
    return attrs.evolve(flight, written_at=None) if flight is not None and is_copied else flight


def _best(store: Store, unread: list[str]) -> BestFile | None:
    try:
        return read_best(store)
    except CheckpointError as error:
        unread.append(str(error))
        return None


def _resume(store: Store, inventory: Inventory) -> ResumeFacts:
    try:
        planned = planned_resume(store, inventory, resume_request())
    except TrainfoldError as error:
        return ResumeFacts(problems=(str(error),))
    if isinstance(planned, Refusal):
        return ResumeFacts(problems=() if planned.finds_nothing else tuple(map(str, planned.reasons)))
    drifts = tuple((each.verdict, each.kind, each.where, str(each.saved), str(each.wanted)) for each in planned.drifts)
    return ResumeFacts(planned.checkpoint, drifts, tuple(map(str, planned.passed_over)))


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
