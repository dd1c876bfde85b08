"""Ranks of a step that train on one batch are named once, at the line of the program that calls the step."""

import warnings

import pytest
import torch

from trainfold.core.errors import SameBatch
from trainfold.core.step.init_state import init_state
from trainfold.core.step.loss import Loss
from trainfold.core.step.optimizer import optimizer
from trainfold.core.step.step import make_step
from trainfold.ranks import Replicas, Sharded, run_threads

SGD = optimizer(torch.optim.SGD, lr=0.1)
MODEL = torch.nn.Linear(2, 2)


def steps_on(batch_of, how=Replicas):
    """Two steps; the batch of a rank is a function of it and of the step."""

    def play(collectives):
        ranks = how(collectives)
        state = init_state(MODEL, SGD)
        state = ranks.cut(state) if how is Sharded else state
        step = make_step(MODEL, lambda model, x: Loss(sum=model(x["x"]).sum(), weight=4), SGD, parallelism=ranks)
        for number in range(2):
            state, _ = step(state, {"x": torch.full((4, 2), float(batch_of(collectives.rank, number)))})

    run_threads(3, play)


@pytest.mark.parametrize("how", [Replicas, Sharded])
def test_a_batch_that_was_not_shared_out_is_reported_once_with_the_ranks(how):
    """What is easily forgotten: each rank passes the whole batch, or the share of another rank; nothing else shows it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps_on(lambda rank, _: rank % 2, how)
    (one,) = caught
    assert one.category is SameBatch
    assert one.filename == __file__
    assert "step 0: expected a batch of its own on each rank, found the same one on ranks 0 and 2" in str(one.message)
    assert "trainfold.data.shard_of" in str(one.message)


def test_only_the_first_batch_of_a_process_is_read():
    """Digests of a batch on a device would wait for it in each step."""
    steps_on(lambda rank, number: rank if number == 0 else 7)


def test_a_warning_that_is_an_error_stops_all_ranks():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(SameBatch):
            steps_on(lambda *_: 1)
