"""The command line: its output, the stream that it goes to, and the exit codes."""

import os
from pathlib import Path

import attrs
import pytest
import torch
from kit.adapters import cli_cases
from kit.adapters.cli_cases import EXPLAINED, flip, state_at

import trainfold
from trainfold.backends.runs.api import load, save
from trainfold.backends.runs.quarantine_file import begin_attempt
from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.local import LocalStore
from trainfold.core.digest import digest_of
from trainfold.core.errors import CheckpointDamaged
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.format.manifest import END, TAIL, encode_manifest
from trainfold.core.format.manifest_reader import decode_manifest
from trainfold.core.history.quarantine import LIMIT
from trainfold.core.state.state import Progress, TrainState

saved = cli_cases.saved
run = cli_cases.run
call = cli_cases.call
answered = cli_cases.answered


def model_file(run, step=6):
    return next((run / f"step-{step:08d}").glob("model-*"))


# --- ls --------------------------------------------------------------------------------------------------------------


def test_ls_lists_every_checkpoint_and_says_which_is_resumed(run, call, answered):
    """R03: list."""
    out, err = call("ls", run)
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["step-00000002", "step-00000004", "step-00000006"]
    assert lines[-1].endswith("complete, resumed next")
    assert err == ""
    found, _ = answered("ls", run)
    assert found["newest"] == "step-00000006"
    assert found["checkpoints"][-1]["fingerprints"] == fingerprint(state_at(6))


def test_ls_shows_what_is_in_quarantine_and_what_is_resumed_instead(run, call, answered):
    """P07: a resume skips it, and the list shows the same."""
    for _ in range(LIMIT):
        begin_attempt(LocalStore(run), "step-00000006")
    lines = call("ls", run)[0].splitlines()
    assert lines[-2].endswith("complete, resumed next")
    assert "CheckpointQuarantined" in lines[-1]
    assert answered("ls", run)[0]["newest"] == "step-00000004"
    found, _ = answered("plan", run)
    assert found["checkpoint"] == "step-00000004"
    assert "CheckpointQuarantined" in str(found["passed_over"])
    asked_for, _ = answered("plan", run, "--step", "6")
    assert asked_for["checkpoint"] == "step-00000006", "as a load that asks for it takes it out"


def test_ls_shows_what_did_not_become_a_checkpoint(run, answered):
    (run / "step-00000008").mkdir()
    (run / "step-00000008" / "model-00000-of-00001.safetensors").write_bytes(b"half")
    model_file(run).unlink()
    found, _ = answered("ls", run)
    assert found["newest"] == "step-00000004"
    assert [each["complete"] for each in found["checkpoints"]] == [True, True, False, False]
    assert {each["problem"]["error"] for each in found["checkpoints"][2:]} == {"CheckpointTorn"}


def test_an_empty_run_is_not_a_missing_one(run, tmp_path, answered):
    for directory in run.glob("step-*"):
        (directory / "manifest.json").unlink()
    (run / "latest").unlink()
    for command in ("ls", "plan", "verify", "inspect"):
        _, error = answered(command, run, code=12)
        assert error["kind"] == "RunEmpty"
    _, error = answered("ls", tmp_path / "nothing", code=11)
    assert error["kind"] == "CheckpointMissing"
    assert str(tmp_path / "nothing") in error["where"]


@pytest.mark.parametrize(
    ("command", "code", "kind"),
    [("ls", 11, "Missing"), ("plan", 11, "Missing"), ("inspect", 15, "Foreign"), ("verify", 15, "Foreign")],
)
def test_a_foreign_directory_is_named_and_left_as_it_is(tmp_path, command, code, kind, call):
    """R09: the path and the fix go to standard error, and nothing goes to standard output."""
    (tmp_path / "thesis.tex").write_text("mine")
    out, err = call(command, tmp_path, code=code)
    assert out == ""
    assert err.startswith(f"Checkpoint{kind}: {tmp_path}")
    assert all(f"\n  {part}" in err for part in EXPLAINED)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


# --- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_tells_everything_but_the_tensors(run, call, answered):
    """R03: inspect."""
    out, _ = call("inspect", run / "step-00000004")
    assert "fingerprint" in out
    assert "Contract" in out
    assert "trainer.samples" in out
    assert "model.params['0.weight']" not in out
    out, _ = call("inspect", run / "step-00000004", "--tensors")
    assert "model.params['0.weight']" in out
    found, _ = answered("inspect", run / "step-00000004")
    assert found["head"]["step"] == 4
    assert found["values"]["trainer.samples"] == 32
    assert found["contract"]["scheduler.total_steps"] == 10
    assert {each["name"]: each["fingerprint"] for each in found["components"]} == fingerprint(state_at(4))


def test_a_run_stands_for_its_newest_checkpoint_and_so_does_the_link(run, answered):
    found, _ = answered("inspect", run)
    assert found["head"]["step"] == 6
    linked, _ = answered("inspect", run / "latest")
    assert linked["head"]["step"] == 6
    _, error = answered("inspect", run / "step-00000099", code=11)
    assert "step-00000099" in error["where"]


# --- verify ----------------------------------------------------------------------------------------------------------


def test_verify_reads_every_file_of_a_whole_checkpoint(run, call, answered):
    """R03: validate."""
    found, _ = answered("verify", run)
    names = {path.name for path in (run / "step-00000006").iterdir()} - {"manifest.json"}
    assert {file["name"] for file in found["files"]} == names
    assert {file["status"] for file in found["files"]} == {"verified"}
    out, _ = call("verify", run)
    assert out.count("verified") == len(names) + 1 + len(found["components"])
    assert {each["name"]: each["fingerprint"] for each in found["components"]} == dict(fingerprint(state_at(6)))


def test_verify_computes_the_fingerprints_and_believes_none(run, call, answered):
    """Two runs are compared by fingerprints alone: one that is not that of the leaves makes unlike ones look alike, or like ones unlike."""
    path = run / "step-00000006" / "manifest.json"
    covered = path.read_bytes().partition(TAIL)[0]
    manifest = decode_manifest(path.read_bytes(), "m")
    real = manifest.component("optimizer").fingerprint
    forged = covered.replace(real.encode(), f"xxh3:{0:032x}".encode())
    path.write_bytes(forged + TAIL + digest_of(forged).encode() + END)
    found, error = answered("verify", run, code=17)
    assert error["kind"] == "CheckpointHostile"
    assert "fingerprint of optimizer" in error["where"]
    assert (real in error["expected"], error["found"]) == (True, f"xxh3:{0:032x}")
    assert {each["name"]: each["status"] for each in found["components"]}["optimizer"] == "wrong"
    assert {each["status"] for each in found["files"]} == {"verified"}
    assert not found["verified"]
    assert "wrong" in call("verify", run, code=17)[0]


def test_verify_finds_a_header_that_a_load_would_refuse(run, answered):
    """U05, W23: the file has the digest that its manifest names, but the header describes other tensors."""
    file = model_file(run)
    data = file.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = data[8:size].replace(b"F32", b"I32", 1)
    assert header != data[8:size]
    file.write_bytes(data[:8] + header + data[size:])
    manifest = read_manifest(LocalStore(run), "step-00000006")
    files = tuple(
        attrs.evolve(each, digest=digest_of(file.read_bytes())) if each.name == file.name else each
        for each in manifest.files
    )
    (run / "step-00000006" / "manifest.json").write_bytes(encode_manifest(attrs.evolve(manifest, files=files)))
    found, error = answered("verify", run, code=14)
    assert {each["name"] for each in found["files"] if each["status"] == "damaged"} == {file.name}
    assert error["where"].endswith(f"{file.name}: its header")
    with pytest.raises(CheckpointDamaged, match="its header"):
        load(run, like=state_at(6), step=6)


@pytest.mark.parametrize("offset", [-1, 9])
def test_verify_names_the_file_and_the_leaf_of_a_flipped_bit(run, call, answered, offset):
    flip(model_file(run), offset)
    found, error = answered("verify", run, code=14)
    assert error["kind"] == "CheckpointDamaged"
    assert str(model_file(run)) in error["where"]
    assert not found["verified"]
    assert {each["name"]: each["status"] for each in found["components"]}["model"] == "damaged"
    assert sum(each["status"] == "damaged" for each in found["components"]) == 1
    leaves = [problem["where"] for problem in found["problems"][1:]]
    assert len(leaves) == (offset == -1)  # the ninth byte is in the header, which belongs to no leaf
    assert all("model.params" in leaf for leaf in leaves)
    out, err = call("verify", run, code=14)
    assert "damaged" in out
    assert "fix" in err


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda directory: (directory / "manifest.json").unlink(), 13),
        (lambda directory: model_file(directory.parent).unlink(), 13),
        (lambda directory: os.truncate(model_file(directory.parent), 100), 13),
        (lambda directory: flip(directory / "manifest.json", -40), 14),
        (lambda directory: (directory / "manifest.json").write_text("{}"), 15),
        (lambda directory: directory.rename(directory.with_name("step-00000007")), 11),
    ],
    ids=["no manifest", "no file", "truncated", "flipped manifest", "foreign manifest", "moved"],
)
def test_each_damage_has_its_own_exit_code_and_leaves_the_others_usable(run, answered, damage, code):
    damage(run / "step-00000006")
    for command in ("inspect", "verify"):
        answered(command, run / "step-00000006", code=code)
        answered(command, run / "step-00000004")
    found, _ = answered("plan", run)
    assert found["checkpoint"] == "step-00000004"
    assert len(found["passed_over"]) == 1


# --- plan ------------------------------------------------------------------------------------------------------------


def test_plan_says_what_a_resume_reads_and_changes_nothing(run, call, answered):
    """V18: a dry run by the planner that a resume uses."""
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    found, _ = answered("plan", run)
    assert found["resumes"]
    assert (found["checkpoint"], found["step"]) == ("step-00000006", 6)
    assert {action["name"]: action["verb"] for action in found["actions"]}["model"] == "load"
    assert found["drifts"] == []
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    out, _ = call("plan", run, "--step", 2)
    assert "step-00000002" in out


def positions(tmp_path, loader):
    """A run of two steps over a loader or several."""
    live = trainfold.attach(torch.nn.Linear(1, 1), loader=loader)
    with trainfold.CheckpointManager(str(tmp_path / "loop"), every=1) as manager:
        for _ in range(2):
            for name in loader if isinstance(loader, dict) else [None]:
                next(live.batches(name) if name else live.batches())
            live.advance()
            manager.step(live)
    return tmp_path / "loop"


def test_plan_says_how_many_workers_each_loader_had_and_whether_streams_have_moved(tmp_path, answered, call):
    """W02, V18: the values that a script must set at a resume, read without the script."""
    loader = torch.utils.data.DataLoader
    data = torch.arange(8.0).unsqueeze(1)
    run = positions(
        tmp_path, {"a": loader(data, batch_size=2, num_workers=1), "b": loader(data, batch_size=2, collate_fn=noisy)}
    )
    found, _ = answered("plan", run)
    told = [(each["name"], each["batches"], each["num_workers"], each["streams_moved"]) for each in found["loaders"]]
    assert told == [("a", 2, 1, False), ("b", 2, 0, True)]
    out, _ = call("plan", run)
    assert "any number of workers draws the same samples" in out
    assert "resume with num_workers=0; another number is refused" in out


def test_plan_says_where_an_older_trainfold_has_not_written_the_workers(answered, call):
    """W02, G13: the position of an old checkpoint that is kept for this test."""
    run = Path(__file__).parents[2] / "compat" / "positions" / "v1" / "map" / "run"
    found, _ = answered("plan", run)
    assert [each["num_workers"] for each in found["loaders"]] == [None]
    assert "older trainfold did not record" in call("plan", run)[0]


def noisy(samples):
    return torch.stack(samples) + torch.rand(())


def test_plan_refuses_with_every_reason(run, call, answered):
    for directory in run.glob("step-*"):
        flip(directory / "manifest.json", -40)
    found, error = answered("plan", run, code=20)
    assert not found["resumes"]
    assert len(found["reasons"]) == 3
    _, error = answered("plan", run, "--step", 2, code=14)
    assert "step-00000002" in error["where"]
    answered("plan", run, "--step", 5, code=11)
    call("plan", run, "--step", -1, code=2)


# --- diff ------------------------------------------------------------------------------------------------------------


def test_diff_of_equal_states_is_empty_whatever_run_they_are_in(saved, tmp_path, answered):
    save(state_at(6), tmp_path / "b")
    found, _ = answered("diff", saved, tmp_path / "b")
    assert found["same"]
    assert found["leaves"] == []
    assert [line["name"] for line in found["made_by"]] == ["run"]


def test_a_diff_does_not_compare_the_list_of_frozen_parameters(saved, tmp_path, answered):
    """W22: what is compared has their digest; a checkpoint of an older version does not have the list."""
    state = state_at(4)
    save(state.evolve(contract={**state.contract, "frozen": ["w"]}), tmp_path / "b")
    assert answered("diff", saved / "step-00000004", tmp_path / "b")[0]["same"]


def test_diff_names_each_leaf_and_each_promise_that_differs(saved, tmp_path, call, answered):
    other = state_at(6, total=12)
    weight = dict(other.model.params) | {"0.bias": torch.nextafter(other.model.params["0.bias"], torch.tensor(9.0))}
    changed = other.evolve(model=attrs.evolve(other.model, params=type(other.model.params)(weight)), extra={})
    save(changed, tmp_path / "b")
    found, error = answered("diff", saved, tmp_path / "b", code=3)
    assert [line["name"] for line in found["components"] if not line["same"]] == ["model", "scheduler", "ema"]
    assert [line["name"] for line in found["leaves"]] == [
        "model.params['0.bias']",
        "scheduler['total_steps']",
        "ema['w']",
    ]
    assert [(line["name"], line["a"], line["b"]) for line in found["contract"]] == [
        ("scheduler.total_steps", "10", "12")
    ]
    assert error["kind"] == "Different"
    out, err = call("diff", saved, tmp_path / "b", code=3)
    assert "absent" in out
    assert "3 leaves" in err


def test_diff_of_two_steps_shows_the_counters(saved, answered):
    found, _ = answered("diff", saved / "step-00000004", saved, code=3)
    assert {"name": "trainer.step", "a": "4", "b": "6"} in found["leaves"]


def test_a_state_without_tensors_can_be_looked_at_too(tmp_path, answered):
    save(TrainState(trainer=Progress(step=1)), tmp_path / "b")
    for command in ("ls", "inspect", "verify", "plan"):
        answered(command, tmp_path / "b")


# --- the frame -------------------------------------------------------------------------------------------------------
