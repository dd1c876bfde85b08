"""Large memory is copied and filled in pieces, with the bits that torch would write."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from trainfold.backends import large_memory
from trainfold.backends.large_memory import copy_into, fill_bytes
from trainfold.core.tensor_memory import byte_view

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64, torch.bool, torch.complex64]
FORMS = {
    "as it is": lambda each: each,
    "turned": lambda each: each.T.contiguous().T,
    "a row later": lambda each: torch.cat([each[:1], each])[1:],
    "conjugate": lambda each: each.conj(),
    "negative": lambda each: torch._neg_view(each) if each.dtype is not torch.bool else each,
    "a parameter": lambda each: torch.nn.Parameter(each, requires_grad=each.is_floating_point()),
}


@pytest.fixture
def small_pieces(monkeypatch):
    """Every block is large, and has several pieces."""
    monkeypatch.setattr(large_memory, "_FROM_BYTES", 1)
    monkeypatch.setattr(large_memory, "_PIECE_BYTES", 64)


@pytest.mark.usefixtures("small_pieces")
@example(rows=2, dtypes=(torch.bool, torch.bool), forms=("as it is", "as it is"), seed=0)
@given(
    rows=st.integers(0, 9),
    dtypes=st.one_of(st.sampled_from(DTYPES).map(lambda each: (each, each)), st.tuples(*[st.sampled_from(DTYPES)] * 2)),
    forms=st.tuples(*[st.sampled_from(sorted(FORMS))] * 2),
    seed=st.integers(0, 99),
)
def test_a_copy_has_the_bits_of_torchs_copy(rows, dtypes, forms, seed):
    """Law: copy_into(memory, value) leaves in memory what memory.copy_(value) does, and counts as one write to it; the value stays."""
    is_converted = dtypes[0] != dtypes[1]
    if is_converted and (dtypes[1].is_complex or (dtypes[0] is torch.bool and forms[1] == "negative")):
        return  # torch warns of what is lost, or refuses
    draw = torch.Generator().manual_seed(seed)

    def made(dtype, form):
        some = torch.randint(0, 256, (rows, 5 * dtype.itemsize), dtype=torch.uint8, generator=draw)
        return FORMS[form]((some % 2)[:, :5].to(dtype) if is_converted else some.view(dtype))

    memory, value = made(dtypes[0], forms[0]), made(dtypes[1], forms[1])
    expected = memory.detach().clone(memory_format=torch.preserve_format)
    if memory.is_neg() or memory.is_conj():
        expected = FORMS[forms[0]](expected.resolve_neg().resolve_conj())
    before, version = byte_view(value).clone(), memory._version
    with torch.no_grad():
        expected.copy_(value)
    copy_into(memory, value)
    assert torch.equal(byte_view(memory), byte_view(expected))
    assert torch.equal(byte_view(value), before)
    assert memory._version == version + 1 or not rows


@pytest.mark.usefixtures("small_pieces")
def test_a_copy_within_one_storage_and_of_another_shape_is_torchs():
    """Pieces that overlap would be copied in any order, so torch refuses them; a value of another shape is repeated, or refused."""
    whole = torch.arange(100.0)
    with pytest.raises(RuntimeError, match="single memory location"):
        copy_into(whole[1:], whole[:-1])
    copy_into(whole[:50], whole[50:])
    assert torch.equal(whole[:50], torch.arange(50.0, 100.0))
    copy_into(whole, torch.ones(1))
    assert torch.equal(whole, torch.ones(100))
    with pytest.raises(RuntimeError):
        copy_into(whole, torch.ones(3))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("size", [0, 1, 64, 65, 1000])
def test_every_byte_is_filled(size):
    """The last piece is shorter than the others."""
    memory = torch.zeros(size, dtype=torch.uint8)
    fill_bytes(memory.untyped_storage(), 0xA5)
    assert torch.equal(memory, torch.full((size,), 0xA5, dtype=torch.uint8))


def test_a_large_copy_needs_no_torch():
    """The size from which pieces are copied is below that of the layers of large models."""
    value = torch.arange(3 << 20, dtype=torch.int32)
    memory = torch.zeros_like(value)
    assert large_memory._is_one_block(memory, value)
    assert not large_memory._is_one_block(memory[:5], value[:5])
    copy_into(memory, value)
    assert torch.equal(memory, value)
