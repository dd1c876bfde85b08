"""The end of a process in the journal of its run, however its program ends the loop."""

import json
import signal
import subprocess
import sys

import pytest
from kit.adapters.manager.manager_cases import Job

from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.flight.journals import JOURNAL, read_journal
from trainfold.backends.stores.local import LocalStore
from trainfold.core.flight.journal_line import JournalLine
from trainfold.core.page.save_times import saves_of
from trainfold.core.page.sessions import sessions_of

INT, TERM = signal.SIGINT, signal.SIGTERM
ENDS = {  # how a program ends after three steps -> its exit code, and the end that the page shows
    "train(3); manager.finish(live)": (0, "closed", ""),
    "train(3)": (0, "closed", ""),
    "train(3); manager.close()": (0, "closed", ""),
    "train(3); sys.exit()": (0, "closed", ""),
    "train(3); raise KeyError": (1, "raised", "KeyError"),
    "train(3); raise KeyboardInterrupt": (-INT, "raised", "KeyboardInterrupt"),
    "train(3); manager.finish(live); raise KeyError": (1, "raised", "KeyError"),
    "train(3); os.kill(os.getpid(), signal.SIGTERM)": (-TERM, "killed", ""),
    "train(3); os._exit(3)": (3, "killed", ""),
    "train(3); manager.finish(live); os._exit(3)": (3, "closed", ""),
    "train(3); manager.finish(live); steps(1); os._exit(3)": (3, "killed", ""),
    "train(3); manager.finish(live); manager.save(live); os._exit(3)": (3, "killed", ""),
    "train(3); manager.finish(live); live.record(acc=1.0); os._exit(3)": (3, "killed", ""),
    "train(3); manager.finish(live); steps(1)": (0, "closed", ""),
    "train(3); manager.close(); live.record(acc=1.0)": (0, "closed", ""),
    "train(3); os.fork() or sys.exit(); os.wait(); os._exit(3)": (3, "killed", ""),
    "with manager: train(3); sys.exit(0)": (0, "closed", ""),
    "with manager: train(3); sys.exit(3)": (3, "raised", "SystemExit"),
    "in_process_of_multiprocessing(lambda: train(3))": (3, "closed", ""),
    "in_process_of_multiprocessing(fails)": (3, "raised", "KeyError"),
    "train(3); shutil.rmtree(run)": (0, None, ""),
}
FEW = [
    "train(3); manager.finish(live)",
    "train(3); raise KeyError",
    "train(3); os._exit(3)",
    "train(3); manager.finish(live); steps(1); os._exit(3)",
    "train(3); shutil.rmtree(run)",
]
PROGRAM = """
import json, multiprocessing, os, shutil, signal, sys, torch, trainfold
from pathlib import Path

def steps(count):
    for _ in range(count):
        live.advance(samples=1)
        manager.step(live)

def train(count):
    manager.restore(live)
    steps(count)

def begin(place):
    global live, manager
    live = trainfold.attach(torch.nn.Linear(1, 1))
    manager = trainfold.CheckpointManager(place, every=2, record=0)

def in_process_of_multiprocessing(target):
    def child():
        begin(run)
        target()
    started = multiprocessing.get_context("fork").Process(target=child)
    started.start()
    started.join()
    os._exit(3)

def fails():
    train(3)
    raise KeyError

begin(Path(sys.argv[1]) / "warm")  # what is imported late is imported once
train(3)
manager.close()
ends, codes, program = json.loads(sys.argv[2]), [], "print(json.dumps(codes))"
for number, each in enumerate(ends):
    run = Path(sys.argv[1]) / str(number)
    if (child := os.fork()) == 0:
        program = each
        if "process" not in each:
            begin(run)
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
exec(program)
"""


@pytest.mark.parametrize(
    "programs", [pytest.param(FEW, marks=pytest.mark.slow(4)), pytest.param(list(ENDS), marks=pytest.mark.long)]
)
def test_a_process_that_ends_in_order_is_not_shown_as_killed(tmp_path, programs):
    """W22: kills, and nothing else, are shown as kills: README's loop ends with `finish`, and closes nothing."""
    command = [sys.executable, "-c", PROGRAM, tmp_path, json.dumps(programs)]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True, check=True)
    found = {}
    for number, (program, code) in enumerate(zip(programs, json.loads(done.stdout), strict=True)):
        lines = read_journal(LocalStore(tmp_path / str(number))).lines
        after = JournalLine(2e9, "started", 0)
        session = sessions_of([*lines, after], None)[0] if lines else None
        found[program] = (code, session and session.ending, "" if session is None else session.error)
    assert found == {program: ENDS[program] for program in programs}, done.stderr
    assert not (tmp_path / str(len(programs) - 1)).exists(), "the end of a process makes no run again that was deleted"
    assert "journal" not in done.stderr


def test_the_end_is_written_once_and_again_after_more_steps(tmp_path):
    """W22: a loop of several stages calls `finish` after each of them."""
    with CheckpointManager(tmp_path, every=2, record=0) as manager:
        job = Job(0)
        manager.restore(job.live)
        for steps in (3, 5):
            job.run(manager, steps)
            manager.finish(job.live)
            manager.finish(job.live)
    kinds = [line.kind for line in read_journal(LocalStore(tmp_path)).lines]
    assert [kind for kind in kinds if kind in ("started", "closed", "reopened")] == ["started", "closed", "reopened", "closed"]  # fmt: skip
    assert kinds[-1] == "closed"
    assert (tmp_path / JOURNAL).read_bytes().count(b"\n") == len(kinds)


LAST_SAVE = """
import sys, torch, trainfold
def main():
    live = trainfold.attach(torch.nn.Linear(1, 1))
    manager = trainfold.CheckpointManager(sys.argv[1], every=2, record=0, mode="async")
    manager.restore(live)
    for _ in range(4):
        live.advance(samples=1)
        manager.step(live)
main()
"""


@pytest.mark.slow(3)
def test_a_save_that_nobody_has_asked_for_has_its_end_in_the_journal(tmp_path):
    """W22: the last save of a program that ends in order, and calls neither `finish` nor `close`, was shown without an end."""
    subprocess.run([sys.executable, "-c", LAST_SAVE, tmp_path], timeout=60, capture_output=True, check=True)
    lines = read_journal(LocalStore(tmp_path)).lines
    assert [(save.step, save.outcome) for save in saves_of(lines)] == [(2, "written"), (4, "written")]
    assert [line.data.get("stalled", 0) > 0 for line in lines if line.kind == "written"] == [True, True]
    assert [line.kind for line in lines][-1] == "closed"
