"""The cost of `live.advance` at a step with nothing due, in function calls, because times depend on the machine."""

import sys

import pytest
import torch
from torch.utils.data import DataLoader

from trainfold.adapters.live.attach import attach
from trainfold.adapters.live.loop.loop_data import LoopData

MOST = 52  # Python functions and comprehensions of one call


def calls_of(function):
    """How many Python functions a call enters."""
    found = []
    sys.setprofile(lambda frame, event, _: found.append(frame.f_code.co_name) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(found)


@pytest.mark.parametrize("samples", [4, None])
def test_a_step_on_one_loader_calls_few_functions_and_lists_no_loaders(samples, monkeypatch):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer, loader=DataLoader(torch.arange(64.0), batch_size=4))
    batches = iter(live.batches())
    for _ in range(4):
        next(batches)
        live.advance(samples=samples)
    listed, feeds = [], LoopData.feeds
    monkeypatch.setattr(LoopData, "feeds", lambda self: listed.append(1) or feeds(self))
    next(batches)
    assert calls_of(lambda: live.advance(samples=samples)) <= MOST + 1  # the lambda
    assert listed == []
