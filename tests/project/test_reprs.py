"""Every public object prints as what it is, not as an address in memory: it is what a user sees at a prompt."""

import importlib
import inspect
from contextlib import closing

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainfold
from trainfold import CheckpointManager, DisabledManager, Loss, SignalRequests, StopFile, attach
from trainfold.evaluation import time_limit
from trainfold.managers import Asked, Combined
from trainfold.ranks import run_threads
from trainfold.stores import MemoryStore

SUBJECTS = [name for name in trainfold.__all__ if inspect.ismodule(getattr(trainfold, name))]


def public_classes():
    for subject in ("", *SUBJECTS):
        module = importlib.import_module(f"trainfold.{subject}".rstrip("."))
        for name in module.__all__:
            found = getattr(module, name)
            is_protocol = getattr(found, "_is_protocol", False)
            if inspect.isclass(found) and not is_protocol and not issubclass(found, BaseException):
                yield pytest.param(found, id=f"{module.__name__}.{name}")


@pytest.mark.parametrize("cls", list(public_classes()))
def test_each_public_class_has_its_own_repr(cls):
    """A class without one prints ``<... object at 0x...>``, which says nothing of the run."""
    assert cls.__repr__ is not object.__repr__


def mean(model, batch):
    return Loss(sum=model(batch).sum(), weight=len(batch))


def test_what_each_of_them_prints(tmp_path):
    model = nn.Linear(2, 1)
    adamw = trainfold.optimizer(torch.optim.AdamW, lr=0.1)
    state = trainfold.init_state(model, adamw)
    store = MemoryStore()
    live = attach(model, loader=DataLoader(TensorDataset(torch.ones(2, 2)), 2))
    batches = live.batches(epochs=1)
    asked = Asked()
    asked.ask("save")
    with SignalRequests() as signals, closing(StopFile(tmp_path)) as files:
        shown = {
            "MemoryStore(0 files, 0 bytes)": store,
            "DisabledManager(saves and loads nothing)": DisabledManager(),
            "SignalRequests(SIGTERM: save_and_stop, SIGUSR1: save)": signals,
            f"StopFile('{tmp_path}', STOP: save_and_stop, SAVE: save, ABORT: abort)": files,
            "Asked(waiting: save)": asked,
            "Combined(Asked(waiting: nothing), Asked(waiting: save))": Combined(Asked(), asked),
            "BoundModel(Linear, 2 parameters)": trainfold.bind_model(model, state),
            "TimeLimit([1, 2], secs=3.0)": time_limit([1, 2], secs=3.0),
            "<batches of a live run: not started>": batches,
        }
        assert [repr(each) for each in shown.values()] == list(shown)
    assert repr(signals).endswith("save; closed)")
    assert repr(files) == f"StopFile('{tmp_path}', closed)"
    step = trainfold.make_step(model, mean, adamw, accumulate=2, donate=True)
    assert repr(step) == f"Step(mean, {adamw!r}, accumulate=2, clip_norm=None, donate=True)"
    assert run_threads(2, repr) == [f"ThreadCollectives(rank={rank}, world_size=2)" for rank in range(2)]
    next(batches)
    assert repr(batches) == "<batches of a live run: reading>"
    list(batches)
    assert repr(batches) == "<batches of a live run: no batches left>"
    with CheckpointManager(store) as manager:
        manager.save(state)
    assert "0 files" not in repr(store)
