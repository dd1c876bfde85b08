"""`trainfold link`: the same files under names of another format, and what happens to them afterwards."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from kit.adapters import cli_cases
from safetensors.torch import load_file, save_file

import trainfold
from trainfold.backends.convert import linked_files
from trainfold.backends.formats.native.header_check import HeaderCheck
from trainfold.backends.runs.scan import read_manifest
from trainfold.errors import CheckpointDamaged, CheckpointMissing
from trainfold.ranks import run_threads
from trainfold.stores import FilePreference
from trainfold.weights import CheckpointWeights, HubDirectory

saved = cli_cases.saved
run = cli_cases.run
call = cli_cases.call
answered = cli_cases.answered

WEIGHTS = {
    "a": torch.arange(4.0),
    "b.w": torch.ones(3, 2).bfloat16(),
    "flag": torch.tensor([True, False]),
    "none": torch.zeros(0, 4),
}


@pytest.fixture
def hub(tmp_path):
    """A directory of two files with an index."""
    path = tmp_path / "hub"
    path.mkdir()
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    save_file({name: WEIGHTS[name] for name in ("a", "b.w")}, path / first, metadata={"format": "pt"})
    save_file({name: WEIGHTS[name] for name in ("flag", "none")}, path / second)
    where = {"a": first, "b.w": first, "flag": second, "none": second}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


def same_file(one, other):
    return Path(one).samefile(other)


def test_a_checkpoint_is_shown_as_a_directory_of_a_hub_with_the_same_files(answered, run, tmp_path):
    """Section 6 of the issue: no byte of a tensor is copied."""
    (tmp_path / "config.json").write_text('{"model_type": "linear"}')
    step = run / "step-00000006"
    planned, _ = answered("link", step, tmp_path / "view", "--like", tmp_path / "config.json", "--dry-run")
    assert not (tmp_path / "view").exists()
    found, _ = answered("link", step, tmp_path / "view", "--like", tmp_path / "config.json")
    assert {**planned, "dry_run": False} == found
    assert sorted(each.name for each in (tmp_path / "view").iterdir()) == ["config.json", "model.safetensors"]
    assert same_file(tmp_path / "view" / "model.safetensors", step / "model-00000-of-00001.safetensors")
    assert answered("diff", run, tmp_path / "view")[0]["same"]
    assert load_file(tmp_path / "view" / "model.safetensors").keys() == CheckpointWeights(run).specs().keys()
    assert not (step / "model-00000-of-00001.safetensors").stat().st_mode & 0o222
    answered("verify", step)
    _, error = answered("link", step, tmp_path / "view", code=2)
    assert "nothing is overwritten" in error["fix"]


def test_a_view_outlives_its_checkpoint_and_the_run_goes_on(answered, run, tmp_path):
    """Retention removes one of two names."""
    answered("link", run / "step-00000002", tmp_path / "view")
    wanted = load_file(tmp_path / "view" / "model.safetensors")
    answered("prune", run, "--keep-last", "1")
    assert not (run / "step-00000002").exists()
    assert {name: each.tolist() for name, each in load_file(tmp_path / "view" / "model.safetensors").items()} == {
        name: each.tolist() for name, each in wanted.items()
    }
    answered("verify", tmp_path / "view")
    trainfold.save(cli_cases.state_at(6), run)  # replaces a step whose file may have two names
    answered("verify", run)


def test_a_directory_of_a_hub_is_shown_as_a_checkpoint_of_a_new_run(answered, hub, tmp_path):
    """Of several files with headers of another writer. What is left out is on record, as by a conversion."""
    found, _ = answered("link", hub, tmp_path / "run")
    assert [each["name"] for each in found["linked"]] == [
        f"step-00000000/model-0000{rank}-of-00002.safetensors" for rank in (0, 1)
    ]
    assert all(same_file(tmp_path / "run" / each["name"], each["source"]) for each in found["linked"])
    listed, _ = answered("inspect", tmp_path / "run")
    assert listed["omitted"] == ["optimizer", "trainer"]
    answered("verify", tmp_path / "run")
    assert answered("diff", hub, tmp_path / "run")[0]["same"]
    answered("convert", hub, tmp_path / "copy", "--to", "native")
    fingerprints = [answered("inspect", tmp_path / name)[0]["components"][0]["fingerprint"] for name in ("run", "copy")]
    assert fingerprints[0] == fingerprints[1], "it is the checkpoint that a conversion writes"
    shutil.rmtree(hub)
    with CheckpointWeights(tmp_path / "run").opened() as opened:
        assert all(
            torch.equal(opened.read(name, tuple((0, size) for size in each.shape)), each)
            for name, each in WEIGHTS.items()
        )
    answered("link", tmp_path / "run", tmp_path / "again")
    assert {name: str(each) for name, each in HubDirectory(tmp_path / "again").specs().items()} == {
        "a": "float32[4]", "b.w": "bfloat16[3, 2]", "flag": "bool[2]", "none": "float32[0, 4]",
    }  # fmt: skip


def test_a_checkpoint_of_several_ranks_is_shown_if_each_tensor_is_whole_in_one_file(answered, tmp_path):
    """Each file gets a second name, and an index says what is in it."""
    state = cli_cases.state_at(1)  # threads share the global generator
    run_threads(2, lambda world: trainfold.save(state, tmp_path / "run", collectives=world))
    found, _ = answered("link", tmp_path / "run", tmp_path / "view")
    assert [each["name"] for each in found["linked"]] == [
        f"model-0000{number}-of-00002.safetensors" for number in (1, 2)
    ]
    assert answered("verify", tmp_path / "view")[0]["verified"]
    assert answered("diff", tmp_path / "run", tmp_path / "view")[0]["same"]


def test_a_write_through_one_name_is_found_by_verify(answered, hub, run, tmp_path):
    """A write through either name changes both. The files are read-only, and what is written all the same is found."""
    answered("link", hub, tmp_path / "run")
    answered("link", run / "step-00000006", tmp_path / "view")
    for path, where in (
        (hub / "model-00001-of-00002.safetensors", tmp_path / "run"),
        (tmp_path / "view" / "model.safetensors", run),
    ):
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        with path.open("r+b") as file:
            file.write(data)
        answered("verify", where, code=14)


def test_a_header_that_names_other_places_is_refused_although_the_file_has_its_digest(answered, hub, tmp_path):
    """U05: a header by another writer is accepted for what it says of the tensors, and for nothing else."""
    answered("link", hub, tmp_path / "run")
    step = tmp_path / "run" / "step-00000000"
    file = step / "model-00000-of-00002.safetensors"
    data = file.read_bytes()
    for old, new in ((b'"a":', b'"c":'), (b'"shape":[4]', b'"shape":[2]'), (b'"F32"', b'"I32"')):
        assert old in data
        file.unlink()
        file.write_bytes(data.replace(old, new, 1))
        _, error = answered("verify", tmp_path / "run", code=14)
        assert error["where"]
        store = trainfold.LocalStore(tmp_path / "run")
        manifest = read_manifest(store, "step-00000000")
        with pytest.raises(CheckpointDamaged, match="another one"):
            HeaderCheck(store, "step-00000000", manifest).check([0])


@pytest.mark.parametrize("what", ["names", "ties", "parts", "files of ranks", "format", "dtype"])
def test_what_needs_other_bytes_is_refused_with_the_next_move(answered, run, tmp_path, what):
    """K09: nothing is made, and `convert` does it."""
    source, options = run, ()
    if what == "names":
        model = torch.nn.ParameterDict({"it's": torch.nn.Parameter(torch.ones(2))})
        source = tmp_path / "odd"
        trainfold.save(trainfold.attach(model).capture(), source)
    elif what == "ties":
        model = torch.nn.ModuleDict(
            {"embed": torch.nn.Linear(2, 2, bias=False), "head": torch.nn.Linear(2, 2, bias=False)}
        )
        model["head"].weight = model["embed"].weight
        source = tmp_path / "tied"
        trainfold.save(trainfold.attach(model).capture(), source)
        (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
        options = ("--like", tmp_path / "config.json")
    elif what == "parts":
        source = tmp_path / "parts"
        state = trainfold.attach(torch.nn.Linear(600, 600)).capture().evolve(rng=None)
        run_threads(2, lambda world: trainfold.save(state, source, collectives=world))
    elif what == "files of ranks":
        source = tmp_path / "ranks"
        trainfold.save(cli_cases.state_at(1), trainfold.LocalStore(source, prefers=FilePreference(1)))
    elif what == "format":
        source = tmp_path / "file.pt"
        torch.save({"model": {"a": torch.ones(2)}}, source)
    elif what == "letters":
        source = tmp_path / "hub"
        source.mkdir()
        save_file({"größe": torch.ones(2)}, source / "model.safetensors")
    else:
        source = tmp_path / "hub"
        source.mkdir()
        save_file({"a": torch.ones(2).to(torch.float8_e8m0fnu)}, source / "model.safetensors")
    _, error = answered("link", source, tmp_path / "out", *options, code=2)
    assert "trainfold convert" in error["fix"]
    assert what != "files of ranks" or "in a file with other components" in error["found"]
    assert not (tmp_path / "out").exists()


def test_another_filesystem_is_refused_with_the_next_move(answered, run, hub, tmp_path, monkeypatch):
    """What is begun is removed."""

    def link(*_args, **_options):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(linked_files.os, "link", link)
    _, error = answered("link", run, tmp_path / "view", code=32)
    assert error["fix"] == "choose a path on that filesystem, or copy the tensors with trainfold convert"
    assert [each.name for each in tmp_path.iterdir() if "view" in each.name] == []
    answered("link", hub, Path(tmp_path, "new"), code=32)
    with pytest.raises(CheckpointMissing):
        CheckpointWeights(tmp_path / "new").specs()
    monkeypatch.undo()
    answered("link", hub, Path(tmp_path, "new"))
    answered("verify", tmp_path / "new")
