"""The resume contract: what must be equal for a resume to continue the same run, as plain keys and values (V08)."""

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from trainfold.core import tree
from trainfold.core.errors import UnsupportedLeaf
from trainfold.core.scalars import SCALARS, Json, encode_scalar
from trainfold.core.state import OptimizerState, TrainState

STEP_PREFIX = "step."


def contract_of(state: TrainState) -> dict[str, Json]:
    """What a state itself says: optimizer, hyperparameters, schedule, horizon, dataset, and what its step must keep.

    Args:
        state: any state; components that it does not have add nothing.

    Returns:
        Key -> JSON value; the keys are sorted.

    Examples:
        >>> contract_of(TrainState(scheduler={"kind": "constant", "total": 100}))
        {'scheduler.kind': 'constant', 'scheduler.total': 100}
    """
    found: dict[str, Any] = {}
    if isinstance(state.optimizer, OptimizerState) and not _says_settings(state.contract):
        found |= _optimizer(state.optimizer)
    if isinstance(state.scheduler, Mapping) and isinstance(state.scheduler.get("kind"), str):
        found |= {f"scheduler.{name}": value for name, value in state.scheduler.items()}
    if attrs.has(type(state.dataset)):
        found |= {
            f"dataset.{field}": getattr(state.dataset, field)
            for field in ("length", "seed")
            if hasattr(state.dataset, field)
        }
    return checked_contract({**found, **state.contract})  # what the state was told goes before what shows


def step_contract(contract: Mapping[str, Json]) -> dict[str, Json]:
    """The part of a saved contract that a state carries for its next step.

    Examples:
        >>> step_contract({"step.accumulate": 4, "batch_size": 8})
        {'step.accumulate': 4}
    """
    return {key: value for key, value in contract.items() if key.startswith(STEP_PREFIX)}


def run_contract(contract: Mapping[str, Json]) -> dict[str, Json]:
    """The rest of it: what a state says of the run around it, such as a captured one of its loader.

    Examples:
        >>> run_contract({"step.accumulate": 4, "batch_size": 8})
        {'batch_size': 8}
    """
    return {key: value for key, value in contract.items() if not key.startswith(STEP_PREFIX)}


def checked_contract(contract: Mapping[str, Any]) -> dict[str, Json]:
    """A contract with every value in its JSON form.

    Raises:
        UnsupportedLeaf: naming the key, for a value that has no exact JSON form.

    Examples:
        >>> checked_contract({"batch_size": 32, "betas": (0.9, 0.999)})
        {'batch_size': 32, 'betas': [0.9, 0.999]}
    """
    return {key: _plain(contract[key], f"contract[{key!r}]") for key in sorted(contract)}


def _says_settings(contract: Mapping[str, Any]) -> bool:
    """Whether a live run has said what its optimizer was set to; what else is in a group by now is state (ADR-0010)."""
    return "optimizer.kind" in contract


def _optimizer(optimizer: OptimizerState) -> dict[str, Any]:
    found: dict[str, Any] = {"optimizer.kind": optimizer.kind}
    # Named by its first parameter, so that the order in which groups were made does not matter (B10).
    for group in optimizer.groups:
        label = min(group.params, default="")
        found |= {f"optimizer.groups[{label!r}].{name}": value for name, value in group.hyper.items()}
    return found


def _plain(value: Any, path: str) -> Json:
    if type(value) in SCALARS:  # nearly every one
        return encode_scalar(value, path)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, list | tuple):
        return [_plain(each, path) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(each, path) for key, each in value.items()}
    if tree.one_level(value) is not None or isinstance(value, torch.Tensor):
        raise UnsupportedLeaf(path, expected="a plain value", found=type(value).__name__, mend="name its parts")
    return encode_scalar(value, path)
