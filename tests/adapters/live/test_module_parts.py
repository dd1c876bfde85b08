"""A list of modules is attached as one model, whose tensors have the names that they have in the parts."""

import pytest
import torch
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import InvalidArgument, InvalidState, RestoreRefused
from trainfold.core.format.fingerprint import fingerprint


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        for layer in (self.first, self.last):
            x = x if layer is None else layer(x)
        return x


def parts(seed=0):
    """Two copies of the model, each without the layers of the other, as chunks of a pipeline are made."""
    torch.manual_seed(seed)
    whole = Stack()
    chunks = [Stack(), Stack()]
    for chunk in chunks:
        chunk.load_state_dict(whole.state_dict())
    chunks[0].last = chunks[1].first = None
    return chunks


def made(model, seed=0):
    torch.manual_seed(seed)
    parameters = [each for part in (model if isinstance(model, list) else [model]) for each in part.parameters()]
    return torch.optim.AdamW(parameters, lr=0.1)


def train(model, optimizer, live, manager, *, steps):
    while live.progress.step < steps:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(live.progress.step))
        for part in model if isinstance(model, list) else [model]:
            x = part(x)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        live.advance(samples=4)
        manager.step(live)


def test_parts_resume_exactly_and_are_saved_as_the_whole_model_is():
    store = MemoryStore()
    model = parts()
    optimizer = made(model)
    live = attach(model, optimizer)
    with CheckpointManager(store, every=2) as manager:
        train(model, optimizer, live, manager, steps=5)
    wanted = fingerprint(live.capture())
    assert list(live.capture().model.params) == list(dict(Stack().named_parameters()))

    model = parts(seed=7)
    optimizer = made(model)
    live = attach(model, optimizer)
    with CheckpointManager(store) as manager:
        assert manager.restore(live, step=4).step == 4
        train(model, optimizer, live, manager, steps=5)
    assert fingerprint(live.capture()) == wanted

    torch.manual_seed(8)
    whole = Stack()
    optimizer = made(whole)
    live = attach(whole, optimizer)
    with CheckpointManager(store) as manager:
        manager.restore(live, step=4)
        train(whole, optimizer, live, manager, steps=5)
    assert fingerprint(live.capture()) == wanted, "one model, in parts or not"


def test_parts_of_another_model_are_refused():
    state = attach(parts()).capture()
    with pytest.raises(RestoreRefused, match=r"last\.weight"):
        attach(parts()[:1]).restore(state)


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(InvalidState, match=r"first\.0\.weight"):
        attach([Stack(), Stack()])


@pytest.mark.parametrize("model", [[], [nn.Linear(1, 1), "text"], [nn.Linear(1, 1)] * 2])
def test_a_list_of_anything_else_is_refused(model):
    with pytest.raises(InvalidArgument, match="list of different modules"):
        attach(model)
