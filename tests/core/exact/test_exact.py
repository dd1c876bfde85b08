"""Exact sums: equal to sums of fractions for every dtype, order and partition, cancellation and subnormals included."""

import contextlib
import math
import struct
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfold.core.errors import InvalidArgument
from trainfold.core.exact import cpu_sum, terms
from trainfold.core.exact import sum as exact
from trainfold.core.exact.float_bits import FORMATS
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
from trainfold.core.exact.terms import bins_of, sum_of_floats, sum_of_ints

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
    fast = sum_of_floats(tensor, digits=24)
    slow = sum(limb << (32 * i) for i, limb in enumerate(bins_of(tensor)[0][0].tolist()))
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
    assert sum_of_floats(torch.tensor(values * 100), digits=24) is not None


@pytest.mark.parametrize("spread", range(28))
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
    """Cancellation across all of it: the large terms leave, the small ones stay."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randint(-spread, 1, (size,), generator=generator) + min(120, spread)
    values = torch.ldexp(torch.randn(size, generator=generator, dtype=torch.float64), scale).to(dtype)
    values = torch.cat([values, -values[: size // 2]])
    finite = values[values.isfinite()]
    assert exact_value(exact_add(exact_zero(), values)) == fraction_of(values) if len(finite) == len(values) else True
    assert exact_value(exact_add(exact_zero(), finite)) == fraction_of(finite)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_windows_take_a_spread_of_24_to_100_bits(dtype):
    """What rows cannot hold does not fall into the slow bins at once."""
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
    assert sizes == [1]  # the others took the fast way
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
    """Q03: positions of ragged length; each sum is that of its own terms."""
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
    """Bins are added and carried once a batch, without looking; limbs stay small whatever comes."""
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
    """An infinite weight does not make a loss of 0.0."""
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


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("sign", [1, -1])
def test_rows_of_windows_are_full_and_do_not_round(seed, sign):
    """All terms near the top and of one sign, with every bit in use: ten bits of a row's sum are those of its length."""
    generator = torch.Generator().manual_seed(seed)
    values = sign * (1 + torch.rand(4096, generator=generator, dtype=torch.float64))
    assert Fraction(sum_of_floats(values, digits=53), 1 << 1074) == fraction_of(values)
    widened = torch.cat([values, torch.ldexp(values[:2048], torch.tensor(-53)), torch.tensor([2.0**-100]).double()])
    assert Fraction(sum_of_floats(widened, digits=53), 1 << 1074) == fraction_of(widened)


# --- every dtype, whatever the CPU does with subnormals --------------------------------------------------------------

NARROW = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
WIDE = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
SIZES = [1, 8, 9, 40, 300, 3000]


def expected(tensor):
    """The sum of the finite terms by fractions, and how many are NaN, inf, -inf; to be called where nothing is flushed."""
    values = tensor.float().tolist() if tensor.dtype in NARROW else tensor.tolist()
    special = [
        sum(map(math.isnan, values)),
        sum(value == math.inf for value in values),
        sum(value == -math.inf for value in values),
    ]
    return sum((Fraction(value) for value in values if math.isfinite(value)), Fraction(0)), special


def told(total):
    return exact_value(ExactSum(total.limbs, torch.zeros(3, dtype=torch.int64))), total.special.tolist()


def by_columns(tensor):
    return exact_add_columns(exact_zero(0), tensor.view(-1, 1))


def by_bins(tensor):
    return exact._add_bins(exact_zero(), tensor.view(-1, 1), 1)


def in_batches(tensor, size):
    total = exact_zero()
    for part in tensor.split(size):
        total = exact_add(total, part)
    return total


@contextlib.contextmanager
def flushing():
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("size", [8, 9, 256, 700])
def test_every_pattern_of_8_bits_is_a_term(dtype, size):
    """Q02: NaN is not lost, also where torch says that it is finite, or cannot say it."""
    for first in range(0, 256, 8 if size < 256 else 256):
        tensor = ((torch.arange(size) + first) % 256).to(torch.uint8).view(dtype)
        wanted = expected(tensor)
        assert told(exact_add(exact_zero(), tensor)) == wanted
        column = by_columns(tensor)
        assert told(ExactSum(column.limbs[0], column.special[0])) == wanted


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["bits", "subnormal", "one subnormal", "smallest normal"])
@pytest.mark.parametrize("flushed", [False, True])
def test_terms_that_a_cpu_may_flush_are_not_lost(dtype, size, kind, flushed):
    """Q01, Q02: subnormals and specials, few or many, alone or beside others, whatever `torch.set_flush_denormal` says."""
    generator = torch.Generator().manual_seed(size)
    ints = WIDE[dtype]
    fraction_bits = FORMATS[dtype].fraction_bits
    top = torch.iinfo(ints)
    bits = torch.randint(top.min, top.max, (size,), dtype=ints, generator=generator)
    if kind != "bits":
        bits &= ~(top.max >> fraction_bits << fraction_bits)
    if kind == "smallest normal":
        bits |= torch.randint(1, 3, (size,), generator=generator).to(ints) << fraction_bits
    tensor = bits.view(dtype)
    if kind == "one subnormal":
        tensor = torch.cat([tensor[:1], torch.rand(size - 1, generator=generator).to(dtype)])
    wanted = expected(tensor)
    with flushing() if flushed else contextlib.nullcontext():
        column = by_columns(tensor)
        sums = [
            exact_add(exact_zero(), tensor),
            by_bins(tensor),
            ExactSum(column.limbs[0], column.special[0]),
            in_batches(tensor, 5),
            in_batches(tensor, 50),
        ]
    assert [told(found) for found in sums] == [wanted] * len(sums)


def test_numbers_and_results_are_not_flushed_either():
    smallest, single = 2.0**-1074, np.float32(2.0**-149)
    with flushing():
        total = exact_add(exact_zero(), smallest)
        of_numpy = exact_add(exact_zero(), single)
        result = struct.pack("<d", rounded(exact_value(total)))
        below = struct.pack("<d", rounded(-exact_value(total) / 2 * 3))
    assert exact_value(total) == Fraction(smallest)
    assert exact_value(of_numpy) == Fraction(1, 2**149)
    assert result == struct.pack("<d", smallest)
    assert below == struct.pack("<d", -2 * smallest)


@given(st.fractions(-1, 1, max_denominator=2**40), st.integers(1000, 1090))
def test_small_results_are_rounded_once_to_even(fraction, power):
    value = fraction / (1 << power)
    assert struct.pack("<d", rounded(value)) == struct.pack("<d", float(value))


def test_a_number_of_numpy_is_a_term():
    for number, wanted in [
        (np.float32(0.1), Fraction(float(np.float32(0.1)))),
        (np.float64(0.1), Fraction(0.1)),
        (np.float16(0.5), Fraction(1, 2)),
        (np.int64(-7), -7),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(1), 1),
        (True, 1),
    ]:
        assert exact_value(exact_add(exact_zero(), number)) == wanted


@pytest.mark.parametrize(
    "number", [Fraction(1, 3), Fraction(1, 2), Decimal("0.1"), "1", None, [1.0], 1j, np.complex64(1), np.longdouble(1)]
)
def test_what_is_no_float_and_no_integer_is_refused(number):
    """A fraction would be rounded, or its denominator lost."""
    with pytest.raises(InvalidArgument, match="terms"):
        exact_add(exact_zero(), number)


def test_a_total_of_another_kind_is_refused():
    one, two = exact_zero(), exact_zero(2)
    for call in (
        lambda: exact_add(two, 1.0),
        lambda: exact_add(two, torch.rand(3)),
        lambda: exact_add(two, torch.rand(300)),
        lambda: exact_add_columns(one, torch.rand(3, 2)),
        lambda: exact_merge(one, two),
        lambda: exact_merge(two, one),
        lambda: exact_value(two),
        lambda: exact_values(one),
    ):
        with pytest.raises(InvalidArgument, match="exact sum"):
            call()


def test_dtypes_that_are_no_numbers_are_refused():
    for tensor in (torch.zeros(9, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), torch.zeros(9, dtype=torch.bits8)):
        with pytest.raises(InvalidArgument, match="terms"):
            exact_add(exact_zero(), tensor)


@pytest.mark.parametrize("size", SIZES)
def test_a_view_that_negates_is_negative(size):
    tensor = torch._neg_view(torch.arange(1.0, size + 1))
    assert exact_value(exact_add(exact_zero(), tensor)) == -size * (size + 1) // 2
    assert exact_values(exact_add_columns(exact_zero(0), tensor.view(-1, 1))) == [-size * (size + 1) // 2]


@pytest.mark.parametrize("dtype", [*WIDE, torch.int64, torch.bool, torch.float8_e8m0fnu])
@pytest.mark.parametrize("size", SIZES)
def test_the_default_device_is_not_where_sums_are(dtype, size):
    tensor = (torch.arange(size) % 2 == 0).to(dtype)
    wanted = expected(tensor)
    with torch.device("meta"):
        total = exact_add(exact_zero(), tensor)
        total = exact_merge(exact_add(total, math.nan), exact_zero())
        columns = exact_add_columns(exact_zero(0), tensor.view(-1, 1))
    assert total.special.tolist() == [1, 0, 0]
    assert told(total)[0] == wanted[0]
    assert exact_values(columns) == [wanted[0]]


# --- more terms than are added at a time -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*WIDE, torch.int64, torch.uint64])
@pytest.mark.parametrize("block", [1, 7, 64, 1500])
@pytest.mark.parametrize("spread", [0, 30, 80])
def test_every_block_is_added(monkeypatch, dtype, block, spread):
    """The largest term is in the first block, in a middle one, or in the last."""
    monkeypatch.setattr(cpu_sum, "BLOCK", block)
    monkeypatch.setattr(cpu_sum, "BLOCK_OF_BINS", block)
    monkeypatch.setattr(exact, "BLOCK_OF_BINS", block)
    monkeypatch.setattr(cpu_sum, "_FEW", 0)
    monkeypatch.setattr(terms, "_BUFFER", max(1, block // 3))
    monkeypatch.setattr(terms, "_GLANCE", 16)
    generator = torch.Generator().manual_seed(block)
    size = min(3000, 40 * block)
    for place in (0, size // 2, size - 1):
        values = 0.5 + torch.rand(size, generator=generator, dtype=torch.float64)
        values = torch.ldexp(values, torch.randint(-spread, 1, (size,), generator=generator))
        values[place] = 1000.0
        tensor = values.to(dtype)
        wanted = sum(map(Fraction, tensor.tolist()), Fraction(0))
        assert exact_value(exact_add(exact_zero(), tensor)) == wanted
        assert exact_value(by_bins(tensor)) == wanted
        assert exact_values(by_columns(tensor)) == [wanted]


@pytest.mark.parametrize("size", [terms.BLOCK + 1, 2 * terms.BLOCK + 77])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_more_terms_than_a_block(size, dtype):
    """Full blocks, as they are; sums of integers know the answer."""
    integers = torch.arange(size) % 255 - 100
    last = 3e30 if dtype != torch.float32 else 2.0**20
    tensor = torch.cat([integers.to(dtype), torch.tensor([last], dtype=dtype)])
    wanted = int(integers.sum()) + Fraction(tensor[-1].item())
    assert exact_value(exact_add(exact_zero(), tensor)) == wanted
    assert exact_value(exact_add(exact_zero(), tensor / 1024)) == wanted / 1024


def test_blocks_of_bins_and_of_integers_are_all_added():
    size = 2**17 + 3
    wide = torch.ldexp(torch.ones(size, dtype=torch.float64), torch.tensor([900, -900]).repeat(size)[:size])
    assert exact_value(exact_add(exact_zero(), wide)) == -(-size // 2) * 2**900 + Fraction(size // 2, 2**900)
    assert exact_value(exact_add(exact_zero(), torch.full((2**20 + 9,), 2**62))) == (2**20 + 9) * 2**62


def test_integers_keep_all_their_bits_whatever_their_sign():
    largest = torch.full((12,), 2**64 - 1, dtype=torch.uint64)
    assert sum_of_ints(largest) == 12 * (2**64 - 1)
    assert sum_of_ints(torch.full((12,), -(2**63))) == -12 * 2**63
    many = largest.repeat(10)
    assert exact_value(exact_add(exact_zero(), many)) == 120 * (2**64 - 1)
    assert exact_values(exact_add_columns(exact_zero(0), many.view(-1, 2))) == [60 * (2**64 - 1)] * 2


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("count", [1, 511, 512, 513, 1024, 1025, 2**18])
def test_sums_of_rows_add_up_without_rounding(sign, count):
    """Each as large as a row's sum can be, with its last bit set."""
    values = torch.full((count,), sign * (2.0**53 - 1), dtype=torch.float64)
    assert terms._sum_of_multiples(values * 2.0**-90, -90) == sign * count * (2**53 - 1)
    assert terms._sum_of_multiples(torch.full_like(values, sign * 2.0**53), 0) == sign * count * 2**53


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [5, 100, 4000])
def test_the_smallest_and_the_largest_magnitude_are_found(dtype, size):
    for place in (0, size - 1):
        for sign in (1, -1):
            values = sign * torch.linspace(1, 2, size, dtype=dtype)
            values[place] = sign * 5.0
            values[size // 2] = -0.25 * sign
            values[size // 3] = 0.0
            ends = torch.tensor([0.25, 5.0], dtype=dtype).view(FORMATS[dtype].bits).tolist()
            assert list(terms._magnitudes(values)) == ends


def test_memory_beside_the_terms_is_bounded():
    """Nothing as long as the terms is made: what is, would be seen by its size."""
    longest = []

    class Watched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and not function.is_view and found.data_ptr() not in known:
                longest.append(found.numel())
            return found

    for dtype, scale in ((torch.float32, 1), (torch.bfloat16, 1), (torch.float64, 2.0**900), (torch.float64, 1)):
        values = torch.rand(5 * terms.BLOCK // 2, dtype=torch.float64).mul(scale).to(dtype)
        values[::2] /= scale
        known = {values.data_ptr()}
        with Watched():
            exact_add(exact_zero(), values)
        assert max(longest) <= terms.BLOCK


@pytest.mark.parametrize("dtype", WIDE)
def test_terms_that_are_not_finite_are_counted_in_every_block(monkeypatch, dtype):
    monkeypatch.setattr(cpu_sum, "BLOCK", 50)
    monkeypatch.setattr(cpu_sum, "BLOCK_OF_BINS", 7)
    monkeypatch.setattr(exact, "BLOCK_OF_BINS", 7)
    tensor = torch.tensor([math.nan, 1.0, math.inf, -math.inf, math.inf, 0.0] * 40, dtype=dtype)
    column = by_columns(tensor)
    wanted = (Fraction(40), [40, 80, 40])
    for found in (
        exact_add(exact_zero(), tensor),
        by_bins(tensor),
        ExactSum(column.limbs[0], column.special[0]),
    ):
        assert told(found) == wanted
