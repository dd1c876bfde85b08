"""`trainfold convert`: what it plans is what it does, and each way to fail has its exit code and its fix."""

import json
import os
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from kit.adapters import cli_cases
from safetensors.torch import save_file

from trainfold.adapters.cli import main
from trainfold.weights import CheckpointWeights, HubDirectory

saved = cli_cases.saved
run = cli_cases.run
call = cli_cases.call
answered = cli_cases.answered


@pytest.fixture
def hub(tmp_path):
    path = tmp_path / "hub"
    path.mkdir()
    save_file({"w": torch.ones(3), "n": torch.arange(2)}, path / "model.safetensors")
    return path


def test_a_dry_run_shows_what_is_then_done_and_writes_nothing(answered, hub, tmp_path):
    """R03: the plan is made by the same calls; only `written` and `dry_run` differ."""
    planned, _ = answered("convert", hub, tmp_path / "run", "--to", "native", "--dtype", "bf16", "--dry-run")
    assert not (tmp_path / "run").exists()
    done, _ = answered("convert", hub, tmp_path / "run", "--to", "native", "--dtype", "bf16")
    assert done.pop("written") == f"{tmp_path}/run/step-00000000"
    assert planned.pop("written") is None
    assert min(planned.pop("free_bytes"), done.pop("free_bytes")) > 0  # other programs use the disk in between
    assert (planned.pop("dry_run"), done.pop("dry_run")) == (True, False)
    assert planned == done
    (file,) = done["files"]
    assert (
        (tmp_path / "run" / "step-00000000" / file["name"]).stat().st_size == file["size_bytes"] == done["size_bytes"]
    )
    assert done["left_out"] == ["optimizer", "trainer"]
    assert {name: str(spec) for name, spec in CheckpointWeights(tmp_path / "run").specs().items()} == {
        "w": "bfloat16[3]",
        "n": "int64[2]",
    }
    again, _ = answered("convert", hub, tmp_path / "run", "--to", "native", "--dtype", "bf16")
    assert again["written"] == f"{tmp_path}/run/step-00000000"


def test_a_checkpoint_is_copied_whole_and_the_tables_say_what_was_done(call, answered, run, tmp_path):
    """K10: a run without the checkpoints before; `diff` finds the same components."""
    out, err = call("convert", run / "step-00000004", tmp_path / "copy", "--to", "native")
    assert out.startswith(f"Converted: {tmp_path}/copy/step-00000004\n")
    assert "left out  nothing" in out
    assert err == ""
    found, _ = answered("diff", run / "step-00000004", tmp_path / "copy")
    assert found["same"]
    assert "converted" in [line["name"] for line in found["made_by"]]
    call("verify", tmp_path / "copy")


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--to", "onnx"), 2, "one of native, hf, dcp"),
        (("--to", "native", "--dtype", "int8"), 2, "one of bf16"),
        (("--to", "native", "--rules", "llama"), 2, "config.json"),
        (("--to", "native", "--from", "dcp"), 15, "the format dcp"),
        (("--to", "native", "--like", "/nowhere"), 11, "correct the path"),
        ((), 2, "--to"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(answered, hub, tmp_path, options, code, words):
    """K09."""
    _, error = answered("convert", hub, tmp_path / "run", *options, code=code)
    assert words in json.dumps(error)
    assert not (tmp_path / "run").exists()


OWN = """
from trainfold.transforms import lora, rename

rules = rename("w", "mine.w")
converter = lora(alpha=2)
number = 3
"""


def test_rules_of_ones_own_are_named_by_their_module(answered, hub, tmp_path, monkeypatch):
    """A transform is applied as it is, of a converter its export; a module is imported from the current folder, and only when it is named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_rules_of_a_test.py").write_text(OWN)
    (tmp_path / "own_rules_that_fail.py").write_text("1 / 0")
    found, _ = answered("convert", hub, "a", "--to", "hf", "--rules", "own_rules_of_a_test:rules")
    assert found["transforms"] == ["rename w -> mine.w"]
    assert str(tmp_path) not in sys.path
    assert "own_rules_that_fail" not in sys.modules
    assert set(HubDirectory("a").specs()) == {"mine.w", "n"}
    adapted = {"w.base_layer.weight": torch.ones(2, 2), "w.lora_A.default.weight": torch.ones(1, 2), "w.lora_B.default.weight": torch.ones(2, 1)}  # fmt: skip
    save_file(adapted, tmp_path / "adapted.safetensors")
    answered("convert", "adapted.safetensors", "b", "--to", "native", "--rules", "own_rules_of_a_test:converter")
    assert list(CheckpointWeights("b").specs()) == ["w.weight"]
    for name, words in {
        "own_rules_of_a_test:number": "a transform or a converter",
        "own_rules_of_a_test:lora": "a transform or a converter as own_rules_of_a_test:lora",
        "own_rules_of_a_test:nothing": "nothing in own_rules_of_a_test",
        "own_rules_that_fail:x": "division by zero",
        "no_such_module:x": "a module no_such_module",
        "a b:c": "package.module:name",
        "os:": "package.module:name",
    }.items():
        _, error = answered("convert", hub, "c", "--to", "hf", "--rules", name, code=2)
        assert error["where"] == "convert.rules"
        assert words in json.dumps(error)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("to", ["native", "hf", "dcp"])
def test_a_target_that_is_refused_is_refused_in_a_dry_run_too(capsys, hub, tmp_path, to):
    """R03: with the same words. What the same command has finished is not in its way, and what another one has is."""
    (tmp_path / "file").write_text("x")
    for target in (
        hub,
        tmp_path / "file",
        tmp_path / "file" / "below",
        tmp_path / ("n" * 300),
        "memory://bucket/a/step-00000001",
    ):
        found = []
        for options in (["--dry-run"], []):
            code = main(["convert", str(hub), str(target), "--to", to, "--json", *options])
            found.append((code, capsys.readouterr().out))
        assert found[0] == found[1]
        assert found[0][0] != 0
    new = ["convert", str(hub), str(tmp_path / "new"), "--to", to]
    assert main([*new, "--dry-run"]) == 0
    assert not (tmp_path / "new").exists()
    assert main(new) == 0
    before = {each: (each.read_bytes(), each.stat().st_mtime_ns) for each in (tmp_path / "new").rglob("*.*")}
    capsys.readouterr()
    assert main([*new, "--dry-run"]) == 0
    assert "already: it is compared" in capsys.readouterr().out
    assert main(new) == 0
    assert f"Complete: {tmp_path}/new" in capsys.readouterr().out
    save_file({"w": torch.ones(3), "n": torch.arange(2) + 1}, hub / "model.safetensors")
    assert main(new) == 2
    assert {each: (each.read_bytes(), each.stat().st_mtime_ns) for each in (tmp_path / "new").rglob("*.*")} == before


@pytest.mark.parametrize("to", ["native", "hf", "dcp"])
def test_a_disk_without_room_is_found_before_anything_is_written_and_in_a_dry_run_too(answered, hub, tmp_path, monkeypatch, to):  # fmt: skip
    """R03: needed are all files but for what a killed process has written of them; of a target that is there, nothing."""
    target, real = tmp_path / "below" / "new", os.statvfs
    planned, _ = answered("convert", hub, target, "--to", to, "--dry-run")
    needed, asked = planned["needed_bytes"], []
    assert needed == planned["size_bytes"] + (2 << 20 if to == "native" else 0)
    assert planned["free_bytes"] == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)

    def free(count):
        monkeypatch.setattr(os, "statvfs", lambda path: asked.append(path) or SimpleNamespace(f_bavail=count, f_frsize=1, f_bsize=1))  # fmt: skip

    free(needed - 1)
    for options in ((), ("--dry-run",)):
        _, error = answered("convert", hub, target, "--to", to, *options, code=31)
        assert (error["kind"], error["where"]) == ("NoSpace", str(target))
        assert (error["expected"], error["found"]) == (f"{needed} bytes free", str(needed - 1))
    assert asked[0] == str(tmp_path)
    assert not target.parent.exists()
    free(needed)
    assert answered("convert", hub, target, "--to", to)[0]["needed_bytes"] == needed
    free(0)
    again, _ = answered("convert", hub, target, "--to", to)
    assert (again["is_there"], again["needed_bytes"]) == (True, 0)
    monkeypatch.setattr(os, "statvfs", real)


def test_what_is_in_the_way_is_never_written_into(answered, hub, run):
    before = sorted(each.name for each in run.iterdir())
    _, error = answered("convert", hub, run, "--to", "native", code=2)
    assert error["fix"] == "name another directory; a run is never written into"
    assert sorted(each.name for each in run.iterdir()) == before


def test_a_plan_names_the_weights_with_which_a_run_would_begin(answered, call, hub, run, tmp_path):
    """V02: where the run has a checkpoint they are not asked; where something else is, no run begins. V15: the format is that of the files."""
    found, _ = answered("plan", tmp_path / "new", "--initial", hub)
    assert (found["resumes"], found["step"], found["initial"]["format"]) == (False, 0, "hf")
    assert (found["initial"]["tensors"], found["initial"]["dtypes"]) == (2, {"float32": 1, "int64": 1})
    assert "checkpoints of the run: none; initial: taken" in call("plan", tmp_path / "new", "--initial", hub)[0]
    found, _ = answered("plan", run, "--initial", tmp_path / "gone")
    assert (found["step"], found["ignored"]) == (6, [f"{tmp_path}/gone: the run has checkpoints of its own"])
    for place, code, kind in (
        (hub, 15, "CheckpointForeign"),
        (tmp_path / "new", 11, "CheckpointMissing"),
    ):
        _, error = answered("plan", place, "--initial", tmp_path / "gone", code=code)
        assert error["kind"] == kind
    answered("plan", tmp_path / "new", "--step", 3, "--initial", hub, code=11)
