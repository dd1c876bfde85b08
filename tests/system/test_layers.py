"""Imports go one way: core <- backends <- adapters, and a tool says so."""

import os
import subprocess
import sys
from pathlib import Path

RUFF = Path(sys.executable).with_name("ruff")
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    """Check the tree at this place, whichever one the running Python has installed."""
    return subprocess.run(
        [LINT_IMPORTS, "--no-logo", "--no-cache"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "src")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_layers_of_this_tree_are_kept(copy_of_tree):
    """Core <- backends <- adapters, as a tool sees it."""
    done = lint_imports(copy_of_tree)
    assert done.returncode == 0, done.stdout + done.stderr


VIOLATIONS = (  # folder, line, what the tool says
    ("core", "import trainfold.backends", "trainfold.core is not allowed to import trainfold.backends"),
    ("core", "import trainfold.properties", "trainfold.core is not allowed to import trainfold.properties"),
    ("backends", "import trainfold.adapters", "trainfold.backends is not allowed to import trainfold.adapters"),
    ("properties", "import trainfold.adapters", "trainfold.properties is not allowed to import trainfold.adapters"),
    ("core", "import pathlib", "trainfold.core is not allowed to import pathlib"),
    ("backends", "import optree", "trainfold is not allowed to import optree"),
    ("adapters", "import rich", "trainfold is not allowed to import rich"),
    ("properties", "from trainfold.backends.stores.local import LocalStore", "trainfold.properties is not allowed to import trainfold.backends.stores.local"),
    ("core", "import trainfold", "{module} is not allowed to import trainfold"),
    ("adapters", "from trainfold import save", "{module} is not allowed to import trainfold"),
)  # fmt: skip


def test_each_violation_of_the_layers_is_caught(copy_of_tree):
    """One run for all of them: the tool lists every import that breaks a contract, with its module."""
    for number, (folder, line, _) in enumerate(VIOLATIONS):
        path = copy_of_tree / folder / f"zz_violation_{number}.py"
        path.write_text(f'"""A module that should not be."""\n\n{line}\n')
    done = lint_imports(copy_of_tree)
    assert done.returncode != 0
    said = " ".join(done.stdout.split())
    for number, (folder, line, broken) in enumerate(VIOLATIONS):
        module = f"trainfold.{folder}.zz_violation_{number}"
        assert broken.format(module=module) in said, line
        assert f"{module} -> " in said, f"{line} is not named"


def test_core_cannot_reach_torch_distributed_or_pickle(copy_of_tree):
    """Ruff's TID251 guards what import-linter cannot see: sub-packages of others, and functions."""
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
