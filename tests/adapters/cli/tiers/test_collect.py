"""`trainfold collect`: plans and results that fit the schema, what incomplete checkpoints lack, and refusals with their own exit codes."""

import shutil

from kit.adapters import cli_cases

from trainfold.core.errors import CheckpointMissing, RunEmpty

saved = cli_cases.saved
run = cli_cases.run
call = cli_cases.call
answered = cli_cases.answered


def test_a_run_on_two_nodes_is_put_together_and_incomplete_checkpoints_are_listed(run, tmp_path, answered, call):
    """R08, R03."""
    node, target = tmp_path / "node1", tmp_path / "b"
    for step in (2, 4, 6):
        (node / f"step-{step:08d}").mkdir(parents=True)
        (file,) = (run / f"step-{step:08d}").glob("model-*")
        shutil.move(file, node / f"step-{step:08d}")
    (tmp_path / "elsewhere").mkdir()
    shutil.move(node / "step-00000004" / file.name, tmp_path / "elsewhere")
    planned, _ = answered("collect", run, node, "-o", target, "--dry-run")
    assert not target.exists()
    assert [(each["name"], each["action"]) for each in planned["checkpoints"]] == [("step-00000002", "copied"), ("step-00000006", "copied")]  # fmt: skip
    assert planned["left_out"] == {"step-00000004": f"incomplete: lacks {file.name}"}
    done, _ = answered("collect", run, node, "--output", target)
    assert done == {**planned, "dry_run": False}
    answered("verify", target / "step-00000006")
    assert "there" in call("collect", run, node, "-o", target, "--steps", "6")[0]
    answered("collect", run, "-o", tmp_path / "c", code=RunEmpty.exit_code)
    answered("collect", run, tmp_path / "no", "-o", tmp_path / "c", code=CheckpointMissing.exit_code)
    assert not (tmp_path / "c").exists()
