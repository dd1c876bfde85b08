"""What the ranks call: the same on each of them, with words for what they do, and no rank waits for one that fails anywhere in it."""

import logging
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import trainfold
from trainfold import metrics as M
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.requests.sources import Asked
from trainfold.backends.ranks.in_process import InjectedFailure, RankFault, run_threads, thread_outcomes
from trainfold.backends.runs.api import load, save
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import RankFailed, RanksDisagree, SaveFailedElsewhere, TrainfoldError
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Progress, TrainState
from trainfold.retention import decide_best, load_best, make_best_record, save_best


def state_at(step):
    model = ModelState(Leaves({"weight": torch.full((3,), float(step))}), Leaves())
    w = Leaves({str(i): torch.full((9,), i) for i in range(3)})
    return TrainState(model=model, trainer=Progress(step=step), extra={"w": w})


def saves(world, store):
    return save(state_at(2), store, collectives=world).step


def loads(world, store):
    return load(store, like=state_at(0), collectives=world).trainer.step


def evaluates(world, store):
    batches = [torch.ones(2)] * world.rank  # rank 0 has none
    return trainfold.evaluate(
        lambda x: {"loss": (x.sum(), len(x))}, batches, {"loss": M.Ratio()}, collectives=world, steps=2
    )


def keeps_the_best(world, store):
    record = make_best_record(metric="loss", direction="min")
    record, won = decide_best(record, {"loss": 0.5}, step=1, collectives=world)
    save_best(store, record, collectives=world)
    return won, load_best(store, record, collectives=world).step


def manages(world, store, mode):
    asked = Asked()
    with CheckpointManager(store, every=4, mode=mode, requests=asked, collectives=world) as manager:
        manager.load(state_at(0))
        for step in range(2, 9):
            if step == 6 and world.rank == 1:
                asked.ask("save_and_stop")
            manager.step(state_at(step))
            if manager.should_stop:
                break
        manager.finish(state_at(step))
        manager.load_best(state_at(0))
    return step


def manages_in_the_background(world, store):
    return manages(world, store, "async")


def manages_in_the_call(world, store):
    return manages(world, store, "sync")


def compares_replicas(world, store):
    """The ranks find what differs on one of them from step 6 on; each comparison has ended before the next boundary."""
    with CheckpointManager(store, every=None, at_end=False, check_replicas=2, collectives=world) as manager:
        manager.load(state_at(0))
        for step in range(2, 12):
            state = state_at(step)
            state.extra["w"]["1"][3] += world.rank == 1 and step >= 6
            try:
                manager.step(state)
            except RanksDisagree as error:
                return str(error), error.step
            if (check := manager._saves._replicas._check) is not None:
                check.job.wait()
    return None


WORK = [saves, loads, evaluates, keeps_the_best, manages_in_the_call, manages_in_the_background, compares_replicas]


def run_with(first):
    """A store with a checkpoint of step 1 that is the best."""
    store = MemoryStore()
    save(first, store)
    record, _ = decide_best(make_best_record(metric="loss", direction="min"), {"loss": 0.1}, step=1)
    save_best(store, record)
    return store


@pytest.mark.parametrize("work", WORK)
def test_every_rank_makes_the_same_calls_and_each_call_says_what_comes_before_it(work):
    """C07, Q03, X10: so that the error of a rank that does not come can say what it did not do."""
    store = run_with(state_at(1))
    outcomes = thread_outcomes(3, lambda world: work(world, store))
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert outcomes[0].value == outcomes[1].value == outcomes[2].value
    assert outcomes[0].schedule == outcomes[1].schedule == outcomes[2].schedule
    assert outcomes[0].schedule, "there is something to compare"
    silent = [call for call in outcomes[0].schedule if not call.doing and call.kind not in ("all_sum", "duplicate")]
    assert silent == []


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_fails_at_any_call_leaves_no_rank_waiting_and_no_rank_with_a_result(work, victim, caplog):
    """C07, R09: at each call in turn, for saves, loads, evaluations and managers."""
    caplog.set_level(logging.CRITICAL)
    whole = run_with(state_at(1))
    for index in range(len(thread_outcomes(2, lambda world: work(world, whole))[0].schedule)):
        store = run_with(state_at(1))
        outcomes = thread_outcomes(2, lambda world, store=store: work(world, store), fail_at=RankFault(victim, index))
        failed, survivor = outcomes[victim], outcomes[1 - victim]
        assert isinstance(failed.error, InjectedFailure | TrainfoldError), (index, failed.error)
        assert isinstance(survivor.error, RankFailed | SaveFailedElsewhere), (index, survivor.error)
        assert f"rank {victim}" in str(survivor.error), (index, survivor.error)
        assert failed.schedule[: index + 1] == survivor.schedule[: index + 1] or len(survivor.schedule) <= index
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointPassedOver)  # what a save has written before a rank failed
            assert load(store, like=state_at(0)).trainer.step in range(1, 9)


@pytest.mark.parametrize("work", [saves, loads])
def test_the_error_of_a_rank_that_vanishes_says_what_it_did_not_do(work, caplog):
    """X10: a machine that has lost its power reports nothing. All calls at once, so that a deadline of seconds costs them once."""
    caplog.set_level(logging.CRITICAL)
    whole = run_with(state_at(1))
    schedule = thread_outcomes(2, lambda world: work(world, whole))[0].schedule
    stores = [run_with(state_at(1)) for _ in schedule]

    def vanish(index):
        fault = RankFault(1, index, silent=True)
        return thread_outcomes(2, lambda world: work(world, stores[index]), timeout_secs=2.0, fail_at=fault)[0].error

    with ThreadPoolExecutor(len(schedule)) as pool:
        errors = list(pool.map(vanish, range(len(schedule))))
    for call, error in zip(schedule, errors, strict=True):
        assert call.late(2.0) in str(error)
        assert "rank 1" in str(error)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_says_everything_once_and_each_rank_hears_its_events(mode, caplog):
    """R01: 64 ranks wrote each line 64 times. A rank's own listener may keep its own record."""
    caplog.set_level(logging.DEBUG, "trainfold")
    store, heard = MemoryStore(), {0: [], 1: [], 2: []}

    def main(world):
        with CheckpointManager(
            store, every=2, mode=mode, collectives=world, on_event=lambda event: heard[world.rank].append(event.kind)
        ) as manager:
            live = trainfold.attach(model := torch.nn.Linear(1, 1, bias=False))
            torch.nn.init.ones_(model.weight)
            manager.restore(live)
            for _ in range(4):
                live.advance(samples=3)
                manager.step(live)
            manager.finish(live)

    run_threads(3, main)
    texts = [record.getMessage() for record in caplog.records]
    assert sum("starts fresh" in text for text in texts) == 1, texts
    assert [sum(text.startswith("committed") and f"at step {step}:" in text for text in texts) for step in (2, 4)] == [
        1,
        1,
    ]
    assert heard[0] == heard[1] == heard[2]
    assert heard[0].count("committed") == 2


def test_ranks_that_do_different_things_are_told_what_each_does():
    """C07: the words are part of the call."""

    def work(world):
        return world.gather(1, doing="save" if world.rank else "load")

    with pytest.raises(TrainfoldError, match=r"rank 0 calls gather\(load\); rank 1 calls gather\(save\)"):
        run_threads(2, work)
