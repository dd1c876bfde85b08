"""Helpers shared by the tests of replays: a program that records its steps."""

import subprocess

import pytest

from kit.adapters.cli_cases import fits_its_schema
from kit.system.rehearse_cases import program
from trainfold.adapters.cli import main
from trainfold.adapters.cli.flights import bisect_runs as module
from trainfold.adapters.cli.flights.read_run import read_run
from trainfold.adapters.cli.flights.scratch_run import ScratchRun

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


@pytest.fixture
def bisected(tmp_path, monkeypatch):
    """Bisects ``a`` and ``b``; a replay is a run that is there already, by the name of the one that is replayed."""

    def run(*command, **replays):
        def replay(home, request):
            there = tmp_path / replays[request.run.path.name]
            return ScratchRun(read_run(there), None, home / "output.txt")

        monkeypatch.setattr(module, "replay_program", replay)
        place = tmp_path / "replay"
        answer = module.bisect_runs(tmp_path / "a", tmp_path / "b", command, directory=place, patience_secs=60)
        fits_its_schema("bisect", answer.data)
        return answer

    return run
