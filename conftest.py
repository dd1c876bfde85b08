"""Hypothesis profiles for all tests, and Sybil: every code block of the Markdown pages runs as a test."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from sybil import Example, Sybil
from sybil.integration.pytest import SybilItem
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).parent

# Tests run in as many processes as there are cores; torch's threads on top of that would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
assert "torch" not in sys.modules, "too late: torch has read OMP_NUM_THREADS"

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("laws", deadline=None, max_examples=1_000, print_blob=True)
settings.register_profile("soak", deadline=None, max_examples=50_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def run_console(example: Example) -> None:
    """Run each `$ trainfold ...` line of a console block; look up each `make` target instead of making it.

    Any other command fails: nobody would run it, and the page would promise what no test has seen.
    What a block shows below a command has to be in the command's output, line by line; `...` stands for the rest.
    """
    commands = re.split(r"^\$ ", str(example.parsed), flags=re.MULTILINE)[1:]
    assert commands, "a console block has commands that start with '$ '"
    for text in commands:
        command, _, shown = text.partition("\n")
        words = shlex.split(command, comments=True)
        assert words[:1] in (["make"], ["trainfold"]), (
            f"no test runs this command; show it in a block of text: {command}"
        )
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
        else:
            done = subprocess.run(
                [sys.executable, "-m", "trainfold", *words[1:]],
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
            )
            output = done.stdout + done.stderr
            missing = [line for line in shown.splitlines() if line.strip() not in {"", "..."} and line not in output]
            assert not missing, (
                f"{command}\nshown and not printed: {missing}\nprinted (exit {done.returncode}):\n{output}"
            )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the blocks of a page in their order, whatever order pytest-randomly has given the tests."""
    pages = [item for item in items if isinstance(item, SybilItem)]
    pages.sort(key=lambda item: (str(item.path), item.example.start))
    rest = [item for item in items if not isinstance(item, SybilItem)]
    items[:] = [*rest, *pages]


def enter_folder(namespace: dict[str, Any]) -> None:
    """Run a page in an empty folder of its own."""
    stack = namespace["_folder"] = contextlib.ExitStack()
    stack.enter_context(contextlib.chdir(stack.enter_context(tempfile.TemporaryDirectory())))


def leave_folder(namespace: dict[str, Any]) -> None:
    """Remove that folder."""
    namespace["_folder"].close()


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), CodeBlockParser("console", run_console), SkipParser()],
    patterns=["README.md", "CONTRIBUTING.md", "docs/*.md", "docs/**/*.md"],
    excludes=["docs/_build/**", ".venv/**"],
    path=str(ROOT),
    setup=enter_folder,
    teardown=leave_folder,
).pytest()
