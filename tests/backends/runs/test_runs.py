"""Save, plan and load over a store: round trips, lineage, refusals, and worlds of one to eight ranks."""

import errno

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainfold.backends.ranks.in_process import RankFault, run_threads, thread_outcomes
from trainfold.backends.runs.api import load, plan, save
from trainfold.backends.runs.load import CheckpointPassedOver, ResumeDrift
from trainfold.backends.stores.memory import ErrorAt, MemoryStore
from trainfold.core.errors import (
    CheckpointDamaged,
    InvalidArgument,
    RankFailed,
    RanksDisagree,
    ResumeRefused,
    SaveFailed,
    SaveFailedElsewhere,
    UnknownComponent,
)
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.format.manifest import encode_manifest
from trainfold.core.format.manifest_reader import decode_manifest
from trainfold.core.layout.shard import make_shard
from trainfold.core.resume.resume_plan import Refusal, ResumePlan
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, OptimizerState, ParamGroup, Progress, TrainState
from trainfold.properties import laws, strategies

SLOW = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def state_at(step, value=0.0, **changes):
    model = ModelState(Leaves({"w": torch.full((2, 3), value + step), "b": torch.zeros(3)}), Leaves())
    slots = Leaves({"w": {"exp_avg": torch.full((2, 3), float(step)), "step": torch.tensor(float(step))}})
    optimizer = OptimizerState("torch.optim.adamw.AdamW", slots, (ParamGroup({"lr": 0.1}, ("w", "b")),))
    whole = TrainState(model, optimizer, {"kind": "constant", "total": 100}, Progress(step, samples=step * 4), rng=7)
    return attrs.evolve(whole, **changes)


def saved_run(*steps):
    store = MemoryStore()
    for step in steps:
        save(state_at(step), store)
    return store


def damage(store, name, at=-1):
    """A store whose file has one bit flipped."""
    data = bytearray(store.read(name))
    data[at] ^= 1
    store.delete(name)
    store.write(name, [bytes(data)], size_bytes=len(data))


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
    save(state_at(2), store, components=["optimizer", "trainer"])
    refusal = plan(store, like=state_at(0))
    assert isinstance(refusal, Refusal)
    assert any(getattr(reason, "kind", "") == "external_weights" for reason in refusal.reasons)
    found = load(store, like=state_at(0), components=["trainer"])
    assert found.trainer.step == 2
    assert found.model.params["w"][0, 0] == 0.0


def test_an_unknown_component_is_refused_and_the_known_ones_are_listed():
    """B02: unknown names raise with the known ones; a known one that the run does not produce is ignored."""
    with pytest.raises(UnknownComponent, match="dataset"):
        save(state_at(1), MemoryStore(), components=["data_loader"])
    save(state_at(1), MemoryStore(), components=["model", "dataset"])
    with pytest.raises(UnknownComponent):
        load(saved_run(1), like=state_at(0), components=["data_loader"])


def test_every_difference_is_reported_at_once():
    """V08, V10: missing, unexpected, shape and dtype differences and every contract mismatch in one refusal."""
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
    """B10: a param that never got a grad has no state (allowed); partially missing state is corruption (fatal)."""
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


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_any_world_saves_what_one_process_loads(world_size):
    """B06: replicated state is written once. C06: all ranks agree. N: written for N ranks from the first line."""
    store = MemoryStore()
    state = state_at(6, extra={"ema": {f"p{i}": torch.full((i + 1,), float(i)) for i in range(9)}})
    results = run_threads(world_size, lambda world: save(state, store, collectives=world))
    assert len({str(result) for result in results}) == 1
    assert fingerprint(load(store, like=state)) == fingerprint(state)
    loaded = run_threads(world_size + 1, lambda world: load(store, like=state, collectives=world))
    assert all(fingerprint(each) == fingerprint(state) for each in loaded)


def test_the_random_streams_of_each_rank_come_back_to_their_rank():
    """H02: RNG is per rank, never rank 0's copied. V05. H03: another world is not mis-sliced but refused."""
    store = MemoryStore()
    run_threads(3, lambda world: save(state_at(1, rng={"seed": world.rank}), store, collectives=world))
    loaded = run_threads(3, lambda world: load(store, like=state_at(0, rng={"seed": -1}), collectives=world))
    assert [each.rng["seed"] for each in loaded] == [0, 1, 2]
    with pytest.raises(ResumeRefused, match=r"streams.*of 3 ranks.*reset=\{\"rng\": \"why\"\}"):
        load(store, like=state_at(0, rng={"seed": -1}))


def test_shards_of_every_rank_make_one_tensor_and_load_into_any_other_cut():
    """N04: saved sharded, loadable unsharded on one process; and into another number of shards."""
    whole = torch.arange(7 * 3, dtype=torch.float32).reshape(7, 3)

    def cut(rank, size):
        rows = torch.arange(7).tensor_split(size)[rank]
        start = int(rows[0]) if len(rows) else 7
        return make_shard(whole[start : start + len(rows)], shape=(7, 3), starts=(start, 0))

    def sharded(rank, size):
        return state_at(2, extra={"table": {"w": cut(rank, size)}})

    store = MemoryStore()
    run_threads(3, lambda world: save(sharded(world.rank, 3), store, collectives=world))
    assert torch.equal(load(store, like=state_at(0, extra={"table": {"w": whole}})).extra["table"]["w"], whole)
    back = run_threads(2, lambda world: load(store, like=sharded(world.rank, 2), collectives=world))
    assert torch.equal(torch.cat([each.extra["table"]["w"].tensor for each in back]), whole)


def test_ranks_with_different_counters_are_told_so_before_anything_is_written():
    """C07: an error on one rank raises on all ranks; no rank is left in a barrier."""
    store = MemoryStore()
    outcomes = thread_outcomes(3, lambda world: save(state_at(1 + (world.rank == 2)), store, collectives=world))
    assert {type(outcome.error) for outcome in outcomes} <= {RanksDisagree, RankFailed}
    assert all(outcome.error for outcome in outcomes)
    assert store.list("") == [] or "manifest.json" not in store.list("step-00000001")


@pytest.mark.filterwarnings("ignore:CheckpointTorn.*expected manifest.json:Warning")
@pytest.mark.parametrize("call_index", range(4))
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_dies_anywhere_in_a_save_fails_it_everywhere(rank, call_index):
    """C07, W25: naming the rank; the earlier checkpoint is intact. What the others wrote may stay: only rank 0 deletes."""
    store = saved_run(1)
    outcomes = thread_outcomes(
        3, lambda world: save(state_at(2), store, collectives=world), fail_at=RankFault(rank, call_index)
    )
    if all(outcome.error is None for outcome in outcomes):
        pytest.fail("the fault was not reached")
    assert all(outcome.error is not None for outcome in outcomes)
    found = load(store, like=state_at(0))
    assert found.trainer.step in (1, 2)
    assert fingerprint(found) == fingerprint(state_at(found.trainer.step))


def test_ranks_that_see_different_checkpoints_disagree_aloud():
    """V05: all ranks must resolve the same checkpoint identity."""
    stores = [saved_run(1), saved_run(1, 2)]
    outcomes = thread_outcomes(2, lambda world: load(stores[world.rank], like=state_at(0), collectives=world))
    assert any(isinstance(outcome.error, RanksDisagree) for outcome in outcomes)
    assert all(outcome.error is not None for outcome in outcomes)


def test_loading_leaves_the_state_that_it_is_like_alone():
    """V12: loading failure leaves the live state unchanged, never half-loaded."""
    store = saved_run(1)
    like = state_at(0)
    before = fingerprint(like)
    damage(store, "step-00000001/optimizer-00000-of-00001.safetensors")
    with pytest.raises(ResumeRefused):
        load(store, like=like)
    assert fingerprint(like) == before


def test_slots_may_differ_between_parameters_of_other_dimensions():
    """B10: Shampoo and SM3 keep one slot for each dimension; that is no corruption."""
    state = state_at(1)
    slots = Leaves(
        {"w": {"precond_0": torch.zeros(2), "precond_1": torch.zeros(3)}, "b": {"precond_0": torch.zeros(3)}}
    )
    state = state.evolve(optimizer=attrs.evolve(state.optimizer, slots=slots))
    store = MemoryStore()
    save(state, store)
    assert fingerprint(load(store, like=state_at(0))) == fingerprint(state)


def test_a_users_own_optimizer_may_make_its_slots_lazily():
    store = MemoryStore()
    save(state_at(1, optimizer={"count": 3, "momentum": {"w": torch.ones(2, 3)}}), store)
    found = load(store, like=state_at(0, optimizer={"count": 0, "momentum": {}}))
    assert torch.equal(found.optimizer["momentum"]["w"], torch.ones(2, 3))


def test_a_stateful_schedulers_state_is_a_value_and_not_a_contract():
    """B12: stateful schedulers round-trip fully; what moves with the run is not compared."""
    store = MemoryStore()
    save(state_at(1, scheduler={"last_epoch": 5, "base_lrs": [0.1]}), store)
    assert load(store, like=state_at(0, scheduler={"last_epoch": 0, "base_lrs": [0.1]})).scheduler["last_epoch"] == 5


def test_a_run_that_was_rewound_hundreds_of_times_is_still_in_order():
    """E16: the head of a manifest grows with each rewind and is read to its end."""
    store = saved_run(100, 110, 200)
    name = "step-00000110/manifest.json"
    old = decode_manifest(store.read(name), name)
    forks = tuple((timeline, 100) for timeline in range(700))
    data = encode_manifest(attrs.evolve(old, head=attrs.evolve(old.head, timeline=700, forks=forks)))
    assert data.index(b"\n") > 4096
    store.delete(name)
    store.write(name, [data], size_bytes=len(data))
    assert load(store, like=state_at(0)).trainer.step == 110


def test_every_manifest_that_cannot_be_read_is_told():
    """V03: a warning each, also for one whose first line is gone."""
    store = saved_run(100, 200)
    save(state_at(110), store)
    data = b"?" + store.read("step-00000110/manifest.json")[1:]
    store.delete("step-00000110/manifest.json")
    store.write("step-00000110/manifest.json", [data], size_bytes=len(data))
    with pytest.warns(CheckpointPassedOver, match="step-00000110"):
        load(store, like=state_at(0))


def test_what_is_kept_of_the_target_is_not_shared_with_it():
    """Purity: a donating step after the load must not write into the state that the load was like."""
    target = state_at(0)
    model = ModelState(Leaves({**target.model.params, "new": torch.zeros(2)}), Leaves())
    target = target.evolve(model=model)
    found = load(saved_run(1), like=target, policy={"missing": "adapt"})
    found.model.params["new"].add_(1)
    assert target.model.params["new"].sum() == 0


def test_tensors_come_back_in_the_memory_layout_of_the_target():
    """V13: kernels round differently in another layout, so strides are part of an exact resume."""
    filters = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    model = ModelState(Leaves({"w": filters, "b": torch.zeros(3)}), Leaves())
    slots = Leaves({"w": {"exp_avg": filters.clone(), "step": torch.tensor(1.0)}})
    state = state_at(1).evolve(model=model, optimizer=attrs.evolve(state_at(1).optimizer, slots=slots))
    store = MemoryStore()
    save(state, store)
    bare = state.evolve(optimizer=attrs.evolve(state.optimizer, slots=Leaves()))
    found = load(store, like=bare)
    assert fingerprint(found) == fingerprint(state)
    assert found.model.params["w"].stride() == filters.stride()
    assert found.optimizer.slots["w"]["exp_avg"].stride() == filters.stride()


def test_a_load_beside_a_writer_that_replaces_the_checkpoint_finds_the_new_one():
    """V03: what was listed may be gone a moment later, because retention runs after each commit; then it lists again."""

    class Busy(MemoryStore):
        moved = True

        def size(self, name):
            if name == "step-00000100/manifest.json" and not self.moved:
                self.moved = True
                save(state_at(200), self)
                self.delete("step-00000100/")
            return super().size(name)

    store = Busy()
    save(state_at(100), store)
    store.moved = False
    assert load(store, like=state_at(0)).trainer.step == 200


@pytest.mark.parametrize("effect", ["reserve", "finish", "commit"])
def test_a_disk_that_fails_one_rank_fails_the_save_on_all_and_they_can_go_on(effect):
    """C07: an error on one rank raises on all, naming the rank and what it said; the next save works."""
    fired = []

    def fault(_index, each):
        if each.kind == effect and not fired and armed:
            fired.append(each)
            return OSError(errno.EIO, "EIO")
        return None

    store, armed = MemoryStore(fault=fault), []
    save(state_at(1), store)
    armed.append(True)

    def train(world):
        with pytest.raises(SaveFailed) as caught:
            save(state_at(2), store, collectives=world)
        assert caught.value.fix
        return type(caught.value), save(state_at(3), store, collectives=world).step

    outcomes = run_threads(3, train)
    assert fired
    assert {kind for kind, _ in outcomes} == {SaveFailed, SaveFailedElsewhere}
    assert {step for _, step in outcomes} == {3}


def test_a_leaf_that_one_rank_cannot_save_is_told_to_all():
    outcomes = thread_outcomes(
        2, lambda world: save(state_at(1, extra={"x": object() if world.rank else 1}), MemoryStore(), collectives=world)
    )
    assert [type(outcome.error).__name__ for outcome in outcomes] == ["SaveFailedElsewhere", "UnsupportedLeaf"]
    assert "extra" in str(outcomes[0].error) or "x" in str(outcomes[0].error)


def test_a_locked_run_is_told_to_every_rank():
    store = MemoryStore()
    with store.lock():
        outcomes = thread_outcomes(3, lambda world: save(state_at(1), store, collectives=world))
    kinds = [type(outcome.error).__name__ for outcome in outcomes]
    assert kinds == ["RunLocked", "SaveFailedElsewhere", "SaveFailedElsewhere"]


def test_the_pointer_to_the_newest_moves_only_once_it_is_committed():
    """C02: a hint never points at what is no checkpoint yet, a step that is saved again included."""
    store = MemoryStore()
    for step in (1, 2, 2):
        seen = len(store.effects)
        name = save(state_at(step), store).checkpoint
        told = [(effect.kind, effect.name) for effect in store.effects[seen:]]
        committed, pointed = told.index(("commit", f"{name}/manifest.json")), told.index(("point", "latest"))
        assert committed < told.index(("sync", name), committed) < pointed
        assert told.count(("point", "latest")) == 1
        assert store.point_target("latest") == name


def test_at_every_crash_the_pointer_names_a_whole_checkpoint():
    """C02: whatever prefix of the effects a crash leaves, the hint does not lead to a torn checkpoint."""
    store = saved_run(1, 2)
    for length in range(len(store.effects) + 1):
        for keep_unsynced in (False, True):
            disk = store.after_crash(length, keep_unsynced=keep_unsynced)
            target = disk.point_target("latest")
            assert target is None or disk.size(f"{target}/manifest.json") is not None, length


class LosesFiles:
    """A store that says that a file is written, and has lost it, or its end, by the time of the commit."""

    def __init__(self, inner, lost, keep):
        self._inner, self._lost, self._keep = inner, lost, keep

    def __getattr__(self, verb):
        return getattr(self._inner, verb)

    def write(self, name, parts, *, size_bytes):
        self._inner.write(name, parts, size_bytes=size_bytes)
        if self._lost in name:
            kept = self._inner.read(name)[: self._keep]
            self._inner.delete(name)
            if self._keep:
                self._inner.write(name, [kept], size_bytes=len(kept))


@pytest.mark.parametrize("lost", ["model-", "optimizer-"])
@pytest.mark.parametrize("keep", [0, 8, -1], ids=["lost", "header length left", "last byte cut off"])
def test_a_data_file_that_is_lost_before_the_commit_fails_the_save(lost, keep):
    """C01: what is committed is whole; a store that loses what it was given is found out before, and says which file."""
    disk = saved_run(1)
    with pytest.raises(SaveFailed, match=f"step-00000002/{lost}") as caught:
        save(state_at(2), LosesFiles(disk, lost, keep))
    assert caught.value.fix
    assert "before the commit" in caught.value.expected
    assert disk.size("step-00000002/manifest.json") is None
    assert disk.point_target("latest") == "step-00000001"
    assert fingerprint(load(disk, like=state_at(0))) == fingerprint(state_at(1))
    assert save(state_at(2), disk).step == 2
