"""Ranks that die in a save, by SIGKILL and at any point: a committed checkpoint stays whole (W25, C07)."""

import os
import signal
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import thread_outcomes
from trainfold.backends.runs.api import load, save
from trainfold.backends.runs.scan import examine, read_inventory
from trainfold.backends.stores.faults import SimulatedCrash
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.format.file_names import MANIFEST
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.state.state import Progress, TrainState

pytestmark = pytest.mark.slow(1)

HASTY = {"timeout_secs": 30.0, "grace_secs": 0.5}


def state_at(step, value=0.0):
    """Four leaves, so that each of three ranks has one to write."""
    leaves = {str(i): torch.full((100,), float(step) + i + value) for i in range(4)}
    return TrainState(trainer=Progress(step=step), extra={"w": leaves})


def look(store, *states):
    """The state of the newest whole checkpoint, which must be one of these; skipped directories must have no manifest."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = load(store, like=state_at(0))
    assert all("CheckpointTorn" in str(each.message) and MANIFEST in str(each.message) for each in caught), caught
    assert fingerprint(found) in [fingerprint(state) for state in states]
    return found


# --- a model of a death: at any effect or collective call of a rank ---------------------------------------------------


class Life:
    """Counts the acts of a rank, and dies before or after a given one; a dead rank does nothing more."""

    def __init__(self, ends_at, *, done):
        self.left, self.done = ends_at, done

    def act(self, action, *arguments, **keywords):
        self.left -= 1
        if self.left < -1 or (self.left == -1 and not self.done):
            self.left = -2
            raise SimulatedCrash("this rank is dead")
        result = action(*arguments, **keywords)
        if self.left == -1:
            self.left = -2
            raise SimulatedCrash("this rank is dead, and has done what it did last")
        return result


def mortal(inner, life, names):
    """Something whose methods of these names are acts of a life; the others and the attributes are its own."""

    def method(name):
        return lambda self, *arguments, **keywords: life.act(getattr(inner, name), *arguments, **keywords)

    def plain(name):
        return property(lambda self: getattr(inner, name))

    others = [name for name in dir(inner) if not name.startswith("_") and name not in names]
    return type("Mortal", (), {**dict(zip(names, map(method, names), strict=True)), **{n: plain(n) for n in others}})()


ACTS = ("write", "read", "size", "list", "commit", "delete", "point", "reserve")


@given(
    world_size=st.integers(1, 3),
    victim=st.integers(0, 2),
    ends_at=st.integers(0, 30),
    done=st.booleans(),
    again=st.booleans(),
)
def test_a_rank_that_dies_at_any_point_of_a_save_leaves_the_old_checkpoint_or_the_new_one_whole(
    world_size, victim, ends_at, done, again
):
    """W25: also if a step is saved again; the leftovers are not a checkpoint, and the next save of the step removes them."""
    store, old, new = MemoryStore(), state_at(1), state_at(1, 0.5) if again else state_at(2)
    save(old, store)

    def work(world):
        life = Life(ends_at if world.rank == victim else 10**9, done=done)
        mine = mortal(world, life, ("gather", "broadcast"))
        return save(new, mortal(store, life, ACTS), collectives=mine)

    outcomes = thread_outcomes(world_size, work)
    assert all(outcome.error is None for outcome in outcomes) or any(
        isinstance(outcome.error, SimulatedCrash) for outcome in outcomes
    )
    found = look(store, old, new)
    if any(outcome.error is None for outcome in outcomes):
        assert fingerprint(found) == fingerprint(new), "a rank returned from the save as durable"
    save(new, store)
    look(store, new)
    inventory = read_inventory(store)
    for entry in inventory.entries:
        manifest = examine(store, inventory, entry.name).entry(entry.name).manifest
        assert {MANIFEST, *(file.name for file in manifest.files)} == set(store.list(entry.name))


def test_what_a_dead_committer_left_behind_goes_with_the_retention_of_a_later_step():
    """E04: no other rank may delete it, so the next manager does."""
    store = MemoryStore()
    save(state_at(1), store)

    def work(world):
        life = Life(0 if world.rank == 0 else 10**9, done=False)
        return save(state_at(2), mortal(store, life, ("commit", "delete")), collectives=world)

    thread_outcomes(3, work)
    assert store.list("step-00000002"), "the other ranks delete nothing"
    look(store, state_at(1))
    with CheckpointManager(store) as manager:
        manager.load(state_at(1), manager.should_load(state_at(1), step=1))
        manager.save(state_at(3))
    assert store.list("step-00000002") == []
    look(store, state_at(3))


# --- real processes, real SIGKILL -------------------------------------------------------------------------------------


class Deadly(LocalStore):
    """Kills this process at a point of a save."""

    def __init__(self, path, point):
        super().__init__(path)
        self._point = point

    def write(self, name, parts, *, size_bytes):
        super().write(name, parts, size_bytes=size_bytes)
        self._die_at("written")

    def commit(self, name, data, *, replaces=None):
        if name.endswith(MANIFEST):
            self._die_at("before the commit")
        super().commit(name, data, replaces=replaces)
        if name.endswith(MANIFEST):
            self._die_at("committed")

    def _die_at(self, point):
        if point == self._point:
            os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(collectives, folder, victim, point):
    save(state_at(1), folder, collectives=collectives)
    store = Deadly(folder, point) if collectives.rank == victim else folder
    save(state_at(2), store, collectives=collectives)


@pytest.mark.parametrize(
    ("world_size", "victim", "point", "survives"),
    [
        (2, 0, "committed", True),
        (3, 0, "committed", True),
        (3, 0, "before the commit", False),
        (2, 1, "written", False),
    ],
)
def test_ranks_that_outlive_a_killed_one_delete_no_file_of_a_committed_checkpoint(
    processes, tmp_path, world_size, victim, point, survives
):
    """W25: rank 0 is killed before its commit, or between it and the vote; or another rank is killed after its last byte."""
    run = tmp_path / "run"
    ended = processes.outcomes(world_size, save_and_die, str(run), victim, point, collectives=HASTY)
    assert [rank.code for rank in ended] == [-signal.SIGKILL if rank.rank == victim else 1 for rank in ended]
    assert {rank.error for rank in ended if rank.rank != victim} == {"SaveFailedElsewhere"}
    assert list((run / "step-00000002").iterdir()), (
        "a rank that gives no sign may still write, so its survivors delete nothing"
    )
    found = look(run, state_at(2) if survives else state_at(1))
    assert found.trainer.step == (2 if survives else 1)
    save(state_at(2), run)
    look(run, state_at(2))
    assert len(list((run / "step-00000002").iterdir())) == 2, "one file of the component, and the manifest"
