"""The leaves that a save may hold, because only an announced update writes to them."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.backends.hold.steady import leased_leaves, steady_leaves


def model(name):
    return ("model", name)


def test_trained_parameters_and_slots_of_announcing_optimizers_are_steady():
    weight, other, slot = torch.ones(2), torch.ones(2), torch.ones(2)
    leaves = {
        model("w"): weight,
        model("mean"): other,
        ("optimizer", "slots['w']"): slot,
        ("extra", "ema"): torch.ones(2),
    }
    assert steady_leaves(leaves, [weight], ("slots[",)) == {model("w"), ("optimizer", "slots['w']")}
    assert steady_leaves(leaves, [weight]) == {model("w")}


def test_what_shares_the_memory_of_a_trained_parameter_is_steady():
    """A leaf of a `state_dict` is another tensor with the same memory."""
    weight = torch.ones(4)
    leaves = {model("w"): weight.detach(), model("apart"): weight.clone()}
    assert steady_leaves(leaves, [weight]) == {model("w")}


def test_a_frozen_parameter_is_copied():
    """W16: it may be a teacher, which the loop updates without an announcement."""
    weight, teacher = torch.ones(2), torch.ones(2)
    leaves = {model("w"): weight, model("t"): teacher}
    assert steady_leaves(leaves, [weight, teacher], frozen=[teacher]) == {model("w")}


def test_a_parameter_that_a_forward_rescales_is_copied_under_each_of_its_names():
    table, weight = torch.ones(2), torch.ones(2)
    leaves = {model("e"): table, model("tied"): table.detach(), model("w"): weight}
    assert steady_leaves(leaves, [table, weight], rescaled=[table]) == {model("w")}


def test_empty_tensors_share_no_memory():
    """All of them are at address 0."""
    leaves = {model("none"): torch.empty(0), model("w"): torch.ones(2)}
    assert steady_leaves(leaves, [torch.empty(0)]) == set()


def test_leaves_of_a_state_are_steady_as_they_lie_and_no_other_view_of_them():
    leaf = torch.arange(6.0)
    leaves = {model("w"): leaf, model("same"): leaf.detach(), model("part"): leaf[:3], ("extra", "x"): torch.ones(6)}
    assert leased_leaves(leaves, [leaf]) == {model("w"), model("same")}


@given(st.lists(st.sampled_from(["trained", "frozen", "rescaled", "slot", "buffer"]), max_size=12))
def test_every_leaf_is_steady_if_and_only_if_its_kind_is(kinds):
    """The rule looks at each leaf alone: neither their order nor their number makes a difference."""
    tensors = [torch.ones(1) for _ in kinds]
    leaves = {
        ("part", f"{kind}[{number}]"): tensor for number, (kind, tensor) in enumerate(zip(kinds, tensors, strict=True))
    }
    of = lambda *wanted: [tensor for kind, tensor in zip(kinds, tensors, strict=True) if kind in wanted]
    found = steady_leaves(
        leaves, of("trained", "frozen", "rescaled"), ("slot[",), frozen=of("frozen"), rescaled=of("rescaled")
    )
    assert found == {name for name in leaves if name[1].startswith(("trained[", "slot["))}
