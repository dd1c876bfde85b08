"""`trainfold completion` prints scripts that shells can run, generated from the existing commands and options."""

import os
import pty
import re
import select
import shutil
import subprocess
import time

import pytest
from kit.adapters import cli_cases

from trainfold import __version__
from trainfold.adapters.cli.app import app

call = cli_cases.call

COMMANDS = {name for name in app if not name.startswith("-")}


def completed(script, *words, folder):
    """What a real bash completes to, with the script, after these words."""
    program = (
        f"{script}\n"
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}\n'
        '_trainfold trainfold "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}" 2>&1\n'
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", program, "bash", "trainfold", *words], capture_output=True, text=True, check=False, cwd=folder
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return {line.strip() for line in done.stdout.splitlines() if line.strip()}


def test_a_real_bash_completes_commands_options_and_paths(call, tmp_path):
    script = call("completion", "bash")[0]
    assert completed(script, "", folder=tmp_path) >= COMMANDS
    assert completed(script, "ver", folder=tmp_path) == {"verify"}
    assert completed(script, "prune", "--keep", folder=tmp_path) == {
        "--keep-last", "--keep-every", "--keep-best", "--keep-newer"
    }  # fmt: skip
    assert "--dry-run" in completed(script, "prune", "--", folder=tmp_path)
    (tmp_path / "runs").mkdir()
    assert completed(script, "ls", "ru", folder=tmp_path) == {"runs"}


needs_zsh = pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
needs_fish = pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
START = 'PS1=""; autoload -Uz compinit && compinit -D -u; '


def typed_in_zsh(start, words, folder):
    """The lines that an interactive zsh has after these words and Tab; ``start`` is what its start file does."""
    (folder / "start.zsh").write_text(START + start)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "LC_ALL": "C.UTF-8"}
    zsh = subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment, start_new_session=True
    )  # fmt: skip
    os.close(theirs)
    try:
        heard = ""

        def wait_for(pattern):
            nonlocal heard
            deadline = time.monotonic() + 30
            while not (found := re.findall(pattern, heard)):
                assert time.monotonic() < deadline, heard
                if select.select([ours], [], [], 0.1)[0]:
                    heard += os.read(ours, 65536).decode()
            heard = ""
            return found

        os.write(ours, b"source ./start.zsh; print rea''dy\n")
        wait_for("ready")
        lines = []
        for each in words:
            os.write(
                ours, each.encode() + b"\t\x01print -r -- '<<' \x05 '>>'\n"
            )  # Ctrl-A and Ctrl-E: the ends of the line
            lines.append(wait_for(r"[\r\n]<< (.*?) *>>")[-1])
        return lines
    finally:
        zsh.kill()
        zsh.wait()
        os.close(ours)


@needs_zsh
@pytest.mark.parametrize("way", ["eval", "a file in the fpath"])
def test_a_real_zsh_completes_commands_options_and_paths(call, tmp_path, way):
    """The script used to define a function that zsh did not know as a completion: after an eval, Tab did nothing."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "fpath").mkdir()
    (tmp_path / "script").write_text(call("completion", "zsh")[0])
    start = 'eval "$(cat script)"'
    if way != "eval":
        shutil.copy(tmp_path / "script", tmp_path / "fpath" / "_trainfold")
        start = "fpath=($PWD/fpath $fpath); compinit -D -u"
    typed = {
        "trainfold ver": "trainfold verify",
        "trainfold prune --dr": "trainfold prune --dry-run",
        "trainfold ls ru": "trainfold ls runs",  # zsh removes the slash when the line goes on
    }
    assert typed_in_zsh(start, list(typed), tmp_path) == list(typed.values())


@needs_fish
def test_a_real_fish_completes_commands_options_and_paths(call, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "script").write_text(call("completion", "fish")[0])

    def completions(words):
        environment = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
        program = f"cat script | source; complete -C '{words}'"
        done = subprocess.run(["fish", "--no-config", "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        return {line.split("\t")[0] for line in done.stdout.splitlines()}

    assert completions("trainfold ") >= COMMANDS
    assert completions("trainfold ver") == {"verify"}
    assert completions("trainfold prune --dr") == {"--dry-run"}
    assert "runs/" in completions("trainfold ls ru")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_names_every_command(call, shell):
    out, err = call("completion", shell)
    assert err == ""
    assert {name for name in COMMANDS if name in out} == COMMANDS


def test_another_shell_is_refused(call):
    _, err = call("completion", "cmd", code=2)
    assert "bash" in err


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_the_version_has_a_short_option(call, option):
    assert call(option)[0].strip() == __version__
