"""A user's type checkers over the wheel: mypy --strict and pyright pass the examples, and refuse what they must."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A user's project beside an installed wheel, without the source tree or our configuration."""
    root = Path(__file__).parents[2]
    home = tmp_path_factory.mktemp("user")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(home / "dist")]
    subprocess.run(build, cwd=root, capture_output=True, check=True)
    (wheel,) = (home / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(home / "site")
    shutil.copytree(root / "examples", home / "project", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(root / "tests" / "programs", home / "project" / "programs")
    shutil.copy(root / "tests" / "typing_baseline.py", home / "project")
    if (root / ".mypy_cache").is_dir():  # mypy's cache of torch from the gate: 1 second instead of 13
        shutil.copytree(root / ".mypy_cache", home / "cache")
    return home


def check(home, *command):
    """Run a checker in the project, against the wheel; its output if it refuses anything."""
    environ = {**os.environ, "PYTHONPATH": str(home / "site")}
    done = subprocess.run(command, cwd=home / "project", env=environ, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_mypy_strict_passes_the_examples_and_refuses_what_it_must(project):
    files = [path.name for path in (project / "project").glob("*.py")]
    found = check(project, BIN / "mypy", "--strict", "--config-file=", "--cache-dir", project / "cache", *files)
    assert not found, found


@pytest.mark.long
def test_pyright_passes_the_examples_and_refuses_what_it_must(project):
    config = {
        "typeCheckingMode": "standard",
        "enableTypeIgnoreComments": False,  # those are for mypy
        "reportUnnecessaryTypeIgnoreComment": True,
    }
    (project / "project" / "pyrightconfig.json").write_text(json.dumps(config))
    found = check(project, BIN / "basedpyright", "--pythonpath", sys.executable)
    assert not found, found
