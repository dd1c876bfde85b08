"""The numerical environment: a resume warns if a setting differs that the bits of a sum depend on (W09)."""

import contextlib
import subprocess
import sys
import warnings

import pytest
import torch

import trainfold
from trainfold.adapters.live.attach import attach
from trainfold.backends.environment import environment_of
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import load, plan, save
from trainfold.backends.runs.load import ResumeDrift
from trainfold.backends.runs.scan import examine, read_inventory
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import ResumeRefused
from trainfold.core.layout.shard import make_shard
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState


def functional():
    model = torch.nn.Linear(2, 1)
    return trainfold.init_state(model, trainfold.optimizer(torch.optim.SGD, lr=0.1), seed=0)


def captured():
    model = torch.nn.Linear(2, 1)
    return attach(model, torch.optim.SGD(model.parameters(), lr=0.1)).capture()


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def deterministic(_):
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def precision(level):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(level)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def without_mkldnn():
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


@contextlib.contextmanager
def flushed():
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def told(name, value):
    """What torch says of a thing that a process cannot change: another machine, or what was set before the first thread."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(name, lambda: value)
        yield


CHANGES = {
    "interop_threads": lambda: told("torch.get_num_interop_threads", 99),
    "cpu_capability": lambda: told("torch.backends.cpu.get_cpu_capability", "another"),
    "machine": lambda: told("trainfold.backends.environment._machine", "another"),
    "flush_denormal": flushed,
    "threads": lambda: threads(torch.get_num_threads() + 1),
    "deterministic": lambda: deterministic(True),
    "matmul_precision": lambda: precision("high"),
    "mkldnn": without_mkldnn,
}


@pytest.mark.parametrize("make", [functional, captured])
@pytest.mark.parametrize("key", CHANGES)
def test_another_environment_is_a_warning_that_names_the_setting(make, key):
    """W09: a changed number of threads gave other bits without a word; for attached loops and for states."""
    store = MemoryStore()
    save(make(), store)
    with CHANGES[key](), pytest.warns(ResumeDrift, match=f"environment +environment.{key}: saved .*, wanted "):
        load(store, like=make())
    with CHANGES[key](), pytest.raises(ResumeRefused, match=rf"environment.{key}") as refused:
        load(store, like=make(), policy={"environment": "refuse"})
    assert 'policy={"environment": "adapt"}' in refused.value.fix
    with warnings.catch_warnings(), CHANGES[key]():
        warnings.simplefilter("error")
        load(store, like=make(), policy={"environment": "adapt"})


@pytest.mark.parametrize("make", [functional, captured])
def test_the_same_environment_is_not_mentioned(make):
    store = MemoryStore()
    save(make(), store)
    assert plan(store, like=make()).drifts == ()


@pytest.mark.parametrize("make", [functional, captured])
def test_a_checkpoint_without_an_environment_is_resumed_without_a_word(make, monkeypatch):
    """V09: checkpoints of earlier versions have none, and it cannot be recovered."""
    store = MemoryStore()
    with monkeypatch.context() as patched:
        patched.setattr("trainfold.backends.runs.snapshot.environment_of", lambda state: {})
        save(make(), store)
    assert plan(store, like=make()).drifts == ()


def test_the_environment_is_that_of_the_save_and_not_of_the_start():
    """A program may change it as it goes: it is read again at each save."""
    store = MemoryStore()
    with threads(torch.get_num_threads() + 1):
        save(functional(), store)
    manifest = examine(store, read_inventory(store), "step-00000000").entry("step-00000000").manifest
    assert manifest.contract["environment.threads"] == torch.get_num_threads() + 1
    assert manifest.contract["environment.device"] == "cpu"


def test_ranks_on_unequal_machines_resume_together():
    """V05: rank 0's environment is saved, so another number of threads on rank 1 does not count as a change."""
    for threads_then, verdict in ((1, "refuse"), (9, "adapt")):
        store = MemoryStore()
        save(functional(), store, contract={"environment.threads": threads_then})

        def rank(world, store=store, policy=verdict):
            mine, policies = {"environment.threads": 1 + world.rank}, {"environment": policy}
            return load(store, like=functional(), contract=mine, policy=policies, collectives=world).trainer

        assert run_threads(2, rank) == [trainfold.Progress()] * 2


def test_settings_of_both_interfaces_of_torch_are_read_without_an_error():
    """Torch raises where a program has set a precision by the new names and asks for it by the old ones."""
    script = """
import torch
torch.backends.cuda.matmul.fp32_precision = "tf32"
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.environment import environment_of
from trainfold.core.state.state import TrainState
print(environment_of(TrainState())["environment.matmul_precision"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip().endswith("'cuda': 'tf32'}")
    assert environment_of(functional())["environment.matmul_precision"] == "highest"


def test_a_model_that_is_cut_over_ranks_has_the_device_of_its_parts():
    """W09: without the device, the settings of CUDA's libraries were not compared either."""
    state = functional()
    cut = {
        name: make_shard(leaf, shape=tuple(leaf.shape), starts=(0,) * leaf.dim())
        for name, leaf in state.model.params.items()
    }
    sharded = state.evolve(model=ModelState(Leaves(cut), state.model.buffers))
    assert environment_of(sharded) == environment_of(state)
    assert environment_of(sharded)["environment.device"] == "cpu"
