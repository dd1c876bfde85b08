"""`--components` of the commands that look at checkpoints: the same words as everywhere else."""

import json

import pytest
from kit.adapters import cli_cases
from kit.adapters.cli_cases import flip, state_at

from trainfold.backends.runs.api import load, save
from trainfold.core.errors import ResumeRefused
from trainfold.core.state.components import select

saved = cli_cases.saved
run = cli_cases.run
call = cli_cases.call
answered = cli_cases.answered


@pytest.fixture
def partial(run):
    """The run, with a newer checkpoint without its model, and one of its average alone."""
    save(state_at(8), run, components=["optimizer", "scheduler", "trainer"])
    save(state_at(9), run, components=["ema"])
    return run


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "plan", "diff"])
def test_an_unknown_name_is_refused_with_the_nearest_and_a_known_one_that_is_not_there_is_ignored(
    command, run, answered
):
    """B02: exit code 2, before anything is read."""
    where = [run, run] if command == "diff" else [run]
    _, error = answered(command, *where, "--components", "model,optimiser", code=2)
    assert "did you mean 'optimizer'" in error["fix"]
    assert "'ema'" in error["expected"]
    save(select(state_at(7), ["model", "trainer"]), run)
    found, _ = answered(command, *where, "--components", "model,rng")
    assert found


def test_inspect_and_verify_look_at_these_components_alone(run, answered, call):
    """R03: a large checkpoint has small parts; damage elsewhere is not looked at."""
    found, _ = answered("inspect", run, "--components", "ema")
    assert [each["name"] for each in found["components"]] == ["ema"]
    assert [each["components"] for each in found["files"]] == [["ema"]]
    assert "model-" not in call("inspect", run, "--components", "ema", "--tensors")[0]
    flip(next((run / "step-00000006").glob("model-*")), -1)
    found, _ = answered("verify", run, "--components", "ema,trainer")
    assert [each["name"] for each in found["components"]] == ["trainer", "ema"]
    assert [each["name"] for each in found["files"]] == ["ema-00000-of-00001.safetensors"]
    assert answered("verify", run, "--components", "model", code=14)[0]["verified"] is False


def test_diff_of_the_weights_alone_says_whether_the_weights_are_the_same(saved, tmp_path, answered):
    """The counters differ, and so may the contracts of the runs: neither counts."""
    other = tmp_path / "b"
    save(state_at(6, total=20), other)
    two, six = saved / "step-00000002", saved / "step-00000006"
    assert answered("diff", two, six, "--components", "model,ema")[0]["same"]
    answered("diff", six, other, code=3)
    found, _ = answered("diff", six, other, "--components", "model")
    assert found["same"]
    assert [each["name"] for each in found["components"]] == ["model"]
    save(state_at(6, seed=1), other)
    assert {each["name"] for each in answered("diff", six, other, "--components", "model", code=3)[0]["leaves"]} == {
        f"model.params['{index}.{kind}']" for index in (0, 1) for kind in ("weight", "bias")
    }


def test_plan_for_a_part_takes_the_newest_checkpoint_with_that_part(partial, answered):
    """C05: one without weights has a mark, and is passed over and named where weights are wanted."""
    whole, _ = answered("plan", partial)
    assert whole["checkpoint"] == "step-00000006"
    model, _ = answered("plan", partial, "--components", "model")
    assert model["checkpoint"] == "step-00000006"
    assert [each["where"].rpartition("/")[2] for each in model["passed_over"]] == ["step-00000009", "step-00000008"]
    assert {each["name"]: each["verb"] for each in model["actions"]}["optimizer"] == "keep"
    assert model["size_bytes"] < whole["size_bytes"]
    ema, _ = answered("plan", partial, "--components", "ema")
    assert ema["checkpoint"] == "step-00000009"
    trainer, _ = answered("plan", partial, "--components", "optimizer,scheduler,trainer")
    assert trainer["checkpoint"] == "step-00000008"


def test_ls_lists_those_that_have_these_components(partial, answered, call):
    """C05: what a resume that needs weights can take."""
    names = lambda *more: [each["name"] for each in answered("ls", partial, *more)[0]["checkpoints"]]
    whole = ["step-00000002", "step-00000004", "step-00000006"]
    assert names() == [*whole, "step-00000008", "step-00000009"]
    assert names("--components", "model") == whole
    assert names("--components", "trainer") == [*whole, "step-00000008"]
    assert names("--components", "ema") == [*whole, "step-00000009"]
    assert json.loads(call("ls", partial, "--components", "model,optimizer", "--json")[0])["newest"] == "step-00000006"


def test_a_run_whose_weights_are_outside_has_no_checkpoint_to_take_them_from(tmp_path, answered, call):
    """C05, B03: the list and the plan say that they were left out, and a resume that wants them names where they may come from."""
    outside = tmp_path / "outside"
    save(state_at(3), outside, components=["optimizer", "scheduler", "trainer"])
    answered("ls", outside, "--components", "model", code=12)
    assert "left out" in call("plan", outside)[0]
    with pytest.raises(ResumeRefused, match=r"external_weights +model: saved nothing, .*attach\(..., weights=source\)"):
        load(outside, like=state_at(0))
