"""Imports go one way, core <- backends <- adapters, and a tool checks it; rooms have a purpose, and names have one meaning."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

RUFF = Path(sys.executable).with_name("ruff")
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    """Check the tree at this path, even if the running Python has another one installed."""
    return subprocess.run(
        [LINT_IMPORTS, "--no-logo", "--no-cache"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "src")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_layers_of_this_tree_are_kept(copy_of_tree):
    """The tool passes the tree: core <- backends <- adapters."""
    done = lint_imports(copy_of_tree)
    assert done.returncode == 0, done.stdout + done.stderr


MANAGER = "adapters/manager/manager.py"
VIOLATIONS = (  # folder, line, the tool's message
    ("core", "import trainfold.backends", "trainfold.core is not allowed to import trainfold.backends"),
    ("core", "import trainfold.properties", "trainfold.core is not allowed to import trainfold.properties"),
    ("backends", "import trainfold.adapters", "trainfold.backends is not allowed to import trainfold.adapters"),
    ("properties", "import trainfold.adapters", "trainfold.properties is not allowed to import trainfold.adapters"),
    ("core", "import pathlib", "trainfold.core is not allowed to import pathlib"),
    ("backends", "import optree", "trainfold is not allowed to import optree"),
    ("adapters", "import rich", "trainfold is not allowed to import rich"),
    ("properties", "from trainfold.backends.stores.local import LocalStore", "trainfold.properties is not allowed to import trainfold.backends"),
    ("backends/formats", "import trainfold.backends.ranks.wire", "trainfold.backends.formats is not allowed to import trainfold.backends.ranks"),
    ("core", "import _thread", "trainfold.core is not allowed to import _thread"),
    ("core", "import concurrent.futures", "trainfold.core is not allowed to import concurrent"),
    ("core", "import uuid", "trainfold.core is not allowed to import uuid"),
    ("core/format/structure", "from trainfold.core.format.manifest import Manifest", "trainfold.core.format.structure is not allowed to import trainfold.core.format.manifest"),
    ("backends/hold", "from trainfold.backends.stores.local import LocalStore", "trainfold.backends.hold is not allowed to import trainfold.backends.stores"),
    ("backends/hold", "from trainfold.backends.job import Job", "trainfold.backends.hold is not allowed to import trainfold.backends.job"),
    ("properties", "from trainfold.backends.runs.commit import SaveResult", "trainfold.properties is not allowed to import trainfold.backends"),
    ("adapters/live/loop", "from trainfold.adapters.live.live import Live", "trainfold.adapters.live.loop is not allowed to import trainfold.adapters.live.live"),
    ("adapters/cli/rehearse", "from trainfold.adapters.cli.diff import diff_checkpoints", "trainfold.adapters.cli.rehearse is not allowed to import trainfold.adapters.cli.diff"),
    ("adapters/cli/terminal", "from trainfold.adapters.cli.locate import open_run", "trainfold.adapters.cli.terminal is not allowed to import trainfold.adapters.cli.locate"),
    ("core", "import warnings", "trainfold.core is not allowed to import warnings"),
    ("core", "import trainfold", "{module} is not allowed to import trainfold"),
    ("adapters", "from trainfold import save", "{module} is not allowed to import trainfold"),
)  # fmt: skip


def test_each_violation_of_the_layers_is_caught(copy_of_tree):
    """One run for all of them: the tool lists every import that breaks a contract, with its module."""
    for number, (folder, line, _) in enumerate(VIOLATIONS):
        path = copy_of_tree / folder / f"zz_violation_{number}.py"
        path.write_text(f'"""A module that should not be."""\n\n{line}\n')
    with (copy_of_tree / MANAGER).open("a") as file:
        file.write("from trainfold.backends.job import Job\n")
    done = lint_imports(copy_of_tree)
    assert done.returncode != 0
    said = " ".join(done.stdout.split())
    assert "trainfold.adapters.manager.manager is not allowed to import trainfold.backends.job" in said
    for number, (folder, line, broken) in enumerate(VIOLATIONS):
        module = f"trainfold.{folder.replace('/', '.')}.zz_violation_{number}"
        assert broken.format(module=module) in said, line
        assert f"{module} -> " in said, f"{line} is not named"


def test_core_cannot_reach_torch_distributed_or_pickle(copy_of_tree):
    """Ruff's TID251 checks what import-linter cannot: sub-packages of other libraries, and functions."""
    module = copy_of_tree / "core" / "zz_violation.py"
    module.write_text(
        '"""No."""\n\nimport pickle\n\nimport numpy as np\nimport torch\nimport torch.distributed\nimport trainfold.properties\n\n'
        'torch.load("x")\nnp.random.rand()\n'
    )
    done = subprocess.run(
        [RUFF, "check", "--no-cache", "--select", "TID251", "--output-format", "concise", module],
        capture_output=True,
        text=True,
        check=False,
    )
    for banned in ("pickle", "torch.distributed", "torch.load", "trainfold.properties", "numpy.random"):
        assert f"TID251 `{banned}` is banned" in done.stdout, done.stdout


def rooms_of(tree: Path) -> dict[str, list[Path]]:
    """Each room of the four packages, with its modules."""
    found = [path for package in PACKAGES for path in sorted((tree / package).rglob("__init__.py"))]
    return {
        str(init.parent.relative_to(tree)): [each for each in init.parent.glob("*.py") if each != init]
        for init in found
    }


PACKAGES = ("core", "backends", "adapters", "properties")
HOLDS = 12
ENTRY_POINTS = {"adapters/cli"}  # `trainfold.adapters.cli:main`, which the console script names
MAY_REPEAT = {  # one meaning in both places
    "merge": "parts put together: of a state, and of a tensor",
    "split": "one taken apart: a batch, and a tensor",
    "main": "the start of a program: the command line, and the demo's training",
    "plan": "`trainfold.plan`, and the command of this name",
    "replay": "`trainfold.replay`, and the command of this name",
    "leaves": "those of a tree, and the strategy that makes such values",
    "make_settings": "the checked settings of the demo and of a rehearsal",
    "tables": "the result of the demo and of a rehearsal, for people",
    "as_json": "the result of the demo and of a rehearsal, for programs",
}


def room_problems(tree: Path) -> list[str]:
    """The problems of a tree's packages and rooms: too many modules, no purpose in the docstring, or duplicate names."""
    found = []
    for room, modules in rooms_of(tree).items():
        body = ast.parse((tree / room / "__init__.py").read_text())
        if not re.search(r"[Ii]mports? ", ast.get_docstring(body) or ""):
            found.append(f"{room}: its __init__ does not say what it is for and what it may import")
        if len(body.body) > 1 and room not in ENTRY_POINTS:
            found.append(f"{room}: its __init__ holds more than a docstring")
        if len(modules) > HOLDS:
            found.append(f"{room}: {len(modules)} modules")
    for package in PACKAGES:
        modules = [path for path in (tree / package).rglob("*.py") if path.name != "__init__.py"]
        names = Counter(path.stem for path in modules)
        found += [f"{package}: {name} twice" for name, count in names.items() if count > 1]
    defined = Counter(
        node.name
        for package in PACKAGES
        for path in (tree / package).rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        if "overload" not in map(ast.unparse, node.decorator_list)
    )
    found += [f"{name} is defined twice" for name, count in defined.items() if count > 1 and name not in MAY_REPEAT]
    return found


def test_each_room_says_what_it_is_for_and_no_name_has_two_meanings(root):
    """A newcomer finds a module by its room, and a class by its name."""
    assert room_problems(root) == []


def test_a_room_that_is_full_or_silent_and_a_name_that_is_there_twice_are_found(copy_of_tree):
    room = copy_of_tree / "core" / "exact"
    (room / "__init__.py").write_text('"""Sums."""\n')
    (copy_of_tree / "backends" / "__init__.py").write_text('"""Effects."""\n')
    (copy_of_tree / "core" / "__init__.py").write_text('"""Values. Imports nothing."""\n\nimport json\n')
    for number in range(HOLDS):
        (room / f"more_{number}.py").write_text("")
    (copy_of_tree / "backends" / "local.py").write_text("class LocalStore: ...\n\n\ndef describe(): ...\n")
    said = "\n".join(room_problems(copy_of_tree))
    for problem in (
        "core/exact: its __init__",
        "backends: its __init__ does not say",
        "core: its __init__ holds more",
        "core/exact: 18 modules",
        "backends: local twice",
        "LocalStore is defined twice",
        "describe is defined twice",
    ):
        assert problem in said


def mirror_problems(tree: Path) -> list[str]:
    """Where the folders of tests differ from the rooms.

    A folder of tests has the path of a room. Where a room has more than 12 test files, those of one module may lie in a folder that has
    the module's name.
    """
    found = []
    for package in PACKAGES:
        tests = tree / "tests" / package
        folders = {path.parent for path in tests.rglob("test_*.py")}
        for folder in sorted(folders):
            place, files = folder.relative_to(tree / "tests"), len(list(folder.glob("test_*.py")))
            if not ((tree / place / "__init__.py").exists() or (tree / place).with_suffix(".py").exists()):
                found.append(f"tests/{place}: there is no room or module {place}")
            if files > HOLDS:
                found.append(f"tests/{place}: {files} test files")
        for init in (tree / package).rglob("__init__.py"):
            room = init.parent.relative_to(tree)
            tested = any(folder.is_relative_to(tree / "tests" / room) for folder in folders)
            if len(list(init.parent.glob("*.py"))) > 1 and not tested:
                found.append(f"{room}: no tests in tests/{room}")
    found += [
        f"{path.relative_to(tree)}: a test of core imports the adapters"
        for path in sorted((tree / "tests" / "core").rglob("test_*.py"))
        if "trainfold.adapters" in path.read_text()
    ]
    return found


def test_the_folders_of_tests_mirror_the_rooms(root):
    """A newcomer finds the tests of a room where the room is, and a room without tests is noticed."""
    assert mirror_problems(root) == []


def test_a_folder_without_a_room_a_full_one_and_a_room_without_tests_are_found(copy_of_tree):
    for place, count in (
        ("core/exact", HOLDS + 1), ("core/exact/limbs", 1), ("core/metrics", 1), ("core/metrics/f1", 1),
    ):  # fmt: skip
        (copy_of_tree / "tests" / place).mkdir(parents=True)
        for number in range(count):
            (copy_of_tree / "tests" / place / f"test_{number}.py").write_text("")
    (copy_of_tree / "tests" / "core" / "metrics" / "test_0.py").write_text("import trainfold.adapters.live\n")
    said = mirror_problems(copy_of_tree)
    for problem in (
        "tests/core/exact: 13 test files",
        "tests/core/metrics/f1: there is no room or module core/metrics/f1",
        "core/step/engine: no tests in tests/core/step/engine",
        "tests/core/metrics/test_0.py: a test of core imports the adapters",
    ):
        assert problem in said
    about = "\n".join(each for each in said if "core/exact" in each or "core/metrics" in each)
    assert about.count("\n") == 2, f"a folder with a room, or with the name of a module in it, is right: {about}"


def test_no_test_file_has_more_than_600_lines(root):
    """Tests are read as often as code: a file that grows past a screenful of screens holds two subjects."""
    lines = {path: len(path.read_text().splitlines()) for path in (root / "tests").rglob("*.py")}
    assert len(lines) > 100
    assert {str(path.relative_to(root)): count for path, count in lines.items() if count > 600} == {}


def test_the_manager_has_at_most_350_lines(root):
    """It is where a reader begins: each of its calls is one call of a part that knows the subject."""
    assert len((root / MANAGER).read_text().splitlines()) <= 350
