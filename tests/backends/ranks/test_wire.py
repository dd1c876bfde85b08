"""The messages between ranks: values as JSON, and the parts of a sum."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.backends.ranks.ordered_sum import sum_plan
from trainfold.backends.ranks.wire import all_from_wire, from_wire, to_wire
from trainfold.core.errors import InvalidArgument
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.problem import Problem
from trainfold.core.state.spec import leaf_spec


@attrs.frozen
class Checked:
    """Its maker would refuse what a copy may hold."""

    whole: int = attrs.field(converter=int)
    rest: Any = None
    derived: int = attrs.field(init=False, default=7, eq=False)


@attrs.define(slots=False)
class Loose:
    value: Any


class Pair(NamedTuple):
    one: Any
    other: Any = None


@dataclass(frozen=True)
class Sample:
    ids: Any
    label: int = 0


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.fractions()
    | st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.Size([2, 3]), range(2, 9, 3)])
)
keys = st.none() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.frozensets(keys, max_size=3)
        | st.sets(keys, max_size=3)
        | inner.map(lambda value: Checked(1, value))
        | inner.map(Loose)
        | inner.map(Sample)
        | inner.map(Pair)
    ),
    max_leaves=12,
)


def types_in(value):
    if isinstance(value, dict):
        return dict, [(types_in(key), types_in(item)) for key, item in value.items()]
    if attrs.has(type(value)):
        return type(value), [types_in(getattr(value, field.name)) for field in attrs.fields(type(value))]
    if isinstance(value, list | tuple):
        return type(value), [types_in(item) for item in value]
    return type(value), repr(value) if isinstance(value, float) else None


@given(some=st.lists(values, max_size=3), picks=st.lists(st.integers(0, 2), max_size=6))
def test_what_many_ranks_give_comes_back_as_from_each_alone(some, picks):
    """And what can be changed is a copy for each rank, also where ranks give the same."""
    given = [to_wire(some[pick]) for pick in picks if pick < len(some)]
    found = all_from_wire(given)
    alone = [from_wire(each) for each in given]
    assert found == alone
    assert types_in(found) == types_in(alone)
    changeable = [id(each) for each in found if isinstance(each, (list, dict, set, Loose))]
    assert len(set(changeable)) == len(changeable)


@given(value=values)
def test_a_value_comes_back_equal_and_of_the_same_types(value):
    found = from_wire(to_wire(value))
    assert found == value
    assert types_in(found) == types_in(value)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), -0.0, "\ud800", 10**400, Fraction(1, 3)])
def test_values_that_json_would_lose_come_back(value):
    assert repr(from_wire(to_wire(value))) == repr(value)
    assert from_wire(to_wire(float("nan"))) != 0


def test_what_saves_gather_travels():
    spec = leaf_spec(torch.zeros(2, 3), "w")
    problem = Problem("SaveFailed", "a", "b", "c", "d", 30)
    found = from_wire(to_wire(([{"w": spec}], problem)))
    assert found == ([{"w": spec}], problem)
    assert type(found[0][0]["w"]) is LeafSpec
    assert found[1].exit_code == 30


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint8, torch.int64]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_a_batch_travels_with_all_its_bits(dtype, shape):
    tensor = (torch.arange(torch.Size(shape).numel()).reshape(shape) * 1.7).to(dtype)
    batch = Sample({"x": tensor, "y": Pair(tensor.t() if len(shape) == 2 else tensor)}, 3)
    found = from_wire(to_wire(batch))
    assert type(found) is Sample
    for one, other in ((found.ids["x"], tensor), (found.ids["y"].one, batch.ids["y"].one)):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3).T
    array = from_wire(to_wire(numbers))
    assert array.dtype == np.float32
    assert np.array_equal(array, numbers)
    array += 1  # it is the receiver's own


def test_a_copy_is_no_second_making():
    odd = Checked(1)
    object.__setattr__(odd, "whole", "not an int")
    object.__setattr__(odd, "derived", 8)
    found = from_wire(to_wire(odd))
    assert (found.whole, found.derived) == ("not an int", 8)


@pytest.mark.parametrize(
    "value",
    [object(), torch.zeros(1, device="meta"), np.array([None]), ValueError("x"), {"a": [1j]}, lambda: None, type],
)
def test_what_cannot_travel_is_refused_by_its_type(value):
    with pytest.raises(InvalidArgument, match=r"give its parts, and errors as text"):
        to_wire(value)


def test_a_class_that_others_cannot_find_is_refused():
    @attrs.frozen
    class Local:
        x: int

    with pytest.raises(InvalidArgument, match="Local"):
        to_wire(Local(1))


@pytest.mark.parametrize(
    "data", [b'{"object":["os:system",{}]}', b'{"object":["builtins:eval",{}]}', b'{"object":["antigravity:x",{}]}']
)
def test_bytes_can_name_no_code(data):
    with pytest.raises(TypeError):
        from_wire(data)


# --- sums ------------------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


@given(
    world_size=st.integers(1, 6),
    layout=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=5),
    seed=st.integers(0, 2**32),
)
def test_what_is_cut_added_and_joined_is_the_fold_in_rank_order(world_size, layout, seed):
    generator = torch.Generator().manual_seed(seed)

    def term(dtype, shape):
        return (torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator).double()).to(
            dtype
        )

    terms = [[term(dtype, shape) for dtype, shape in layout] for _ in range(world_size)]
    before = [[tensor.clone() for tensor in each] for each in terms]
    plans = [sum_plan(each, world_size) for each in terms]
    rows = [plan.cut(each) for plan, each in zip(plans, terms, strict=True)]
    assert {tuple(row.shape) for row in rows} == {(world_size, plans[0].part_bytes)}
    sums = torch.stack([plans[part].add(torch.stack([row[part] for row in rows])) for part in range(world_size)])
    for rank in range(world_size):
        joined = plans[rank].join(sums)
        assert len(joined) == len(layout)
        for index, found in enumerate(joined):
            total = before[0][index].clone()
            for each in before[1:]:
                total += each[index]
            assert found.dtype == total.dtype
            assert found.shape == total.shape
            assert found.contiguous().reshape(-1).view(torch.uint8).equal(total.reshape(-1).view(torch.uint8))
    for one, other in zip(terms, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_integers_add_up_as_any_others_and_wrap_around(dtype):
    """They are added as signed integers, which have the same bits, because torch cannot sum unsigned ones."""
    most = torch.iinfo(dtype).max
    terms = [torch.tensor([0, 1, most, most // 2 + 1], dtype=dtype), torch.tensor([7, 2, 2, most // 2], dtype=dtype)]
    plan = sum_plan(terms[:1], 2)
    rows = [plan.cut([each]) for each in terms]
    (found,) = plan.join(torch.stack([plan.add(torch.stack([row[part] for row in rows])) for part in range(2)]))
    assert found.dtype == dtype
    assert found.tolist() == [7, 3, 1, most]
