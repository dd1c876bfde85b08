"""Retention, closing, and saves by value through a manager."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.adapters.manager.manager_cases import Job, steps_of
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.disabled import DisabledManager
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.api import load, plan, save
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import (
    InvalidArgument,
    InvalidState,
    RunLocked,
    UnsupportedLeaf,
)
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.resume.resume_plan import ResumePlan
from trainfold.core.save.retention import Saved, keep_every, plan_retention
from trainfold.core.save.retention import keep_last as keep_the_last
from trainfold.core.state.state import Progress, TrainState

saved_runs = st.lists(st.integers(0, 30), unique=True, min_size=1).map(lambda steps: [(f"s{s}", s) for s in steps])


@given(saved=saved_runs, keep_last=st.integers(1, 6), data=st.data())
def test_retention_keeps_its_budget_and_never_takes_the_newest_or_a_protected_one(saved, keep_last, data):
    """E01, E02, E06."""
    written = data.draw(st.sampled_from(saved))
    protected = set(data.draw(st.lists(st.sampled_from(saved)))) - {written}
    names = {name for name, _ in protected}
    found = [Saved(name, step) for name, step in saved]
    gone = plan_retention(found, policy=keep_the_last(keep_last), written=Saved(*written), protected=names).deleted
    assert written[0] not in gone
    assert not set(gone) & names
    steps = dict(saved)
    assert all(steps[name] < written[1] for name in gone)
    kept = [name for name, step in saved if step <= written[1] and name not in gone and name not in names]
    assert len(kept) == min(keep_last, len([n for n, s in saved if s <= written[1] and n not in names]))
    assert all(steps[name] < min(steps[k] for k in kept) for name in gone)


@pytest.mark.parametrize("keep_last", [0, None])
def test_zero_and_none_keep_everything(keep_last):
    """E01: the [:-0] trap."""
    saved = [Saved("a", 1), Saved("b", 2)]
    assert plan_retention(saved, policy=keep_the_last(keep_last), written=saved[-1]).deleted == ()
    store = MemoryStore()
    with CheckpointManager(store, every=1, keep_last=keep_last) as manager:
        Job(0).run(manager, 4)
    assert steps_of(store) == [1, 2, 3, 4]


def test_zero_keeps_everything_beside_another_rule_too():
    """E01: `0 for all` had no effect beside another rule, which then deleted the others."""
    store = MemoryStore()
    with CheckpointManager(store, every=1, keep_last=0, keep=keep_every(3)) as manager:
        Job(0).run(manager, 4)
    assert steps_of(store) == [1, 2, 3, 4]
    alone = MemoryStore()
    with CheckpointManager(alone, every=1, keep=keep_every(3)) as manager:
        Job(0).run(manager, 5)
    assert steps_of(alone) == [3, 5]


@pytest.mark.parametrize("keep_last", [1, 2])
def test_the_last_few_are_kept_and_those_that_are_not_whole_do_not_count(tmp_path, keep_last):
    """E01, E03: a torn directory neither counts nor protects, and is left alone."""
    store = LocalStore(tmp_path / "run")
    with CheckpointManager(store, every=2, keep_last=keep_last) as manager:
        job = Job(0)
        job.run(manager, 4)
        damaged = tmp_path / "run" / "step-00000004" / "manifest.json"
        damaged.write_bytes(damaged.read_bytes()[:-40])
        manager._saves._deletions._pruner._proved.clear()  # as after a restart
        job.run(manager, 10)
    whole = [step for step in steps_of(LocalStore(tmp_path / "run")) if step != 4]
    assert whole == [10, 8][:keep_last][::-1]
    assert damaged.exists()


class CannotDelete(MemoryStore):
    def delete(self, name):
        raise OSError(f"cannot delete {name}")


def test_a_deletion_that_fails_is_a_warning_and_not_a_failed_save(caplog):
    """E04."""
    store = CannotDelete()
    with CheckpointManager(store, every=1, keep_last=1) as manager:
        assert Job(0).run(manager, 3) == [1, 2, 3]
    assert "could not be deleted" in caplog.text


# --- its life --------------------------------------------------------------------------------------------------------


def test_a_second_manager_of_one_run_is_refused_until_the_first_is_closed(tmp_path):
    manager = CheckpointManager(tmp_path / "run")
    with pytest.raises(RunLocked, match=r"which is this one; close the manager"):
        CheckpointManager(tmp_path / "run")
    manager.close()
    manager.close()
    CheckpointManager(tmp_path / "run").close()


def test_managers_of_two_runs_do_not_interfere():
    """O03."""
    one, other = MemoryStore(), MemoryStore()
    with CheckpointManager(one, every=2, keep_last=1) as first, CheckpointManager(other, every=3) as second:
        jobs = Job(0), Job(1)
        jobs[0].run(first, 4)
        jobs[1].run(second, 6)
        jobs[0].run(first, 6)
    assert steps_of(one) == [6]
    assert steps_of(other) == [3, 6]


def test_a_closed_manager_says_so_and_does_not_hide_what_was_raised():
    """D07."""
    job = Job(0)
    with pytest.raises(KeyError, match="the loop"), CheckpointManager(MemoryStore()) as manager:
        raise KeyError("the loop failed")
    for call in (manager.step, manager.save, manager.restore):
        with pytest.raises(InvalidState, match="open manager"):
            call(job.live)


def test_a_state_can_be_saved_as_it_is():
    store = MemoryStore()
    with CheckpointManager(store, keep_last=1) as manager:
        for step in (1, 2):
            assert manager.save(TrainState(trainer=Progress(step=step))).step == step
    assert steps_of(store) == [2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "background"}, "mode='sync'"),
        ({"mode": "threads"}, "mode"),
        ({"every": 0}, "every"),
        ({"every": 2.5}, "every"),
        ({"keep_last": -1}, "keep_last"),
        ({"policy": {"shape": "adapt"}}, "shape"),
        ({"every": "10"}, "every"),
        ({"keep_last": "3"}, "keep_last"),
        ({"mode": None}, "mode"),
        ({"components": 3}, "components"),
        ({"components": ["model", 3]}, "components"),
        ({"policy": 3}, "policy"),
        ({"policy": ["dtype"]}, "policy"),
        ({"policy": {3: "warn"}}, "policy"),
        ({"policy": {"dtype": ["warn"]}}, "policy"),
        ({"contract": 3}, "contract"),
        ({"contract": "tokenizer"}, "contract"),
        ({"contract": [("a", 1)]}, "contract"),
        ({"contract": {3: 1}}, "contract"),
        ({"contract": {"a": 1, 3: 1}}, "contract"),
    ],
)
def test_a_manager_that_cannot_be_is_refused_before_it_touches_the_run(tmp_path, arguments, words):
    """D10, E01: an unknown mode is a configuration error; it must not give a run without checkpoints."""
    with pytest.raises(InvalidArgument, match=words):
        CheckpointManager(tmp_path / "run", **arguments)
    with pytest.raises(UnsupportedLeaf, match=r"contract\['a'\]"):
        CheckpointManager(tmp_path / "run", contract={"a": object()})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"step": "3"}, "step"),
        ({"step": -1}, "step"),
        ({"reset": 3}, "reset"),
        ({"reset": ["rng"]}, "reset"),
        ({"reset": {3: "a reason"}}, "reset"),
        ({"reset": {"rng": 3}}, "reset"),
        ({"reset": {"rng": " "}}, "reset"),
    ],
)
def test_a_restore_that_cannot_be_is_refused_and_the_live_run_is_left_as_it_is(arguments, words):
    """V12."""
    store, job = MemoryStore(), Job(0)
    with CheckpointManager(store, every=1) as manager:
        job.run(manager, 1)
        other = Job(1)
        before = fingerprint(other.live.capture())
        with pytest.raises(InvalidArgument, match=words):
            manager.restore(other.live, **arguments)
        assert fingerprint(other.live.capture()) == before


@pytest.mark.parametrize("call", ["restore", "step", "save"])
def test_a_manager_takes_a_live_run_and_not_its_model(call):
    with CheckpointManager(MemoryStore()) as manager, pytest.raises(InvalidArgument, match="attach"):
        getattr(manager, call)(nn.Linear(1, 1))


def test_a_contract_is_taken_as_it_was_given():
    """Later changes to the caller's dictionary do not change the contract."""
    store, contract = MemoryStore(), {"tokenizer": ["a"]}
    state = TrainState(trainer=Progress(1))
    with CheckpointManager(store, contract=contract) as manager:
        contract["tokenizer"].append("b")
        contract["late"] = object()
        manager.save(state)
    assert isinstance(plan(store, like=state, contract={"tokenizer": ["a"]}), ResumePlan)


def test_a_disabled_manager_does_nothing_safely():
    """O07."""
    job = Job(0)
    with DisabledManager() as manager:
        assert manager.restore(job.live).is_fresh
        assert job.run(manager, 3) == []
        assert manager.save(job.live) is None
    manager.close()


def test_a_save_by_value_and_a_save_by_the_manager_are_the_same_checkpoint():
    one, other, job = MemoryStore(), MemoryStore(), Job(0)
    with CheckpointManager(one) as manager:
        managed = manager.save(job.live)
    assert save(job.live.capture(), other).fingerprints == managed.result.fingerprints


def test_a_run_saved_by_value_is_resumed_by_a_manager_and_the_other_way_round():
    """V08: a captured state records the same facts about its loop as the manager."""
    store, job = MemoryStore(), Job(0)
    job.run(DisabledManager(), 2)
    save(job.live.capture(), store)
    assert isinstance(plan(store, like=Job(0).live.capture()), ResumePlan)
    resumed = Job(1)
    with CheckpointManager(store) as manager:
        assert manager.restore(resumed.live).step == 2
        resumed.run(manager, 3)
        manager.save(resumed.live)
    again = load(store, like=Job(0).live.capture())
    assert again.trainer.step == 3
    assert again.contract == Job(0).live.contract()
    for other, where in ((Job(0, decay=0.5), "weight_decay"), (Job(0, batch_size=2), "batch_size")):
        refusal = plan(store, like=other.live.capture())
        assert any(where in reason.where for reason in refusal.reasons), refusal


def test_what_a_rewind_left_behind_neither_counts_nor_goes():
    """E05: retention is per run and timeline. E16: the left-behind steps are not deleted before they are superseded."""
    store = MemoryStore()
    for step in (100, 200, 300):
        save(TrainState(trainer=Progress(step)), store)
    state = load(store, like=TrainState(trainer=Progress()), step=100)
    with CheckpointManager(store, keep_last=2) as manager:
        for step in (110, 120, 250):
            manager.save(state.evolve(trainer=Progress(step)))
    assert [name for name in store.list("") if name.startswith("step-")] == [
        f"step-{step:08d}" for step in (120, 200, 250, 300)
    ]


def test_a_tree_behind_two_functions_may_have_grown_since_the_run_began():
    """B15: its owner decides its shape: a history may grow, and a best score may have been None."""
    store = MemoryStore()
    kept = {"history": [1.0, 2.0], "best": torch.ones(2)}
    live = attach(nn.Linear(1, 1), extra={"log": (lambda: kept, kept.update)})
    live.advance(samples=1)
    with CheckpointManager(store) as manager:
        manager.save(live)
    fresh = {"history": [], "best": None}
    again = attach(nn.Linear(1, 1), extra={"log": (lambda: fresh, fresh.update)})
    with CheckpointManager(store) as manager:
        assert manager.restore(again).step == 1
    assert fresh["history"] == [1.0, 2.0]
    assert torch.equal(fresh["best"], torch.ones(2))
