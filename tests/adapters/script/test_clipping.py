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
