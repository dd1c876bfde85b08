"""The resume contract: plain keys and values. A resume continues the same run only if they are equal."""

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from trainfold.core import tree
from trainfold.core.errors import UnsupportedLeaf
from trainfold.core.json_values import SCALARS, Json, encode_scalar
from trainfold.core.state.state import OptimizerState, TrainState

_MUTABLE = frozenset({list, dict, torch.Tensor})
_GROUPS = "optimizer.groups["


def contract_of(state: TrainState) -> dict[str, Json]:
    """Return the contract of a state: optimizer, hyperparameters, schedule, horizon, dataset, and the settings of its step.

    Args:
        state: any state; absent components add nothing.

    Returns:
        Key -> JSON value; the keys are sorted.

    Examples:
        >>> contract_of(TrainState(scheduler={"kind": "constant", "total": 100}))
        {'scheduler.kind': 'constant', 'scheduler.total': 100}
    """
    found: dict[str, Any] = {}
    recorded = dict(state.contract)
    if isinstance(state.optimizer, OptimizerState) and not is_of_live_run(state):
        found |= settings_of(state)
        recorded = {key: value for key, value in recorded.items() if not key.startswith(_GROUPS)}
    if isinstance(state.scheduler, Mapping) and isinstance(state.scheduler.get("kind"), str):
        found |= {f"scheduler.{name}": value for name, value in state.scheduler.items()}
    if attrs.has(type(state.dataset)):
        found |= {
            f"dataset.{field}": getattr(state.dataset, field)
            for field in ("length", "seed")
            if hasattr(state.dataset, field)
        }
    return checked_contract({**found, **recorded})  # what the state records overrides what its components show


def settings_of(state: TrainState) -> dict[str, Any]:
    """Return the settings of a pure step's optimizer: the values of its groups before the optimizer wrote into them (ADR-0010).

    A step records them in the contract of the state when the optimizer first writes into a group. Until then they are
    the current values. A learning rate is always the current value, because no pure step writes it.

    Args:
        state: any state.

    Returns:
        Contract key -> value; empty for a state without an optimizer, and for a state that a live run has captured.

    Examples:
        >>> from trainfold import Leaves
        >>> from trainfold.states import ParamGroup
        >>> group = ParamGroup({"lr": 0.1, "step": 3}, ("w",))
        >>> state = TrainState(optimizer=OptimizerState("Lamb", Leaves({}), (group,)), contract={"optimizer.groups['w'].lr": 0.2})
        >>> settings_of(state)
        {'optimizer.kind': 'Lamb', "optimizer.groups['w'].lr": 0.1}
    """
    if not isinstance(state.optimizer, OptimizerState) or is_of_live_run(state):
        return {}
    current = _optimizer(state.optimizer)
    noted = {key: value for key, value in state.contract.items() if key.startswith(_GROUPS)}
    # a group with other parameters has another label, and is not noted
    labels = {key.rpartition(".")[0] for key in noted}
    return {
        key: value if key not in noted or key.endswith("].lr") else noted[key]
        for key, value in current.items()
        if key in noted or key.rpartition(".")[0] not in labels
    }


def settings_at_risk(state: TrainState) -> dict[str, Json]:
    """Return the settings before the first step if groups hold lists or tensors, because a donating step may change those in place.

    Args:
        state: the state that the step is about to consume.
    """
    optimizer, trainer = state.optimizer, state.trainer
    if trainer is None or trainer.step or not isinstance(optimizer, OptimizerState):
        return {}
    if not any(type(value) in _MUTABLE for group in optimizer.groups for value in group.hyper.values()):
        return {}
    return {key: value for key, value in checked_contract(settings_of(state)).items() if key.startswith(_GROUPS)}


def noted_settings(before: TrainState, after: Any) -> dict[str, Json]:
    """Return the settings that the contract must record, because the groups after a step, or in a checkpoint, differ.

    Args:
        before: the state before the step, or the state to resume into.
        after: the optimizer component after the step, or from the checkpoint.

    Returns:
        Contract key -> value; empty if the groups have not changed, or if their settings are recorded already.
    """
    if not isinstance(before.optimizer, OptimizerState) or not isinstance(after, OptimizerState):
        return {}
    if before.optimizer.groups is after.groups or any(key.startswith(_GROUPS) for key in before.contract):
        return {}
    known = checked_contract(settings_of(before))
    if not known or known == checked_contract(_optimizer(after)):
        return {}
    return {key: value for key, value in known.items() if key.startswith(_GROUPS)}


def checked_contract(contract: Mapping[str, Any]) -> dict[str, Json]:
    """Return a contract with every value in its JSON form.

    Raises:
        UnsupportedLeaf: naming the key, for a value that has no exact JSON form.

    Examples:
        >>> checked_contract({"batch_size": 32, "betas": (0.9, 0.999)})
        {'batch_size': 32, 'betas': [0.9, 0.999]}
    """
    return {key: _plain(contract[key], f"contract[{key!r}]") for key in sorted(contract)}


def is_of_live_run(state: TrainState) -> bool:
    """Whether a live run has recorded the settings of its optimizer; other values in its groups are state (ADR-0010).

    Examples:
        >>> is_of_live_run(TrainState())
        False
    """
    return "optimizer.kind" in state.contract


def _optimizer(optimizer: OptimizerState) -> dict[str, Any]:
    found: dict[str, Any] = {"optimizer.kind": optimizer.kind}
    # Named by its first parameter, so that the order of the groups does not matter.
    for group in optimizer.groups:
        label = min(group.params, default="")
        found |= {f"optimizer.groups[{label!r}].{name}": value for name, value in group.hyper.items()}
    return found


def _plain(value: Any, path: str) -> Json:
    if type(value) in SCALARS:  # nearly every value
        return encode_scalar(value, path)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, list | tuple):
        return [_plain(each, path) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(each, path) for key, each in value.items()}
    if tree.one_level(value) is not None or isinstance(value, torch.Tensor):
        raise UnsupportedLeaf(
            path, expected="a plain value", found=type(value).__name__, fix="list its parts as plain values"
        )
    return encode_scalar(value, path)
