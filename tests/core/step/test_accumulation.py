"""Windows: no partial window leaks, nothing is read ahead, and impossible plans are refused early."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.errors import BatchNotDivisible, IncompleteWindow, InvalidArgument
from trainfold.core.step.accumulation import accumulation_steps, check_plan, windows
from trainfold.core.step.init_state import init_state
from trainfold.core.step.loss import Loss
from trainfold.core.step.optimizer import optimizer
from trainfold.core.step.step import make_step

counts = st.integers(0, 30)
sizes = st.integers(1, 6)


@given(count=counts, accumulate=sizes, tail=st.sampled_from(["raise", "drop", "step"]))
def test_windows_are_whole_and_the_tail_is_as_was_said(count, accumulate, tail):
    """A07: if the stream ends inside a window, an explicit policy applies, and no partial window leaks."""
    whole, rest = divmod(count, accumulate)
    expected = [list(range(i * accumulate, (i + 1) * accumulate)) for i in range(whole)]
    stream = windows(range(count), accumulate, tail=tail)
    found = list(itertools.islice(stream, whole))
    assert found == expected
    if rest and tail == "raise":
        with pytest.raises(IncompleteWindow, match=f"after {rest}"):
            next(stream)
    elif rest and tail == "step":
        assert next(stream) == list(range(whole * accumulate, count))
    assert list(stream) == []


@given(accumulate=sizes, taken=st.integers(1, 4))
def test_no_microbatch_is_read_ahead_of_its_window(accumulate, taken):
    """A07: a microbatch outside the yielded windows was not consumed from the stream."""
    source = iter(range(100))
    stream = windows(source, accumulate)
    for _ in range(taken):
        next(stream)
    assert next(source) == taken * accumulate


def test_a_stream_that_stops_inside_next_ends_and_does_not_become_a_runtime_error():
    """A07: PEP 479: a StopIteration of the user's iterator ends the stream, and the policy applies."""

    class Source:
        count = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.count += 1
            if self.count > 3:
                raise StopIteration
            return self.count

    assert list(windows(Source(), 2, tail="drop")) == [[1, 2]]
    with pytest.raises(IncompleteWindow):
        list(windows(Source(), 2))


def test_bad_arguments_are_refused_at_the_call():
    for bad in (0, -1, True, 1.5):
        with pytest.raises(InvalidArgument):
            windows([], bad)
    with pytest.raises(InvalidArgument, match="tail"):
        windows([], 1, tail="ignore")


@given(per_microbatch=sizes, world_size=sizes, accumulate=sizes, extra=st.integers(0, 40))
def test_a_global_batch_divides_exactly_or_the_numbers_are_named(per_microbatch, world_size, accumulate, extra):
    """A12: the number of accumulation steps must divide exactly, else an error (a ValueError) naming the numbers."""
    unit = per_microbatch * world_size
    per_step = unit * accumulate + extra
    if extra % unit == 0:
        found = accumulation_steps(per_step=per_step, per_microbatch=per_microbatch, world_size=world_size)
        assert found * unit == per_step
        return
    with pytest.raises(BatchNotDivisible) as caught:
        accumulation_steps(per_step=per_step, per_microbatch=per_microbatch, world_size=world_size)
    assert isinstance(caught.value, ValueError)
    assert all(str(number) in str(caught.value) for number in (per_step, per_microbatch, world_size))


def test_numbers_that_are_not_positive_are_refused():
    with pytest.raises(InvalidArgument):
        accumulation_steps(per_step=8, per_microbatch=0)
    with pytest.raises(InvalidArgument):
        check_plan(microbatches=8, accumulate=2, epochs=0)


@given(
    microbatches=counts,
    accumulate=sizes,
    epochs=st.integers(1, 3),
    max_steps=st.none() | st.integers(0, 40),
    tail=st.sampled_from(["raise", "drop", "step"]),
)
def test_a_plan_is_refused_exactly_when_the_run_would_fail(microbatches, accumulate, epochs, max_steps, tail):
    """A08: an impossible plan for data of known size is refused, unless max_steps stops at an earlier boundary."""
    stream = windows(range(microbatches * epochs), accumulate, tail=tail)
    try:
        steps = len(list(itertools.islice(stream, max_steps)))
    except IncompleteWindow:
        steps = None
    try:
        planned = check_plan(
            microbatches=microbatches, accumulate=accumulate, epochs=epochs, max_steps=max_steps, tail=tail
        )
    except InvalidArgument:
        assert steps is None or steps == 0
    else:
        assert planned == steps


def test_a_stream_of_unknown_length_is_not_refused():
    """A08: only data of known size can be checked before the model is built."""
    assert check_plan(microbatches=None, accumulate=3) is None
    assert check_plan(microbatches=None, accumulate=3, max_steps=7) == 7


@pytest.mark.parametrize(("tail", "steps"), [("drop", 5), ("step", 6)])
def test_windows_of_a_ragged_stream_are_what_a_step_takes(tail, steps):
    """A07, A08: a plan gives the number of steps of a stream of ragged microbatches, and counts all its samples."""
    sgd = optimizer(torch.optim.SGD, lr=0.5)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)  # halves are exact
    state = init_state(model, sgd)
    step = make_step(model, lambda m, x: Loss(sum=m(x).sum(), weight=len(x)), sgd, accumulate=2)
    epoch = [torch.ones(3, 1), torch.ones(3, 1), torch.ones(1, 1)] + [torch.ones(2, 1)] * 8
    plan = check_plan(microbatches=len(epoch), accumulate=2, tail=tail)
    seen = []
    for window in windows(epoch, 2, tail=tail):
        state, metrics = step(state, window)
        seen.append(metrics["weight"])
    assert state.trainer.step == len(seen) == plan == steps
    assert state.trainer.samples == sum(seen) == sum(len(part) for part in epoch) - (2 if tail == "drop" else 0)
    assert state.model.params["weight"].item() == 1 - 0.5 * steps
