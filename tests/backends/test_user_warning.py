"""Warnings point at the line of the user's program, however deep in trainfold they arise."""

import pytest
import torch
from kit.backends.runs_cases import saved_run, state_at

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.api import load
from trainfold.backends.runs.load import CheckpointPassedOver, ResumeDrift
from trainfold.backends.runs.quarantine_file import QUARANTINE_FILE, QuarantineIgnored, quarantined
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import OptionalLeftOut


class Unreachable:
    def state_dict(self):
        raise ConnectionError

    def load_state_dict(self, state):
        raise NotImplementedError


def passed_over():
    store = saved_run(1, 2)
    store.delete("step-00000002/manifest.json")
    load(store, like=state_at(0))


def restored_with_drift():
    store = MemoryStore()
    for rate in (0.1, 0.2):
        model = torch.nn.Linear(1, 1)
        live = attach(model, torch.optim.SGD(model.parameters(), lr=rate))
        with CheckpointManager(store, policy={"hyperparameters": "warn"}) as manager:
            manager.restore(live)
            live.advance(samples=1)
            manager.save(live)


def left_out():
    live = attach(torch.nn.Linear(1, 1), extra={"board": Unreachable()}, optional=["board"])
    with CheckpointManager(MemoryStore()) as manager:
        live.advance(samples=1)
        manager.save(live)


def quarantine_ignored():
    store = MemoryStore()
    store.commit(QUARANTINE_FILE, b"no JSON")
    quarantined(store)


@pytest.mark.parametrize(
    ("program", "category"),
    [
        (passed_over, CheckpointPassedOver),
        (restored_with_drift, ResumeDrift),
        (left_out, OptionalLeftOut),
        (quarantine_ignored, QuarantineIgnored),
    ],
)
def test_a_warning_names_the_line_of_the_program(program, category):
    """The file and line are where a reader of the warning looks first, and a filter by module must match the program."""
    with pytest.warns(category) as caught:
        program()
    assert {each.filename for each in caught if each.category is category} == {__file__}
