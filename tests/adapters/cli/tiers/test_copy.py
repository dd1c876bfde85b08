"""`trainfold copy`: plans and results that fit the schema, and refusals with their own exit codes."""

import shutil

from kit.adapters import cli_cases
from kit.adapters.cli_cases import state_at

from trainfold.backends.runs.api import save
from trainfold.core.errors import CheckpointHostile, CheckpointMissing, CommitConflict, RunEmpty

saved = cli_cases.saved
run = cli_cases.run
call = cli_cases.call
answered = cli_cases.answered


def test_a_copy_is_planned_carried_out_and_found_there(run, tmp_path, answered, call):
    target = tmp_path / "b"
    planned, _ = answered("copy", run, target, "--newest", "--dry-run")
    assert not target.exists()
    assert [(each["name"], each["action"]) for each in planned["checkpoints"]] == [("step-00000006", "copied")]
    done, _ = answered("copy", run, target, "--newest")
    assert done == {**planned, "dry_run": False}
    again, _ = answered("copy", run, target, "--steps", "2,6")
    assert [each["action"] for each in again["checkpoints"]] == ["copied", "there"]
    answered("verify", target / "step-00000006")
    assert "step-00000004" in call("copy", run, target)[0]
    assert sorted(each.name for each in target.iterdir() if each.name[0] == "s") == sorted(
        each.name for each in run.iterdir() if each.name[0] == "s"
    )


def test_another_checkpoint_of_a_step_is_refused_and_so_is_what_is_not_there(run, tmp_path, answered, call):
    target = tmp_path / "b"
    shutil.copytree(run, target, symlinks=True)
    save(state_at(4, seed=1), target)
    shutil.rmtree(target / "step-00000002")
    for options in ((), ("--dry-run",)):
        found, error = answered("copy", run, target, *options, code=CommitConflict.exit_code)
        assert error["where"].endswith("step-00000004")
        assert [each["error"] for each in found["refused"]] == ["CommitConflict"]
        assert {each["action"] for each in found["checkpoints"]} == {"not copied", "there"}
        shown = call("copy", run, target, *options, code=CommitConflict.exit_code)[0]
        assert "not copied" in shown
        assert " copied  " not in shown.replace("not copied", ""), "nothing was"
    answered("copy", run, tmp_path / "c", "--steps", "5", code=CheckpointMissing.exit_code)
    answered("copy", run, tmp_path / "c", "--steps", "4", "--newest", code=2)
    answered("copy", tmp_path / "nothing", tmp_path / "c", code=CheckpointMissing.exit_code)
    assert not (tmp_path / "c").exists()


def test_a_newest_checkpoint_that_is_left_out_is_an_error_and_so_is_a_run_without_a_whole_one(run, tmp_path, answered):
    """Of a copy each night, the exit code is what is looked at. The others are copied all the same; of none, nothing is made."""
    target = tmp_path / "b"
    (run / "step-00000006" / "link").symlink_to(run / "run.json")
    for options in (("--dry-run",), ()):
        found, error = answered("copy", run, target, *options, code=CheckpointHostile.exit_code)
        assert error["where"].startswith(f"{run}/step-00000006")
        assert "step-00000006" in found["left_out"]
    assert {each["name"] for each in found["checkpoints"]} == {
        each.name for each in target.iterdir() if each.name[:4] == "step"
    }
    for each in run.glob("step-*"):
        (each / "link").unlink(missing_ok=True)
        (each / "link").symlink_to(run / "run.json")
    for options in (("--dry-run",), ()):
        answered("copy", run, tmp_path / "c", *options, code=RunEmpty.exit_code)
    assert not (tmp_path / "c").exists()
