"""The journal of a run: starts, saves with their moments, warnings, evaluations and the end, as a manager writes them."""

import logging
import warnings

import pytest
from kit.adapters.manager.flight_cases import died
from kit.adapters.manager.manager_cases import Job

from trainfold.adapters.manager.disabled import DisabledManager
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.flight.flight_values import FlightValues
from trainfold.backends.flight.flights import flight_name
from trainfold.backends.flight.journal_parts import written_here
from trainfold.backends.flight.journals import JOURNAL, read_journal
from trainfold.backends.runs.best.best_file import save_best
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore, read_only
from trainfold.backends.tiers.two_tiers import TwoTiers
from trainfold.backends.user_warning import WARNED, warn_user
from trainfold.core.best.record import make_best_record, updated
from trainfold.core.errors import ResumeRefused
from trainfold.core.flight.journal_line import drifts_of
from trainfold.core.history.inventory import Inventory
from trainfold.core.page.document import sections_html
from trainfold.core.page.run_page import FlightFacts, RunPage
from trainfold.core.page.save_times import saves_of
from trainfold.core.page.sessions import sessions_of
from trainfold.core.save.retention import keep_every
from trainfold.core.state.state import Progress, TrainState


def trained(run, steps, *, closes, mode="async"):
    """Train until a step; a process that is killed closes nothing."""
    manager = CheckpointManager(run, every=2, mode=mode, record=0, keep_last=2, keep=keep_every(4))
    job = Job(0)
    manager.restore(job.live)
    for x, y in job.live.batches(steps=steps):
        loss = ((job.model(x) - y) ** 2).mean()
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        job.live.record(loss=loss, lr=0.1)
        job.live.advance(samples=len(x))
        manager.step(job.live)
    manager.drain()
    if closes:
        manager.close()
        return
    died(manager)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_and_resumed_run_shows_what_was_done_again_and_when_each_save_was_durable(tmp_path, mode):
    """W22, P33: the starts, the recomputed steps, each save's call, stall, writing and durable moment."""
    run = tmp_path / "run"
    trained(run, 5, closes=False, mode=mode)
    trained(run, 8, closes=True, mode=mode)
    journal = read_journal(LocalStore(run)).lines
    values = FlightValues(flight_name(0))
    values.read(LocalStore(run))
    first, second = sessions_of(journal, FlightFacts(last=values.last, written_at=values.written_at))
    assert (first.first, first.last, first.ending) == (0, 5, "killed")
    assert (second.first, second.last, second.ending, second.recomputed) == (4, 8, "closed", 1)
    saves = saves_of(journal)
    assert [(save.step, save.outcome) for save in saves] == [(step, "written") for step in (2, 4, 6, 8)]
    for save in saves:
        assert save.called <= save.began <= save.durable
        assert save.called <= save.returned
        assert first.began_at <= save.called <= second.ended_at
    assert {line.data["metric"] for line in journal if line.kind == "evaluated"} == {"lr"}
    assert [line.step for line in journal if line.kind == "evaluated"] == [1, 5], "not what comes in each step"
    started = [line for line in journal if line.kind == "started"]
    assert [line.data["keep"] for line in started] == [[["every", 4], ["last", 2]]] * 2
    assert [(line.data.get("reached"), "reached_at" in line.data) for line in started] == [(None, False), (5, True)]


def test_a_loop_that_goes_back_leaves_how_far_it_had_come(tmp_path):
    """W22: a restore of an older step in the same process; the lines before it may be those of saves alone."""
    run = LocalStore(tmp_path / "run")
    with CheckpointManager(run, every=4, record=0) as manager:
        job = Job(0)
        manager.restore(job.live)
        job.run(manager, 7)
        manager.restore(job.live, step=4)
        manager.restore(job.live, step=4)
        job.run(manager, 9)
    lines = read_journal(run).lines
    assert [(line.step, line.data.get("reached")) for line in lines if line.kind == "restored"] == [(4, 7), (4, 4)]
    (session,) = sessions_of(lines, None)
    assert (session.first, session.at_end, session.recomputed, session.ending) == (0, 8, 3, "closed")
    (again,) = sessions_of(lines, FlightFacts(last=9, written_at=lines[-1].at))
    assert (again.last, again.at_end) == (9, 9)


def test_warnings_events_a_best_and_an_exception_are_in_the_journal(tmp_path):
    """W22: what a person was warned of is on the page, and not only in a terminal that is gone."""
    run = LocalStore(tmp_path / "run")
    with pytest.raises(KeyError), CheckpointManager(run, every=2, record=0) as manager:  # noqa: PT012
        job = Job(0)
        manager.restore(job.live)
        job.run(manager, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warn_user("by the way")
        logging.getLogger("trainfold").warning("%s: odd", "here")
        save_best(run, updated(make_best_record(metric="acc", direction="max"), {"acc": 0.5}, step=2))
        raise KeyError
    lines = read_journal(run).lines
    assert {"UserWarning: by the way", "here: odd"} <= {line.detail for line in lines if line.kind == "warned"}
    assert [(line.step, line.data["score"]) for line in lines if line.kind == "best"] == [(2, 0.5)]
    assert [line.detail for line in lines if line.kind == "committed"]
    assert (lines[-1].kind, lines[-1].detail) == ("closed", "KeyError")
    assert not WARNED
    assert not logging.getLogger("trainfold").filters


@pytest.mark.parametrize("in_bucket", [False, True])
def test_a_resume_that_was_refused_is_in_the_journal_and_is_no_process(tmp_path, in_bucket):
    """W22: a process that ended with it had written no line, and the page had no word of it."""
    run = MemoryStore() if in_bucket else LocalStore(tmp_path / "run")
    trained(run, 5, closes=False)
    if in_bucket:
        written_here(run).put()  # what a kill left
    before = sessions_of(read_journal(run).lines, None)
    manager = CheckpointManager(run, record=0)
    with pytest.raises(ResumeRefused):
        manager.restore(Job(0).live, step=99)
    died(manager)  # nothing closes it
    lines = read_journal(run).lines
    assert (lines[-1].kind, lines[-1].step) == ("refused", 99)
    assert "step-00000099" in lines[-1].detail
    assert sessions_of(lines, None) == before
    shown = sections_html(RunPage(Inventory("runs/a", "r", ()), lines[-1].at, journal=lines))["findings"]
    assert "A resume was refused, step 99" in shown
    with CheckpointManager(run, record=0) as manager:
        job = Job(0)
        with pytest.raises(ResumeRefused):
            manager.restore(job.live, step=98)
        manager.restore(job.live)
        job.run(manager, 8)
    lines = read_journal(run).lines
    assert [line.step for line in lines if line.kind == "refused"] == [99, 98]
    killed, ended = sessions_of(lines, None)
    assert (killed.ended_at, killed.ending) == (before[0].ended_at, "killed")
    assert (ended.first, ended.ending) == (4, "closed")


@pytest.mark.parametrize("place", ["new path", "notes", "bucket", "tiers"])
def test_a_resume_that_was_refused_where_there_is_no_run_writes_nothing_there(tmp_path, place):
    """A mistyped path, or a folder of notes, got a journal: the trace of a run that never was."""
    far, near = MemoryStore(), tmp_path / "runs" / "a"
    if place == "notes":
        near.mkdir(parents=True)
        (near / "notes.txt").write_text("lr 0.1 was better")
    run = {"bucket": far, "tiers": TwoTiers(near, far)}.get(place, LocalStore(near))
    before = LocalStore(near).list()
    with CheckpointManager(run, record=0) as manager, pytest.raises(ResumeRefused):
        manager.restore(Job(0).live, step=99)
    assert (LocalStore(near).list(), far.list()) == (before, [])


def test_a_resume_that_was_refused_before_the_run_began_is_in_the_journal_once_it_begins(tmp_path):
    with CheckpointManager(tmp_path / "run", every=2, record=0) as manager:
        job = Job(0)
        with pytest.raises(ResumeRefused):
            manager.restore(job.live, step=99)
        manager.restore(job.live)
        job.run(manager, 2)
    lines = read_journal(LocalStore(tmp_path / "run")).lines
    assert [line.step for line in lines if line.kind == "refused"] == [99]
    (session,) = sessions_of(lines, None)
    assert (session.first, session.ending) == (0, "closed")


def test_a_resume_that_was_refused_is_the_error_though_its_line_cannot_be_written(caplog, monkeypatch):
    """Of a run that may only be read, the journal adds a warning."""
    run = MemoryStore()
    trained(run, 3, closes=True)
    before = read_journal(run)
    manager = CheckpointManager(run, record=0)
    monkeypatch.setattr(run, "_fault", read_only)
    with pytest.raises(ResumeRefused):
        manager.restore(Job(0).live, step=99)
    died(manager)
    assert read_journal(run) == before
    assert sum("journal.jsonl" in line.getMessage() for line in caplog.records) == 1


def test_a_manager_that_trains_nothing_or_does_not_record_writes_no_journal(tmp_path):
    with CheckpointManager(tmp_path / "a", every=2, record=0):
        pass
    with CheckpointManager(tmp_path / "b", every=2) as manager:
        job = Job(0)
        manager.restore(job.live)
        job.run(manager, 2)
    assert not (tmp_path / "a" / JOURNAL).exists()
    assert not (tmp_path / "b" / JOURNAL).exists()


def test_a_journal_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    """As a flight log: a full disk, or a directory in its place, is a warning."""
    (tmp_path / "run" / JOURNAL).mkdir(parents=True)
    with CheckpointManager(tmp_path / "run", every=2, record=0) as manager:
        job = Job(0)
        manager.restore(job.live)
        assert job.run(manager, 4) == [2, 4]
    assert sum("the journal is not continued" in line.getMessage() for line in caplog.records) == 1


def counting(state, batch):
    """A pure step."""
    counted = Progress(state.trainer.step + 1, samples=state.trainer.samples + batch)
    return state.evolve(trainer=counted), {"loss": batch / 2}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_and_resumed_loop_of_pure_steps_has_a_journal_and_the_log_of_the_unkilled_one(tmp_path, mode):
    """W22, R04: starts, kills, what was computed again and the moments of saves, as of a live run."""

    def trained(run, steps, *, closes=True):
        manager = CheckpointManager(run, every=2, record=3, mode=mode)
        step, state = manager.recorded(counting), TrainState(trainer=Progress())
        if manager.should_load(state):
            state = manager.load(state)
        manager.step(state)
        for batch in range(state.trainer.step + 1, steps + 1):
            state, _ = step(state, batch)
            manager.step(state)
        manager.drain()
        manager.close() if closes else died(manager)

    trained(tmp_path / "whole", 8)
    trained(tmp_path / "run", 5, closes=False)
    trained(tmp_path / "run", 8)
    assert (tmp_path / "run" / flight_name(0)).read_bytes() == (tmp_path / "whole" / flight_name(0)).read_bytes()
    journal = read_journal(LocalStore(tmp_path / "run")).lines
    first, second = sessions_of(journal, None)
    assert (first.first, first.last, first.ending) == (0, 5, "killed")
    assert (second.first, second.ending, second.recomputed) == (4, "closed", 1)
    assert {save.step for save in saves_of(journal)} == {2, 4, 6, 8}


def test_a_manager_that_does_not_record_gives_the_step_itself(tmp_path):
    """A loop is written once, whatever its configuration says."""
    with CheckpointManager(tmp_path) as manager:
        assert manager.recorded(counting) is counting
    with DisabledManager() as manager:
        assert manager.recorded(counting) is counting


def test_what_a_resume_accepted_is_in_the_journal_for_good(tmp_path):
    """W22: with `adapt` nothing is warned of, and the checkpoints after it have the new setting alone."""
    for decay, policy in ((0.01, None), (0.1, {"hyperparameters": "adapt"})):
        with CheckpointManager(tmp_path, every=2, record=0, policy=policy) as manager:
            job = Job(0, decay=decay)
            manager.restore(job.live)
            job.run(manager, job.live.progress.step + 2)
    lines = read_journal(LocalStore(tmp_path)).lines
    ((found, *_),) = [drifts_of(line) for line in lines if line.kind == "met"]
    assert found[:2] == ("adapt", "hyperparameters")
    assert (found[3], found[4]) == ("0.01", "0.1")
    started = [at for at, line in enumerate(lines) if line.kind == "started"]
    assert [line.kind for line in lines[started[1] :]][:3] == ["started", "restored", "met"]
