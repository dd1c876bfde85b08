"""Helpers shared by the tests of replays: a program that records its steps."""

import subprocess

import pytest

from kit.system.rehearse_cases import program
from trainfold.adapters.cli import main

RECORDS = ('CheckpointManager("runs/mine", every=1000)', "CheckpointManager(sys.argv[1], every=4, record=4)")
TWICE = ("epochs=100", "epochs=2")  # 12 steps


@pytest.fixture
def ran(warm_python, tmp_path, monkeypatch):
    """Runs the program into a run, and returns the command that did."""
    monkeypatch.chdir(tmp_path)

    def run(name, *changes):
        script = tmp_path / f"{name}.py"
        script.write_text(program(RECORDS, TWICE, *changes))
        command = warm_python.command(script, f"runs/{name}")
        subprocess.run(command, check=True)
        return command

    return run


@pytest.fixture
def replayed(capsys):
    """Calls a command with ``--json`` and returns its exit code and document."""

    def run(*words, command=()):
        import json

        code = main([*map(str, words), "--json", *(["--", *command] if command else [])])
        return code, json.loads(capsys.readouterr().out)

    return run
