"""What all tests share. Profiles of Hypothesis and the running of Markdown pages are in the conftest.py above."""

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def root() -> Path:
    """The top of the repository."""
    return ROOT


@pytest.fixture
def copy_of_tree(tmp_path: Path) -> Path:
    """A copy of the sources, links included, for tests that break something on purpose."""
    for name in ("core", "backends", "adapters", "properties", "src"):
        shutil.copytree(
            ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", ".*_cache")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path
