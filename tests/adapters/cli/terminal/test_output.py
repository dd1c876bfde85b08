"""Usage errors, pipes and terminals, full or closed outputs, and hostile names."""

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from kit.adapters import cli_cases
from kit.adapters.cli_cases import EXPLAINED, flip, state_at
from rich.console import Console

import trainfold
from trainfold import __version__
from trainfold.adapters.cli import main
from trainfold.adapters.cli.app import app
from trainfold.adapters.cli.ls import list_run
from trainfold.adapters.cli.terminal.output import Answer, OutputFailed, Table, aligned, deliver
from trainfold.backends.runs.api import save
from trainfold.backends.stores.local import LocalStore
from trainfold.core.digest import digest_of
from trainfold.core.errors import CheckpointDamaged, ResumeRefused
from trainfold.core.format.manifest import END, TAIL
from trainfold.core.state.state import Progress, TrainState

saved = cli_cases.saved
run = cli_cases.run
call = cli_cases.call
answered = cli_cases.answered


COMMANDS = {
    "demo": 0,
    "ls": 1,
    "inspect": 1,
    "diff": 2,
    "verify": 1,
    "plan": 1,
    "prune": 1,
}  # and how many arguments each needs


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


@pytest.mark.parametrize("columns", [60, 70, 80, 100, 132, 200, 240])
def test_ls_has_one_line_for_each_checkpoint_in_a_terminal_of_any_usual_width(run, columns):
    """R03: it has name, step and status; columns without room are listed as missing."""
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
    spare = ["components", "after", "date", "timeline", "kind", "size", "age"]
    hidden = [name for name in spare if name not in heading]
    assert hidden == spare[: len(hidden)], "what is worth least goes first"
    assert any("a wider terminal" in line for line in lines) == bool(hidden)
    assert all(name in "\n".join(lines) for name in hidden)
    assert (hidden == []) == (columns == 240)


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
    """C15, R09: no traceback, and not the exit code of an answer that could not be written."""
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
    """`trainfold ls RUN | head -1`: the pipe may close before anything is written."""
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
    """R09: a fix that names a missing command does not help."""
    package = Path(trainfold.__file__).parent
    named = {
        name
        for folder in package.iterdir()
        for path in folder.resolve().rglob("*.py")  # it may be a link
        for name in re.findall(r"`trainfold ([a-z]\w*)", path.read_text(encoding="utf-8"))
    }
    assert named
    assert named <= {name for name in app if not name.startswith("-")}


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
    extra["node"] = {"dict": {ESCAPES: ESCAPES, "w": {"t": 0}, "node": {"node": ESCAPES, "fields": {ESCAPES: ESCAPES}}}}
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
