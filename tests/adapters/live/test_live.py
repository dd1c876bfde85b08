"""A mutable run is captured as a value, restored into new objects, and has the same bits afterwards."""

import random

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.adapters.live.live_cases import Job, differing
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from trainfold.adapters.components.component import copied
from trainfold.adapters.live.attach import attach


@pytest.fixture(scope="module")
def uninterrupted():
    """The states after each of 14 steps of one run: two epochs of 6 steps, and 2 more."""
    job = Job(0)
    return [copied(job.run(step).live.capture()) for step in range(15)]


@given(k=st.integers(0, 14), n=st.integers(0, 6), other_seed=st.integers(1, 2**31))
@example(k=6, n=6, other_seed=1)
@example(k=12, n=2, other_seed=1)
@example(k=5, n=3, other_seed=1)
@example(k=0, n=1, other_seed=1)
@settings(deadline=None, max_examples=25)
def test_k_steps_then_new_objects_then_n_steps_are_k_plus_n_steps(uninterrupted, k, n, other_seed):
    """V13, G01, G03, H01, B12, B13: dropout, batch norm, shuffling, three random streams, schedule and averages; every bit."""
    n = min(n, 14 - k)
    resumed = Job(other_seed)
    resumed.live.restore(uninterrupted[k])
    assert differing(resumed.live.capture(), uninterrupted[k]) == []
    resumed.run(k + n)
    assert differing(resumed.live.capture(), uninterrupted[k + n]) == []


def test_a_run_driven_by_trainfold_has_the_bits_of_the_plain_loop():
    """C14: attaching, drawing batches and capturing at each step change nothing of the training."""
    job = Job(3)
    for step in range(1, 9):
        job.run(step).live.capture()
    plain = Job(3)
    done = 0
    while done < 8:
        for x, y in plain.loader:
            noise = random.random() + float(np.random.normal()) + torch.randn(())  # noqa: NPY002 (the global stream is the subject)
            loss = ((plain.model(x) - y - 0.01 * noise) ** 2).mean()
            plain.optimizer.zero_grad()
            loss.backward()
            plain.optimizer.step()
            plain.scheduler.step()
            done += 1
            if done == 8:
                break
    ours, theirs = job.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.Adafactor,
        torch.optim.RMSprop,
        torch.optim.NAdam,
        torch.optim.ASGD,
    ],
)
def test_the_law_holds_for_optimizers_with_other_slots(optimizer):
    """B10: slots of any names and shapes, also if the number of dimensions decides which slots exist."""
    whole = copied(Job(0, optimizer=optimizer).run(9).live.capture())
    half = copied(Job(0, optimizer=optimizer).run(4).live.capture())
    resumed = Job(9, optimizer=optimizer)
    resumed.live.restore(half)
    assert differing(resumed.run(9).live.capture(), whole) == []


def test_capture_copies_no_tensor_and_moves_nothing():
    """C14, H05: random streams, gradients, buffers, modes and position stay as they were."""
    job = Job(0).run(3)
    job.model.eval()
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 (the global stream is the subject)
    gradients = [None if p.grad is None else p.grad.clone() for p in job.model.parameters()]
    before = copied(job.live.capture())
    state = job.live.capture()
    assert state.model.params["head.weight"].data_ptr() == job.model.head.weight.data_ptr()
    held = job.optimizer.state[job.model.head.weight]["exp_avg"]
    assert state.optimizer.slots["head.weight"]["exp_avg"] is held
    assert differing(state, before) == []
    assert not job.model.training
    assert torch.equal(streams[0], torch.get_rng_state())
    assert streams[1] == random.getstate()
    assert np.array_equal(streams[2][1], np.random.get_state()[1])  # noqa: NPY002 (the global stream is the subject)
    for parameter, gradient in zip(job.model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)


def test_a_restored_run_does_not_write_into_the_state_that_it_came_from():
    state = copied(Job(0).run(3).live.capture())
    kept = copied(state)
    resumed = Job(1)
    resumed.live.restore(state)
    resumed.run(6)
    assert differing(state, kept) == []


# --- what is in it ---------------------------------------------------------------------------------------------------


def test_non_persistent_buffers_are_not_in_a_state_and_ties_are_in_it_once():
    """B17, B19."""
    model = Job(0).live.capture().model
    assert "scratch" not in model.buffers
    assert {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"} == set(model.buffers)
    assert "tied_again.weight" not in model.params
    assert model.ties == (("tied_again.weight", "tied.weight"),)


def test_a_restore_keeps_ties_and_the_objects_that_others_hold_on_to():
    """B19: parameters are overwritten in place, so the tie, the optimizer and the param groups stay valid."""
    job = Job(1)
    before = list(job.model.parameters()), job.optimizer.param_groups[0]
    job.live.restore(Job(0).run(3).live.capture())
    assert all(one is other for one, other in zip(job.model.parameters(), before[0], strict=True))
    assert job.model.tied_again.weight is job.model.tied.weight
    assert job.optimizer.param_groups[0] is before[1]
    assert job.scheduler.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.97**3)
    assert not any(parameter.grad.any() for parameter in job.model.parameters() if parameter.grad is not None)


class Wrapper(nn.DataParallel):
    """Changes names as DDP does."""

    def forward(self, x):
        return self.module(x)


def test_wrappers_at_any_depth_leave_no_trace_in_names():
    """B11, P27: a plain run resumes a wrapped and compiled one, and the other way round."""

    def build(wrap):
        torch.manual_seed(0)
        inner = nn.Linear(3, 3)
        block = nn.Sequential(Wrapper(inner) if wrap else inner, nn.Linear(3, 1))
        model = Wrapper(torch.compile(block, backend="eager")) if wrap else block
        optimizer = torch.optim.Adam(model.parameters())
        block(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return attach(model, optimizer)

    wrapped, plain = build(wrap=True), build(wrap=False)
    wrapped.advance(samples=2)
    plain.advance(samples=2)
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(wrapped.capture().model.params) == list(wrapped.capture().optimizer.slots) == names
    plain.restore(wrapped.capture())
    wrapped.restore(plain.capture())


def ddp(model):
    return DistributedDataParallel(model)


def compiled(model):
    return torch.compile(model, backend="eager")


def checkpointed(model):
    model[0] = checkpoint_wrapper(model[0])
    return checkpoint_wrapper(model)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", [ddp, compiled, checkpointed])
def test_the_wrappers_of_torch_itself_leave_no_trace_in_names(wrap):
    """B11, P27: DDP over a real process group, a compiled module, activation checkpointing."""

    def build(wrap):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        live = attach(model, optimizer)
        live.advance(samples=2)
        return live

    wrapped, plain = build(wrap), build(lambda model: model)
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(wrapped.capture().model.params) == list(wrapped.capture().optimizer.slots) == names
    plain.restore(wrapped.capture())
    wrapped.restore(plain.capture())
