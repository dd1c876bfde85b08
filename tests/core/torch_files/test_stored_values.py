"""What a pickle says of a tensor is believed only if its elements are inside its memory."""

import io
import pickle
from collections import OrderedDict

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from trainfold.core.errors import CheckpointDamaged
from trainfold.core.torch_files.stored_values import read_values


class Described:
    """A tensor of float32 in a memory of some elements, as torch's own pickle describes it."""

    def __init__(self, elements, start, shape, strides):
        self.elements, self.seen = elements, (start, shape, strides)

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, (Memory(self.elements), *self.seen, False, OrderedDict())


class Memory:
    def __init__(self, elements):
        self.elements = elements


class Pickler(pickle.Pickler):
    def persistent_id(self, value):
        return ("storage", torch.FloatStorage, "0", "cpu", value.elements) if isinstance(value, Memory) else None


def pickled(value):
    memory = io.BytesIO()
    Pickler(memory, 2).dump(value)
    return memory.getvalue()


@given(
    st.integers(0, 40), st.integers(0, 20), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=3)
)  # fmt: skip
def test_a_tensor_is_read_where_torch_would_see_it_inside_its_memory(elements, start, dims):
    """U02: with any strides; one without elements needs no memory."""
    shape, strides = tuple(size for size, _ in dims), tuple(stride for _, stride in dims)
    data = pickled([Described(elements, start, shape, strides)])
    try:
        if 0 not in shape:
            torch.empty(elements).as_strided(shape, strides, start)
    except RuntimeError:
        event("outside")
        with pytest.raises(CheckpointDamaged, match=f"a tensor inside its memory of {4 * elements} bytes"):
            read_values(data, "x")
    else:
        event("inside")
        assert len(read_values(data, "x")) == 1
