"""The account of a source of weights: whatever the cuts, each rank gets its part, and what is missing or not asked for has a name."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.errors import InvalidState
from trainfold.core.layout.slices import whole_box
from trainfold.core.weights.account import Account
from trainfold.core.weights.source import Wanted

SOURCE = object()


@st.composite
def cut_shapes(draw):
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    box = tuple(sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape)
    return shape, tuple(map(tuple, box))


@given(cut_shapes())
def test_the_part_of_a_rank_is_that_of_the_whole_tensor_however_it_was_supplied(cut):
    """I06: a source may yield all of a tensor, or what the rank holds."""
    shape, box = cut
    values = torch.arange(torch.Size(shape).numel()).view(shape)
    held = values[tuple(slice(start, stop) for start, stop in box)]
    for given_tensor in (values, held):
        account = Account(SOURCE, {"w": Wanted("int64", shape, box)})
        assert account.missing() == ["w"]
        assert torch.equal(given_tensor[account.part_of("w", "int64", given_tensor.shape)], held)
        assert account.missing() == []


@given(st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef")))
def test_every_tensor_is_accounted_for(asked, supplied):
    """J03: what is missing is named, and so is what was not asked for."""
    account = Account(SOURCE, {name: Wanted("float32", (1,), whole_box((1,))) for name in sorted(asked)})
    for name in sorted(supplied):
        if name in asked:
            account.part_of(name, "float32", (1,))
        else:
            with pytest.raises(InvalidState, match=f"weights\\['{name}'\\]"):
                account.part_of(name, "float32", (1,))
    assert account.missing() == sorted(asked - supplied)
    assert (account.problem() is None) == (asked <= supplied)


def test_many_missing_tensors_are_counted():
    """J03: a message has eight names."""
    account = Account(SOURCE, {f"h.{number}": Wanted("float32", (1,), ((0, 1),)) for number in range(20)})
    assert "h.7, and 12 more" in str(account.problem())
