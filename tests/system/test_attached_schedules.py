"""What the ranks of attached objects call, which are wrapped by DDP: the same on each, and no rank goes on where one fails."""

import logging
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import trainfold
from trainfold import metrics as M
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.requests.sources import Asked
from trainfold.backends.ranks.in_process import InjectedFailure, RankFault, thread_outcomes
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import HalfRestored, RankFailed, SaveFailedElsewhere
from trainfold.core.layout.data_parallel import Replicas
from trainfold.retention import decide_best, make_best_record, save_best

STRIDE = 1 if os.environ.get("HYPOTHESIS_PROFILE") in ("laws", "soak") else 29
FIRST, LAST = 2, 6


@pytest.fixture(scope="module", autouse=True)
def _group_of_one():
    """DDP needs a process group; the ranks are threads, so the group has one process, and each thread its own wrapper."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Loop:
    """A loop as users write it, on one rank of a world of threads."""

    def __init__(self, world, store, mode="sync"):
        torch.manual_seed(0)
        self.world, self.asked = world, Asked()
        self.model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
        for each in self.model.parameters():
            torch.nn.init.ones_(each)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        data = TensorDataset(torch.arange(48.0).reshape(24, 2))
        self.live = trainfold.attach(
            self.model, self.optimizer, loader=DataLoader(data, batch_size=3), parallelism=Replicas(world),
            extra={"noise": torch.Generator().manual_seed(world.rank)}, sharing={"noise": "each_rank"},
        )  # fmt: skip
        self.manager = CheckpointManager(store, every=2, mode=mode, keep_last=2, requests=self.asked, collectives=world)

    def train(self, until):
        for (x,) in self.live.batches(steps=until):
            self.model(x).square().mean().backward()
            self.live.check(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.live.advance()
            self.manager.step(self.live)
            if self.manager.should_stop:
                break

    def evaluate(self):
        batches = [torch.ones(2, 2)] * (self.world.rank + 1)
        return trainfold.evaluate(
            lambda x: {"loss": (self.model(x).sum(), len(x))}, batches, {"loss": M.Ratio()},
            modules=self.model, collectives=self.world,
        )  # fmt: skip


def saves(world, store):
    loop = Loop(world, store)
    with loop.manager as manager:
        manager.restore(loop.live)
        loop.live.advance(samples=0)
        return manager.save(loop.live).step


def restores(world, store, *, in_place=False):
    loop = Loop(world, store)
    with loop.manager as manager:
        return manager.restore(loop.live, in_place=in_place).step


def restores_in_place(world, store):
    return restores(world, store, in_place=True)


class Shared:
    """A store that the ranks share."""

    is_shared = True

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)


def restores_shared_reads(world, store):
    return restores(world, Shared(store))


def evaluates(world, store):
    loop = Loop(world, store)
    with loop.manager as manager:
        manager.restore(loop.live)
        return loop.evaluate()["loss"]


def trains(world, store, mode="sync"):
    loop = Loop(world, store, mode)
    with loop.manager as manager:
        manager.restore(loop.live)
        loop.train(3)
        record = make_best_record(metric="loss", direction="min")
        record, won = decide_best(record, {"loss": 0.1 * world.rank}, step=3, collectives=world)
        manager.step(loop.live, is_best=won)
        manager.drain()
        save_best(store, record, collectives=world)
        if world.rank == 1:
            loop.asked.ask("save_and_stop")
        loop.train(LAST)
        manager.finish(loop.live)
        return loop.live.progress.step, manager.load_best(loop.live).step


def trains_with_saves_in_the_background(world, store):
    return trains(world, store, "async")


WORK = [
    saves,
    restores,
    restores_in_place,
    restores_shared_reads,
    evaluates,
    trains,
    trains_with_saves_in_the_background,
]


def first_run(ranks):
    """A run with a checkpoint of step 2."""
    store = MemoryStore()

    def work(world):
        loop = Loop(world, store)
        with loop.manager as manager:
            manager.restore(loop.live)
            loop.train(FIRST)

    assert [each.error for each in thread_outcomes(ranks, work)] == [None] * ranks
    return store


@pytest.mark.parametrize("work", WORK)
def test_a_rank_of_attached_objects_that_fails_at_any_call_ends_all_ranks_in_that_call(work, caplog):
    """C07, F37, P06, R09: the calls are the same on all ranks, and none is left waiting; each error names the rank, and the step as soon as there is one."""
    caplog.set_level(logging.CRITICAL)
    store = first_run(3)
    whole, *others = thread_outcomes(3, lambda world: work(world, store))
    assert whole.error is None
    assert [(each.value, each.schedule) for each in others] == [(whole.value, whole.schedule)] * 2
    store = first_run(2)
    calls = thread_outcomes(2, lambda world: work(world, store))[0].schedule
    doing = [call.doing for call in calls]
    chosen, always = doing.index("note the attempt to load"), doing.index("overwrite its objects")
    cases = [(index, victim) for index in range(len(calls)) for victim in (0, 1)]
    for index, victim in dict.fromkeys([*cases[WORK.index(work) :: STRIDE], (always, 0), (always, 1)]):
        store = first_run(2)
        outcomes = thread_outcomes(2, lambda world, store=store: work(world, store), fail_at=RankFault(victim, index))
        failed, survivor = outcomes[victim], outcomes[1 - victim]
        case = calls[index], victim, failed.error, survivor.error
        assert isinstance(failed.error, InjectedFailure | HalfRestored), case
        assert isinstance(survivor.error, RankFailed | SaveFailedElsewhere | HalfRestored), case
        assert survivor.error.rank == victim, case
        assert f"rank {victim}" in str(survivor.error), case
        is_ahead = calls[index].kind == "start_gather"  # what is sent ahead to the next boundary is not waited for
        for each in outcomes:
            assert sum(call.kind != "start_gather" for call in each.schedule[index + 1 :]) <= is_ahead, case
            was_sent = each is failed and is_ahead
            is_told = not (work is evaluates and index > doing.index("compare its loaders"))  # `evaluate` gets no step
            has_step = index >= chosen and is_told
            assert each.error.step is not None or was_sent or not has_step, case
        if work not in (restores, restores_in_place, restores_shared_reads, evaluates):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CheckpointPassedOver)  # what the save has written
                again = thread_outcomes(2, lambda world, store=store: restores(world, store))
            assert [each.error for each in again] == [None, None], case
            assert again[0].value == again[1].value in range(FIRST, LAST), case
