"""Conversions from and to what torch itself writes, which torch reads and writes here."""

import argparse

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

import trainfold
from trainfold.backends.convert.conversion_run import plan_conversion, run_conversion
from trainfold.backends.convert.opened_source import open_source
from trainfold.backends.weights.opened import opened_weights
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.transforms import hub_rules, transform_tensors
from trainfold.weights import CheckpointWeights

pytestmark = pytest.mark.filterwarnings("ignore")  # torch says that there is one process, and that typed storages end


def converted(source, target, to, *, key=None, **options):
    planned = plan_conversion(open_source(source, key=key), target, to=to, **options)
    run_conversion(planned)
    return planned.plan


def trained(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    adamw = torch.optim.AdamW(
        [{"params": list(model[0].parameters()), "lr": 0.5}, {"params": list(model[1].parameters())}]
    )
    model(torch.randn(5, 4)).square().sum().backward()
    adamw.step()
    adamw.zero_grad()
    return model, adamw


@pytest.fixture
def checkpoint(tmp_path):
    model, adamw = trained()
    live = trainfold.attach(model, adamw)
    live.advance(samples=5)
    trainfold.save(live.capture(), tmp_path / "run")
    return tmp_path / "run", model, adamw


def same(one, other):
    assert one.keys() == other.keys()
    for name, each in one.items():
        assert torch.equal(each, other[name]) if isinstance(each, torch.Tensor) else each == other[name], name


def test_a_checkpoint_goes_to_torch_with_its_optimizer_and_step(tmp_path, checkpoint):
    """K10: torch.distributed.checkpoint.load puts all of it into a new model and optimizer, bit by bit."""
    run, model, adamw = checkpoint
    plan = converted(run, tmp_path / "dcp", "dcp")
    assert (plan.components, plan.step) == (("model", "optimizer"), 1)
    assert plan.left_out == ("trainer", "rng")
    assert "samples" in plan.tensors_left_out["trainer"]
    assert {each.name: each.stat().st_size for each in (tmp_path / "dcp").iterdir()} == plan.files
    other, theirs = trained(1)
    weights, slots = get_state_dict(other, theirs)
    found = {"model": weights, "optim": slots, "step": 0}
    dcp.load(found, checkpoint_id=str(tmp_path / "dcp"))
    wanted, wanted_slots = get_state_dict(model, adamw)
    same(found["model"], wanted)
    assert found["step"] == 1
    for name, each in wanted_slots["state"].items():
        same(found["optim"]["state"][name], each)
    assert [group["lr"] for group in found["optim"]["param_groups"]] == [0.5, 0.001]


def test_a_cast_model_goes_to_torch_without_its_optimizer(tmp_path, checkpoint):
    """K04: optimizer state is never cast, so it does not come along; buffers keep their dtypes."""
    run, model, _ = checkpoint
    plan = converted(run, tmp_path / "dcp", "dcp", dtype="bf16")
    assert (plan.components, plan.left_out) == (("model",), ("optimizer", "trainer", "rng"))
    found = {"model": {name: torch.empty_like(each) for name, each in model.state_dict().items()}}
    dtypes = {name: str(open_source(tmp_path / "dcp").model.specs()[name].dtype) for name in found["model"]}
    assert dtypes == {
        "0.weight": "bfloat16", "0.bias": "bfloat16", "1.weight": "bfloat16", "1.bias": "bfloat16",
        "1.running_mean": "float32", "1.running_var": "float32", "1.num_batches_tracked": "int64",
    }  # fmt: skip


@pytest.mark.parametrize("form", ["nested", "flat"])
def test_what_torch_has_saved_becomes_a_checkpoint_and_a_directory_of_a_hub(tmp_path, form):
    """K10: both forms of torch.distributed.checkpoint: under the keys of get_state_dict, and with the model at the top, as torchtitan has it."""
    model, adamw = trained()
    weights, slots = get_state_dict(model, adamw)
    state = (
        {"model": weights, "optim": slots, "step": 7}
        if form == "nested"
        else {**weights, "optimizer": slots, "train_state": {"step": 7}}
    )
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"))
    plan = converted(tmp_path / "dcp", tmp_path / "run", "native")
    assert (plan.step, plan.components) == (7, ("model",))
    assert set(plan.left_out) == {"optimizer", "trainer"}
    with CheckpointWeights(tmp_path / "run").opened() as found:
        same(
            {name: found.read(name, tuple((0, size) for size in spec.shape)) for name, spec in found.specs.items()},
            dict(sorted(weights.items())),
        )
    converted(tmp_path / "dcp", tmp_path / "hub", "hf")
    same(load_file(tmp_path / "hub" / "model.safetensors"), dict(sorted(weights.items())))
    assert (tmp_path / "run" / "step-00000007").is_dir()


@pytest.mark.parametrize("key", [None, "model", "state_dict", "model_state_dict"])
def test_a_file_of_torch_becomes_a_checkpoint(tmp_path, key):
    """The usual keys are found; another one is given."""
    model, adamw = trained()
    whole = (
        model.state_dict()
        if key is None
        else {key: model.state_dict(), "optimizer": adamw.state_dict(), "global_step": 3}
    )
    torch.save(whole, tmp_path / "file.pt")
    plan = converted(tmp_path / "file.pt", tmp_path / "run", "native")
    assert (plan.step, plan.source_format) == (None if key is None else 3, "torch")
    assert CheckpointWeights(tmp_path / "run").specs().keys() == model.state_dict().keys()
    torch.save({"net": {"inner": model.state_dict()}}, tmp_path / "other.pt")
    converted(tmp_path / "other.pt", tmp_path / "hub", "hf", key="net.inner")
    same(load_file(tmp_path / "hub" / "model.safetensors"), dict(sorted(model.state_dict().items())))


def test_a_directory_of_accelerate_becomes_a_checkpoint(tmp_path):
    """What its other pickles are is in the list of what is left out."""
    model, adamw = trained()
    top = tmp_path / "checkpoint_0"
    top.mkdir()
    save_file(model.state_dict(), top / "model.safetensors")
    torch.save(adamw.state_dict(), top / "optimizer.bin")
    (top / "random_states_0.pkl").write_bytes(b"\x80\x04N.")
    plan = converted(top, tmp_path / "run", "native")
    assert (plan.step, plan.source_format) == (1, "accelerate")
    assert {"optimizer", "random_states_0.pkl"} <= set(plan.left_out)
    assert CheckpointWeights(tmp_path / "run").specs().keys() == model.state_dict().keys()


def test_a_conversion_there_and_back_has_the_same_bytes(tmp_path, checkpoint):
    """Checkpoint -> torch -> hub -> checkpoint."""
    run, model, _ = checkpoint
    converted(run, tmp_path / "dcp", "dcp")
    converted(tmp_path / "dcp", tmp_path / "hub", "hf")
    converted(tmp_path / "hub", tmp_path / "back", "native")
    with CheckpointWeights(tmp_path / "back").opened() as found:
        same(
            {name: found.read(name, tuple((0, size) for size in spec.shape)) for name, spec in found.specs.items()},
            dict(sorted(model.state_dict().items())),
        )


def test_a_directory_with_the_names_of_a_hub_keeps_all_of_them(tmp_path):
    """`lm_head` was left out, and `model.` taken from the other names: dots in a name were taken for keys."""
    weights = {"model.embed.weight": torch.randn(3, 2), "lm_head.weight": torch.randn(3, 2)}
    dcp.save(weights, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert converted(tmp_path / "dcp", tmp_path / "hub", "hf").left_out == ()
    same(load_file(tmp_path / "hub" / "model.safetensors"), dict(sorted(weights.items())))


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_no_tensor_of_an_optimizer_becomes_a_weight(tmp_path, form):
    """`optimizer.state.0.exp_avg` and `ema.weight` were written as weights, beside those of `net`."""
    model, adamw = trained()
    weights, slots = get_state_dict(model, adamw)
    if form == "torch":
        torch.save({"net": weights, "optimizer": adamw.state_dict(), "ema": weights, "step": 7}, tmp_path / "x")
        key, left = "net", {"optimizer", "ema"}
    else:
        dcp.save(
            {"app": {"model": weights, "optim": slots}, "step": 7}, checkpoint_id=str(tmp_path / "x"), no_dist=True
        )
        key, left = "app.model", {"optimizer"}
    with pytest.raises(InvalidArgument, match=key) as refused:
        converted(tmp_path / "x", tmp_path / "hub", "hf")
    assert "--key" in refused.value.fix
    plan = converted(tmp_path / "x", tmp_path / "hub", "hf", key=key)
    assert (plan.step, set(plan.left_out)) == (7, left)
    same(load_file(tmp_path / "hub" / "model.safetensors"), dict(sorted(weights.items())))
    with pytest.raises(InvalidArgument, match="tensors under foo"):
        converted(tmp_path / "x", tmp_path / "run", "native", key="foo")


@pytest.mark.parametrize(
    "state", [{}, {"epoch": 3}, {"model": {}}, {"optimizer": {"state": {0: {"exp_avg": torch.ones(1)}}}}]
)
def test_a_file_without_a_model_is_refused(tmp_path, state):
    """A conversion of nothing succeeded."""
    torch.save(state, tmp_path / "x")
    with pytest.raises(InvalidArgument, match=r"no tensor|optimizer\.state"):
        open_source(tmp_path / "x")
    save_file({}, tmp_path / "x.safetensors")
    for to in ("hf", "native", "dcp"):
        with pytest.raises((InvalidArgument, InvalidState), match="tensor"):
            converted(tmp_path / "x.safetensors", tmp_path / to, to)


@pytest.mark.parametrize("where", ["step", "train_state"])
def test_a_step_that_is_a_tensor_is_known_and_an_object_of_a_class_is_left_out(tmp_path, where):
    """A step is a tensor in what torchtitan writes, and the checkpoint became `step-00000000`. One namespace blocked the whole conversion."""
    weights = {"w": torch.ones(2)}
    step = {"step": torch.tensor(9, dtype=torch.int32)}
    state = {"model": weights, **(step if where == "step" else {where: {**step, "tokens": torch.tensor(5)}})}
    dcp.save({**state, "args": argparse.Namespace(a=1)}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    plan = converted(tmp_path / "dcp", tmp_path / "run", "native")
    assert (plan.step, set(plan.left_out)) == (9, {"optimizer", "trainer", "args"})
    assert (tmp_path / "run" / "step-00000009").is_dir()


def test_a_step_that_cannot_be_read_is_listed(tmp_path):
    state = {"model": {"w": torch.ones(2)}, "step": argparse.Namespace(a=1)}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    plan = converted(tmp_path / "dcp", tmp_path / "hub", "hf")
    assert (plan.step, plan.left_out) == (None, ("step",))


def test_tensors_at_the_top_are_the_model_and_what_is_nested_beside_them_is_not(tmp_path):
    """A buffer named as a step is stays one."""
    weights = {"w": torch.ones(2), "step": torch.tensor(4.0)}
    torch.save({**weights, "lr_scheduler": {"last": torch.ones(1)}, "epoch": 3}, tmp_path / "x")
    plan = converted(tmp_path / "x", tmp_path / "hub", "hf")
    assert (plan.step, set(plan.left_out)) == (None, {"scheduler", "epoch"})
    same(load_file(tmp_path / "hub" / "model.safetensors"), dict(sorted(weights.items())))


@pytest.mark.parametrize("form", ["torch", "dcp"])
@pytest.mark.parametrize("names", ["hub", "code"])
def test_rules_lead_from_the_names_that_torch_has_written_or_are_refused(tmp_path, form, names):
    """Either program may have written them: a file with the names of the reference code was refused ("both sides have the same names"), a directory with those of the hub too."""
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "tie_word_embeddings": false}'
    )
    of_hub = {f"model.layers.0.self_attn.{name}_proj.weight": torch.randn(8, 8) for name in "qk"}
    rules = hub_rules("llama", heads=2, kv_heads=2, head_dim=4, tied=False)
    of_code = dict(transform_tensors(rules.inverse, of_hub))
    weights = of_hub if names == "hub" else of_code
    if form == "torch":
        torch.save(weights, tmp_path / "x")
    else:
        dcp.save(weights, checkpoint_id=str(tmp_path / "x"), no_dist=True)
    fits, other = ("native", "hf") if names == "hub" else ("hf", "native")
    converted(tmp_path / "x", tmp_path / "out", fits, rules="llama", like=config)
    with opened_weights(open_source(tmp_path / "out").model) as found:
        same(
            {name: found.read(name, ((0, 8), (0, 8))) for name in sorted(found.specs)},
            dict(sorted((of_code if names == "hub" else of_hub).items())),
        )
    with pytest.raises(InvalidState, match="have these names already"):
        converted(tmp_path / "x", tmp_path / "other", other, rules="llama", like=config)
