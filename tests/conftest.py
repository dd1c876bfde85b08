"""What all tests share. Profiles of Hypothesis and the running of Markdown pages are in the conftest.py above."""

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # for `kit`: what several test files share


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


def helper(name: str) -> Any:
    """A module beside the tests."""
    spec = importlib.util.spec_from_file_location(f"trainfold_test_{name}", ROOT / "tests" / f"{name}.py")
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def processes() -> Iterator[Any]:
    """Worlds of real processes: see tests/processes.py."""
    server = helper("processes").Processes()
    yield server
    server.close()


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Programs that start in milliseconds: see tests/warm_python.py."""
    server = helper("warm_python").WarmPython(tmp_path_factory.mktemp("warm"))
    yield server
    server.close()


ASYNC_BATTERY = {
    "test_async_failures", "test_async_interrupts", "test_async_memory", "test_async_save", "test_direct_io", "test_due", "test_events", "test_hold", "test_hold_memory", "test_interrupts", "test_manager_end", "test_manager_load",
    "test_manager_machine", "test_moment_of_a_save", "test_save_failures", "test_unannounced_writes",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def hold_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """All tests of async saves compare the bytes that are held with those that are committed (W16), unless they say otherwise."""
    if request.module.__name__.rpartition(".")[2] not in ASYNC_BATTERY:
        yield
        return
    from trainfold.adapters.manager.manager import CheckpointManager
    from trainfold.backends.hold.hold import Hold

    with pytest.MonkeyPatch.context() as patch:
        for made, name in ((CheckpointManager, "hold_check"), (Hold, "check")):
            patch.setitem(made.__init__.__kwdefaults__, name, True)  # type: ignore[misc]
        yield
