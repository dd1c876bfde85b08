"""W09: a limit of the gradient's norm that is another one at a resume is said at the first check; one that the loop changes as it goes is not."""

import math
import warnings

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.load import ResumeDrift
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import RanksDisagree, RestoreRefused
from trainfold.core.step.batch_ramp import batch_ramp
from trainfold.ranks import Replicas, run_threads


def train(store, limits, *, policy=None, mode="sync", **how):
    """A part of a run with one step for each limit, and each warning with the number of its step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer, parallelism=how.pop("parallelism", None))
    told = []
    with CheckpointManager(store, every=None, policy=policy, mode=mode, **how) as manager:
        manager.restore(live)
        for limit in limits:
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                live.check(loss.detach(), clip_norm=limit)
            told += [(live.progress.step, str(each.message)) for each in caught]
            optimizer.step()
            live.advance(samples=1)
        manager.save(live)
    return told


KEY = "live.check.clip_norm"
LIMITS = st.sampled_from([None, 0.5, 1.0, math.inf])


def expected(parts):
    """The steps at which something is said: where a part begins with another limit than the one that two checks at least had before, and all."""
    kept, step, found = [], 0, []
    for part in parts:
        if part and len(kept) > 1 and len(set(kept)) == 1 and part[0] != kept[0]:
            found.append(step)
            kept = []  # it was said; from here on the run has this limit
        kept += part
        step += len(part)
    return found


@settings(max_examples=6)
@given(parts=st.lists(st.lists(LIMITS, max_size=3), min_size=1, max_size=4), mode=st.sampled_from(["sync", "async"]))
@example(parts=[[1.0], [1.0], [0.5, 0.5], [], [0.5], [1.0]], mode="sync")
@example(parts=[[None, None], [1.0]], mode="async")
@example(parts=[[1.0], [0.5], [math.inf], [math.inf]], mode="sync")  # a schedule that is killed after each step
@example(parts=[[1.0, 0.5], [0.25]], mode="sync")
def test_a_limit_that_a_resume_changes_is_said_once(parts, mode):
    """N02: whatever the parts of a run check, in both modes of a save."""
    store = MemoryStore()
    told = [each for part in parts for each in train(store, part, mode=mode)]
    assert [step for step, _ in told] == expected(parts)


def test_the_text_has_both_limits_and_a_policy_accepts_or_refuses_the_change():
    store = MemoryStore()
    train(store, [1.0, 1.0])
    with pytest.raises(RestoreRefused, match=r"clip_norm"):
        train(store, [0.5], policy={"settings": "refuse"})
    assert train(store, [0.5, 0.5], policy={"contract:live.check.clip_norm": "adapt"}) == []
    ((step, text),) = train(store, [1.0])
    assert step == 4
    assert "clip_norm: saved 0.5, wanted 1.0" in text
    assert "step 4" in text
    assert "'contract:live.check.clip_norm': 'adapt'" in text


def test_a_state_that_is_restored_in_memory_has_its_limit_again():
    model = torch.nn.Linear(2, 1)
    live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def check(limit):
        model(torch.ones(1, 2)).sum().backward()
        live.check(1.0, clip_norm=limit)
        live.advance(samples=1)

    before = live.capture()
    check(1.0)
    first = live.capture()
    check(2.0)
    assert live.capture().contract[KEY] == "live"
    live.restore(first)
    assert live.capture().contract[KEY] == [1.0]  # of one check
    live.restore(before, components=["model"])  # not the optimizer
    assert live.capture().contract[KEY] == [1.0]
    live.restore(before)
    assert KEY not in live.capture().contract
    check(3.0)
    check(3.0)
    assert live.capture().contract[KEY] == 3.0


def test_the_ranks_of_a_run_have_one_limit():
    """R07: a rank that clips by another number is named at the first save; one that all have changed is said."""
    store = MemoryStore()

    def run(ranks, limits):
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), parallelism=Replicas(ranks))
        with CheckpointManager(store, every=None, collectives=ranks) as manager:
            manager.restore(live)
            model(torch.ones(1, 2)).sum().backward()
            for _ in range(2):
                live.check(1.0, clip_norm=limits[ranks.rank])
            live.advance(samples=1)
            manager.save(live)

    def others(ranks):
        with pytest.raises(RanksDisagree) as caught:
            run(ranks, [1.0, 2.0])
        return str(caught.value)

    for text in run_threads(2, others):
        assert "contract['live.check.clip_norm']" in text
        assert "rank 1: 2.0" in text
    run_threads(2, lambda ranks: run(ranks, [1.0, 1.0]))
    with pytest.warns(ResumeDrift, match=r"clip_norm: saved 1\.0, wanted 2\.0"):
        run_threads(2, lambda ranks: run(ranks, [2.0, 2.0]))


@pytest.mark.parametrize(
    ("first", "then", "says"), [(4, None, True), (4, 8, False), (None, 4, True), (None, None, False)]
)
def test_a_weight_that_a_loop_passed_and_passes_no_more_is_said(first, then, says):
    """A06, N02: the gradients of sums are not divided any more, or those of means are."""
    store = MemoryStore()

    def train_with(weight):
        model = torch.nn.Linear(2, 1)
        live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with CheckpointManager(store, every=None) as manager:
            manager.restore(live)
            for _ in range(2):
                model(torch.ones(4, 2)).sum().backward()
                live.check(1.0, weight=weight)
            live.advance(samples=4)
            manager.save(live)

    train_with(first)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_with(then)
    said = [str(each.message) for each in caught if issubclass(each.category, ResumeDrift)]
    assert len(said) == says
    assert not says or f"live.check.weight: saved {first is not None}, wanted {then is not None}" in said[0]


@pytest.mark.parametrize(
    ("ramp", "ranks", "says"), [({0: 8, 2: 16}, 1, False), ({0: 8, 2: 16}, 2, False), ({0: 8, 4: 16}, 1, True)]
)
def test_another_ramp_of_the_batch_is_said_on_any_number_of_ranks(ramp, ranks, says):
    """A12: `make_step` refuses it; a loop passes its schedule only where it begins a microbatch."""
    store = MemoryStore()

    def loop(world, per_step):
        model = torch.nn.Linear(2, 1)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.ones_(model.bias)
        parallelism = Replicas(world)
        live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), parallelism=parallelism)
        schedule = batch_ramp(per_step, per_microbatch=4, world_size=world.world_size)
        with CheckpointManager(store, every=None, collectives=world) as manager:
            manager.restore(live)
            for _ in range(schedule.at(live.progress.step)):
                with live.microbatch(of=schedule):
                    model(torch.ones(4, 2)).sum().backward()
            live.advance(samples=4)
            manager.save(live)

    run_threads(1, lambda world: loop(world, {0: 8, 2: 16}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_threads(ranks, lambda world: loop(world, ramp))
    said = [str(each.message) for each in caught if issubclass(each.category, ResumeDrift)]
    assert len(said) == says
    assert not says or "live.microbatch.of: saved {'0': 2, '2': 4}, wanted {'0': 2, '4': 4}" in said[0]
