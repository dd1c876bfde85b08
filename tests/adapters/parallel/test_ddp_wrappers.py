"""What DistributedDataParallel carries from one forward to the next is put back, so that a step can run again."""

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
        return getattr(self, name)(torch.ones(1, 1)).sum()


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


def test_wrappers_are_found_inside_of_a_module_and_around_it():
    inside, around = chosen(), chosen()
    modules = {"model": nn.Sequential(inside), "extra": around.module, "plain": nn.Linear(1, 1)}
    assert ddp_wrappers(modules, least_ranks=1) == {"model": [inside], "extra": [around], "plain": []}
    assert ddp_wrappers(modules, least_ranks=2) == {"model": [inside], "extra": [], "plain": []}
