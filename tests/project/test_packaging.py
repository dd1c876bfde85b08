"""One package, one copy: links, wheel, version, constraints, facade."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import trainfold

PACKAGES = ("core", "backends", "adapters", "properties")
PYTHON = sys.executable


def run_python(code: str, *flags: str) -> str:
    """Run code in a fresh interpreter and return its output."""
    done = subprocess.run([PYTHON, *flags, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def modules_of(tree: Path) -> set[str]:
    """The path of every module in a tree, as in the wheel."""
    return {
        f"trainfold/{path.relative_to(tree).as_posix()}"
        for package in PACKAGES
        for path in (tree / package).rglob("*.py")
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_each_link_points_home(root, package):
    link = root / "src" / "trainfold" / package
    assert link.is_symlink()
    assert link.readlink() == Path("..", "..", package)
    assert link.resolve() == root / package


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_is_imported_under_a_second_name(package):
    """A second copy (`core.state` beside `trainfold.core.state.state`) would make two `TrainState` classes."""
    assert not [name for name in sys.modules if name == package or name.startswith(f"{package}.")]


def test_the_wheel_holds_every_module_and_nothing_else(copy_of_tree, tmp_path):
    done = subprocess.run(
        [PYTHON, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")],
        cwd=copy_of_tree,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    facade = copy_of_tree / "src" / "trainfold"
    own = {f"trainfold/{path.name}" for path in facade.iterdir() if path.suffix in {".py", ".pyi", ".typed"}}
    expected = modules_of(copy_of_tree) | own
    assert {name for name in names if name.endswith((".py", ".pyi", ".typed"))} == expected
    assert {f"trainfold/{name}.py" for name in trainfold._MODULES} < own
    schemas = {
        f"trainfold/{path.relative_to(copy_of_tree)}" for path in copy_of_tree.glob("adapters/cli/schemas/*.json")
    }
    assert schemas
    assert {name for name in names if name.endswith(".json")} == schemas
    assert names == {name for name in names if name.startswith("trainfold/")}
    assert {Path(name).suffix for name in names} == {".py", ".pyi", ".typed", ".json"}


def test_a_wheel_in_use_is_this_package(copy_of_tree, tmp_path):
    """A user has the wheel, not the tree: it must import from another folder."""
    subprocess.run(
        [PYTHON, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")],
        cwd=copy_of_tree,
        capture_output=True,
        check=True,
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    code = (
        f"import sys; sys.path.insert(0, {str(installed)!r}); import trainfold.core.state.state as s; print(s.__file__)\n"
        "import trainfold; assert all(getattr(trainfold, name).__file__.startswith(trainfold.__path__[0]) for name in trainfold._MODULES)"
    )
    assert run_python(code, "-P") == str(installed / "trainfold" / "core" / "state" / "state.py")


def test_the_version_has_one_source(root):
    assert importlib.metadata.version("trainfold") == trainfold.__version__
    assert tomllib.loads((root / "pyproject.toml").read_text())["project"]["dynamic"] == ["version"]
    changelog = (root / "CHANGELOG.md").read_text()
    assert f"## [{trainfold.__version__}]" in changelog


def test_the_command_is_installed():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="trainfold")
    assert script.value == "trainfold.adapters.cli:main"
    assert callable(script.load())


def test_every_package_that_is_needed_is_pinned(root):
    """A newcomer installs the versions that the tests ran with, including indirect dependencies."""
    pins = {
        canonicalize_name(line.partition("==")[0]): line.partition("==")[2].strip()
        for line in (root / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    assert all(pins.values())
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = {Requirement(text) for text in project["dependencies"]}
    extras = project["optional-dependencies"]
    apart = {"rivals", "hf", "buckets"}
    assert all("==" in text for name in apart for text in extras[name]), (
        "the rivals of a benchmark, the models of `make hf` and the emulators of `make buckets` pin themselves: `make test` does not need them"
    )
    wanted |= {Requirement(text) for name, extra in extras.items() if name not in apart for text in extra}
    seen: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name in seen | {"trainfold"}:
            continue
        seen.add(name)
        assert name in pins, f"{name} is needed and not pinned: make constraints"
        installed = importlib.metadata.version(name).partition("+")[0]
        assert pins[name] == installed, f"{name}: pinned {pins[name]}, installed {installed}: make constraints"
        assert requirement.specifier.contains(installed, prereleases=True), f"{requirement} does not admit {installed}"
        wanted |= {Requirement(text) for text in importlib.metadata.requires(name) or ()}


def test_every_package_that_a_page_imports_is_declared(root):
    """What a reader copies from a page can be installed by an extra of this package; deptry looks at modules only."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [
        *project["dependencies"],
        *(text for name in ("plot", "properties", "objectstore", "fsspec", "docs", "dev") for text in extras[name]),
    ]
    declared = {canonicalize_name(Requirement(text).name) for text in texts}
    distributions = importlib.metadata.packages_distributions()
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    named = {
        (page.name, word)
        for page in pages
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        for word in re.findall(r"^[> .]*(?:import|from) (\w+)", block, re.MULTILINE)
    }
    assert ("infer-from-a-checkpoint.md", "safetensors") in named
    foreign = {(page, word) for page, word in named if word not in sys.stdlib_module_names | {"trainfold"}}
    missing = {
        (page, word)
        for page, word in foreign
        if not declared & set(map(canonicalize_name, distributions.get(word, [])))
    }
    apart = {Requirement(text).name for extra in ("hf", "rivals") for text in extras[extra]}
    by_hand = ("log-a-run.md", "wandb")  # as the page says
    assert missing - {("bridge-trainers.md", name) for name in apart} == {by_hand}


# --- the facade -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(trainfold.__all__) - {"__version__"}))
def test_every_name_of_the_facade_is_there(name):
    value = getattr(trainfold, name)
    assert name in dir(trainfold)
    if hasattr(value, "__module__") and not isinstance(value, type(sys)):
        assert value.__module__.startswith("trainfold."), f"{name} comes from {value.__module__}"


def test_the_type_checker_sees_the_names_that_there_are(root):
    """The lazy table and the stub list the same names, or an editor would offer a name that does not exist."""
    stub = (root / "src" / "trainfold" / "__init__.pyi").read_text()
    typed = {
        name: module
        for module, names in re.findall(r"from ([\w.]+) import (\([^)]*\)|[^\n]+)", stub)
        for name in re.findall(r"(\w+) as \1\b", names)
    }
    modules = dict.fromkeys(trainfold._MODULES, "trainfold")
    assert typed == trainfold._MODULE_OF | modules
    assert set(trainfold.__all__) == {*typed, "__version__"}


def test_the_top_is_short_and_shows_no_import_of_its_own():
    """DESIGN 2a: at most 45 names beside the modules by subject; `dir` shows those and nothing else."""
    assert len({*trainfold.__all__} - {"__version__", *trainfold._MODULES}) <= 31
    assert len(trainfold._MODULES) <= 17
    assert dir(trainfold) == sorted(trainfold.__all__)


@pytest.mark.parametrize("subject", trainfold._MODULES)
def test_a_module_by_subject_has_what_it_says(subject):
    module = getattr(trainfold, subject)
    assert (module.__doc__ or "").strip()
    public = {
        name for name, value in vars(module).items() if not name.startswith("_") and not isinstance(value, type(sys))
    }
    assert public == set(module.__all__)


def test_the_guide_in_the_docstring_names_what_there_is():
    """`help(trainfold)` starts with this guide."""
    lines = re.findall(r"^    (\w+(?:, \w+)*)  ", trainfold.__doc__, re.MULTILINE)
    named = {name for line in lines for name in line.split(", ")}
    assert len(named) > 20
    assert named <= set(trainfold.__all__), named - set(trainfold.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'trainfold' has no attribute 'nothing_like_it'"):
        trainfold.nothing_like_it  # noqa: B018


def test_importing_the_facade_imports_nothing_heavy():
    """It imports neither torch nor any other third party; a name imports its module at its first use."""
    code = "import sys, trainfold; print(sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names))"
    heavy = run_python(f"import sys; sys.path[:0] = {sys.path!r}; {code}", "-I", "-S")
    assert heavy == "['__main__', 'trainfold']" or heavy == "['trainfold']", heavy


def test_importing_every_module_changes_nothing_global():
    """STYLE 14: it moves no default generator, starts no thread or process, and makes no process group."""
    code = """
import importlib, pkgutil, threading, multiprocessing, random, warnings
import numpy, torch, torch.distributed, cyclopts.exceptions, rich.progress  # rich draws from `random`
random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
before = random.getstate(), numpy.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()
threads, filters = threading.active_count(), list(warnings.filters)
import trainfold
for module in pkgutil.walk_packages(trainfold.__path__, "trainfold."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
after = random.getstate(), numpy.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()
assert before == after
assert threading.active_count() == threads and not multiprocessing.active_children()
assert not torch.distributed.is_initialized()
assert warnings.filters == filters, set(map(str, warnings.filters)) ^ set(map(str, filters))
print("quiet")
"""
    assert run_python(code).endswith("quiet")


def test_no_module_of_the_package_can_unpickle(root):
    """The package uses no pickle, torch.load, eval or exec."""
    importing = re.compile(r"^\s*(import|from)\s+(pickle|dill|cloudpickle|marshal|shelve)\b", re.MULTILINE)
    calling = re.compile(r"\btorch\.(load|save)\(|(?<![\w.\"'`])(eval|exec)\(|pickle\.(loads?|Unpickler)\(")
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            text = path.read_text()
            assert not importing.search(text), path
            assert not calling.search(text), path
