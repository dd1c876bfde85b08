"""The repr of a manager."""

import torch

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.core.save.retention import keep_every
from trainfold.core.state.state import Progress, TrainState


def test_the_repr_of_a_manager_says_what_it_holds(tmp_path):
    """The run, when and how it saves, its retention, the save under way, the last save, and whether it is closed."""
    run = str(tmp_path / "run")
    manager = CheckpointManager(run, mode="async", every=5, keep_last=3, keep=keep_every(100))
    policy = f"CheckpointManager({run!r}, async, every=5, keep: every 100 steps, the last 3"
    texts = [repr(manager)]
    manager.save(TrainState(trainer=Progress(step=5)))
    texts.append(repr(manager))
    manager.drain()
    texts.append(repr(manager))
    manager.close()
    texts.append(repr(manager))
    assert texts == [
        f"{policy}; nothing saved yet)",
        f"{policy}; saving step 5, nothing saved yet)",
        f"{policy}; saved step 5 last)",
        f"{policy}; saved step 5 last; closed)",
    ]


def test_the_repr_of_a_sync_manager_names_a_cadence_in_seconds(tmp_path):
    with CheckpointManager(tmp_path, every_secs=600.0) as manager:
        manager.save(attach(torch.nn.Linear(1, 1)))
        assert repr(manager).endswith("sync, every_secs=600, keep: all; saved step 0 last)")
    with CheckpointManager(tmp_path / "auto") as manager:
        assert "sync, every='auto', keep: all; nothing saved yet)" in repr(manager)


def test_a_manager_that_was_never_made_has_a_repr():
    assert repr(CheckpointManager.__new__(CheckpointManager)) == "CheckpointManager(closed)"
