"""The log of a loop of pure steps, and what a replay of it finds."""

import attrs
import pytest
import torch

import trainfold
from trainfold import Loss, init_state, make_step, optimizer, replay
from trainfold.backends.flight.flights import flight_name, read_flights
from trainfold.core.errors import CheckpointMissing, InvalidArgument, InvalidState
from trainfold.core.flight.flight import Flight
from trainfold.states import FlightLog

ADAM = optimizer(torch.optim.AdamW, lr=0.1)
BATCHES = [(torch.arange(8.0).reshape(4, 2) - number).sin() for number in range(1, 8)]


class Net(torch.nn.Module):
    """A layer with dropout and a running mean."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.drop = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.3)

    def forward(self, x):
        return self.norm(self.layer(self.drop(x)))


def model():
    torch.manual_seed(0)
    return Net()


def loss_fn(model, batch):
    return Loss((model(batch) - batch.sum()).square().sum(), len(batch))


def run_steps(step, state, batches):
    for batch in batches:
        state, _ = step(state, batch)
    return state


def made(**options):
    return make_step(model(), loss_fn, ADAM, **options), init_state(model(), ADAM, seed=0)


@pytest.mark.parametrize("donate", [False, True])
def test_a_killed_and_resumed_loop_of_states_has_the_log_of_one_that_was_never_killed(tmp_path, donate):
    """R04: the log goes back where the state does."""
    step, state = made(donate=donate)
    log = FlightLog(tmp_path / "whole", states_every=2)
    run_steps(log.recorded(step), state, BATCHES)
    step, state = made()
    FlightLog(tmp_path / "killed")
    killed = FlightLog(tmp_path / "killed", states_every=2).recorded(step)
    at_three = run_steps(killed, state, BATCHES[:3])
    run_steps(killed, at_three, BATCHES[3:5])
    run_steps(FlightLog(tmp_path / "killed", states_every=2).recorded(step), at_three, BATCHES[3:])
    logs = [(tmp_path / name / flight_name(0)).read_bytes() for name in ("whole", "killed")]
    assert logs[0] == logs[1]
    assert str(read_flights(tmp_path / "killed")[0]) == "7 steps, 1 to 7; the state of 3 of them"


@pytest.fixture
def flight(tmp_path):
    step, state = made()
    run_steps(FlightLog(tmp_path / "run", states_every=3).recorded(step), state, BATCHES)
    return read_flights(tmp_path / "run")[0]


def test_a_replay_from_any_state_finds_the_same_bits(flight):
    step, state = made()
    for start in range(len(BATCHES)):
        found = replay(step, state, BATCHES[start:], flight)
        assert found
        assert (found.first, found.last) == (start + 1, 7)
        state, _ = step(state, BATCHES[start])


def test_a_replay_ends_with_the_batches_or_the_log(flight, caplog):
    step, state = made()
    assert replay(step, state, iter(BATCHES[:2]), flight).last == 2
    assert replay(step, state, BATCHES, flight).last == 7
    assert not caplog.messages
    assert replay(step, state, [*BATCHES, *BATCHES], flight).last == 7
    assert caplog.messages == ["the replay ended after step 7, as the log has no record of the next one"]


def test_a_replay_names_the_first_step_that_differs_and_in_what(flight):
    """A swapped batch, a bit in the state and another learning rate each look different."""
    step, state = made()
    swapped = replay(step, state, [*BATCHES[:3], BATCHES[4], BATCHES[3]], flight)
    assert (swapped.difference.step, swapped.difference.parts[0]) == (4, "batch")
    assert not swapped
    assert str(swapped).startswith("steps 1 to 3 are those of the log; step 4: it read other batches; the loss is ")
    assert str(swapped).endswith("(first the log, then the replay)")
    params = {name: leaf.clone() for name, leaf in state.model.params.items()}
    params["layer.weight"].view(torch.int32)[0, 0] ^= 1 << 20
    flipped = state.evolve(model=attrs.evolve(state.model, params=trainfold.Leaves(params)))
    found = replay(step, flipped, BATCHES, flight).difference
    assert (found.step, found.parts[0]) == (1, "loss")
    assert {"batch", "streams"} <= {*found.same}
    other = make_step(model(), lambda model, batch: loss_fn(model, batch * 2), ADAM)
    assert "batch" in replay(other, state, BATCHES, flight).difference.same


def test_a_replay_without_anything_to_compare_is_refused(tmp_path, flight):
    step, state = made()
    for batches, log, words in (([], flight, "no batch"), (BATCHES, Flight(), "a log of no step")):
        with pytest.raises(InvalidArgument, match=words):
            replay(step, state, batches, log)
    with pytest.raises(CheckpointMissing, match="record=100"):
        replay(step, state, BATCHES, tmp_path)
    with pytest.raises(InvalidState, match="init_state"):
        replay(step, trainfold.TrainState(), BATCHES, flight)


def test_a_replay_changes_no_state(flight):
    step, state = made()
    before = trainfold.fingerprint(state)
    replay(step, state, BATCHES, flight)
    assert trainfold.fingerprint(state) == before
