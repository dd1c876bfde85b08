"""Holds the drawing of an async save on a page to what a save does."""

import threading

import pytest
import torch

import trainfold

ASYNC_SAVE = "describe the structures", "copy what no update announces", "start ──", "hook: protect", "copy the last unread bytes", "last look", "commit, move", "report `committed`", "▶ delete"  # fmt: skip


def holds_the_drawing_of_an_async_save(text, request):
    """A save that an update overtakes does what the drawing shows, in that order."""
    from trainfold.adapters.manager.contents import RunContents
    from trainfold.backends.hold.copy_room import CopyRoom
    from trainfold.backends.hold.hold import Hold
    from trainfold.backends.job import Job
    from trainfold.backends.stores.memory import MemoryStore
    from trainfold.backends.tiers.pruner import Pruner

    seen, may_write = [], threading.Event()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = trainfold.attach(model, optimizer)

    class Slow(MemoryStore):
        def reserve(self, size_bytes):
            may_write.wait(20)

        def commit(self, name, data, *, replaces=None):
            if name.endswith("manifest.json"):
                seen.append("commit, move")
            super().commit(name, data, replaces=replaces)

    def watch(patch, owner, name, line):
        real = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **given: (seen.append(line), real(*args, **given))[1])

    listener = lambda event: seen.append(f"report `{event.kind}`") if event.kind == "committed" else None
    with (
        pytest.MonkeyPatch.context() as patch,
        trainfold.CheckpointManager(Slow(), mode="async", on_event=listener) as manager,
    ):
        calls = (RunContents, "snapshot"), (CopyRoom, "copy_at_once"), (Job, "start"), (Hold, "protect"), (CopyRoom, "arena_for"), (Hold, "check_unchanged")  # fmt: skip
        for (owner, name), line in zip(calls, ASYNC_SAVE, strict=False):
            watch(patch, owner, name, line)
        watch(patch, Pruner, "retain", ASYNC_SAVE[-1])
        manager.save(live)
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        may_write.set()
        manager.drain()
        manager._saves.wait_for_deletions()
    assert tuple(dict.fromkeys(seen)) == ASYNC_SAVE
    places = [text.index(line) for line in ASYNC_SAVE]
    assert places == sorted(places)
