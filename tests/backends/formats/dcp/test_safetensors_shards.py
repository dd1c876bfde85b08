"""Parts of ranks in safetensors files, as torch's writer for model hubs leaves them before they are put together."""

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.backends import dcp_cases as cases
from safetensors.torch import save_file

from trainfold.backends.weights.foreign.dcp_directory import DcpDirectory
from trainfold.core.errors import CheckpointDamaged, CheckpointForeign


def write(folder, parts):
    """A file for each rank; a part is a tensor and its offsets."""
    folder.mkdir(exist_ok=True)
    for number, each in enumerate(parts):
        info = {name: {"saved_offsets": list(offsets)} for name, (_, offsets) in each.items()}
        metadata = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
        tensors = {name: tensor.contiguous() for name, (tensor, _) in each.items()}
        save_file(tensors, folder / f"shard-{number + 1:05}-model-00001-of-00001.safetensors", metadata)
    return DcpDirectory(folder)


@settings(max_examples=40)
@given(data=st.data(), rows=st.integers(1, 9), ranks=st.integers(1, 4))
def test_parts_of_ranks_are_the_tensor(data, rows, ranks, tmp_path_factory):
    """M24: any cut of rows; a rank may have none of them."""
    whole = torch.arange(rows * 3.0).view(rows, 3)
    cuts = sorted([0, rows, *data.draw(st.lists(st.integers(0, rows), min_size=ranks - 1, max_size=ranks - 1))])
    parts = [{"w": (whole[low:high], (low, 0))} for low, high in pairwise(cuts)]
    source = write(tmp_path_factory.mktemp("shards"), parts)
    assert cases.all_bits(cases.everything(source)) == cases.all_bits({"w": whole})
    assert source.objects() == {}


def test_what_torch_writes_is_read(tmp_path):
    """M24: `HuggingFaceStorageWriter` with `save_distributed`."""
    hf_storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
    tensors = {"a": torch.randn(4, 3), "b": torch.ones(2).bfloat16(), "step": torch.tensor(3)}
    writer = hf_storage.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    with pytest.warns(UserWarning, match="single process"):
        cases.dcp.save(tensors, storage_writer=writer, no_dist=True)
    assert cases.all_bits(cases.everything(DcpDirectory(tmp_path))) == cases.all_bits(tensors)


def test_parts_that_are_not_a_tensor_are_refused(tmp_path):
    """U02: by the name of the tensor."""
    w = torch.ones(4, 3)
    for number, (parts, said) in enumerate((
        ([{"w": (w[:2], (0, 0))}, {"w": (w[2:], (1, 0))}], r"w: expected slices that cover \[3, 3\] once, found 2 slices with 12 of 9"),
        ([{"w": (w[:2], (0, 0))}, {"w": (w[2:].double(), (2, 0))}], "parts of one dtype"),
        ([{"w": (w, (0,))}], "a dtype, and 2 offsets in DCP_SHARDING_INFO"),
        ([{"w": (w, (-1, 0))}], "with saved_offsets for each name"),
    )):  # fmt: skip
        with pytest.raises(CheckpointDamaged, match=said):
            write(tmp_path / str(number), parts).specs()
    (tmp_path / "hub").mkdir()
    save_file({"w": w}, tmp_path / "hub" / "model.safetensors")
    with pytest.raises(CheckpointForeign, match=r"HubDirectory\("):
        DcpDirectory(tmp_path / "hub").specs()
