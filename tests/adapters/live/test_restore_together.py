"""A restore on several ranks: every rank has it or none has; what cannot be put back any more is reported, and is not saved."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainfold
from trainfold.adapters.components.optimizer import OptimizerPart
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import InjectedFailure, RankFault, run_threads, thread_outcomes
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import HalfRestored, RankFailed, RanksDisagree, RestoreRefused, TrainfoldError
from trainfold.core.format.fingerprint import fingerprint


class Own:
    """An object of a user, whose load may refuse."""

    def __init__(self, *, refuses=False):
        self.value, self.refuses = torch.zeros(2), refuses

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        if self.refuses and state["value"].any():
            raise ValueError("the table has another size here")
        self.value = state["value"].clone()


def make(*, refuses=False, width=3):
    torch.manual_seed(0)
    model = torch.nn.Linear(width, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return attach(model, sgd, extra={"own": Own(refuses=refuses)}), model, sgd


def trained():
    live, model, sgd = make()
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        sgd.step()
        sgd.zero_grad()
        live.advance(samples=1)
    live._objects.extra["own"].value.fill_(7.0)
    return live.capture()


def prints(live):
    """The fingerprints of everything but the random streams, which ranks that are threads share."""
    found = fingerprint(live.capture())
    return {name: value for name, value in found.items() if name != "rng"}


def saved():
    store, state = MemoryStore(), trained()
    with CheckpointManager(store) as manager:
        live, _, _ = make()
        live.restore(state)
        manager.save(live)
    return store, prints(live)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("how", ["its object refuses", "its model differs"])
def test_what_one_rank_cannot_take_no_rank_has(how, victim):
    """X08, V12: before, the ranks that could take the state had it, and one had not."""
    state = trained()

    def work(world):
        is_odd = world.rank == victim
        live, _, _ = make(refuses=is_odd and "refuses" in how, width=4 if is_odd and "differs" in how else 3)
        before = prints(live)
        kind = RestoreRefused if is_odd else RankFailed
        with pytest.raises(kind) as raised:
            live.restore(state, collectives=world)
        assert f"rank {victim}" in str(raised.value) or is_odd
        return prints(live) == before

    assert run_threads(3, work) == [True] * 3


@given(victim=st.integers(0, 1), index=st.integers(0, 14))
def test_a_rank_that_fails_anywhere_in_a_restore_leaves_the_others_as_they_were_or_says_that_they_are_not(
    victim, index
):
    """X08, V12: at every call of `restore`; a rank that returns has what every rank has."""
    store, whole = saved()
    lives = {}

    def work(world):
        lives[world.rank], _, _ = make()
        fresh[world.rank] = prints(lives[world.rank])
        with CheckpointManager(store, collectives=world, policy={"streams": "adapt"}) as manager:
            manager.restore(lives[world.rank])

    fresh = {}
    outcomes = thread_outcomes(2, work, fail_at=RankFault(victim, index))
    for rank, outcome in enumerate(outcomes):
        if rank not in lives:
            continue
        if outcome.error is None or not isinstance(outcome.error, HalfRestored):
            expected = [whole] if outcome.error is None else [fresh[rank], whole]
            try:
                assert prints(lives[rank]) in expected
            except HalfRestored:
                assert isinstance(outcome.error, InjectedFailure), "only the rank that died itself may leave it unsaid"
        else:
            with pytest.raises(HalfRestored):
                lives[rank].capture()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_restore_that_cannot_be_put_back_says_so_on_all_ranks_and_is_not_saved(world_size, monkeypatch):
    """V12: memory runs out while the slots are written, when the weights are overwritten already."""
    store, whole = saved()
    write, broken = OptimizerPart.write, []

    def writes(part, value):
        if part.optimizer in broken:
            raise torch.OutOfMemoryError("no more memory for slots")
        return write(part, value)

    monkeypatch.setattr(OptimizerPart, "write", writes)

    def work(world):
        live, _, sgd = make()
        if world.rank == 0:
            broken.append(sgd)
        with CheckpointManager(store, collectives=world, policy={"streams": "adapt"}) as manager:
            with pytest.raises(HalfRestored, match="no more memory for slots") as raised:
                manager.restore(live)
            assert "end this process" in raised.value.fix
            with pytest.raises(HalfRestored):
                live.capture()
        return live

    live = run_threads(world_size, work)[-1]
    broken.clear()
    live.restore(trained())
    assert prints(live)["model"] == whole["model"], "a whole restore makes it whole again"


def copy_of(store):
    other = MemoryStore()
    for folder in store.list():
        for name in store.list(folder) if folder.startswith("step-") else ():
            path = f"{folder}/{name}"
            other.commit(path, store.read(path))
    other.commit("run.json", store.read("run.json"))
    return other


def test_ranks_that_see_other_checkpoints_decide_nothing():
    """V05, P06: one rank sees a stale list, as on a disk of its own; nothing is loaded, and `should_load` says it too."""
    new, _ = saved()
    stale = copy_of(new)
    with CheckpointManager(new) as manager:
        live, _, _ = make()
        manager.restore(live)
        live.advance(samples=1)
        manager.save(live)

    def work(world):
        live, _, _ = make()
        before = prints(live)
        mine = stale if world.rank else new
        with CheckpointManager(mine, collectives=world, policy={"streams": "adapt"}) as manager:
            for call in (manager.should_load, manager.restore):
                with pytest.raises(RanksDisagree, match="the same manifest on every rank, found on rank 1"):
                    call(live)
        return prints(live) == before

    assert run_threads(2, work) == [True] * 2


@pytest.mark.parametrize("error", [OSError("the mount is gone"), RuntimeError("a bug while planning")])
def test_a_rank_that_cannot_list_the_run_is_named_on_every_rank(error):
    """V05, C07: the others do not wait for it."""
    store, _ = saved()

    class Unreadable:
        def __getattr__(self, name):
            return getattr(store, name)

        def list(self, *arguments):
            raise error

    def work(world):
        live, _, _ = make()
        load_run = Unreadable() if world.rank else store
        with pytest.raises((OSError, RuntimeError, TrainfoldError), match=str(error)):
            trainfold.load(load_run, like=live.capture(), collectives=world, policy={"streams": "adapt"})

    run_threads(2, work)
