"""Small shards are read together: few reads, the same bits, and each digest is compared."""

from collections import Counter

import pytest
import torch

import trainfold
from trainfold.backends.formats.native import reader
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import CheckpointDamaged, CheckpointHostile
from trainfold.core.layout.shard import make_shard
from trainfold.core.state.state import Progress, TrainState
from trainfold.ranks import run_threads

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex128, torch.uint8)
RANKS, LEAVES = 4, 30


class Counted:
    """A store that counts reads of data."""

    def __init__(self, inner):
        self.inner, self.reads = inner, Counter()

    def __getattr__(self, verb):
        return getattr(self.inner, verb)

    def read_into(self, name, buffer, *, start=0):
        self.reads[name.rpartition("/")[2]] += 1
        self.inner.read_into(name, buffer, start=start)


def whole():
    """Tensors of each dtype, cut by rows and by columns; two that are not small, one without dimensions, and one without elements."""
    torch.manual_seed(0)
    small = {f"w{i}": (torch.randn(8, 12) * 5).to(DTYPES[i % len(DTYPES)]) for i in range(LEAVES)}
    return {**small, "large": torch.randn(64, 1000), "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}


def part_of(name, value, rank):
    if value.dim() < 2 or not value.numel():
        return value
    dim = 1 if name.endswith(("1", "3", "5")) else 0
    size = value.shape[dim] // RANKS
    starts = tuple(rank * size if axis == dim else 0 for axis in range(2))
    return make_shard(value.narrow(dim, rank * size, size).contiguous(), shape=tuple(value.shape), starts=starts)


@pytest.fixture(scope="module")
def store():
    store, values = MemoryStore(), whole()

    def save(world):
        parts = {name: part_of(name, value, world.rank) for name, value in values.items()}
        trainfold.save(TrainState(trainer=Progress(step=1), extra={"ema": parts}), store, collectives=world)

    run_threads(RANKS, save)
    return store


def loaded(store):
    like = {name: torch.zeros_like(value) for name, value in whole().items()}
    state = TrainState(trainer=Progress(), extra={"ema": like})
    return trainfold.load(store, like=state, policy={"world": "adapt"}, step=1).extra["ema"]


def test_many_small_shards_are_read_at_once(store):
    """V12: 64 ranks of 2,000 leaves were 107,000 reads of 50 bytes, each with a tensor of its own to read into."""
    counted = Counted(store)
    found = loaded(counted)
    for name, value in whole().items():
        assert torch.equal(
            found[name].view(torch.uint8) if value.dim() else found[name],
            value.view(torch.uint8) if value.dim() else value,
        ), name
    assert len(counted.reads) == RANKS
    assert max(counted.reads.values()) <= 4  # the small ones before and after the large part, and the large part


def test_each_small_shard_is_verified(store):
    """X03: the message names the leaf and the file."""
    harmed = store.after_crash(len(store.effects), keep_unsynced=True)
    (name,) = [each for each in harmed.list("step-00000001") if each.startswith("ema-00002")]
    data = bytearray(harmed.read(f"step-00000001/{name}"))
    data[-1] ^= 1
    harmed.delete(f"step-00000001/{name}")
    harmed.write(f"step-00000001/{name}", [bytes(data)], size_bytes=len(data))
    with pytest.raises(CheckpointDamaged, match=rf"{name} ema\['w"):
        loaded(harmed)


def test_small_tensors_that_do_not_fit_into_memory_together_are_refused(store, monkeypatch):
    """S16: before memory is allocated, naming the largest."""
    monkeypatch.setattr(reader.os, "sysconf", lambda _: 100)
    with pytest.raises(CheckpointHostile, match="10000 bytes of memory here"):
        loaded(store)
