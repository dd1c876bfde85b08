"""The command line: what it says, where it says it, and the exit codes."""

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from rich.console import Console

import trainfold
from trainfold import __version__
from trainfold.adapters.cli import main
from trainfold.adapters.cli.ls import list_run
from trainfold.adapters.cli.terminal.output import Answer, OutputFailed, Table, aligned, deliver
from trainfold.backends.runs.api import save
from trainfold.backends.runs.quarantine_file import begin_attempt
from trainfold.backends.stores.local import LocalStore
from trainfold.core.data.cursor import make_cursor
from trainfold.core.digest import digest_of
from trainfold.core.errors import CheckpointDamaged, ResumeRefused
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.format.manifest import END, TAIL
from trainfold.core.format.manifest_reader import decode_manifest
from trainfold.core.optim.optimizer import optimizer
from trainfold.core.optim.schedule import wsd
from trainfold.core.resume.quarantine import LIMIT
from trainfold.core.state.state import Progress, TrainState
from trainfold.core.step.init_state import init_state

EXPLAINED = ("expected", "found", "fix")


def state_at(step, *, seed=0, total=10):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    adamw = optimizer(torch.optim.AdamW, lr=1e-3)
    schedule = wsd(total, warmup_steps=1, decay_steps=2)
    extra = {"ema": {"w": torch.full((3,), 1.0)}}
    state = init_state(model, adamw, seed=0, schedule=schedule, dataset=make_cursor(100), extra=extra)
    return state.evolve(trainer=Progress(step=step, samples=8 * step))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "a"
    for step in (2, 4, 6):
        save(state_at(step), run)
    return run


@pytest.fixture
def run(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "a", symlinks=True))


@pytest.fixture
def call(capsys):
    def call(*arguments, code=0):
        assert main([str(argument) for argument in arguments]) == code
        captured = capsys.readouterr()
        return captured.out, captured.err

    return call


@pytest.fixture
def answered(call):
    def answered(*arguments, code=0):
        out, err = call(*arguments, "--json", code=code)
        found = json.loads(out)
        error = found.pop("error", None)
        assert (error is None) == (code == 0) == (err == "")
        assert error is None or (error["exit_code"] == code and all(error[part] for part in EXPLAINED))
        assert error is None or err.startswith(f"{error['kind']}: {error['where']}\n")
        return found, error

    return answered


def flip(path, offset=-1):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


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
    """P07: as a resume passes it over, so does the list."""
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


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "plan"])
def test_a_foreign_directory_is_named_and_left_as_it_is(tmp_path, command, call):
    """R09: the path and the fix, on the standard error, and nothing on the standard output."""
    (tmp_path / "thesis.tex").write_text("mine")
    out, err = call(command, tmp_path, code=11)
    assert out == ""
    assert err.startswith(f"CheckpointMissing: {tmp_path}")
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


@pytest.mark.parametrize("offset", [-1, 9])
def test_verify_names_the_file_and_the_leaf_of_a_flipped_bit(run, call, answered, offset):
    flip(model_file(run), offset)
    found, error = answered("verify", run, code=14)
    assert error["kind"] == "CheckpointDamaged"
    assert str(model_file(run)) in error["where"]
    assert not found["verified"]
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
    """W02, V18: what a script has to say at a resume, without a script."""
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
    """W02, G13: the position of a checkpoint that is kept for this."""
    run = Path(__file__).parents[2] / "compat" / "positions" / "v1" / "map" / "run"
    found, _ = answered("plan", run)
    assert [each["num_workers"] for each in found["loaders"]] == [None]
    assert "older trainfold has not written" in call("plan", run)[0]


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


COMMANDS = {"demo": 0, "ls": 1, "inspect": 1, "diff": 2, "verify": 1, "plan": 1}  # and how many arguments each needs


@pytest.mark.parametrize(
    ("arguments", "where", "found"),
    [
        (["bogus"], "trainfold", "bogus"),
        (["--bogus"], "trainfold", "--bogus"),
        ([""], "trainfold", '""'),
        *(([name, *"abc"[:needs], "--bogus"], f"trainfold {name}", "--bogus") for name, needs in COMMANDS.items()),
        *(([name, *"abc"[: needs + 1]], f"trainfold {name}", "abc"[needs]) for name, needs in COMMANDS.items()),
        *(([name, *"ab"[: needs - 1]], f"trainfold {name}", "argument") for name, needs in COMMANDS.items() if needs),
        (["demo", "--steps", "many"], "trainfold demo", "many"),
        (["demo", "--steps", "7.5"], "trainfold demo", "7.5"),
        (["demo", "--steps"], "trainfold demo", "--steps"),
        (["plan", "a", "--step", "2.5"], "trainfold plan", "2.5"),
        (["demo", "--steps", "0"], "--steps", "0"),
        (["demo", "--steps", "5"], "--steps", "5"),
        (["demo", "--steps", "-80"], "--steps", "-80"),
        (["demo", "--seed", "-1"], "--seed", "-1"),
        (["demo", "--seed", str(2**63)], "--seed", str(2**63)),
        (["plan", "a", "--step", "-1"], "trainfold plan", "-1"),
        (["plan", "a", "--step", "last"], "trainfold plan", "last"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_command_line_that_makes_no_sense_is_a_usage_error_in_words_and_in_json(
    arguments, where, found, call, answered, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    out, err = call(*arguments, code=2)
    assert out == ""
    assert err.splitlines()[0].partition(": ")[2] == where
    assert found in err
    assert all(f"\n  {part}" in err for part in EXPLAINED)
    rest, error = answered(*arguments, code=2)
    assert rest == {}
    assert error["where"] == where
    assert found in error["found"]
    assert list(tmp_path.iterdir()) == []


def test_version_and_help_say_what_a_newcomer_asks(call):
    assert call("--version")[0].strip() == __version__
    out, _ = call("--help")
    for command in ("demo", "rehearse", "ls", "inspect", "verify", "plan", "diff"):
        assert command in out
        assert "--json" in call(command, "--help")[0]


def test_help_and_import_do_not_wait_for_torch():
    code = (
        "import sys, trainfold; assert 'torch' not in sys.modules\n"
        "from trainfold.adapters.cli import main; main(['--help']); main(['demo', '--steps', '1'])\n"
        "heavy = {'torch', 'numpy', 'optree', 'matplotlib'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_the_module_exits_with_the_code_of_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "trainfold", "demo", "--steps", "1", "--run", str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("InvalidArgument: --steps")
    assert not (tmp_path / "demo").exists()


def test_a_pipe_gets_plain_text_and_a_terminal_gets_a_drawn_table(capsys):
    table = Table("A run", ("file", "status"), (("a" * 150, "damaged [red]not markup[/]"), ("b", "")))
    deliver(lambda: Answer({}, (table,)), as_json=False)
    plain = capsys.readouterr().out
    assert plain.splitlines() == aligned(table)
    assert plain.isascii()
    parent, child = pty.openpty()
    with os.fdopen(child, "w") as terminal, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        deliver(lambda: Answer({}, (table,)), as_json=False)
    drawn = os.read(parent, 1 << 16).decode()
    os.close(parent)
    assert "│" in drawn
    assert "[red]not markup[/]" in drawn.replace("\r\n", "")


def in_a_terminal(answer, columns):
    """What a terminal of so many columns gets, without the colours."""
    parent, child = pty.openpty()
    with os.fdopen(child, "w") as terminal, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("NO_COLOR", "1")
        patch.setenv("TERM", "xterm")
        deliver(lambda: answer, as_json=False)
    drawn = ""
    with suppress(OSError):  # EIO: all was read
        while True:
            drawn += os.read(parent, 1 << 16).decode()
    os.close(parent)
    return re.sub(r"\x1b\[[0-9;]*m", "", drawn).replace("\r\n", "\n").splitlines()


@pytest.mark.parametrize("columns", [60, 70, 80, 100, 132, 200])
def test_ls_has_one_line_for_each_checkpoint_in_a_terminal_of_any_usual_width(run, columns):
    """R03: name, step and status are in it; what has no room is said to be missing."""
    (run / "step-00000008").mkdir()
    flip(run / "step-00000004" / "manifest.json", -40)
    lines = in_a_terminal(list_run(run), columns)
    assert max(map(len, lines)) <= columns
    rows = [re.split(r"\s*│\s*", line.strip("│ ")) for line in lines if line.startswith("│")]
    assert [row[:2] for row in rows] == [
        ["step-00000002", "2"], ["step-00000004", "4"], ["step-00000006", "6"], ["step-00000008", ""]
    ]  # fmt: skip
    assert [row[-1].split(":")[0] for row in rows] == [
        "complete", "CheckpointDamaged", "complete, resumed next", "CheckpointTorn"
    ]  # fmt: skip
    heading = next(line for line in lines if line.startswith("┃"))
    hidden = [name for name in ("components", "after", "timeline", "size") if name not in heading]
    assert hidden == ["components", "after", "timeline", "size"][: len(hidden)], "what is worth least goes first"
    assert any("a wider terminal" in line for line in lines) == bool(hidden)
    assert all(name in "\n".join(lines) for name in hidden)
    assert (hidden == []) == (columns == 200)


def test_a_name_is_never_split_in_a_narrow_terminal(run):
    lines = in_a_terminal(list_run(run), 30)
    assert [name in "\n".join(lines) for name in ("step-00000002", "step-00000004", "step-00000006")] == [True] * 3
    assert max(map(len, lines)) <= 30


# --- a standard output that takes nothing ----------------------------------------------------------------------------


def trainfold_to(output, *arguments, errors=subprocess.PIPE, unbuffered=""):
    return subprocess.run(
        [sys.executable, "-m", "trainfold", *map(str, arguments)],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=output,
        stderr=errors,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [
        (["ls"], ""),
        (["ls"], "1"),
        (["ls", "--json"], ""),
        (["--help"], ""),
        (["--version"], "1"),
        (["", "--json"], "1"),
    ],
)
def test_an_output_that_is_full_is_told_in_one_line_and_has_an_exit_code(saved, arguments, unbuffered):
    """C15, R09: not a traceback, and not the code of an answer that nobody got."""
    command = ["ls", saved, *arguments[1:]] if arguments[0] == "ls" else arguments
    with Path("/dev/full").open("w") as full:
        done = trainfold_to(full, *command, unbuffered=unbuffered)
    assert done.returncode == OutputFailed.exit_code == 4
    assert re.fullmatch(r"OutputFailed: standard output: .*No space left.*\n", done.stderr)


def test_an_exit_code_is_all_that_is_left_where_the_standard_error_is_full_too(tmp_path):
    with Path("/dev/full").open("w") as full:
        assert trainfold_to(full, "ls", tmp_path, "--json", errors=full).returncode == 4


def test_an_output_that_is_closed_is_told_too(saved):
    command = f"{shlex.quote(sys.executable)} -m trainfold ls {shlex.quote(str(saved))} >&-"
    done = subprocess.run(["/bin/sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert done.returncode == 4
    assert done.stderr.startswith("OutputFailed: standard output: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("arguments", "unbuffered"), [(["ls"], ""), (["ls", "--json"], "1"), (["--help"], "")])
def test_a_reader_that_has_seen_enough_hears_nothing(saved, arguments, unbuffered):
    """`trainfold ls RUN | head -1`: the pipe may be closed before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    command = ["ls", saved, *arguments[1:]] if arguments[0] == "ls" else arguments
    done = trainfold_to(writer, *command, unbuffered=unbuffered)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_code_of_an_error_outlives_a_reader_that_has_seen_enough(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    done = trainfold_to(writer, "ls", tmp_path / "nothing", "--json")
    os.close(writer)
    assert done.returncode == 11
    assert done.stderr.startswith("CheckpointMissing: ")


def test_an_answer_with_an_error_shows_both(capsys):
    error = CheckpointDamaged("f", expected="a", found="b", fix="c")
    assert deliver(lambda: Answer({"x": 1}, (), error), as_json=True) == 14
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["x"] == 1
    assert found["error"] == {
        "kind": "CheckpointDamaged", "exit_code": 14, "where": "f", "expected": "a", "found": "b", "fix": "c"
    }  # fmt: skip
    assert captured.err.startswith("CheckpointDamaged: f")


def test_looking_takes_no_lock(run, answered):
    with LocalStore(run).lock():
        for command in ("ls", "inspect", "verify", "plan"):
            answered(command, run)


def test_a_fix_names_only_commands_that_there_are():
    """R09: a next move that is none helps nobody."""
    package = Path(trainfold.__file__).parent
    named = {
        name
        for folder in package.iterdir()
        for path in folder.resolve().rglob("*.py")  # it may be a link
        for name in re.findall(r"`trainfold ([a-z]\w*)", path.read_text(encoding="utf-8"))
    }
    assert named
    assert named <= {*COMMANDS, "rehearse"}  # which takes a program's own command line, after its dashes


# --- what files say, in a terminal -----------------------------------------------------------------------------------

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\ud800\nstep 9: verified"


def written_with_escapes(run):
    """A run whose newest manifest has escapes wherever it may have text, and a digest that fits."""
    path = run / "step-00000006" / "manifest.json"
    document = json.loads(path.read_bytes())
    document.pop("digest")
    document["versions"] = {"torch": ESCAPES, ESCAPES: "1"}
    document["contract"] |= {"tokenizer": ESCAPES, ESCAPES: ESCAPES}
    extra = next(each for each in document["components"] if each["name"] == "ema")
    extra["nodes"] = [
        {"dict": {ESCAPES: ESCAPES, "w": {"t": 0}, "node": {"node": ESCAPES, "fields": {ESCAPES: ESCAPES}}}}
    ]
    lines = json.dumps(document, separators=(",", ":")).replace(',"world_size"', ',\n"world_size"', 1)
    covered = lines[:-1].encode()
    path.write_bytes(covered + TAIL + digest_of(covered).encode() + END)


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "plan", "diff"])
@pytest.mark.parametrize("in_terminal", [False, True])
def test_nothing_that_a_file_says_moves_the_cursor_or_begins_a_line(run, command, in_terminal, capsys, monkeypatch):
    """W23: escapes of versions, names, keys and values are shown, not sent."""
    older = run / "step-00000004"
    written_with_escapes(run)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(Console, "is_terminal", property(lambda _: in_terminal))
    main([command, str(run), *([str(older)] if command == "diff" else [])])
    captured = capsys.readouterr()
    text = captured.out + captured.err
    text.encode()
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", text)  # colours, and the bar of `verify`
    assert "\x1b[2J" not in text
    assert not {c for c in drawn if not c.isprintable()} - {"\n"}
    assert not [line for line in drawn.splitlines() if line.startswith("step 9")]
    assert command in ("ls", "verify") or "\\x1b[2J" in drawn


def test_errors_plans_and_warnings_show_what_a_file_says_and_do_not_send_it(run):
    """W23: also outside of the command line, in a log or a traceback."""
    written_with_escapes(run)
    plan = trainfold.plan(run, like=state_at(0), contract={"tokenizer": "mine"})
    for text in (str(plan), str(ResumeRefused(str(run), plan)), *map(str, plan.reasons)):
        assert not {c for c in text if not c.isprintable()} - {"\n"}
        assert "\nstep 9" not in text


def test_values_that_json_and_decimal_digits_cannot_hold_are_inspected(tmp_path, call):
    """A numpy scalar of an ordinary checkpoint, and an int that Python refuses to write out."""
    values = {"scale": np.float32(0.5), "flag": np.bool_(True), "huge": 2**20_000, "z": np.complex64(1j), "none": None}
    save(TrainState(trainer=Progress(step=1), extra={"mine": values}), tmp_path / "run")
    out, _ = call("inspect", tmp_path / "run")
    assert "0.5" in out
    out, _ = call("inspect", tmp_path / "run", "--json")
    found = json.loads(out)["values"]
    assert found["mine['scale']"] == "np.float32(0.5)"
    assert int(found["mine['huge']"], 16) == 2**20_000
