"""Imports go one way: core <- backends <- adapters, and a tool says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        (
            "core/zz_violation.py",
            "import trainfold.backends\n",
            "trainfold.core is not allowed to import trainfold.backends",
        ),
        (
            "core/zz_violation.py",
            "import trainfold.properties\n",
            "trainfold.core is not allowed to import trainfold.properties",
        ),
        (
            "backends/zz_violation.py",
            "import trainfold.adapters\n",
            "trainfold.backends is not allowed to import trainfold.adapters",
        ),
        (
            "properties/zz_violation.py",
            "import trainfold.adapters\n",
            "trainfold.properties is not allowed to import trainfold.adapters",
        ),
        ("core/zz_violation.py", "import pathlib\n", "trainfold.core is not allowed to import pathlib"),
        ("backends/zz_violation.py", "import optree\n", "trainfold is not allowed to import optree"),
        ("adapters/zz_violation.py", "import rich\n", "trainfold is not allowed to import rich"),
        (
            "properties/zz_violation.py",
            "from trainfold.backends.local import LocalStore\n",
            "trainfold.properties is not allowed to import trainfold.backends.local",
        ),
        (
            "core/zz_violation.py",
            "import trainfold\n",
            "trainfold.core.zz_violation is not allowed to import trainfold",
        ),
        (
            "adapters/zz_violation.py",
            "from trainfold import save\n",
            "trainfold.adapters.zz_violation is not allowed to import trainfold",
        ),
    ],
)
def test_a_violation_of_the_layers_is_caught(copy_of_tree, module, line, broken):
    (copy_of_tree / module).write_text(f'"""A module that should not be."""\n\n{line}')
    done = lint_imports(copy_of_tree)
    assert done.returncode != 0
    assert broken in " ".join(done.stdout.split())


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
