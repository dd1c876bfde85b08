"""The resume contract: what must be equal for a resume to continue the same run, as plain keys and values (V08)."""

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from trainfold.core import tree
from trainfold.core.errors import UnsupportedLeaf
from trainfold.core.json_values import SCALARS, Json, encode_scalar
from trainfold.core.state.state import OptimizerState, TrainState

STEP_PREFIX = "step."
_MUTABLE = frozenset({list, dict, torch.Tensor})
_GROUPS = "optimizer.groups["


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
    told = dict(state.contract)
    if isinstance(state.optimizer, OptimizerState) and not is_of_live_run(state):
        found |= settings_of(state)
        told = {key: value for key, value in told.items() if not key.startswith(_GROUPS)}
    if isinstance(state.scheduler, Mapping) and isinstance(state.scheduler.get("kind"), str):
        found |= {f"scheduler.{name}": value for name, value in state.scheduler.items()}
    if attrs.has(type(state.dataset)):
        found |= {
            f"dataset.{field}": getattr(state.dataset, field)
            for field in ("length", "seed")
            if hasattr(state.dataset, field)
        }
    return checked_contract({**found, **told})  # what the state was told goes before what shows


def settings_of(state: TrainState) -> dict[str, Any]:
    """The settings of the optimizer of a pure step: what stood in its groups before it wrote into them (ADR-0010).

    A step notes them in the contract of the state when the optimizer first writes into a group; until then they are what
    stands there. A learning rate is always the one that stands there, because no pure step writes it.

    Args:
        state: any state.

    Returns:
        Contract key -> value; nothing for a state without an optimizer, or for one that a live run has captured.

    Examples:
        >>> from trainfold.core.state.leaves import Leaves
        >>> from trainfold.core.state.state import ParamGroup
        >>> group = ParamGroup({"lr": 0.1, "step": 3}, ("w",))
        >>> state = TrainState(optimizer=OptimizerState("Lamb", Leaves({}), (group,)), contract={"optimizer.groups['w'].lr": 0.2})
        >>> settings_of(state)
        {'optimizer.kind': 'Lamb', "optimizer.groups['w'].lr": 0.1}
    """
    if not isinstance(state.optimizer, OptimizerState) or is_of_live_run(state):
        return {}
    stands = _optimizer(state.optimizer)
    noted = {key: value for key, value in state.contract.items() if key.startswith(_GROUPS)}
    labels = {
        key.rpartition(".")[0] for key in noted
    }  # a group with other parameters is another one, and was not noted
    return {
        key: value if key not in noted or key.endswith("].lr") else noted[key]
        for key, value in stands.items()
        if key in noted or key.rpartition(".")[0] not in labels
    }


def settings_at_risk(state: TrainState) -> dict[str, Json]:
    """The settings of a first step whose groups hold lists or tensors, which a step that donates may write to in place.

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
    """The settings that a contract has to note, because the groups after a step, or in a checkpoint, say something else.

    Args:
        before: the state that the step began with, or that wanted to resume.
        after: the optimizer's state that the step returned, or that was loaded.

    Returns:
        Contract key -> value; nothing where the groups are as they were, or where their settings are noted already.
    """
    if not isinstance(before.optimizer, OptimizerState) or not isinstance(after, OptimizerState):
        return {}
    if before.optimizer.groups is after.groups or any(key.startswith(_GROUPS) for key in before.contract):
        return {}
    known = checked_contract(settings_of(before))
    if not known or known == checked_contract(_optimizer(after)):
        return {}
    return {key: value for key, value in known.items() if key.startswith(_GROUPS)}


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


def is_of_live_run(state: TrainState) -> bool:
    """Whether a live run has said what its optimizer was set to; what else is in a group by now is state (ADR-0010).

    Examples:
        >>> is_of_live_run(TrainState())
        False
    """
    return "optimizer.kind" in state.contract


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
        raise UnsupportedLeaf(path, expected="a plain value", found=type(value).__name__, fix="name its parts")
    return encode_scalar(value, path)
