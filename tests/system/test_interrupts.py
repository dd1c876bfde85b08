"""After an interrupt anywhere in a call, the program still saves the last state correctly and once, and nothing waits forever."""

import contextlib
import logging
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

import trainfold
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores import run_lock
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import RunLocked, SaveFailed

OURS = str(Path(trainfold.__file__).parent)
HELPERS = (contextlib.__file__, threading.__file__)  # called by our own functions
# Every n-th place is tried: in the usual run this reaches every call of a scene, and the two kinds of interrupt use different places.
STRIDE = {"soak": 1, "laws": 29}.get(os.environ.get("HYPOTHESIS_PROFILE", ""), 587)


class TimeIsUp(Exception):
    """The exception of a time limit's handler."""


@contextlib.contextmanager
def interrupted(at, kind):
    """Raise at the n-th place in a block where Python handles signals: at the start of a function, and when C code returns."""
    places = []

    def profile(frame, event, what):
        code = frame.f_code
        caller = frame.f_back if code.co_filename in HELPERS else frame
        if event not in ("call", "c_return") or not caller.f_code.co_filename.startswith(OURS):
            return
        places.append((code, frame.f_lineno, event))
        if len(places) == at:
            sys.setprofile(None)
            raise kind

    sys.setprofile(profile)
    try:
        with contextlib.suppress(kind):
            yield places
    finally:
        sys.setprofile(None)


def said(place):
    """A place as text; making the text of each place would take longer than what is interrupted."""
    code, line, event = place
    return f"{Path(code.co_filename).name}:{line} in {code.co_name}, {event}"


class Loop:
    def __init__(self, mode, room):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.live = trainfold.attach(self.model, self.optimizer)
        self.store = MemoryStore()
        self.manager = CheckpointManager(self.store, mode=mode, max_extra_bytes=room, every=1, keep_last=1)

    def backward(self):
        self.model(torch.ones(2, 4)).square().sum().backward()

    def update(self):
        self.optimizer.step()

    def count(self):
        self.optimizer.zero_grad()
        self.live.advance(samples=2)

    def train(self):
        self.backward()
        self.update()
        self.count()

    def step(self):
        self.manager.step(self.live)

    def finish(self):
        self.manager.finish(self.live)

    def close(self):
        self.manager.close()

    def save_and_drain(self):
        self.manager.step(self.live)
        self.manager.drain()


def before_step(loop):
    loop.train()


def before_step_while_one_is_under_way(loop):
    loop.train()
    loop.step()
    loop.train()


def before_update(loop):
    loop.step()
    loop.backward()


SCENES = {
    "a step": (before_step, Loop.step),
    "a step while a save is under way": (before_step_while_one_is_under_way, Loop.step),
    "a step and a drain": (before_step_while_one_is_under_way, Loop.save_and_drain),
    "an update": (before_update, Loop.update),
    "the end of the loop": (before_step_while_one_is_under_way, Loop.finish),
    "a close": (before_update, Loop.close),
}


@pytest.mark.slow(1)
# Python reports an interrupt in a generator that is being closed, and continues
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("mode", "room", "kind"),
    [
        ("async", None, KeyboardInterrupt),
        ("async", 0, TimeIsUp),
        ("sync", None, KeyboardInterrupt),
        pytest.param("async", None, TimeIsUp, marks=pytest.mark.long),
        pytest.param("async", 0, KeyboardInterrupt, marks=pytest.mark.long),
        pytest.param("sync", None, TimeIsUp, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("scene", SCENES)
def test_an_interrupt_at_any_moment_loses_no_state_and_stops_nobody(scene, mode, room, kind):
    """A14, D05, D07, P11: the interrupt is Ctrl-C or a handler that raises; then `finish` and `close` run as in any loop."""
    logging.disable(logging.CRITICAL)
    few = {"a close": 2, "an update": 3}  # they have few such places
    stride = min(STRIDE, few.get(scene, STRIDE if mode == "sync" else 251))
    at, ended = 1 + (kind is TimeIsUp) * (stride // 2), False
    try:
        while not ended:
            ended, at = not interrupt_once(scene, mode, room, kind, at), at + stride
    finally:
        logging.disable(logging.NOTSET)
    assert at > 2 * stride, "nothing was interrupted"


def interrupt_once(scene, mode, room, kind, at):
    """Interrupt at one place; return whether the scene reached it."""
    prepare, call = SCENES[scene]
    loop = Loop(mode, room)
    loop.train()
    loop.save_and_drain()
    prepare(loop)
    with interrupted(at, kind) as places:
        call(loop)
    where = f"{scene} interrupted at {at}: {said(places[-1])}"
    if call is Loop.update:
        if len(places) == at:
            loop.update()
        loop.count()
    wanted = {name: value.clone() for name, value in loop.model.state_dict().items()}
    if loop.manager._lease.is_open and call is not Loop.close:
        with contextlib.suppress(SaveFailed):  # the save that was interrupted is reported and repeated
            loop.manager.finish(loop.live)
    loop.manager.close()
    heads = [entry.head for entry in read_inventory(loop.store).entries]
    assert heads[-1].step == loop.live.progress.step, where
    if mode == "async":
        assert [head.timeline for head in heads] == [0], where
    found = Loop(mode, None)
    CheckpointManager(loop.store).restore(found.live)
    assert all(torch.equal(value, wanted[name]) for name, value in found.model.state_dict().items()), where
    return len(places) == at


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeIsUp])
def test_an_interrupt_while_a_manager_lets_go_leaves_no_lock(tmp_path, kind):
    at, ended = 1, False
    while not ended:
        manager = CheckpointManager(tmp_path)
        with interrupted(at, kind) as places:
            manager.close()
        manager.close()
        ended = len(places) < at
        try:
            CheckpointManager(tmp_path).close()
        except RunLocked:
            pytest.fail(f"locked, after an interrupt at {at}: {said(places[-1])}")
        at += 1
    assert at > 10


def test_an_interrupted_release_can_be_done_again(tmp_path):
    at, ended = 1, False
    while not ended:
        held = run_lock.acquire(str(tmp_path))
        with interrupted(at, KeyboardInterrupt) as places:
            run_lock.release(held)
        run_lock.release(held)
        run_lock.release(run_lock.acquire(str(tmp_path)))
        ended, at = len(places) < at, at + 1
    assert at > 5
