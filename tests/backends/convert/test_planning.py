"""What a plan reads of its source: everything once, however often it is asked for, and again where the source is another one. And how much it does for each tensor."""

import json
import sys
from collections import Counter

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from trainfold.backends.convert.conversion_run import plan_conversion, run_conversion
from trainfold.backends.convert.opened_source import open_source
from trainfold.backends.formats.dcp import dcp_reader
from trainfold.backends.formats.torch_save import archive
from trainfold.backends.runs import scan
from trainfold.backends.weights import hub_directory
from trainfold.core.errors import CheckpointDamaged, CheckpointTorn
from trainfold.weights import HubDirectory, TorchFile

pytestmark = pytest.mark.filterwarnings("ignore")  # torch says that there is one process

READERS = ((hub_directory, "_header_of"), (dcp_reader, "_read"), (scan, "read_manifest"), (archive, "read_values"), (archive, "_listed"))  # fmt: skip


@pytest.fixture
def sources(tmp_path):
    model = {f"layers.{number}.weight": torch.arange(4.0) + number for number in range(300)}
    (tmp_path / "hf").mkdir()
    save_file(model, tmp_path / "hf" / "model.safetensors")
    run_conversion(plan_conversion(open_source(tmp_path / "hf"), tmp_path / "run", to="native"))
    torch.save({"model": model, "step": 3}, tmp_path / "x.pt")
    dcp.save({"model": model, "step": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path, model


@pytest.mark.parametrize("to", ["native", "hf", "dcp"])
@pytest.mark.parametrize(
    ("source", "once"),
    [("hf", {"_header_of"}), ("run", {"read_manifest"}), ("x.pt", {"read_values", "_listed"}), ("dcp", {"_read"})],
)
def test_a_plan_parses_its_source_once(sources, monkeypatch, source, once, to):
    """Of 100,000 tensors each reading takes a second. What of a file is small is not kept, so here everything is large."""
    calls = Counter()

    def counted(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    for module, name in READERS:
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    monkeypatch.setattr(archive, "_LARGE_BYTES", 0)
    for held in (archive._LAST, archive._LAST_TABLE):
        held.clear()
    top, model = sources
    planned = plan_conversion(open_source(top / source), top / "target", to=to)
    assert len(planned.plan.after) == len(model)
    if source == "dcp":  # the step is an object, in an archive of its own
        calls.subtract(["read_values", "_listed"])
    assert +calls == dict.fromkeys(once, 1)


LLAMA = {"model_type": "llama", "hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}  # fmt: skip


def written(folder, layers):
    """A hub directory of a Llama, and of it a run, a file and a directory of torch."""
    shapes = {"self_attn.q_proj": (4, 4), "self_attn.k_proj": (2, 4), "mlp.up_proj": (8, 4), "input_layernorm": (4,)}
    model = {f"model.layers.{layer}.{name}.weight": torch.zeros(each) for layer in range(layers) for name, each in shapes.items()}  # fmt: skip
    (folder / "hf").mkdir(parents=True)
    save_file(model, folder / "hf" / "model.safetensors")
    (folder / "hf" / "config.json").write_text(json.dumps(LLAMA))
    run_conversion(plan_conversion(open_source(folder / "hf"), folder / "run", to="native", rules="llama"))
    torch.save({"model": model}, folder / "x.pt")
    dcp.save({"model": model}, checkpoint_id=folder / "dcp", no_dist=True)
    return len(model)


def calls_of_a_plan(folder, source, to, rules):
    """How many functions of Python are called."""
    count = [0]

    def seen(_frame, event, _arg):
        count[0] += event == "call"

    sys.setprofile(seen)
    try:
        plan_conversion(open_source(folder / source), folder / "target", to=to, rules=rules, like=folder / "hf" / "config.json")  # fmt: skip
    finally:
        sys.setprofile(None)
    return count[0]


def test_a_plan_calls_few_functions_for_each_tensor(tmp_path, monkeypatch):
    """There may be 100,000 tensors, and a function that is called for each takes 0.02 to 0.1 s then: a number that grows is a second look at all of them."""
    monkeypatch.setattr(archive, "_LARGE_BYTES", 0)
    few, many = written(tmp_path / "few", 20), written(tmp_path / "many", 60)
    most = {
        ("hf", "native", None): 11, ("hf", "dcp", None): 18, ("run", "native", None): 17, ("run", "hf", "llama"): 27, ("hf", "native", "llama"): 20,
        ("x.pt", "hf", None): 30, ("dcp", "hf", None): 24,
    }  # fmt: skip
    found = {}
    for row in most:
        calls_of_a_plan(tmp_path / "few", *row)  # what is imported and cached
        more = calls_of_a_plan(tmp_path / "many", *row) - calls_of_a_plan(tmp_path / "few", *row)
        found[row] = more / (many - few)
    assert {row: each for row, each in found.items() if each > most[row]} == {}, found


def test_a_source_that_was_opened_reads_a_file_that_is_another_one_now(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    source = HubDirectory(tmp_path)
    assert list(source.specs()) == ["a"]
    save_file({"b": torch.zeros(2)}, tmp_path / "new")
    (tmp_path / "new").rename(path)
    assert list(source.specs()) == ["b"]
    torch.save({"a": torch.zeros(2)}, tmp_path / "x.pt")
    file = TorchFile(tmp_path / "x.pt")
    assert list(file.specs()) == ["a"]
    torch.save({"b": torch.zeros(2)}, tmp_path / "x.pt")
    assert list(file.specs()) == ["b"]


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_file_of_many_tensors_has_those_that_were_saved(tmp_path, protocol):
    """From 256 remembered values on, a pickle refers to them in another way."""
    saved = {f"w{number}": torch.full((number % 3 + 1, 2), float(number)) for number in range(300)} | {"t": torch.ones(2, 3).t()}  # fmt: skip
    torch.save(saved, tmp_path / "x.pt", pickle_protocol=protocol)
    source = TorchFile(tmp_path / "x.pt")
    with source.opened() as weights:
        found = {name: weights.read(name, tuple((0, size) for size in each.shape)) for name, each in weights.specs.items()}  # fmt: skip
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_a_member_that_is_not_at_its_place_is_refused_when_it_is_read(tmp_path):
    """The directory at the end of a file says where members are; each is looked at when it is read."""
    path = tmp_path / "x.pt"
    torch.save({"w": torch.arange(1024.0)}, path)
    data = path.read_bytes()
    at = data.index(b"PK\x03\x04", data.index(b"data/0") - 64)
    path.write_bytes(data[:at] + b"XX" + data[at + 2 :])
    with pytest.raises(CheckpointDamaged, match=r"the member data/0 at \d+"), TorchFile(path).opened() as weights:
        weights.read("w", ((0, 1024),))
    listed = data.rindex(b"PK\x01\x02", 0, data.rindex(b"data/0"))
    beyond = (len(data) - 8).to_bytes(4, "little")
    path.write_bytes(data[: listed + 42] + beyond + data[listed + 46 :])
    with pytest.raises(CheckpointTorn, match="data/0"):
        TorchFile(path).specs()
