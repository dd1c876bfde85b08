"""How far apart two tensors are, beside a model that looks at one element after the other."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.exact import distance as module
from trainfold.core.exact.distance import Distance, distance

BITS = {torch.float32: ("<I", "<f", 32), torch.float16: ("<H", "<e", 16), torch.float64: ("<Q", "<d", 64)}


def steps(bits, width):
    """The place of a float among all floats in order."""
    return bits if bits < 2 ** (width - 1) else 2 ** (width - 1) - bits


@given(dtype=st.sampled_from(list(BITS)), data=st.data())
def test_the_distance_is_that_of_the_elements_one_by_one(dtype, data):
    """Also of infinities, NaN payloads, signed zeros and numbers of other signs."""
    word, real, width = BITS[dtype]
    special = [
        0,
        1 << (width - 1),
        (1 << width) - 1,
        int.from_bytes(struct.pack(real, 1.0), "little"),
        int.from_bytes(struct.pack(real, math.inf), "little"),
    ]
    bits = st.one_of(st.sampled_from(special), st.integers(0, 2**width - 1))
    pairs = data.draw(st.lists(st.one_of(st.tuples(bits, bits), bits.map(lambda each: (each, each))), max_size=12))
    one, other = (
        torch.frombuffer(
            bytearray(b"".join(struct.pack(word, pair[side]) for pair in pairs) or b"\0" * 8), dtype=dtype
        )[: len(pairs)]
        for side in (0, 1)
    )
    before, module._CHUNK = module._CHUNK, 5
    try:
        found = distance(one, other)
        assert found == distance(other, one)
    finally:
        module._CHUNK = before
    differ = [(a, b) for a, b in pairs if a != b]
    values = [tuple(struct.unpack(real, struct.pack(word, each))[0] for each in pair) for pair in differ]
    numbers = [not any(map(math.isnan, pair)) for pair in values]
    assert (found.differing, found.total, found.nans) == (len(differ), len(pairs), numbers.count(False))
    ulps = [
        abs(steps(a, width) - steps(b, width)) for (a, b), is_number in zip(differ, numbers, strict=True) if is_number
    ]
    assert found.max_ulps == (max(ulps) if ulps else None)
    apart = [abs(a - b) for (a, b), is_number in zip(values, numbers, strict=True) if is_number]
    assert found.max_abs == (max(apart) if apart else None)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (torch.tensor([True, False]), torch.tensor([True, True]), "1 of 2 differ, 1"),
        (torch.tensor([3, 4]), torch.tensor([3, 9]), "1 of 2 differ, 5"),
        (torch.tensor([2**60]), torch.tensor([2**60 + 1]), "1 of 1 differ, 1"),
        (torch.tensor([-(2**63)]), torch.tensor([2**63 - 1]), "1 of 1 differ, 1.84e+19"),
        (
            torch.tensor([0], dtype=torch.uint64),
            torch.tensor([2**64 - 1], dtype=torch.uint64),
            "1 of 1 differ, 1.84e+19",
        ),
        (
            torch.tensor([1.0]).double(),
            torch.tensor([1.0 + 2**-52], dtype=torch.float64),
            "1 of 1 differ, by up to 1 ulps, 2.22e-16",
        ),
        (torch.tensor([1j]), torch.tensor([2j]), "1 of 1 differ"),
        (torch.zeros(2, 0), torch.zeros(2, 0), "equal"),
        (
            torch.tensor([1.0]).bfloat16(),
            torch.tensor([1.0078125]).bfloat16(),
            "1 of 1 differ, by up to 1 ulps, 0.00781",
        ),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "1 of 1 differ, by up to 0 ulps, 0"),
        (
            torch.tensor([1.0]).to(torch.float8_e4m3fn),
            torch.tensor([2.0]).to(torch.float8_e4m3fn),
            "1 of 1 differ, by up to 8 ulps, 1",
        ),
        (torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 1.0]), "1 of 2 differ, 1 of them not numbers"),
    ],
)
def test_what_is_said_of_each_kind(one, other, said):
    assert str(distance(one, other)) == said


def test_tensors_in_other_memory_orders_are_compared_element_by_element():
    one = torch.arange(6.0).reshape(2, 3)
    assert distance(one, one.t().contiguous().t()) == Distance(0, 6)
