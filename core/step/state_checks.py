"""Checks of a state before a step changes anything."""

import math
from collections.abc import Mapping
from typing import cast

from trainfold.core.checks import real_given
from trainfold.core.errors import ContractMismatch, InvalidArgument, InvalidState
from trainfold.core.json_values import Json, shown
from trainfold.core.optim.schedule import ScheduleFunction
from trainfold.core.rng import Key, make_key
from trainfold.core.state.state import OptimizerState, TrainableState, TrainState


def check_trainable(state: TrainState, *, needs_optimizer_state: bool) -> TrainableState:
    """Return the state if a step can train it.

    Args:
        state: what the caller passed to the step.
        needs_optimizer_state: whether the step's optimizer reads an `OptimizerState`.

    Raises:
        InvalidState: if it is not a state, or lacks the model, the optimizer or the counters.
        StateDonated: if an earlier step consumed it.
    """
    if not isinstance(state, TrainState):
        raise InvalidState(
            "state", expected="a TrainState", found=type(state).__name__, fix="make the state with init_state"
        )
    if state.model is None or state.optimizer is None or state.trainer is None:
        raise InvalidState(
            "state",
            expected="the components model, optimizer and trainer",
            found=[name for name in ("model", "optimizer", "trainer") if getattr(state, name) is None] + ["absent"],
            fix="make the state with init_state, or merge the missing components into it",
        )
    state.model.params.alive("state.model.params")
    if needs_optimizer_state and not isinstance(state.optimizer, OptimizerState):
        raise InvalidState(
            "state.optimizer",
            expected="an OptimizerState",
            found=type(state.optimizer).__name__,
            fix="make it with init(params) of the optimizer that the step was made with",
        )
    return cast("TrainableState", state)


def key_of(state: TrainState) -> Key:
    """Return the random key of a state; a state without one uses the key of seed 0.

    Raises:
        InvalidState: if the state holds captured streams instead of a key.
    """
    key = make_key(0) if state.rng is None else state.rng
    if not isinstance(key, Key):
        raise InvalidState(
            "state.rng",
            expected="a Key, or None",
            found=type(key).__name__,
            fix="captured streams are for mutable loops; use rng=make_key(seed) with a step",
        )
    return key


def check_contract(state: TrainState, contract: Mapping[str, Json]) -> None:
    """Refuse a state trained by another kind of step: the run would continue with slightly different updates.

    Raises:
        ContractMismatch: naming every key that differs.
    """
    differs = [name for name, value in state.contract.items() if name in contract and contract[name] != value]
    if differs:
        raise ContractMismatch(
            "state.contract",
            expected=", ".join(f"{name}={state.contract[name]!r}" for name in differs),
            found="a step with " + ", ".join(f"{name}={contract[name]!r}" for name in differs),
            fix="make the step as it was, or accept the change: state.evolve(contract={})",
        )


def factor_of(schedule: ScheduleFunction | None, step: int) -> float | None:
    """Return the schedule's factor for a step, before anything is updated; None without a schedule.

    Raises:
        InvalidArgument: if the schedule does not return a finite number.
    """
    if schedule is None:
        return None
    returned: object = schedule(step)
    factor = real_given(returned)
    if factor is None or not math.isfinite(factor):
        raise InvalidArgument(
            f"schedule({step})",
            expected="a finite number, the factor of the learning rates",
            found=shown(returned),
            fix="nothing was updated: fix the schedule",
        )
    return factor
