"""`inspect`, `diff` and `verify` on what is not a checkpoint of a run."""

import argparse
import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kit.adapters import cli_cases
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import trainfold
from trainfold.weights import CheckpointWeights, DcpDirectory, TorchFile, write_dcp_directory, write_hub_directory

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

saved = cli_cases.saved
run = cli_cases.run
call = cli_cases.call
answered = cli_cases.answered

WEIGHTS = {"a": torch.ones(4), "b": torch.arange(3.0).bfloat16(), "n": torch.arange(2)}


@pytest.fixture
def hub(tmp_path):
    path = tmp_path / "hub"
    path.mkdir()
    save_file(WEIGHTS, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def several(tmp_path):
    """A directory with an index of two files."""
    path = tmp_path / "several"
    path.mkdir()
    save_file({"a": WEIGHTS["a"]}, path / "model-00001-of-00002.safetensors")
    save_file({"b": WEIGHTS["b"], "n": WEIGHTS["n"]}, path / "model-00002-of-00002.safetensors")
    where = {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
        "n": "model-00002-of-00002.safetensors",
    }
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 38}, "weight_map": where})
    )
    return path


def test_inspect_shows_the_format_what_shows_it_and_each_tensor(answered, call, hub):
    found, _ = answered("inspect", hub)
    assert (found["format"], found["seen"], found["size_bytes"]) == ("hf", ["model.safetensors", "config.json"], 38)
    assert {each["name"]: (each["dtype"], each["shape"]) for each in found["tensors"]} == {
        "a": ("float32", [4]), "b": ("bfloat16", [3]), "n": ("int64", [2]),
    }  # fmt: skip
    out, _ = call("inspect", hub / "model.safetensors", "--tensors")
    assert "format            safetensors" in out
    assert "a     float32   [4]    16" in out


def test_what_has_no_known_format_says_what_was_seen(answered, tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    for command in (("inspect",), ("verify",), ("diff", tmp_path)):
        _, error = answered(*command, tmp_path, code=15)
        assert "notes.txt" in error["found"]


def test_diff_of_two_formats_names_each_tensor_that_differs_and_by_how_much(answered, call, hub, several):
    """Section 6 of the issue: which leaves differ, by how much, in units in the last place."""
    found, _ = answered("diff", hub, several)
    assert (found["same"], found["compared"], found["tensors"]) == (True, 3, [])
    changed = {
        "a": torch.tensor([1.0, 1.0, 1.0000001, 2.0]),
        "b": WEIGHTS["b"].float(),
        "c": torch.ones(1),
        "n": torch.arange(3),
    }
    save_file(changed, hub / "model.safetensors")
    found, error = answered("diff", several, hub, code=3)
    assert "4 of 4" in error["found"]
    assert {each["name"]: (each["a"], each["b"], each["differing"], each["max_ulps"]) for each in found["tensors"]} == {
        "a": ("float32[4]", "float32[4]", 2, 2**23),
        "b": ("bfloat16[3]", "float32[3]", 0, None),  # equal after rounding, and yet another dtype
        "c": ("absent", "float32[1]", None, None),
        "n": ("int64[2]", "int64[3]", None, None),
    }  # fmt: skip
    out, _ = call("diff", several, hub, code=3)
    assert "2 of 4 differ, by up to 8,388,608 ulps, 1" in out
    assert "after rounding: equal" in out
    assert "shapes differ" in out


def test_a_checkpoint_is_compared_with_a_directory_of_a_hub_through_rules(answered, tmp_path):
    """One side has the names of the model's code, the other those of the hub."""
    from trainfold.transforms import hub_rules, transform_tensors

    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "tie_word_embeddings": False}
    hub = tmp_path / "hub"
    hub.mkdir()
    tensors = {f"model.layers.0.self_attn.{name}_proj.weight": torch.randn(8, 8) for name in "qkvo"}
    save_file(tensors, hub / "model.safetensors")
    (hub / "config.json").write_text(json.dumps(config))
    answered("convert", hub, tmp_path / "run", "--to", "native", "--rules", "llama")
    assert "layers.0.attention.wq.weight" in CheckpointWeights(tmp_path / "run").specs()
    found, _ = answered("diff", tmp_path / "run", hub, "--rules", "llama")
    assert (found["same"], found["compared"]) == (True, 4)
    found, _ = answered("diff", hub, tmp_path / "run", "--rules", "llama")
    assert (found["same"], found["compared"]) == (True, 4)
    found, error = answered("diff", tmp_path / "run", hub, code=3)
    assert found["compared"] == 8
    assert "--rules" in error["fix"]
    answered("diff", hub, hub, "--rules", "llama", code=2)
    _, error = answered("diff", tmp_path / "run", hub, "--rules", "gpt2", code=2)
    rules = hub_rules("llama", heads=2, kv_heads=2, head_dim=4, tied=False)
    assert {name for name, _ in transform_tensors(rules.inverse, tensors)} == set(
        CheckpointWeights(tmp_path / "run").specs()
    )


def test_diff_of_two_checkpoints_says_by_how_much_if_asked(answered, run):
    """Without --values only the digests of the manifests are compared."""
    two, four = run / "step-00000002", run / "step-00000004"
    found, _ = answered("diff", two, four, code=3)
    assert found["values"] == {}
    other = shutil.copytree(run, run.parent / "other", symlinks=True)
    from trainfold.adapters.cli.locate import open_checkpoint
    from trainfold.backends.runs.api import load, save

    state = load(run, like=cli_cases.state_at(0), step=4, policy={"unproven": "warn"})
    weight = state.model.params["0.weight"]
    weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(9.0))
    save(state, other)
    found, _ = answered(
        "diff", four, open_checkpoint(other).url.replace("step-00000006", "step-00000004"), "--values", code=3
    )
    assert {name: (each["differing"], each["max_ulps"]) for name, each in found["values"].items()} == {
        "model.params['0.weight']": (1, 1)
    }


def test_verify_reads_all_files_and_says_what_it_cannot_know(answered, hub, several):
    found, _ = answered("verify", several)
    assert (found["verified"], len(found["files"])) == (True, 2)
    assert "no digests" in found["not_checked"]
    one, _ = answered("verify", hub / "model.safetensors")
    whole, _ = answered("verify", hub)
    assert one["files"] == whole["files"]


@pytest.mark.parametrize("how", ["missing", "cut", "elsewhere", "twice", "unlisted", "index"])
def test_verify_finds_what_does_not_fit_together(answered, several, how):
    """U05: whatever is wrong is named, with the file."""
    index = several / "model.safetensors.index.json"
    first, second = (several / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    found = json.loads(index.read_text())
    if how == "missing":
        first.unlink()
    elif how == "cut":
        first.write_bytes(first.read_bytes()[:-1])
    elif how == "elsewhere":
        found["weight_map"]["a"] = second.name
    elif how == "twice":
        save_file({**load_file(first), "b": WEIGHTS["b"]}, first)
    elif how == "unlisted":
        save_file({**load_file(first), "more": WEIGHTS["b"]}, first)
    else:
        found["weight_map"] = []
    index.write_text(json.dumps(found))
    answer, _ = answered("verify", several, code=11 if how == "missing" else 14)
    assert not answer["verified"]
    words = {
        "missing": first.name,
        "cut": first.name,
        "elsewhere": ": a",
        "twice": ": b",
        "unlisted": "more",
        "index": index.name,
    }[how]
    assert any(words in each["where"] for each in answer["problems"])


def test_an_exported_checkpoint_is_whole_and_has_the_same_weights(answered, run, tmp_path):
    write_hub_directory(CheckpointWeights(run), tmp_path / "out", config={"model_type": "linear"})
    answered("verify", tmp_path / "out")
    found, _ = answered("diff", run, tmp_path / "out")
    assert found["same"]


def test_what_torch_has_written_is_inspected_verified_and_compared(answered, run, tmp_path):
    """Each tensor is read: a file that is cut off is found, and the tensor that was in it."""
    answered("convert", run, tmp_path / "dcp", "--to", "dcp")
    found, _ = answered("inspect", tmp_path / "dcp")
    assert (found["format"], found["step"]) == ("dcp", 6)
    assert {each["name"] for each in found["tensors"]} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert answered("diff", run, tmp_path / "dcp")[0]["same"]
    assert answered("verify", tmp_path / "dcp")[0]["verified"]
    torch.save({"state_dict": {"a": WEIGHTS["a"]}, "global_step": 5}, tmp_path / "file.ckpt")
    found, _ = answered("inspect", tmp_path / "file.ckpt")
    assert (found["format"], found["step"], found["size_bytes"]) == ("torch", 5, 16)
    part = tmp_path / "dcp" / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-1000])
    _, error = answered("verify", tmp_path / "dcp", code=13)
    assert "__0_0.distcp" in error["where"]


def test_a_file_with_several_models_is_looked_at_under_the_key_that_is_asked_for(answered, hub, tmp_path):
    """As by `convert`: of inspect, verify and diff, which compares it with a side that has no keys."""
    torch.save({"model": {"a": torch.zeros(4)}, "teacher": {"net": WEIGHTS}}, tmp_path / "both.pt")
    found, _ = answered("inspect", tmp_path / "both.pt", "--key", "teacher.net")
    assert {each["name"] for each in found["tensors"]} == set(WEIGHTS)
    assert answered("verify", tmp_path / "both.pt", "--key", "teacher.net")[0]["verified"]
    assert answered("diff", tmp_path / "both.pt", hub, "--key", "teacher.net")[0]["same"]
    assert answered("diff", hub, tmp_path / "both.pt", "--key", "teacher.net")[0]["same"]
    assert not answered("diff", hub, tmp_path / "both.pt", code=3)[0]["same"]
    for command in (("inspect", hub), ("verify", hub), ("diff", hub, hub), ("convert", hub, tmp_path / "b", "--to", "native")):  # fmt: skip
        _, error = answered(*command, "--key", "model", code=2)
        assert "leave out --key" in json.dumps(error)


def test_an_adapter_is_merged_by_the_command(answered, call, tmp_path):
    """Its plan shows the merge, and does it."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    save_file({"q.weight": torch.zeros(2, 2)}, base / "model.safetensors")
    save_file({"base_model.model.q.lora_A.weight": torch.ones(1, 2), "base_model.model.q.lora_B.weight": torch.ones(2, 1)}, adapter / "adapter_model.safetensors")  # fmt: skip
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 3, "r": 1}')
    found, _ = answered("convert", base, tmp_path / "merged", "--to", "hf", "--lora", adapter)
    assert "times 3 / rank into" in found["transforms"][0]
    assert torch.equal(load_file(tmp_path / "merged/model.safetensors")["q.weight"], torch.full((2, 2), 3.0))
    _, error = answered("convert", base, tmp_path / "plain", "--to", "hf", "--dequantise", code=2)
    assert "quantization_config" in json.dumps(error)


def test_inspect_shows_a_file_of_which_the_model_is_not_known(answered, call, tmp_path):
    """Its keys are what `--key` needs."""
    weights = {"w": torch.ones(2)}
    torch.save({"net": weights, "ema": weights}, tmp_path / "x.pt")
    found, _ = answered("inspect", tmp_path / "x.pt")
    assert {each["name"] for each in found["tensors"]} == {"net.w", "ema.w"}
    out, _ = call("inspect", tmp_path / "x.pt")
    assert "not known: tensors under net, ema; name it: --key net" in out
    answered("inspect", tmp_path / "x.pt", "--key", "foo", code=2)


def flip(file, contents):
    """Change a bit of some bytes in a file."""
    data = bytearray(file.read_bytes())
    data[data.index(contents) + len(contents) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("form", ["torch", "dcp", "ours", "accelerate", "hf"])
@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_verify_finds_a_flipped_bit_in_what_torch_has_written(answered, tmp_path, form, what):
    """U05: of the optimizer too, which it did not read at all."""
    weights, slots = {"w": torch.arange(50.0)}, {"state": {"w": {"exp_avg": torch.arange(50.0) + 0.5}}}
    place = tmp_path / "x"
    if form == "torch":
        torch.save({"model": weights, "optimizer": slots}, place)
    elif form == "dcp":
        dcp.save({"model": weights, "optim": slots}, checkpoint_id=str(place), no_dist=True)
    elif form == "ours":
        source = TorchFile(tmp_path / "all.pt")
        torch.save({"model": weights, "optim": slots}, tmp_path / "all.pt")
        write_dcp_directory(place, source, model="")
    else:
        place.mkdir()
        names = {"accelerate": ("pytorch_model.bin", "optimizer.bin"), "hf": ("model.safetensors", "optimizer.pt")}[
            form
        ]
        (save_file if form == "hf" else torch.save)(weights, place / names[0])
        torch.save({**slots, "param_groups": []}, place / names[1])
        (place / "config.json").write_text("{}")
    if form == "accelerate":
        torch.save({"random": object}, place / "random_states_0.pkl")  # a class, which is not looked up
    found, _ = answered("verify", place)
    assert "CRC-32" in found["checked"]
    tensor = weights["w"] if what == "model" else slots["state"]["w"]["exp_avg"]
    for file in [place] if place.is_file() else sorted(place.iterdir()):
        if tensor.numpy().tobytes() in file.read_bytes():
            flip(file, tensor.numpy().tobytes())
    if form == "hf" and what == "model":
        assert "no digests" in answered("verify", place)[0]["not_checked"]
        return
    found, error = answered("verify", place, code=14)
    assert not found["verified"]
    assert "CRC-32" in error["expected"]


@pytest.mark.parametrize("how", ["gone", "cut"])
def test_verify_finds_missing_files_of_an_optimizer(answered, tmp_path, how):
    """A directory without the files of the optimizer was called whole. An object of any class is checked by its sum alone."""
    state = {"model": {"w": torch.ones(9)}, "optim": {"exp_avg": torch.ones(9)}, "args": argparse.Namespace(a=1)}
    writer = FileSystemWriter(str(tmp_path / "x"), single_file_per_rank=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    answered("verify", tmp_path / "x")
    file = tmp_path / "x" / DcpDirectory(tmp_path / "x").metadata.tensors["optim.exp_avg"].chunks[0][1].file
    file.write_bytes(file.read_bytes()[:-9]) if how == "cut" else file.unlink()
    _, error = answered("verify", tmp_path / "x", code=13 if how == "cut" else 11)
    assert file.name in error["where"]


def test_verify_says_what_has_no_sums(answered, tmp_path):
    """Torch writes zeros for them if it is asked to."""
    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)
        torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert "x.pt" in answered("verify", tmp_path / "x.pt")[0]["not_checked"]


def test_a_run_with_tied_weights_is_the_same_as_its_export(answered, call, tmp_path):
    """The export has the tensor once: its other name was called absent."""
    model = torch.nn.Module()
    model.emb, model.head = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False)
    model.head.weight = model.emb.weight
    trainfold.save(trainfold.attach(model).capture(), tmp_path / "run")
    write_hub_directory(CheckpointWeights(tmp_path / "run"), tmp_path / "hub")
    for sides in (("run", "hub"), ("hub", "run")):
        found, _ = answered("diff", *(tmp_path / each for each in sides))
        assert (found["same"], found["compared"], found["tied"]) == (True, 1, {"head.weight": "emb.weight"})
    out, _ = call("diff", tmp_path / "run", tmp_path / "hub")
    assert "head.weight to emb.weight" in out
    save_file(
        {"head.weight": model.emb.weight.detach()}, tmp_path / "hub" / "model.safetensors"
    )  # under the other name
    assert answered("diff", tmp_path / "run", tmp_path / "hub")[0]["same"]
    save_file(
        {"emb.weight": model.emb.weight.detach(), "head.weight": torch.ones(3, 2)},
        tmp_path / "hub" / "model.safetensors",
    )
    found, _ = answered("diff", tmp_path / "run", tmp_path / "hub", code=3)
    assert [each["name"] for each in found["tensors"]] == ["head.weight"]


@pytest.mark.parametrize(("one", "other", "differing", "word"), [
    (torch.tensor([1, 2], dtype=torch.int32), torch.tensor([1.5, 2.9]), None, "kinds of numbers differ"),
    (torch.tensor([1, 2], dtype=torch.int32), torch.tensor([1, 2 + 2**32]), 1, "1 of 2 differ"),
    (torch.tensor([1.0, 2.0]).half(), torch.tensor([1.0, 2.0 + 2**-6]).bfloat16(), 1, "1 of 2 differ"),
    (torch.tensor([1.0, 2.0009765625]), torch.tensor([1.0, 2.0]).bfloat16(), 0, "after rounding: equal"),
    (torch.tensor([True, False]), torch.tensor([1, 0]), None, "kinds of numbers differ"),
])  # fmt: skip
def test_two_dtypes_are_compared_without_a_guess_whatever_their_order(
    answered, call, tmp_path, one, other, differing, word
):
    """[1, 2] and [1.5, 2.9] were equal "after rounding", and of two dtypes of one width the first decided."""
    for name, each in (("a", one), ("b", other)):
        save_file({"w": each}, tmp_path / f"{name}.safetensors")
    for sides in ("ab", "ba"):
        paths = [tmp_path / f"{each}.safetensors" for each in sides]
        found, _ = answered("diff", *paths, code=3)
        assert [each["differing"] for each in found["tensors"]] == [differing]
        assert word in call("diff", *paths, code=3)[0]
