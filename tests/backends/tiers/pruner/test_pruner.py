"""The pruner counts checkpoints that are whole now, even if they were different when they were saved."""

import pytest
import torch

from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.stores.memory import MemoryStore
from trainfold.backends.tiers import pruner as retention
from trainfold.core.state.state import Progress, TrainState


def state_at(step):
    return TrainState(trainer=Progress(step=step), extra={"w": torch.full((40,), float(step))})


def steps_left(store):
    return [int(name[5:]) for name in store.list() if name.startswith("step-")]


def data_file(store, step):
    return next(f"step-{step:08}/{file}" for file in store.list(f"step-{step:08}") if file.startswith("w-"))


def lose(store, name):
    store.delete(name)


def cut(store, name):
    short = store.read(name)[:-1]
    store.delete(name)
    store.write(name, [short], size_bytes=len(short))


@pytest.mark.parametrize("harm", [lose, cut])
@pytest.mark.parametrize("seen", [0, 1, 2])
def test_a_checkpoint_that_lost_bytes_after_it_was_counted_is_not_counted_again(harm, seen):
    """E01, E05: another tool purges the scratch disk: ``keep_last=3`` leaves three that can be loaded."""
    store = MemoryStore()
    with CheckpointManager(store, keep_last=3) as manager:
        for step in range(1, 4 + seen):
            manager.save(state_at(step))
        harm(store, data_file(store, 2 + seen))
        manager.save(state_at(4 + seen))
        assert steps_left(store) == [1 + seen, 2 + seen, 3 + seen, 4 + seen]
        able = [step for step in steps_left(store) if manager.should_load(state_at(0), step=step)]
        assert able == [1 + seen, 3 + seen, 4 + seen]


def test_a_step_that_is_saved_again_is_counted_as_it_is_now():
    """E01: its files have other names, and the current manifest says how many there are."""
    store = MemoryStore()
    with CheckpointManager(store, keep_last=2) as manager:
        for step in (1, 2, 3, 3, 4, 4, 4, 5):
            manager.save(state_at(step))
    assert steps_left(store) == [4, 5]


class Asked:
    """Notes which whole manifests are read and which sizes are asked for."""

    def __init__(self):
        self.inner, self.manifests, self.sizes = MemoryStore(), [], []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def read(self, name, *, start=0, stop=None):
        if name.endswith("/manifest.json") and stop == self.inner.size(name):
            self.manifests.append(name)
        return self.inner.read(name, start=start, stop=stop)

    def size(self, name):
        self.sizes.append(name)
        return self.inner.size(name)


def test_a_manifest_is_read_once_however_many_saves_follow_and_not_at_all_by_the_manager_that_wrote_it():
    """E01: on rank 0 that took a fifth of the processor time of a save: both readers accept a manifest before it is committed."""
    store = Asked()
    with CheckpointManager(store, keep_last=9) as manager:
        for step in range(1, 4):
            manager.save(state_at(step))
    assert store.manifests == []
    with CheckpointManager(store, keep_last=9) as manager:
        manager.load(state_at(0))
        store.manifests.clear()
        for step in range(4, 8):
            manager.save(state_at(step))
    assert sorted(store.manifests) == [f"step-0000000{step}/manifest.json" for step in (1, 2, 3)]


def test_a_save_that_keeps_everything_proves_no_earlier_checkpoint():
    """E01: each save read the manifest before it and asked for the size of every file of the run. What a kill has left goes all the same."""
    store = Asked()
    with CheckpointManager(store) as manager:
        for step in range(2, 8):
            manager.save(state_at(step))
        store.write("step-00000001/w-00000-of-00001.safetensors", [b"torn"], size_bytes=4)
        store.manifests.clear(), store.sizes.clear()
        manager.save(state_at(8))
    assert store.manifests == []
    assert [name for name in store.sizes if name.endswith(".safetensors") and "00008/" not in name] == []
    assert steps_left(store) == [2, 3, 4, 5, 6, 7, 8]


def test_of_a_checkpoint_of_very_many_files_the_names_are_listed(monkeypatch):
    """18, 3.3: the sizes of thousands of files would be as many requests at each save. A file that is gone is still noticed."""
    monkeypatch.setattr(retention, "_MOST_SIZES", 1)
    store = Asked()
    with CheckpointManager(store, keep_last=3) as manager:
        for step in range(1, 6):
            manager.save(state_at(step))
        store.sizes.clear()
        manager.save(state_at(6))
        assert {name.partition("/")[0] for name in store.sizes if name.endswith(".safetensors")} <= {
            "step-00000005",
            "step-00000006",
        }
        assert steps_left(store) == [4, 5, 6]
        lose(store, data_file(store, 5))
        manager.save(state_at(7))
        assert steps_left(store) == [4, 5, 6, 7]
