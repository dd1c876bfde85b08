"""Rank 0 reads the run's files and manifests for all ranks, and each of the others checks that it sees the same."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.backends.runs_cases import saved_run, state_at

import trainfold
from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.backends.runs.api import load, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import RankFailed, RanksDisagree
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.format.manifest import SEAL_BYTES
from trainfold.core.layout.shard import make_shard


class Counted:
    """A store that notes what one rank reads of run files and manifests."""

    def __init__(self, inner):
        self.inner, self.read_bytes = inner, Counter()
        self.reads = Counter()

    def __getattr__(self, verb):
        return getattr(self.inner, verb)

    def read(self, name, *, start=0, stop=None):
        found = self.inner.read(name, start=start, stop=stop)
        self.reads[name.rpartition("/")[2]] += 1
        self.read_bytes[name.rpartition("/")[2]] += len(found)
        return found


def restored(world, store):
    torch.nn.init.ones_((model := torch.nn.Linear(2, 2)).weight)
    live = trainfold.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with trainfold.CheckpointManager(store, collectives=world) as manager:
        manager.restore(live)
        return live.progress.step


def trained(store):
    model = torch.nn.Linear(2, 2)
    live = trainfold.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with trainfold.CheckpointManager(store, every=1, keep_last=3) as manager:
        manager.restore(live)
        for _ in range(3):
            live.advance(samples=1)
            manager.step(live)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_run_and_the_manifest_are_read_once_whatever_the_number_of_ranks(world_size):
    """V05: with 64 ranks, 64 of them listed the run, and read the head of each manifest and the whole of the newest one."""
    store = saved_run(1, 2, 3)

    def reads(count):
        stores = [Counted(store) for _ in range(count)]
        run_threads(count, lambda world: load(stores[world.rank], like=state_at(0), collectives=world))
        return [(each.reads, each.read_bytes) for each in stores]

    ((alone, alone_bytes),) = reads(1)
    (first, first_bytes), *others = reads(world_size)
    for name in ("run.json", "manifest.json"):
        assert (first[name], first_bytes[name]) == (alone[name], alone_bytes[name]), name
        for other, other_bytes in others:
            assert (other[name], other_bytes[name]) == ((0, 0) if name == "run.json" else (1, SEAL_BYTES)), name


def test_the_ranks_of_a_manager_read_no_run_file_either():
    store = MemoryStore()
    trained(store)
    stores = [Counted(store) for _ in range(3)]
    assert run_threads(3, lambda world: restored(world, stores[world.rank])) == [3, 3, 3]
    assert [each.reads["run.json"] > 0 for each in stores] == [True, False, False]
    assert [each.reads["manifest.json"] for each in stores[1:]] == [1, 1]


RESTORE = [
    "name its components",
    "list the run",
    "look at the checkpoint",
    "plan the resume",
    "note the attempt to load",
    "read its part of the checkpoint",
    "note how the load ended",
    "check the state",
    "overwrite its objects",
]


def test_a_restore_is_nine_exchanges_where_nothing_may_refuse_and_no_rank_has_a_loader():
    """V05: each exchange costs all ranks a turn of the others' processor. There were fifteen."""
    store = MemoryStore()
    trained(store)
    outcomes = thread_outcomes(3, lambda world: restored(world, store))
    doing = [call.doing for call in outcomes[0].schedule]
    first, last = doing.index(RESTORE[0]), doing.index(RESTORE[-1])
    assert doing[first : last + 1] == RESTORE
    assert "compare its loaders" not in doing[last:]


# --- stale and other mounts -------------------------------------------------------------------------------------------


def versions_of_one_run(count):
    """Copies of one run, taken after each of its saves, the first of them empty."""
    store, copies = MemoryStore(), [MemoryStore()]
    for step in range(1, count + 1):
        save(state_at(step), store)
        copies.append(store.after_crash(len(store.effects), keep_unsynced=True))
    return copies


VERSIONS = versions_of_one_run(3)


@given(seen=st.lists(st.integers(0, 3), min_size=2, max_size=4))
def test_ranks_load_one_checkpoint_or_none_of_them_returns(seen):
    """V05: whichever ranks have stale mounts, also rank 0, which reads for all."""
    outcomes = thread_outcomes(
        len(seen), lambda world: load(VERSIONS[seen[world.rank]], like=state_at(0), collectives=world)
    )
    if len(set(seen)) == 1 and seen[0]:
        assert [fingerprint(each.value) for each in outcomes] == [fingerprint(state_at(seen[0]))] * len(seen)
    elif len(set(seen)) > 1:
        assert {type(each.error) for each in outcomes} == {RanksDisagree}
        (text,) = {str(each.error) for each in outcomes}
        odd = [rank for rank, version in enumerate(seen) if version != seen[0]]
        assert any(f"rank {rank}" in text for rank in odd), text
        assert "let every rank see the same files" in text
    else:
        assert all(each.error for each in outcomes)


def test_a_rank_that_sees_another_manifest_of_the_same_step_is_named():
    """V05: of a copy of the run that has gone on by itself, in files of the same names and sizes.

    It would be taken for a damaged checkpoint, and an older one loaded.
    """
    run = saved_run(1)
    copy = run.after_crash(len(run.effects), keep_unsynced=True)
    save(state_at(2), run)
    save(state_at(2, value=0.5), copy)
    stores = [run, copy, run]
    outcomes = thread_outcomes(3, lambda world: load(stores[world.rank], like=state_at(0), collectives=world))
    (text,) = {str(each.error) for each in outcomes}
    assert (
        "step-00000002: expected the same manifest on every rank, found on rank 1, another one than on rank 0" in text
    )


def test_a_rank_that_lacks_a_file_is_named_and_no_older_checkpoint_is_loaded():
    """V05: any unreadable rank raises everywhere."""

    def sharded(rank):
        part = make_shard(torch.full((2,), float(rank)), shape=(4,), starts=(2 * rank,))
        return lambda step: state_at(step, extra={"w": {"part": part}})

    store = MemoryStore()
    for step in (1, 2):
        run_threads(2, lambda world, step=step: save(sharded(world.rank)(step), store, collectives=world))
    stale = store.after_crash(len(store.effects), keep_unsynced=True)
    (index,) = [name for name in stale.list("step-00000002") if name.startswith("index")]
    stale.delete(f"step-00000002/{index}")
    stores = [store, stale]
    outcomes = thread_outcomes(
        2, lambda world: load(stores[world.rank], like=sharded(world.rank)(0), collectives=world)
    )
    (text,) = {str(each.error) for each in outcomes}
    assert "expected the same files on every rank, found rank 0: nothing is wrong; rank 1: CheckpointTorn" in text


class Unmounted:
    """A store that one rank cannot read."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, verb):
        return getattr(self.inner, verb)

    def read(self, name, *, start=0, stop=None):
        raise OSError(116, "stale file handle")


def test_a_rank_that_cannot_read_raises_on_all_ranks():
    store = saved_run(1, 2)
    stores = [store, Unmounted(store)]
    outcomes = thread_outcomes(2, lambda world: load(stores[world.rank], like=state_at(0), collectives=world))
    assert [type(each.error) for each in outcomes] == [RankFailed, OSError]
    assert "rank 1" in str(outcomes[0].error)


class Late:
    """A store in which another program saves just after rank 0 has listed the run."""

    def __init__(self, inner, then):
        self.inner, self.then = inner, then

    def __getattr__(self, verb):
        return getattr(self.inner, verb)

    def list(self, prefix=""):
        if not prefix and self.then:
            self.then.pop()()
        return self.inner.list(prefix)


def test_a_save_of_another_program_between_two_lists_is_no_disagreement():
    store = saved_run(1)
    late = [lambda: save(state_at(2), store)]
    outcomes = thread_outcomes(
        2,
        lambda world: (
            load(Late(store, late) if world.rank else store, like=state_at(0), collectives=world).trainer.step
        ),
    )
    assert [each.error for each in outcomes] == [None, None]
    assert [each.value for each in outcomes] == [2, 2]
