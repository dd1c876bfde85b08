"""The number of modules between the manager and the store's write in a save: a reader of the code follows each of them."""

import _thread
import sys
import threading
from pathlib import Path

import pytest
import torch

import trainfold
from trainfold.backends.stores.local import LocalStore

OURS = str(Path(trainfold.__file__).parent) + "/"
WRITES = {getattr(LocalStore, name).__code__ for name in ("write", "commit", "reserve")}


def modules_of(frame):
    """The modules of trainfold on a stack, outermost first, each once."""
    names = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            names.append(frame.f_code.co_filename.removeprefix(OURS).removesuffix(".py"))
        frame = frame.f_back
    return tuple(dict.fromkeys(reversed(names)))


class Chains:
    """Records the longest chain of modules to a write of the store, and the longest one through it, to the bytes."""

    def __init__(self):
        self.to_write = self.to_bytes = ()
        self._started_from = ()  # the chain of the call that started the thread
        self._owner = threading.get_ident()

    def __call__(self, frame, event, _):
        if event != "call" or not frame.f_code.co_filename.startswith(OURS):
            return
        chain = modules_of(frame)
        if threading.get_ident() != self._owner:
            chain = tuple(dict.fromkeys(self._started_from + chain))
        elif chain[0] == "adapters/manager/manager" and chain[-1] == "backends/job":
            self._started_from = chain
        if chain[0] != "adapters/manager/manager":
            return
        if any(each.startswith("backends/stores/") for each in chain):
            self.to_bytes = max(self.to_bytes, chain, key=len)
        if frame.f_code in WRITES:
            self.to_write = max(self.to_write, chain, key=len)


def begin_profiled(chains, start=_thread.start_new_thread):
    """`_thread.start_new_thread`, whose threads are profiled too: `threading.setprofile` knows only those of `threading`."""
    return lambda function, args: start(lambda: (sys.setprofile(chains), function(*args)), ())


def chains_of_a_save(mode, run, patched):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    optimizer = torch.optim.AdamW(model.parameters())
    live = trainfold.attach(model, optimizer)
    chains = Chains()
    with trainfold.CheckpointManager(run, mode=mode, every=1, keep_last=1) as manager:
        for step in range(2):
            model(torch.randn(4, 64)).sum().backward()
            optimizer.step()
            live.advance(samples=4)
            if step == 1:
                patched.setattr(_thread, "start_new_thread", begin_profiled(chains))
                sys.setprofile(chains)
            try:
                manager.step(live)
                manager.drain()
            finally:
                sys.setprofile(None)
    return chains


@pytest.mark.parametrize(("mode", "to_write", "to_bytes"), [("sync", 6, 9), ("async", 8, 11)])
def test_a_save_goes_through_few_modules(tmp_path, mode, to_write, to_bytes, monkeypatch):
    chains = chains_of_a_save(mode, tmp_path, monkeypatch)
    assert chains.to_write[0] == "adapters/manager/manager"
    assert chains.to_write[-1].startswith("backends/stores/")
    assert len(chains.to_write) <= to_write, " > ".join(chains.to_write)
    assert len(chains.to_bytes) <= to_bytes, " > ".join(chains.to_bytes)
