"""A describer's result equals a fresh description, whatever it described before."""

import json
import warnings
from enum import StrEnum

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainfold.core.errors import StateDonated, UnsupportedLeaf
from trainfold.core.format.structure import describe as description
from trainfold.core.format.structure.describe import Describer, describe
from trainfold.core.layout.shard import Shard
from trainfold.core.state.leaves import Leaves
from trainfold.properties import strategies


class Name(StrEnum):
    A = "a"


POOL = torch.arange(12.0)
SHARD = Shard(torch.zeros(0), (4,), (4,))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    QUANTIZED = torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8)
LEAVES = (  # few, so that states repeat, share leaves or differ in one place only
    *(lambda: torch.zeros(2), lambda: torch.ones(2), lambda: torch.zeros(2, dtype=torch.int32), lambda: torch.zeros(1, 2)),
    *(lambda: torch.nn.Parameter(torch.zeros(2)), lambda: POOL, lambda: POOL[1:3], lambda: POOL[2:4], lambda: POOL.view(3, 4)),
    *(lambda: torch.zeros(0), lambda: np.zeros(2), lambda: 1, lambda: True, lambda: 1.0, lambda: "text", lambda: None),
    *(lambda: torch.zeros(2).to_sparse(), lambda: torch.zeros(2, device="meta"), lambda: NESTED),
    *(lambda: torch.zeros(2, dtype=torch.complex64).conj(), lambda: QUANTIZED),
    *(lambda: Shard(torch.zeros(2), (4,), (0,)), lambda: Shard(torch.zeros(2), (4,), (2,)), lambda: Shard(torch.zeros(0), (4,), (4,))),
    *(lambda: Shard(POOL[1:3], (4,), (0,)), lambda: Shard(torch.zeros(2, device="meta"), (4,), (0,)), lambda: SHARD),
)  # fmt: skip
leaf = st.sampled_from(LEAVES[:5]) | st.sampled_from(LEAVES[-6:]) | st.sampled_from(LEAVES)
key = st.sampled_from(["a", "b", "c"]) | st.sampled_from(["a", "b", 1, True, 1.0, Name.A, None])


def made(recipe):
    if callable(recipe):
        return recipe()
    kind, pairs = recipe
    return kind((name, made(value)) for name, value in pairs)


def mapping(kind, values, size):
    return st.tuples(st.just(kind), st.lists(st.tuples(key, values), max_size=size))


held = mapping(Leaves, leaf | mapping(dict, leaf, 2), 3)
component = held | mapping(dict, held | leaf, 3)


def said(describe, value):
    """The whole description, or the error that refuses a leaf."""
    try:
        described, tensors = describe(value, "part")
    except (UnsupportedLeaf, RuntimeError) as error:
        return type(error), str(error)
    text = json.dumps(described.node)  # distinguishes 1 from True and from 1.0
    return text, list(described.tensors.items()), [(path, id(tensor)) for path, tensor in tensors.items()]


@settings(deadline=None, max_examples=600, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(component, min_size=2, max_size=4))
def test_a_describer_says_what_a_fresh_description_says(recipes):
    describer = Describer()
    for recipe in recipes:
        value = made(recipe)
        assert said(describer.describe, value) == said(describe, value)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(strategies.states(), min_size=2, max_size=3))
def test_the_states_of_a_run_are_described_as_if_each_were_the_first(states):
    describer = Describer()
    for state in [*states, *states]:
        for name, value in (("model", state.model), ("optimizer", state.optimizer)):
            assert said(lambda each, _, name=name: describer.describe(each, name), value) == said(
                lambda each, _, name=name: describe(each, name), value
            )


def slots(count):
    return {"slots": Leaves({f"w{i}": {"m": torch.zeros(2), "v": torch.zeros(2)} for i in range(count)}), "lr": count}


def test_leaves_that_look_as_they_did_are_not_walked_again(monkeypatch):
    describer = Describer()
    describer.describe(slots(50), "optimizer")
    walked = []
    encode = description._Encoder._tensor
    monkeypatch.setattr(description._Encoder, "_tensor", lambda *args: (walked.append(1), encode(*args))[1])
    first, tensors = describer.describe(slots(50), "optimizer")
    assert (len(walked), len(tensors), len(first.tensors)) == (0, 100, 100)
    assert len(describer.describe(slots(51), "optimizer")[1]) == len(walked) == 102


def test_shards_that_look_as_they_did_are_not_walked_again_and_others_are_told_from_them(monkeypatch):
    """An empty one too; another start or another whole is another description."""

    def part(shape, start, rows=2):
        return Leaves({"w": Shard(torch.zeros(rows), (shape,), (start,)), "e": Shard(torch.zeros(0), (4,), (4,))})

    describer = Describer()
    describer.describe(part(4, 0), "part")
    walked = []
    encode = description._Encoder._tensor
    monkeypatch.setattr(description._Encoder, "_tensor", lambda *args: (walked.append(1), encode(*args))[1])
    describer.describe(part(4, 0), "part")
    assert not walked
    for value in (part(4, 2), part(6, 2), part(6, 2, rows=3), part(4, 0)):
        assert said(describer.describe, value) == said(describe, value)


def test_a_tie_with_a_leaf_that_was_not_walked_again_is_seen():
    """B19."""
    describer = Describer()
    for _ in range(2):
        weight = torch.zeros(2)
        described, tensors = describer.describe({"leaves": Leaves({"w": weight}), "tied": weight}, "part")
        assert described.node["dict"]["tied"] == {"t": 0}
        assert len(tensors) == 1


def test_what_a_describer_said_once_does_not_change_when_it_says_it_again():
    describer = Describer()
    first, _ = describer.describe(slots(3), "optimizer")
    text = json.dumps(first.node)
    describer.describe(slots(4), "optimizer")
    describer.describe(slots(3) | {"lr": 7}, "optimizer")
    assert json.dumps(first.node) == text


def test_consumed_leaves_are_refused_though_they_look_as_they_did():
    describer = Describer()
    value = Leaves({"w": torch.zeros(2)})
    describer.describe(value, "part")
    value.lease.consumed_by = 3
    with pytest.raises(StateDonated):
        describer.describe(value, "part")


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.zeros(2, 2, device="meta"),
        *(lambda to=to: to(torch.eye(2)) for to in (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc)),
        lambda: torch.eye(2).to_sparse_bsr((1, 1)),
        lambda: torch.eye(2).to_sparse_bsc((1, 1)),
        lambda: torch.eye(2).to_mkldnn(),
        lambda: NESTED,
        lambda: QUANTIZED,
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_leaf_that_cannot_be_saved_is_refused_where_one_that_can_stood(other):
    describer = Describer()
    describer.describe(Leaves({"w": torch.eye(2)}), "part")
    with pytest.raises(UnsupportedLeaf):
        describer.describe(Leaves({"w": other()}), "part")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": {"b": "tensor"}}, {"a": "tensor", "b": {}}),
        ({"a": {"b": "tensor"}, "c": {}}, {"a": {}, "b": "tensor", "c": {}}),
        ({1: "tensor"}, {True: "tensor"}),
        ({"a": "tensor"}, {Name.A: "tensor"}),
        ({"w": {1: "tensor"}}, {"w": {1.0: "tensor"}}),
    ],
)
def test_leaves_that_nearly_look_as_others_did_are_told_from_them(before, after):
    def filled(value):
        return {name: filled(each) for name, each in value.items()} if type(value) is dict else torch.zeros(2)

    for one, other in ((before, after), (after, before)):
        describer = Describer()
        said(describer.describe, Leaves(filled(one)))
        value = Leaves(filled(other))
        assert said(describer.describe, value) == said(describe, value)


def fake():
    with FakeTensorMode():
        return torch.zeros(2)


@pytest.mark.parametrize("inside", [dict, Leaves])
@pytest.mark.parametrize("made", [fake, lambda: nn.LazyLinear(3).weight, nn.parameter.UninitializedBuffer])
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_tensor_that_has_no_memory_is_refused_by_name(made, inside):
    """Torch raises its own errors for some of them, and gives address 0 for others."""
    for describe_it in (describe, Describer().describe):
        with pytest.raises(UnsupportedLeaf, match=r"part\['w'\]"):
            describe_it(inside({"w": made()}), "part")


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.functionalize])
def test_a_tensor_inside_a_transform_is_refused_by_name(transform):
    def inside(value):
        with pytest.raises(UnsupportedLeaf, match=r"part\['w'\]"):
            describe(Leaves({"w": value}), "part")
        return value.sum()

    transform(inside)(torch.ones(3))
