"""Models built on meta: their values are those of an ordinary build, exactly what was not loaded is initialised, and what was loaded keeps its bits."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.adapters.construct_cases import Hostile, Net, all_bits, bits, built, kinds, tensors
from torch import nn

from trainfold.adapters.construct.recipes import slots_of
from trainfold.adapters.construct.replay import value_of
from trainfold.construct import initialize, materialize, on_meta
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.state.fqn import RECIPES
from trainfold.core.tensor_memory import unset_elements


@given(chosen=kinds())
@settings(deadline=None, max_examples=60)
def test_what_is_recorded_gives_the_bits_of_an_ordinary_build(chosen):
    """I03. The same calls in the same order, drawn from one generator, give what the constructor gives."""
    torch.manual_seed(3)
    ordinary = Net(chosen)
    model = on_meta(lambda: Net(chosen))
    assert all(each.is_meta for each in tensors(model).values() if each.dim())
    for slot in slots_of([model]):
        if slot.recipe is None:  # a count of BatchNorm, which torch makes from a value
            assert not slot.tensor.is_meta
            continue
        torch.manual_seed(3)
        wanted = getattr(ordinary.get_submodule(slot.name.rpartition(".")[0]), slot.key)
        tape = slot.recipe.tape
        assert bits(value_of(tape, slot.recipe.place, None, tape.calls)) == bits(wanted), slot.name


@given(chosen=kinds(), data=st.data())
@settings(deadline=None, max_examples=60)
def test_exactly_what_was_not_loaded_is_initialised_and_what_was_keeps_its_bits(chosen, data):
    """I01, I02, F16, P17, P22: whatever part of the tensors a load has set, also of a module whose init functions would write all."""
    wanted, initial = built(chosen), all_bits(built(chosen))
    model = on_meta(lambda: Net(chosen))
    materialize(model, "cpu")
    saved = dict(wanted.named_parameters()) | {
        name: value for name, value in wanted.named_buffers() if name in wanted.state_dict()
    }
    floats = [name for name, value in saved.items() if value.is_floating_point()]
    loaded = data.draw(st.sets(st.sampled_from(floats)) if floats else st.just(set()))
    with torch.no_grad():
        for name in loaded:
            tensors(model)[name].fill_(0.25)
    before = all_bits(model)
    found = initialize(model, seed=0)
    assert set(found) == set(floats) - loaded
    after = all_bits(model)
    ties = {
        name: next(first for first, one in tensors(model).items() if one is value)
        for name, value in tensors(model).items()
    }
    for name, value in after.items():
        assert value == (before[name] if ties[name] in loaded else initial[name]), name
    assert initialize(model, seed=1) == ()
    assert all_bits(model) == after


@given(chosen=kinds(min_size=2), data=st.data())
@settings(deadline=None, max_examples=40)
def test_values_are_the_same_at_any_split_into_stages(chosen, data):
    """I08, I05: parts of one build, taken by a deep copy as torch's pipelining does, and layers that are built apart with their prefix."""
    whole = all_bits(built(chosen))
    cut = data.draw(st.integers(1, len(chosen) - 1))
    model = on_meta(lambda: Net(chosen))
    for stage in (range(cut), range(cut, len(chosen))):
        part = copy.deepcopy(model)
        part.layers = nn.ModuleDict({str(index): part.layers[index] for index in stage})
        materialize(part, "cpu")
        initialize(part, seed=0)
        assert all_bits(part).items() <= whole.items()
    for index, kind in enumerate(chosen):
        if kind == "tied":
            continue  # tied to another layer, which is not built here
        layer = on_meta(lambda kind=kind: Net([kind]).layers[0], prefix=f"layers.{index}")
        materialize(layer, "cpu")
        initialize(layer, seed=0)
        assert {f"layers.{index}.{name}": value for name, value in all_bits(layer).items()}.items() <= whole.items()


@given(chosen=kinds())
@settings(deadline=None, max_examples=40)
def test_parameters_stay_the_same_objects_and_ties_are_kept(chosen):
    """B19: an optimizer may be made before the memory is; attributes of a parameter, such as marks of its author, stay."""
    model = on_meta(lambda: Net(chosen))
    before = dict(model.named_parameters(remove_duplicate=False))
    for name, each in before.items():
        each.mark = name
    ties = {name: [other for other, one in before.items() if one is each] for name, each in before.items()}
    materialize(model, "cpu")
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is each for name, each in before.items())
    assert all(each.mark in ties[name] for name, each in after.items())
    assert all(each.requires_grad and each.is_leaf and not each.is_meta for each in after.values())
    for layer in model.layers:
        if hasattr(layer, "alias"):
            assert layer.alias is layer.mean
        if hasattr(layer, "original"):
            assert layer.original is layer.table


def test_initial_values_follow_the_seed_and_the_name():
    """I08: two layers of one shape have other values, another seed gives others, and global randomness neither matters nor moves."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = built(["linear", "linear"])
    assert torch.equal(before, torch.get_rng_state())
    assert bits(one.layers[0].weight) != bits(one.layers[1].weight)
    assert bits(one.layers[0].weight) != bits(built(["linear"], seed=1).layers[0].weight)
    assert bits(one.layers[0].weight) == bits(built(["linear"]).layers[0].weight)


def test_what_is_computed_from_one_draw_belongs_together():
    """The two parameters made of one drawn tensor, and the norm and direction of a weight."""
    model = built(["shared", "weight_norm"])
    assert torch.allclose(model.layers[0].a / 2, model.layers[0].b - 1)
    plain = nn.Linear(3, 4)
    weights = model.layers[1].parametrizations.weight
    assert torch.allclose(weights.original0, weights.original1.norm(dim=1, keepdim=True))
    assert weights.original1.abs().max() <= plain.in_features**-0.5


def test_a_value_in_a_dtype_of_its_own_is_that_of_the_build_cast():
    """A model that is cast after it was built has the values of the other, rounded."""
    model = on_meta(lambda: Net(["linear"])).to(torch.bfloat16)
    materialize(model, "cpu")
    initialize(model, seed=0)
    assert torch.equal(model.layers[0].weight, built(["linear"]).layers[0].weight.to(torch.bfloat16))


def test_two_draws_of_one_tensor_are_two():
    """Each draw of a tensor has a key of its own."""
    model = on_meta(lambda: nn.ParameterList([nn.Parameter(torch.randn(500) - torch.randn(500))]))
    materialize(model, "cpu")
    initialize(model, seed=0)
    assert float(model[0].detach().std()) == pytest.approx(2**0.5, rel=0.15)


class Views(nn.Module):
    """Two parameters in one storage, one made of values that change later, and a random buffer that no checkpoint has."""

    def __init__(self):
        super().__init__()
        flat = torch.empty(6).normal_()
        self.a, self.b = nn.Parameter(flat[:3]), nn.Parameter(flat[3:])
        start = torch.tensor([1.0, 2.0])
        self.c = nn.Parameter(torch.empty(2).copy_(start))
        start.zero_()
        self.register_buffer("projection", torch.randn(4), persistent=False)


def test_parts_of_one_memory_are_apart_and_what_is_random_waits_for_the_seed():
    """I02, I03: what shares memory with a loaded tensor leaves it alone."""
    model = on_meta(Views)
    materialize(model, "cpu")
    assert model.a.untyped_storage().data_ptr() == model.b.untyped_storage().data_ptr()
    assert unset_elements(model.projection) == 4
    with torch.no_grad():
        model.b.fill_(5)
    assert initialize(model, seed=0) == ("a", "c", "projection")
    assert model.b.tolist() == [5, 5, 5]
    assert model.c.tolist() == [1, 2]
    whole = on_meta(Views)
    materialize(whole, "cpu")
    initialize(whole, seed=0)
    assert all(bits(getattr(whole, name)) == bits(getattr(model, name)) for name in ("a", "projection"))


def test_a_parameter_that_was_put_in_afterwards_has_no_recipe():
    """I04: its shape says that it is another tensor."""
    model = on_meta(lambda: nn.Linear(2, 2))
    model.weight = nn.Parameter(torch.empty(5, 2, device="meta"))
    materialize(model, "cpu")
    with pytest.raises(InvalidState, match="'weight': nothing has loaded"):
        initialize(model, seed=0)


def test_a_call_that_fails_on_the_cpu_is_named_and_leaves_no_value():
    """A build may do what only fails with values; what it had written by then is not taken for a value."""

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, 2))
            with torch.no_grad():
                self.weight.fill_(-1)
                self.weight.add_(torch.linalg.cholesky(self.weight))

    model = on_meta(Root)
    materialize(model, "cpu")
    with pytest.raises(InvalidState, match="weight: expected a build whose calls succeed"):
        initialize(model, seed=0)
    assert unset_elements(model.weight) == 4


# --- what is refused ------------------------------------------------------------------------------------------------------


def test_a_tensor_that_nothing_can_initialise_is_named():
    """I04, I03: memory alone is not a value; a buffer that no checkpoint has is refused before there is memory."""

    class Bare(nn.Module):
        def __init__(self, *, persistent):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(2))
            self.register_buffer("forgotten", torch.empty(2), persistent=persistent)

    model = on_meta(lambda: Bare(persistent=True))
    materialize(model, "cpu")
    with pytest.raises(InvalidState, match="'forgotten': nothing has loaded"):
        initialize(model, seed=0)
    assert unset_elements(model.bias) == 2  # nothing has changed
    model.forgotten.fill_(1)
    assert initialize(model, seed=0) == ("bias",)
    model = on_meta(lambda: Bare(persistent=False))
    with pytest.raises(InvalidState, match="'forgotten': no checkpoint has"):
        materialize(model, "cpu")
    assert model.bias.is_meta
    with torch.device("meta"):
        outside = nn.Linear(2, 1)
    materialize(outside, "cpu")
    with pytest.raises(InvalidState, match="'weight', 'bias'"):
        initialize(outside, seed=0)


def test_a_tensor_that_is_written_in_part_is_refused():
    """A load of some rows would leave the others without a value."""
    model = on_meta(lambda: nn.Linear(3, 4))
    with pytest.raises(InvalidState, match="on the meta device, such as 'weight'"):
        initialize(model, seed=0)
    materialize(model, "cpu")
    with torch.no_grad():
        model.weight[:2] = 0
    with pytest.raises(InvalidState, match="6 of 12 elements of 'weight'"):
        initialize(model, seed=0)


def test_a_build_that_decides_by_what_it_draws_is_refused():
    """Numbers computed without randomness are known, such as rates of ``torch.linspace``; random ones are not."""

    def drawn():
        return nn.Linear(2, 2 if torch.rand(()).item() > 2 else 3)

    with pytest.raises(InvalidState, match="_local_scalar_dense"):
        on_meta(drawn)
    with pytest.raises(InvalidState, match="normal_"):
        on_meta(lambda: nn.ParameterList([nn.Parameter(nn.init.normal_(torch.tensor([1.0])))]))
    with pytest.raises(InvalidArgument, match="Module"):
        on_meta(lambda: torch.zeros(1))
    rates = []
    model = on_meta(
        lambda: nn.Sequential(*(nn.Dropout(rates.append(each) or each) for each in torch.linspace(0, 0.5, 3).tolist()))
    )
    assert rates == [0, 0.25, 0.5]
    assert [each.p for each in model] == rates


def test_tied_tensors_that_came_apart_and_differ_are_named():
    """B19: a tie that was broken, such as by a copy, with one side loaded."""
    model = on_meta(lambda: Net(["embedding", "tied"]))
    model.layers[1] = copy.deepcopy(model.layers[1])
    materialize(model, "cpu")
    with torch.no_grad():
        model.layers[0].weight.fill_(1)
    with pytest.raises(InvalidState, match=r"layers\.1\.weight: expected the values of 'layers\.0\.weight'"):
        initialize(model, seed=0)
    with torch.no_grad():
        model.layers[1].weight.fill_(1)
    assert initialize(model, seed=0) == ()
    with pytest.raises(InvalidArgument, match="two tensors named 'layers"):
        initialize([model, copy.deepcopy(model)], seed=0)


# --- bookkeeping --------------------------------------------------------------------------------------------------------------


def test_recipes_are_in_no_state_and_no_pickle():
    """I09: a deep copy has them, without a copy of what was recorded; a state_dict and a pickle have none."""
    model = on_meta(Hostile)
    other = copy.deepcopy(model)
    assert vars(other)[RECIPES] is vars(model)[RECIPES]
    materialize(model, "cpu")
    initialize(model, seed=0)
    assert set(model.state_dict()) == {"weight", "scale"}
    again = pickle.loads(pickle.dumps(model))
    assert vars(again)[RECIPES].of == {}
    assert all_bits(again) == all_bits(model)
    materialize(other, "cpu")
    initialize(other, seed=0)
    assert all_bits(other) == all_bits(model)
