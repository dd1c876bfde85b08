"""Hypothesis profiles for all tests, and Sybil: every code block of the Markdown pages runs as a test."""

import contextlib
import doctest
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

    A command has to succeed, unless it ends with `; echo $?`: then the last line shown is its exit code. What else a
    block shows below a command is all that the command prints, with `...` for what differs; nothing shown says nothing.
    Any other command fails: nobody would run it, and the page would promise what no test has seen.
    """
    commands = re.split(r"^\$ ", str(example.parsed), flags=re.MULTILINE)
    assert len(commands) > 1, "a console block has commands that start with '$ '"
    assert not commands[0].strip(), f"above the first command: {commands[0]}"
    for text in commands[1:]:
        line, _, shown = text.partition("\n")
        command, asks, _ = line.partition("; echo $?")
        words = shlex.split(command, comments=True)
        assert words[:1] in (["make"], ["trainfold"]), (
            f"no test runs this command; show it in a block of text: {command}"
        )
        assert not {"|", "||", "&", "&&", ">", "<"} & set(words), f"no shell runs this command: {command}"
        if words[0] == "make":
            for target in words[1:]:
                assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
            assert not asks + shown.strip(), f"no test runs what this shows: {text}"
        else:
            run_command(words[1:], shown, asks_code=bool(asks))


def run_command(arguments: list[str], shown: str, *, asks_code: bool) -> None:
    """Run the command line as a reader would, and compare its exit code and what it prints with what the page shows."""
    done = subprocess.run(
        [sys.executable, "-m", "trainfold", *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    printed, code = done.stdout + done.stderr, 0
    if asks_code:
        shown, _, last = shown.rstrip().rpartition("\n")
        assert last.isdigit(), f"trainfold {arguments}: the last line shown is the exit code, not {last!r}"
        code = int(last)
    assert done.returncode == code, f"trainfold {arguments}: exit {done.returncode}, not {code}:\n{printed}"
    matches = doctest.OutputChecker().check_output(f"{shown.strip()}\n", f"{printed.strip()}\n", doctest.ELLIPSIS)
    assert not shown.strip() or matches, f"trainfold {arguments}\nshown:\n{shown}\nprinted:\n{printed}"


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
