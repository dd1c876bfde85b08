"""The name of a tensor in its leaf path, whatever characters a program has put into it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainfold
from trainfold.core import tree
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.names.tensor_names import param_name, storage_key, weight_name
from trainfold.core.state.state import ModelState, OptimizerState, ParamGroup, TrainState
from trainfold.stores import MemoryStore


def state_of(matrix, vector):
    """The slots of the matrix are more than those of the vector, as in factored optimizers."""
    params = {matrix: torch.zeros(2, 2), vector: torch.zeros(2)}
    slots = {matrix: {"step": torch.zeros(()), "rows": torch.zeros(2, 2)}, vector: {"step": torch.zeros(())}}
    optimizer = OptimizerState("kind", Leaves(slots), (ParamGroup({"lr": 0.1}, (matrix, vector)),))
    return TrainState(model=ModelState(Leaves(params), Leaves(), ()), optimizer=optimizer, trainer=trainfold.Progress())


@given(st.text(max_size=8), st.sampled_from(["params", "buffers"]))
def test_the_name_in_a_leaf_path_is_the_one_that_a_program_gave(name, kind):
    """V07: it may have quotes, brackets and what a path escapes; tensors under other components have theirs too."""
    path = f"model.{kind}[{name!r}]"
    assert weight_name(path) == weight_name(f"ema[{name!r}]") == name
    assert param_name(path) == (name if kind == "params" else None)
    assert weight_name(f"optimizer.slots[{name!r}]['step']") is None


@given(st.lists(st.text(max_size=8), unique=True, max_size=4), st.sampled_from(["params", "buffers"]))
def test_two_tensors_of_a_model_have_two_names_in_a_file(names, kind):
    """N01: the names that a path does not escape stand there as they are, so that any reader of safetensors has them."""
    keys = [storage_key(f"model.{kind}[{name!r}]") for name in names]
    assert len({*keys}) == len(names)
    for name, key in zip(names, keys, strict=True):
        assert key == name or repr(name) != f"'{name}'"


@pytest.mark.parametrize("mark", ["", "it's.", 'a"b.', "back\\slash.", "line\n.", 'it\'s "both".'])
def test_slots_that_differ_by_shape_are_whole_whatever_the_names_are(mark):
    """W20: with a quote in the names of two parameters, the one with fewer dimensions was taken for damaged, and its checkpoint refused."""
    state, store = state_of(f"{mark}w", f"{mark}b"), MemoryStore()
    trainfold.save(state, store)
    loaded = trainfold.load(store, like=state)
    assert [*loaded.optimizer.slots] == [f"{mark}w", f"{mark}b"]
    assert tree.leaves(loaded.model)[0].shape == (2, 2)
