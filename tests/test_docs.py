"""What the documentation promises runs: docstring examples, the strict build, the reference, the pages' links."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import types

import pytest

import trainfold

MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(trainfold.__path__, "trainfold.")
    if not found.name.endswith(".__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_are_true(name, tmp_path, monkeypatch):
    """Run by the module's real name, so that no second copy of it is imported."""
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    result = doctest.testmod(module)
    assert result.failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_each_module_says_what_it_is_for(name):
    line = (importlib.import_module(name).__doc__ or "").partition("\n")[0]
    assert line.endswith((".", ":", ",")) or len(line) > 20, f"{name}: {line!r}"


@pytest.fixture(scope="module")
def inventory(tmp_path_factory) -> str:
    """The names that a strict build of the documentation describes."""
    from sphinx.util.inventory import InventoryFile

    root = trainfold.__path__[0] + "/../.."
    out = tmp_path_factory.mktemp("docs")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            "-q",
            "-W",
            "-n",
            "--keep-going",
            "-b",
            "html",
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


@pytest.mark.timeout(600)
def test_every_public_name_is_in_the_reference(inventory):
    """The build is strict (-W -n), and no name of the facade is missing from what it describes."""
    described = {name for kind, names in inventory.data.items() if kind.startswith("py:") for name in names}
    missing = []
    for name, module in trainfold._MODULE_OF.items():
        value = getattr(trainfold, name)
        full = value.__name__ if isinstance(value, types.ModuleType) else f"{module}.{name}"
        if full not in described:
            missing.append(full)
    assert not missing


@pytest.mark.parametrize("name", sorted(set(trainfold.__all__) - {"__version__"}))
def test_every_public_name_has_a_docstring(name):
    value = getattr(trainfold, name)
    if callable(value):
        assert (value.__doc__ or "").strip(), name


def test_links_between_files_lead_somewhere(root):
    """Sphinx checks the pages of docs/; the pages around it link to files of the repository."""
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", (root / page).read_text()):
            assert target.startswith("https://") or (root / target).exists(), f"{page}: {target}"


def test_every_decision_has_a_number_a_status_and_its_four_parts(root):
    pages = sorted((root / "docs" / "adr").glob("0*.md"))
    numbers = [page.name[:4] for page in pages]
    assert numbers == [f"{number:04}" for number in range(1, len(pages) + 1)]
    for page in pages:
        text = page.read_text()
        assert text.startswith(f"# ADR-{page.name[:4]}: "), page
        for part in ("## Context", "## Decision", "## Consequences", "## How we would know that it was wrong"):
            assert part in text, f"{page.name}: no {part!r}"
