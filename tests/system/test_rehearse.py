"""`trainfold rehearse`: programs with state that no component holds are caught, clean ones pass, and restless ones are told apart."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import trainfold
from trainfold.adapters.cli import main
from trainfold.adapters.cli.diff import Different
from trainfold.adapters.cli.rehearse import room
from trainfold.adapters.cli.rehearse.errors import (
    NeverResumed,
    NeverSaved,
    NoRoom,
    NotRepeatable,
    ProgramFailed,
    ResumeDiffers,
)
from trainfold.adapters.cli.rehearse.moments import Trigger
from trainfold.adapters.cli.rehearse.options import make_settings
from trainfold.adapters.cli.rehearse.process import Program
from trainfold.adapters.cli.rehearse.rehearse import PICTURE, REPORT, run_rehearsal
from trainfold.adapters.cli.rehearse.room import most_kept
from trainfold.adapters.cli.terminal.output import Answer
from trainfold.adapters.live.live import attach
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import CheckpointForeign, InvalidArgument
from trainfold.core.rehearsal.orders import VARIABLE

# An ordinary program; each hidden state below replaces a line of it.
PROGRAM = """
import os, random, sys
import numpy as np
import torch
from torch import nn
import trainfold

random.seed(0); np.random.seed(0); torch.manual_seed(0)

class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(48, 6)
        self.own = torch.Generator().manual_seed(5)
    def __len__(self):
        return 48
    def __getitem__(self, index):
        x = self.x[index]
        return x, x.sum()

def collate(samples):
    x, y = zip(*samples)
    return torch.stack(x), torch.stack(y)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(12, 1)
    def forward(self, x):
        h = self.first(x).relu()
        return self.last(self.dropout(h)).squeeze(1)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = torch.utils.data.DataLoader(Data(), batch_size=8, shuffle=True, collate_fn=collate)
live = trainfold.attach(model, optimizer, loader=loader)
manager = trainfold.CheckpointManager("runs/mine", every=1000)
manager.restore(live)
count, average, scale = 0, 0.0, 1.0
for x, y in live.batches(epochs=100):
    loss = (model(x) - y).square().mean() * scale
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    count += 1
    live.record(loss=loss)
    live.advance(samples=len(x))
    manager.step(live)
    if manager.should_stop:
        break
manager.close()
"""


def program(*changes):
    """The program with lines replaced: (what it says, what it says in that place)."""
    text = PROGRAM
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.fixture
def rehearse(warm_python, tmp_path, monkeypatch):
    """Rehearses a program: 12 steps, a save each fourth, one kill."""
    monkeypatch.chdir(tmp_path)

    def run(text, *arguments, kills=1, steps=12, every=4, **options):
        script = tmp_path / "train.py"
        script.write_text(text)
        settings = make_settings(
            warm_python.command(script, *arguments), steps=steps, every=every, kills=kills, **options
        )
        return run_rehearsal(tmp_path / "rehearsal", settings)

    return run


def test_a_program_that_keeps_everything_is_identical_and_its_own_run_is_not_touched(rehearse, tmp_path):
    """W15: as it is, with two kills; what its own manager would have written to is not there."""
    answer = rehearse(PROGRAM, kills=2)
    assert answer.error is None, answer.data
    assert answer.data["outcome"] == "identical"
    assert answer.data["kills"] == 2
    assert [start["resumed_from"] is None for start in answer.data["starts"]] == [True, False, False]
    assert answer.data["checkpoints_compared"] > 0
    assert answer.data["values_compared"] > 0
    assert answer.data["unseeded_streams"] == []
    assert not (tmp_path / "runs").exists()
    assert json.loads((tmp_path / "rehearsal" / REPORT).read_text())["identical"] is True
    assert (tmp_path / "rehearsal" / PICTURE).exists()
    (one,), (other,) = answer.data["places"].values()
    assert main(["diff", one, other]) == 0


HIDDEN = {
    "a variable of the loop": [("loss = (model(x) - y).square().mean() * scale", "scale *= 1.01; loss = (model(x) - y).square().mean() * scale")],
    "a closure": [
        ("count, average, scale", "def made():\n    seen = [0]\n    def warm():\n        seen[0] += 1\n        return min(1.0, seen[0] / 9)\n    return warm\nwarm = made()\ncount, average, scale"),
        ("    optimizer.step()", "    optimizer.param_groups[0]['weight_decay'] = 0.1 * warm()\n    optimizer.step()"),
    ],
    "a counter that decides something": [("    optimizer.step()", "    if count % 5 == 4: nn.utils.clip_grad_norm_(model.parameters(), 0.01)\n    optimizer.step()")],
    "a generator of the dataset": [("x = self.x[index]", "x = self.x[index] + 0.1 * torch.randn(6, generator=self.own)")],
    "a counter of the collate function": [("    x, y = zip(*samples)", "    collate.calls = getattr(collate, 'calls', 0) + 1\n    x, y = zip(*samples)\n    x = [each * (1 + 0.01 * collate.calls) for each in x]")],
    "a buffer that is not persistent": [
        ("        self.dropout =", "        self.register_buffer('mean', torch.zeros(12), persistent=False)\n        self.dropout ="),
        ("        return self.last", "        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)\n        h = h - self.mean\n        return self.last"),
    ],
    "a tensor that is a plain attribute": [("        h = self.first(x).relu()", "        self.seen = getattr(self, 'seen', 0.0) + x.abs().sum().item() / 500\n        h = self.first(x / (1 + self.seen)).relu()")],
    "a dropout that is annealed": [("    count += 1", "    count += 1; model.dropout.p *= 0.8")],
    "a submodule that goes to eval": [("    count += 1", "    count += 1\n    if count == 3: model.dropout.eval()")],
    "moments that an optimizer's subclass keeps": [
        ("optimizer = torch.optim.SGD(", "class Slow(torch.optim.SGD):\n    slow = None\n    def step(self, closure=None):\n        super().step(closure)\n        now = [p.detach().clone() for g in self.param_groups for p in g['params']]\n        self.slow = self.slow or now\n        self.slow = [0.9 * a + 0.1 * b for a, b in zip(self.slow, now)]\n        for p, a in zip((p for g in self.param_groups for p in g['params']), self.slow):\n            p.data.lerp_(a, 0.1)\noptimizer = Slow("),
    ],
    "a rate that is set from a counter": [("    optimizer.step()", "    optimizer.param_groups[0]['lr'] = 0.05 * 0.9 ** count\n    optimizer.step()")],
    "gradients that are carried over": [("    optimizer.zero_grad()", "    count % 3 == 2 and optimizer.zero_grad()")],
    "state of a module": [("    loss = (model", "    random.scale = getattr(random, 'scale', 1.0) * 0.97\n    x = x * random.scale\n    loss = (model")],
    "an average of the weights that is not attached": [
        ("count, average, scale", "teacher = [p.detach().clone() for p in model.parameters()]\ncount, average, scale"),
        ("    loss = (model", "    for t, p in zip(teacher, model.parameters()): t.lerp_(p.detach(), 0.2)\n    loss = 0.1 * sum((t - p).square().sum() for t, p in zip(teacher, model.parameters())) + (model"),
    ],
    "numbers drawn between the restore and the loop": [("manager.restore(live)", "manager.restore(live)\nrandom.random()"), ("    loss = (model", "    x = x * (1 + 0.1 * random.random())\n    loss = (model")],
}  # fmt: skip
PUT_BACK = {
    "numbers drawn between the restore and the loop"
}  # G11: exact where a manager notices, and else caught here


def data_files(folder):
    """The files of tensors below a folder: links to one of them count once."""
    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
        return {path.stat().st_ino for path in folder.glob("**/model-*.safetensors")}
    return set()


def test_a_rehearsal_has_no_more_checkpoints_on_the_disk_than_it_says(rehearse, tmp_path):
    """A save in each of 20 steps, by a manager that keeps all: those of the whole run, and four beside them; and few when it is over."""
    settings = make_settings(["true"], steps=20, every=1)
    most, is_over = [0], threading.Event()

    def look():
        while not is_over.wait(0.002):
            most[0] = max(most[0], len(data_files(tmp_path / "rehearsal")))

    looker = threading.Thread(target=look)
    looker.start()
    try:
        slower = program(
            ("    count += 1", "    count += 1; import time; time.sleep(0.02)")
        )  # than what tidies up beside it
        answer = rehearse(slower, kills=2, steps=20, every=1)
    finally:
        is_over.set()
        looker.join()
    assert answer.error is None, answer.data
    assert most_kept(settings) >= most[0] >= 20 + 1
    assert len(data_files(tmp_path / "rehearsal")) <= 4
    room = answer.data["room"]
    assert room["needed_bytes"] == most_kept(settings) * room["checkpoint_bytes"]


def test_a_disk_without_room_ends_a_rehearsal_after_the_first_save(rehearse, tmp_path, monkeypatch):
    """It says what is needed, and what is there; the program is ended, and nothing else is run."""
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 100, 100))
    with pytest.raises(NoRoom, match=r"for 7 checkpoints of .* found 1?\d\d?\.?\d? k?B free.*--dir"):
        rehearse(PROGRAM)
    assert not (tmp_path / "rehearsal" / "again").exists()


@pytest.mark.parametrize("kind", HIDDEN)
def test_a_program_with_hidden_state_is_caught(rehearse, kind, tmp_path):
    """W15: whatever an attach may refuse some day, a rehearsal finds today: by its difference, or because it is refused."""
    try:
        answer = rehearse(program(*HIDDEN[kind]))
    except ProgramFailed as refused:
        if "expected" not in refused.found:
            raise
        return
    if kind in PUT_BACK and answer.error is None:
        return
    assert isinstance(answer.error, ResumeDiffers), answer.data
    first = answer.data["differences"][0]
    assert first["resumed_at"] in (4, 8)
    assert first["step"] > first["resumed_at"]
    assert answer.data["reasons"]
    assert answer.data["repeats_itself"]
    components = [each for each in answer.data["differences"] if each["kind"] == "component"]
    assert all(each["leaves"] for each in components)
    if components:
        paths = [path for each in components for path, *_ in each["leaves"]]
        measured = answer.data["first_leaves"]
        assert measured
        assert {each["leaf"] for each in measured} <= set(paths)
        assert {each["step"] for each in measured} == {components[0]["step"]}
        assert all(0 < each["differing"] <= each["elements"] for each in measured)
        assert any(each["largest"] for each in measured)
        assert measured[0]["leaf"] in str(answer.tables)
        assert f"{measured[0]['differing']} of {measured[0]['elements']}" in str(answer.tables)
        pair = next(row for table in answer.tables for row in table.rows if row[0] == "look further")[1].split()[2:]
        assert main(["diff", *pair]) == Different.exit_code
    assert not list(tmp_path.glob("rehearsal/again/**/step-*/"))


@pytest.mark.parametrize(("steps", "every", "missed"), [(12, 6, "inside an epoch"), (12, 4, ""), (5, 2, "end")])
def test_what_a_rehearsal_of_epochs_did_not_try_is_said(rehearse, steps, every, missed):
    """48 samples in batches of 8 are 6 steps an epoch. A dataset's own generator begins anew with each epoch's workers: a resume there is right."""
    answer = rehearse(PROGRAM, steps=steps, every=every)
    assert answer.error is None, answer.data
    said = answer.data["not_rehearsed"]
    assert missed in " ".join(said)
    assert bool(said) == bool(missed)
    assert all(each in str(answer.tables) for each in said)
    assert ("a kill during a save" in " ".join(said)) == (every == 6)
    if every == 6:  # its only save after the first is the last, after which nothing is left to be resumed
        assert answer.data["starts"][0]["kill"]["during"] == "step"
        assert answer.data["starts"][1]["resumed_at"] == 6


def test_a_kill_that_comes_after_the_last_save_is_not_blamed_on_the_program(rehearse, monkeypatch):
    """W15: the run is over, and nothing can be compared: it is said, and not that the program does not save."""
    monkeypatch.setattr(
        "trainfold.adapters.cli.rehearse.rehearse.plan_moments", lambda **_: [Trigger(12, in_save=False, fraction=0.0)]
    )
    monkeypatch.setattr(
        "trainfold.adapters.cli.rehearse.starts.arms",
        lambda seen, _: any(e.kind == "saved" and e.step == 12 for e in seen),
    )
    found = rehearse(program(("manager.close()", "import time; time.sleep(0.5)\nmanager.close()")), every=6).error
    assert isinstance(found, NeverResumed), found
    assert "--steps" in found.fix


def test_a_program_that_ends_before_its_kill_counts_as_ended(rehearse, monkeypatch):
    """W15: a kill that found nobody is none: nothing was resumed."""
    monkeypatch.setattr("trainfold.adapters.cli.rehearse.moments.StepTimes.delay_secs", lambda *_: 2.0)
    answer = rehearse(program(("epochs=100", "epochs=2")), steps=40, every=5)
    assert isinstance(answer.error, NeverResumed), answer.data
    assert answer.data["kills"] == 0
    assert [start["ended"] for start in answer.data["starts"]] == ["by itself"]


def test_a_program_that_fails_after_its_last_step_is_told_so(rehearse):
    """W15: all bits are the same, and its evaluation at the end has no file to read."""
    with pytest.raises(
        ProgramFailed, match=r"(?s)start 1 of whole.*exit code 1 after its last step, 12.*no test set"
    ) as failed:
        rehearse(PROGRAM + "raise RuntimeError('no test set')\n")
    assert "manager.should_stop" in failed.value.fix


def test_a_program_that_is_not_seeded_does_not_repeat_itself_also_where_it_cannot_go_on(rehearse):
    """W15: the data of each start are others, so a resume is refused: the reason is the seed, and the exit code says so."""
    found = rehearse(program(("torch.manual_seed(0)", "torch.seed()"))).error
    assert isinstance(found, NotRepeatable), found
    assert "start 2 of killed" in found.found
    assert "the last batch of the position" in found.found
    assert "torch.manual_seed(0)" in found.fix


@pytest.mark.parametrize("has_hidden_state", [False, True])
def test_a_recorded_time_is_left_out_by_name_and_all_else_is_compared(rehearse, has_hidden_state):
    """W15: what no component follows does not make a program one that does not repeat itself; neither does it hide a difference."""
    timed = ("live.record(loss=loss)", "import time; live.record(loss=loss, secs=time.perf_counter())")
    hidden = HIDDEN["a variable of the loop"] if has_hidden_state else []
    answer = rehearse(program(timed, *hidden))
    assert answer.data["repeats_itself"]
    assert answer.data["values_that_do_not_repeat"] == ["secs"]
    assert "recorded secs" in str(answer.tables)
    assert not any(each["name"] == "secs" for each in answer.data["differences"])
    assert isinstance(answer.error, ResumeDiffers) if has_hidden_state else answer.error is None, answer.error


def test_a_count_that_ends_the_loop_is_named_as_what_is_not_saved(rehearse):
    """W15: an early stop counts in a variable, so a resumed run trains longer; no value comes from anywhere else."""
    answer = rehearse(
        program(("    if manager.should_stop", "    if manager.should_stop or count == 10")), steps=20, every=4
    )
    assert isinstance(answer.error, ResumeDiffers), answer.data
    assert [(each["kind"], each["step"]) for each in answer.data["differences"]] == [("end", 10)]
    assert "the loop ended at another step" in answer.error.fix
    assert "early stop" in answer.error.fix


def test_a_value_that_no_component_explains_is_told_apart_from_one_that_is(rehearse):
    """A running average of the loss in a variable changes no training: the report says that no component differs."""
    answer = rehearse(program(("live.record(loss=loss)", "average = 0.9 * average + 0.1 * loss.item(); live.record(average=average)")))  # fmt: skip
    assert isinstance(answer.error, ResumeDiffers)
    assert {each["kind"] for each in answer.data["differences"]} == {"value"}
    assert "no component differs" in answer.data["reasons"][0]


def test_streams_that_a_program_does_not_seed_are_left_out_by_name(rehearse):
    """Many a program seeds torch alone: its losses repeat, and the stream of python, which it does not use, begins anywhere."""
    seedless = ("\nrandom.seed(0);", "\nrandom.seed(int.from_bytes(os.urandom(8), 'big'));")
    answer = rehearse(program(seedless))
    assert answer.error is None
    assert answer.data["outcome"] == "identical"
    assert answer.data["unseeded_streams"] == ["python"]
    assert "stream of python" in str(answer.tables)


RESTLESS = ("* scale", "* scale * (1 + 1e-6 * int.from_bytes(os.urandom(2), 'big') / 65536)")


@pytest.mark.parametrize(
    ("changes", "tolerance", "error"),
    [
        ([], None, NotRepeatable),
        ([], 1e-3, None),
        ([], 1e-12, ResumeDiffers),
        (HIDDEN["a variable of the loop"], 1e-3, ResumeDiffers),
    ],
    ids=["no tolerance", "within", "beyond", "within, but for a hidden variable"],
)
def test_a_program_that_does_not_repeat_itself_is_told_apart(rehearse, changes, tolerance, error):
    """W15: two whole runs differ already, so what a resumed process computes again is compared with what the killed one had."""
    changed = [(old, new.replace(*RESTLESS)) for old, new in changes] or [RESTLESS]
    answer = rehearse(program(*changed), tolerance=tolerance)
    assert not answer.data["repeats_itself"]
    assert answer.data["computed_again"], answer.data["starts"]
    assert type(answer.error) is (error or type(None)), answer.error
    if error is None:
        assert answer.data["outcome"] == "within"
        assert 0 < max(pair["apart"] for pair in answer.data["computed_again"]) < 1e-3


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ([("    manager.step(live)\n", "")], NeverSaved, "manager.step"),
        ([("manager.restore(live)\n", "live.register('again', (lambda: {}, lambda tree: None))\n")], NeverResumed, "manager.restore"),
        ([('"runs/mine"', 'f"runs/{os.getpid()}"')], NeverResumed, "same place"),
        ([("    count += 1", "    count += 1\n    assert count < 7, 'the disk is full'")], ProgramFailed, "the disk is full"),
    ],
    ids=["no step", "no restore", "another place each time", "fails"],
)  # fmt: skip
def test_a_program_that_cannot_be_rehearsed_is_told_why(rehearse, changes, error, says):
    """Each with an exit code of its own, and with the next move."""
    try:
        found = rehearse(program(*changes)).error
    except ProgramFailed as failed:
        found = failed
    if error is NeverResumed and isinstance(
        found, ProgramFailed
    ):  # a manager may refuse to save beside what was never restored
        assert "restore" in found.found
        return
    assert isinstance(found, error)
    assert says in str(found)


def test_a_program_that_hangs_is_ended_and_named(rehearse):
    with pytest.raises(ProgramFailed, match="nothing for 1 s"):
        rehearse(
            program(("    count += 1", "    count += 1\n    if count == 3:\n        import time; time.sleep(60)")),
            patience_secs=1.0,
        )


PLAIN = ("for x, y in live.batches(epochs=100):", "for x, y in (batch for _ in range(100) for batch in loader):")


def test_a_program_that_ignores_every_way_to_end_is_killed_after_its_last_step(rehearse):
    """It looks neither at should_stop nor at the end of live.batches(): the kill after the last save counts as its end."""
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
    """48 samples in batches of 8 are 6 steps an epoch: no multiple of the cadence of 5 is a boundary."""
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
for done in range(state.trainer.step + 1, 100):
    time.sleep(0.02)
    scale *= BEND
    rows = x[8 * (done % 6) : 8 * (done % 6) + 8]
    state, metrics = step(state, {"x": rows, "y": scale * rows.sum(1, keepdim=True)})
    if done % 4 == 0:
        trainfold.save(state, run)
"""


@pytest.mark.parametrize("bend", ["1.0", "1.01"])
def test_a_program_without_a_manager_is_watched_by_its_checkpoints(rehearse, bend):
    """It calls trainfold.save and trainfold.load itself, in the directory that {run} stands for."""
    answer = rehearse(FUNCTIONAL.replace("BEND", bend), "{run}")
    assert answer.data["kills"] == 1
    assert answer.data["starts"][1]["resumed_at"] >= 4
    assert isinstance(answer.error, ResumeDiffers) if bend == "1.01" else answer.error is None, answer.error


def test_without_a_manager_and_without_a_directory_it_says_what_is_missing(rehearse):
    answer = rehearse(FUNCTIONAL.replace("BEND", "1.0").replace("sys.argv[1]", "'runs'").replace("100", "9"))
    assert isinstance(answer.error, NeverSaved)
    assert "{run}" in answer.error.fix


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_runs_a_real_python_with_json_and_exit_code(tmp_path):
    """The only one here whose program is started as a user starts it."""
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
        sys.executable,
        str(script),
        "--out",
        "{run}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "trainfold", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    found = json.loads(done.stdout)
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
    """Without -- an option of the program, such as its seed, would be taken for one of the rehearsal in silence."""
    monkeypatch.chdir(tmp_path)
    assert main(["rehearse", *words]) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_is_after_the_dashes_is_the_programs_own(tmp_path, monkeypatch):
    """Also what the rehearsal would understand."""
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
    """In the middle of an epoch, and no process dies of it."""
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
    """Loader workers die with the program, as on a machine that is lost."""
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
    """A run that only looks rehearsed must not start: its place would not be what its program says."""
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(InvalidArgument, match=VARIABLE):
        trainfold.CheckpointManager(tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


class Counted:
    """A tensor without dimensions on a device that counts how often it is waited for."""

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
    """Each call is one write to the file: the process dies in the middle of a step, without a word."""
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
