"""What all tests share. The conftest.py above has the profiles of Hypothesis and runs the Markdown pages."""

import importlib.util
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # for `kit`: what several test files share


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the forks of a process of `pytest -n` cheap: it runs thousands of tests."""
    if hasattr(session.config, "workerinput"):
        from kit.huge_pages import use_huge_pages

        use_huge_pages()
    if "torch" in sys.modules:  # else no test here has a loader
        from kit.calm_torch import forget_absent_devices, share_loggers
        from torch.utils.data import _utils

        forget_absent_devices()
        share_loggers()
        # Workers of an iterator that an error has kept in a cycle do not hear that they are to end: each is waited for so long.
        _utils.MP_STATUS_CHECK_INTERVAL = 1.0


@pytest.fixture(autouse=True)
def _numbers_of_the_seed() -> None:
    """pytest-randomly seeds random and numpy for each test; torch too draws the same numbers in a test alone and after others."""
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(random.getrandbits(32))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The header has it too, but not with -q."""
    terminalreporter.write_line(
        f"random numbers and order of the tests: --randomly-seed={config.getoption('randomly_seed', None)}"
    )


@pytest.fixture
def root() -> Path:
    """The top of the repository."""
    return ROOT


@pytest.fixture
def copy_of_tree(tmp_path: Path) -> Path:
    """A copy of the sources, including links, for tests that break something on purpose."""
    for name in ("core", "backends", "adapters", "properties", "src"):
        shutil.copytree(
            ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", ".*_cache")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def helper(name: str) -> Any:
    """Import a module from the folder of the tests."""
    spec = importlib.util.spec_from_file_location(f"trainfold_test_{name}", ROOT / "tests" / f"{name}.py")
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def processes(warm_python: Any) -> Iterator[Any]:
    """Worlds of real processes: see tests/processes.py."""
    server = helper("processes").Processes(warm_python)
    yield server
    server.close()


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Programs that start in milliseconds: see tests/warm_python.py."""
    server = helper("warm_python").WarmPython(tmp_path_factory.mktemp("warm"))
    yield server
    server.close()


@pytest.fixture
def process_group() -> Iterator[None]:
    """A world of one process over gloo, for wrappers and schedules that need a process group. It ends after what a test made with it.

    A wrapper of DDP that outlives its group is freed with the GIL held, and joins threads of gloo that may wait for the GIL: a deadlock of torch, seen once.
    """
    import torch

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


# Tests of async saves: folders and files. A path that no longer exists stops the run of the tests.
HOLD_CHECKED = (
    "adapters/manager", "backends/hold", "backends/runs/test_save_failures.py", "backends/stores/test_direct_io.py",
    "laws/test_manager_machine.py", "system/test_interrupts.py",
)  # fmt: skip
HOLD_UNCHECKED = (  # these test the argument itself
    "backends/hold/test_hold_check.py", "adapters/manager/test_manager_config.py",
)  # fmt: skip
assert not [each for each in HOLD_CHECKED + HOLD_UNCHECKED if not (ROOT / "tests" / each).exists()]


def is_under(path: Path, places: tuple[str, ...]) -> bool:
    """Whether a file is one of these paths below the tests, or in one of these folders."""
    return any(path.is_relative_to(ROOT / "tests" / each) for each in places)


@pytest.fixture(scope="module", autouse=True)
def hold_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Async saves in these tests compare the held bytes with the committed ones (W16), unless a test passes ``hold_check`` itself."""
    if not is_under(request.path, HOLD_CHECKED) or is_under(request.path, HOLD_UNCHECKED):
        yield
        return
    from trainfold.adapters.manager.manager import CheckpointManager
    from trainfold.backends.hold.hold import Hold

    with pytest.MonkeyPatch.context() as patch:
        for made, name in ((CheckpointManager, "hold_check"), (Hold, "check")):
            patch.setitem(made.__init__.__kwdefaults__, name, True)  # type: ignore[misc]
        yield
