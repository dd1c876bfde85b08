"""Laws of plans of hub directories: each tensor in one file, greedy in order or as in another map, and headers that the format's own library reads."""

import json
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given
from safetensors import deserialize

from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.format.dtypes import size_bytes
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.weights.hub.file_header import HUB_DTYPES
from trainfold.core.weights.hub.hub_config import config_text, is_tied
from trainfold.core.weights.hub.hub_plan import hub_index_text, plan_hub_files, shard_size

SPECS = st.dictionaries(
    st.text(min_size=1, max_size=6).filter(lambda name: name != "__metadata__" and name.isprintable()),
    st.builds(
        LeafSpec,
        st.sampled_from(["float32", "bfloat16", "int64", "bool", "float8_e4m3fn"]),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=12,
)


def bytes_of(each):
    return size_bytes(each.dtype, each.shape)


@given(SPECS, st.integers(1, 200))
def test_each_tensor_is_in_one_file_and_files_are_filled_in_order(specs, shard_bytes):
    """K05: one that is larger than a file may be has a file of its own, and no file could have taken the first of the next one."""
    files = plan_hub_files(specs, shard_bytes=shard_bytes)
    assert sorted(name for file in files for name in file.tensors) == sorted(specs)
    order = [[name for name in specs if name in file.tensors] for file in files]
    assert [name for names in order for name in names] == list(specs)
    for file in files:
        assert file.tensor_bytes <= shard_bytes or len([each for each in file.tensors.values() if bytes_of(each)]) == 1
    for file, (_, following) in zip(files, pairwise(order), strict=False):
        assert file.tensor_bytes + bytes_of(specs[following[0]]) > shard_bytes
    index = json.loads(hub_index_text(files))
    assert index["weight_map"] == {name: file.name for file in files for name in file.tensors}
    assert index["metadata"]["total_size"] == sum(map(bytes_of, specs.values()))
    assert len({file.name for file in files}) == len(files)


@given(SPECS)
def test_the_library_of_the_format_reads_a_header_and_each_tensor_is_aligned(specs):
    (file,) = plan_hub_files(specs, metadata={"format": "pt"})
    data = bytes(range(256)) * (file.tensor_bytes // 256 + 1)
    found = dict(deserialize(file.header + data[: file.tensor_bytes]))
    assert {name: (each["dtype"], tuple(each["shape"])) for name, each in found.items()} == {
        name: (HUB_DTYPES[each.dtype], each.shape) for name, each in specs.items()
    }
    offsets = {
        name: each["data_offsets"] for name, each in json.loads(file.header[8:]).items() if name != "__metadata__"
    }
    assert all((len(file.header) + offsets[name][0]) % size_bytes(each.dtype, ()) == 0 for name, each in specs.items())
    assert [bytes(found[name]["data"]) for name in offsets] == [data[start:stop] for start, stop in offsets.values()]


def test_a_map_is_kept_and_what_it_does_not_have_goes_beside_the_tensor_before():
    """K05: new tensors are in one file too; one that is tied may be missing, and then so may its file."""
    specs = {name: LeafSpec("float32", (2,)) for name in ("new", "a", "b", "b.lora", "c")}
    where = {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors", "head": "three.safetensors"}
    files = plan_hub_files(specs, weight_map=where, tied=["head"], shard_bytes=1)
    assert {file.name: list(file.tensors) for file in files} == {
        "one.safetensors": ["new", "a", "c"],
        "two.safetensors": ["b", "b.lora"],
    }
    with pytest.raises(InvalidState, match="found none for head"):
        plan_hub_files(specs, weight_map=where)
    with pytest.raises(InvalidState, match="at least one tensor"):
        plan_hub_files({})
    with pytest.raises(InvalidState, match=r"w: expected one of .* found complex128"):
        _ = plan_hub_files({"w": LeafSpec("complex128", (2,))})[0].header


@pytest.mark.parametrize(
    ("given_size", "found"), [("5GB", 5 * 10**9), ("1.5 mib", 3 << 19), ("7", 7), ("7B", 7), (1, 1)]
)
def test_sizes_are_bytes_or_texts(given_size, found):
    assert shard_size(given_size) == found


@pytest.mark.parametrize("wrong", ["", "GB", "5XB", "-1GB", "0", 0, -1, 2.5, None, "5 G B"])
def test_what_is_not_a_size_is_refused(wrong):
    """K09: when it is given."""
    with pytest.raises(InvalidArgument, match="shard_bytes"):
        shard_size(wrong)


def test_a_configuration_says_whether_the_head_is_tied_and_of_which_dtype_the_weights_are():
    assert is_tied({"tie_word_embeddings": False}, by_default=True) is False
    assert is_tied({}, by_default=True) is True
    assert is_tied({}, by_default=None) is None
    with pytest.raises(InvalidArgument, match="tie_word_embeddings"):
        is_tied({"tie_word_embeddings": 1}, by_default=None)
    assert json.loads(config_text({"dtype": "float32", "a": "ü"}, "float16")) == {"dtype": "float16", "a": "ü"}
    assert json.loads(config_text({"a": 1}, "float16")) == {"a": 1}
