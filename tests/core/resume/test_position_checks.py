"""An impossible data position or key is found in the manifest, before any tensor byte is read."""

import pytest

import trainfold
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.data.cursor import DataCursor, make_cursor
from trainfold.core.errors import CheckpointHostile
from trainfold.core.resume import position_checks
from trainfold.core.resume.resume_plan import Refusal, ResumePlan
from trainfold.core.rng import KEY_BITS, Key, make_key
from trainfold.core.state.state import Progress, TrainState

GOOD = TrainState(trainer=Progress(1), dataset=make_cursor(8), rng=make_key(0))
BAD = {
    "dataset": GOOD.evolve(dataset=DataCursor(0, 8, 8, 0)),
    "rng": GOOD.evolve(rng=Key(1 << KEY_BITS)),
}


def saved(*states):
    store = MemoryStore()
    for step, state in enumerate(states, start=1):
        trainfold.save(state.evolve(trainer=Progress(step)), store)
    return store


@pytest.mark.parametrize("name", BAD)
def test_the_newest_checkpoint_whose_position_can_be_is_resumed(name):
    """V03: like any other checkpoint that cannot be used."""
    store = saved(GOOD, BAD[name], BAD[name])
    plan = trainfold.plan(store, like=GOOD)
    assert isinstance(plan, ResumePlan)
    assert plan.step == 1
    assert [problem.error for problem in plan.passed_over] == ["CheckpointHostile"] * 2
    with pytest.warns(CheckpointPassedOver, match=r"reset=\{"):
        assert trainfold.load(store, like=GOOD).trainer.step == 1


@pytest.mark.parametrize("name", BAD)
def test_what_is_reset_or_not_asked_for_is_not_checked(name):
    """V11."""
    store = saved(GOOD, BAD[name])
    reset = trainfold.load(store, like=GOOD, reset={name: "it is wrong"})
    others = trainfold.load(
        store, like=GOOD, components=[each for each in ("trainer", "dataset", "rng") if each != name]
    )
    assert reset.trainer.step == others.trainer.step == 2


@pytest.mark.parametrize("name", BAD)
def test_where_no_other_is_there_the_reason_is_the_problem(name):
    found = trainfold.plan(saved(BAD[name]), like=GOOD)
    assert isinstance(found, Refusal)
    assert found.exit_code == CheckpointHostile.exit_code
    assert not found.finds_nothing
    assert name in found.fix


def test_all_ranks_choose_the_same_checkpoint():
    """V05: each rank checks everything that any rank would load."""
    store = saved(GOOD, BAD["dataset"])

    def work(world):
        return trainfold.load(store, like=GOOD, collectives=world).trainer.step

    with pytest.warns(CheckpointPassedOver):
        assert run_threads(2, work) == [1, 1]


def test_a_key_has_as_many_bits_here_as_where_it_is_made():
    """V18: a plan imports no torch, so the number stands here again (ADR-0023)."""
    assert position_checks.KEY_BITS == KEY_BITS
