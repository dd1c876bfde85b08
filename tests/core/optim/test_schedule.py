"""Schedules: pure functions of the step, one owner of the horizon, and errors that say what to set."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trainfold.core.errors import HorizonUnknown, InvalidSchedule, ScheduleMismatch
from trainfold.core.optim.schedule import check_schedule, constant, cosine, describe_schedule, horizon, linear, wsd

steps = st.integers(0, 60)


@st.composite
def any_schedule(draw):
    warmup, decay, stable = draw(st.integers(0, 9)), draw(st.integers(1, 9)), draw(st.integers(0, 9))
    total, floor = warmup + stable + decay, draw(st.sampled_from([0.0, 0.1, 1.0]))
    shape = draw(st.sampled_from(["linear", "cosine", "1-sqrt"]))
    return draw(
        st.sampled_from(
            [
                constant(warmup_steps=warmup),
                linear(total, warmup_steps=warmup, floor=floor),
                cosine(total, warmup_steps=warmup, floor=floor),
                wsd(total, warmup_steps=warmup, decay_steps=decay, decay=shape, floor=floor),
                wsd(warmup_steps=warmup, decay_steps=0, decay="none"),
            ]
        )
    )


@given(any_schedule(), steps)
def test_a_schedule_rises_rests_and_falls_to_its_floor(schedule, step):
    factor, following = schedule(step), schedule(step + 1)
    assert 0.0 <= factor <= 1.0
    assert following >= factor if step + 1 < schedule.warmup_steps else following <= 1.0
    if step >= schedule.warmup_steps:
        assert following <= factor + 1e-12
    if schedule.decay != "none" and step >= schedule.total_steps:
        assert factor == pytest.approx(schedule.floor)
    if schedule.warmup_steps:
        assert schedule(schedule.warmup_steps - 1) == 1.0
    assert schedule(0) > 0.0, "the first step would be wasted"


@settings(max_examples=20, deadline=None)
@given(any_schedule())
def test_a_schedule_has_the_bits_of_lambda_lr(schedule):
    """B12: a pure function of the step with nothing to restore."""
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, schedule)
    for step in range(25):
        assert inner.param_groups[0]["lr"] == 0.3 * schedule(step)
        inner.step()
        scheduler.step()
    resumed = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3), schedule)
    resumed.load_state_dict(scheduler.state_dict())  # torch saves the __dict__ of what it calls
    assert resumed.get_last_lr() == [0.3 * schedule(25)]


def test_a_plateau_lasts_until_the_decay():
    schedule = wsd(100, warmup_steps=10, decay_steps=20)
    assert [schedule(step) for step in (9, 10, 79, 80)] == [1.0] * 4
    assert schedule(81) < 1.0


def test_a_decay_of_no_steps_is_legal_only_when_it_is_disabled_and_the_error_says_so():
    assert wsd(decay_steps=0, decay="none")(10**9) == 1.0
    with pytest.raises(InvalidSchedule, match='decay="none"'):
        wsd(100, decay_steps=0)
    with pytest.raises(InvalidSchedule, match="decay_steps=0"):
        wsd(100, decay_steps=10, decay="none")


@pytest.mark.parametrize(
    "make",
    [
        lambda: constant(warmup_steps=-1),
        lambda: linear(0),
        lambda: linear(5, warmup_steps=5),
        lambda: cosine(5, floor=1.5),
        lambda: wsd(10, warmup_steps=8, decay_steps=3),
        lambda: wsd(10, decay_steps=3, decay="exponential"),
        lambda: horizon(total=0, max_steps=4),
    ],
)
def test_a_schedule_that_contradicts_itself_is_refused(make):
    with pytest.raises(InvalidSchedule):
        make()


@given(st.none() | st.integers(1, 9), st.none() | st.integers(1, 9), st.none() | st.integers(1, 9))
def test_the_horizon_has_one_owner(total, max_steps, data_steps):
    """A13: explicit total > max_steps > data-derived."""
    known = [value for value in (total, max_steps, data_steps) if value is not None]
    assume(known)
    assert horizon(total=total, max_steps=max_steps, data_steps=data_steps) == known[0]


def test_a_stream_without_a_horizon_raises():
    """A13: a stream needs an explicit total or max_steps."""
    with pytest.raises(HorizonUnknown, match="max_steps"):
        horizon()
    with pytest.raises(HorizonUnknown, match="total_steps"):
        wsd(decay_steps=5)


@given(any_schedule())
def test_a_description_is_plain_and_equal_for_equal_schedules(schedule):
    described = describe_schedule(schedule)
    assert all(value is None or isinstance(value, int | float | str) for value in described.values())
    check_schedule(described, describe_schedule(schedule))
    check_schedule(None, described)


def test_another_horizon_is_a_mismatch_that_lists_both():
    """A13: the horizon is compared at resume."""
    with pytest.raises(ScheduleMismatch) as caught:
        check_schedule(linear(100, warmup_steps=5).describe(), linear(200).describe())
    assert "total_steps=100" in str(caught.value)
    assert "total_steps=200" in str(caught.value)
    assert "warmup_steps=5" in str(caught.value)


def test_a_users_own_schedule_goes_by_its_name_and_a_stateful_schedulers_state_is_not_ours():
    def mine(step):
        return 0.5

    assert describe_schedule(mine)["name"].endswith("mine")
    check_schedule({"last_epoch": 3, "_step_count": 4}, None)
    with pytest.raises(ScheduleMismatch):
        check_schedule({"last_epoch": 3}, describe_schedule(mine))
