"""The save plan: every byte of every tensor once, for any world size, in files that any safetensors reader can open."""

import json
import math

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfold.backends.runs.api import save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import InvalidArgument, InvalidState, RanksDisagree
from trainfold.core.format.file_names import directory_of, step_of
from trainfold.core.format.structure.describe import describe
from trainfold.core.layout.shard import make_shard
from trainfold.core.save.save_plan import plan_save
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Opaque, Progress, TrainState
from trainfold.properties import strategies


def described(tree, name="part"):
    return {name: describe(tree, name)[0]}


@settings(deadline=None, max_examples=80)
@given(tensors=st.lists(strategies.tensors(), max_size=8), world_size=st.integers(1, 8))
def test_each_tensor_is_written_once_by_one_rank_and_files_have_no_gaps(tensors, world_size):
    """B06: replicated state is written once. C01: the exact size of every file is known before it is written."""
    tree = {f"t{i}": tensor for i, tensor in enumerate(tensors)}
    plan = plan_save([described(tree)] * world_size, step=3)
    placed = [tensor for file in plan.files for tensor in file.tensors]
    assert sorted(each.path for each in placed) == sorted(f"part['t{i}']" for i in range(len(tensors)))
    for file in plan.files:
        length = int.from_bytes(file.header[:8], "little")
        assert len(file.header) == 8 + length
        assert len(file.header) % 4096 == 0
        end = len(file.header)
        for each in file.tensors:
            assert each.start == end
            end = each.stop
            assert each.start % tensors[int(each.path[7:-2])].element_size() == 0
        assert end == file.size_bytes
        entries = json.loads(file.header[8:])
        assert all(
            entry["data_offsets"][1] + len(file.header) <= file.size_bytes
            for key, entry in entries.items()
            if key != "__metadata__"
        )
    assert len({file.name for file in plan.files}) == len(plan.files)


@given(sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=30), world_size=st.integers(1, 8))
@settings(deadline=None)
def test_the_bytes_of_replicated_state_are_balanced_between_ranks(sizes, world_size):
    """N05: replicated groups write once; no rank writes more than its share plus the largest tensor."""
    tree = {f"t{i}": torch.zeros(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
    plan = plan_save([described(tree)] * world_size, step=0)
    written = [
        sum(t.stop - t.start for file in plan.files_of(rank) for t in file.tensors) for rank in range(world_size)
    ]
    assert sum(written) == sum(sizes)
    assert max(written) <= math.ceil(sum(sizes) / world_size) + max(sizes)


def test_the_plan_is_the_same_on_every_rank_and_prints():
    plan = plan_save([described({"w": torch.zeros(3)})] * 2, step=5)
    assert plan == plan_save([described({"w": torch.ones(3)})] * 2, step=5)
    assert "step-00000005" in str(plan)
    assert "part-00000-of-00002.safetensors" in str(plan)


@settings(deadline=None, max_examples=20)
@given(tensors=st.lists(strategies.tensors(), max_size=4), world_size=st.integers(1, 3), revision=st.integers(0, 12))
def test_another_revision_has_other_names_and_nothing_else(tensors, world_size, revision):
    ranks = [described(tensors)] * world_size
    assert plan_save(ranks, step=7).revised(revision) == plan_save(ranks, step=7, revision=revision)


def test_a_model_file_opens_in_any_safetensors_reader_under_plain_names():
    """U01: tensors in safetensors."""
    model = ModelState(
        Leaves({"h.0.w": torch.randn(3, 2), "h.1.w": torch.zeros(2, dtype=torch.bfloat16)}),
        Leaves({"n": torch.tensor(4)}),
    )
    store = MemoryStore()
    save(TrainState(model=model, trainer=Progress(1)), store)
    found = safetensors.torch.load(store.read("step-00000001/model-00000-of-00001.safetensors"))
    assert set(found) == {"h.0.w", "h.1.w", "n"}
    assert torch.equal(found["h.0.w"], model.params["h.0.w"])


def test_two_leaves_that_would_have_one_name_in_the_file_keep_both():
    model = ModelState(Leaves({"x": torch.zeros(1)}), Leaves({"x": torch.ones(1)}))
    plan = plan_save([described(model, "model")], step=1)
    assert len(json.loads(plan.files[0].header[8:])) == 3


@given(st.integers(0, 10**17))
def test_a_directory_names_its_step(step):
    """C12: directory names are step-N with anchored parsing."""
    assert step_of(directory_of(step)) == step


@pytest.mark.parametrize(
    "name",
    [
        "step-7",
        "step-00000007.bak",
        "xstep-00000007",
        "step-00000007 ",
        "step-000000007",
        "step-0000000a",
        "latest",
        "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0667",
    ],
)
def test_foreign_and_temporary_names_are_ignored(name):
    """C12: foreign and temp names are ignored."""
    assert step_of(name) is None


def test_slices_must_cover_the_tensor_once():
    ranks = [described({"w": make_shard(torch.zeros(2), shape=(4,), starts=(start,))}) for start in (0, 1)]
    with pytest.raises(InvalidState, match="overlapping"):
        plan_save(ranks, step=1)
    with pytest.raises(InvalidState, match="2 of 4"):
        plan_save(ranks[:1], step=1)
    plan_save([described({"w": make_shard(torch.zeros(2), shape=(4,), starts=(start,))}) for start in (0, 2)], step=1)


def test_an_unsharded_copy_beside_shards_is_an_overlap():
    ranks = [described({"w": make_shard(torch.zeros(2), shape=(4,), starts=(0,))}), described({"w": torch.zeros(4)})]
    with pytest.raises(InvalidState):
        plan_save(ranks, step=1)


def test_ranks_that_hold_different_components_are_named():
    """C06: all ranks agree. The message contains the first difference."""
    with pytest.raises(RanksDisagree, match="rank 1"):
        plan_save([described({"w": 1}), described({"w": 2})], step=1)
    with pytest.raises(RanksDisagree, match="components"):
        plan_save([described({"w": 1}, "ema"), described({"w": 1}, "scaler")], step=1)
    with pytest.raises(
        RanksDisagree, match=r"part\['w'\]: expected .* float32 \[2\], found on rank 1: .* float32 \[3\]"
    ):
        plan_save([described({"w": torch.zeros(2)}), described({"w": torch.zeros(3)})], step=1)


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        ({"best": 1.5}, {"best": 2.5}, "part['best']"),
        ({"a": [1, (2, 3)]}, {"a": [1, (2, 4)]}, "part['a'][1][1]"),
        (Progress(step=1, samples=2), Progress(step=1, samples=1), "part.samples"),
        (Opaque({"min": 0.0}), Opaque({"min": -0.0}), "part.value['min']"),
        ({"seen": 1}, {"seen": True}, "part['seen']"),
        ({1: "x"}, {1: "y"}, "part"),
        ({"a": 1}, {"b": 1}, "part"),
    ],
)
def test_the_scalar_that_ranks_have_otherwise_is_named(one, other, where):
    """W24: only the component was named; -0.0 and 0.0, or 1 and True, also differ in their bits."""
    with pytest.raises(RanksDisagree) as caught:
        plan_save([described(one), described(other)], step=1)
    assert caught.value.where == where


def test_a_step_below_zero_and_a_world_of_none_are_refused():
    for ranks, step in (([], 1), ([{}], -1)):
        with pytest.raises(InvalidArgument):
            plan_save(ranks, step=step)
