"""Exact sums of every dtype: bit patterns, CPUs that flush subnormals, blocks, memory."""

import contextlib
import math
import struct
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.errors import InvalidArgument
from trainfold.core.exact import cpu_sum, terms
from trainfold.core.exact import sum as exact
from trainfold.core.exact.float_bits import FORMATS
from trainfold.core.exact.sum import (
    ExactSum,
    exact_add,
    exact_add_columns,
    exact_merge,
    exact_value,
    exact_values,
    exact_zero,
    rounded,
)
from trainfold.core.exact.terms import sum_of_ints

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
    """The sum of the finite terms as a fraction, and the counts of NaN, inf and -inf. Call it with flushing off."""
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
    """Q02: NaN is not lost, even if torch reports it as finite or cannot check it."""
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
    """Q01, Q02: few or many subnormals and specials, alone or with other terms, for any `torch.set_flush_denormal`."""
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
    """A fraction would be rounded, or would lose its denominator."""
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


# --- more terms than one block ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*WIDE, torch.int64, torch.uint64])
@pytest.mark.parametrize("block", [1, 7, 64, 1500])
@pytest.mark.parametrize("spread", [0, 30, 80])
def test_every_block_is_added(monkeypatch, dtype, block, spread):
    """The largest term is in the first block, a middle block or the last one."""
    monkeypatch.setattr(cpu_sum, "BLOCK", block)
    monkeypatch.setattr(cpu_sum, "BLOCK_OF_BINS", block)
    monkeypatch.setattr(exact, "BLOCK_OF_BINS", block)
    monkeypatch.setattr(cpu_sum, "_FEW", 0)
    monkeypatch.setattr(terms, "_BUFFER", max(1, block // 3))
    monkeypatch.setattr(terms, "_GLANCE", 16)
    generator = torch.Generator().manual_seed(block)
    size = min(3000, max(40, 8 * block))
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
    """Full blocks as they are; the expected value is an integer sum."""
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
    """Each term is the largest possible sum of a row, with its last bit set."""
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
    """No temporary tensor is as long as the terms; the test records the size of each new tensor."""
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
