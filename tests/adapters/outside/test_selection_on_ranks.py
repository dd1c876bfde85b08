"""Ranks that select other components, or of which some have a source of weights, are refused in words, whether the run is fresh or resumed."""

import pytest
import torch
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import TrainfoldError
from trainfold.weights import ByScript

WHOLE = ["model", "optimizer", "trainer", "rng"]


def outcome(world, store, *, saves=True, **attached):
    model = nn.Linear(2, 1)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)  # ranks are threads here, which share the global generator
    try:
        live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), **attached)
        with CheckpointManager(store, every=1, collectives=world) as manager:
            manager.restore(live)
            live.advance(samples=2)
            if saves:
                manager.step(live)
    except TrainfoldError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize("is_fresh", [True, False])
def test_ranks_that_were_attached_with_other_components_are_refused_with_both_selections(is_fresh):
    """B02, C07: a checkpoint of which some ranks have less than others is never made."""
    store = MemoryStore()
    if not is_fresh:
        assert run_threads(2, lambda world: outcome(world, store, components=WHOLE)) == ["saved"] * 2
    told = run_threads(2, lambda world: outcome(world, store, components=WHOLE[: 4 - world.rank]))
    assert all("RanksDisagree" in each for each in told), told
    assert all("model, optimizer, trainer on rank 1" in each and "components" in each for each in told), told


@pytest.mark.parametrize("is_fresh", [True, False])
def test_a_source_of_weights_on_some_ranks_alone_is_refused_on_all(is_fresh):
    """J04: the others would wait for what only one rank does."""
    store = MemoryStore()
    if not is_fresh:
        assert run_threads(2, lambda world: outcome(world, store)) == ["saved"] * 2
    told = run_threads(2, lambda world: outcome(world, store, weights=ByScript() if world.rank else None))
    assert all("RanksDisagree" in each and "take its weights from outside" in each for each in told), told
