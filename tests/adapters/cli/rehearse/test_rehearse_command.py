"""The command of a rehearsal, its options and orders, and programs without a manager."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from kit.adapters.cli_cases import fits_its_schema
from kit.system import rehearse_cases
from kit.system.rehearse_cases import HIDDEN, program

import trainfold
from trainfold.adapters.cli import main
from trainfold.adapters.cli.rehearse.errors import (
    NeverSaved,
    ResumeDiffers,
)
from trainfold.adapters.cli.rehearse.options import make_settings
from trainfold.adapters.cli.rehearse.process import Program
from trainfold.adapters.cli.rehearse.rehearse import run_rehearsal
from trainfold.adapters.cli.terminal.output import Answer
from trainfold.adapters.live.attach import attach
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import CheckpointForeign, InvalidArgument
from trainfold.core.rehearsal.orders import VARIABLE

rehearse = rehearse_cases.rehearse
IS_DEEP = os.environ.get("HYPOTHESIS_PROFILE") in ("laws", "soak")


PLAIN = ("for x, y in live.batches(epochs=100):", "for x, y in (batch for _ in range(100) for batch in loader):")


def test_a_program_that_ignores_every_way_to_end_is_killed_after_its_last_step(rehearse):
    """It checks neither should_stop nor the end of live.batches(), so the kill after the last save counts as its end."""
    endless = program(
        ("for x, y in live.batches(epochs=100):", "data = loader.dataset\nwhile True:\n    x = data.x[torch.randperm(48)[:8]]; y = x.sum(1)"),
        ("trainfold.attach(model, optimizer, loader=loader)", "trainfold.attach(model, optimizer)"),
        ("    if manager.should_stop:\n        break\n", ""),
    )  # fmt: skip
    answer = rehearse(endless)
    assert answer.error is None, answer.error
    assert answer.data["outcome"] == "identical"
    assert answer.data["starts"][-1]["last_step"] == 12


def test_a_program_that_looks_at_its_manager_once_an_epoch_is_saved_there(rehearse):
    """48 samples in batches of 8 are 6 steps per epoch, so the cadence of 5 does not meet the ends of epochs."""
    by_epoch = program(
        (
            "for x, y in live.batches(epochs=100):",
            "for x, y in live.batches(epochs=100):\n    epoch = live.progress.epoch",
        ),
        ("    manager.step(live)\n", "    live.progress.epoch > epoch and manager.step(live)\n"),
    )
    answer = rehearse(by_epoch, steps=18, every=5)
    assert answer.error is None, answer.error
    assert answer.data["starts"][-1]["resumed_at"] in (6, 12)


FUNCTIONAL = """
import sys, time, torch, trainfold
from pathlib import Path
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Dropout(0.1), torch.nn.Linear(12, 1))
def loss_fn(model, batch):
    return trainfold.Loss(sum=(model(batch["x"]) - batch["y"]).square().sum(), weight=len(batch["y"]))
adamw = trainfold.optimizer(torch.optim.AdamW, lr=1e-2)
step = trainfold.make_step(model, loss_fn, adamw)
state = trainfold.init_state(model, adamw, seed=0)
run = Path(sys.argv[1]) / "checkpoints"
planned = trainfold.plan(run, like=state)
if not isinstance(planned, trainfold.Refusal):
    state = trainfold.load(run, like=state)
x = torch.randn(48, 6)
scale = 1.0
for done in range(state.trainer.step + 1, 1000):
    time.sleep(0.02)
    scale *= BEND
    rows = x[8 * (done % 6) : 8 * (done % 6) + 8]
    state, metrics = step(state, {"x": rows, "y": scale * rows.sum(1, keepdim=True)})
    if done % 4 == 0:
        trainfold.save(state, run)
"""


@pytest.mark.parametrize("bend", ["1.0", "1.01"])
def test_a_program_without_a_manager_is_watched_by_its_checkpoints(rehearse, bend):
    """It calls trainfold.save and trainfold.load itself, in the directory that replaces {run}."""
    answer = rehearse(FUNCTIONAL.replace("BEND", bend), "{run}")
    assert answer.data["kills"] == 1
    assert answer.data["starts"][1]["resumed_at"] >= 4
    assert isinstance(answer.error, ResumeDiffers) if bend == "1.01" else answer.error is None, answer.error


def test_without_a_manager_and_without_a_directory_it_says_what_is_missing(rehearse):
    answer = rehearse(FUNCTIONAL.replace("BEND", "1.0").replace("sys.argv[1]", "'runs'").replace("1000", "9"))
    assert isinstance(answer.error, NeverSaved)
    assert "{run}" in answer.error.fix


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.slow(3)
def test_the_command_ends_with_json_and_an_exit_code(warm_python, tmp_path):
    """The command is a new Python, as a user starts it; the program that it starts is one too in the laws."""
    script = tmp_path / "train.py"
    script.write_text(
        program(("runs/mine", "{sys.argv[2]}/checkpoints"), ('"{', 'f"{'), *HIDDEN["a variable of the loop"])
    )
    words = [
        "rehearse",
        "--steps",
        "8",
        "--kills",
        "1",
        "--json",
        "--dir",
        "here",
        "--",
        *([sys.executable, str(script)] if IS_DEEP else warm_python.command(script)),
        "--out",
        "{run}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "trainfold", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    found = json.loads(done.stdout)
    fits_its_schema("rehearse", found)
    assert done.returncode == 44, done.stderr
    assert found["error"]["kind"] == "ResumeDiffers"
    assert found["outcome"] == "differs"
    assert found["places"]["whole"] == [str(tmp_path / "here" / "whole" / "run" / "checkpoints")]
    assert "never killed: step 8 of 8" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "where"),
    [
        (["--steps", "3"], "--steps"),
        (["--kills", "0"], "--kills"),
        (["--every", "30"], "--every"),
        (["--seed", "-1"], "--seed"),
        (["--tolerance", "-1"], "--tolerance"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_started(options, where, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["rehearse", *options, "--", sys.executable, "train.py"]) == 2
    assert where in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--"], "COMMAND"),
        (["--", "no-such-program"], "no-such-program"),
        ([], "after --"),
        (["--bogus"], "after --"),
        ([sys.executable, "train.py", "--seed", "7"], "after --"),
        (["--bogus", "--", sys.executable], "--bogus"),
    ],
)
def test_a_command_that_cannot_be_started_is_refused(words, says, capsys, tmp_path, monkeypatch):
    """Without --, an option of the program, such as its seed, would silently be taken as one of the rehearsal."""
    monkeypatch.chdir(tmp_path)
    assert main(["rehearse", *words]) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_is_after_the_dashes_is_the_programs_own(tmp_path, monkeypatch):
    """This includes options that the rehearsal has too."""
    seen = []
    monkeypatch.setattr(
        "trainfold.adapters.cli.rehearse.rehearse.run_rehearsal",
        lambda _, settings: seen.append(settings) or Answer({}),
    )
    words = [sys.executable, "train.py", "--seed", "7", "--json", "--out={run}", "-h", "--", "x"]
    assert main(["rehearse", "--steps", "8", "--dir", str(tmp_path), "--", *words]) == 0
    assert seen[0].command == tuple(words)
    assert seen[0].seed == 0
    assert seen[0].steps == 8


def test_a_directory_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointForeign, match="thesis"):
        run_rehearsal(tmp_path, make_settings([sys.executable, "x.py"]))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


# --- the manager and the live run ------------------------------------------------------------------------------------


def orders(tmp_path, **changes):
    given = {
        "home": str(tmp_path / "home"),
        "notes": str(tmp_path / "notes"),
        "every": 2,
        "steps": 5,
        "linger_after": 5,
        **changes,
    }
    return json.dumps(given)


def test_a_manager_reads_the_variable_when_it_is_made_and_says_so_loudly(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(VARIABLE, orders(tmp_path))
    live = attach(torch.nn.Linear(2, 1))
    with trainfold.CheckpointManager(tmp_path / "mine", every=1000) as manager:
        assert "REHEARSAL" in caplog.text
        assert str(tmp_path / "mine") in caplog.text
        saved = []
        for _ in range(5):
            live.advance(samples=1)
            saved.append(manager.step(live) is not None)
    assert saved == [False, True, False, True, True]
    assert manager.should_stop
    assert not (tmp_path / "mine").exists()
    monkeypatch.delenv(VARIABLE)
    with trainfold.CheckpointManager(tmp_path / "mine") as manager:
        manager.save(live)
    assert (tmp_path / "mine" / "step-00000005").exists()


def test_the_batches_end_with_the_rehearsal(tmp_path, monkeypatch):
    """They end in the middle of an epoch, without killing a process."""
    monkeypatch.setenv(VARIABLE, orders(tmp_path))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer, loader=torch.utils.data.DataLoader(torch.randn(16, 2), batch_size=2))
    with trainfold.CheckpointManager("mine") as manager:
        manager.restore(live)
        for batch in live.batches(epochs=100):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            live.record(loss=0.5)
            live.advance(samples=2)
            manager.step(live)
    assert live.progress.step == 5
    entries = [json.loads(line) for line in (tmp_path / "notes" / "record.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries if entry["kind"] == "values"] == [1, 2, 3, 4, 5]
    assert [entry["step"] for entry in entries if entry["kind"] == "saved"] == [2, 4, 5]
    assert entries[-1]["kind"] == "done"


def test_a_kill_takes_along_what_the_program_has_started(tmp_path):
    """Loader workers die with the program, as on a lost machine."""
    started = tmp_path / "started"
    program = Program(
        ["sh", "-c", f"sleep 60 & echo $! > {started}.new; mv {started}.new {started}; wait"],
        environment=dict(os.environ),
        record=tmp_path / "record.jsonl",
        output=tmp_path / "output.txt",
        scan=None,
    )
    with program:
        for _ in program.entries(patience_secs=0.05):
            if started.exists():
                program.kill()
                break
    assert program.code == -signal.SIGKILL
    stat, late = Path(f"/proc/{started.read_text().strip()}/stat"), time.monotonic() + 20
    with contextlib.suppress(FileNotFoundError):
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < late, "what it started is still there"
            time.sleep(0.01)


def test_a_store_of_another_kind_is_moved_too_and_a_place_at_home_stays(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, orders(tmp_path))
    live, store = attach(torch.nn.Linear(2, 1)), MemoryStore()
    at_home = tmp_path / "home" / "run" / "a"
    with trainfold.CheckpointManager(store) as first, trainfold.CheckpointManager(at_home) as second:
        live.advance(samples=1)
        first.save(live)
        second.save(live)
    assert store.list() == []
    assert (at_home / "step-00000001").exists()
    assert len(list((tmp_path / "home" / "managers").glob("*/step-00000001"))) == 1


@pytest.mark.parametrize("text", ["", "1", "{}", '{"home": "here", "notes": "/n", "every": 1, "steps": 4}', "[1]"])
def test_a_variable_that_holds_no_orders_is_refused(text, tmp_path, monkeypatch):
    """A run that only looks rehearsed must not start, because it would not write where its program says."""
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(InvalidArgument, match=VARIABLE):
        trainfold.CheckpointManager(tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


class Counted:
    """A zero-dimensional tensor on a device that counts how often the program waits for it."""

    shape = ()

    def __init__(self):
        self.reads = 0

    def item(self):
        self.reads += 1
        return 0.5


def test_outside_of_a_rehearsal_a_record_keeps_nothing_and_waits_for_nothing():
    live, value = attach(torch.nn.Linear(2, 1)), Counted()
    before = {name: id(held) for name, held in vars(live).items()}
    for _ in range(100):
        live.record(loss=value, other=1, third=torch.tensor(0.1))
    assert value.reads == 0
    assert {name: id(held) for name, held in vars(live).items()} == before


@pytest.mark.parametrize("bad", [torch.zeros(2), "0.5", None, [0.5]])
def test_what_is_no_number_is_refused_by_name_also_outside_of_a_rehearsal(bad):
    with pytest.raises(InvalidArgument, match=r"record\(loss="):
        attach(torch.nn.Linear(2, 1)).record(loss=bad)


def test_a_kill_loses_nothing_that_was_recorded_before_it(tmp_path):
    """Each call is one write to the file, so a process may die in the middle of a step without flushing."""
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, signal, torch, trainfold\n"
        "live = trainfold.attach(torch.nn.Linear(2, 1))\n"
        "manager = trainfold.CheckpointManager('mine')\n"
        "manager.restore(live)\n"
        "live.record(loss=torch.tensor(1 / 3, dtype=torch.float64), half=torch.tensor(0.1, dtype=torch.bfloat16), n=2**70, bad=float('nan'))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env={**os.environ, VARIABLE: orders(tmp_path)}, check=False, capture_output=True)  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    (values,) = [entry["data"]["values"] for entry in map(json.loads, (tmp_path / "notes" / "record.jsonl").read_text().splitlines()) if entry["kind"] == "values"]  # fmt: skip
    assert values == {"loss": (1 / 3).hex(), "half": (0.10009765625).hex(), "n": str(2**70), "bad": "nan"}
