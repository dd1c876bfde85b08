"""`record=` of a run in a bucket: its log is that of the unkilled run, is there before each checkpoint, and every reader reads it."""

import gc
import json
import re
import subprocess
import sys
import threading
import time

import pytest
from kit.adapters.cli_cases import fits_its_schema
from kit.adapters.manager.flight_cases import Recorded, died
from obstore.store import MemoryStore as Bucket

from trainfold.adapters.cli import main
from trainfold.adapters.flight.flight_log import FlightLog, replay
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.flight.flights import flight_name, read_flights
from trainfold.backends.flight.journals import JOURNAL, read_journal
from trainfold.backends.flight.log_pieces import read_log
from trainfold.backends.flight.replay_place import location_of
from trainfold.backends.stores.memory import MemoryStore
from trainfold.backends.stores.object_store import open_url
from trainfold.backends.stores.object_store.object_store import ObjectStore
from trainfold.core.page.save_times import saves_of
from trainfold.core.page.sessions import sessions_of
from trainfold.core.state.state import Progress, TrainState

NAME = flight_name(0)


class Seen:
    """A store that notes which names are written, in which thread."""

    def __init__(self, store):
        self._store, self.writes = store, []

    def __getattr__(self, name):
        return getattr(self._store, name)

    def write(self, name, parts, *, size_bytes):
        self._store.write(name, parts, size_bytes=size_bytes)
        self.writes.append((name, threading.current_thread() is threading.main_thread()))

    def commit(self, name, data, *, replaces=None):
        log = read_flights(self._store)[0].steps if NAME in self._store.list() else {}
        self._store.commit(name, data, replaces=replaces)
        if name.endswith("manifest.json"):
            self.writes.append((name, list(log)))


def log_of(store):
    return read_log(store, NAME, store.list())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_in_a_bucket_that_was_killed_and_resumed_has_the_log_of_the_unkilled_run(mode, tmp_path):
    """R04, C13: bit for bit that of a run in a directory; before each commit the log has all of its steps; the loop puts nothing."""
    with CheckpointManager(tmp_path, every=2, record=3) as manager:
        Recorded(0).run(manager, 9)
    store = Seen(MemoryStore())
    first = CheckpointManager(store, every=2, record=3, mode=mode)
    Recorded(0).run(first, 9, 5)
    first.drain()
    died(first)
    assert list(read_flights(store)[0].steps)[:4] == [1, 2, 3, 4]
    with CheckpointManager(store, every=2, record=3, mode=mode) as manager:
        Recorded(0).run(manager, 9)
        manager.drain()
        assert {here for name, here in store.writes if name in (NAME, JOURNAL)} <= {mode == "sync", False}
    assert log_of(store) == (tmp_path / NAME).read_bytes()
    commits = {int(re.findall(r"\d+", name)[0]): steps for name, steps in store.writes if isinstance(steps, list)}
    assert list(commits) == [2, 4, 6, 8]
    assert all(steps[:saved] == [*range(1, saved + 1)] for saved, steps in commits.items())
    before, after = sessions_of(read_journal(store).lines, None)
    assert (before.first, before.ending, after.first, after.ending) == (0, "killed", 4, "closed")
    assert after.is_least
    assert [(save.step, save.outcome) for save in saves_of(read_journal(store).lines)][-1] == (8, "written")


def test_a_loop_of_pure_steps_records_into_a_bucket_and_is_replayed_from_there():
    """P32: `FlightLog` and `replay` take any run."""
    store = ObjectStore(Bucket(), url="memory://pure")
    log, state = FlightLog(store), TrainState(trainer=Progress())
    for batch in range(1, 9):
        state, _ = log.recorded(counting)(state, batch)
    log.close()
    assert replay(counting, TrainState(trainer=Progress()), range(1, 9), store)
    assert replay(counting, TrainState(trainer=Progress()), [1, 2, 4], store).difference.step == 3


def counting(state, batch):
    """A pure step that counts."""
    counted = Progress(state.trainer.step + 1, samples=state.trainer.samples + batch)
    return state.evolve(trainer=counted), {"loss": batch / 2}


def until(condition):
    late = time.monotonic() + 10
    while not condition() and time.monotonic() < late:
        time.sleep(0.01)


def test_a_log_that_only_its_step_holds_is_written_to_its_end():
    """P32: as the page has it, `FlightLog(run).recorded(step)`: the log lives as long as the step, and its end is put when that goes."""
    store = ObjectStore(Bucket(), url="memory://pure")
    recorded, state = FlightLog(store).recorded(counting), TrainState(trainer=Progress())
    gc.collect()
    for batch in range(1, 9):
        state, _ = recorded(state, batch)
        until(store.list)  # the first put, in a thread of its own; the next one would be a minute later
    del recorded
    gc.collect()
    until(lambda: 8 in read_flights(store)[0].steps)
    assert list(read_flights(store)[0].steps) == [*range(1, 9)]


ENDING = """
import sys
from trainfold import Progress, TrainState
from trainfold.backends.stores.local import LocalStore
from trainfold.states import FlightLog

class Bucket:  # which cannot append
    def __init__(self, place): self._store = LocalStore(place)
    def __getattr__(self, name): return getattr(self._store, name)

def step(state, batch):
    return state.evolve(trainer=Progress(state.trainer.step + 1)), {}

recorded, state = FlightLog(Bucket(sys.argv[1])).recorded(step), TrainState(trainer=Progress())
for batch in range(300):
    state, _ = recorded(state, batch)
"""


@pytest.mark.long
def test_the_end_of_a_program_puts_the_end_of_its_log(tmp_path):
    """P32: a program of the page closes nothing; its log has all steps after it."""
    subprocess.run([sys.executable, "-c", ENDING, str(tmp_path)], check=True)
    assert list(read_flights(tmp_path)[0].steps) == [*range(1, 301)]


@pytest.fixture
def buckets(monkeypatch):
    """Runs at URLs, each in a store of its own."""
    clients = {}

    def opened(url):
        url = location_of(url)
        return ObjectStore(clients.setdefault(url, Bucket()), url=url)

    monkeypatch.setattr(open_url, "open_url", opened)


@pytest.mark.usefixtures("buckets")
def test_the_commands_read_the_logs_of_runs_in_buckets(tmp_path, capsys):
    """W22: the page has the starts, the losses and the saves of a run in a bucket; bisect finds the step in its log."""
    for name, seed in (("a", 0), ("b", 1)):
        with CheckpointManager(f"s3://bucket/{name}", every=4, record=0) as manager:
            Recorded(seed).run(manager, 8)
    assert main(["page", "s3://bucket/a", "-o", str(tmp_path / "run.html"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    fits_its_schema("page", found)
    assert (found["processes"], found["losses"], found["checkpoints"]) == (1, 8, 2)
    assert main(["bisect", "s3://bucket/a", "s3://bucket/b", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["a"], found["b"]) == (1, "s3://bucket/a", "s3://bucket/b")
    assert found["warnings"] == []


def test_a_log_that_is_collected_inside_of_its_own_thread_does_not_wait_for_itself():
    """The collector runs in whichever thread allocates: in the one that puts, the end of the log waited for that thread, for good."""
    store, gate, done = MemoryStore(), threading.Event(), threading.Event()
    write = store.write

    def collecting(name, parts, *, size_bytes):
        if threading.current_thread() is not threading.main_thread() and not done.is_set():
            gate.wait(10)
            gc.collect()
            done.set()
        return write(name, parts, size_bytes=size_bytes)

    store.write = collecting
    log = FlightLog(store)
    recorded = log.recorded(
        lambda state, batch: (TrainState(trainer=Progress(step=state.trainer.step + 1, samples=1)), {"loss": 1.0})
    )
    recorded(TrainState(trainer=Progress(step=0, samples=0)), None)  # its thread starts, and waits
    cycle = [recorded]
    cycle.append(cycle)
    del recorded, log, cycle
    gate.set()
    assert done.wait(20)
    for _ in range(200):
        if store.list():
            break
        time.sleep(0.05)
    assert store.list() == [NAME]
