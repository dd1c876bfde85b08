"""If a save fails on any rank, ``except SaveFailed`` catches it on every rank."""

import pickle
import resource

import pytest
import torch

from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs import save as runs_save
from trainfold.backends.runs.api import load, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import NoSpace, NotWritable, RankFailed, SaveFailed, SaveFailedElsewhere
from trainfold.core.problem import problem_of
from trainfold.core.state.state import Progress, TrainState

FULL = NoSpace("disk", expected="room", found="none", fix="make room")


def state_at(step):
    return TrainState(trainer=Progress(step=step), extra={"w": torch.full((1000,), float(step))})


def full_once():
    """A store that is full at the first look."""
    store = MemoryStore()
    honest, left = store.reserve, [FULL]

    def reserve(size_bytes):
        if left:
            raise left.pop()
        honest(size_bytes)

    store.reserve = reserve
    return store


def heard(call):
    try:
        call()
    except SaveFailed as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("call", ["step", "save", "finish"])
def test_a_save_that_fails_on_one_rank_is_a_failed_save_on_every_rank(mode, call):
    """C07, D05: the docs of the manager promise `SaveFailed`, and do not say on which rank the disk was full."""
    store = full_once()

    def run(world):
        with CheckpointManager(store, mode=mode, every=1, collectives=world) as manager:

            def attempt():
                getattr(manager, call)(state_at(5))
                manager.drain()

            return heard(attempt), manager.save(state_at(6)).step

    assert run_threads(3, run) == [("NoSpace", 6), ("SaveFailedElsewhere", 6), ("SaveFailedElsewhere", 6)]
    assert load(store, like=state_at(0)).trainer.step == 6


def test_a_save_without_a_manager_tells_the_same():
    store = full_once()
    told = run_threads(2, lambda world: heard(lambda: save(state_at(1), store, collectives=world)))
    assert told == ["NoSpace", "SaveFailedElsewhere"]


@pytest.mark.parametrize("part", ["plan_save", "_read_in_order"])
def test_a_rank_that_fails_while_it_plans_fails_that_save_on_all_ranks_and_not_the_next(monkeypatch, part):
    """R09: the others waited until the deadline of the vote, and no rank could save again."""
    honest, left = getattr(runs_save, part), [MemoryError("none left")]

    def planned(*args, **keywords):
        rank = keywords["only"] if part == "plan_save" else args[3]
        if rank == 1 and left:
            raise left.pop()
        return honest(*args, **keywords)

    monkeypatch.setattr(runs_save, part, planned)
    store = MemoryStore()

    def run(world):
        with CheckpointManager(store, mode="async", collectives=world) as manager:
            try:
                manager.save(state_at(5))
                manager.drain()
            except (MemoryError, SaveFailedElsewhere) as error:
                return str(error), manager.save(state_at(6)).step

    (there, *steps), (here, *again) = run_threads(2, run)
    assert ("rank 1" in there, "MemoryError" in there, here, steps, again) == (True, True, "none left", [6], [6])
    assert load(store, like=state_at(0)).trainer.step == 6


def test_a_failure_elsewhere_is_both_of_a_save_and_of_a_rank_and_can_travel():
    error = SaveFailedElsewhere("rank 1", expected="every rank to succeed", found="no space", fix="make room")
    assert isinstance(error, RankFailed)
    assert problem_of(pickle.loads(pickle.dumps(error))) == problem_of(error)
    assert error.exit_code not in {kind.exit_code for kind in (SaveFailed, *SaveFailed.__subclasses__())} - {36}
    assert NotWritable.exit_code != error.exit_code


def save_where_files_are_short(collectives, folder):
    """Rank 0 may write no more than 64 KiB into a file; the state has a megabyte."""
    told = []
    big = TrainState(trainer=Progress(step=1), extra={"w": torch.zeros(1 << 18)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for mode in ("sync", "async"):
        with CheckpointManager(f"{folder}/{mode}", mode=mode, collectives=collectives) as manager:
            if collectives.rank == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
            told.append(heard(lambda manager=manager: (manager.save(big), manager.drain())))
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            told.append(manager.save(big).step)
    return told


def test_ranks_that_are_processes_hear_of_a_failed_save_as_of_one(processes, tmp_path):
    """C07: over gloo, with an error of the operating system."""
    found = processes.run(2, save_where_files_are_short, str(tmp_path), collectives={"timeout_secs": 60.0})
    assert found == [["NoSpace", 1] * 2, ["SaveFailedElsewhere", 1] * 2]
