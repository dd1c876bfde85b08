"""Exact sums equal sums of fractions for every dtype, order and partition, including cancellation and subnormals."""

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.depth import IS_DEEP

from trainfold.core.errors import InvalidArgument
from trainfold.core.exact.limbs import LIMBS, carried
from trainfold.core.exact.sum import (
    ExactSum,
    exact_add,
    exact_add_columns,
    exact_merge,
    exact_value,
    exact_values,
    exact_zero,
    ratio_of,
    rounded,
)
from trainfold.core.exact.terms import bins_of, sum_of_floats

FLOATS = {torch.float64: 64, torch.float32: 32, torch.float16: 16, torch.bfloat16: 32}


MANY = settings(deadline=None, max_examples=100)


@st.composite
def tensors(draw, *, finite=True):
    """Any values of any float dtype, often of very different magnitudes, often of equal ones."""
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
    summed = ExactSum(sum(rank.limbs for rank in ranks), sum(rank.special for rank in ranks))  # like an all-reduce
    assert same(exact_merge(exact_zero(), summed), whole)


@MANY
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=3000))
def test_rows_and_bins_agree(values):
    tensor = torch.tensor(values, dtype=torch.float32)
    fast = sum_of_floats(tensor, digits=24)
    slow = sum(limb << (32 * i) for i, limb in enumerate(bins_of(tensor)[0][0].tolist()))
    assert fast is None or fast == slow


@pytest.mark.parametrize("size", [1, 31, 32, 33, 1024, 5000])
@pytest.mark.parametrize("spread", [0, 10, 24, 25, 40])
def test_terms_on_both_sides_of_what_rows_can_hold(size, spread):
    """The widest spread that rows can hold, and the next one; all mantissa bits are set, so the last bit counts."""
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
    """A row's capacity is used up: one term is of the smallest size, all others are of the largest with all bits set."""
    tensor = torch.full((4099,), 2 - 2.0**-23)
    tensor[7] = math.ldexp(1 + 2.0**-23, -spread)
    assert exact_value(exact_add(exact_zero(), tensor)) == fraction_of(tensor)


@pytest.mark.parametrize("values", [[0.0, 1.5], [0.0, -1.5], [-0.0, 1.5], [-0.0, 0.0], [2.0, -(2.0**-20)]])
def test_zeros_and_signs_do_not_keep_terms_from_rows(values):
    assert sum_of_floats(torch.tensor(values * 100), digits=24) is not None


@pytest.mark.parametrize("spread", range(28) if IS_DEEP else (0, 1, 2, 13, 24, 25, 26, 27))
@pytest.mark.parametrize("scale", [0, -900, 900])
def test_rows_of_float64_lose_no_bit(spread, scale):
    tensor = torch.full((4099,), math.ldexp(2 - 2.0**-52, scale), dtype=torch.float64)
    tensor[7] = math.ldexp(1 + 2.0**-52, scale - spread)
    tensor[8], tensor[9] = 0.0, math.ldexp(-1.0 - 2.0**-27, scale)
    assert exact_value(exact_add(exact_zero(), tensor)) == fraction_of(tensor)
    if spread <= 25 and scale == 0:
        assert sum_of_floats(tensor, digits=53) is not None


@MANY
@given(
    st.integers(0, 2**32),
    st.integers(0, 260),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([3, 1500, 3000]),
)
def test_windows_lose_no_bit_whatever_the_spread(seed, spread, dtype, size):
    """Cancellation over the whole spread: the large terms cancel, the small ones remain."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randint(-spread, 1, (size,), generator=generator) + min(120, spread)
    values = torch.ldexp(torch.randn(size, generator=generator, dtype=torch.float64), scale).to(dtype)
    values = torch.cat([values, -values[: size // 2]])
    finite = values[values.isfinite()]
    assert exact_value(exact_add(exact_zero(), values)) == fraction_of(values) if len(finite) == len(values) else True
    assert exact_value(exact_add(exact_zero(), finite)) == fraction_of(finite)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_windows_take_a_spread_of_24_to_100_bits(dtype):
    """A spread that rows cannot hold uses windows before the slow bins."""
    for spread in (25, 60, 100):
        values = torch.tensor([1.0 + 2**-23, 2.0**-spread] * 600, dtype=dtype)
        fast = sum_of_floats(values, digits=24 if dtype == torch.float32 else 53)
        assert Fraction(fast, 1 << 1074) == fraction_of(values)


def test_one_term_that_is_not_finite_does_not_change_how_the_others_are_added(monkeypatch):
    values = torch.rand(5000)
    values[17] = math.nan
    whole = fraction_of(values[values.isfinite()])
    sizes = []
    original = bins_of
    monkeypatch.setattr(
        "trainfold.core.exact.cpu_sum.bins_of", lambda terms: sizes.append(len(terms)) or original(terms)
    )
    total = exact_add(exact_zero(), values)
    assert sizes == [1]  # the others took the fast path
    assert total.special.tolist() == [1, 0, 0]
    assert exact_value(ExactSum(total.limbs, torch.zeros(3, dtype=torch.int64))) == whole


@MANY
@given(tensors(finite=False), st.integers(1, 3))
def test_many_rows_of_columns_are_added_like_few(tensor, columns):
    rows = tensor[: len(tensor) // columns * columns].view(-1, columns).repeat(300, 1)
    many = exact_add_columns(exact_zero(4), rows)
    few = exact_zero(4)
    for part in rows.split(200):
        few = exact_add_columns(few, part)
    assert same(many, few)


@pytest.mark.parametrize("value", [5e-324, 2.0**-1022, 1.7e308, float("inf"), float("nan")])
def test_float64_beyond_what_rows_can_hold_goes_through_bins(value):
    assert sum_of_floats(torch.full((100,), value, dtype=torch.float64), digits=53) is None


@MANY
@given(st.lists(st.tuples(tensors(finite=False), st.integers(1, 5)), max_size=4))
def test_columns_are_sums_of_their_own_also_where_lengths_differ(parts):
    """Q03: positions with ragged lengths; each sum contains only its own terms."""
    total, alone = exact_zero(0), {}
    for tensor, columns in parts:
        rows = tensor[: len(tensor) // columns * columns].view(-1, columns)
        total = exact_add_columns(total, rows)
        for position in range(columns):
            alone[position] = exact_add(alone.get(position, exact_zero()), rows[:, position])
    assert len(total.limbs) == len(alone)
    for position, sum_alone in alone.items():
        assert same(ExactSum(total.limbs[position], total.special[position]), sum_alone)


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3), max_size=5))
def test_integers_have_columns_too(rows):
    total = exact_add_columns(exact_zero(2), torch.tensor(rows, dtype=torch.int64).view(-1, 3))
    assert exact_values(total) == [sum(column) for column in zip(*rows, strict=True)] or not rows


@given(st.lists(st.integers(0, 2**64 - 1), max_size=12))
def test_unsigned_integers_have_no_sign(values):
    tensor = torch.tensor(values, dtype=torch.uint64)
    assert exact_value(exact_add(exact_zero(), tensor)) == sum(values)
    assert exact_values(exact_add_columns(exact_zero(0), tensor.view(-1, 1))) == [sum(values)] or not values


@MANY
@given(st.lists(tensors(), max_size=6))
def test_what_a_device_does_is_the_same_sum_and_leaves_room_for_more(parts):
    """Bins are added and carried once per batch without reading a value; the limbs stay small for any input."""
    limbs = torch.zeros(1, LIMBS, dtype=torch.int64)
    for part in parts:
        limbs = carried(limbs + bins_of(part)[0])
        assert int(limbs[:, :-1].abs().max()) < 2**32 + 2**31
    total = exact_merge(exact_zero(1), ExactSum(limbs, torch.zeros(1, 3, dtype=torch.int64)))
    assert exact_values(total) == [sum(map(fraction_of, parts), Fraction(0))]


@given(st.lists(st.integers(-(2**62), 2**62), min_size=LIMBS, max_size=LIMBS))
def test_a_carry_keeps_the_sum(limbs):
    before = sum(limb << (32 * i) for i, limb in enumerate(limbs))
    after = carried(torch.tensor(limbs)).tolist()
    assert sum(limb << (32 * i) for i, limb in enumerate(after)) == before
    assert all(abs(limb) < 2**32 + 2**31 for limb in after[:-1])


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=5), st.integers(-(2**80), 2**80))
def test_numbers_are_terms_like_tensors(values, integer):
    total = exact_add(exact_zero(), integer)
    for value in values:
        total = exact_add(total, value)
    assert exact_value(total) == sum(map(Fraction, values), Fraction(integer))


@given(st.fractions(), st.fractions())
def test_a_ratio_is_rounded_once(numerator, denominator):
    found = ratio_of(numerator, denominator)
    if denominator == 0:
        assert found is None
    else:
        nearest = rounded(found)
        error = abs(Fraction(nearest) - numerator / denominator)
        for other in (math.nextafter(nearest, math.inf), math.nextafter(nearest, -math.inf)):
            assert error <= abs(Fraction(other) - numerator / denominator)


@pytest.mark.parametrize(
    ("numerator", "denominator", "wanted"),
    [
        (math.inf, Fraction(2), math.inf),
        (math.inf, Fraction(-2), -math.inf),
        (math.nan, Fraction(2), math.nan),
        (math.nan, Fraction(0), math.nan),
        (Fraction(1), math.inf, math.nan),
        (math.inf, math.inf, math.nan),
        (Fraction(0), Fraction(0), None),
    ],
)
def test_a_ratio_of_what_is_not_finite_never_looks_good(numerator, denominator, wanted):
    """An infinite weight does not give a loss of 0.0."""
    found = ratio_of(numerator, denominator)
    assert found == wanted or (math.isnan(found) and math.isnan(wanted))


def test_terms_that_are_not_real_numbers_and_have_no_positions_are_refused():
    with pytest.raises(InvalidArgument, match="complex"):
        exact_add(exact_zero(), torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(InvalidArgument, match="scalar"):
        exact_add_columns(exact_zero(0), torch.tensor(1.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@MANY
@given(st.lists(tensors(finite=False), max_size=4))
def test_a_cuda_device_gives_the_bits_of_the_cpu(parts):
    here, there = exact_zero(), exact_zero()
    for part in parts:
        here, there = exact_add(here, part), exact_add(there, part.cuda())
    assert same(exact_merge(here, exact_zero()), exact_merge(there, exact_zero()))


@pytest.mark.parametrize("seed", range(20 if IS_DEEP else 4))
@pytest.mark.parametrize("sign", [1, -1])
def test_rows_of_windows_are_full_and_do_not_round(seed, sign):
    """All terms are near the largest size, of one sign, with every bit in use: the length adds ten bits to a row's sum."""
    generator = torch.Generator().manual_seed(seed)
    values = sign * (1 + torch.rand(4096, generator=generator, dtype=torch.float64))
    assert Fraction(sum_of_floats(values, digits=53), 1 << 1074) == fraction_of(values)
    widened = torch.cat([values, torch.ldexp(values[:2048], torch.tensor(-53)), torch.tensor([2.0**-100]).double()])
    assert Fraction(sum_of_floats(widened, digits=53), 1 << 1074) == fraction_of(widened)


# --- every dtype, whether or not the CPU flushes subnormals ----------------------------------------------------------
