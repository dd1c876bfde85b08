"""`live.check` finds gradients that differ between ranks because no backward sums them, as those of FSDP2's ``ignored_params``."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.system.rank_refusals_cases import PATIENT
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.core.errors import TrainfoldError
from trainfold.core.step.reduce import unequal_gradients
from trainfold.ranks import Replicas, run_threads


def with_ignored(collectives):
    """A model of which ``fully_shard`` ignores a parameter, and a module that nothing wraps; what a check finds, and what it exchanges."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, head = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)), nn.Linear(3, 1)
    ignored = model[0].bias
    model = fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params={ignored})
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    live = attach(model, optimizer, extra={"head": head})

    def check(*averaged, poison=1.0):
        optimizer.zero_grad()
        loss = model(torch.full((4, 6), 1.0 + collectives.rank)).square().mean()
        loss.backward()
        (head(torch.full((1, 3), 1.0 + collectives.rank)).sum() * poison).backward()
        for each in averaged:
            torch.distributed.all_reduce(each.grad)
            each.grad /= 2
        try:
            return live.check(loss.detach(), clip_norm=0.1).grad_norm, ignored.grad.tolist()
        except TrainfoldError as error:
            return type(error).__name__, str(error)

    found = {"ignored": check(*head.parameters()), "both": check(), "none": check(ignored, *head.parameters())}
    found["poison"] = check(ignored, *head.parameters(), poison=torch.nan if collectives.rank else 1.0)
    return found


@pytest.mark.slow(2)
def test_gradients_that_nothing_sums_are_equal_on_all_ranks_or_refused_by_name(processes):
    """A05, R07: every rank found another norm there, and clipped by it."""
    one, other = processes.run(2, with_ignored, collectives=PATIENT)
    for found in (one, other):
        assert found["ignored"][0] == found["both"][0] == "RanksDisagree"
        assert "the gradient of 0.bias: expected the same on every rank" in found["ignored"][1]
        assert "and of 1 more" in found["both"][1]
        assert found["poison"][0] == "NonFinite"
    assert one == other
    assert one["none"][0] > 0


@given(
    columns=st.lists(
        st.lists(st.sampled_from([None, 0.0, 1.0, 1.0 + 2**-50, 2.0, math.inf, math.nan]), min_size=3, max_size=3),
        max_size=3,
    )
)
@settings(max_examples=20)
def test_the_gradients_that_differ_are_found_by_their_places(columns):
    def find(ranks):
        mine = [column[ranks.rank] for column in columns]
        held = [None if each is None else torch.tensor([each, 0.0], dtype=torch.float64) for each in mine]
        return unequal_gradients(held, Replicas(ranks))

    expected = [place for place, column in enumerate(columns) if len(set(map(str, column))) > 1]
    assert run_threads(3, find) == [expected] * 3
