"""What DistributedDataParallel carries from one forward to the next is put back, so that a step can run again."""

import contextlib

import pytest
import torch
from torch import nn

from trainfold.adapters.parallel.ddp_wrappers import BetweenForwards, ddp_wrappers

pytestmark = pytest.mark.usefixtures("process_group")


class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, name):
        return sum(
            getattr(self, each)(torch.ones(1, 1)).sum() for each in (("one", "other") if name == "both" else (name,))
        )


def chosen(**options):
    return nn.parallel.DistributedDataParallel(Chosen(), **options)


def used(wrapper):
    """Which parameters were used, as the last sum has it."""
    return wrapper.reducer._get_local_used_map().tolist()


def test_a_forward_without_a_sum_does_not_let_the_next_one_skip_its_broadcast():
    wrapper = chosen()
    between = BetweenForwards([wrapper])
    with wrapper.no_sync():
        wrapper("one")
    wrapper.require_backward_grad_sync = False  # as a loop may leave it
    between.back()
    assert (wrapper.require_forward_param_sync, wrapper.require_backward_grad_sync) == (True, True)


@pytest.mark.parametrize("ends_with_a_forward", [False, True])
def test_what_a_window_has_used_before_its_last_batch_is_known_when_that_runs_again(ends_with_a_forward):
    """A forward without a backward at the end of a step left DDP in wait for gradients."""
    wrapper = chosen(find_unused_parameters=True)
    with wrapper.no_sync():
        wrapper("one").backward()
    between = BetweenForwards([wrapper])
    for run in range(3):
        if run:
            between.back()
        wrapper("other").backward()
        assert used(wrapper) == [1, 1]
        if ends_with_a_forward:
            wrapper("other")
    if not ends_with_a_forward:
        wrapper("other").backward()
        assert used(wrapper) == [0, 1], "the next window begins without marks"


def test_marks_of_a_window_before_are_not_put_into_this_one():
    wrapper = chosen(find_unused_parameters=True)
    wrapper("one").backward()
    between = BetweenForwards([wrapper])
    with wrapper.no_sync():
        wrapper("other").backward()
    between.back()
    wrapper("other").backward()
    assert used(wrapper) == [0, 1]


def test_marks_of_a_window_go_into_the_first_of_two_sums():
    wrapper = chosen(find_unused_parameters=True)
    with wrapper.no_sync():
        wrapper("one").backward()
    between = BetweenForwards([wrapper])
    for run in range(2):
        with between.watched() if not run else contextlib.nullcontext():
            wrapper("other").backward()
            assert used(wrapper) == [1, 1]
            wrapper("other").backward()
            assert used(wrapper) == [0, 1]
        between.back()


def batch(wrapper, *, sums=True):
    """A forward and its backward."""
    with contextlib.nullcontext() if sums else wrapper.no_sync():
        wrapper("both").backward()


@pytest.mark.parametrize("finds", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("begins_with_sum", [False, True])
def test_a_forward_without_a_backward_is_noticed_where_it_changes_a_sum(finds, before, after, begins_with_sum):
    """DDP then sums the next backward, in ``no_sync()`` too: the first run of a step, or the second, and not the other."""
    wrapper = chosen(find_unused_parameters=finds)
    batch(wrapper)
    if before:
        wrapper("both")
    between = BetweenForwards([wrapper])
    with between.watched():
        with torch.no_grad():
            wrapper("both")
        batch(wrapper, sums=begins_with_sum)
        batch(wrapper)
        if after:
            wrapper("both")
    assert between.is_lost == ((before or after) and not begins_with_sum)


def test_a_forward_that_sums_nothing_is_not_waited_for():
    wrapper = chosen()
    batch(wrapper)
    between = BetweenForwards([wrapper])
    with between.watched(), wrapper.no_sync():
        wrapper("both").backward()
        wrapper("both")
    assert not between.is_lost


def test_wrappers_are_found_inside_of_a_module_and_around_it():
    inside, around = chosen(), chosen()
    modules = {"model": nn.Sequential(inside), "extra": around.module, "plain": nn.Linear(1, 1)}
    assert ddp_wrappers(modules, least_ranks=1) == {"model": [inside], "extra": [around], "plain": []}
    assert ddp_wrappers(modules, least_ranks=2) == {"model": [inside], "extra": [], "plain": []}
