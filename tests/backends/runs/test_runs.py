"""Save, plan and load over a store: round trips, lineage, refusals, and worlds of one to eight ranks."""

import errno

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.backends.runs_cases import damage, saved_run, state_at

from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import load, plan, save
from trainfold.backends.runs.load import CheckpointPassedOver, ResumeDrift
from trainfold.backends.stores.memory import ErrorAt, MemoryStore
from trainfold.core.errors import (
    CheckpointDamaged,
    InvalidArgument,
    InvalidState,
    ResumeRefused,
    SaveFailed,
    UnknownComponent,
)
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.resume.resume_plan import Refusal, ResumePlan
from trainfold.core.state.components import select
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, ParamGroup, Progress, TrainState
from trainfold.properties import laws, strategies

SLOW = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@SLOW
@given(strategies.states())
def test_loading_what_was_saved_gives_every_bit_back(state):
    """V13: load(save(s)) == s for all components. B14: counters past 2**53. B19: ties."""
    laws.round_trips(state)


@SLOW
@given(strategies.states(), st.data())
def test_selecting_partitions_and_merging_restores(state, data):
    """B01: save and load take a selection; the parts make the whole."""
    from trainfold.core.state.components import components_of

    names = data.draw(st.lists(st.sampled_from(sorted(components_of(state))), unique=True))
    laws.selects(state, names)


def test_saving_and_loading_leave_the_state_and_the_random_state_alone():
    """C14: saving does not change training. H05: save and load leave training RNG unchanged."""
    laws.leaves_no_trace(state_at(3))


def test_every_crash_during_saves_leaves_the_promise_kept():
    """C02: a kill at any point leaves the previous checkpoint discoverable and the torn one invisible, re-saves included."""
    disks = laws.survives_crashes([state_at(1), state_at(2), state_at(2, value=5.0), state_at(3)])
    assert disks > 100


def test_a_tied_leaf_is_one_tensor_again_after_loading():
    """B19: tied tensors are stored once and re-tied on load."""
    tensor = torch.arange(4.0)
    state = state_at(1, extra={"tied": {"a": tensor, "b": tensor}})
    loaded = load_of(state)
    assert loaded.extra["tied"]["a"] is loaded.extra["tied"]["b"]


def load_of(state):
    store = MemoryStore()
    save(state, store)
    return load(store, like=state)


def test_a_bare_state_adopts_components_that_it_does_not_have():
    """Nothing that was saved is lost because the new run has not made it yet: optimizer slots, data position, EMA."""
    store = MemoryStore()
    whole = state_at(5, extra={"ema": {"w": torch.ones(2)}}, dataset={"next": 40})
    save(whole, store)
    bare = state_at(0).evolve(
        optimizer=attrs.evolve(state_at(0).optimizer, slots=Leaves()), scheduler=None, dataset=None, rng=0
    )
    assert fingerprint(load(store, like=bare)) == fingerprint(whole)


def test_a_missing_run_and_an_empty_one_are_refused_by_name():
    """An empty run: a named error with the fix."""
    with pytest.raises(ResumeRefused, match="CheckpointMissing") as caught:
        load(MemoryStore(), like=state_at(0))
    assert caught.value.refusal.reasons[0].fix
    store = MemoryStore()
    store.commit("run.json", b'{"format":"trainfold-run","version":1,"run_id":"a"}')
    with pytest.raises(ResumeRefused, match="RunEmpty"):
        load(store, like=state_at(0))


def test_the_newest_whole_checkpoint_is_taken_and_a_torn_one_is_passed_over_loudly():
    """V03: falls back past incomplete or corrupt ones with a warning each. E01: incomplete dirs do not count."""
    store = saved_run(1, 2, 3)
    store.delete("step-00000003/manifest.json")
    damage(store, "step-00000002/model-00000-of-00001.safetensors")
    with pytest.warns(CheckpointPassedOver) as caught:
        loaded = load(store, like=state_at(0))
    assert loaded.trainer.step == 1
    text = " ".join(str(each.message) for each in caught)
    assert "step-00000003" in text
    assert "step-00000002" in text


def test_an_explicit_step_is_never_replaced_by_another():
    """V02: explicit that is missing raises. V03: an explicit step must pass the same completeness check (T27)."""
    store = saved_run(1, 2)
    damage(store, "step-00000002/model-00000-of-00001.safetensors")
    with pytest.raises(CheckpointDamaged):
        load(store, like=state_at(0), step=2)
    with pytest.raises(ResumeRefused, match="CheckpointMissing"):
        load(store, like=state_at(0), step=7)
    store.delete("step-00000002/optimizer-00000-of-00001.safetensors")
    with pytest.raises(ResumeRefused, match="CheckpointTorn"):
        load(store, like=state_at(0), step=2)
    assert load(store, like=state_at(0), step=1).trainer.step == 1


def test_after_a_rewind_the_left_behind_steps_never_win():
    """E16: stale steps beyond the rewind never win later discovery (T41); decided by lineage, nothing is deleted."""
    store = saved_run(100, 200, 300)
    save(state_at(110, value=9.0), store)
    assert load(store, like=state_at(0)).trainer.step == 110
    save(state_at(120, value=9.0), store)
    found = plan(store, like=state_at(0))
    assert found.step == 120
    assert "[200, 300]" in str(found)
    for step in (110, 120):
        damage(store, f"step-{step:08d}/model-00000-of-00001.safetensors")
    with pytest.warns(CheckpointPassedOver):
        assert load(store, like=state_at(0)).trainer.step == 100


def test_saving_a_step_again_replaces_it_and_leaves_no_stale_file():
    """C08: re-saving replaces without a window and leaves no stale files of the old one, also of a larger world (M41)."""
    store = MemoryStore()
    run_threads(3, lambda world: save(state_at(4), store, collectives=world))
    save(state_at(4, value=1.0), store)
    assert fingerprint(load(store, like=state_at(0))) == fingerprint(state_at(4, value=1.0))
    names = store.list("step-00000004")
    assert all("of-00001" in name for name in names if name != "manifest.json")
    save(state_at(4, value=2.0), store)
    assert load(store, like=state_at(0)).model.params["w"][0, 0] == 6.0


def test_the_same_state_saved_twice_has_the_same_content():
    """C10: content independent of save count."""
    one, two = saved_run(3), saved_run(3)
    assert one.read("step-00000003/model-00000-of-00001.safetensors") == two.read(
        "step-00000003/model-00000-of-00001.safetensors"
    )


def test_leaving_out_the_model_is_recorded_and_asked_about():
    """B03: excluding the model is an explicit mode. C05: such a checkpoint carries a marker."""
    store = MemoryStore()
    save(state_at(2), store, components=["optimizer", "scheduler", "trainer"])
    refusal = plan(store, like=state_at(0))
    assert isinstance(refusal, Refusal)
    assert any(getattr(reason, "kind", "") == "external_weights" for reason in refusal.reasons)
    found = load(store, like=state_at(0), components=["trainer"])
    assert found.trainer.step == 2
    assert found.model.params["w"][0, 0] == 0.0


def test_a_checkpoint_without_weights_says_so_or_is_not_made_and_is_passed_over_by_name():
    """C05, B03: the mark is what the caller has said, and is inferred from no component that is not there."""
    store, state = MemoryStore(), state_at(2)
    save(state, store)
    with pytest.raises(InvalidState, match=r"state.model: .*components= without model.*found none"):
        save(select(state_at(3), ["optimizer", "scheduler", "trainer"]), store)
    told = save(
        select(state_at(3), ["optimizer", "scheduler", "trainer"]),
        store,
        components=["optimizer", "scheduler", "trainer"],
    )
    assert told.omitted == ("model", "rng")
    chosen = plan(store, like=state_at(0))
    assert chosen.step == 2
    assert [(each.error, each.where[-13:]) for each in chosen.passed_over] == [("ComponentsLeftOut", "step-00000003")]
    assert load(store, like=state_at(0), components=["optimizer", "scheduler", "trainer"]).trainer.step == 3
    counters = MemoryStore()
    assert save(TrainState(trainer=Progress(step=1)), counters).omitted == ()  # it has nothing that trains weights


def test_a_checkpoint_that_lacks_weights_without_saying_so_is_torn_for_whoever_needs_them():
    """C05: it is never chosen; the older one is, or nothing."""
    store = MemoryStore()
    save(state_at(2), store)
    save(TrainState(trainer=Progress(step=3), extra={"ema": {"w": torch.ones(1)}}), store)
    chosen = plan(store, like=state_at(0))
    assert (chosen.step, [each.error for each in chosen.passed_over]) == (2, ["CheckpointTorn"])
    assert "lists model among what was left out" in str(chosen)
    with pytest.warns(CheckpointPassedOver, match="step-00000003"):
        assert load(store, like=state_at(0)).trainer.step == 2
    alone = MemoryStore()
    save(TrainState(trainer=Progress(step=3)), alone)
    with pytest.raises(ResumeRefused, match="model: saved nothing"):
        load(alone, like=state_at(0))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["model", "optimizer", "trainer"], "expected scheduler with optimizer"),
        (["model", "scheduler", "trainer"], "expected optimizer with scheduler"),
        (["dataset"], "expected trainer with dataset"),
    ],
)
def test_components_that_belong_together_are_saved_planned_and_loaded_together(names, said):
    """B04, G10: by every door alike; a state that never had the other one has nothing to tear apart."""
    store, whole = saved_run(2), state_at(0).evolve(dataset={"position": 0})
    like = whole
    with pytest.raises(InvalidArgument, match=said):
        save(state_at(3).evolve(dataset={"position": 3}), store, components=names)
    refusal = plan(store, like=like, components=names)
    assert isinstance(refusal, Refusal)
    assert said in str(refusal)
    with pytest.raises(ResumeRefused, match=said):
        load(store, like=like, components=names)
    with CheckpointManager(MemoryStore(), components=names) as manager, pytest.raises(InvalidArgument, match=said):
        manager.step(whole)
    with CheckpointManager(store, components=names) as manager, pytest.raises(InvalidArgument, match=said):
        manager.should_load(whole)
    alone = state_at(3).evolve(scheduler=None)
    assert save(alone, MemoryStore(), components=["model", "optimizer", "trainer"]).step == 3


def test_an_unknown_component_is_refused_and_the_known_ones_are_listed():
    """B02: unknown names raise with the known ones; a known one that the run does not produce is ignored."""
    with pytest.raises(UnknownComponent, match="dataset"):
        save(state_at(1), MemoryStore(), components=["data_loader"])
    save(state_at(1), MemoryStore(), components=["model", "dataset"])
    with pytest.raises(UnknownComponent):
        load(saved_run(1), like=state_at(0), components=["data_loader"])


def test_every_difference_is_reported_at_once():
    """F40, V08, V10: missing, unexpected, shape and dtype differences and every contract mismatch in one refusal."""
    model = ModelState(
        Leaves({"w": torch.zeros(5, 3), "b": torch.zeros(3, dtype=torch.float64), "new": torch.zeros(1)}), Leaves()
    )
    target = state_at(0).evolve(model=model, scheduler={"kind": "constant", "total": 200}, extra={"ema": {}})
    other = attrs.evolve(target.optimizer, groups=(ParamGroup({"lr": 0.2}, ("w", "b")),))
    store = MemoryStore()
    save(state_at(3, extra={"notes": 1}), store, contract={"batch_size": 4})
    refusal = plan(store, like=target.evolve(optimizer=other), contract={"batch_size": 8})
    assert isinstance(refusal, Refusal)
    kinds = {(reason.kind, reason.where) for reason in refusal.reasons}
    assert kinds >= {
        ("shape", "model.params['w']"),
        ("dtype", "model.params['b']"),
        ("missing", "model.params['new']"),
        ("horizon", "scheduler.total"),
        ("hyperparameters", "optimizer.groups['b'].lr"),
        ("batch_size", "batch_size"),
        ("missing_component", "ema"),
    }
    with pytest.raises(ResumeRefused, match="batch_size"):
        load(store, like=target.evolve(optimizer=other), contract={"batch_size": 8})


def test_a_policy_lets_a_named_kind_pass_and_says_so():
    """V08: per-key policy error / warn / adapt. V10: several strictness modes."""
    store = MemoryStore()
    save(state_at(3), store, contract={"batch_size": 4, "note": "a"})
    target = state_at(0).evolve(
        model=ModelState(Leaves({"w": torch.zeros(2, 3, dtype=torch.float64), "new": torch.ones(1)}), Leaves())
    )
    policy = {
        "dtype": "adapt",
        "missing": "adapt",
        "unexpected": "adapt",
        "batch_size": "warn",
        "contract:note": "adapt",
    }
    with pytest.warns(ResumeDrift, match="batch_size"):
        found = load(store, like=target, policy=policy, contract={"batch_size": 8, "note": "b"})
    assert found.model.params["w"].dtype == torch.float64
    assert found.model.params["w"][0, 0] == 3.0
    assert found.model.params["new"] == 1.0
    assert list(found.model.params) == ["w", "new"]


def test_a_hyperparameter_that_may_drift_is_the_targets():
    store = saved_run(3)
    other = attrs.evolve(state_at(0).optimizer, groups=(ParamGroup({"lr": 0.2}, ("w", "b")),))
    found = load(store, like=state_at(0).evolve(optimizer=other), policy={"hyperparameters": "adapt"})
    assert found.optimizer.groups[0].hyper["lr"] == 0.2
    assert found.optimizer.slots["w"]["exp_avg"][0, 0] == 3.0


def test_a_horizon_that_may_drift_is_the_targets():
    """A13: the horizon is persisted and compared at resume."""
    target = state_at(0).evolve(scheduler={"kind": "constant", "total": 500})
    assert load(saved_run(3), like=target, policy={"horizon": "adapt"}).scheduler["total"] == 500


def test_nothing_in_common_is_refused_even_when_all_is_allowed():
    """V10: zero overlap must fail even in lenient mode."""
    target = state_at(0).evolve(model=ModelState(Leaves({"other": torch.zeros(1)}), Leaves()), optimizer=None)
    with pytest.raises(ResumeRefused, match="another model"):
        load(saved_run(1), like=target, policy={"missing": "adapt", "unexpected": "adapt"})


def test_an_impossible_policy_is_refused_before_anything_is_read():
    for policy in ({"shape": "adapt"}, {"colour": "warn"}, {"dtype": "maybe"}):
        with pytest.raises(InvalidArgument):
            load(MemoryStore(), like=state_at(0), policy=policy)


def test_a_component_starts_anew_only_with_a_reason():
    """H04: skipping RNG is explicit."""
    with pytest.raises(InvalidArgument, match="reason"):
        load(saved_run(1), like=state_at(0, rng=9), reset={"rng": " "})
    found = load(saved_run(1), like=state_at(0, rng=9), reset={"rng": "a new seed on purpose"})
    assert found.rng == 9
    assert "on purpose" in str(plan(saved_run(1), like=state_at(0), reset={"rng": "a new seed on purpose"}))


def test_slots_that_are_missing_for_some_parameters_only_are_legal_and_half_slots_are_not():
    """B10, T46: a param that never got a grad has no state (allowed); partially missing state is corruption (fatal)."""
    store = saved_run(1)
    assert list(load(store, like=state_at(0)).optimizer.slots) == ["w"]
    state = state_at(1)
    model = attrs.evolve(state.model, params=Leaves({**state.model.params, "c": torch.zeros(3)}))
    slots = Leaves({"c": {"exp_avg": torch.zeros(3), "step": 1}, "b": {"exp_avg": torch.zeros(3)}})
    groups = (ParamGroup({"lr": 0.1}, ("w", "b", "c")),)
    optimizer = attrs.evolve(state.optimizer, slots=slots, groups=groups)
    broken = MemoryStore()
    save(state.evolve(model=model, optimizer=optimizer), broken)
    like = state_at(0).evolve(model=model, optimizer=attrs.evolve(optimizer, slots=Leaves()))
    with pytest.raises(ResumeRefused, match="incomplete"):
        load(broken, like=like)


def test_a_plan_is_a_value_that_prints_and_touches_nothing():
    """V01: pure. V18: dry-run prints the plan, by the same code path."""
    store = saved_run(1, 2)
    before = store.effects
    found = plan(store, like=state_at(0))
    assert isinstance(found, ResumePlan)
    assert found == plan(store, like=state_at(0))
    assert found.digest() == plan(store, like=state_at(0)).digest()
    assert "step 2" in str(found)
    assert store.effects == before


def test_a_checkpoint_copied_from_another_run_is_foreign():
    """C04: manifest of another dir copied in."""
    store, other = saved_run(1), saved_run(1, 2)
    for name in other.list("step-00000002"):
        data = other.read(f"step-00000002/{name}")
        store.write(f"step-00000002/{name}", [data], size_bytes=len(data))
    with pytest.warns(CheckpointPassedOver, match="Foreign"):
        assert load(store, like=state_at(0)).trainer.step == 1


def fails_once(index, code):
    """A fault at one effect only: the clean-up after it works, as on a disk with one bad moment."""
    fault, fired = ErrorAt(index, code=code), []
    return lambda at, effect: None if fired or at != index else fired.append(effect) or fault(at, effect)


@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.CheckpointPassedOver")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_a_save_that_fails_at_any_effect_changes_nothing_that_was_there(code):
    """C15: save accepts disk-full and permission errors by failing the save, cleaning up, keeping what was there."""
    clean = saved_run(1)
    before = len(clean.effects)
    save(state_at(2), clean)
    failures = 0
    for index in range(before, len(clean.effects)):
        store = MemoryStore(fault=fails_once(index, code))
        save(state_at(1), store)
        try:
            save(state_at(2), store)
        except SaveFailed as error:
            failures += 1
            assert error.fix  # noqa: PT017 - either outcome is legal
        found = load(store, like=state_at(0))
        assert fingerprint(found) == fingerprint(state_at(found.trainer.step))
        if found.trainer.step == 1:
            assert store.list("step-00000002") == []
        fixed = store.after_crash(len(store.effects), keep_unsynced=True)
        save(state_at(3), fixed)
        assert load(fixed, like=state_at(0)).trainer.step == 3
    assert failures > 5
