"""The documentation keeps its promises: docstring examples run, the build is strict, the reference is complete, links resolve."""

import contextlib
import doctest
import importlib
import io
import itertools
import json
import operator
import pkgutil
import re
import runpy
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch
from kit.adapters.manager.async_save_drawing import holds_the_drawing_of_an_async_save
from kit.system import rehearse_cases

import trainfold
from trainfold.adapters.cli import main
from trainfold.adapters.cli.demo.command import run_demo
from trainfold.adapters.cli.demo.kill import Attempt, Kill
from trainfold.adapters.cli.demo.report import Check, Comparison, tables
from trainfold.adapters.cli.demo.settings import make_settings
from trainfold.adapters.cli.rehearse.options import make_settings as make_rehearsal
from trainfold.adapters.cli.rehearse.rehearse import run_rehearsal
from trainfold.adapters.cli.terminal.output import aligned, deliver
from trainfold.backends.ranks.in_process import run_threads
from trainfold.core.digest import digest_of
from trainfold.core.format.fingerprint import component_fingerprint
from trainfold.core.layout.shard import make_shard
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, OptimizerState, Progress, TrainState

MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(trainfold.__path__, "trainfold.")
    if not found.name.endswith(".__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_are_true(name, tmp_path, monkeypatch):
    """They run under the module's real name, so that no second copy of it is imported."""
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner()
    # A run, even of nothing, makes a debugger, which looks at every file that a traceback of the process may show.
    for each in filter(operator.attrgetter("examples"), doctest.DocTestFinder().find(importlib.import_module(name))):
        runner.run(each)
    assert runner.failures == 0


@pytest.mark.parametrize("name", MODULES)
def test_each_module_says_what_it_is_for(name):
    line = (importlib.import_module(name).__doc__ or "").partition("\n")[0]
    assert line.endswith((".", ":", ",")) or len(line) > 20, f"{name}: {line!r}"


def is_built(root: Path) -> bool:
    """Whether `make docs` has built these sources strictly; it leaves a stamp if there were no warnings."""
    stamp = root / "docs" / "_build" / "strict"
    parts = ("core", "backends", "adapters", "properties", "src/trainfold", "docs", "README.md", "pyproject.toml")
    below = [file for part in parts for file in (root / part, *(root / part).rglob("*")) if file.is_file()]
    sources = [file for file in below if not {"_build", "__pycache__", "generated"} & set(file.parts)]
    return stamp.exists() and stamp.stat().st_mtime > max(file.stat().st_mtime for file in sources)


SPHINX = """
import gc, sys
gc.disable()  # the trees of all pages stay to the end: to look for garbage among them takes a fifth of the time
from sphinx.builders.html import StandaloneHTMLBuilder
from sphinx.cmd.build import main
StandaloneHTMLBuilder.search = False  # an index of every word takes a seventh of the time, and warns of nothing
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def inventory(tmp_path_factory) -> str:
    """The names in a strict build of the documentation; the build of `make docs` is used if nothing has changed since."""
    from sphinx.util.inventory import InventoryFile

    root = trainfold.__path__[0] + "/../.."
    if is_built(Path(root)):
        return InventoryFile.loads(Path(root, "docs/_build/html/objects.inv").read_bytes(), uri="")
    out = tmp_path_factory.mktemp("docs")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            SPHINX,
            "-q",
            "-W",
            "-n",
            "--keep-going",
            "-b",
            "html",
            "-D",
            "html_theme=basic",  # as strict, and without the time that the theme of `make docs` takes for each page
            "-d",
            out / "trees",
            "docs",
            out,
        ],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return InventoryFile.loads((out / "objects.inv").read_bytes(), uri="")


@pytest.mark.slow(20)
@pytest.mark.timeout(600)
def test_every_public_name_is_in_the_reference(inventory):
    """The build is strict (-W -n), and the reference has every public name under the name that a user types."""
    described = {name for kind, names in inventory.data.items() if kind.startswith("py:") for name in names}
    wanted = {f"trainfold.{name}" for name in set(trainfold.__all__) - {"__version__"}}
    for subject in trainfold._MODULES:
        module = getattr(trainfold, subject)
        named = [name for name in module.__all__ if isinstance(getattr(module, name), type | types.FunctionType)]
        below = [name for name in named if name not in trainfold.__all__]
        wanted |= {f"trainfold.{subject}"} | {f"trainfold.{subject}.{name}" for name in below}
    assert wanted <= described, sorted(wanted - described)


@pytest.mark.parametrize(
    ("place", "name"),
    [("", name) for name in sorted(set(trainfold.__all__) - {"__version__"})]
    + [(subject, name) for subject in trainfold._MODULES for name in getattr(trainfold, subject).__all__],
)
def test_every_public_name_has_a_docstring(place, name):
    value = getattr(getattr(trainfold, place) if place else trainfold, name)
    if callable(value):
        assert (value.__doc__ or "").strip(), name


def test_links_between_files_lead_somewhere(root):
    """Sphinx checks the pages in docs/; this test checks the links of other pages to files of the repository."""
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"(?:\]\(|src=\")([^)#\s\"]+)", (root / page).read_text()):
            assert target.startswith("https://") or (root / target).exists(), f"{page}: {target}"
        for target, heading in re.findall(r"\]\(([^)#\s]+\.md)#([^)\s]+)\)", (root / page).read_text()):
            titles = re.findall(r"^#+ (.*)$", (root / target).read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in titles}, (
                f"{page}: {target}#{heading}"
            )


def test_each_test_that_a_page_names_exists(root):
    """A page that names a test must not outlive the test."""
    pages = [root / "README.md", *(root / "docs").glob("*/*.md")]
    named = {(page.name, name) for page in pages for name in re.findall(r"`(tests/[^`\s]+)`", page.read_text())}
    assert named, "the page of what is exact names its tests"
    for page, name in sorted(named):
        file, _, test = name.partition("::")
        assert (root / file).exists(), f"{page}: {name}"
        assert not test or f"def {test}(" in (root / file).read_text(), f"{page}: {name}"


def test_each_line_of_what_is_exact_names_the_test_that_holds_it(root):
    """A line without a test is only a claim; a line about what nothing can detect names a remedy instead."""
    page = (root / "docs" / "explanation" / "what-is-exact.md").read_text()
    seen, _, unseen = page.partition("## Not seen")
    lines = [line for line in seen.splitlines() if line.startswith("| ") and line != "| what | test |"]
    assert len(lines) > 80
    assert [line for line in lines if not re.search(r"`tests/(\w+/)*test_", line)] == []
    assert all(line.count(" | ") == 1 for line in unseen.splitlines() if line.startswith("| "))


def test_each_promise_of_async_saves_names_the_test_that_holds_it(root):
    """The page has one drawing, a table of who may write when, and four writes that are not seen."""
    page = (root / "docs" / "explanation" / "async-saves.md").read_text()
    promised = page.partition("## What is promised")[2].partition("## What is not seen")[0]
    lines = [line for line in promised.splitlines() if line.startswith("| ") and line != "| promise | test |"]
    assert len(lines) >= 9
    assert [line for line in lines if not re.search(r"`tests/(\w+/)*test_\w+\.py::test_", line)] == []
    assert re.findall(r"^\d", page.partition("## What is not seen")[2], re.MULTILINE) == ["1", "2", "3", "4"]


def test_every_decision_has_a_number_a_status_and_its_four_parts(root):
    pages = sorted((root / "docs" / "adr").glob("0*.md"))
    numbers = [page.name[:4] for page in pages]
    assert numbers == [f"{number:04}" for number in range(1, len(pages) + 1)]
    for page in pages:
        text = page.read_text()
        assert text.startswith(f"# ADR-{page.name[:4]}: "), page
        for part in ("## Context", "## Decision", "## Consequences", "## How we would know that it was wrong"):
            assert part in text, f"{page.name}: no {part!r}"


# --- blocks of pages -------------------------------------------------------------------------------------------------


def blocks(root: Path) -> list[tuple[str, str, str]]:
    """(page, language, text) of every fenced block; the Python and console blocks are run by the root's conftest.py."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    return [
        (str(page.relative_to(root)), language, text)
        for page in pages
        if "_build" not in page.parts
        for _, language, text in re.findall(r"^(```+|:::+)(.*?)\n(.*?)^\1$", page.read_text(), re.MULTILINE | re.DOTALL)
    ]


rehearse = rehearse_cases.rehearse
on_threads = rehearse_cases.on_threads


@pytest.fixture(scope="module")
def demo(tmp_path_factory, warm_python) -> tuple[Path, str]:
    """A demo with a tiny model, real kills, and processes forked from one with torch: its folder, and its output."""
    folder, stdout = tmp_path_factory.mktemp("demo"), io.StringIO()
    script = folder / "train.py"
    script.write_text("import sys; from trainfold.adapters.cli.demo import train; sys.exit(train.main())")
    with contextlib.chdir(folder), contextlib.redirect_stdout(stdout):
        settings = make_settings(steps=24, tiny=True)

        def command(run: Path) -> list[str]:
            return warm_python.command(script, run)

        code = deliver(lambda: run_demo(Path("runs/demo"), settings, command=command), as_json=False)
    assert code in {0, 41}, (
        stdout.getvalue()
    )  # 41: the machine was too busy to hit a save with a kill; the lines are the same
    return folder, stdout.getvalue()


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory) -> Path:
    """A run with one checkpoint at step 120, saved by two ranks."""
    weight, run = torch.arange(24.0).reshape(4, 6), tmp_path_factory.mktemp("runs") / "two"

    def on_rank(collectives):
        start = 2 * collectives.rank
        part = make_shard(weight[start : start + 2], shape=(4, 6), starts=(start, 0))
        state = TrainState(
            model=ModelState(Leaves({"h.0.weight": part}), Leaves({})),
            optimizer=OptimizerState("adamw", Leaves({"h.0.weight": {"exp_avg": part}}), ()),
            trainer=Progress(step=120),
        )
        trainfold.save(state, run, collectives=collectives)

    run_threads(2, on_rank)
    return run


def cells(line: str, heading: str) -> list[str]:
    """A line of the demo's first table, cut into the columns of its heading."""
    starts = [0, *(heading.index(name) for name in ("never killed", "killed and resumed", "same"))]
    return [line[start:stop].strip() for start, stop in itertools.pairwise([*starts, None])]


def attempts_in(rows: list[list[str]]) -> list[Attempt]:
    """The processes in the table."""
    texts = {label: text for label, _, text, _ in rows}
    found = []
    for number in range(1, sum(label.startswith("start ") for label in texts) + 1):
        end, left = texts[f"end {number}"], texts.get(f"left {number}", "")
        step = re.search(r"SIGKILL (in|during the save of) step (\d+)", end)
        files = re.search(r"torn: ([\d.]+) (k|M)?B in (\d+) file", left)
        sizes = {}
        if files:
            each = float(files[1]) * {"k": 1e3, "M": 1e6, None: 1}[files[2]] / int(files[3])
            sizes = {str(index): round(each) for index in range(int(files[3]))}
        in_save = step is not None and step[1] != "in"
        kill = step and Kill(
            int(step[2]) - (not in_save),
            "save" if in_save else "step",
            not files and not left.startswith("nothing") if in_save else None,
            sizes,
        )
        resumed = texts[f"start {number}"]
        found.append(Attempt(None if resumed == "fresh" else resumed, 0, kill or None))
    return found


def holds_the_table_of_two_processes(text, request):
    """It equals the program's own table for the same facts, but for its title, which the table before it has."""
    heading, *lines = text.splitlines()
    rows = [cells(line, heading) for line in lines]
    checks = tuple(Check(*row[:3]) for row in rows if row[3])
    table = aligned(tables(Comparison(checks, tuple(attempts_in(rows)), 3, {}), ())[0])
    assert text.splitlines() == table[1:]


def holds_the_report_of_the_demo(text, request):
    """The first table equals the program's own table for the same facts; a real demo prints the same lines around it.

    The second one has the rows of a real demo, and what is exact is the same in each.
    """
    _, printed = request.getfixturevalue("demo")
    table, evaluation, facts = text.split("\n\n")
    _, heading, *lines = table.splitlines()
    rows = [cells(line, heading) for line in lines]
    names = [row[0] for row in rows]
    checks = [Check(*row[:3]) for row in rows if row[3]]
    assert {row[3] for row in rows} == {"yes", ""}
    assert rows[names.index("kills")][2].startswith(str(sum(name.startswith("start ") for name in names) - 1))
    assert table.splitlines() == aligned(tables(Comparison(tuple(checks), tuple(attempts_in(rows)), 3, {}), ())[0])

    real, real_evaluation, real_facts = printed.strip("\n").split("\n\n")
    real_title, real_heading, *real_lines = real.splitlines()
    real_rows = [cells(line, real_heading) for line in real_lines]
    assert (table.splitlines()[0], heading.split()) == (real_title, real_heading.split())
    history = re.compile(r"(start|end|left) \d+$")
    assert [n for n in names if not history.match(n)] == [row[0] for row in real_rows if not history.match(row[0])]

    label = re.compile(r"(.*?)  +")
    shown, found = evaluation.splitlines(), real_evaluation.splitlines()
    assert [line.split() for line in shown[:2]] == [line.split() for line in found[:2]]
    assert [label.match(line)[1] for line in shown[2:]] == [label.match(line)[1] for line in found[2:]]
    assert [line.split()[-1] for line in (shown[2], found[2])] == ["yes"] * 2

    def machine(line):
        return re.sub(r"\d[\d.]*", "#", line)

    assert [machine(line) for line in facts.splitlines()] == [machine(line) for line in real_facts.splitlines()]


def holds_what_to_look_at_next(text, request):
    """The demo prints these commands, and they succeed."""
    folder, printed = request.getfixturevalue("demo")
    assert text.splitlines() == re.findall(r"trainfold (?:ls|diff) .*", printed)
    with contextlib.chdir(folder):
        assert [main(line.split()[1:]) for line in text.splitlines()] == [0, 0]


def holds_what_a_coordinator_does(text, request):
    """The benchmark counts it: rank 0's part of a tree and of the store's requests, while they run, for the bytes that ranks really give."""
    benchmarks = request.getfixturevalue("root") / "benchmarks"
    request.getfixturevalue("monkeypatch").syspath_prepend(str(benchmarks))
    names = runpy.run_path(str(benchmarks / "agreement.py"))
    assert text.splitlines() == names["coordinator_table"](names["coordinators"](names["LARGE"]))


def holds_the_files_of_a_run(text, request):
    """Two ranks write the listed files and nothing else, except the lock, unsharded components, and rank 1's other files."""
    run = request.getfixturevalue("run_of_two")
    found = {str(path.relative_to(run)) for path in run.rglob("*") if not path.is_dir() or path.is_symlink()}
    listed = {line.split()[0] for line in text.splitlines()}
    assert listed <= found
    assert {name for name in found - listed if not name.startswith(".")} == {
        "step-00000120/optimizer-00001-of-00002.safetensors"
    }


def holds_the_manifest(text, request):
    """Each line has the same keys in the same order, and values of the same types."""
    raw = (request.getfixturevalue("run_of_two") / "step-00000120" / "manifest.json").read_text()
    shown = text.replace("{...}", "{}").replace("[...]", "[]")
    assert list(json.loads(shown)) == list(json.loads(raw))
    for one, other in zip(json.loads(shown).values(), json.loads(raw).values(), strict=True):
        assert type(one) is type(other) or None in {one, other}
    last_keys = [re.findall(r'"(\w+)":', line)[-1] for line in shown.splitlines()]
    assert last_keys[0] == "fingerprints"
    assert [
        line.startswith(f'"{name}":') for line, name in zip(raw.splitlines()[1:], ("world_size", "digest"), strict=True)
    ]
    assert len(shown.splitlines()) == len(raw.splitlines()) == 3
    assert len(shown.splitlines()[2]) == len(raw.splitlines()[2])


def holds_the_table_of_tensors(text, request):
    """Its first kind is that which two ranks write for half a tensor each, but for its layout."""
    raw = (request.getfixturevalue("run_of_two") / "step-00000120" / "manifest.json").read_text()
    model = next(each for each in json.loads(raw)["components"] if each["name"] == "model")
    shown, (kind,) = json.loads(text), model["tensors"]["kinds"]
    assert list(shown) == list(model["tensors"])
    assert model["tensors"]["of"] == [0]
    assert kind[2] is None  # its parts are listed
    assert shown["kinds"][0][:2] == kind[:2]
    assert len(shown["kinds"][0]) == len(kind)


def holds_the_shard(text, request):
    """Rank 1's index has one such row, of a part that no rule gives."""
    raw = (request.getfixturevalue("run_of_two") / "step-00000120" / "index-00001-of-00002.json").read_text()
    (row,) = json.loads(raw)["shards"]["model"]
    shown = dict(zip(text.strip(" []\n").split(", "), row, strict=True))
    assert shown == {"tensor": 0, "start": 4096, "box": [[2, 4], [0, 6]], "digest": row[3], "pieces": ""}


def holds_the_line_of_a_fingerprint(text, request):
    """The digest of such a line is the fingerprint of a component with one leaf."""
    del request
    filled = {"path": "n", "kind": "int", "digest": digest_of(b"5"), "TAB": "\t", "LF": "\n"}
    line = "".join(filled[word] for word in text.split())
    assert component_fingerprint("n", [(5, [])]) == digest_of(line.encode())


WARM_UP = """def made():
    calls = [0]

    def warm_up():
        calls[0] += 1
        return min(1.0, calls[0] / 20)

    return warm_up


warm_up = made()
"""


def rehearsed(root, request, *, command: str, kills: int | None = None, changes: tuple[tuple[str, str], ...] = ()):
    """The findings of a rehearsal of the page's program, with the page's command."""
    folder, warm = request.getfixturevalue("tmp_path"), request.getfixturevalue("warm_python")
    program = next(
        text for page, language, text in blocks(root) if page == "docs/how-to/rehearse.md" and language == "python"
    )
    for old, new in changes:
        assert program.count(old) == 1
        program = program.replace(old, new)
    (folder / "train.py").write_text(program)
    options, _, words = command.partition(" -- python train.py ")
    given = dict(zip(options.split()[2::2], map(int, options.split()[3::2]), strict=True))
    settings = make_rehearsal(
        warm.command(folder / "train.py", *words.split()), steps=given["--steps"], kills=kills or given["--kills"]
    )
    return run_rehearsal(folder / "rehearsal", settings)


def labels(lines: list[str]) -> list[str]:
    """The label of each line in a rehearsal's table; how often the program was started and stopped depends on chance."""
    return [line.split("  ")[0] for line in lines if not re.match(r"(start|end) \d", line)]


COMMAND = "trainfold rehearse --steps 40 --kills 3 -- python train.py --out {run}"


def holds_a_rehearsal(text, request):
    """Checks the page's program, its command and the lines of its table; the README shows the same command."""
    root = request.getfixturevalue("root")
    command, _, *shown = text.splitlines()
    answer = rehearsed(root, request, command=command)
    found = aligned(answer.tables[0])
    assert labels(shown) == labels(found)
    assert answer.error is None
    assert shown[-1] == found[-1] == "identical: yes"
    assert command == COMMAND
    assert command in (root / "README.md").read_text()


def holds_what_a_rehearsal_finds(text, request):
    """The page's program with the page's warm-up has the same differences in the same order; the step depends on the kill."""
    root = request.getfixturevalue("root")
    changes = (("live = trainfold.attach", f"{WARM_UP}live = trainfold.attach"),
               ("    loss = (model", "    scale = warm_up()\n    loss = scale * (model"))  # fmt: skip
    answer = rehearsed(root, request, command=COMMAND, kills=1, changes=changes)
    (table,) = [table for table in answer.tables if table.title.startswith("What differs")]
    text, leaves = text.split("\n\n")
    title, heading, *rows = text.splitlines()
    assert re.sub(r"\d+", "#", title) == re.sub(r"\d+", "#", table.title)
    assert heading.split() == " ".join(table.columns).split()
    assert [row.split()[1] for row in rows][:: len(rows) - 1] == ["loss", "optimizer"]
    assert table.rows[0][1] == "loss"
    assert {row[1] for row in table.rows} == {row.split()[1] for row in rows}
    assert "variable of the loop" in answer.data["reasons"][1]
    (table,) = [table for table in answer.tables if table.title.startswith("Leaves")]
    title, heading, *rows = leaves.splitlines()
    assert re.sub(r"\d+", "#", title) == re.sub(r"\d+", "#", table.title)
    assert heading.split() == " ".join(table.columns).split()
    assert [row.split()[0] for row in rows] == [row[0] for row in table.rows][: len(rows)]
    assert [re.findall(r"\d+ of \d+", row)[0] for row in rows] == [row[2] for row in table.rows][: len(rows)]


def holds_the_report_of_a_rehearsal_on_other_ranks(text, request):
    """A rehearsal on 3 and 2 ranks, which are threads here, has the same rows, and the same answers in what is exact."""
    _, table = text.split("\n\n")
    title, heading, *lines = table.splitlines()
    rows = [cells(line, heading) for line in lines]
    found = request.getfixturevalue("on_threads")(rehearse_cases.RANKS, nproc=[3, 2], kills=2).tables[0]
    assert title == found.title
    assert heading.split() == " ".join(found.columns).split()
    assert [re.sub(r"step \d+", "step #", row[0]) for row in rows] == [
        re.sub(r"step \d+", "step #", row[0].strip()) for row in found.rows
    ]
    exact = {"trainer", "dataset"}
    assert {row[0]: row[3] for row in rows if row[0] in exact} == dict.fromkeys(exact, "yes")
    assert {row[0]: row[-1] for row in found.rows if row[0] in exact} == dict.fromkeys(exact, "yes")


def holds_how_to_install(text, request):
    """Each extra that the page installs exists."""
    root = request.getfixturevalue("root")
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"'\.\[(\w+)\]'", text)
    assert named == ["plot", "properties", "objectstore", "fsspec"]
    assert set(named) <= set(extras)
    assert all(line.startswith(("python3 -m venv", "pip install")) for line in text.splitlines())


HELD = {
    "rank 0 of so many ranks": holds_what_a_coordinator_does,
    "python3 -m venv .venv && . .venv/bin/activate": holds_how_to_install,
    COMMAND: holds_a_rehearsal,
    "What differs, first things first": holds_what_a_rehearsal_finds,
    "trainfold rehearse --nproc 3,2": holds_the_report_of_a_rehearsal_on_other_ranks,
    "One run, twice": holds_the_report_of_the_demo,
    "                       never killed ": holds_the_table_of_two_processes,
    "trainfold ls runs/demo/killed": holds_what_to_look_at_next,
    "run.json                                        which run this is": holds_the_files_of_a_run,
    '{"format":"trainfold","schema_version":3,"run_id":"...","step":120,': holds_the_manifest,
    '{"kinds": [["float32", [4, 6], 0]': holds_the_table_of_tensors,
    "[tensor, start, box, digest, pieces]": holds_the_shard,
    "path TAB kind TAB digest LF": holds_the_line_of_a_fingerprint,
    " the loop's thread  ": holds_the_drawing_of_an_async_save,
}


def test_every_block_of_a_page_is_of_a_kind_that_a_test_holds(root):
    found = blocks(root)
    kinds = {language for _, language, _ in found}
    assert kinds == {"python", "console", "text", "{toctree}", "{glossary}"}
    fences = sum(
        len(re.findall(r"^(?:```|~~~|:::)", (root / page).read_text(), re.MULTILINE))
        for page in {page for page, *_ in found}
    )
    assert fences == 2 * len(found)
    texts = [text for _, language, text in found if language == "text"]
    assert all(sum(text.startswith(first) for text in texts) == 1 for first in HELD)
    assert len(texts) == len(HELD)


def test_no_block_of_a_page_imports_a_test_tool(root):
    """A page shows what a user writes: `try` and `except`, or the traceback."""
    assert [page for page, language, text in blocks(root) if language == "python" and "pytest" in text] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(each, marks=[pytest.mark.long] * (held is holds_what_a_rehearsal_finds))
        for each, held in HELD.items()
    ],
    ids=lambda first: HELD[first].__name__,
)
def test_a_block_of_text_is_what_the_program_writes(first, root, request):
    (text,) = [text for _, language, text in blocks(root) if language == "text" and text.startswith(first)]
    HELD[first](text, request)


@pytest.mark.parametrize(("page", "calls"), [("README.md", ""), ("docs/how-to/resumable-loop.md", "train('no run')")])
def test_a_loop_without_its_eight_marked_lines_is_a_plain_loop_that_runs(page, calls, root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (loop,) = [text for name, _, text in blocks(root) if name == page and "# +" in text]
    plain = "".join(line for line in loop.splitlines(keepends=True) if "  # +" not in line)
    assert len(loop.splitlines()) - len(plain.splitlines()) == 8
    assert re.search(r"eight lines( marked `# \+`)? make", (root / page).read_text(), re.IGNORECASE)
    assert not re.search(r"trainfold|\blive\b|\bmanager\b", plain)
    given = {"torch": torch, "model": torch.nn.Linear(8, 2)}
    exec(compile(f"{plain}\n{calls}", page, "exec"), given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "block",
    [
        "$ trainfold ls nowhere\n",
        "$ trainfold ls nowhere; echo $?\n...\n12\n",
        "$ trainfold ls nowhere; echo $?\n",
        "$ trainfold ls nowhere; echo $?\nCheckpointMissing: somewhere\n...\n11\n",
        "$ trainfold --version\n9.9.9\n",
        "$ trainfold --version; echo $?\n...\n1\n",
        "$ trainfold --version | tail -1\n",
        "$ trainfold --bogus\n",
        "$ make nonsense\n",
        "$ make test nonsense\n",
        "$ make test\nall is well\n",
        "$ rm -r runs\n",
        "trainfold --version\n",
    ],
)
def test_a_console_block_that_is_not_true_fails(block, root, pytestconfig):
    run_console = pytestconfig.pluginmanager.get_plugin(str(root / "conftest.py")).run_console
    with pytest.raises(AssertionError):
        run_console(types.SimpleNamespace(parsed=block))


@pytest.mark.parametrize(
    "block",
    [
        f"$ trainfold --version\n{trainfold.__version__}\n",
        "$ trainfold --version  # which one is it\n\n$ make check test  # both\n",
        "$ trainfold ls nowhere; echo $?\n...\n11\n",
        "$ trainfold ls nowhere; echo $?\n11\n",
    ],
)
def test_a_console_block_that_is_true_passes(block, root, pytestconfig):
    run_console = pytestconfig.pluginmanager.get_plugin(str(root / "conftest.py")).run_console
    run_console(types.SimpleNamespace(parsed=block))
