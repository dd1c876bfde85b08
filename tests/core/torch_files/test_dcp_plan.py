"""The metadata of a planned directory are what torch's own classes say of such tensors."""

import pickle

from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.torch_files.dcp_metadata import read_dcp_metadata
from trainfold.core.torch_files.dcp_plan import plan_dcp

specs = st.sampled_from([
    LeafSpec("float32", (2, 3)), LeafSpec("bfloat16", (2, 3)), LeafSpec("float32", ()), LeafSpec("int64", (70_000,)), LeafSpec("bool", (0, 4)),
])  # fmt: skip


@given(st.lists(specs, max_size=12))
def test_entries_of_equal_tensors_are_written_as_they_are_and_are_objects_of_their_own(drawn):
    """M24: a program that changes the entry of one tensor changes no other."""
    wanted = {f"m.{number}.w": each for number, each in enumerate(drawn)}
    data = plan_dcp(wanted).metadata
    found = pickle.loads(data).state_dict_metadata
    assert {name: (str(each.properties.dtype), tuple(each.size)) for name, each in found.items()} == {
        name: (f"torch.{each.dtype}", each.shape) for name, each in wanted.items()
    }
    assert len({id(each) for each in found.values()}) == len(wanted)
    assert len({id(each.chunks) for each in found.values()}) == len(wanted)
    mine = read_dcp_metadata(data, "x").tensors
    assert {name: LeafSpec(each.dtype, each.shape) for name, each in mine.items()} == wanted
