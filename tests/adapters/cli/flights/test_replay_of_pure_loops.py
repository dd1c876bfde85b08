"""Replay and bisect of loops of pure steps that save and load themselves, without a manager."""

import subprocess

import pytest
from kit.adapters.manager import replay_cases

replayed = replay_cases.replayed

PROGRAM = """
import os, sys
import torch
import trainfold
from trainfold import Loss, init_state, make_step, optimizer
from trainfold.states import FlightLog

run = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
sgd = optimizer(torch.optim.SGD, lr=0.05)
step = make_step(model, lambda model, x: Loss(model(x).square().sum(), len(x)), sgd)
state = init_state(model, sgd, seed=0)
if os.path.isdir(run):
    state = trainfold.load(run, like=state)
recorded = FlightLog(run, states_every=3).recorded(step)
while state.trainer.step < int(os.environ.get("UNTIL", "12")):
    x = torch.full((4, 2), float(state.trainer.step))
    state, _ = recorded(state, x)
    if state.trainer.step % 3 == 0:
        trainfold.save(state, run)
"""


@pytest.fixture
def ran(warm_python, tmp_path, monkeypatch):
    """Runs the program into a run, and returns the command that did."""
    monkeypatch.chdir(tmp_path)

    def run(name, *changes, is_tidy=False):
        text = PROGRAM
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        script = tmp_path / f"{name}.py"
        script.write_text(text)
        command = warm_python.command(script, f"runs/{name}", is_tidy=is_tidy)
        subprocess.run(command, check=True)
        return command

    return run


def seen(run):
    """Each file of a run, with what a writer would change even if it wrote the same bytes."""
    found = ((path, path.lstat()) for path in sorted(run.rglob("*")))
    return {
        path: (at.st_ino, at.st_mtime_ns, at.st_nlink if path.is_dir() else path.read_bytes()) for path, at in found
    }


@pytest.mark.parametrize("until", ["12", "18"])
def test_the_run_is_only_read(until, ran, replayed, tmp_path, monkeypatch):
    """R04: the program loads the one checkpoint of the copy, and saves there, also when it would go on for longer than the run; it ends at --to."""
    command = ran("a")
    before = seen(tmp_path / "runs/a")
    monkeypatch.setenv("UNTIL", until)
    for words in (command, [*command[:-1], "./runs/../runs/a/"], [*command[:-1], "{run}"]):
        code, found = replayed("replay", "runs/a", "--from", 6, "--to", 12, command=words)
        assert (code, found.get("same"), found.get("steps")) == (0, True, 6), found
        assert found["states"]["same"]
        assert seen(tmp_path / "runs/a") == before
    assert not (tmp_path / "runs/replay/run/step-00000015").exists()


@pytest.mark.long
def test_a_loop_that_loads_itself_and_has_a_manager_goes_on_from_the_checkpoint(ran, replayed):
    """Its manager knows nothing of the load: each replay was refused, with the advice to call `trainfold.load`."""
    manager = "manager = trainfold.CheckpointManager(run, every=3, record=3)\nrecorded = manager.recorded(step)"
    saves = "    if state.trainer.step % 3 == 0:\n        trainfold.save(state, run)\n"
    command = ran("a", ("recorded = FlightLog(run, states_every=3).recorded(step)", manager), (saves, "    manager.step(state)\nmanager.close()\n"))  # fmt: skip
    code, found = replayed("replay", "runs/a", "--from", 6, command=command)
    assert (code, found.get("same"), found.get("steps")) == (0, True, 6), found


def test_a_start_from_nothing_is_replayed_too(ran, replayed, tmp_path):
    """The copy is not there before the program makes it, so a program that looks for it begins."""
    command = ran("a")
    before = seen(tmp_path / "runs/a")
    code, found = replayed("replay", "runs/a", "--from", 0, "--to", 6, command=[*command[:-1], "{run}"])
    assert (code, found.get("same"), found.get("steps")) == (0, True, 6), found
    code, found = replayed("replay", "runs/a", "--from", 0, "--to", 6, command=command)
    assert found["error"]["kind"] == "ProgramFailed"
    assert "{run}" in found["error"]["fix"]
    assert seen(tmp_path / "runs/a") == before


def test_a_log_without_a_checkpoint_is_replayed_from_the_start(ran, replayed, tmp_path):
    """Replay refused it, and bisect took it for a run."""
    command = [*ran("a", ("state.trainer.step % 3", "state.trainer.step % 100"))[:-1], "{run}"]
    before = seen(tmp_path / "runs/a")
    code, found = replayed("replay", "runs/a", "--from", 0, command=command)
    assert (code, found["same"], found["steps"], seen(tmp_path / "runs/a")) == (0, True, 12, before)


def test_bisect_only_reads_both_runs(ran, replayed, tmp_path):
    command = ran("a")
    ran("b", ("float(state.trainer.step))", "float(state.trainer.step) + (state.trainer.step == 7))"))
    before = seen(tmp_path / "runs")
    code, found = replayed("bisect", "runs/a", "runs/b", "--dir", "scratch", command=[*command[:-1], "{run}"])
    assert (code, found["step"], found["repeats"][0]) == (3, 8, True)
    code, found = replayed("bisect", "runs/a", "runs/b", "--dir", "scratch", command=command)
    assert (code, found["step"], found["repeats"]) == (3, 8, [True, False])
    assert seen(tmp_path / "runs") == before


def test_a_program_that_does_not_go_on_from_the_checkpoint_is_named(ran, replayed, tmp_path):
    command = ran("a", ("if os.path.isdir(run):", "if False:"))
    code, found = replayed("replay", "runs/a", "--from", 6, "--to", 12, command=command)
    assert (code, found["error"]["kind"]) == (48, "NeverResumed")
    assert "begins at step 1" in found["error"]["found"]


def test_a_replay_ends_at_the_first_module_that_is_not_finite(ran, replayed):
    """Without a manager, which watches the modules of other loops. A step refuses such a loss, so here it comes in the replay alone."""
    command = ran("a", ("    state, _ =", "    if 'TRAINFOLD_REHEARSAL' in os.environ and state.trainer.step == 7: x = x / 0.0\n    state, _ ="), is_tidy=True)  # fmt: skip
    code, found = replayed("replay", "runs/a", "--from", 6, "--until-nonfinite", command=command)
    assert (code, found["nonfinite"]["step"], found["reached"]) == (0, 8, None), found
    assert found["nonfinite"]["output"]["kind"] == "Linear"
