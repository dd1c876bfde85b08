"""The structure codec: any tree becomes JSON and numbered tensors and is restored; anything else is refused."""

import json
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainfold.core import tree
from trainfold.core.errors import CheckpointHostile, TrainfoldError, UnsupportedLeaf
from trainfold.core.format.codec import leaf_digest
from trainfold.core.format.strict_json import strict_json
from trainfold.core.format.structure.describe import describe
from trainfold.core.format.structure.places import places
from trainfold.core.format.structure.rebuild import rebuild
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import Opaque, Progress
from trainfold.properties import strategies

SLOW = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


def through_json(value):
    described, tensors = describe(value, "part")
    node = strict_json(json.dumps({"node": described.node}, allow_nan=False).encode(), "test")["node"]
    held = list(tensors.values())
    return rebuild(node, "part", lambda index, as_numpy: held[index])


def same(one, other):
    assert tree.paths(one) == tree.paths(other)
    for path, mine, theirs in zip(tree.paths(one), tree.leaves(one), tree.leaves(other), strict=True):
        assert type(mine) is type(theirs), path
        assert leaf_digest(mine) == leaf_digest(theirs), path


@SLOW
@given(strategies.trees())
def test_any_tree_comes_back_bit_for_bit(value):
    """U01: the rest is JSON; tuples and lists, int keys, ints beyond 2**53, NaN payloads and -0.0 are restored exactly."""
    back = through_json(value)
    same(value, back)
    assert tree.structure(value) == tree.structure(back)


@SLOW
@given(strategies.trees())
def test_the_places_of_a_node_are_the_paths_of_the_tree(value):
    described, _ = describe(value, "part")
    assert sorted(leaf.path for leaf in places(described.node, "part")) == sorted(tree.paths(value, "part"))


def test_what_torch_and_numpy_keep_in_their_states_is_held():
    """U01: a numpy random state (a tuple with a uint32 array), a Counter of MultiStepLR, an OrderedDict."""
    value = {
        "numpy": ("MT19937", np.arange(4, dtype=np.uint32), 3, 0, 0.0),
        "milestones": Counter({30: 1, 60: 2}),
        "ordered": OrderedDict([("b", 1), ("a", np.float32(0.1))]),
        "nested": Opaque({1: [Progress(step=2**70)], (1, "a"): None}),
        "leaves": Leaves({"w": torch.ones(2)}),
    }
    back = through_json(value)
    assert back["milestones"] == value["milestones"]
    assert type(back["milestones"]) is Counter
    assert list(back["ordered"]) == ["b", "a"]
    assert back["ordered"]["a"] == np.float32(0.1)
    assert type(back["ordered"]["a"]) is np.float32
    assert back["nested"] == value["nested"]
    np.testing.assert_array_equal(back["numpy"][1], value["numpy"][1])


def test_tied_leaves_share_one_index_and_overlapping_views_do_not():
    """B19: tied tensors are stored once and re-tied on load."""
    tensor = torch.arange(6.0)
    described, tensors = describe({"a": tensor, "b": tensor, "view": tensor[:3], "shape": tensor.view(2, 3)}, "part")
    assert described.node["dict"]["a"] == described.node["dict"]["b"] == {"t": 0}
    assert list(tensors) == ["part['a']", "part['view']", "part['shape']"]
    back = rebuild(described.node, "part", lambda index, as_numpy: list(tensors.values())[index])
    assert back["a"] is back["b"]


def test_two_empty_tensors_at_address_zero_are_not_tied():
    described, _ = describe({"a": torch.empty(0), "b": torch.empty(0, 3)}, "part")
    assert described.node["dict"]["a"] != described.node["dict"]["b"]


@pytest.mark.parametrize(
    "leaf",
    [object(), {1, 2}, 1 + 2j, torch.float32, lambda: None, np.array(["a"]), np.array([object()]),
     torch.zeros(2).to_sparse(), torch.zeros(2, device="meta"), type("Color", (int,), {})(1)],
    ids=lambda leaf: type(leaf).__name__,
)  # fmt: skip
def test_a_leaf_that_would_need_pickle_is_refused_by_name(leaf):
    with pytest.raises(UnsupportedLeaf) as caught:
        describe({"deep": [leaf]}, "extra")
    assert caught.value.where == "extra['deep'][0]"
    assert caught.value.fix


def test_a_tree_that_contains_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(UnsupportedLeaf, match="levels"):
        describe(loop, "extra")


_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["t", "as", "dict", "list", "tuple", "map", "odict", "leaves", "node", "fields", "static",
                             "int", "float", "bytes", "numpy", "counter", "x"]),
            inner, max_size=3,
        ),
    ),
    max_leaves=12,
)  # fmt: skip


@SLOW
@given(_JSON)
def test_any_other_json_is_refused_with_a_named_error_and_nothing_is_imported(node):
    """U05: a corrupt structure fails cleanly. U01: it cannot name code."""
    try:
        rebuild(node, "part", lambda index, as_numpy: index)
    except TrainfoldError as error:
        assert error.where.startswith("part")  # noqa: PT017 - most inputs are refused, some are valid


def test_a_node_class_that_is_not_registered_is_not_looked_up_by_import():
    """U01: a class name in a checkpoint is compared with what is registered, never imported."""
    node = {"node": "antigravity.Window", "fields": {}}
    with pytest.raises(UnsupportedLeaf, match="registered"):
        rebuild(node, "extra", lambda index, as_numpy: None)


def test_a_very_deep_node_is_refused():
    node: object = 1
    for _ in range(200):
        node = {"list": [node]}
    with pytest.raises(CheckpointHostile, match="levels"):
        rebuild(node, "extra", lambda index, as_numpy: None)
