"""Names of a module's tensors: torch's own without the wrappers' prefixes, for every caller (B11, B17, B19)."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper, checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from trainfold.core.errors import InvalidState
from trainfold.core.state.fqn import named_tensors
from trainfold.core.state.names.wrapper_names import name_in


class Hiding(nn.Module):
    """Overrides the list of its modules and leaves out one."""

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            if "hidden" not in name[len(prefix) :]:
                yield name, module


CHILDREN = ("a", "b", "hidden", "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
compiled = partial(torch.compile, backend="eager")
WRAPS = {ActivationWrapper: "_checkpoint_wrapped_module", OptimizedModule: "_orig_mod", AveragedModel: "module"}


@st.composite
def modules(draw, depth=3):
    module = draw(st.sampled_from([nn.Module, Hiding]))()
    pool = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1)), None]
    for key in draw(st.sets(st.sampled_from(["w", "module"]))):
        module.register_parameter(key, draw(st.sampled_from(pool)))
    for key in draw(st.sets(st.sampled_from(["n", "m"]))):
        module.register_buffer(key, draw(st.sampled_from([torch.zeros(2), None])), persistent=draw(st.booleans()))
    made = [None]
    for name in draw(st.sets(st.sampled_from(CHILDREN), max_size=3)) if depth else ():
        if name not in module._parameters:
            child = draw(st.sampled_from(made) | modules(depth=depth - 1))
            made.append(child)
            module.add_module(name, child)
    return draw(st.sampled_from([lambda each: each] * 3 + [checkpoint_wrapper, compiled, AveragedModel]))(module)


def unwrapped(root, path):
    """The parts of a path that lead out of no wrapper: a wrapper is known by its class, and each part by walking to it."""
    parts = path.split(".") if path else []
    owners = [root.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    names = [next((name for kind, name in WRAPS.items() if isinstance(owner, kind)), None) for owner in owners]
    return [part for part, name in zip(parts, names, strict=True) if part != name]


def places(module, kind):
    """Every place, by torch's own traversal."""
    return [
        (".".join([*unwrapped(module, prefix), key]), value)
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for key, value in getattr(owner, kind).items()
        if value is not None
    ]


@given(modules())
def test_names_are_those_of_torch_without_the_prefixes_of_wrappers(module):
    params, buffers = places(module, "_parameters"), places(module, "_buffers")
    try:
        found = named_tensors(module)
    except InvalidState:
        assert any(
            one[0] == other[0] and one[1] is not other[1] for one in params + buffers for other in params + buffers
        )
        return
    for named, expected in ((found.params, params), (found.buffers, buffers)):
        first = {}
        for name, value in expected:
            first.setdefault(id(value), (name, value))
        assert named.items() <= dict(first.values()).items()
    assert len(found.params) == len({id(value) for _, value in params})
    aliases = {(name, next(n for n, v in params if v is value)) for name, value in params}
    assert {pair for pair in found.ties if pair[1] in found.params} == {pair for pair in aliases if pair[0] != pair[1]}


class Named(nn.Module):
    """Has one module of its own, under the name that a wrapper of torch has for what it wraps."""

    def __init__(self, name):
        super().__init__()
        self.add_module(name, nn.Linear(1, 1))


@pytest.mark.parametrize("name", sorted({*WRAPS.values(), "_fsdp_wrapped_module"}))
def test_a_module_of_the_users_keeps_its_name_whatever_that_is(name):
    """B11, K07: `enc.module.weight` was saved, and exported, as `enc.weight`."""
    model = nn.ModuleDict({"enc": Named(name)})
    wrapped = compiled(checkpoint_wrapper(model))
    for each in (model, wrapped):
        assert list(named_tensors(each).params) == [f"enc.{name}.weight", f"enc.{name}.bias"]
        assert [name_in(each, found) for found, _ in each.named_parameters()] == list(named_tensors(each).params)
        assert {name_in(each, found) for found in each.state_dict()} == {*named_tensors(each).params}
    model["enc"].weight = nn.Parameter(torch.zeros(1))  # it was one name with that of the module inside
    assert len(named_tensors(model).params) == 3


def test_a_module_that_names_its_modules_itself_is_asked_however_it_does_it():
    inner = nn.Module()
    inner.shown, inner.hidden = nn.Linear(1, 1), nn.Linear(1, 1)
    outer = nn.Sequential(inner)
    assert len(named_tensors(outer).params) == 4
    inner.named_modules = lambda memo=None, prefix="", remove_duplicate=True: [("", inner), ("shown", inner.shown)]
    assert list(named_tensors(outer).params) == ["0.shown.weight", "0.shown.bias"]


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_weights_that_a_forward_rescales_are_told(kind):
    model = nn.Sequential(kind(2, 2, max_norm=1.0), kind(2, 2))
    assert [each is model[0].weight for each in named_tensors(model).rescaled] == [True]


def test_a_weight_that_is_computed_is_not_asked_for():
    """C14: computing it may change buffers and random streams."""
    model = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))
    nn.utils.parametrizations.spectral_norm(model[0])
    before = {name: value.clone() for name, value in model.named_buffers()}
    found = named_tensors(model)
    assert [each is model[0].parametrizations.weight.original for each in found.rescaled] == [True]
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_an_embedding_without_a_weight_has_none_to_rescale():
    model = nn.Embedding(4, 2, max_norm=1.0)
    del model.weight
    model.factor = nn.Parameter(torch.ones(4, 1))
    assert list(named_tensors(model).params) == ["factor"]


@pytest.mark.parametrize("made", [nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm])
def test_what_a_rescaled_weight_is_computed_of_may_be_rescaled(made):
    """A parametrization may return its original weight, and the forward then writes to it."""
    model = nn.Sequential(made(nn.Embedding(4, 2, max_norm=1.0)))
    expected = {id(each) for each in model[0].parametrizations.parameters()}
    assert {id(each) for each in named_tensors(model).rescaled} == expected


def test_a_module_may_call_the_arguments_of_named_modules_what_it_likes():
    class Own(nn.Linear):
        def named_modules(self, memo=None, start="", dedupe=True):
            return super().named_modules(memo, start, dedupe)

    assert list(named_tensors(nn.Sequential(Own(1, 1))).params) == ["0.weight", "0.bias"]
