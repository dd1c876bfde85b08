"""Conversions to a checkpoint: the same bytes, a tensor at a time, with what is left out on record, and continued where they were killed."""

import json
from contextlib import suppress
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.backends import conversion_cases
from kit.backends.reuse_cases import SHAPES, Chain
from safetensors.torch import load_file, save_file

import trainfold
from trainfold.backends.convert import continued_files
from trainfold.backends.convert.conversion_run import plan_conversion, run_conversion
from trainfold.backends.convert.opened_source import open_source
from trainfold.backends.formats import staged_directory
from trainfold.core.errors import CheckpointDamaged
from trainfold.core.layout.shard import make_shard
from trainfold.core.layout.slices import whole_box
from trainfold.core.tensor_memory import tensor_bytes
from trainfold.core.transform.apply import transform_tensors
from trainfold.core.transform.families.hub_rules import hub_rules
from trainfold.core.weights.source import Wanted
from trainfold.errors import CheckpointForeign, CheckpointMissing, InvalidArgument, InvalidState, ResumeRefused
from trainfold.ranks import run_threads
from trainfold.weights import CheckpointWeights, HubDirectory

STORED = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
)


def converted(source, target, *, to="native", **options):
    return run_conversion(plan_conversion(open_source(source), target, to=to, **options))


a_hub_directory = conversion_cases.a_hub_directory
weights = conversion_cases.weights
bytes_of = conversion_cases.bytes_of


def trained(seed=0):
    """A live run of a model with parameters, buffers and a tie, whose optimizer has slots."""
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(6, 6), "norm": torch.nn.BatchNorm1d(6), "b": torch.nn.Linear(6, 6)}
    )
    model["b"].weight = model["a"].weight
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1)
    model["b"](model["norm"](model["a"](torch.randn(4, 6)))).sum().backward()
    adamw.step()
    return trainfold.attach(model, adamw)


@settings(max_examples=20)
@given(data=st.data())
def test_weights_of_a_hub_become_a_checkpoint_bit_by_bit(tmp_path_factory, data):
    """K10: any dtype and shape, also empty ones; what CheckpointWeights reads from it is what HubDirectory read."""
    names = data.draw(
        st.lists(st.sampled_from(["a.weight", "a.bias", "b['x'].w", "weird name", "n.0"]), unique=True, min_size=1)
    )
    found = {}
    for name in names:
        dtype = data.draw(st.sampled_from(STORED))
        shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
        found[name] = (
            torch.randint(0, 2, shape).to(dtype)
            if dtype is torch.bool
            else torch.randint(-9, 9, shape).to(torch.int8).to(dtype)
        )
    top = tmp_path_factory.mktemp("top")
    hub = a_hub_directory(top / "hub", found)
    converted(hub, top / "run")
    assert weights(CheckpointWeights(top / "run")) == bytes_of(found) == weights(HubDirectory(hub))


PARTS = st.sampled_from(
    ["module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "a", "0", "w", ""]
)
NAMES = st.lists(PARTS, min_size=1, max_size=3).map(".".join) | st.text(
    st.sampled_from("wé\n\\'\"[]\u200b\U0001f600/ \0"), max_size=4
)


@settings(max_examples=25)
@given(names=st.sets(NAMES, min_size=1, max_size=4))
@example(names={"module.w", "w"})
@example(names={"", "z"})
@example(names={"a._orig_mod.w", "w\n", "w\\n", "it's", 'a "w"', 'it\'s "w"'})
def test_names_go_to_a_checkpoint_and_back_as_they_are(tmp_path_factory, names):
    """K10: those of wrappers too, and what a name may have beside letters; `diff` and a hub see each tensor."""
    path = tmp_path_factory.mktemp("names")
    tensors = {name: torch.full((2,), float(number)) for number, name in enumerate(sorted(names))}
    hub = a_hub_directory(path / "hub", tensors)
    converted(hub, path / "run")
    assert weights(CheckpointWeights(path / "run")) == bytes_of(tensors)
    wanted = {
        name: Wanted(spec.dtype, spec.shape, whole_box(spec.shape)) for name, spec in HubDirectory(hub).specs().items()
    }
    assert bytes_of(dict(CheckpointWeights(path / "run").supply(wanted))) == bytes_of(tensors)
    converted(path / "run", path / "back", to="hf")
    assert bytes_of(load_file(path / "back/model.safetensors")) == bytes_of(tensors)


def test_a_checkpoint_that_is_copied_has_the_same_fingerprints_and_resumes_in_full(tmp_path):
    """K10: nothing is cast or renamed, so nothing is left out: optimizer, streams and counters come along, and the step."""
    live = trained()
    saved = trainfold.save(live.capture(), tmp_path / "run")
    where = converted(tmp_path / "run" / saved.checkpoint, tmp_path / "copy")
    state = trainfold.load(tmp_path / "copy", like=trained(1).capture())
    assert trainfold.fingerprint(state) == saved.fingerprints
    assert where.endswith(f"copy/{saved.checkpoint}")


def test_what_is_left_out_is_on_record_and_a_full_resume_passes_it_over(tmp_path):
    """T24: an export is never taken for a checkpoint that can be resumed; as a source of weights it can be used."""
    live = trained()
    trainfold.save(live.capture(), tmp_path / "run")
    planned = plan_conversion(open_source(tmp_path / "run"), tmp_path / "export", to="native", dtype="bf16")
    assert planned.plan.components == ("model",)
    assert planned.plan.left_out == ("optimizer", "trainer", "rng")
    run_conversion(planned)
    with pytest.raises(ResumeRefused, match="optimizer"):
        trainfold.load(tmp_path / "export", like=trained(1).capture())
    assert CheckpointWeights(tmp_path / "export").specs()["a.weight"].dtype == "bfloat16"
    assert CheckpointWeights(tmp_path / "export").specs()["norm.num_batches_tracked"].dtype == "int64"
    assert CheckpointWeights(tmp_path / "export").specs()["norm.running_mean"].dtype == "float32"  # K04: a buffer
    state = trainfold.load(
        tmp_path / "export",
        like=trained(1).capture(),
        components=["model"],
        policy={"dtype": "adapt", "unproven": "adapt"},
    )
    assert torch.equal(state.model.params["a.weight"], live.capture().model.params["a.weight"].bfloat16().float())
    assert dict(state.model.ties) == {"b.weight": "a.weight"}


def llama(layers=2, heads=4, dim=16):
    """Weights as the hub has them."""
    found = {
        "model.embed_tokens.weight": torch.randn(8, dim),
        "lm_head.weight": torch.randn(8, dim),
        "model.norm.weight": torch.randn(dim),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        found |= {f"{at}.self_attn.{name}_proj.weight": torch.randn(dim, dim) for name in "qkvo"}
        found |= {f"{at}.mlp.{name}_proj.weight": torch.randn(dim, dim) for name in ("gate", "up", "down")}
        found |= {f"{at}.{name}_layernorm.weight": torch.randn(dim) for name in ("input", "post_attention")}
    return found


CONFIG = '{"model_type": "llama", "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": false}'


def test_a_conversion_that_streams_gives_what_all_tensors_at_once_give(tmp_path):
    """K10: rules are applied while tensors are read one after the other."""
    hub = a_hub_directory(tmp_path / "hub", llama())
    (hub / "config.json").write_text(CONFIG)
    converted(hub, tmp_path / "run", rules="llama", dtype="bf16")
    rules = hub_rules("llama", heads=4, kv_heads=4, head_dim=4, tied=False).inverse
    wanted = {name: each.bfloat16() for name, each in transform_tensors(rules, load_file(hub / "model.safetensors"))}
    assert weights(CheckpointWeights(tmp_path / "run")) == bytes_of(wanted)
    manifest = open_source(tmp_path / "run").checkpoint.manifest
    note = manifest.contract["converted"]
    assert (note["from"], note["name"]) == ("hf", "hub")
    assert note["transforms"].splitlines()[-1] == "cast floating tensors to bfloat16 (no inverse)"
    assert "layers.{i}.attention.wq.weight" in note["transforms"]


class Interrupted(Exception):
    """What ends a process at a certain read."""


@pytest.mark.parametrize("stop", [0, 1, 4, 8, 9])
def test_a_conversion_goes_on_where_it_stopped_and_reads_no_more_than_it_needs(tmp_path, monkeypatch, stop):
    """Until the end, nothing at the target can be taken for a checkpoint."""
    monkeypatch.setattr(continued_files, "NOTE_BYTES", 2048)
    tensors = {f"w{number}": torch.randn(256) for number in range(10)}
    hub = a_hub_directory(tmp_path / "hub", tensors)
    read = []

    def advance(size_bytes):
        read.append(size_bytes)
        if len(read) > stop and len(read) <= 10:
            raise Interrupted

    with pytest.raises(Interrupted):
        run_conversion(plan_conversion(open_source(hub), tmp_path / "run", to="native"), advance=advance)
    with pytest.raises(Exception, match="checkpoint"):
        CheckpointWeights(tmp_path / "run").specs()
    read[:] = [0] * 10
    run_conversion(plan_conversion(open_source(hub), tmp_path / "run", to="native"), advance=advance)
    assert len(read) - 10 <= 10 - max(0, stop - 2)
    assert weights(CheckpointWeights(tmp_path / "run")) == bytes_of(tensors)
    assert not [each for each in (tmp_path / "run" / "step-00000000").iterdir() if each.name.startswith(".")]
    read[:] = [0] * 10
    run_conversion(plan_conversion(open_source(hub), tmp_path / "run", to="native"), advance=advance)
    assert len(read) == 10, "all of it is there, and nothing is read again"


@settings(max_examples=6)
@given(data=st.data())
@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_a_directory_is_the_same_wherever_its_writer_was_stopped(tmp_path_factory, to, data):
    """Law: killed in any tensor and run again, as often as may be, is run at once; inside of a file too."""
    top = tmp_path_factory.mktemp("top")
    sizes = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=8))
    hub = a_hub_directory(top / "hub", {f"w{number}": torch.randn(size) for number, size in enumerate(sizes)})
    converted(hub, top / "at_once", to=to)
    stops = data.draw(st.lists(st.integers(1, len(sizes)), max_size=3))
    with mock.patch.object(staged_directory, "NOTE_BYTES", 64):
        for stop in stops:
            read = []

            def advance(size_bytes, read=read, stop=stop):
                read.append(size_bytes)
                if len(read) == stop:
                    raise Interrupted

            with suppress(Interrupted):  # or it had less to do than that
                run_conversion(plan_conversion(open_source(hub), top / "target", to=to), advance=advance)
                break
            assert not (top / "target").exists()
        else:
            converted(hub, top / "target", to=to)
    files = [{each.name: each.read_bytes() for each in (top / name).iterdir()} for name in ("at_once", "target")]
    assert files[0] == files[1]


def test_the_step_of_a_checkpoint_goes_to_the_hub_and_back(tmp_path):
    """K10: in the headers of the files, where a hub has room for texts."""
    live = trained()
    live.advance(samples=4)
    trainfold.save(live.capture(), tmp_path / "run")
    converted(tmp_path / "run", tmp_path / "hub", to="hf")
    assert open_source(tmp_path / "hub").step == open_source(tmp_path / "hub" / "model.safetensors").step == 1
    assert converted(tmp_path / "hub", tmp_path / "back").endswith("step-00000001")


def test_a_checkpoint_of_several_ranks_becomes_one_of_a_single_process(tmp_path):
    """K08, K10: leaves that ranks hold in parts are put together; what each rank has of its own is left out, and on record."""
    state = trained().capture()  # threads share the global generator

    def save(ranks):
        rows = slice(3 * ranks.rank, 3 * ranks.rank + 3)
        whole = torch.arange(18.0).view(6, 3)
        shard = make_shard(whole[rows].clone(), shape=(6, 3), starts=(3 * ranks.rank, 0))
        return trainfold.save(state.evolve(extra={"rows": {"w": shard}}), tmp_path / "run", collectives=ranks)

    saved = run_threads(2, save)[0]
    planned = plan_conversion(open_source(tmp_path / "run"), tmp_path / "copy", to="native")
    assert planned.plan.left_out == ("rng",)
    run_conversion(planned)
    found = open_source(tmp_path / "copy").checkpoint.manifest
    assert found.world_size == 1
    kept = {each.name: each.fingerprint for each in found.components}
    assert {name: kept[name] for name in ("model", "optimizer", "trainer")} == {
        name: saved.fingerprints[name] for name in ("model", "optimizer", "trainer")
    }
    with CheckpointWeights(tmp_path / "copy", component="rows").opened() as opened:
        assert torch.equal(opened.read("w", ((0, 6), (0, 3))), torch.arange(18.0).view(6, 3))


def test_a_checkpoint_that_refers_to_others_becomes_one_that_stands_alone(tmp_path):
    """Leaves that did not change since an earlier checkpoint are in its files."""
    chain = Chain(store=trainfold.LocalStore(tmp_path / "run"))
    versions = dict.fromkeys(SHAPES, 0)
    chain.save(1, versions)
    saved = chain.save(2, {**versions, "rows": 1})
    assert open_source(tmp_path / "run").checkpoint.manifest.references
    converted(tmp_path / "run", tmp_path / "copy")
    found = open_source(tmp_path / "copy").checkpoint.manifest
    assert not found.references
    assert {each.name: each.fingerprint for each in found.components} == saved.fingerprints


def test_weights_that_go_to_a_checkpoint_and_back_are_the_same_bytes(tmp_path):
    """K07, K10: hub -> checkpoint -> hub, with rules in both directions; what is beside the weights comes along."""
    hub = a_hub_directory(tmp_path / "hub", llama())
    (hub / "config.json").write_text(CONFIG)
    (hub / "tokenizer.json").write_text("{}")
    converted(hub, tmp_path / "run", rules="llama")
    planned = plan_conversion(open_source(tmp_path / "run"), tmp_path / "back", to="hf", rules="llama", like=hub)
    assert not (tmp_path / "back").exists()
    read = []
    assert run_conversion(planned, advance=read.append) == str(tmp_path / "back")
    assert sum(read) == planned.plan.read_bytes
    assert bytes_of(load_file(tmp_path / "back" / "model.safetensors")) == bytes_of(
        load_file(hub / "model.safetensors")
    )
    assert {each.name: each.stat().st_size for each in (tmp_path / "back").iterdir()} == planned.plan.files
    assert planned.plan.files.keys() >= {"config.json", "tokenizer.json"}
    assert weights(CheckpointWeights(tmp_path / "run")).keys() >= {"layers.0.attention.wq.weight"}


def test_a_conversion_that_goes_on_needs_room_for_what_is_missing_alone(tmp_path, monkeypatch):
    """The disk was large enough when it began, and has as much less room as is there already."""
    hub = a_hub_directory(tmp_path / "hub", {f"w{number}": torch.randn(4096) for number in range(8)})
    monkeypatch.setattr(continued_files, "NOTE_BYTES", 4096)
    asked = []
    monkeypatch.setattr(trainfold.LocalStore, "reserve", lambda _, size_bytes: asked.append(size_bytes))
    read = []

    def advance(size_bytes):
        read.append(size_bytes)
        if len(read) == 5:
            raise Interrupted

    planned = plan_conversion(open_source(hub), tmp_path / "run", to="native")
    with pytest.raises(Interrupted):
        run_conversion(planned, advance=advance)
    run_conversion(planned, advance=advance)
    assert asked[1] <= asked[0] - 4 * 4 * 4096


def test_another_source_or_another_dtype_does_not_go_on_with_what_is_there(tmp_path):
    """V15: what is begun belongs to one source and one plan."""
    hub = a_hub_directory(tmp_path / "hub", {"w": torch.ones(4)})
    converted(hub, tmp_path / "run")
    other = a_hub_directory(tmp_path / "other", {"w": torch.zeros(4)})
    for source, options in ((other, {}), (hub, {"dtype": "bf16"})):
        with pytest.raises(InvalidArgument, match="a run is never written into"):
            converted(source, tmp_path / "run", **options)
    assert weights(CheckpointWeights(tmp_path / "run")) == bytes_of({"w": torch.ones(4)})
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a").touch()
    with pytest.raises(InvalidArgument, match="a run is never written into"):
        converted(hub, tmp_path / "notes")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bf17"}, "one of bf16"),
        ({"dtype": "int8"}, "one of bf16"),
        ({"rules": "unknown"}, "one of llama"),
        ({"rules": "gpt2", "like": "config.json"}, "the family of the config, llama"),
        ({"to": "onnx"}, "one of native, hf, dcp"),
    ],
)
def test_a_wrong_option_is_an_error_before_anything_is_read(tmp_path, options, message):
    """K09."""
    hub = a_hub_directory(tmp_path / "hub", llama())
    (tmp_path / "config.json").write_text(CONFIG)
    if "like" in options:
        options = {**options, "like": tmp_path / "config.json"}
    with pytest.raises(InvalidArgument, match=message):
        converted(hub, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_rules_between_two_sides_with_the_same_names_are_refused(tmp_path):
    """K09: a checkpoint has the names of the model's code, so rules lead nowhere."""
    trainfold.save(trained().capture(), tmp_path / "run")
    with pytest.raises(InvalidArgument, match="both sides have the same names"):
        converted(tmp_path / "run", tmp_path / "other", rules="llama")


def test_the_step_of_a_trainer_is_that_of_the_checkpoint(tmp_path):
    """K10."""
    hub = a_hub_directory(tmp_path / "hub", {"w": torch.ones(4)})
    (hub / "trainer_state.json").write_text('{"global_step": 500, "log_history": [{"loss": NaN}]}')
    (hub / "optimizer.pt").write_bytes(b"a pickle")
    planned = plan_conversion(open_source(hub), tmp_path / "run", to="native")
    assert (planned.plan.step, planned.plan.left_out) == (500, ("optimizer", "trainer"))
    assert run_conversion(planned).endswith("step-00000500")


def test_a_path_that_is_not_understood_is_refused_with_what_was_seen(tmp_path):
    (tmp_path / "a").write_bytes(b"hello")
    with pytest.raises(CheckpointForeign, match="begins with b'hello'"):
        open_source(tmp_path / "a")


def an_adapter(path, *, alpha=4.0, **settings):
    """An adapter of peft for the layer `q`, and its tensors under the names of a model."""
    tensors = {
        "base_model.model.q.lora_A.weight": torch.randn(2, 6),
        "base_model.model.q.lora_B.weight": torch.randn(4, 2),
    }
    if "modules_to_save" in settings:
        tensors["base_model.model.head.weight"] = torch.randn(3)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": alpha, **settings}))
    return tensors


@pytest.mark.parametrize("settings", [{}, {"modules_to_save": ["head"]}])
@pytest.mark.parametrize("to", ["hf", "native", "dcp"])
def test_an_adapter_beside_its_base_is_merged(tmp_path, to, settings):
    """K03, K10: of two directories, as peft leaves them, and of a run that has all of it, the same weights."""
    base = {"q.weight": torch.randn(4, 6), "head.weight": torch.randn(3)}
    hub, adapter = a_hub_directory(tmp_path / "base", base), an_adapter(tmp_path / "adapter", **settings)
    a, b = adapter["base_model.model.q.lora_A.weight"], adapter["base_model.model.q.lora_B.weight"]
    converted(hub, tmp_path / "merged", to=to, lora=tmp_path / "adapter")
    with open_source(tmp_path / "merged").model.opened() as found:
        torch.testing.assert_close(found.read("q.weight", ((0, 4), (0, 6))), base["q.weight"] + b @ a * 2)
    merged = weights(open_source(tmp_path / "merged").model)
    assert merged["head.weight"] == bytes(
        tensor_bytes(adapter.get("base_model.model.head.weight", base["head.weight"]))
    )
    whole = {
        "base_model.model.q.base_layer.weight": base["q.weight"],
        "base_model.model.q.lora_A.default.weight": a,
        "base_model.model.q.lora_B.default.weight": b,
        ("base_model.model.head.original_module.weight" if settings else "base_model.model.head.weight"): base[
            "head.weight"
        ],
    }
    if settings:
        whole["base_model.model.head.modules_to_save.default.weight"] = adapter["base_model.model.head.weight"]
    converted(a_hub_directory(tmp_path / "whole", whole), tmp_path / "run")
    converted(tmp_path / "run", tmp_path / "again", to=to, lora=tmp_path / "adapter/adapter_config.json")
    assert weights(open_source(tmp_path / "again").model) == merged


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, InvalidArgument, "found q.base_layer.weight; merge them: --lora adapter_config.json"),
        ({"lora": "adapter"}, InvalidArgument, "one in .*whole, and one in .*adapter; pass .*adapter_config.json"),
        ({"lora": "nothing"}, CheckpointMissing, "the configuration of an adapter"),
        ({"dequantise": True}, InvalidArgument, "expected quantization_config in the config.json"),
    ],
)
def test_adapters_and_scales_that_are_not_merged_are_refused(tmp_path, options, error, message):
    """K09: a directory of a hub with their names would be loaded without them, and without the layers that they wrap."""
    an_adapter(tmp_path / "adapter")
    whole = {
        "q.base_layer.weight": torch.ones(4, 6),
        "q.lora_A.default.weight": torch.ones(2, 6),
        "q.lora_B.default.weight": torch.ones(4, 2),
    }
    source = open_source(a_hub_directory(tmp_path / "whole", whole))
    if "lora" in options:
        options = {"lora": tmp_path / options["lora"]}
    with pytest.raises(error, match=message):
        plan_conversion(source, tmp_path / "b", to="hf", **options)
    with pytest.raises(CheckpointMissing, match=r"the tensors of an adapter, in .*base or beside the configuration"):
        plan_conversion(open_source(a_hub_directory(tmp_path / "base", {"q.weight": torch.ones(4, 6)})), tmp_path / "b", to="hf", lora=tmp_path / "adapter/adapter_config.json")  # fmt: skip


def test_quantised_weights_become_what_their_configuration_says(tmp_path):
    """K06."""
    tensors = {"q.weight": torch.ones(4, 6).to(torch.float8_e4m3fn), "q.weight_scale_inv": torch.full((2, 3), 0.5)}
    hub = a_hub_directory(tmp_path / "a", tensors)
    (hub / "config.json").write_text(json.dumps({"torch_dtype": "float32", "quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 2]}}))  # fmt: skip
    converted(hub, tmp_path / "b", to="hf", dequantise=True)
    assert torch.equal(load_file(tmp_path / "b/model.safetensors")["q.weight"], torch.full((4, 6), 0.5))
    assert "quantization_config" not in json.loads((tmp_path / "b/config.json").read_text())


def test_why_an_optimizer_is_left_out_is_said_with_what_takes_it(tmp_path):
    """K10: where it could be taken, what takes it is named."""
    live = trained()
    trainfold.save(live.capture(), tmp_path / "run")
    torch.save({"model": live.attached()["model"].state_dict(), "optimizer": {"state": {}}}, tmp_path / "a.pt")
    for source, options, words in (
        (tmp_path / "a.pt", {"to": "native"}, "take_training takes it where a program has it"),
        (tmp_path / "run", {"to": "native", "dtype": "bf16"}, "never cast"),
        (tmp_path / "run", {"to": "dcp", "dtype": "bf16"}, "never cast"),
        (tmp_path / "run", {"to": "hf"}, "a directory of a hub has none"),
    ):
        plan = plan_conversion(open_source(source), tmp_path / "b", **options).plan
        assert words in plan.tensors_left_out["optimizer"]
    assert plan_conversion(open_source(tmp_path / "run"), tmp_path / "b", to="native").plan.tensors_left_out == {}


def test_experts_in_one_tensor_go_to_the_hub_apart_and_come_back(tmp_path):
    """K02, K08: as modules of transformers 5 have them; the configuration names the family."""
    at = "model.layers.0.mlp"
    fused = {
        f"{at}.experts.gate_up_proj": torch.randn(3, 4, 2),
        f"{at}.experts.down_proj": torch.randn(3, 2, 2),
        f"{at}.gate.weight": torch.randn(3, 2),
    }
    model = a_hub_directory(tmp_path / "model", fused)
    converted(model, tmp_path / "run")
    with pytest.raises(InvalidArgument, match=r"the config.json of the model.*give it with --like"):
        plan_conversion(open_source(tmp_path / "run"), tmp_path / "hub", to="hf", rules="transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    with pytest.raises(InvalidState, match=r"_proj: expected the experts of this mixtral apart.*--rules transformers"):
        plan_conversion(open_source(tmp_path / "run"), tmp_path / "hub", to="hf", like=tmp_path / "config.json")
    converted(tmp_path / "run", tmp_path / "hub", to="hf", rules="transformers", like=tmp_path / "config.json")
    apart = load_file(tmp_path / "hub/model.safetensors")
    assert len(apart) == 3 * 3 + 1
    assert torch.equal(
        apart["model.layers.0.block_sparse_moe.experts.1.w3.weight"], fused[f"{at}.experts.gate_up_proj"][1, 2:]
    )
    converted(tmp_path / "hub", tmp_path / "back", rules="transformers")
    assert weights(CheckpointWeights(tmp_path / "back")) == bytes_of(fused)


def test_a_complete_run_whose_bytes_have_changed_is_not_the_same(tmp_path):
    """The same conversion again compares each file with its digest, as it compares those of a hub and of torch with SRC."""
    hub = a_hub_directory(tmp_path / "hub", {"w": torch.randn(8)})
    converted(hub, tmp_path / "run")
    assert converted(hub, tmp_path / "run")
    (file,) = (tmp_path / "run").glob("step-*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match=file.name) as refused:
        converted(hub, tmp_path / "run")
    assert "convert again" in refused.value.fix
