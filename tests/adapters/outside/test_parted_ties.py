"""A checkpoint of an untied model, loaded into one whose tensors are tied: two values for one tensor are never a silent choice."""

import pytest
import torch
from torch import nn

import trainfold
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.load import ResumeDrift
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import ResumeRefused
from trainfold.core.resume.resume_plan import ResumePlan


def network(*, tied, differs=False):
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(5, 2), "head": nn.Linear(2, 5, bias=False)})
    if tied:
        model["head"].weight = model["embed"].weight
    else:
        model["head"].weight.data.copy_(model["embed"].weight + differs)
    return model


def saved(model):
    store = MemoryStore()
    trainfold.save(attach(model).capture(), store)
    return store


def test_equal_values_of_tied_tensors_are_one_and_unequal_ones_are_named():
    """B19, P23: by a load alone, from the digests in the manifest. Nothing is read, and a policy may let the difference pass."""
    equal, unequal = (saved(network(tied=False, differs=each)) for each in (False, True))
    like = attach(network(tied=True)).capture()
    found = trainfold.plan(equal, like=like)
    assert isinstance(found, ResumePlan)
    assert not found.drifts
    loaded = trainfold.load(equal, like=like)
    assert loaded.model.ties == like.model.ties
    live = attach(model := network(tied=True))
    with torch.no_grad():
        model["embed"].weight.zero_()
    with CheckpointManager(equal) as manager:
        manager.restore(live)
    assert model["head"].weight is model["embed"].weight
    assert torch.equal(model["head"].weight, network(tied=False)["head"].weight)
    with pytest.raises(
        ResumeRefused,
        match=r"model.params\['head.weight'\]: saved other values than model.params\['embed.weight'\], wanted one tensor",
    ):
        trainfold.load(unequal, like=like)
    with pytest.warns(ResumeDrift, match="other values than"):
        part = trainfold.load(unequal, like=like, policy={"unexpected": "warn"})
    assert torch.equal(part.model.params["embed.weight"], network(tied=False)["embed"].weight)
