"""Runs saved and loaded by several ranks, and beside writers and failing disks."""

import errno
import time

import attrs
import pytest
import torch
from kit.backends.runs_cases import damage, saved_run, state_at

from trainfold.backends.ranks.in_process import RankFault, run_threads, thread_outcomes
from trainfold.backends.ranks.wire import to_wire
from trainfold.backends.runs.api import load, save
from trainfold.backends.runs.load import CheckpointPassedOver, ResumeDrift
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import (
    RankFailed,
    RanksDisagree,
    ResumeRefused,
    SaveFailed,
    SaveFailedElsewhere,
)
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.format.manifest import encode_manifest
from trainfold.core.format.manifest_reader import decode_manifest
from trainfold.core.layout.shard import make_shard
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_any_world_saves_what_one_process_loads(world_size):
    """B06: replicated state is written once. C06: all ranks agree. N: written for N ranks from the first line."""
    store = MemoryStore()
    state = state_at(6, extra={"ema": {f"p{i}": torch.full((i + 1,), float(i)) for i in range(9)}})
    results = run_threads(world_size, lambda world: save(state, store, collectives=world))
    assert len({str(result) for result in results}) == 1
    assert fingerprint(load(store, like=state)) == fingerprint(state)
    loaded = run_threads(world_size + 1, lambda world: load(store, like=state, collectives=world))
    assert all(fingerprint(each) == fingerprint(state) for each in loaded)


class SlowToSize(MemoryStore):
    """A store on a network: it is asked for several sizes at once, or takes its time for each."""

    def __init__(self):
        super().__init__()
        self.asked = self.most = 0

    def size(self, name):
        self.asked += 1
        self.most = max(self.most, self.asked)
        time.sleep(2e-3)
        self.asked -= 1
        return super().size(name)


def test_the_rank_that_commits_asks_a_slow_store_for_the_sizes_of_files_side_by_side():
    """V05: 49,000 files of 16,384 ranks, one after the other at 20 ms, would take longer than the others wait for a commit."""
    store = SlowToSize()
    rows = 16
    run_threads(rows, lambda world: save(state_at(1, rng={"seed": world.rank}), store, collectives=world))
    assert store.most > 1
    assert fingerprint(
        load(store, like=state_at(0, rng={"seed": 0}), policy={"world": "adapt"}, reset={"rng": "other ranks"})
    )


def test_the_random_streams_of_each_rank_come_back_to_their_rank():
    """H02: RNG is per rank, never rank 0's copied. V05. H03: another world is not mis-sliced but refused."""
    store = MemoryStore()
    run_threads(3, lambda world: save(state_at(1, rng={"seed": world.rank}), store, collectives=world))
    loaded = run_threads(3, lambda world: load(store, like=state_at(0, rng={"seed": -1}), collectives=world))
    assert [each.rng["seed"] for each in loaded] == [0, 1, 2]
    with pytest.raises(ResumeRefused, match=r"streams.*of 3 ranks.*reset=\{\"rng\": \"why\"\}"):
        load(store, like=state_at(0, rng={"seed": -1}))


class Overheard:
    """Collectives that count the bytes of what their rank gives."""

    def __init__(self, world):
        self._world, self.given_bytes = world, 0

    def __getattr__(self, name):
        return getattr(self._world, name)

    def broadcast(self, value, *, source=0, **words):
        self.given_bytes += len(to_wire(value)) if source == self._world.rank else 0
        return self._world.broadcast(value, source=source, **words)

    def gather(self, value, **words):
        self.given_bytes += len(to_wire(value))
        return self._world.gather(value, **words)

    def all_sum(self, tensors):
        raise AssertionError("the values of tensors")


def test_a_save_sends_no_tensor_to_another_rank_and_a_rank_without_anything_to_write_takes_part():
    """C11, ADR-0028: there is no gathering save. Four ranks: two with rows of 1 MB, one with an empty part, all with a replica of 1 MB."""
    store, rows = MemoryStore(), (100, 156, 0, 0)
    whole, replica = torch.arange(256.0 * 1024).reshape(256, 1024), torch.arange(256.0 * 1024)

    def work(world):
        ranks, start = Overheard(world), sum(rows[: world.rank])
        mine = make_shard(whole[start : start + rows[world.rank]].clone(), shape=(256, 1024), starts=(start, 0))
        state = state_at(1, extra={"part": {"w": mine}, "ema": {"w": replica.clone()}})
        save(state, store, collectives=ranks)
        return ranks.given_bytes

    assert max(run_threads(4, work)) < 32_768
    found = load(
        store, like=state_at(0, extra={"part": {"w": torch.zeros(256, 1024)}, "ema": {"w": torch.zeros(256 * 1024)}})
    )
    assert torch.equal(found.extra["part"]["w"], whole)
    assert torch.equal(found.extra["ema"]["w"], replica)


def test_parts_of_ranks_may_have_other_sizes():
    """H02, V05: what one rank saved for itself may have more tensors than another's, and all ranks still decide the same.

    A position holds random streams if its loader has drawn from them, which the samples of one rank may do and those of another not.
    """
    store = MemoryStore()

    def streams(rank):
        return {"seed": rank, **{f"drawn{index}": torch.full((4,), rank) for index in range(rank)}}

    run_threads(3, lambda world: save(state_at(1, rng=streams(world.rank)), store, collectives=world))
    loaded = run_threads(3, lambda world: load(store, like=state_at(0, rng=streams(world.rank)), collectives=world).rng)
    assert [(rng["seed"], len(rng)) for rng in loaded] == [(0, 1), (1, 2), (2, 3)]


def test_shards_of_every_rank_make_one_tensor_and_load_into_any_other_cut():
    """N04: saved sharded, loadable unsharded on one process; and into another number of shards."""
    whole = torch.arange(7 * 3, dtype=torch.float32).reshape(7, 3)

    def cut(rank, size):
        rows = torch.arange(7).tensor_split(size)[rank]
        start = int(rows[0]) if len(rows) else 7
        return make_shard(whole[start : start + len(rows)], shape=(7, 3), starts=(start, 0))

    def sharded(rank, size):
        return state_at(2, extra={"table": {"w": cut(rank, size)}})

    store = MemoryStore()
    run_threads(3, lambda world: save(sharded(world.rank, 3), store, collectives=world))
    assert torch.equal(load(store, like=state_at(0, extra={"table": {"w": whole}})).extra["table"]["w"], whole)
    back = run_threads(2, lambda world: load(store, like=sharded(world.rank, 2), collectives=world))
    assert torch.equal(torch.cat([each.extra["table"]["w"].tensor for each in back]), whole)


def test_ranks_with_different_counters_are_told_so_before_anything_is_written():
    """C07: an error on one rank raises on all ranks; no rank is left in a barrier."""
    store = MemoryStore()
    outcomes = thread_outcomes(3, lambda world: save(state_at(1 + (world.rank == 2)), store, collectives=world))
    assert {type(outcome.error) for outcome in outcomes} <= {RanksDisagree, RankFailed}
    assert all(outcome.error for outcome in outcomes)
    assert store.list("") == [] or "manifest.json" not in store.list("step-00000001")


@pytest.mark.filterwarnings("ignore:CheckpointTorn.*expected manifest.json:Warning")
@pytest.mark.parametrize("call_index", range(4))
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_dies_anywhere_in_a_save_fails_it_everywhere(rank, call_index):
    """C07, W25: naming the rank; the earlier checkpoint is intact. What the others wrote may stay: only rank 0 deletes."""
    store = saved_run(1)
    outcomes = thread_outcomes(
        3, lambda world: save(state_at(2), store, collectives=world), fail_at=RankFault(rank, call_index)
    )
    if all(outcome.error is None for outcome in outcomes):
        pytest.fail("the fault was not reached")
    assert all(outcome.error is not None for outcome in outcomes)
    found = load(store, like=state_at(0))
    assert found.trainer.step in (1, 2)
    assert fingerprint(found) == fingerprint(state_at(found.trainer.step))


def test_ranks_that_see_different_checkpoints_disagree_aloud():
    """V05: all ranks must resolve the same checkpoint identity."""
    stores = [saved_run(1), saved_run(1, 2)]
    outcomes = thread_outcomes(2, lambda world: load(stores[world.rank], like=state_at(0), collectives=world))
    assert any(isinstance(outcome.error, RanksDisagree) for outcome in outcomes)
    assert all(outcome.error is not None for outcome in outcomes)


@pytest.mark.parametrize("is_saved", [True, False], ids=["gone", "new"])
def test_ranks_resume_as_one_process_does_if_only_one_side_has_a_key_that_rank_0_compares(is_saved):
    """V05: a loader that the run no longer has, and the length of its data: the plan of rank 0 names one more drift, and is the same plan."""
    store, has, lacks = MemoryStore(), state_at(1, contract={"dataset_size": 8}), state_at(1)
    saved, like = (has, lacks) if is_saved else (lacks, has)
    run_threads(2, lambda world: save(saved, store, collectives=world))
    policy = {"uncompared": "warn", "unproven": "warn"}
    with pytest.warns(ResumeDrift, match="dataset_size"):
        assert load(store, like=like, policy={**policy, "world": "adapt"}).trainer.step == 1
    with pytest.warns(ResumeDrift, match="dataset_size"):
        loaded = run_threads(2, lambda world: load(store, like=like, policy=policy, collectives=world))
    assert [each.trainer.step for each in loaded] == [1, 1]


def test_loading_leaves_the_state_that_it_is_like_alone():
    """V12: loading failure leaves the live state unchanged, never half-loaded."""
    store = saved_run(1)
    like = state_at(0)
    before = fingerprint(like)
    damage(store, "step-00000001/optimizer-00000-of-00001.safetensors")
    with pytest.raises(ResumeRefused):
        load(store, like=like)
    assert fingerprint(like) == before


def test_slots_may_differ_between_parameters_of_other_dimensions():
    """B10: Shampoo and SM3 keep one slot for each dimension, which is not corruption."""
    state = state_at(1)
    slots = Leaves(
        {"w": {"precond_0": torch.zeros(2), "precond_1": torch.zeros(3)}, "b": {"precond_0": torch.zeros(3)}}
    )
    state = state.evolve(optimizer=attrs.evolve(state.optimizer, slots=slots))
    store = MemoryStore()
    save(state, store)
    assert fingerprint(load(store, like=state_at(0))) == fingerprint(state)


def test_a_users_own_optimizer_may_make_its_slots_lazily():
    store = MemoryStore()
    save(state_at(1, optimizer={"count": 3, "momentum": {"w": torch.ones(2, 3)}}), store)
    found = load(store, like=state_at(0, optimizer={"count": 0, "momentum": {}}))
    assert torch.equal(found.optimizer["momentum"]["w"], torch.ones(2, 3))


def test_a_stateful_schedulers_state_is_a_value_and_not_a_contract():
    """B12: stateful schedulers round-trip fully; what moves with the run is not compared."""
    store = MemoryStore()
    save(state_at(1, scheduler={"last_epoch": 5, "base_lrs": [0.1]}), store)
    assert load(store, like=state_at(0, scheduler={"last_epoch": 0, "base_lrs": [0.1]})).scheduler["last_epoch"] == 5


def test_a_run_that_was_rewound_hundreds_of_times_is_still_in_order():
    """E16: the head of a manifest grows with each rewind and is read to its end."""
    store = saved_run(100, 110, 200)
    name = "step-00000110/manifest.json"
    old = decode_manifest(store.read(name), name)
    forks = tuple((timeline, 100) for timeline in range(700))
    data = encode_manifest(attrs.evolve(old, head=attrs.evolve(old.head, timeline=700, forks=forks)))
    assert data.index(b"\n") > 4096
    store.delete(name)
    store.write(name, [data], size_bytes=len(data))
    assert load(store, like=state_at(0)).trainer.step == 110


def test_every_manifest_that_cannot_be_read_is_told():
    """V03: a warning each, also for one whose first line is gone."""
    store = saved_run(100, 200)
    save(state_at(110), store)
    data = b"?" + store.read("step-00000110/manifest.json")[1:]
    store.delete("step-00000110/manifest.json")
    store.write("step-00000110/manifest.json", [data], size_bytes=len(data))
    with pytest.warns(CheckpointPassedOver, match="step-00000110"):
        load(store, like=state_at(0))


def test_what_is_kept_of_the_target_is_not_shared_with_it():
    """Purity: a donating step after the load must not write into the state that the load was like."""
    target = state_at(0)
    model = ModelState(Leaves({**target.model.params, "new": torch.zeros(2)}), Leaves())
    target = target.evolve(model=model)
    found = load(saved_run(1), like=target, policy={"missing": "adapt"})
    found.model.params["new"].add_(1)
    assert target.model.params["new"].sum() == 0


def test_tensors_come_back_in_the_memory_layout_of_the_target():
    """V13: kernels round differently with other strides, so strides are part of an exact resume."""
    filters = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    model = ModelState(Leaves({"w": filters, "b": torch.zeros(3)}), Leaves())
    slots = Leaves({"w": {"exp_avg": filters.clone(), "step": torch.tensor(1.0)}})
    state = state_at(1).evolve(model=model, optimizer=attrs.evolve(state_at(1).optimizer, slots=slots))
    store = MemoryStore()
    save(state, store)
    bare = state.evolve(optimizer=attrs.evolve(state.optimizer, slots=Leaves()))
    found = load(store, like=bare)
    assert fingerprint(found) == fingerprint(state)
    assert found.model.params["w"].stride() == filters.stride()
    assert found.optimizer.slots["w"]["exp_avg"].stride() == filters.stride()


def test_a_load_beside_a_writer_that_replaces_the_checkpoint_finds_the_new_one():
    """V03: what was listed may be gone a moment later, because retention runs after each commit; then it lists again."""

    class Busy(MemoryStore):
        moved = True

        def size(self, name):
            if name == "step-00000100/manifest.json" and not self.moved:
                self.moved = True
                save(state_at(200), self)
                self.delete("step-00000100/")
            return super().size(name)

    store = Busy()
    save(state_at(100), store)
    store.moved = False
    assert load(store, like=state_at(0)).trainer.step == 200


@pytest.mark.parametrize("effect", ["reserve", "finish", "commit"])
def test_a_disk_that_fails_one_rank_fails_the_save_on_all_and_they_can_go_on(effect):
    """C07: an error on one rank raises on all, naming the rank and what it said; the next save works."""
    fired = []

    def fault(_index, each):
        if each.kind == effect and not fired and armed:
            fired.append(each)
            return OSError(errno.EIO, "EIO")
        return None

    store, armed = MemoryStore(fault=fault), []
    save(state_at(1), store)
    armed.append(True)

    def train(world):
        with pytest.raises(SaveFailed) as caught:
            save(state_at(2), store, collectives=world)
        assert caught.value.fix
        return type(caught.value), save(state_at(3), store, collectives=world).step

    outcomes = run_threads(3, train)
    assert fired
    assert {kind for kind, _ in outcomes} == {SaveFailed, SaveFailedElsewhere}
    assert {step for _, step in outcomes} == {3}


def test_a_leaf_that_one_rank_cannot_save_is_told_to_all():
    outcomes = thread_outcomes(
        2, lambda world: save(state_at(1, extra={"x": object() if world.rank else 1}), MemoryStore(), collectives=world)
    )
    assert [type(outcome.error).__name__ for outcome in outcomes] == ["SaveFailedElsewhere", "UnsupportedLeaf"]
    assert "extra" in str(outcomes[0].error) or "x" in str(outcomes[0].error)


def test_a_locked_run_is_told_to_every_rank():
    store = MemoryStore()
    with store.lock():
        outcomes = thread_outcomes(3, lambda world: save(state_at(1), store, collectives=world))
    kinds = [type(outcome.error).__name__ for outcome in outcomes]
    assert kinds == ["RunLocked", "SaveFailedElsewhere", "SaveFailedElsewhere"]


def test_the_pointer_to_the_newest_moves_only_once_it_is_committed():
    """C02: the pointer never names a directory before its commit, also if a step is saved again."""
    store = MemoryStore()
    for step in (1, 2, 2):
        seen = len(store.effects)
        name = save(state_at(step), store).checkpoint
        told = [(effect.kind, effect.name) for effect in store.effects[seen:]]
        committed, pointed = told.index(("commit", f"{name}/manifest.json")), told.index(("point", "latest"))
        assert committed < told.index(("sync", name), committed) < pointed
        assert told.count(("point", "latest")) == 1
        assert store.point_target("latest") == name


def test_at_every_crash_the_pointer_names_a_whole_checkpoint():
    """C02: whatever prefix of the effects a crash leaves, the hint does not lead to a torn checkpoint."""
    store = saved_run(1, 2)
    for length in range(len(store.effects) + 1):
        for keep_unsynced in (False, True):
            disk = store.after_crash(length, keep_unsynced=keep_unsynced)
            target = disk.point_target("latest")
            assert target is None or disk.size(f"{target}/manifest.json") is not None, length


class LosesFiles:
    """A store that acknowledges a file, but has lost it, or its end, by the time of the commit."""

    def __init__(self, inner, lost, keep):
        self._inner, self._lost, self._keep = inner, lost, keep

    def __getattr__(self, verb):
        return getattr(self._inner, verb)

    def write(self, name, parts, *, size_bytes):
        self._inner.write(name, parts, size_bytes=size_bytes)
        if self._lost in name:
            kept = self._inner.read(name)[: self._keep]
            self._inner.delete(name)
            if self._keep:
                self._inner.write(name, [kept], size_bytes=len(kept))


@pytest.mark.parametrize("lost", ["model-", "optimizer-"])
@pytest.mark.parametrize("keep", [0, 8, -1], ids=["lost", "header length left", "last byte cut off"])
def test_a_data_file_that_is_lost_before_the_commit_fails_the_save(lost, keep):
    """C01: a committed checkpoint is whole; if a store loses a file, the save finds it before the commit and names it."""
    disk = saved_run(1)
    with pytest.raises(SaveFailed, match=f"step-00000002/{lost}") as caught:
        save(state_at(2), LosesFiles(disk, lost, keep))
    assert caught.value.fix
    assert "before the commit" in caught.value.expected
    assert disk.size("step-00000002/manifest.json") is None
    assert disk.point_target("latest") == "step-00000001"
    assert fingerprint(load(disk, like=state_at(0))) == fingerprint(state_at(1))
    assert save(state_at(2), disk).step == 2
