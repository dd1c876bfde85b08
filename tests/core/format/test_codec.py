"""The codec of tensors: the bytes of every dtype, shape and layout, and the digests used for fingerprints."""

import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given, settings

from trainfold.core.format.codec import as_tensor, leaf_digest, torch_dtype
from trainfold.core.format.dtypes import STORED, size_bytes, stored_shape
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.state.components import components_of
from trainfold.core.state.state import Progress, TrainState
from trainfold.core.tensor_memory import tensor_bytes
from trainfold.properties import laws, strategies
from trainfold.properties.differences import tensor_difference


@given(strategies.tensors())
@settings(deadline=None)
def test_the_bytes_of_a_tensor_rebuild_it(tensor):
    """B09: every dtype is restored bit for bit, including 0-d, empty and non-contiguous tensors."""
    data = bytes(tensor_bytes(tensor))
    name = str(tensor.dtype).removeprefix("torch.")
    assert len(data) == size_bytes(name, tuple(tensor.shape))
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    back = (raw.ne(0) if name == "bool" else raw.view(torch_dtype(name))).reshape(tensor.shape)
    assert bytes(tensor_bytes(back)) == data


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("column", [0, 2])
def test_a_column_of_any_number_of_rows_is_saved(rows, column):
    """A column of at most one element is contiguous with any stride; viewing it as bytes failed (B09)."""
    tensor = torch.arange(12.0).reshape(4, 3)[:rows, column]
    assert bytes(tensor_bytes(tensor)) == bytes(tensor_bytes(torch.tensor(tensor.tolist())))
    laws.round_trips(TrainState(trainer=Progress(step=1), extra={"column": tensor}))


def test_a_difference_in_a_column_of_one_row_is_told():
    one, other = torch.zeros(4, 3)[:1, 0], torch.ones(4, 3)[:1, 0]
    assert tensor_difference(one, other) == "element 0 is 0.0 against 1.0"


def test_contiguous_memory_is_not_copied():
    tensor = torch.zeros(1000)
    view = tensor_bytes(tensor)
    tensor[0] = 1.0
    assert bytes(view[:4]) != bytes(4)


@pytest.mark.parametrize(
    "name", [name for name in STORED if STORED[name].parts == 1 and "e8m0" not in name and "float4" not in name]
)
def test_a_dtype_is_stored_under_the_name_that_safetensors_gives_it(name):
    tensor = (
        torch.zeros(8, dtype=torch.uint8).view(torch_dtype(name))
        if name != "bool"
        else torch.zeros(8, dtype=torch.bool)
    )
    saved = safetensors.torch.save({"x": tensor})
    assert f'"dtype":"{STORED[name].name}"'.encode() in saved


def test_a_dtype_that_safetensors_lacks_is_stored_as_a_view_of_equal_size():
    for name, stored in STORED.items():
        shape = stored_shape(name, (3,))
        assert size_bytes(name, (3,)) == 3 * stored.itemsize
        assert shape == ((3, 2) if stored.parts == 2 else (3,))


def test_the_digest_of_a_leaf_is_plain_xxh3():
    tensor = torch.arange(7, dtype=torch.int32)
    assert leaf_digest(tensor) == "xxh3:" + xxhash.xxh3_128_hexdigest(tensor.numpy().tobytes())


def test_conjugate_and_negative_views_are_resolved():
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    assert bytes(tensor_bytes(tensor.conj())) == bytes(tensor_bytes(tensor.conj().resolve_conj()))
    imaginary = tensor.conj().imag
    assert bytes(tensor_bytes(imaginary)) == bytes(tensor_bytes(imaginary.clone()))


def test_a_read_only_array_is_held_without_a_warning():
    import numpy as np

    array = np.arange(3.0)
    array.flags.writeable = False
    assert torch.equal(as_tensor(array, "x"), torch.arange(3.0, dtype=torch.float64))


@given(strategies.states())
@settings(deadline=None, max_examples=40)
def test_a_fingerprint_depends_on_values_alone(state):
    """One digest per component; a copy, another memory layout or another dict order changes nothing."""
    found = fingerprint(state)
    assert list(found) == list(components_of(state))
    assert fingerprint(laws.clone(state)) == found


def test_one_bit_anywhere_changes_its_component_and_no_other():
    state = TrainState(trainer=Progress(), extra={"ema": {"w": torch.zeros(3)}, "scaler": {"w": torch.zeros(3)}})
    other = state.evolve(extra={**state.extra, "ema": {"w": torch.tensor([0.0, -0.0, 0.0])}})
    one, two = fingerprint(state), fingerprint(other)
    assert {name for name in one if one[name] != two[name]} == {"ema"}
    moved = state.evolve(extra={**state.extra, "ema": {"w": torch.zeros(3, 1)}})
    assert fingerprint(moved)["ema"] != one["ema"]
