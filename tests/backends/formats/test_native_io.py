"""Native files: safetensors opens what the writer wrote; the reader trusts nothing and verifies what it reads."""

import contextlib
import itertools
import json
import struct

import pytest
import safetensors
import safetensors.torch
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfold.backends.formats.native.reader import ReadRequest, read_header, read_tensors
from trainfold.backends.formats.native.writer import write_file
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointHostile,
    CheckpointMissing,
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
            found.tensor_digests[t.path], t.path, None if outs is None else outs[t.path],
        )
        for t in plan.tensors
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
    assert dict(found.tensor_digests) == {path: leaf_digest(leaf) for path, leaf in leaves.items()}
    for request, back in zip(requests(plan, found), read_tensors(store, requests(plan, found)), strict=True):
        assert back.dtype == leaves[request.path].dtype
        assert back.shape == leaves[request.path].shape
        assert bytes(tensor_bytes(back)) == bytes(tensor_bytes(leaves[request.path]))


@settings(max_examples=40, deadline=None)
@given(tensors=states)
def test_safetensors_opens_what_was_written_bit_for_bit(tensors):
    """U01: any safetensors reader opens the files; our header reader returns the same values."""
    store = MemoryStore()
    plan, _, leaves = written(store, tensors)
    data = store.read(f"{DIRECTORY}/{plan.name}")
    theirs = safetensors.torch.load(data)
    header = read_header(store, f"{DIRECTORY}/{plan.name}")
    assert set(theirs) == set(header.tensors)
    assert header.size_bytes == len(data)
    by_span = {(entry.start, entry.stop, entry.dtype): name for name, entry in header.tensors.items()}
    for placed in plan.tensors:
        if placed.start == placed.stop:
            continue  # empty tensors share their span
        name = by_span[placed.start, placed.stop, placed.stored]
        assert bytes(tensor_bytes(theirs[name])) == bytes(tensor_bytes(leaves[placed.path]))
        assert header.tensors[name].shape == stored_shape(placed.dtype, placed.shape)
        assert tuple(theirs[name].shape) == header.tensors[name].shape


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
            assert caught.value.expected == found.tensor_digests[placed.path]
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
    with pytest.raises(CheckpointTorn):
        read_header(store, name)
    store.delete(name)
    with pytest.raises(CheckpointTorn, match="no file"):
        read_tensors(store, requests(plan, found))
    with pytest.raises(CheckpointMissing):
        read_header(store, name)


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
        "digest": found.tensor_digests[placed.path],
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


# --- untrusted headers -----------------------------------------------------------------------------------------------


def header_file(header, payload=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + payload


def entry(start, stop, shape=None, dtype="U8"):
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


HOSTILE = {
    "overlapping offsets": header_file({"a": entry(0, 4), "b": entry(2, 6)}, b"x" * 6),
    "a hole": header_file({"a": entry(0, 2), "b": entry(4, 6)}, b"x" * 6),
    "a first gap": header_file({"a": entry(1, 3)}, b"xxx"),
    "bytes of no tensor": header_file({"a": entry(0, 2)}, b"xxxx"),
    "duplicate keys": header_file(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
    ),
    "an unknown dtype": header_file({"a": entry(0, 4, dtype="PICKLE")}, b"xxxx"),
    "a size that is not its shape's": header_file({"a": entry(0, 4, shape=[2])}, b"xxxx"),
    "an absurd shape": header_file({"a": entry(0, 4, shape=[1 << 62, 1 << 62])}, b"xxxx"),
    "an overflowing shape": header_file({"a": entry(0, 0, shape=[1 << 32, 1 << 32, 0, 1 << 70])}),
    "a negative shape": header_file({"a": entry(0, 4, shape=[-2, -2])}, b"xxxx"),
    "a true shape": header_file({"a": entry(0, 1, shape=[True])}, b"x"),
    "a fraction": header_file({"a": entry(0, 1, shape=[1.0])}, b"x"),
    "many dimensions": header_file({"a": entry(0, 1, shape=[1] * 1000)}, b"x"),
    "backward offsets": header_file({"a": {"dtype": "U8", "shape": [0], "data_offsets": [4, 2]}}, b"xxxx"),
    "three offsets": header_file({"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0, 0]}}),
    "a missing field": header_file({"a": {"dtype": "U8", "shape": [0]}}),
    "a further field": header_file({"a": {**entry(0, 1), "file": "/etc/passwd"}}, b"x"),
    "depth": header_file(b"[" * 200_000),
    "deep objects": header_file(b'{"a":' * 100_000),
    "no object": header_file(b"[]"),
    "no JSON": header_file(b"\x80\x04pickle"),
    "NaN": header_file(b'{"a": NaN}'),
    "long digits": header_file(b'{"a": ' + b"9" * 10_000 + b"}"),
    "metadata that is not text": header_file({"__metadata__": {"a": 1}}),
    "a huge header": header_file(b"{}", length=1 << 63),
    "a header over the limit": header_file(b"{}", length=100_000_001),
    "a zip": b"PK\x03\x04\x00\x00\x08\x08" + bytes(100),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_header_is_refused_by_name(name):
    """U05: corrupt or hostile headers fail cleanly."""
    store = MemoryStore()
    store.write("step-1/a", [HOSTILE[name]], size_bytes=len(HOSTILE[name]))
    with pytest.raises(CheckpointHostile, match="step-1/a"):
        read_header(store, "step-1/a")


@pytest.mark.parametrize("size", [0, 7, 8, 50])
def test_a_file_that_ends_in_its_header_is_torn(size):
    store = MemoryStore()
    data = header_file({"a": entry(0, 4)}, b"xxxx")[:size]
    store.write("step-1/a", [data], size_bytes=len(data))
    with pytest.raises(CheckpointTorn):
        read_header(store, "step-1/a")


def test_a_header_that_says_more_than_the_file_has_allocates_nothing():
    """U05: the header length is compared with the limit and the file before it is used."""

    class Watching(MemoryStoreLike):
        def read(self, name, *, start=0, stop=None):
            assert stop is not None
            assert stop - start <= 8
            return self.inner.read(name, start=start, stop=stop)

    store = Watching()
    for length in (99_999_999, 1 << 40):
        data = header_file(b"{}", length=length)
        store.inner.write("a", [data], size_bytes=len(data))
        with pytest.raises((CheckpointTorn, CheckpointHostile)):
            read_header(store, "a")


class MemoryStoreLike:
    def __init__(self):
        self.inner = MemoryStore()

    def __getattr__(self, name):
        return getattr(self.inner, name)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_read_right_or_refused_by_name_and_never_worse(data):
    """U05: whatever bytes change, the outcome is a named error, or ranges inside the file that do not overlap."""
    good = header_file({"__metadata__": {"format": "pt"}, "a": entry(0, 4), "b": entry(4, 12, [2], "F32")}, b"x" * 12)
    changed = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.one_of(st.binary(max_size=3), st.sampled_from([b"9", b'"', b"{", b"}", b"]", b",", b"-", b"e9"]))
        )
    store = MemoryStore()
    store.write("a", [changed], size_bytes=len(changed))
    try:
        header = read_header(store, "a")
    except CheckpointError as error:
        assert error.fix  # noqa: PT017 - one of two right outcomes
        return
    spans = [(entry.start, entry.stop) for entry in header.tensors.values()]
    assert all(0 <= start <= stop <= len(changed) for start, stop in spans)
    assert all(one[1] == other[0] for one, other in itertools.pairwise(spans))
    with contextlib.suppress(safetensors.SafetensorError):  # the library may refuse more than we do
        assert set(dict(safetensors.deserialize(bytes(changed)))) == set(header.tensors)
