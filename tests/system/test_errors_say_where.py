"""R09: an error contains the path, the step, the rank and the fix."""

import pickle

import pytest
import torch

from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.backends.runs.api import load, save
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import CheckpointDamaged, RankFailed, SaveFailedElsewhere, UnsupportedLeaf, place
from trainfold.core.state.state import Progress, TrainState


def state_at(step, **extra):
    return TrainState(trainer=Progress(step=step), extra={"ema": {"w": torch.arange(4.0), **extra}})


def test_a_failed_save_says_its_step_and_the_rank_that_failed():
    def work(world):
        save(state_at(7, **({"odd": object()} if world.rank == 1 else {})), MemoryStore(), collectives=world)

    first, other = (outcome.error for outcome in thread_outcomes(2, work))
    assert (type(other), other.rank) == (UnsupportedLeaf, 1)
    assert "on rank 1" in other.__notes__
    assert (type(first), first.rank) == (SaveFailedElsewhere, 1)
    assert "rank 1" in str(first)


def test_a_save_that_fails_after_its_state_was_read_says_the_step(tmp_path):
    """A world of one has no rank to name."""
    run = tmp_path / "run"
    save(state_at(1), run)
    with LocalStore(run).lock(), pytest.raises(Exception, match="run") as raised:
        save(state_at(2), run)
    assert (raised.value.step, raised.value.rank) == (2, None)
    assert raised.value.where
    assert raised.value.fix
    assert raised.value.__notes__ == ["at step 2"]


def test_a_damaged_checkpoint_says_its_step_and_its_path(tmp_path):
    run = tmp_path / "run"
    save(state_at(120), run)
    (file,) = (run / "step-00000120").glob("ema-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointDamaged) as raised:
        load(run, like=state_at(0), step=120)
    assert (raised.value.step, raised.value.rank) == (120, None)
    assert file.name in raised.value.where
    for error in (
        outcome.error
        for outcome in thread_outcomes(2, lambda ranks: load(run, like=state_at(0), step=120, collectives=ranks))
    ):
        assert error.step == 120
        assert type(error) is not CheckpointDamaged or error.rank in (0, 1)


def test_what_an_error_knows_stays_and_travels():
    error = RankFailed("rank 1", expected="success", found="none", fix="look there")
    place(error, rank=1)
    place(error, step=3, rank=0)
    assert (error.step, error.rank, error.__notes__) == (3, 1, ["on rank 1", "at step 3"])
    again = pickle.loads(pickle.dumps(error))
    assert (again.step, again.rank, str(again)) == (3, 1, str(error))
    foreign = ValueError("theirs")
    place(foreign, rank=1)
    place(foreign, rank=1)
    assert foreign.__notes__ == ["on rank 1"]
    assert run_threads(1, lambda world: world.rank) == [0]
