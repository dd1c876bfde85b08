"""Exact sums: equal to sums of fractions for every dtype, order and partition, cancellation and subnormals included."""

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfold.core.exact import ExactSum, exact_add, exact_merge, exact_value, exact_zero
from trainfold.core.terms import bins_of, sum_of_doubles, sum_of_floats

FLOATS = {torch.float64: 64, torch.float32: 32, torch.float16: 16, torch.bfloat16: 32}
MANY = settings(deadline=None, max_examples=200)


@st.composite
def tensors(draw, *, finite=True):
    """Any values of any float dtype, often far apart, often of one size."""
    dtype = draw(st.sampled_from(list(FLOATS)))
    numbers = st.floats(width=FLOATS[dtype], allow_nan=not finite, allow_infinity=not finite)
    near = st.floats(0.5, 8.0, width=16).map(lambda value: math.copysign(value, draw(st.sampled_from([1, -1]))))
    values = draw(st.lists(st.one_of(numbers, near, st.just(0.0)), max_size=80))
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    return tensor[tensor.isfinite()] if finite else tensor


def fraction_of(tensor):
    return sum(map(Fraction, tensor.double().tolist()), Fraction(0))


def same(one, other):
    return torch.equal(one.limbs, other.limbs) and torch.equal(one.special, other.special)


@MANY
@given(st.lists(tensors(), max_size=4))
def test_a_sum_is_that_of_the_fractions(parts):
    """Q02: nothing is rounded, for any dtype."""
    total = exact_zero()
    for part in parts:
        total = exact_add(total, part)
    assert exact_value(total) == sum(map(fraction_of, parts), Fraction(0))


@MANY
@given(tensors(), st.data())
def test_order_and_partition_change_no_bit(tensor, data):
    """Q01: any batching, any order, any number of ranks."""
    whole = exact_add(exact_zero(), tensor)
    order = data.draw(st.permutations(range(len(tensor))))
    shuffled = tensor[torch.tensor(order, dtype=torch.int64)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tensor)), max_size=3)))
    ranks = [exact_add(exact_zero(), part) for part in shuffled.tensor_split(cuts)]
    merged = exact_zero()
    for rank in ranks:
        merged = exact_merge(rank, merged)
    assert same(merged, whole)
    summed = ExactSum(sum(rank.limbs for rank in ranks), sum(rank.special for rank in ranks))  # as an all-reduce does
    assert same(exact_merge(exact_zero(), summed), whole)


@MANY
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=3000))
def test_rows_and_bins_agree(values):
    tensor = torch.tensor(values, dtype=torch.float32)
    fast = sum_of_floats(tensor)
    slow = sum(limb << (32 * i) for i, limb in enumerate(bins_of(tensor)[0].tolist()))
    assert fast is None or fast == slow


@pytest.mark.parametrize("size", [1, 31, 32, 33, 1024, 5000])
@pytest.mark.parametrize("spread", [0, 10, 24, 25, 40])
def test_terms_on_both_sides_of_what_rows_can_hold(size, spread):
    """The widest spread that rows take and the next one; full mantissas, so that the last bit counts."""
    generator = torch.Generator().manual_seed(size + spread)
    mantissas = 1 + torch.rand(size, generator=generator)
    tensor = torch.ldexp(mantissas, torch.randint(-spread, 1, (size,), generator=generator)).float()
    tensor[0] = 1 + 2**-23
    assert exact_value(exact_add(exact_zero(), tensor)) == fraction_of(tensor)
    assert exact_value(exact_add(exact_zero(), -tensor)) == -fraction_of(tensor)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_integers_are_terms(values):
    assert exact_value(exact_add(exact_zero(), torch.tensor(values, dtype=torch.int64))) == sum(values)
    assert exact_value(exact_add(exact_zero(), torch.tensor(values) > 0)) == sum(value > 0 for value in values)


@MANY
@given(tensors(finite=False))
def test_what_is_not_finite_is_counted_and_never_lost(tensor):
    found = exact_value(exact_add(exact_zero(), tensor))
    values = tensor.double().tolist()
    if all(map(math.isfinite, values)):
        assert found == fraction_of(tensor)
    else:
        wanted = sum(value for value in values if not math.isfinite(value))
        assert found == wanted or (math.isnan(found) and math.isnan(wanted))


@given(st.lists(st.integers(0, 2**64 - 1), max_size=30))
def test_any_bits_of_float64(patterns):
    """Subnormals, zeros of both signs and the largest numbers."""
    values = [struct.unpack("<d", struct.pack("<Q", pattern))[0] for pattern in patterns]
    tensor = torch.tensor([value for value in values if math.isfinite(value)], dtype=torch.float64)
    assert exact_value(exact_add(exact_zero(), tensor)) == fraction_of(tensor)


@pytest.mark.parametrize("spread", range(30))
def test_rows_of_the_largest_terms_do_not_round_the_smallest_away(spread):
    """What rows may hold is used up: all terms but one at the top, with all bits set, and one at the bottom."""
    tensor = torch.full((4099,), 2 - 2.0**-23)
    tensor[7] = math.ldexp(1 + 2.0**-23, -spread)
    assert exact_value(exact_add(exact_zero(), tensor)) == fraction_of(tensor)


@pytest.mark.parametrize("values", [[0.0, 1.5], [0.0, -1.5], [-0.0, 1.5], [-0.0, 0.0], [2.0, -(2.0**-20)]])
def test_zeros_and_signs_do_not_keep_terms_from_rows(values):
    assert sum_of_floats(torch.tensor(values * 100)) is not None


@pytest.mark.parametrize("spread", range(28))
@pytest.mark.parametrize("scale", [0, -900, 900])
def test_rows_of_float64_lose_no_bit(spread, scale):
    tensor = torch.full((4099,), math.ldexp(2 - 2.0**-52, scale), dtype=torch.float64)
    tensor[7] = math.ldexp(1 + 2.0**-52, scale - spread)
    tensor[8], tensor[9] = 0.0, math.ldexp(-1.0 - 2.0**-27, scale)
    assert exact_value(exact_add(exact_zero(), tensor)) == fraction_of(tensor)
    if spread <= 25 and scale == 0:
        assert sum_of_doubles(tensor) is not None


@pytest.mark.parametrize("value", [5e-324, 2.0**-1022, 1.7e308, float("inf"), float("nan")])
def test_float64_beyond_what_rows_can_hold_goes_through_bins(value):
    assert sum_of_doubles(torch.full((100,), value, dtype=torch.float64)) is None
