"""Hypothesis profiles for all tests, and Sybil: every code block of the Markdown pages runs as a test."""

import contextlib
import doctest
import gc
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from sybil import Example, Sybil
from sybil.integration.pytest import SybilItem
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).parent

# Tests run in as many processes as there are cores; more threads of torch would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
assert "torch" not in sys.modules, "too late: torch has read OMP_NUM_THREADS"

# A machine that is busy with other tests makes data slowly; that is no defect of a test.
CALM: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", **CALM)
settings.register_profile("ci", **CALM, derandomize=True, print_blob=True)
settings.register_profile("laws", **CALM, print_blob=True)
settings.register_profile("soak", **CALM, print_blob=True)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev")
settings.load_profile(PROFILE)

# A test asks for a number of examples (100 by default). The usual run tries a share of them, so that each run of the tests tries each
# law; `make laws` and `make soak` try many times as many.
TIMES = {"laws": 10.0, "soak": 500.0}.get(PROFILE, 0.4)
FEWEST = 12  # for tests that ask for more
MOST = 1_000  # a test that asks for more than this gets all of them


def scaled(own: settings) -> settings:
    """The settings of a test, with the number of examples that fits this run."""
    wanted = own.max_examples
    count = wanted if wanted > MOST else max(min(wanted, FEWEST), round(wanted * TIMES))
    return settings(own, max_examples=count)


def scale_examples(items: list[pytest.Item]) -> None:
    """Scale each test of Hypothesis once, however many parameters it has; state machines set their own length.

    Hypothesis has no public way to do this after a test was made; tests/laws/test_profiles.py fails if the private name changes.
    """
    functions = {
        getattr(test := getattr(item, "obj", None), "__func__", test) for item in items if hasattr(item, "obj")
    }
    for function in filter(is_hypothesis_test, functions):
        own = getattr(function, "_hypothesis_internal_use_settings", None)
        if own is not None:  # the run of a state machine has none
            function._hypothesis_internal_use_settings = scaled(own)  # noqa: SLF001


def run_console(example: Example) -> None:
    """Run each `$ trainfold ...` line of a console block; look up each `make` target instead of making it.

    A command must succeed, unless it ends with `; echo $?`: then the last line shown is its exit code. Any other lines below a
    command are its complete output, with `...` for parts that differ; a command without lines below it may print anything.
    Any other kind of command fails, because no test would run it and the page could promise anything.
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
    """Run the command line as a reader would, and compare its exit code and output with the page."""
    returned, printed = called(arguments)
    code = 0
    if asks_code:
        shown, _, last = shown.rstrip().rpartition("\n")
        assert last.isdigit(), f"trainfold {arguments}: the last line shown is the exit code, not {last!r}"
        code = int(last)
    assert returned == code, f"trainfold {arguments}: exit {returned}, not {code}:\n{printed}"
    matches = doctest.OutputChecker().check_output(f"{shown.strip()}\n", f"{printed.strip()}\n", doctest.ELLIPSIS)
    assert not shown.strip() or matches, f"trainfold {arguments}\nshown:\n{shown}\nprinted:\n{printed}"


def called(arguments: list[str]) -> tuple[int, str]:
    """Return the exit code and all output. Python and torch take seconds to start, so only commands that train get their own process."""
    if arguments[:1] == ["demo"]:
        command = [sys.executable, "-m", "trainfold", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        return done.returncode, done.stdout + done.stderr
    from trainfold.adapters.cli import main

    out, err = io.StringIO(), io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        warnings.simplefilter("default")
        code = main(arguments)
    return code, out.getvalue() + err.getvalue()


def costs(items: list[pytest.Item]) -> Counter[Path]:
    """About how many seconds each file takes: those that its tests say, and a little for each test."""
    found: Counter[Path] = Counter()
    for item in items:
        found[item.path] += 0.05 + sum(mark.args[0] for mark in item.iter_markers("slow"))
    return found


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Scale the examples; run the longest file first, or one process would be busy with it when the others have ended.

    The blocks of a page stay in their order, even if pytest-randomly has shuffled the tests.
    """
    scale_examples(items)
    cost = costs(items)

    def place(item: pytest.Item) -> tuple[float, str, int]:
        return -cost[item.path], str(item.path), item.example.start if isinstance(item, SybilItem) else 0

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Keep what is there now out of all later garbage collections: tests, and the processes that they fork, make many."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Let xdist keep the order of the files; it would start those with the most tests first."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def enter_folder(namespace: dict[str, Any]) -> None:
    """Run a page in a new empty folder."""
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
