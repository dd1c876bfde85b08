"""A number that a narrower dtype does not have is an error that names its tensor, wherever numbers are rounded; all others are rounded as torch rounds."""

from bisect import bisect
from functools import cache

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from trainfold.core.errors import InvalidState
from trainfold.core.transform.apply import transform_tensors
from trainfold.core.transform.converters.converter import view
from trainfold.core.transform.converters.lora import lora
from trainfold.core.transform.fusing import merge
from trainfold.core.transform.rounding import converted_to, rounded_to
from trainfold.core.transform.transform import compose
from trainfold.core.transform.values import cast, dequantise, transpose
from trainfold.core.weights.source import Wanted
from trainfold.core.weights.wrapped import Cast

WIDE = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NARROW = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
SPECIAL = [0.0, -0.0, 1.0, -3.5, 248.0, 448.0, -464.0, 470.0, 57344.0, 61440.0, 65504.0, -65519.0, 65520.0, 7e4, -3.39e38, 3.4e38, 1e300, float("inf"), float("-inf"), float("nan")]  # fmt: skip


@cache
def known(dtype):
    """The numbers of a kind of float8, with one more at each end as if it had them -> their bits."""
    codes = {value: code for code, value in enumerate(torch.arange(256, dtype=torch.uint8).view(dtype).tolist())}
    last, before = sorted(value for value in codes if abs(value) < float("inf"))[:-3:-1]
    past = last * 2 if dtype == torch.float8_e8m0fnu else 2 * last - before
    return {value: code for value, code in codes.items() if abs(value) <= last} | {past: codes[last] + 1, -past: codes[last] + 1}, past  # fmt: skip


def rounded(number, dtype):
    """A model: the number of a dtype that is next to another one; of two, that with an even last bit; None for one that it does not have."""
    is_infinite = abs(number) == float("inf")
    if number != number or (is_infinite and dtype not in NARROW):
        return number
    if dtype not in NARROW:
        found = torch.tensor(number, dtype=torch.float64).to(dtype).item()
        return None if abs(found) == float("inf") else found
    codes, past = known(dtype)
    if is_infinite:
        return number if dtype == torch.float8_e5m2 else None
    if abs(number) >= past or (dtype == torch.float8_e8m0fnu and number < 0):
        return None
    tie = (lambda each: -each) if dtype == torch.float8_e8m0fnu else (lambda each: codes[each] % 2)
    values = sorted(codes)
    at = bisect(values, number)
    found = min(values[max(at - 1, 0) : at + 1], key=lambda each: (abs(each - number), tie(each)))
    return None if abs(found) == past else found


def checked(given, dtype):
    """Round, and compare with the model of each number; where it has none, the others alone."""
    expected = [rounded(number, dtype) for number in given.double().flatten().tolist()]
    if beyond := expected.count(None):
        with pytest.raises(InvalidState, match=f"w: .* found {beyond} of {given.numel()} beyond"):
            rounded_to(given, dtype, lambda: "w")
        rest = [at for at, each in enumerate(expected) if each is not None]
        given, expected = given.flatten()[rest], [expected[at] for at in rest]
    found = rounded_to(given, dtype, lambda: "w")
    assert found.dtype == dtype
    assert found.is_contiguous()
    # the bits of a NaN depend on where it lies: torch has a faster way for elements in a row
    torch.testing.assert_close(found.double().flatten(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=0, equal_nan=True)  # fmt: skip


@given(
    st.lists(st.sampled_from(SPECIAL), max_size=12),
    st.sampled_from(WIDE),
    st.sampled_from(WIDE + NARROW),
    st.booleans(),
)
def test_numbers_are_rounded_to_the_next_one_or_refused_if_the_dtype_does_not_have_them(numbers, source, dtype, is_turned):  # fmt: skip
    """P20: whatever the order of the elements, and beside numbers that were infinite before."""
    given = torch.tensor(numbers, dtype=torch.float64).to(source)
    checked(given.reshape(-1, 2).T if is_turned and len(numbers) % 2 == 0 else given, dtype)


@pytest.mark.parametrize("dtype", NARROW)
def test_each_number_of_float8_its_neighbours_and_what_is_halfway_are_rounded_as_the_model_rounds(dtype):
    """P20: float8_e4m3fn has no infinity, and torch made 448 of 70,000 and of infinity. All pairs of float8, too."""
    for kind in NARROW:
        checked(torch.arange(256, dtype=torch.uint8).view(kind), dtype)
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite() & (values.abs() > 1e-37)].sort().values  # fewer bits are left below
    halves = (values[1:] + values[:-1]) / 2
    edges = torch.cat([values, halves, values[-1:] + (values[-1] - values[-2]) / 2])
    for toward in (None, float("inf"), float("-inf")):
        checked(edges if toward is None else edges.nextafter(torch.tensor(toward)), dtype)


BIG = torch.tensor([[1.0, 70000.0], [3.0, -80000.0]])
MADE = {
    "a cast": (cast("float16"), {"w": BIG}, "w: expected numbers that float16 has, up to 65504, found 2 of 4 beyond, such as -80000, which would be -inf"),
    "a cast of columns": (compose(transpose("w"), cast("float16")), {"w": BIG}, "w: .* found 2 of 4 beyond"),
    "a cast of several": (compose(merge(["w", "v"], "wv"), cast("float16")), {"w": torch.ones(2, 2), "v": BIG}, "w, v: .* found 2 of 8 beyond"),
    "a cast to bfloat16": (cast("bfloat16"), {"w": torch.full((2,), torch.finfo(torch.float32).max)}, "w: expected numbers that bfloat16 has"),
    "scales": (dequantise("w", "s", block=(None, None), dtype="float16"), {"w": torch.full((2, 2), 100, dtype=torch.int8), "s": torch.full((1, 1), 1000.0)}, "w: .* found 4 of 4 beyond, such as 100000"),
    "an adapter": (
        view(lora(alpha=1, a="{layer*}.a", b="{layer*}.b", wrapped="{layer*}.{tensor}"), "export"),
        {"m.weight": torch.full((2, 2), 65504.0).half(), "m.a": torch.ones(1, 2) * 100, "m.b": torch.ones(2, 1)}, "m.weight: .* found 4 of 4 beyond"),
    "an adapter with lengths": (
        view(lora(alpha=1, decomposed=True), "export"),
        {"m.base_layer.weight": torch.ones(2, 2).half(), "m.lora_A.default.weight": torch.zeros(1, 2), "m.lora_B.default.weight": torch.zeros(2, 1),
         "m.lora_magnitude_vector.default.weight": torch.full((2,), 1e6)}, "m.base_layer.weight: .* found 4 of 4 beyond, such as 707107"),
}  # fmt: skip


@pytest.mark.parametrize("case", MADE)
def test_no_transform_makes_a_finite_number_infinite(case):
    """P20: an export to float16 had infinite weights, and nothing mentioned it."""
    transform, tensors, said = MADE[case]
    with pytest.raises(InvalidState, match=said) as found:
        dict(transform_tensors(transform, tensors))
    assert "a larger range" in found.value.fix


def test_weights_that_the_dtype_of_a_model_does_not_have_are_not_loaded():
    """P20: `Cast` rounds, and no more."""

    class Source:
        def supply(self, wanted):
            yield "w", BIG

    with pytest.raises(InvalidState, match="w: expected numbers that float16 has"):
        list(Cast(Source()).supply({"w": Wanted("float16", (2, 2), ((0, 2), (0, 2)))}))
    assert dict(Cast(Source()).supply({"w": Wanted("float64", (2, 2), ((0, 2), (0, 2)))}))["w"].dtype == torch.float64


def test_what_was_infinite_stays_so():
    mask = torch.full((3, 3), float("-inf")).triu(1)
    assert torch.equal(dict(transform_tensors(cast("float16"), {"mask": mask}))["mask"], mask.half())


KINDS = [torch.int64, torch.int32, torch.uint8, torch.float32, torch.float16, torch.float8_e4m3fn, torch.bool]


@given(
    st.lists(st.sampled_from([0, 1, -1, 200, 300, 65504, 70000, 2**31, 2**40]), max_size=6),
    st.sampled_from(KINDS),
    st.sampled_from(KINDS),
)
def test_a_number_is_what_it_was_in_another_kind_of_dtype_or_an_error(numbers, source, dtype):
    """P20: a count of 2**31 was negative after a resume with int32."""
    given = torch.tensor(numbers, dtype=torch.float64).to(source)
    exact = given.to(dtype)
    near = (
        torch.allclose(exact.double(), given.double(), rtol=2**-4 if dtype == torch.float8_e4m3fn else 2**-10, atol=0.9)
        or dtype == torch.bool
    )
    if near or (source.is_floating_point and not given.double().isfinite().all() and dtype in WIDE):
        assert torch.equal(converted_to(given, dtype, lambda: "w", fix="f").double(), exact.double())
    else:
        with pytest.raises(InvalidState, match=r"w: .* beyond"):
            converted_to(given, dtype, lambda: "w", fix="f")
