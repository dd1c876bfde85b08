"""The metadata of a planned directory are what torch's own classes say of such tensors."""

import pickle

from hypothesis import example, given
from hypothesis import strategies as st

from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.torch_files.dcp_metadata import read_dcp_metadata
from trainfold.core.torch_files.dcp_plan import plan_dcp

specs = st.sampled_from([
    LeafSpec("float32", (2, 3)), LeafSpec("bfloat16", (2, 3)), LeafSpec("float32", ()), LeafSpec("int64", (70_000,)), LeafSpec("bool", (0, 4)),
])  # fmt: skip


@given(st.lists(specs, max_size=12), st.sampled_from([1, 4000, 1 << 30]), st.booleans())
@example([LeafSpec("float32", (2, 3))] * 80, 1 << 30, True)
def test_metadata_say_what_the_files_have_and_each_entry_is_an_object_of_its_own(drawn, file_bytes, is_nested):
    """M24: a program that changes the entry of one tensor changes no other."""
    wanted = {f"m.{number}.w": each for number, each in enumerate(drawn)}
    paths = {name: ("m", name[2:]) if is_nested else tuple(name.split(".")) for name in wanted}
    plan = plan_dcp(wanted, {"step": 3, "m.é": {"a": [1]}}, paths=paths if is_nested else None, file_bytes=file_bytes)
    whole = pickle.loads(plan.metadata)
    found = {name: each for name, each in whole.state_dict_metadata.items() if name in wanted}
    assert {name: (str(each.properties.dtype), tuple(each.size)) for name, each in found.items()} == {
        name: (f"torch.{each.dtype}", each.shape) for name, each in wanted.items()
    }
    assert all([list(map(tuple, (one.offsets, one.sizes)))] == [[(0,) * len(each.size), tuple(each.size)]] for each in found.values() for one in each.chunks)  # fmt: skip
    assert len({id(each) for each in found.values()}) == len(wanted)
    assert len({id(each.chunks) for each in found.values()}) == len(wanted)
    assert whole.planner_data == {"step": ("step",), "m.é": ("m", "é"), **paths}
    assert {
        (key.fqn, None if key.offset is None else tuple(key.offset), key.index): (each.relative_path, each.offset, each.length)
        for key, each in whole.storage_data.items()
    } == {
        (each.name, None, None) if each.spec is None else (each.name, (0,) * len(each.spec.shape), 0): (file.name, each.start, each.size)
        for file in plan.files for each in file.entries
    }  # fmt: skip
    mine = read_dcp_metadata(plan.metadata, "x").tensors
    assert {name: LeafSpec(each.dtype, each.shape) for name, each in mine.items()} == wanted
