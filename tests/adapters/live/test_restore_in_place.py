"""A restore that reads straight into the memory of the live objects: the same bits, no second copy, and a loud end if a read fails."""

import gc
import tracemalloc
import weakref

import pytest
import torch
from kit.adapters.live.live_cases import differing
from kit.backends.runs_cases import damage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.formats.native import plan_reader, reader
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.runs.quarantine_file import quarantined
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import CheckpointDamaged, HalfRestored, InvalidArgument, RankFailed, ResumeRefused

WIDTH = 700  # a weight is 1.9 MB: it has several pieces


class Model(torch.nn.Module):
    """Two large weights, of which one lies in another order, and batch statistics."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width)
        self.second = torch.nn.Conv2d(32, 32, 3).to(memory_format=torch.channels_last)

    def forward(self, x):
        y = self.norm(torch.relu(self.first(x)))
        return y.sum() + self.second(x[0, :288].reshape(1, 32, 3, 3)).sum()


class Run:
    """A model with a moving average, and its optimizer."""

    def __init__(self, *, seed=0, steps=0, optimizer=torch.optim.AdamW, width=WIDTH):
        torch.manual_seed(seed)
        self.model, self.average = Model(width), Model(width)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.live = attach(self.model, self.optimizer, extra={"average": self.average})
        self.train(steps)

    def train(self, steps):
        for _ in range(steps):
            self.model(torch.randn(4, self.model.first.in_features)).square().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.live.advance(samples=4)
        return self

    def tensors(self):
        """Every parameter, buffer and slot of the run."""
        slots = [slot for each in self.optimizer.state.values() for slot in each.values()]
        return [*self.model.state_dict().values(), *self.average.state_dict().values(), *slots]


def saved(store=None, **options):
    store = MemoryStore() if store is None else store
    run = Run(steps=2, seed=3, **options)
    with CheckpointManager(store) as manager:
        manager.save(run.live)
    return store, run


class Allocations(TorchDispatchMode):
    """Counts the bytes of the tensors that torch makes inside, and the most that were there at once."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        given = {storage._cdata for storage in storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in storages(result):
            if storage._cdata not in given and storage.device.type == "cpu":
                self.count(storage.nbytes())
                weakref.finalize(storage, self.count, -storage.nbytes())
        return result

    def count(self, nbytes):
        self.now += nbytes
        self.peak = max(self.peak, self.now)


def storages(values):
    return [each.untyped_storage() for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_restore_in_place_gives_the_bits_of_the_default_one(optimizer, steps):
    """V12: for an optimizer that has its slots, and for one that has none yet."""
    store, source = saved(optimizer=optimizer)
    default, in_place = (Run(steps=steps, seed=1, optimizer=optimizer) for _ in range(2))
    addresses = [each.data_ptr() for each in in_place.tensors()]
    versions = [each._version for each in in_place.model.parameters()]
    for run, how in ((default, False), (in_place, True)):
        with CheckpointManager(store) as manager:
            assert manager.restore(run.live, in_place=how).step == 2
    assert differing(source.live.capture(), in_place.live.capture()) == []
    assert differing(default.live.capture(), in_place.live.capture()) == []
    assert [each.stride() for each in default.tensors()] == [each.stride() for each in in_place.tensors()]
    now = [each.data_ptr() for each in in_place.tensors()]
    assert now[: len(addresses)] == addresses
    written = [each._version for each in in_place.model.parameters()]
    assert all(after > before for before, after in zip(versions, written, strict=True)), "as any write of torch does"


def peak_of(run, store, *, components=None, **options):
    """The most bytes that a restore has beside the run at once: tensors, and what Python has."""
    with CheckpointManager(store, components=components) as manager:
        gc.collect()
        tracemalloc.start()
        try:
            with Allocations() as counted:
                manager.restore(run.live, **options)
            return counted.peak, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


def test_the_peak_of_both_ways_is_the_one_that_the_page_states(tmp_path):
    """V12: the default has a second copy of what is restored; reading in place has none, in whatever order a tensor lies."""
    store, source = saved(LocalStore(str(tmp_path / "run")))
    needed = sum(each.nbytes for each in source.tensors())
    run = Run(steps=1)
    default, of_python = peak_of(run, store)
    in_place, also_of_python = peak_of(run, store, in_place=True)
    assert needed <= default <= 1.02 * needed
    assert in_place <= 16_384, "tensors without dimensions, and generators"
    assert max(of_python, also_of_python) < 2**19, "manifests, plans and threads"
    weights, _ = peak_of(run, store, components=["model"], in_place=True)
    assert weights <= 16_384, "also weights alone, where an optimizer has no fp32 masters that are made of them"


def test_a_failed_read_in_place_ends_on_every_rank_is_not_saved_and_the_next_process_passes_over_the_checkpoint():
    """V12: one rank reads damaged bytes of a weight, which the default way would have found in time."""
    store, source = saved()
    before = source.live.capture().model.params["first.weight"].clone()
    with CheckpointManager(store) as manager:
        manager.restore(source.live)
        manager.save(source.train(1).live)
    (name,) = [name for name in store.list("step-00000003") if name.startswith("model")]
    damage(store, f"step-00000003/{name}")

    def work(world):
        run = Run(seed=1)
        options = {"collectives": world, "policy": {"streams": "adapt"}}
        with CheckpointManager(store, **options) as manager:
            with pytest.raises(HalfRestored, match=r"model.*expected xxh3:") as raised:
                manager.restore(run.live, in_place=True)
            assert "end this process" in raised.value.fix
            with pytest.raises(HalfRestored):
                run.live.capture()
        return isinstance(raised.value.__cause__, CheckpointDamaged)

    assert run_threads(2, work) == [True, True]
    run = Run(seed=2)
    with CheckpointManager(store) as manager, pytest.warns(CheckpointPassedOver):
        assert manager.restore(run.live, in_place=True).step == 2
    assert torch.equal(run.model.first.weight, before)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_read_that_fails_on_one_rank_is_raised_on_both_and_recorded(rank):
    """V12, X08: the rank that could read everything must not go on alone."""
    store, _ = saved()

    class Damaged:
        """The store as one rank sees it: with another byte in the weights, when they are read."""

        def __getattr__(self, name):
            return getattr(store, name)

        def read_into(self, name, buffer, *, start=0):
            store.read_into(name, buffer, start=start)
            if "/model" in name and len(buffer) > 4096:
                buffer[0] ^= 1

    def work(world):
        run = Run(seed=1)
        mine = Damaged() if world.rank == rank else store
        options = {"collectives": world, "policy": {"streams": "adapt"}}
        with CheckpointManager(mine, **options) as manager, pytest.raises(HalfRestored) as raised:
            manager.restore(run.live, in_place=True)
        return type(raised.value.__cause__)

    found = run_threads(2, work)
    assert found[rank] is CheckpointDamaged
    assert found[1 - rank] is RankFailed
    assert list(quarantined(store)) == ["step-00000002"]


def test_what_is_wrong_before_memory_is_overwritten_changes_nothing():
    """V12: a refusal, a file that is too short and a header are found before the first tensor is read in place."""
    store, _ = saved()
    run, other = Run(seed=1, steps=1), Run(seed=1, width=320)
    before, of_other = [each.clone() for each in run.tensors()], [each.clone() for each in other.tensors()]
    (name,) = [name for name in store.list("step-00000002") if name.startswith("model")]
    with CheckpointManager(store) as manager, pytest.raises(ResumeRefused):
        manager.restore(other.live, in_place=True)
    damage(store, f"step-00000002/{name}", at=20)  # in the header
    with CheckpointManager(store) as manager, pytest.raises(CheckpointDamaged, match="its header"):
        manager.restore(run.live, step=2, in_place=True)
    for tensors, olds in ((run.tensors(), before), (other.tensors(), of_other)):
        assert all(torch.equal(now, old) for now, old in zip(tensors, olds, strict=True))
    run.live.capture()


def test_the_argument_is_a_bool():
    store, _ = saved()
    with CheckpointManager(store) as manager, pytest.raises(InvalidArgument, match="in_place"):
        manager.restore(Run().live, in_place="yes")


def test_memory_that_bytes_cannot_be_read_into_gets_a_copy_of_one_tensor_at_a_time(tmp_path, monkeypatch):
    """V12: as on another device, where a tensor is read on the host and copied."""
    store, source = saved(LocalStore(str(tmp_path / "run")))
    run = Run(steps=1)
    for module in (plan_reader, reader):
        monkeypatch.setattr(module, "can_scatter", lambda _: False)
    in_place, _ = peak_of(run, store, in_place=True)
    assert differing(source.live.capture(), run.live.capture()) == []
    largest = max(each.nbytes for each in source.tensors())
    assert largest <= in_place <= largest + 16_384


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_restore_in_place_writes_the_memory_of_the_gpu():
    """V12: not run yet where no GPU is."""
    store, source = saved()
    run = Run(seed=1)
    model = run.model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    live = attach(model, optimizer, extra={"average": run.average.cuda()})
    addresses = [each.data_ptr() for each in model.parameters()]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with CheckpointManager(store, policy={"streams": "adapt"}) as manager:
        manager.restore(live, in_place=True)
    assert [each.data_ptr() for each in model.parameters()] == addresses
    for mine, theirs in zip(model.parameters(), source.model.parameters(), strict=True):
        assert torch.equal(mine.cpu(), theirs)
    slots = 2 * sum(each.nbytes for each in model.parameters())
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * slots + 2**20, "the new slots, and nothing twice"
