"""Two sources are compared whichever is named first, in a dtype that decides nothing; a tensor with two names once."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.backends.convert.compare_sources import ReadTable, compare_sources
from trainfold.core.format.codec import torch_dtype
from trainfold.core.format.dtypes import STORED
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.state.spec import dtype_name
from trainfold.core.transform.apply import table_of
from trainfold.core.transform.transform import compose


def side(tensors, ties=()):
    specs = {name: LeafSpec(dtype_name(each.dtype), tuple(each.shape)) for name, each in tensors.items()}
    read = {name: lambda box, each=each: each[tuple(slice(*part) for part in box)] for name, each in tensors.items()}
    return ReadTable(table_of(compose(), specs), lambda name, box: read[name](box), dict(ties))


def compared(one, other):
    """The pair in both orders, which say the same."""
    (found,), (again,) = (compare_sources(side({"w": a}), side({"w": b})) for a, b in ((one, other), (other, one)))
    assert (found.distance, found.is_rounded, found.same) == (again.distance, again.is_rounded, again.same)
    return found


def kind(dtype):
    words = ("uint64", "float4", "float", "complex", "bool", "int")
    return next(word for word in words if word in dtype)


@pytest.mark.parametrize("one", STORED)
def test_any_two_dtypes_are_compared_or_are_other_kinds_of_numbers(one):
    """int64 has not all numbers of uint64; an element of float4 is two numbers, and torch converts it to nothing."""
    for other in STORED:
        a, b = (torch.zeros(2 * torch_dtype(each).itemsize, dtype=torch.uint8).view(torch_dtype(each)) for each in (one, other))  # fmt: skip
        found = compared(a, b)
        assert (found.distance is not None) == (kind(one) == kind(other)), other
        assert found.same == (one == other)


@pytest.mark.parametrize(("one", "other", "differing"), [
    (torch.tensor(2.0**63).to(torch.uint64), torch.tensor(-(2**63)), None),
    (torch.tensor(1 + 2**-10).half(), torch.tensor(1.0).bfloat16(), 1),  # bfloat16 rounds the first to the second
    (torch.tensor(2.0**-26).bfloat16(), torch.tensor(0.0).half(), 1),  # and half so
    (torch.tensor(1.125).to(torch.float8_e4m3fn), torch.tensor(1.0).to(torch.float8_e5m2), 1),
    (torch.tensor(1.0).bfloat16(), torch.tensor(1 + 2**-20), 0),
    (torch.tensor(1.0), torch.tensor(1 + 2**-50, dtype=torch.float64), 0),
    (torch.tensor(1.0).to(torch.float8_e4m3fn), torch.tensor(1.25).half(), 1),
    (torch.tensor(1 + 1j), torch.tensor(1 + 2**-50 + 1j, dtype=torch.complex128), 0),
    (torch.tensor(44, dtype=torch.uint8), torch.tensor(300), 1),
])  # fmt: skip
def test_values_are_rounded_to_fewer_bytes_alone(one, other, differing):
    """To as many bytes, or more of an integer, no number is changed."""
    found = compared(one, other)
    assert (None if found.distance is None else found.distance.differing) == differing
    is_narrower = one.dtype.itemsize < other.dtype.itemsize
    assert found.is_rounded == (is_narrower and one.dtype is not torch.uint8)


@st.composite
def tied_sides(draw):
    """Groups of names; each side has some of a group under one value, and may know that they are one tensor."""
    groups, sides = [["a", "b", "c"], ["d", "e"], ["f"]], []
    for _ in range(2):
        tensors, ties = {}, {}
        for group in groups:
            names = draw(st.lists(st.sampled_from(group), unique=True))
            is_tied = draw(st.booleans())
            for name in names:
                tensors[name] = torch.tensor(draw(st.integers(0, 1)))
                if is_tied and name != names[0]:
                    ties[name], tensors[name] = names[0], tensors[names[0]]
        sides.append((tensors, ties))
    return sides


@given(tied_sides())
def test_a_name_is_left_out_only_where_the_other_side_has_the_tensor_under_another(sides):
    """All others are compared, or absent on one side."""
    tables, left_out = [side(*each) for each in sides], set()
    for (tensors, ties), (others, _) in (sides, sides[::-1]):
        for one, other in combinations(tensors, 2):
            if ties.get(one, one) == ties.get(other, other):
                left_out |= {a for a, b in ((one, other), (other, one)) if a not in others and b in others}
    found = {each.name: each for each in compare_sources(*tables)}
    a, b = (tensors for tensors, _ in sides)
    assert found.keys() == {*a, *b} - left_out
    for name, each in found.items():
        assert each.same == (name in a and name in b and torch.equal(a[name], b[name]))
        assert [each.a is None, each.b is None] == [name not in a, name not in b]
