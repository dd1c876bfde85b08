"""`trainfold completion` prints scripts that shells can run, generated from the existing commands and options."""

import subprocess

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
