"""One step in so many runs twice: what differs is found, and nothing else changes."""

import attrs
import pytest
import torch

import trainfold
from trainfold import Leaves, Loss, fingerprint, init_state, make_step, optimizer
from trainfold.core.errors import InvalidArgument, InvalidState, StepNotRepeated
from trainfold.core.layout.shard import make_shard
from trainfold.core.state.state import ModelState
from trainfold.ranks import run_threads
from trainfold.states import FlightLog, check_steps

SGD = optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
BATCHES = [torch.full((3, 2), float(number)) for number in range(1, 7)]


def model(*, drops=True):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5) if drops else torch.nn.Identity())


def loss_fn(model, x):
    return Loss(model(x).square().sum(), len(x))


def run(step, batches=BATCHES, state=None):
    state = state or init_state(model(), SGD, seed=0)
    for batch in batches:
        state, _ = step(state, batch)
    return state


def flipped(state):
    params = {name: leaf.clone() for name, leaf in state.model.params.items()}
    params["0.weight"].view(torch.int32)[1, 0] ^= 1
    return state.evolve(model=attrs.evolve(state.model, params=Leaves(params)))


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_checked_steps_give_the_bits_of_unchecked_ones(donate, every):
    step = make_step(model(), loss_fn, SGD, donate=donate)
    assert fingerprint(run(check_steps(step, every=every))) == fingerprint(run(step))


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("order", ["checked, recorded", "recorded, checked"])
def test_a_step_can_be_checked_and_recorded_in_either_order(donate, order, tmp_path):
    """A recorded step that donates was run twice with one state, which ended in StateDonated. Each step leaves one record."""
    step, log = make_step(model(), loss_fn, SGD, donate=donate), FlightLog(tmp_path / "run")
    both = log.recorded(check_steps(step, every=2)) if order == "checked, recorded" else check_steps(log.recorded(step), every=2)  # fmt: skip
    assert fingerprint(run(both)) == fingerprint(run(make_step(model(), loss_fn, SGD)))
    log.close()
    assert (tmp_path / "run" / "flight-00000.log").stat().st_size == 64 * len(BATCHES)


@pytest.mark.parametrize("every", [1, 1000])
def test_a_function_around_a_step_that_donates_is_refused_at_the_first_step(every):
    """Its state could not run twice, which came at the first check, maybe after hours."""
    step = make_step(model(), loss_fn, SGD, donate=True)
    with pytest.raises(InvalidArgument, match="check the step that donates itself"):
        run(check_steps(lambda state, batch: step(state, batch + 1), every=every))


@pytest.mark.parametrize(("every", "calls"), [(1, 12), (3, 8), (7, 6)])
def test_one_step_in_so_many_runs_twice(every, calls):
    step, made = make_step(model(), loss_fn, SGD), []
    run(check_steps(lambda state, batch: made.append(1) or step(state, batch), every=every))
    assert len(made) == calls


def test_a_fault_of_one_call_is_named_with_its_leaf():
    """A transient fault: one bit of one weight, in one of two calls."""
    step, calls = make_step(model(), loss_fn, SGD), []

    def faulty(state, batch):
        calls.append(1)
        after, metrics = step(state, batch)
        return (flipped(after) if len(calls) == 6 else after), metrics

    with pytest.raises(
        StepNotRepeated, match=r"step 4: .* 1 differ: model.params\['0.weight'\] \(1 of 4 differ, by up to 1 ulps"
    ):
        run(check_steps(faulty, every=2))


def test_a_loss_that_does_not_repeat_is_named():
    step, calls = make_step(model(), loss_fn, SGD), []

    def restless(state, batch):
        calls.append(1)
        after, metrics = step(state, batch)
        return after, {**metrics, "loss": float(len(calls))}

    with pytest.raises(StepNotRepeated, match=r"loss \(1.0 and 2.0\)"):
        run(check_steps(restless, every=1))


def test_a_fault_in_a_shard_is_found():
    """A shard was compared by its text, which has four decimals, and leaves out most numbers of a large one."""
    state, calls = init_state(torch.nn.Linear(1, 1), optimizer(torch.optim.SGD, lr=0.5)), []

    def step(state, batch):
        calls.append(1)
        weight = torch.full((64,), 0.3)
        weight[40] += 1e-6 * (len(calls) == 2)
        model = ModelState(Leaves({"w": make_shard(weight, shape=(128,), starts=(64,))}), Leaves({}))
        return attrs.evolve(state, model=model, trainer=attrs.evolve(state.trainer, step=state.trainer.step + 1)), {}

    with pytest.raises(StepNotRepeated, match=r"model\.params\['w'\]"):
        check_steps(step, every=1)(state, None)
    check_steps(step, every=1)(state, None)


@pytest.mark.parametrize("is_transient", [True, False])
def test_ranks_hear_which_of_them_is_wrong(is_transient):
    """A machine that is wrong once differs from itself; one that is wrong each time differs from the others. Every rank raises."""
    built = [model(drops=False) for _ in range(3)]  # ranks that are threads share the streams of torch
    state = init_state(built[0], SGD, seed=0)

    def rank_of(ranks):
        step, calls = make_step(built[ranks.rank], loss_fn, SGD, collectives=ranks), []

        def faulty(state, batch):
            calls.append(1)
            after, metrics = step(state, batch)
            is_wrong = ranks.rank == 1 and (len(calls) == 3 or not is_transient) and after.trainer.step == 2
            return (flipped(after) if is_wrong else after), metrics

        with pytest.raises(StepNotRepeated) as caught:
            run(check_steps(faulty, every=2, collectives=ranks), [batch + ranks.rank for batch in BATCHES], state)
        return str(caught.value)

    said = run_threads(3, rank_of)
    assert len({*said}) == 1
    assert "on rank 1" in said[0]
    assert ("the same new state on every rank" in said[0]) is not is_transient


def test_two_ranks_that_differ_are_not_guessed_at():
    built = [model(drops=False) for _ in range(2)]
    state = init_state(built[0], SGD, seed=0)

    def rank_of(ranks):
        step = make_step(built[ranks.rank], loss_fn, SGD, collectives=ranks)

        def faulty(state, batch):
            after, metrics = step(state, batch)
            return (flipped(after) if ranks.rank else after), metrics

        with pytest.raises(
            StepNotRepeated, match=r"no state that most ranks have; .* which of these is wrong is not known"
        ):
            run(check_steps(faulty, every=1, collectives=ranks), [batch + ranks.rank for batch in BATCHES], state)

    run_threads(2, rank_of)


def test_what_cannot_be_checked_is_refused():
    step = make_step(model(), loss_fn, SGD)
    with pytest.raises(InvalidArgument, match="doubles its time"):
        check_steps(step, every=0)
    with pytest.raises(InvalidState, match="init_state"):
        check_steps(step, every=1)(trainfold.TrainState(), BATCHES[0])
