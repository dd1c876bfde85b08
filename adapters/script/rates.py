"""`Rates`: sees a schedule that nothing attached holds, when a resume has begun it anew (W08)."""

import warnings
from collections.abc import Mapping
from typing import Any, final

import torch

from trainfold.core.errors import HiddenState
from trainfold.core.state.notes import RATES, begins_anew, with_rate


@final
class Rates:
    """The learning rates of optimizers that no attached scheduler works on.

    A loop that computes the rate from ``live.progress.step`` goes on where it was. An object with a counter of its own begins anew, and
    leads the rate back to what it was when the run began: that is told at the first change after a resume, once for each group.
    Rates in tensors are not read, because that would wait for a device.

    Args:
        optimizers: component -> optimizer, without those that something attached sets the rate of.
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._optimizers = dict(optimizers)
        self._began: dict[str, list[float]] = {}
        self._saved: dict[str, float] = {}  # after a restore, until the first change
        self._step = 0
        for key, rate in self._rates():
            self._began[key] = [rate]

    def contract(self) -> dict[str, Any]:
        """What a later resume has to know: nothing while no rate changes."""
        found = {key: began for key, began in self._began.items() if len(began) > 1}
        return {RATES: found} if found else {}

    def stepped(self) -> None:
        """Look at the rates, after an optimizer step."""
        for key, rate in self._rates():
            if key in self._saved:
                saved = self._saved[key]
                if rate != saved:
                    del self._saved[key]
                    if begins_anew(self._began.get(key, ()), saved, rate):
                        self._tell(key, saved, rate)
            elif len(began := self._began.setdefault(key, [])) < 3:
                self._began[key] = with_rate(began, rate)

    def restored(self, contract: Mapping[str, Any], step: int) -> None:
        """Take over what a checkpoint says, after its rates have been restored."""
        listed = contract.get(RATES)
        self._step = step
        if not isinstance(listed, Mapping):
            return
        now = dict(self._rates())
        for key, began in listed.items():
            if key in now and isinstance(began, list | tuple) and all(isinstance(rate, float | int) for rate in began):
                self._began[key] = list(began)
                self._saved[key] = now[key]

    def _rates(self) -> list[tuple[str, float]]:
        return [
            (f"{name}.param_groups[{index}]", rate)
            for name, optimizer in self._optimizers.items()
            for index, group in enumerate(optimizer.param_groups)
            if type(rate := group.get("lr")) is float
        ]

    def _tell(self, key: str, saved: float, rate: float) -> None:
        text = (
            f"{key}['lr'] was {saved} at step {self._step}, where this run goes on, and the loop has set it to {rate}, which it was when the run "
            "began: what sets it begins anew at a resume, and nothing attached holds its counter. Attach it as scheduler=, with state_dict and "
            "load_state_dict; or compute the rate from live.progress.step. If it is meant to come back here, all is well"
        )
        warnings.warn(text, HiddenState, stacklevel=3)
