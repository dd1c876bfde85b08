"""`trainfold page RUN -o FILE`: one whole file, and no other file of a run or of a person in its place."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit.adapters import cli_cases

from trainfold.adapters.cli.page import write_page as command
from trainfold.adapters.cli.page.gather import PageReader
from trainfold.backends.flight.flights import flight_name
from trainfold.backends.flight.journal_file import JournalFile
from trainfold.backends.flight.journals import JOURNAL
from trainfold.backends.lock_holder import start_of, this_machine
from trainfold.backends.stores.place import settled_place
from trainfold.core.errors import CheckpointMissing
from trainfold.core.flight import journal_line
from trainfold.core.flight.journal_line import JournalLine
from trainfold.core.flight.log_lines import encode_lines
from trainfold.core.flight.step_record import StepRecord, float_bits_of
from trainfold.core.page.document import BEGIN, page_html
from trainfold.core.page.sessions import IN_WORDS

saved = cli_cases.saved
run = cli_cases.run
call = cli_cases.call
answered = cli_cases.answered


@pytest.fixture
def recorded(run):
    """The run with a flight log and a journal."""
    (run / flight_name(0)).write_bytes(
        encode_lines(StepRecord(step, loss=float_bits_of(1 / step)) for step in range(1, 7))
    )
    JournalFile(run / JOURNAL).append(
        [JournalLine(1e9, "started", 0), JournalLine(1e9 + 5, "called", 2, data={"returned": 1e9 + 6})]
    )
    return run


def text_of(path):
    return re.sub(r"<[^>]*>", "\n", path.read_text())


def test_a_page_is_written_of_what_the_run_has(recorded, tmp_path, answered):
    """W22."""
    before = {path: path.read_bytes() for path in recorded.rglob("*") if path.is_file() and not path.is_symlink()}
    found, _ = answered("page", recorded, "-o", tmp_path / "run.html")
    assert found["checkpoints"] == 3
    assert (found["processes"], found["losses"]) == (1, 6)
    assert found["size_bytes"] == (tmp_path / "run.html").stat().st_size
    shown = text_of(tmp_path / "run.html")
    assert {"step-00000002", "step-00000004", "step-00000006", "model"} <= set(shown.split("\n"))
    assert "0.1667" in shown, "the last loss"
    assert before == {
        path: path.read_bytes() for path in recorded.rglob("*") if path.is_file() and not path.is_symlink()
    }


def test_a_page_is_replaced_and_nothing_else_is(recorded, tmp_path, call, answered):
    page = tmp_path / "run.html"
    call("page", recorded, "-o", page)
    call("page", recorded, "-o", page)
    assert page.read_text().startswith(BEGIN)
    assert {path.name for path in tmp_path.iterdir()} == {recorded.name, "run.html"}, (
        "nothing is left of what was written first"
    )
    call("page", recorded, "-o", recorded / "run.html")
    call("ls", recorded)
    os.mkfifo(tmp_path / "pipe")
    for target in (
        tmp_path / "pipe",
        Path("/dev/null"),
        recorded / "run.json",
        recorded / "step-00000002" / "run.html",
        recorded / "latest" / "run.html",
        recorded / JOURNAL,
        tmp_path,
    ):
        _, error = answered("page", recorded, "-o", target, code=2)
        assert error["where"] == "trainfold page -o"
    _, error = answered("page", recorded, code=2)
    assert "--serve" in error["expected"]
    _, error = answered("page", recorded, "--serve", "-o", tmp_path / "new.html", code=2)
    assert error["found"] == "both"
    answered("page", recorded, "-o", tmp_path / "no" / "run.html", code=32)
    answered("page", tmp_path / "no", "-o", page, code=11)
    assert page.read_text().startswith(BEGIN)


def test_a_write_that_fails_leaves_the_page_before_it(recorded, tmp_path, call, answered, monkeypatch):
    page = tmp_path / "run.html"
    call("page", recorded, "-o", page)
    before = page.read_bytes()

    def fails(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command.os, "fsync", fails)
    answered("page", recorded, "-o", page, code=32)
    assert page.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {recorded.name, "run.html"}


def test_a_damaged_run_has_a_page_that_names_the_damage(recorded, tmp_path, call):
    (recorded / "step-00000004" / "manifest.json").write_bytes(b"{}")
    (recorded / "best.json").write_bytes(b"{}")
    (recorded / JOURNAL).write_bytes(b"\xff\n{}\n")
    (recorded / flight_name(0)).write_bytes(b"x" * 64)
    call("page", recorded, "-o", tmp_path / "run.html")
    shown = text_of(tmp_path / "run.html")
    assert "step-00000004/manifest.json: expected a manifest" in shown
    assert "best.json: expected" in shown
    assert "flight-00000.log is not a flight log" in shown
    assert "This run has no flight log" not in shown
    assert "2 lines of the journal" in shown


def test_the_json_of_a_page_has_what_could_not_be_read(recorded, tmp_path, answered):
    """W22: a program that makes pages learns of damage without reading them."""
    assert answered("page", recorded, "-o", tmp_path / "run.html")[0]["unread"] == []
    cli_cases.flip(recorded / flight_name(0), 3 * 64 + 20)
    with (recorded / JOURNAL).open("ab") as file:
        file.write(b"torn")
    found, _ = answered("page", recorded, "-o", tmp_path / "run.html")
    assert [text.partition(":")[0] for text in found["unread"]] == ["1 line of the journal", flight_name(0)]
    (recorded / JOURNAL).unlink()
    (recorded / JOURNAL).symlink_to(tmp_path / "elsewhere")
    found, _ = answered("page", recorded, "-o", tmp_path / "run.html")
    assert found["unread"][0].startswith("the journal: ")
    assert found["processes"] == 0


def test_a_page_has_the_logs_of_all_ranks_that_fit_and_counts_the_others(recorded, tmp_path, call):
    """W22: a rank that came less far, or whose loss is another one, is seen."""
    for rank in range(1, 11):
        lines = [StepRecord(step, loss=float_bits_of(step + rank)) for step in range(1, 7 - (rank == 3))]
        (recorded / flight_name(rank)).write_bytes(encode_lines(lines))
    call("page", recorded, "-o", tmp_path / "run.html")
    shown = text_of(tmp_path / "run.html")
    assert "Flight logs of the ranks" in shown
    assert "other ranks" in shown
    assert "3 ranks more have a log that is not read here" in shown


def test_a_journal_that_is_longer_than_is_read_says_so(recorded, tmp_path, answered, monkeypatch):
    """It was shown as not recorded, when the start was among the lines that were not read."""
    monkeypatch.setattr(journal_line, "MOST_LINES", 3)
    JournalFile(recorded / JOURNAL).append(
        JournalLine(1e9 + 10 + at, "evaluated", at, data={"metric": "acc", "score": 0.5}) for at in range(9)
    )
    found, _ = answered("page", recorded, "-o", tmp_path / "run.html")
    assert (found["processes"], found["journal_lines_left_out"]) == (1, 7)
    assert "The journal has 7 more lines than are read here: evaluations before" in text_of(tmp_path / "run.html")


def test_a_damaged_line_of_the_flight_log_is_named_and_costs_no_other(recorded, tmp_path, answered):
    cli_cases.flip(recorded / flight_name(0), 3 * 64 + 20)
    found, _ = answered("page", recorded, "-o", tmp_path / "run.html")
    assert found["losses"] == 5
    shown = text_of(tmp_path / "run.html")
    assert shown.count("flight-00000.log: 1 line cannot be read") == 2, "with the losses, and among the findings"


def test_losses_that_a_resume_has_undone_are_not_drawn(recorded, tmp_path, answered):
    """W22: steps of a process that was killed stood in the curve, and one of them was the loss of the overview, where the resume that undid them recorded nothing."""
    lines = [
        StepRecord(step, loss=float_bits_of(step)) for step in (1, 2, 3, 4, 5)
    ]  # step 6 was saved by another process
    for rank in (0, 1):
        (recorded / flight_name(rank)).write_bytes(encode_lines(lines))
    found, _ = answered("page", recorded, "-o", tmp_path / "run.html")
    assert found["losses"] == 4
    shown = text_of(tmp_path / "run.html")
    assert "Loss, steps 1 to 4: from 1 to 4" in (tmp_path / "run.html").read_text()
    assert shown.count("step 5 is not used: it has no record of step 6, which the run has saved") == 2, "of each rank"


def test_losses_after_the_step_that_the_last_process_began_from_are_not_drawn_before_its_first_step(
    recorded, tmp_path, answered
):
    """W22: a log is cut with the first step after a resume; until then, and if the process dies before it, it has the steps that the resume has undone."""
    written = (recorded / flight_name(0)).stat().st_mtime
    lines = [JournalLine(written + 60, "started", 4), JournalLine(written + 61, "warned", detail="late")]
    JournalFile(recorded / JOURNAL).append(lines)
    os.utime(recorded / JOURNAL, (written + 61, written + 61))
    found, _ = answered("page", recorded, "-o", tmp_path / "run.html")
    assert found["losses"] == 4
    assert "steps 5 to 6 are undone: the last process began from step 4" in text_of(tmp_path / "run.html")
    os.utime(recorded / flight_name(0), (written + 61, written + 61))
    assert answered("page", recorded, "-o", tmp_path / "run.html")[0]["losses"] == 6, "its own"


def test_a_copied_run_lasts_no_longer_than_its_journal(run, tmp_path, call):
    """W22: the last process of a killed run lasted until its directory was copied, six days later, by the time of the copied log."""
    now = time.time()
    (run / flight_name(0)).write_bytes(encode_lines(StepRecord(step, loss=float_bits_of(1.0)) for step in range(1, 7)))
    JournalFile(run / JOURNAL).append(
        [
            JournalLine(now - 500_000, "started", 0),
            JournalLine(now - 499_880, "called", 4, data={"returned": now - 499_880}),
        ]
    )
    call("page", run, "-o", tmp_path / "run.html")
    shown = text_of(tmp_path / "run.html")
    assert "2 min" in shown
    assert "5 d" not in shown
    assert "The logs were copied after the run" in shown
    for name in (JOURNAL, flight_name(0)):
        os.utime(run / name, (now, now - 499_000))
    os.utime(run / JOURNAL, (now, now - 499_880))
    call("page", run, "-o", tmp_path / "run.html")
    shown = text_of(tmp_path / "run.html")
    assert "16 min" in shown, "the time of a log that was not copied counts: it grew after the last save"
    assert "copied after" not in shown


def test_a_run_before_its_first_checkpoint_has_a_page(tmp_path, answered):
    """W22: it was refused, also by --serve, until the first checkpoint; that of a run that dies before never came."""
    run = tmp_path / "a"
    JournalFile(run / JOURNAL).append(
        [JournalLine(1e9, "started", 0), JournalLine(1e9 + 1, "warned", detail="too hot")]
    )
    (run / flight_name(0)).write_bytes(encode_lines([StepRecord(1, loss=float_bits_of(0.25))]))
    found, _ = answered("page", run, "-o", tmp_path / "run.html")
    assert (found["checkpoints"], found["processes"], found["losses"], found["run_id"]) == (0, 1, 1, None)
    shown = text_of(tmp_path / "run.html")
    assert "too hot" in shown
    assert "The run holds no checkpoint." in shown
    (run / JOURNAL).unlink()
    answered("page", run, "-o", tmp_path / "run.html", code=CheckpointMissing.exit_code)


def test_whether_the_last_process_runs_is_said_where_it_can_be_seen(run, tmp_path):
    """W22: of a process that had been killed an hour ago the page said `it runs, or it was killed`, and a live page never changed."""

    def ending(reader):
        shown = page_html(reader.read())
        return next(
            each for each in (IN_WORDS[ending] for ending in ("runs", "open", "killed")) if f">{each}<" in shown
        )

    journal, reader = JournalFile(run / JOURNAL), PageReader(run)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        seen = {"pid": process.pid, "began": start_of(process.pid), "machine": this_machine(), "place": settled_place(str(run))}  # fmt: skip
        journal.append([JournalLine(time.time(), "started", 0, data=seen)])
        assert ending(reader) == "it runs"
        for copy in (shutil.copy2, shutil.copyfile):  # the times of files are kept, or new
            shutil.copytree(run, tmp_path / copy.__name__, symlinks=True, copy_function=copy)
            shown = ending(PageReader(tmp_path / copy.__name__))
            assert shown.startswith("no end is recorded"), "the run may go on, and end well"
        reader.read()
        assert not reader.has_changed()
        process.kill()
    assert reader.has_changed()
    assert ending(reader) == "killed, or died without a word"
    for unlike in ({"machine": "another"}, {"began": ""}, {"pid": "x"}, {"place": "/runs/near"}):
        journal.append([JournalLine(time.time(), "started", 0, data=seen | unlike)])
        assert ending(reader) == "no end is recorded: it runs, or it was killed"
    journal.append([JournalLine(time.time(), "started", 0, data=seen | {"pid": os.getpid()})])
    assert ending(reader) == "killed, or died without a word", "another process has its number now"
