"""The commands that read a run, and the one that plans a resume, start fast: they import neither torch nor modules that only training needs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kit.adapters.manager.manager_cases import Job

from trainfold.adapters.cli import main
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.api import save
from trainfold.core.data.cursor import make_cursor
from trainfold.core.evaluate.suite import Tally
from trainfold.core.exact.sum import exact_zero
from trainfold.core.state.state import Progress
from trainfold.core.step.init_state import init_state
from trainfold.core.step.optimizer import optimizer

UNWANTED = ("torch", "optree", "hypothesis", "matplotlib", "numpy")
PROGRAM = (
    "import json, sys; from trainfold.adapters.cli import main; code = main(json.loads(sys.argv[1])); "
    f"found = [name for name in {UNWANTED} if name in sys.modules]; "
    "own = sum(name.startswith('trainfold') for name in sys.modules); "
    "sys.stderr.write('\\n' + json.dumps([code, found, own]))"
)
MOST_MODULES = {"plan": 126, "prune": 119}  # of trainfold, else 109: each costs about half a millisecond


def state_at(step):
    """A state with a node of every kind that a checkpoint usually holds."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    tally = Tally({"loss": exact_zero()}, 1, {"loss": "Sum()"}, complete=False, next_index=-1)
    state = init_state(
        model, optimizer(torch.optim.AdamW, lr=1e-3), seed=0, dataset=make_cursor(10), extra={"tally": tally}
    )
    return state.evolve(trainer=Progress(step=step))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    run = tmp_path_factory.mktemp("start") / "run"
    for step in (2, 4):
        save(state_at(step), run)
    return run


@pytest.fixture
def run(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "run", symlinks=True))


def started(*arguments):
    """The exit code of a command, which of the unwanted packages it imported, and how many modules of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([str(argument) for argument in arguments])],
        capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    code, unwanted, own = json.loads(done.stderr.splitlines()[-1])
    assert own <= MOST_MODULES.get(arguments[0], 109), own
    return code, unwanted


@pytest.mark.parametrize("command", ["rehearse -- true", "demo", "demo --json"])
def test_a_command_that_needs_torch_says_what_to_install(command):
    """R03: `rehearse` and `demo` on a machine without torch ended in a traceback."""
    program = (
        "import sys; sys.modules['torch'] = None; from trainfold.adapters.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = command.split()
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert done.stderr.splitlines()[0] == f"PackageMissing: trainfold {words[0]}"
    assert "pip install torch" in done.stderr
    assert not words[-1].endswith("json") or json.loads(done.stdout)["error"]["exit_code"] == 5


@pytest.mark.parametrize("more", [(), pytest.param(("--json",), marks=pytest.mark.long)])
def test_ls_inspect_verify_and_diff_import_no_torch(run, more):
    """V18: commands that read a run on a login node start in a fraction of a second."""
    two, four = run / "step-00000002", run / "step-00000004"
    for code, arguments in ((0, ("ls", run)), (0, ("inspect", two, "--tensors")),
                            (0, ("verify", run)), (3, ("diff", two, four)),
                            (0, ("prune", run, "--keep-last", "1", "--dry-run"))):  # fmt: skip
        assert started(*arguments, *more) == (code, []), arguments


@pytest.fixture(scope="module")
def live_run(tmp_path_factory):
    """A run of a loop with a loader, a scheduler and random streams, which no node class of ours holds."""
    run = tmp_path_factory.mktemp("live") / "run"
    with CheckpointManager(run, every=1, mode="sync") as manager:
        Job(0).run(manager, 2)
    return run


@pytest.mark.parametrize("more", [pytest.param((), marks=pytest.mark.long), ("--json",)])
@pytest.mark.parametrize("kind", ["pure", "live"])
def test_plan_imports_no_torch(run, live_run, kind, more):
    """V18: a plan compares what manifests say; importing torch took most of its time on a checkpoint of any size."""
    run = run if kind == "pure" else live_run
    assert started("plan", run, *more) == (0, [])
    assert started("plan", run, "--step", "2", *more) == (0, [])


def test_a_plan_is_refused_and_passes_over_what_is_damaged_without_torch(run):
    """V18."""
    (run / "step-00000004" / "manifest.json").write_bytes(b"{}")
    assert started("plan", run) == (0, [])
    assert started("plan", run, "--step", "4") == (15, [])
    (run / "step-00000002" / "manifest.json").unlink()
    assert started("plan", run, "--json")[1] == []


@pytest.mark.parametrize("kind", ["pure", "live"])
def test_a_plan_without_torch_is_the_plan_with_it(run, live_run, kind, capsys):
    """V18: also where torch is not installed. The versions are those that the checkpoint has, read without an import."""
    run = run if kind == "pure" else live_run
    assert main(["plan", str(run), "--json"]) == 0
    outputs = [json.loads(capsys.readouterr().out)]
    for first in ("import sys", "import sys; sys.modules['torch'] = sys.modules['numpy'] = None"):
        program = f"{first}; from trainfold.adapters.cli import main; sys.exit(main(sys.argv[1:]))"
        done = subprocess.run([sys.executable, "-c", program, "plan", str(run), "--json"], capture_output=True, text=True, check=True)  # fmt: skip
        outputs.append(json.loads(done.stdout))
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0]["drifts"] == []
    assert len(outputs[0]["loaders"]) == (kind == "live")


def test_a_damaged_checkpoint_is_reported_without_torch(run):
    """The reasons why a checkpoint cannot be used need no torch either."""
    data = next((run / "step-00000004").glob("model-*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")
    assert started("verify", run) == (14, [])
    data.unlink()
    assert started("ls", run) == (0, [])
    assert started("verify", run / "step-00000004") == (13, [])
    (run / "step-00000002" / "manifest.json").write_bytes(b"{}")
    assert started("ls", run) == (12, [])
    assert started("inspect", run / "step-00000002") == (15, [])
    assert started("diff", run / "step-00000002", run / "step-00000004") == (15, [])
    assert started("ls", run / "nothing") == (11, [])
