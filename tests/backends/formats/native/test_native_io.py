"""Native files: safetensors opens what the writer wrote; the reader trusts nothing and verifies what it reads."""

import json

import pytest
import safetensors
import safetensors.torch
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfold.backends.formats.native.reader import ReadRequest, read_tensors
from trainfold.backends.formats.native.writer import write_file
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import (
    CheckpointDamaged,
    CheckpointHostile,
    CheckpointTorn,
    InvalidArgument,
    SaveFailed,
)
from trainfold.core.format.codec import leaf_digest, torch_dtype
from trainfold.core.format.dtypes import STORED, stored_shape
from trainfold.core.format.structure.describe import describe
from trainfold.core.save.save_plan import plan_save
from trainfold.core.tensor_memory import tensor_bytes

DIRECTORY = "step-00000001"


def random_tensor(dtype, shape, seed):
    """A tensor of any dtype with random bits, NaN payloads included (0 and 1 for bools)."""
    generator = torch.Generator().manual_seed(seed)
    size = STORED[dtype].itemsize
    bits = torch.randint(0, 2 if dtype == "bool" else 256, (*shape, size), dtype=torch.uint8, generator=generator)
    return bits.reshape(-1).view(torch_dtype(dtype)).reshape(shape)


def written(store, tensors):
    """Write tensors as the one file of a save; gives the plan and what the writer found."""
    described, leaves = describe(tensors, "model")
    (plan,) = plan_save([{"model": described}], step=1).files
    return plan, write_file(plan, leaves, store=store, directory=DIRECTORY), leaves


def requests(plan, found, outs=None):
    return [
        ReadRequest(
            f"{DIRECTORY}/{plan.name}", t.start, t.stop, t.dtype, t.stored, t.shape,
            part.digest, t.path, None if outs is None else outs[t.path],
        )
        for t, part in zip(plan.tensors, found.parts, strict=True)
    ]  # fmt: skip


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
states = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8),
    st.builds(random_tensor, st.sampled_from(sorted(STORED)), shapes, st.integers(0, 1000)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(tensors=states)
def test_every_dtype_and_shape_comes_back_bit_for_bit(tensors):
    """U01: tensors of every dtype, 0-d and empty ones included, in files without pickle."""
    store = MemoryStore()
    plan, found, leaves = written(store, tensors)
    data = store.read(f"{DIRECTORY}/{plan.name}")
    assert found.size_bytes == len(data) == plan.size_bytes
    assert found.digest == "xxh3:" + xxhash.xxh3_128_hexdigest(data)
    assert [part.digest for part in found.parts] == [leaf_digest(leaves[placed.path]) for placed in plan.tensors]
    for request, back in zip(requests(plan, found), read_tensors(store, requests(plan, found)), strict=True):
        assert back.dtype == leaves[request.path].dtype
        assert back.shape == leaves[request.path].shape
        assert bytes(tensor_bytes(back)) == bytes(tensor_bytes(leaves[request.path]))


@settings(max_examples=40, deadline=None)
@given(tensors=states)
def test_safetensors_opens_what_was_written_bit_for_bit(tensors):
    """U01: any safetensors reader opens the files, and its spans are those of the plan."""
    store = MemoryStore()
    plan, _, leaves = written(store, tensors)
    data = store.read(f"{DIRECTORY}/{plan.name}")
    theirs = safetensors.torch.load(data)
    base = 8 + int.from_bytes(data[:8], "little")
    entries = {name: entry for name, entry in json.loads(data[8:base]).items() if name != "__metadata__"}
    assert set(theirs) == set(entries)
    by_span = {(*(base + at for at in each["data_offsets"]), each["dtype"]): name for name, each in entries.items()}
    for placed in plan.tensors:
        if placed.start == placed.stop:
            continue  # empty tensors share their span
        name = by_span[placed.start, placed.stop, placed.stored]
        assert bytes(tensor_bytes(theirs[name])) == bytes(tensor_bytes(leaves[placed.path]))
        assert tuple(theirs[name].shape) == stored_shape(placed.dtype, placed.shape)


def test_a_large_state_goes_through_a_disk_and_back_with_threads(tmp_path):
    store = LocalStore(tmp_path / "run")
    tensors = {f"w{i}": random_tensor("int32", (517, 1031), i) for i in range(20)} | {"t": torch.randn(300, 700).t()}
    plan, found, leaves = written(store, tensors)
    data = (tmp_path / "run" / DIRECTORY / plan.name).read_bytes()
    assert found.digest == "xxh3:" + xxhash.xxh3_128_hexdigest(data)
    fresh = read_tensors(store, requests(plan, found))
    outs = {
        path: torch.zeros(leaf.shape[::-1], dtype=leaf.dtype).t() for path, leaf in leaves.items()
    }  # not contiguous
    read_tensors(store, requests(plan, found, outs))
    for placed, tensor in zip(plan.tensors, fresh, strict=True):
        assert torch.equal(tensor, leaves[placed.path])
        assert torch.equal(outs[placed.path], leaves[placed.path])


def test_reading_into_a_live_tensor_uses_its_memory_also_when_it_wants_gradients():
    store = MemoryStore()
    plan, found, leaves = written(store, {"w": torch.randn(5, 3)})
    out = torch.zeros(5, 3, requires_grad=True)
    address = out.data_ptr()
    (request,) = requests(plan, found, dict.fromkeys(leaves, out))
    assert read_tensors(store, [request])[0] is out
    assert out.data_ptr() == address
    assert torch.equal(out, next(iter(leaves.values())))
    with pytest.raises(InvalidArgument, match="float32"):
        read_tensors(store, requests(plan, found, dict.fromkeys(leaves, torch.zeros(3, 5))))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_of_a_tensor_is_found_where_it_is_used(data):
    """A bit-flipped checkpoint is refused by name: the digest is checked on the bytes that are used."""
    store = MemoryStore()
    plan, found, leaves = written(store, {"a": torch.arange(9.0), "b": torch.arange(5)})
    name = f"{DIRECTORY}/{plan.name}"
    flipped = bytearray(store.read(name))
    at = data.draw(st.integers(plan.tensors[0].start, len(flipped) - 1))
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    store.write(name, [flipped], size_bytes=len(flipped))
    for placed, request in zip(plan.tensors, requests(plan, found), strict=True):
        if placed.start <= at < placed.stop:
            with pytest.raises(CheckpointDamaged) as caught:
                read_tensors(store, [request])
            assert caught.value.expected == request.digest
            assert placed.path in caught.value.where
        else:
            assert torch.equal(read_tensors(store, [request])[0], leaves[placed.path])


def test_a_truncated_or_missing_file_is_torn():
    store = MemoryStore()
    plan, found, _ = written(store, {"a": torch.arange(9.0)})
    name = f"{DIRECTORY}/{plan.name}"
    store.write(name, [store.read(name)[:-1]], size_bytes=plan.size_bytes - 1)
    with pytest.raises(CheckpointTorn, match=f"found {plan.size_bytes - 1} bytes"):
        read_tensors(store, requests(plan, found))
    store.delete(name)
    with pytest.raises(CheckpointTorn, match="no file"):
        read_tensors(store, requests(plan, found))


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"shape": (1 << 40, 1 << 40), "stop": 1 << 82}, CheckpointTorn),
        ({"shape": (1 << 40, 1 << 40)}, CheckpointHostile),
        ({"shape": (-3, -3)}, CheckpointHostile),
        ({"shape": (1,) * 65}, CheckpointHostile),
        ({"start": -36, "stop": 0}, CheckpointHostile),
        ({"dtype": "object"}, CheckpointHostile),
        ({"stored": "F64"}, CheckpointHostile),
    ],
)
def test_an_absurd_request_is_refused_before_memory_is_allocated(changed, error, monkeypatch):
    """U05: sizes are checked against dtype, shape and file before anything is allocated."""
    store = MemoryStore()
    plan, found, _ = written(store, {"a": torch.arange(9.0)})
    (placed,) = plan.tensors
    given = {
        "start": 0, "stop": placed.stop - placed.start, "dtype": "float32", "stored": "F32", "shape": (9,),
        "digest": found.parts[0].digest,
    }  # fmt: skip
    monkeypatch.setattr(torch, "empty", lambda *a, **k: pytest.fail("memory was allocated"))
    with pytest.raises(error):
        read_tensors(store, [ReadRequest(f"{DIRECTORY}/{plan.name}", **{**given, **changed})])


@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError()])
def test_memory_that_cannot_be_had_is_a_named_error(error, monkeypatch):
    """U05: a size that agrees with dtype, shape and file, but exceeds the memory of any machine."""
    store = MemoryStore()
    plan, found, leaves = written(store, {"a": torch.arange(9.0)})

    def full(*_, **__):
        raise error

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(CheckpointHostile) as caught:
        read_tensors(store, requests(plan, found))
    assert next(iter(leaves)) in caught.value.where
    assert caught.value.found == "36 bytes to load"
    assert caught.value.fix


class MemoryStoreLike:
    def __init__(self):
        self.inner = MemoryStore()

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_more_than_the_machine_has_is_refused_before_any_of_it_is_touched(monkeypatch):
    """U05: if memory is overcommitted, the allocator does not refuse, and the process would be killed."""

    class Huge(MemoryStoreLike):
        def size(self, name):
            return 1 << 61

    monkeypatch.setattr(torch, "empty", lambda *a, **k: pytest.fail("memory was allocated"))
    request = ReadRequest("a/b", 8, 8 + (1 << 60), "uint8", "U8", (1 << 60,), "xxh3:" + "0" * 32, "w")
    with pytest.raises(CheckpointHostile, match="memory here, found 1152921504606846976 bytes"):
        read_tensors(Huge(), [request])


def test_a_shape_that_overflows_without_an_element_is_a_named_error():
    """U05: its range is empty, so checks against the file and the memory do not reject it."""
    store = MemoryStore()
    plan, _, _ = written(store, {"a": torch.arange(9.0)})
    name = f"{DIRECTORY}/{plan.name}"
    request = ReadRequest(name, 8, 8, "uint8", "U8", (1 << 62, 1 << 62, 1 << 62, 0), "xxh3:" + "0" * 32)
    with pytest.raises(CheckpointHostile):
        read_tensors(store, [request])


# --- the writer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed", [{}, {"w": torch.zeros(4)}, {"w": torch.zeros(3, dtype=torch.float64)}, {"w": torch.zeros(3, 1)}]
)
def test_a_state_that_is_not_as_planned_fails_the_save_and_leaves_nothing(changed):
    """C15: if a leaf differs from the plan, the error names it and the file is deleted."""
    described, leaves = describe({"w": torch.zeros(3)}, "model")
    (plan,) = plan_save([{"model": described}], step=1).files
    store = MemoryStore()
    (path,) = leaves
    with pytest.raises(SaveFailed, match="plan the save again") as caught:
        write_file(plan, dict.fromkeys(leaves, changed["w"]) if changed else {}, store=store, directory=DIRECTORY)
    assert path in caught.value.where
    assert store.list() == []


def test_saving_leaves_the_tensors_alone():
    tensors = {"w": torch.randn(4, 5).t(), "grad": torch.randn(3, requires_grad=True)}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    versions = {name: tensor._version for name, tensor in tensors.items()}
    written(MemoryStore(), tensors)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    assert {name: tensor._version for name, tensor in tensors.items()} == versions
    assert tensors["grad"].requires_grad
