"""A replay until the first NaN inside of the process of a test, which raises where the program would end."""

import json

import pytest
import torch

from trainfold.adapters.flight import nonfinite_end as room
from trainfold.adapters.flight.nonfinite import NonFiniteWatch
from trainfold.core.rehearsal.orders import Orders, ReplayOrders


class Ended(Exception):
    """The program would have ended here."""


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """Begins a watch, and returns it with a function that reads what it has found."""
    handles, install = [], NonFiniteWatch.install
    monkeypatch.setattr(NonFiniteWatch, "install", lambda self: handles.extend(install(self)))
    monkeypatch.setattr(room, "Finalize", lambda *_, **__: None)

    def ended(*_):
        raise Ended

    monkeypatch.setattr(room, "end_replay", ended)
    orders = Orders(str(tmp_path), str(tmp_path), 1, 100, 0, ReplayOrders("runs/a", until_nonfinite=True))
    with torch.compiler.set_stance("default"):
        yield (
            room.nonfinite_end(orders, 0, lambda: 7),
            lambda: json.loads((tmp_path / room.NONFINITE_NAME).read_text()),
        )
    for handle in handles:
        handle.remove()
        torch.nn.modules.module._global_forward_hooks_with_kwargs.pop(handle.id, None)
