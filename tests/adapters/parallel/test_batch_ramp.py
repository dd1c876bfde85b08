"""A batch that grows is a schedule of the step: its numbers divide exactly, and a manager saves before they change."""

import contextlib
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainfold.accumulation import batch_ramp
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.load import ResumeDrift
from trainfold.core.errors import BatchNotDivisible, InvalidArgument, ResumeRefused
from trainfold.core.step.batch_ramp import ramp_of
from trainfold.core.step.init_state import init_state
from trainfold.core.step.loss import Loss
from trainfold.core.step.optimizer import optimizer
from trainfold.core.step.step import make_step
from trainfold.stores import MemoryStore

RAMP = batch_ramp({0: 4, 2: 8, 5: 16}, per_microbatch=4)


@given(
    st.dictionaries(st.integers(1, 30), st.integers(1, 6), max_size=4),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_a_ramp_has_the_batch_of_each_step(later, first, size, ranks):
    """A12: the samples of each step are those that were asked for, and a change is where two steps differ."""
    batches = {0: first, **later}
    ramp = batch_ramp({step: n * size * ranks for step, n in batches.items()}, per_microbatch=size, world_size=ranks)
    for step in range(35):
        wanted = batches[max(each for each in batches if each <= step)]
        assert ramp.at(step) == wanted
        assert ramp.changes_after(step) == (step > 0 and ramp.at(step) != ramp.at(step - 1))
    assert ramp_of(ramp.as_json()) == ramp


def test_a_batch_that_does_not_divide_is_refused_with_the_numbers():
    """A12: 500 samples cannot be microbatches of 16 on 8 ranks."""
    with pytest.raises(BatchNotDivisible, match=r"16 x 8 = 128, found 500 \(.*116\)"):
        batch_ramp({0: 256, 100: 500}, per_microbatch=16, world_size=8)
    for wrong in ({1: 16}, {0: 16, -1: 16}, {0: 16, 1.5: 16}):
        with pytest.raises(InvalidArgument, match="from step 0"):
            batch_ramp(wrong, per_microbatch=16)


def loss_fn(model, batch):
    return Loss(sum=model(batch).square().sum(), weight=len(batch))


def steps_of(accumulate, state, count, store=None):
    """Steps of a step made with ``accumulate``, with a manager that saves nothing by itself; and what it has saved."""
    torch.manual_seed(0)
    model, sgd = nn.Linear(3, 2), optimizer(torch.optim.SGD, lr=0.1)
    state = init_state(model, sgd) if state is None else state
    saved = []
    with CheckpointManager(MemoryStore() if store is None else store, every=None, at_end=False) as manager:
        for _ in range(count):
            step = make_step(model, loss_fn, sgd, accumulate=accumulate(state.trainer.step))
            rows = 4 * RAMP.at(state.trainer.step)
            batch = torch.randn(rows, 3, generator=torch.Generator().manual_seed(state.trainer.step))
            state, _ = step(state, batch)
            saved.append(manager.step(state))
    return state, [each.step for each in saved if each is not None]


def test_a_step_follows_the_ramp_and_is_saved_before_the_batch_changes():
    """A12: the bits are those of steps with as many microbatches."""
    ramped, saved = steps_of(lambda _: RAMP, None, 7)
    assert saved == [2, 5]
    assert ramped.contract["step.accumulate"] == {"0": 1, "2": 2, "5": 4}
    torch.manual_seed(0)
    model, sgd = nn.Linear(3, 2), optimizer(torch.optim.SGD, lr=0.1)
    state = init_state(model, sgd)
    for number in range(7):
        batch = torch.randn(4 * RAMP.at(number), 3, generator=torch.Generator().manual_seed(number))
        state, _ = make_step(model, loss_fn, sgd, accumulate=RAMP.at(number))(state.evolve(contract={}), batch)
    assert all(torch.equal(mine, state.model.params[name]) for name, mine in ramped.model.params.items())


def test_another_ramp_is_another_run(tmp_path):
    """A12, M18: a changed schedule is a difference of the contract."""
    import trainfold

    state, _ = steps_of(lambda _: RAMP, None, 3)
    trainfold.save(state, tmp_path)
    other = batch_ramp({0: 4, 3: 8}, per_microbatch=4)
    like, _ = steps_of(lambda _: other, None, 1)
    with pytest.raises(ResumeRefused, match="accumulate"):
        trainfold.load(tmp_path, like=like)


def test_an_attached_loop_follows_the_ramp_and_is_saved_before_the_batch_changes():
    """A12: also if it resumes at the change."""
    store, windows = MemoryStore(), []

    def loop(until):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        live = attach(model, sgd)
        saved = []
        with CheckpointManager(store, every=None, at_end=False) as manager:
            manager.restore(live)
            size = 0
            while live.progress.step < until:
                with live.microbatch(of=RAMP) as is_boundary:
                    model(torch.ones(4, 3)).square().mean().backward()
                size += 1
                if is_boundary:
                    sgd.step()
                    sgd.zero_grad()
                    windows.append(size)
                    size = 0
                live.advance(samples=4)
                saved.append(manager.step(live))
        return [each.step for each in saved if each is not None]

    assert loop(3) == [2]
    assert loop(7) == [5]
    assert windows == [1, 1, 2, 2, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("saves", "then", "said"), [("ramp", "ramp", False), ("ramp", "other", False), (3, "ramp", True), (3, 2, True)]
)
def test_a_resume_where_a_ramp_changes_the_batch_is_not_said_to_be_another_accumulation(saves, then, said, caplog):
    """A12: the advice was to put it back. What a schedule does not explain is still said, and another schedule is compared as such."""
    store, dataset = MemoryStore(), TensorDataset(torch.ones(96, 3))
    ramps = {"ramp": batch_ramp({0: 4, 3: 8}, per_microbatch=4), "other": batch_ramp({0: 4, 3: 16}, per_microbatch=4)}

    def loop(of, steps):
        model = nn.Linear(3, 2)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        live = attach(model, sgd, loader=DataLoader(dataset, batch_size=4))
        with CheckpointManager(store, every=None, at_end=False) as manager:
            manager.restore(live)
            for (x,) in live.batches(epochs=1):
                with live.microbatch(of=ramps.get(of, of)) as is_boundary:
                    model(x).square().mean().backward()
                if is_boundary:
                    sgd.step()
                    sgd.zero_grad()
                live.advance()
                manager.step(live)
                if live.progress.step == steps:
                    break
            manager.save(live)

    loop(saves, 3)
    with caplog.at_level(logging.WARNING), contextlib.ExitStack() as expected:
        if then == "other":
            expected.enter_context(pytest.warns(ResumeDrift, match="live.microbatch.of"))
        loop(then, 5)
    texts = [each.getMessage() for each in caplog.records if "batches for each optimizer step" in each.getMessage()]
    assert len(texts) == said
