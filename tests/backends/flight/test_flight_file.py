"""The file of a flight log: what a kill leaves of it, where it is cut, and what a step costs."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfold.backends.flight.flight_file import FlightFile
from trainfold.backends.flight.flights import flight_name, read_flights
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import CheckpointMissing
from trainfold.core.flight.log_lines import LINE_BYTES
from trainfold.core.flight.step_record import StateDigest, StepRecord


def lines_of(step):
    """What a step leaves: the third has a digest of the state too."""
    more = [StateDigest(step, "model", bytes([step] * 16))] if step % 3 == 0 else []
    return [StepRecord(step, samples=step * 4), *more]


def written(path, steps):
    file = FlightFile(path)
    for step in steps:
        file.append(lines_of(step))
    file.close()
    return path.read_bytes()


@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, LINE_BYTES - 1))
def test_a_log_that_was_killed_and_resumed_is_that_of_the_unkilled_run(tmp_path_factory, killed_at, resumed_at, torn):
    """R04: no step twice and none missing, wherever the kill and the checkpoint were, also inside a write."""
    resumed_at = min(resumed_at, killed_at)
    folder = tmp_path_factory.mktemp("log")
    whole = written(folder / "whole.log", range(1, 14))
    path = folder / "killed.log"
    written(path, range(1, killed_at + 1))
    with path.open("ab") as file:
        file.write(whole[:torn])
    assert written(path, range(resumed_at + 1, 14)) == whole


def test_a_run_that_goes_back_while_it_lives_repeats_no_step(tmp_path):
    """R04: a load of an earlier checkpoint by the same process."""
    assert written(tmp_path / "a.log", [1, 2, 3, 4, 2, 3]) == written(tmp_path / "b.log", [1, 2, 3])


def test_a_start_from_the_beginning_begins_the_log_again(tmp_path):
    written(tmp_path / "a.log", range(1, 9))
    assert written(tmp_path / "a.log", [1]) == written(tmp_path / "b.log", [1])


def test_a_step_costs_one_write(tmp_path, monkeypatch):
    """A step makes one system call, which neither syncs nor seeks."""
    calls = []
    names = ("write", "pread", "ftruncate", "fstat", "open", "fsync", "fdatasync", "lseek")
    for name in names:
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, _name=name, _real=real: calls.append(_name) or _real(*a))
    file = FlightFile(tmp_path / "a.log")
    file.append(lines_of(1))
    calls.clear()
    for step in range(2, 10):
        file.append(lines_of(step))
    assert calls == ["write"] * 8


def test_a_log_that_cannot_be_written_does_not_end_a_run(tmp_path, caplog):
    (tmp_path / "a.log").mkdir()
    file = FlightFile(tmp_path / "a.log")
    file.append(lines_of(1))
    file.append(lines_of(2))
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == ["no more steps are recorded"]


def test_the_logs_of_a_run_are_read_by_rank(tmp_path):
    written(tmp_path / flight_name(1), [1, 2, 3])
    with (tmp_path / flight_name(1)).open("ab") as file:
        file.write(b"torn")
    found = read_flights(tmp_path)
    assert list(found) == [1]
    assert list(found[1].steps) == [1, 2, 3]
    assert found[1].states == {3: {"model": bytes([3] * 16)}}


def test_a_run_without_a_log_names_the_next_move(tmp_path):
    for run in (tmp_path, MemoryStore()):
        with pytest.raises(CheckpointMissing, match="record=100"):
            read_flights(run)


def test_a_resume_over_a_damaged_line_keeps_all_others(tmp_path):
    """R04: the cut is at the step, wherever the damage is."""
    whole = written(tmp_path / "whole.log", range(1, 14))
    for at in range(12):
        path = tmp_path / flight_name(0)
        path.write_bytes(whole[: at * LINE_BYTES] + b"\xff" * LINE_BYTES + whole[(at + 1) * LINE_BYTES :])
        written(path, range(11, 14))
        found, lost = read_flights(tmp_path)[0], at - at // 4 + 1
        assert {*range(1, 14)} - {*found.steps} <= {lost}
        assert (found.damage.lines, found.damage.first) == (1, at * LINE_BYTES)


def test_a_file_that_is_no_log_is_named_when_a_run_begins_it_again(tmp_path, caplog):
    (tmp_path / flight_name(0)).write_bytes(bytes(range(1, 250)) * 4)
    assert read_flights(tmp_path)[0].damage.is_all
    assert written(tmp_path / flight_name(0), [1, 2]) == written(tmp_path / "b.log", [1, 2])
    (message,) = [record.getMessage() for record in caplog.records]
    assert flight_name(0) in message
    assert "not a flight log" in message


def test_the_state_of_a_step_follows_it(tmp_path):
    """It comes with a write of its own, at the boundary; it must not cut the step that it is about."""
    file = FlightFile(tmp_path / flight_name(0))
    for step in (1, 2):
        file.append([StepRecord(step)])
        file.append([StateDigest(step, "model", bytes(16))])
    assert str(read_flights(tmp_path)[0]) == "2 steps, 1 to 2; the state of 2 of them"
