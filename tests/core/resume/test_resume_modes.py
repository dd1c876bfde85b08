"""What to load is explicit: everything, weights only or all but one; and checkpoints without a requested component."""

import attrs
import pytest
import torch
from torch import nn

import trainfold
from trainfold import Loss
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core import tree
from trainfold.core.digest import digest_of
from trainfold.core.errors import ContractMismatch, InvalidArgument, ResumeRefused
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.format.manifest import encode_manifest
from trainfold.core.format.manifest_reader import decode_manifest
from trainfold.core.resume.resume_plan import Refusal, ResumePlan
from trainfold.core.state.state import Progress, TrainState
from trainfold.properties import laws


def loss_fn(model, batch):
    return Loss(sum=model(batch).float().square().sum(), weight=len(batch))


def trained(steps=3, *, dtype=torch.float32, masters=False, seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(4, 4).to(dtype)
    adamw = trainfold.optimizer(torch.optim.AdamW, lr=1e-3, masters=masters)
    schedule = trainfold.schedules.cosine(50, warmup_steps=2)
    fresh = trainfold.init_state(model, adamw, seed=seed, schedule=schedule)
    step = trainfold.make_step(model, loss_fn, adamw, schedule=schedule)
    state = fresh
    for i in range(steps):
        state, _ = step(state, torch.full((2, 4), float(i + 1), dtype=dtype))
    return fresh, step, state


def saved(state, **options):
    store = MemoryStore()
    trainfold.save(state, store, **options)
    return store


def test_weights_only_starts_everything_else_anew():
    """V07: step 0, no optimizer, scheduler or counters. V06: weights-only is an explicit mode."""
    _, _, state = trained()
    fresh, step, _ = trained(0, seed=1)
    found = trainfold.load(saved(state), like=fresh, components=["model"])
    assert fingerprint(found)["model"] == fingerprint(state)["model"]
    for name in ("optimizer", "scheduler", "trainer", "rng"):
        assert fingerprint(found)[name] == fingerprint(fresh)[name]
    assert step(found, torch.ones(2, 4))[0].trainer.step == 1


def test_weights_and_counters_is_a_selection_like_any_other():
    """V06: weights+counters and all-but-X are explicit."""
    _, _, state = trained()
    fresh, _, _ = trained(0, seed=1)
    found = trainfold.load(saved(state), like=fresh, components=["model", "trainer"])
    assert found.trainer == state.trainer
    assert len(found.optimizer.slots) == 0
    all_but = trainfold.load(saved(state), like=fresh, reset={"optimizer": "another optimizer from here on"})
    assert fingerprint(all_but)["rng"] == fingerprint(state)["rng"]
    assert len(all_but.optimizer.slots) == 0


def test_loaded_weights_are_not_reverted_by_old_masters():
    """B08, V07: a weights-only load makes the masters from the weights; otherwise the first step reverts them."""
    _, _, state = trained(dtype=torch.bfloat16, masters=True)
    fresh, step, _ = trained(0, dtype=torch.bfloat16, masters=True, seed=1)
    for options in ({"components": ["model"]}, {"reset": {"optimizer": "weights only, on purpose"}}):
        found = trainfold.load(saved(state), like=fresh, **options)
        assert torch.equal(found.optimizer.masters["weight"], state.model.params["weight"].float())
        after, _ = step(found, torch.zeros(2, 4, dtype=torch.bfloat16))
        moved = (after.model.params["weight"].float() - state.model.params["weight"].float()).abs().max()
        assert moved < 0.02


def described(*, lr=0.1, seed=0):
    """A state whose optimizer, dataset and step add entries to the contract."""
    torch.manual_seed(0)
    model, adamw = nn.Linear(4, 4), trainfold.optimizer(torch.optim.AdamW, lr=lr)
    cursor = trainfold.data.DataCursor(length=100, seed=seed, epoch=0, next_index=0)
    return trainfold.init_state(model, adamw).evolve(dataset=cursor, contract={"step.accumulate": 1 + seed})


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, {"accumulate", "dataset", "hyperparameters"}),
        ({"components": ["model"]}, set()),
        ({"components": ["model", "trainer"]}, {"accumulate"}),
        ({"components": ["model", "optimizer"]}, {"hyperparameters"}),
        ({"reset": {"dataset": "another order"}}, {"accumulate", "hyperparameters"}),
        ({"reset": {"optimizer": "another rate", "trainer": "from 0", "dataset": "another order"}}, set()),
    ],
)
def test_what_describes_a_component_that_is_not_resumed_may_differ(options, kinds):
    """V06, V07, V08: weights alone can start a run with another learning rate, data order and accumulation."""
    store = saved(described())
    other = described(lr=0.5, seed=1)
    outcome = trainfold.plan(store, like=other, **options)
    reasons = outcome.reasons if isinstance(outcome, Refusal) else ()
    assert {reason.kind for reason in reasons} == kinds
    if not kinds:
        found = trainfold.load(store, like=other, **options)
        assert (found.optimizer.groups, found.dataset) == (other.optimizer.groups, other.dataset)


def test_weights_merged_by_hand_are_not_reverted_by_old_masters():
    """B08: masters that round to the weights stay, with their extra precision; the others are recreated."""
    _, _, state = trained(dtype=torch.bfloat16, masters=True)
    fresh, _, _ = trained(0, dtype=torch.bfloat16, masters=True, seed=1)
    mixed = trainfold.merge(fresh, trainfold.select(state, ["model"]))
    for name, param in state.model.params.items():
        assert torch.equal(mixed.optimizer.masters[name], param.float())
    rest = ["optimizer", "scheduler", "trainer", "rng"]
    for one, other in ((["model"], rest), (rest, ["model"])):
        whole = trainfold.merge(trainfold.select(state, one), trainfold.select(state, other))
        assert fingerprint(whole) == fingerprint(state)
    assert fingerprint(trainfold.merge(state, trainfold.select(state, ["model"]))) == fingerprint(state)


def test_a_full_resume_keeps_the_masters_bit_for_bit():
    """B08: fp32 masters are part of the optimizer state."""
    _, _, state = trained(dtype=torch.bfloat16, masters=True)
    fresh, _, _ = trained(0, dtype=torch.bfloat16, masters=True, seed=1)
    assert fingerprint(trainfold.load(saved(state), like=fresh)) == fingerprint(state)


def test_a_model_only_checkpoint_is_not_taken_for_a_full_one():
    """V06: full requires every declared part (T24). V11: a fresh optimizer is kept only if the caller allows it."""
    _, _, state = trained()
    fresh, _, _ = trained(0, seed=1)
    store = saved(state, components=["model", "trainer"])
    refusal = trainfold.plan(store, like=fresh)
    assert isinstance(refusal, Refusal)
    assert {(reason.kind, reason.where) for reason in refusal.reasons} == {
        ("missing_component", "optimizer"),
        ("missing_component", "scheduler"),
        ("missing_component", "rng"),
    }
    with pytest.raises(ResumeRefused, match="optimizer"):
        trainfold.load(store, like=fresh)
    found = trainfold.load(store, like=fresh, policy={"missing_component": "adapt"})
    assert found.trainer.step == 3
    assert len(found.optimizer.slots) == 0


def test_a_folder_of_another_format_is_not_a_run(tmp_path):
    """V15: the format is detected from disk and must agree with the request."""
    (tmp_path / "model.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
    (tmp_path / "config.json").write_text("{}")
    fresh, _, _ = trained(0)
    with pytest.raises(ResumeRefused, match="CheckpointForeign"):
        trainfold.load(tmp_path, like=fresh)


def test_a_second_load_in_the_same_process_sees_what_is_there_now():
    """V17: an in-process restart finds no stale cache."""
    fresh, step, state = trained()
    store = saved(state)
    assert trainfold.load(store, like=fresh).trainer.step == 3
    after, _ = step(state, torch.ones(2, 4))
    trainfold.save(after, store)
    assert trainfold.load(store, like=fresh).trainer.step == 4
    store.delete("step-00000004/")
    assert trainfold.load(store, like=fresh).trainer.step == 3


def test_a_state_holds_its_next_step_to_what_trained_it():
    """V08: accumulation and clipping are saved and compared at resume; the caller passes nothing along."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    sgd = trainfold.optimizer(torch.optim.SGD, lr=1e-3)
    fresh = trainfold.init_state(model, sgd)
    state, _ = trainfold.make_step(model, loss_fn, sgd, accumulate=4, clip_norm=1.0)(fresh, torch.ones(4, 4))
    store = saved(state)
    resumed = trainfold.load(store, like=fresh)
    assert resumed.contract == {"step.accumulate": 4, "step.clip_norm": 1.0}
    other = trainfold.make_step(model, loss_fn, sgd, accumulate=2)
    with pytest.raises(ContractMismatch, match=r"step\.accumulate=4, step\.clip_norm=1\.0") as caught:
        other(resumed, torch.ones(4, 4))
    assert caught.value.fix
    assert other(resumed.evolve(contract={}), torch.ones(4, 4))[0].trainer.step == 2
    trained_otherwise, _ = other(fresh, torch.ones(4, 4))
    refusal = trainfold.plan(store, like=trained_otherwise)
    assert {(reason.kind, reason.where) for reason in refusal.reasons} == {
        ("accumulate", "step.accumulate"),
        ("contract", "step.clip_norm"),
    }
    policy = {"accumulate": "adapt", "contract:step.clip_norm": "adapt"}
    assert other(trainfold.load(store, like=fresh, policy=policy), torch.ones(4, 4))[0].trainer.step == 2
    assert trainfold.load(store, like=fresh, components=["model"]).contract == {}


def test_selecting_and_merging_keep_the_contract():
    whole = trained()[2]
    assert trainfold.select(whole, ["model"]).contract == whole.contract
    parts = trainfold.select(whole, ["model"]), trainfold.select(whole, ["optimizer", "scheduler", "trainer", "rng"])
    assert trainfold.merge(*parts) == whole


def test_a_convolution_in_channels_last_resumes_bit_for_bit():
    """V13: the same bits after a resume, for any memory format."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(
        memory_format=torch.channels_last
    )
    adamw = trainfold.optimizer(torch.optim.AdamW, lr=1e-2)
    step = trainfold.make_step(model, loss_fn, adamw, donate=True)
    batches = [torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last) for _ in range(5)]
    laws.resumes_exactly(step, trainfold.init_state(model, adamw), batches, at=[2])


def test_a_run_stays_where_it_is_when_the_process_changes_its_directory(tmp_path, monkeypatch):
    """P33: relative paths work; an open store ignores a later chdir, and an empty name is refused."""
    monkeypatch.chdir(tmp_path)
    store = LocalStore("runs/a")
    _, step, state = trained()
    trainfold.save(state, store)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    trainfold.save(step(state, torch.ones(2, 4))[0], store)
    assert sorted(path.name for path in (tmp_path / "runs" / "a").glob("step-*")) == ["step-00000003", "step-00000004"]
    assert not (tmp_path / "sub" / "runs").exists()
    with pytest.raises(InvalidArgument):
        LocalStore("")


def as_an_older_version_wrote_it(state):
    """A checkpoint with an empty contract."""
    store = saved(state)
    name = f"step-{state.trainer.step:08d}/manifest.json"
    data = store.read(name)
    bare = attrs.evolve(decode_manifest(data, name), contract={})
    store.commit(name, encode_manifest(bare), replaces=digest_of(data))
    return store


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda state: state.evolve(scheduler={**state.scheduler, "total_steps": 60}), "horizon"),
        (lambda state: state.evolve(dataset=trainfold.data.DataCursor(0, 4, 13, seed=1)), "dataset_size"),
        (lambda state: with_rate(state, 0.5), "hyperparameters"),
    ],
)
def test_what_an_old_contract_does_not_say_is_proved_by_its_components(change, kind):
    """V09: a key that a legacy checkpoint lacks is derived if provable, as the horizon from the scheduler's state."""
    _, _, state = trained()
    state = state.evolve(dataset=trainfold.data.DataCursor(0, 4, 12, seed=1))
    store = as_an_older_version_wrote_it(state)
    assert fingerprint(trainfold.load(store, like=state)) == fingerprint(state)
    refusal = trainfold.plan(store, like=change(state))
    assert isinstance(refusal, Refusal)
    assert {reason.kind for reason in refusal.reasons} == {kind}


def test_what_nothing_in_a_checkpoint_proves_is_not_guessed():
    """V09: otherwise refuse; never guess. V08: a policy for each key."""
    _, _, state = trained()
    store = saved(state)
    refusal = trainfold.plan(store, like=state, contract={"tokenizer": "bytes"})
    assert isinstance(refusal, Refusal)
    assert [(reason.kind, reason.where) for reason in refusal.reasons] == [("unproven", "tokenizer")]
    allowed = {"contract:tokenizer": "adapt"}
    assert trainfold.load(store, like=state, contract={"tokenizer": "bytes"}, policy=allowed).trainer.step == 3


def with_rate(state, rate):
    groups = tuple(attrs.evolve(group, hyper={**group.hyper, "lr": rate}) for group in state.optimizer.groups)
    return state.evolve(optimizer=attrs.evolve(state.optimizer, groups=groups))


@pytest.mark.parametrize("component", ["model", "optimizer", "rng", "dataset"])
def test_a_damaged_part_takes_all_parts_from_the_older_checkpoint(component):
    """V16: weights, data position and random state come from one source; a warning names the skipped checkpoint."""
    fresh, step, state = trained(1)
    states = [state]
    states.append(step(states[-1], torch.ones(2, 4))[0])
    states = [each.evolve(dataset=torch.tensor([i]), rng=torch.tensor([i])) for i, each in enumerate(states)]
    store = MemoryStore()
    for each in states:
        trainfold.save(each, store)
    like = fresh.evolve(dataset=torch.zeros(1, dtype=torch.int64), rng=torch.zeros(1, dtype=torch.int64))
    name = f"step-00000002/{component}-00000-of-00001.safetensors"
    data = bytearray(store.read(name))
    data[-1] ^= 1
    store.delete(name)
    store.write(name, [bytes(data)], size_bytes=len(data))
    with pytest.warns(CheckpointPassedOver, match="step-00000002"):
        loaded = trainfold.load(store, like=like)
    assert fingerprint(loaded) == fingerprint(states[0])


@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen
class Window:
    """A user's own data position that reads its tensor."""

    seen: torch.Tensor = attrs.field()

    @seen.validator
    def _check(self, _attribute, value):
        if value.dim() != 1:
            raise ValueError("seen: a vector")


@pytest.mark.parametrize("component", ["dataset", "scheduler", "optimizer"])
def test_a_users_own_class_that_looks_at_its_tensors_is_loaded(component):
    """V09: a value that needs tensors proves nothing, but does not cause a refusal either."""
    state = TrainState(trainer=Progress(3), **{component: Window(torch.arange(3))})
    store = saved(state)
    assert isinstance(trainfold.plan(store, like=state), ResumePlan)
    assert fingerprint(trainfold.load(store, like=state)) == fingerprint(state)
