"""The flight log of a live run: what a step leaves in it, and that a kill leaves no trace in it."""

import itertools
import weakref
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.adapters.manager.flight_cases import Recorded
from kit.adapters.manager.manager_cases import Job

from trainfold.adapters.flight.flight_recorder import FlightRecorder, flight_recorder
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.watch.recorder import MOST_NAME
from trainfold.backends.flight.flight_file import FlightFile
from trainfold.backends.flight.flights import flight_name, read_flights
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import InvalidArgument
from trainfold.core.flight.journal_line import JournalLine, decode_journal_line, encode_journal_line
from trainfold.core.flight.step_record import float_of_bits
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.state.state import TrainState


def log_of(run):
    return (run / flight_name(0)).read_bytes()


@pytest.mark.parametrize("dies_after", [1, 2, 3, 7])
def test_a_killed_and_resumed_run_has_the_log_of_one_that_was_never_killed(tmp_path, dies_after):
    """R04: bit for bit, in the middle of an epoch and across epochs; the second process has other streams until it restores."""
    with CheckpointManager(tmp_path / "whole", every=2, record=3) as manager:
        Recorded(0).run(manager, 9)
    with CheckpointManager(tmp_path / "killed", every=2, record=3) as manager:
        Recorded(0).run(manager, 9, dies_after)
    with CheckpointManager(tmp_path / "killed", every=2, record=3) as manager:
        Recorded(0).run(manager, 9)
    assert log_of(tmp_path / "killed") == log_of(tmp_path / "whole")
    assert str(read_flights(tmp_path / "whole")[0]) == "9 steps, 1 to 9; the state of 3 of them"


def test_a_step_has_its_loss_its_batch_and_its_streams(tmp_path):
    with CheckpointManager(tmp_path, every=2, record=4) as manager:
        Recorded(0).run(manager, 4)
        live = Recorded(0).live
        manager.load(live)
        digests = fingerprint(live.capture())
    flight = read_flights(tmp_path)[0]
    records = list(flight.steps.values())
    assert [float_of_bits(record.norm) for record in records] == [0, 1, 2, 3]
    assert [record.samples for record in records] == [4, 8, 12, 16]
    assert len({record.batch for record in records}) == len({record.streams for record in records}) == 4
    assert all(0 < float_of_bits(record.loss) < 10 for record in records)
    assert {name: digest.hex() for name, digest in flight.states[4].items()} == {
        name: text.removeprefix("xxh3:") for name, text in digests.items() if name not in ("rng", "dataset")
    }


def test_every_batch_of_a_window_counts(tmp_path):
    """A swapped microbatch is seen, whichever it is."""
    found = []
    for swapped in (False, True):
        data = torch.arange(8.0).reshape(8, 1)
        if swapped:
            data[0] = 9.0
        model = torch.nn.Linear(1, 1)
        live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), loader=torch.utils.data.DataLoader(data, batch_size=2))  # fmt: skip
        with CheckpointManager(tmp_path / str(swapped), every=None, every_secs=999, record=0) as manager:
            manager.restore(live)
            for number, batch in enumerate(live.batches(epochs=1)):
                live.record(loss=model(batch).sum())
                live.advance(steps=number % 2)
                manager.step(live)
        found.append([record.batch for record in read_flights(tmp_path / str(swapped))[0].steps.values()])
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]


def test_recording_changes_no_bit(tmp_path):
    found = []
    for record in (None, 1):
        with CheckpointManager(tmp_path / str(record), every=4, record=record) as manager:
            job = Recorded(0)
            job.run(manager, 8)
            found.append(fingerprint(job.live.capture()))
    assert found[0] == found[1]


def test_a_recorder_keeps_no_run_alive(tmp_path):
    recorder = FlightRecorder(FlightFile(tmp_path / "a.log"), 0)
    live = Job(0).live
    recorder.watch(live)
    gone = weakref.ref(live)
    live.recorders = ()
    del live
    assert gone() is None


@pytest.mark.parametrize("given", [True, -1, "all"])
def test_a_record_that_is_no_number_of_steps_is_refused(given):
    with pytest.raises(InvalidArgument, match="record=100"):
        flight_recorder(MemoryStore(), 0, given)


def test_a_loop_of_states_is_shown_what_records_it(tmp_path):
    """The manager does not see the batch and the loss of a pure step; a log without them would look like one."""
    with (
        CheckpointManager(tmp_path / "run", every=1, record=0) as manager,
        pytest.raises(InvalidArgument, match=r"manager\.recorded"),
    ):
        manager.step(TrainState())


def test_a_value_that_no_log_can_hold_is_refused_where_it_is_recorded():
    """A name of 100,000 characters made a line of the journal that its reader calls torn; an int beyond a float was a bare error of Python."""
    live = attach(torch.nn.Linear(1, 1))
    name = "x" * 1000
    live.record(**{name: 1, "loss": 2**1023, "other": Fraction(1, 3)})
    with pytest.raises(
        InvalidArgument, match="names of at most 1000 characters, found one of 1001, 'xxxxxxxxxxxxxxxxxxxx'"
    ):
        live.record(**{name + "x": 1.0})
    for value in (10**400, Fraction(10**400)):
        with pytest.raises(InvalidArgument, match=r"record\(val=\).* a number that a float can hold"):
            live.record(val=value)


class Kept:
    """A journal of evaluations alone."""

    def __init__(self):
        self.steps = []

    def evaluated(self, step, name, value):
        assert (name, value) == ("acc", float(step))
        self.steps.append(step)


@settings(max_examples=60)
@given(gaps=st.lists(st.integers(1, 25) | st.integers(-30, -1), max_size=30))
def test_of_values_that_do_not_come_in_each_step_one_in_ten_steps_is_kept(tmp_path_factory, gaps):
    """P33: of evaluations each 8 steps the page showed the first of each process alone, and after a run had gone back it could miss the first of its new timeline."""
    journal = Kept()
    recorder = FlightRecorder(FlightFile(tmp_path_factory.getbasetemp() / flight_name(0)), 0, journal=journal)
    steps = [*itertools.accumulate(gaps, lambda step, gap: max(1, step + gap), initial=40)]
    expected = []
    for before, step in zip([None, *steps], steps, strict=False):
        recorder.record(step, {"acc": step})
        if before is None or step < before or (step > before + 1 and step >= expected[-1] + 10):
            expected.append(step)
    assert journal.steps == expected


@pytest.mark.parametrize(("each", "expected"), [(1, [1]), (2, [2, 12, 22]), (8, [8, 24]), (10, [10, 20, 30])])
def test_what_is_kept_of_a_name_that_comes_each_so_many_steps(tmp_path, each, expected):
    journal = Kept()
    recorder = FlightRecorder(FlightFile(tmp_path / flight_name(0)), 0, journal=journal)
    for step in range(each, 31, each):
        recorder.record(step, {"acc": step})
    assert journal.steps == expected


def test_the_longest_name_fits_a_line_whatever_its_characters():
    """The limit of a name is that of a line of the journal."""
    line = JournalLine(1e10, "evaluated", 2**62, data={"metric": "\U0001f600" * MOST_NAME, "score": -1e-300})
    assert decode_journal_line(encode_journal_line(line)[:-1]) == line


def test_the_batches_of_a_step_are_not_known_where_others_were_handed_out_and_not_counted(tmp_path):
    """A loop that leaves a batch out without `drop_window` read another one than its log said; two runs of which one does so had equal batches, for certain."""
    model, x = torch.nn.Linear(2, 1), torch.randn(16, 2)
    live = attach(model, loader=torch.utils.data.DataLoader(x, batch_size=2))
    recorder = FlightRecorder(FlightFile(tmp_path / flight_name(0)), 0)
    recorder.watch(live)
    for number, x in enumerate(live.batches(epochs=1)):
        if number == 2:
            continue  # its samples are counted where those of the next batch are meant
        if number == 5:
            live.drop_window()
            continue
        live.advance(samples=len(x))
    recorder.close()
    assert {step: each.batch is not None for step, each in read_flights(tmp_path)[0].steps.items()} == {
        1: True,
        2: True,
        3: False,
        4: False,
        5: True,
        6: True,
    }
