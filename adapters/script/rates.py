"""`Rates`: detects a user's schedule that is not attached and that a resume has restarted."""

from collections.abc import Mapping
from typing import Any, final

import torch

from trainfold.backends.ranks.launcher import warn_for_all
from trainfold.core.errors import HiddenState
from trainfold.core.state.notes import RATES, restarts, with_rate


@final
class Rates:
    """The learning rates of optimizers that have no attached scheduler.

    A loop that computes the rate from ``live.progress.step`` continues where it was. An object with its own counter restarts
    at a resume, and takes the rate back to its value at the start of the run. The first change after a resume shows this, and
    a warning names it, once for each group. Rates in tensors are not read, because that would wait for a device.

    Args:
        optimizers: component -> optimizer, without those whose rate an attached object sets.
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._optimizers = dict(optimizers)
        self._began: dict[str, list[float]] = {}
        self._saved: dict[str, float] = {}  # the restored rates, until each changes for the first time
        self._step = 0
        self._seen: list[float | None] | None = None  # the rates of the last step, in the order of the groups
        for key, rate in self._rates():
            self._began[key] = [rate]

    def contract(self) -> dict[str, Any]:
        """The rates that a later resume needs; empty while no rate has changed."""
        found = {key: began for key, began in self._began.items() if len(began) > 1}
        return {RATES: found} if found else {}

    def stepped(self) -> None:
        """Read the rates after an optimizer step; name the groups only if a rate has changed."""
        groups = [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]
        now = [rate if type(rate := group.get("lr")) is float else None for group in groups]
        if now == self._seen:
            return
        self._seen = now
        for key, rate in self._rates():
            if key in self._saved:
                saved = self._saved[key]
                if rate != saved:
                    del self._saved[key]
                    self._seen = None  # the next step adds this rate to those that the run began with
                    if restarts(self._began.get(key, ()), saved, rate):
                        self._warn(key, saved, rate)
            elif len(began := self._began.setdefault(key, [])) < 3:
                self._began[key] = with_rate(began, rate)

    def restored(self, contract: Mapping[str, Any], step: int) -> None:
        """Take over the rates in a checkpoint's contract, after the optimizer has been restored."""
        listed = contract.get(RATES)
        self._step = step
        self._seen = None
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

    def _warn(self, key: str, saved: float, rate: float) -> None:
        text = (
            f"{key}['lr'] was {saved} at step {self._step}, where this run resumed, and the loop has set it to {rate}, its value when the run "
            "began: the schedule restarts at a resume, because no attached object holds its counter. Attach it as scheduler=, with state_dict "
            "and load_state_dict; or compute the rate from live.progress.step. If the rate is meant to return to this value, ignore this warning"
        )
        warn_for_all(text, HiddenState)
