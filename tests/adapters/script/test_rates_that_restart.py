"""W08: a schedule that no attached object references is named if a resume restarts it; a rate computed from the step is not."""

import math
import warnings

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import trainfold
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import HiddenState


class Decay:
    """A schedule as people write it: a plain class with a counter."""

    def __init__(self, optimizer, rate_of):
        self.optimizer, self.rate_of, self.count = optimizer, rate_of, 0

    def step(self):
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate_of(self.count)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


SHAPES = {
    "three in turn": lambda count: (0.1, 0.05, 0.02)[count % 3],
    "decay": lambda count: 0.1 * 0.9**count,
    "warm-up and cosine": lambda count: 0.1 * min(1.0, count / 3) * (1 + math.cos(count / 20)),
    "steps": lambda count: 0.1 * 0.5 ** (count // 3),
    "each fourth": lambda count: 0.1 * 0.9 ** (count // 4),
}


def train(store, steps, shape, *, how):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = Decay(optimizer, SHAPES[shape])
    live = attach(model, optimizer, scheduler=schedule if how == "attached" else None)
    with CheckpointManager(store, every=None) as manager:
        manager.restore(live)
        while live.progress.step < steps:
            if how == "from the step":
                optimizer.param_groups[0]["lr"] = SHAPES[shape](live.progress.step)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if how != "from the step":
                schedule.step()
            live.advance(samples=1)
            manager.step(live)
        manager.save(live)
    return trainfold.fingerprint(live.capture())["model"]


def told(shape, cut, *, how):
    """The warnings of a run's second part, and whether it ends with the bits of the uninterrupted run."""
    store, whole = MemoryStore(), train(MemoryStore(), cut + 9, shape, how=how)
    train(store, cut, shape, how=how)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(store, cut + 9, shape, how=how)
    return [str(each.message) for each in caught if each.category is HiddenState], found == whole


@pytest.mark.parametrize("shape", sorted(SHAPES.keys() - {"three in turn"}))
def test_a_schedule_that_nothing_holds_is_named_when_a_resume_has_begun_it_anew(shape):
    (text,), is_exact = told(shape, 14, how="forgotten")
    assert "optimizer.param_groups[0]['lr']" in text
    assert "at step 14" in text
    assert "scheduler=" in text
    assert not is_exact


@example(cut=3, shape="three in turn", how="from the step")
@example(cut=4, shape="three in turn", how="from the step")
@given(
    cut=st.integers(1, 30), shape=st.sampled_from(sorted(SHAPES)), how=st.sampled_from(["from the step", "attached"])
)
@settings(max_examples=12)
def test_a_rate_that_goes_on_is_exact_and_not_a_word_is_said(cut, shape, how):
    """The rate computed from the step, as in NanoGPT, and an attached schedule of the user's."""
    assert told(shape, cut, how=how) == ([], True)


def test_it_is_named_at_the_second_resume_as_well():
    """Each checkpoint passes on the rates that the run started with."""
    store = MemoryStore()
    for steps in (10, 20):
        train(store, steps, "decay", how="from the step")
    with pytest.warns(HiddenState, match="restarts at a resume"):
        train(store, 25, "decay", how="forgotten")


def test_a_step_that_changes_no_rate_names_no_group(monkeypatch):
    """The rates of a step are compared with those of the step before; only a change is looked at group by group."""
    named = []
    monkeypatch.setattr(
        "trainfold.adapters.script.rates.with_rate", lambda began, rate: named.append(rate) or [*began, rate]
    )
    parameters = list(torch.nn.Linear(2, 1).parameters())
    groups = [{"params": [each], "lr": 0.1} for each in parameters]
    model = torch.nn.ParameterList(parameters)
    optimizer = torch.optim.SGD(groups)
    live = attach(model, optimizer)
    for _ in range(4):
        live.advance(samples=1)
    assert named == [0.1, 0.1]
    optimizer.param_groups[1]["lr"] = 0.05
    live.advance(samples=1)
    live.advance(samples=1)
    assert named == [0.1, 0.1, 0.1, 0.05]
