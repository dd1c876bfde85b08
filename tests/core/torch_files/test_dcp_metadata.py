"""Metadata of distributed checkpoints are read as torch means them, of each of its versions, and refused where they describe no whole tensors inside of a directory."""

import io
import pickle
from copy import deepcopy
from pathlib import PurePosixPath
from random import Random, SystemRandom

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.depth import IS_DEEP
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from trainfold.core.errors import CheckpointDamaged, CheckpointHostile, TrainfoldError
from trainfold.core.torch_files import dcp_metadata
from trainfold.core.torch_files.dcp_metadata import DcpMetadata, DcpTensor, FileRange, read_dcp_metadata


def listed(shape, chunks, dtype=torch.float32):
    """A tensor of these chunks, each with its offsets and sizes."""
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        torch.Size(shape),
        [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in chunks],
    )


def metadata(tensors, objects=(), **changes):
    """Metadata as the writer makes them, 10 bytes for each chunk."""
    places, at = {}, 0
    for name, tensor in tensors.items():
        for number, chunk in enumerate(tensor.chunks):
            places[MetadataIndex(name, chunk.offsets, number)] = _StorageInfo("__0_0.distcp", at, 10)
            at += 10
    for name in objects:
        places[MetadataIndex(name)] = _StorageInfo("__1_0.distcp", 0, 5)
    state = {**tensors, **{name: BytesStorageMetadata() for name in objects}}
    fields = {
        "planner_data": {name: tuple(name.split(".")) for name in state},
        "storage_meta": StorageMeta(PurePosixPath("/runs/a"), "id"),
        "version": "1.0.0",
        "storage_data": places,
    }
    return Metadata(state, **(fields | changes))


CASES = 200_000 if IS_DEEP else 3000
W = {"model.w": listed((4, 2), [((0, 0), (3, 2)), ((3, 0), (1, 2))])}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_tensors_chunks_objects_and_paths_are_those_that_were_written(protocol):
    """U02: with any protocol of pickles."""
    found = read_dcp_metadata(pickle.dumps(metadata(W, ["step"]), protocol), "x")
    chunks = (
        (((0, 3), (0, 2)), FileRange("__0_0.distcp", 0, 10)),
        (((3, 4), (0, 2)), FileRange("__0_0.distcp", 10, 10)),
    )
    assert found.tensors == {"model.w": DcpTensor("float32", (4, 2), chunks)}
    assert found.objects == {"step": FileRange("__1_0.distcp", 0, 5)}
    assert found.paths == {"model.w": ("model", "w"), "step": ("step",)}


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=6),
        st.tuples(st.lists(st.integers(0, 5), max_size=3), st.integers(1, 4)),
        max_size=5,
    )
)
def test_whatever_the_shapes_and_the_cuts(drawn):
    """Chunks without elements, as ranks without rows have them, are left out."""
    tensors = {}
    for name, (shape, parts) in drawn.items():
        rows = shape[0] if shape else 0
        step = -(-rows // parts) if rows else 0
        cuts = [(min(i * step, rows), min((i + 1) * step, rows)) for i in range(parts)]
        rest = shape[1:]
        chunks = [((low, *[0] * len(rest)), (high - low, *rest)) for low, high in cuts] if shape else [((), ())]
        tensors[name] = listed(shape, chunks, torch.bfloat16)
    found = read_dcp_metadata(pickle.dumps(metadata(tensors, planner_data=None)), "x").tensors
    assert {name: each.shape for name, each in found.items()} == {
        name: tuple(shape) for name, (shape, _) in drawn.items()
    }
    for each in found.values():
        elements = sum(torch.Size([stop - start for start, stop in box]).numel() for box, _ in each.chunks)
        assert elements == torch.Size(each.shape).numel()


OLD = {  # as torch 1.13, and 2.0 to 2.2, named the modules
    b"torch.distributed.checkpoint.metadata": b"torch.distributed._shard.checkpoint.metadata",
    b"torch.distributed.checkpoint.filesystem": b"torch.distributed._shard.checkpoint.filesystem",
}


def test_the_names_of_earlier_versions_are_known():
    data = pickle.dumps(metadata(W, ["step"]), 2)
    for new, old in OLD.items():
        data = data.replace(b"c" + new, b"c" + old)
    shards = b"ctorch.distributed._shard.sharded_tensor.metadata\n"
    for name in (b"_MEM_FORMAT_ENCODING", b"TensorProperties"):
        data = data.replace(b"ctorch.distributed._shard.checkpoint.metadata\n" + name, shards + name.removeprefix(b"_"))
    assert b"sharded_tensor.metadata\nMEM" in data
    assert read_dcp_metadata(data, "x") == read_dcp_metadata(pickle.dumps(metadata(W, ["step"])), "x")


def broken(change):
    """Metadata of W after a change of its storage or its chunks."""
    made = deepcopy(metadata(W, ["step"]))
    change(made)
    return pickle.dumps(made)


def places(**changes):
    def change(made):
        for info in made.storage_data.values():
            for name, value in changes.items():
                setattr(info, name, value)

    return change


def chunks(*new):
    def change(made):
        made.state_dict_metadata = {"model.w": listed((4, 2), new)}
        made.storage_data = metadata(made.state_dict_metadata).storage_data

    return change


def properties(value):
    def change(made):
        made.state_dict_metadata["model.w"].properties = value

    return change


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (places(relative_path="../w"), CheckpointHostile, r"expected a file in its directory, found \.\./w"),
        (places(relative_path="/etc/passwd"), CheckpointHostile, "found /etc/passwd"),
        (places(relative_path="a\\b"), CheckpointHostile, "expected a file in its directory"),
        (places(relative_path=""), CheckpointHostile, "expected a file in its directory"),
        (places(relative_path=7), CheckpointHostile, "expected a file in its directory, found int"),
        (places(offset=-1), CheckpointDamaged, "expected a range of bytes"),
        (places(length="all"), CheckpointDamaged, "expected a range of bytes, found int and str"),
        (places(length=2**63), CheckpointDamaged, "expected a range of bytes"),
        (chunks(((0, 0), (3, 2))), CheckpointDamaged, r"cover \[4, 2\] once, found 1 slices with 6 of 8"),
        (chunks(((0, 0), (4, 2)), ((3, 0), (1, 2))), CheckpointDamaged, "10 of 8 elements, overlapping"),
        (chunks(((0, 0), (4, 3))), CheckpointDamaged, r"chunks inside \[4, 2\]"),
        (chunks(((0,), (4,))), CheckpointDamaged, "chunks of 2 dimensions"),
        (lambda made: made.storage_data.clear(), CheckpointDamaged, r"the place of the chunk at \(0, 0\), found none"),
        (properties(torch.Size([3])), CheckpointDamaged, r"expected TensorProperties, found torch\.Size"),
        (lambda made: made.planner_data.update({"step": ("model", "w")}), CheckpointDamaged, "those of another name"),
        (lambda made: setattr(made, "storage_data", None), CheckpointDamaged, "found dict and nothing"),
        (lambda made: setattr(made, "state_dict_metadata", {3: W["model.w"]}), CheckpointDamaged, "names that are text, found int"),
        (lambda made: setattr(made, "storage_meta", io.BytesIO()), CheckpointHostile, r"found _io\.BytesIO"),
    ],
)  # fmt: skip
def test_metadata_that_describe_no_tensors_in_the_directory_are_refused(change, error, said):
    """U02: the message has what was found."""
    with pytest.raises(error, match=said):
        read_dcp_metadata(broken(change), "x")


def test_a_value_that_holds_itself_is_no_metadata():
    """U02: and is not shown, which would take for ever."""
    loop = []
    loop.append(loop)
    for made in (loop, Metadata({"w": loop}, storage_data={}), metadata(W, planner_data={"model.w": (loop,)})):
        text = ""
        try:
            read_dcp_metadata(pickle.dumps(made), "x")
        except TrainfoldError as error:
            text = str(error)
        assert len(text) < 500


def test_whichever_bytes_are_changed_it_is_read_or_refused():
    """U02: fuzzed; readers raise trainfold's own errors alone. `make laws` tries other changes, and more of them."""
    random = Random(SystemRandom().getrandbits(32) if IS_DEEP else 7)
    whole = pickle.dumps(metadata({**W, "b": listed((), [((), ())])}, ["step"]))
    refused = 0
    for _ in range(CASES):
        data = bytearray(whole)
        for _ in range(random.choice([1, 1, 1, 2, 5])):
            at = random.randrange(len(data))
            how = random.random()
            if how < 0.7:
                data[at] = random.randrange(256)
            elif how < 0.85:
                del data[at : at + random.randrange(1, 9)]
            else:
                data[at:at] = data[(start := random.randrange(len(data))) : start + random.randrange(1, 30)]
        try:
            assert isinstance(read_dcp_metadata(bytes(data), "x"), DcpMetadata)
        except TrainfoldError:
            refused += 1
    assert CASES / 2 < refused < CASES


def offsets_of_one_hash(count):
    """First indices that Python's hash of tuples does not distinguish: the second number is computed from the first."""
    one, two, five, word = 11400714785074694791, 14029467366897019727, 2870177450012600261, 2**64
    found, first = [], 0
    while len(found) < count:
        mixed = (five + first * two) % word
        mixed = ((mixed << 31) | (mixed >> 33)) * one % word
        aim = 12345 * pow(one, -1, word) % word
        second = (((aim >> 31) | (aim << 33)) % word - mixed) * pow(two, -1, word) % word
        if second < 2**61 - 1:
            found.append((first, second))
        first += 1
    assert len({hash(each) for each in found}) == 1
    return found


@pytest.mark.parametrize("protocol", [2, 4])
def test_places_of_chunks_whose_first_indices_have_one_hash_are_not_compared_each_with_each(protocol, monkeypatch):
    """U02: 100,000 of them took minutes."""
    kept = []
    stored = dcp_metadata._stored
    monkeypatch.setattr(dcp_metadata, "_stored", lambda *given: kept.append(stored(*given)) or kept[-1])
    made = metadata(W)
    for offset in offsets_of_one_hash(50):
        made.storage_data[MetadataIndex("model.w", torch.Size(offset))] = _StorageInfo("__0_0.distcp", 0, 10)
    read_dcp_metadata(pickle.dumps(made, protocol), "x")
    assert len({hash(key) for key in kept[-1]}) == len(kept[-1]) == 52
