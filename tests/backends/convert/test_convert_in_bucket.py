"""`trainfold convert` and `link` with the URL of a bucket: read as a run is, written by one conditional put, and refused where a disk is needed."""

import json
import uuid
from pathlib import Path

import pytest
import torch
from kit.adapters import cli_cases
from kit.backends.conversion_cases import a_hub_directory, bytes_of, weights

import trainfold
from trainfold.backends.convert.conversion_run import plan_conversion, run_conversion
from trainfold.backends.convert.opened_source import open_source
from trainfold.backends.stores.local import open_store
from trainfold.backends.stores.object_store.object_store import ObjectStore

call = cli_cases.call
answered = cli_cases.answered
TENSORS = {f"w{number}": torch.randn(4, 4) for number in range(4)}


@pytest.fixture
def bucket():
    """The URL of a bucket in the memory of this process."""
    return f"memory://bucket-{uuid.uuid4().hex}"


@pytest.fixture
def run(bucket):
    """A run in a bucket, with two checkpoints."""
    for step in (2, 4):
        trainfold.save(cli_cases.state_at(step), f"{bucket}/runs/a")
    return f"{bucket}/runs/a"


@pytest.fixture
def hub(tmp_path):
    return a_hub_directory(tmp_path / "hub", TENSORS)


@pytest.mark.parametrize(("name", "step"), [("", 4), ("/step-00000002", 2)])
def test_a_run_or_a_checkpoint_in_a_bucket_is_converted(answered, run, tmp_path, name, step):
    """C03: the newest one, or the one that is named, becomes what it becomes from a directory."""
    trainfold.save(cli_cases.state_at(step), tmp_path / "local")
    for to in ("hf", "native", "dcp"):
        found, _ = answered("convert", f"{run}{name}", tmp_path / to, "--to", to)
        assert (found["source"], found["step"]) == (f"{run}{name}", step)
        answered("convert", tmp_path / "local", tmp_path / f"local-{to}", "--to", to)
        made, expected = (weights(open_source(tmp_path / each).model) for each in (to, f"local-{to}"))
        assert made == expected


def test_of_a_source_in_a_bucket_only_what_is_needed_is_read(run, tmp_path, monkeypatch):
    """The model is converted, and no byte of the optimizer comes over the network."""
    read = []
    real = ObjectStore.read_into
    monkeypatch.setattr(ObjectStore, "read_into", lambda self, name, *args, **kw: read.append(name) or real(self, name, *args, **kw))  # fmt: skip
    reading = ObjectStore.reading
    monkeypatch.setattr(ObjectStore, "reading", lambda self, name, *args: read.append(name) or reading(self, name, *args))  # fmt: skip
    run_conversion(plan_conversion(open_source(run), tmp_path / "hf", to="hf"))
    assert {each.partition("/")[2].partition("-")[0] for each in read} == {"model"}


def test_a_checkpoint_is_written_into_a_bucket_and_is_the_same_as_on_a_disk(answered, call, hub, bucket, tmp_path):
    """The plan has no limit of room; run again, it is compared and left as it is."""
    target = f"{bucket}/converted"
    planned, _ = answered("convert", hub, target, "--to", "native", "--dry-run")
    assert (planned["target"], planned["free_bytes"], planned["is_there"]) == (target, None, False)
    assert open_store(target).list() == []
    done, _ = answered("convert", hub, target, "--to", "native")
    assert done["written"] == f"{target}/step-00000000"
    assert weights(open_source(target).model) == bytes_of(TENSORS)
    answered("verify", target)
    before = open_store(target).committed_at("step-00000000/manifest.json")
    again, _ = answered("convert", hub, target, "--to", "native")
    assert again["is_there"]
    assert open_store(target).committed_at("step-00000000/manifest.json") == before
    assert "no limit" in call("convert", hub, f"{bucket}/other", "--to", "native", "--dry-run")[0]


def test_a_conversion_into_a_bucket_that_was_killed_leaves_no_checkpoint_and_can_be_run_again(hub, bucket, monkeypatch):
    """A kill before the manifest leaves objects that nothing names. It starts again from the beginning, under names that a lost writer does not have."""
    target = f"{bucket}/converted"

    class Killed(BaseException):
        pass

    def dies(self, name, *args, **kwargs):
        if name.endswith("manifest.json"):
            raise Killed
        real(self, name, *args, **kwargs)

    real = ObjectStore.commit
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "commit", dies)
        with pytest.raises(Killed):
            run_conversion(plan_conversion(open_source(hub), target, to="native"))
    assert open_store(target).list("step-00000000") == ["model-00000-of-00001.safetensors"]
    with pytest.raises(trainfold.errors.CheckpointError):
        open_source(target)
    monkeypatch.setattr(ObjectStore, "least_revision", 1)  # as after a lease that was taken from a lost writer
    run_conversion(plan_conversion(open_source(hub), target, to="native"))
    assert open_store(target).list("step-00000000") == ["manifest.json", "model-00000-of-00001.r1.safetensors"]
    assert weights(open_source(target).model) == bytes_of(TENSORS)


@pytest.mark.parametrize("is_local", [False, True])
def test_a_directory_above_a_run_may_be_called_like_a_step(answered, bucket, hub, tmp_path, is_local):
    """C03: only the last part of a place names a checkpoint; the URL was refused as one that lies in a checkpoint."""
    above = f"{tmp_path}/step-00000007" if is_local else f"{bucket}/a/step-00000007"
    run = f"{above}/run"
    answered("convert", hub, run, "--to", "native")
    assert open_store(run).list() == ["run.json", "step-00000000"]
    for place in (run, f"{run}/step-00000000"):
        found, _ = answered("convert", place, tmp_path / "hf" / str(len(place)), "--to", "hf")
        assert (found["source"], found["step"]) == (place, 0)
        answered("verify", place)
    answered("copy", run, f"{above}/copy")
    assert answered("ls", f"{above}/copy")[0]["checkpoints"][0]["name"] == "step-00000000"


@pytest.mark.parametrize("verb", ["inspect", "verify", "ls", "plan"])
def test_a_run_on_a_disk_may_be_called_like_a_step(answered, hub, tmp_path, verb):
    """C03: `convert` writes such a run, and others of the verbs took it for a checkpoint of the folder above."""
    answered("convert", hub, tmp_path / "step-00000007", "--to", "native")
    found, _ = answered(verb, tmp_path / "step-00000007")
    assert "step-00000000" in json.dumps(found)


@pytest.mark.parametrize(
    "words", ["to hf", "to dcp", "link from", "link to", "inside", "deep inside", "as one", "used", "like", "nothing"]
)
def test_what_a_bucket_cannot_hold_or_give_is_refused_with_the_next_move(
    answered, run, hub, bucket, tmp_path, monkeypatch, words
):
    """No folder that is named like the URL is made."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    command, said, code = {
        "to hf": (("convert", run, f"{bucket}/x", "--to", "hf"), "local directory", 2),
        "to dcp": (("convert", run, f"{bucket}/x", "--to", "dcp"), "local directory", 2),
        "link from": (("link", run, tmp_path / "x"), "second name", 2),
        "link to": (("link", hub, f"{bucket}/x"), "second name", 2),
        "inside": (("convert", hub, f"{run}/step-00000002", "--to", "native"), "not called like a checkpoint", 2),
        "deep inside": (("convert", hub, f"{run}/step-00000002/x/y", "--to", "native"), "is not in one", 2),
        "as one": (("convert", hub, f"{bucket}/step-00000002", "--to", "native"), "not called like a checkpoint", 2),
        "used": (("convert", hub, run, "--to", "native"), "never written into", 2),
        "like": (("convert", hub, tmp_path / "x", "--to", "hf", "--like", f"{bucket}/x"), "local", 2),
        "nothing": (("convert", f"{bucket}/nothing", tmp_path / "x", "--to", "hf"), "nothing", 11),
    }[words]
    _, error = answered(*command, code=code)
    assert said in json.dumps(error)
    assert sorted(tmp_path.rglob("*")) == before
    assert open_store(run).list() == ["run.json", "step-00000002", "step-00000004"]


def test_another_format_in_a_bucket_is_named_and_not_read(answered, bucket, tmp_path):
    """Its files have to be on a disk first."""
    store = open_store(f"{bucket}/hub")
    store.write("config.json", [b"{}"], size_bytes=2)
    store.write("model.safetensors", [bytes(8)], size_bytes=8)
    _, error = answered("convert", f"{bucket}/hub", tmp_path / "x", "--to", "native", code=15)
    assert error["where"] == f"{bucket}/hub"
    assert "hubs" in error["found"]
    assert "disk" in error["fix"]
    assert not Path(tmp_path / "x").exists()
