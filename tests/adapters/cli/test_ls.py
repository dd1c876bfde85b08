"""What `trainfold ls` shows of each checkpoint: when it was saved, its size and kind, and what names it."""

import fcntl
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime

import pytest
import torch

from trainfold.adapters.cli import ls
from trainfold.adapters.cli.ls import list_run, list_store, pointed_names
from trainfold.adapters.cli.page.gather import PageReader
from trainfold.adapters.cli.terminal.output import aligned
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.lock_holder import this_machine
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import save
from trainfold.backends.runs.best.best_file import save_best
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.local import LocalStore
from trainfold.core.best.record import make_best_record, updated
from trainfold.core.errors import CheckpointUnreadable
from trainfold.core.page.document import page_html
from trainfold.core.state.state import Opaque, Progress, TrainState

NOW = 1_800_000_000.0


@pytest.fixture
def run(tmp_path):
    for step, age in ((10, 3 * 86400), (20, 5400), (30, 45)):
        save(TrainState(trainer=Progress(step=step), extra={"ema": 1.0}), tmp_path / "a")
        os.utime(tmp_path / "a" / f"step-{step:08d}" / "manifest.json", (NOW - age, NOW - age))
    return tmp_path / "a"


def cells(answer, *columns):
    (table,) = answer.tables
    places = [table.columns.index(column) for column in columns]
    return [tuple(row[place] for place in places) for row in table.rows]


def test_ages_are_given_in_a_unit_that_suits_them(run):
    found = cells(list_run(run, clock=NOW), "step", "age")
    assert found == [("10", "3 d"), ("20", "90 min"), ("30", "45 s")]
    each = list_run(run, clock=NOW).data["checkpoints"]
    assert [one["age_secs"] for one in each] == [259200.0, 5400.0, 45.0]
    assert each[2]["committed_at"] == datetime.fromtimestamp(NOW - 45, UTC).isoformat(timespec="seconds")


def test_dates_are_those_of_the_machine(run):
    ((date,), *_) = cells(list_run(run, clock=NOW), "date")
    assert date == f"{datetime.fromtimestamp(NOW - 3 * 86400).astimezone():%Y-%m-%d %H:%M}"


def test_a_checkpoint_from_the_future_is_of_age_zero(run):
    """Clocks can be changed; a listing must not fail because of it."""
    assert cells(list_run(run, clock=NOW - 86400), "age")[-1] == ("0 s",)


def test_the_best_and_a_partial_one_are_of_kinds_of_their_own(run):
    save_best(LocalStore(run), updated(make_best_record(metric="loss", direction="min"), {"loss": 0.5}, step=20))
    with CheckpointManager(run, components=["ema"]) as manager:
        state = TrainState(trainer=Progress(), extra={"ema": 1.0})
        state = manager.load(state, manager.should_load(state))
        manager.save(state.evolve(trainer=Progress(step=40)))
    answer = list_run(run, clock=NOW)
    assert cells(answer, "kind") == [("native",), ("native, best",), ("native",), ("native, partial",)]
    found = answer.data["checkpoints"]
    assert [one["kind"] for one in found] == ["native"] * 4
    assert found[1]["names"] == ["best"]
    assert found[3]["names"] == ["latest"]
    assert found[3]["omitted"] == ["trainer"]


def test_a_best_that_cannot_be_read_does_not_keep_a_run_from_being_listed(run):
    (run / "best.json").write_bytes(b"{}")
    assert list_run(run, clock=NOW).error is None


def test_what_a_rewind_has_left_behind_is_marked_and_its_timeline_shown(run):
    """E16: the list separates the lineage of a resume from the checkpoints outside of it."""
    with CheckpointManager(run) as manager:
        state = TrainState(trainer=Progress(), extra={"ema": 1.0})
        state = manager.load(state, manager.should_load(state, step=10))
        manager.save(state.evolve(trainer=Progress(step=40)))
    answer = list_run(run, clock=NOW)
    assert cells(answer, "step", "timeline", "status") == [
        ("10", "0", "complete"),
        ("20", "0", "complete, left behind by the run"),
        ("30", "0", "complete, left behind by the run"),
        ("40", "1", "complete, resumed next"),
    ]
    assert [one["left_behind"] for one in answer.data["checkpoints"]] == [False, True, True, False]


def test_no_checkpoint_is_resumed_next_where_a_resume_is_refused(run, monkeypatch):
    """W22, C15: the list, its JSON, a notebook and the page said that the one before was resumed next, where each resume was refused."""
    read = LocalStore.read

    def denied(store, name, **limits):
        if name == "step-00000030/manifest.json":
            raise CheckpointUnreadable(name, expected="a file that can be read", found="EACCES", fix="wait")
        return read(store, name, **limits)

    assert list_run(run).data["newest"] == "step-00000030"
    monkeypatch.setattr(LocalStore, "read", denied)
    answer, words = list_run(run), "a resume is refused while step-00000030, which may be newer, cannot be read"
    assert cells(answer, "step", "status")[1] == ("20", f"complete, {words}")
    assert (answer.error, answer.data["newest"]) == (None, None)
    shown = read_inventory(run)._repr_html_()
    assert words in shown
    assert "a resume tries it first" not in shown
    page = page_html(PageReader(run).read())
    assert "A resume is refused now" in page
    assert "no rule of the retention counts it while it cannot be read" in page


def test_a_checkpoint_that_a_pointer_names_and_that_is_gone_is_said(run, monkeypatch):
    """W22: nothing showed that the newest one had been deleted, and that a resume goes on from an older one."""
    shutil.rmtree(run / "step-00000030")
    answer = list_run(run)
    words = "CheckpointMissing: nothing"
    assert cells(answer, "checkpoint", "status")[-2:] == [
        ("step-00000020", "complete, resumed next"),
        ("step-00000030", words),
    ]
    assert answer.data["checkpoints"][-1]["names"] == ["latest"]
    assert "expected the checkpoint that the pointer latest names, found nothing" in page_html(PageReader(run).read())
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "size", lambda *_: 1)
        assert len(pointed_names(LocalStore(run), read_inventory(run))) == 0, "it was committed after the list"
    (run / "latest").unlink()
    (run / "latest").symlink_to("notes")
    assert len(cells(list_run(run), "status")) == 2


def test_a_step_that_was_trained_again_after_a_rewind_is_not_the_best(run):
    """E12: the list, the page and retention called it the best, with the score of the state that the rewind had left behind."""
    store = LocalStore(run)
    save_best(store, updated(make_best_record(metric="loss", direction="min"), {"loss": 0.5}, step=20))
    with CheckpointManager(store) as manager:
        state = TrainState(trainer=Progress(), extra={"ema": 1.0})
        state = manager.load(state, manager.should_load(state, step=10))
        manager.save(state.evolve(trainer=Progress(step=15)))
        assert cells(list_run(run), "kind")[2] == ("native, best",), "left behind, and still there"
        manager.save(state.evolve(trainer=Progress(step=20)))
    assert cells(list_run(run), "step", "timeline", "kind")[2] == ("20", "1", "native")
    with CheckpointManager(store, keep_last=1) as manager:
        state = manager.load(state, manager.should_load(state))
        manager.save(state.evolve(trainer=Progress(step=25)))
    assert not (run / "step-00000020").exists()


def test_a_save_that_did_not_finish_has_no_date(run):
    (run / "step-00000040").mkdir()
    (row,) = cells(list_run(run, clock=NOW), "date", "age", "size", "kind", "status")[-1:]
    assert row[:4] == ("", "", "", "")
    assert row[4].startswith("CheckpointTorn")
    assert aligned(list_run(run, clock=NOW).tables[0])


WRITER = """
import sys, time
from trainfold.backends.stores.local import LocalStore
store = LocalStore(sys.argv[1])
with store.lock():
    store.write("step-00000040/model-00000-of-00001.safetensors", [b"half"], size_bytes=4)
    print("written", flush=True)
    time.sleep(60)
"""


def test_a_save_under_way_is_not_called_torn(run, monkeypatch):
    """W22: of a healthy run the list called each save torn while it was written. Who writes is read, and no lock is taken, which a starting writer could miss."""
    (run / "step-00000035").mkdir()  # what a process before has left
    os.utime(run / "step-00000035", (NOW - 9e8, NOW - 9e8))
    with subprocess.Popen([sys.executable, "-c", WRITER, run], stdout=subprocess.PIPE) as writer:
        writer.stdout.readline()
        monkeypatch.setattr(fcntl, "flock", None)
        answer, shown = list_run(run), read_inventory(run)._repr_html_()
        writer.kill()
    holder = f"process {writer.pid} on {socket.gethostname()}"
    old, new = cells(answer, "step", "status")[-2:]
    assert old[1].startswith("CheckpointTorn")
    assert new == ("", f"being written by {holder}")
    assert [(each["writer"], each["problem"] is None) for each in answer.data["checkpoints"][-2:]] == [(None, False), (holder, True)]  # fmt: skip
    assert (shown.count(f"being written by {holder}"), shown.count("CheckpointTorn")) == (1, 1), "in a notebook too"
    assert cells(list_run(run), "status")[-1][0].startswith("CheckpointTorn"), "it was killed"


def test_what_another_machine_writes_is_under_way_while_it_changes(run):
    """W22: a process of another machine cannot be seen, so a new change is the sign of it."""
    (run / "step-00000040").mkdir()
    now = (run / "step-00000040").stat().st_mtime

    def status(holder, *, locked, changed):
        (run / ".lock").write_text(f"{holder}\n")
        os.utime(run / ".lock", (locked, locked))
        os.utime(run / "step-00000040", (changed, changed))
        return cells(list_run(run), "status")[-1][0]

    other = "process 7 on elsewhere"
    assert status(other, locked=now - 9000, changed=now) == f"being written by {other}, if that still runs"
    assert status(other, locked=now - 9000, changed=now - 1000).startswith("CheckpointTorn")
    assert status(other, locked=now + 5, changed=now).startswith("CheckpointTorn"), "of a process before"
    me = f"process {os.getpid()} on {socket.gethostname()}"
    assert status(me, locked=now, changed=now) == f"being written by {me}"
    assert status(me, locked=NOW - 9e8, changed=now).startswith("CheckpointTorn"), "another one had the number"
    assert status(f"{me}\n{this_machine()}", locked=now, changed=now) == f"being written by {me}"
    gone = f"process 4194303 on {socket.gethostname()}"
    assert status(gone, locked=now, changed=now).startswith("CheckpointTorn")
    inside = f"{gone} (in another container, or before a restart)"
    assert status(f"{gone}\nother", locked=now, changed=now) == f"being written by {inside}, if that still runs"
    for text in ("", "\x1b[31m", "process x on y", f"process {10**30} on elsewhere"):
        assert status(text, locked=now, changed=now).startswith("CheckpointTorn")
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(run / "run.json")
    assert cells(list_run(run), "status")[-1][0].startswith("CheckpointTorn")


def test_a_run_whose_first_save_is_under_way_says_so(tmp_path):
    save(TrainState(trainer=Progress(step=40)), tmp_path)
    (tmp_path / "step-00000040" / "manifest.json").unlink()
    assert "1 save that did not finish" in str(list_run(tmp_path).error)
    (tmp_path / "latest").unlink()
    with LocalStore(tmp_path).lock():
        (tmp_path / "step-00000040" / "model").write_bytes(b"half")
        error = list_run(tmp_path).error
    assert (error.found, error.fix) == ("1 save under way", "wait until it has finished")


class Asked:
    """A store that notes what it is asked of each checkpoint."""

    def __init__(self, store):
        self._store, self.asked = store, Counter()

    def __getattr__(self, verb):
        found = getattr(self._store, verb)

        def ask(*args, **options):
            if args:
                self.asked[verb, args[0].partition("/")[0]] += 1
            return found(*args, **options)

        return ask if callable(found) else found


def test_older_checkpoints_are_listed_from_the_first_lines_of_their_manifests(tmp_path):
    """18, 3.3: sixteen are proved. Of each other one the list asks for a first line and a date, however many files it has."""
    for step in range(1, 20):
        save(TrainState(trainer=Progress(step=step), extra={"ema": 1.0}), tmp_path / "a")
    path = tmp_path / "a" / "step-00000002" / "manifest.json"
    path.write_bytes(path.read_bytes().partition(b",\n")[0] + b",\nand then something else")
    store = Asked(LocalStore(tmp_path / "a"))
    answer = list_store(store, read_inventory(store), clock=NOW)
    assert cells(answer, "step", "status")[:4] == [(str(step), "committed") for step in (1, 2, 3)] + [("4", "complete")]
    assert cells(answer, "size", "components", "kind")[0] == cells(answer, "size", "components", "kind")[-2]
    found = answer.data["checkpoints"]
    assert [one["proved"] for one in found] == [False] * 3 + [True] * 16
    assert {**found[0]["fingerprints"], "trainer": None} == {**found[-1]["fingerprints"], "trainer": None}
    for step in (1, 2, 3):
        name = f"step-{step:08d}"
        asked = {verb: count for (verb, where), count in store.asked.items() if where == name}
        assert asked == {"read": 1, "committed_at": 1}


def test_a_checkpoint_of_very_many_files_is_proved_by_its_manifest(tmp_path, monkeypatch):
    """18, 3.3: what rank 0 wrote is looked at, and not the files of each of thousands of ranks."""
    monkeypatch.setattr(ls, "_MOST_FILES", 3)
    run_threads(4, lambda ranks: save(state_of_rank(ranks.rank), tmp_path / "a", collectives=ranks))
    (tmp_path / "a" / "step-00000001" / "rng-00003-of-00004.safetensors").unlink()
    assert cells(list_run(tmp_path / "a"), "status") == [("complete, resumed next",)]
    monkeypatch.undo()
    assert cells(list_run(tmp_path / "a"), "status") == [("CheckpointTorn: no such file",)]


def state_of_rank(rank):
    return TrainState(trainer=Progress(step=1), rng=Opaque({"stream": torch.full((3,), rank)}))
