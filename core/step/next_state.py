"""The state after a step: the state after an update, or the state advanced past a skipped batch."""

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from trainfold.core.data.cursor import DataCursor
from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import Json, shown
from trainfold.core.state.state import ModelState, Progress, Scalar, TrainableState
from trainfold.core.step.gradients import WindowResult

Metrics = dict[str, float]


def next_state(  # noqa: PLR0913 (every one is named where it is called)
    state: TrainableState,
    *,
    model: ModelState,
    optimizer: Any,
    scheduler: Mapping[str, Scalar] | None,
    verdict: WindowResult,
    contract: Mapping[str, Json],
) -> TrainableState:
    """Return the state after an update.

    Args:
        state: the state before it.
        model: the updated model component.
        optimizer: the updated optimizer component.
        scheduler: the description of the step's schedule, for a state that has none yet.
        verdict: what the window measured; its samples and weight advance the counters.
        contract: added to the state's contract.
    """
    done = state.trainer
    return TrainableState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler if state.scheduler is None else state.scheduler,
        trainer=Progress(
            step=done.step + 1,
            epoch=done.epoch,
            samples=done.samples + verdict.samples,
            tokens=done.tokens + round(verdict.weight),
        ),
        dataset=state.dataset,
        rng=state.rng,
        extra=state.extra,
        contract={**state.contract, **contract},
        origin=state.origin,
    )


def skipped_state(state: TrainableState, samples: int) -> TrainableState:
    """Return the state advanced past an unused batch, because the caller cannot advance a step that raised."""
    dataset = state.dataset.advance(samples) if isinstance(state.dataset, DataCursor) else state.dataset
    trainer = attrs.evolve(state.trainer, samples=state.trainer.samples + samples)
    return state.evolve(trainer=trainer, dataset=dataset)


def consume(state: TrainableState) -> None:
    """Mark a donated state as consumed, so that reading it raises instead of returning the next state's values."""
    parts = [state.model.params, state.model.buffers, state.optimizer.slots, state.optimizer.masters]
    leases = [leaves.lease for leaves in parts if leaves is not None]
    for lease in leases:
        lease.protect()  # a save that still reads the leaves finishes, or copies what it has not read
    for lease in leases:
        lease.consumed_by = state.trainer.step


def check_updated(result: Any) -> tuple[Mapping[str, torch.Tensor], Any]:
    """Return the parameters and the optimizer state from the result of a user's own update function, checked.

    Raises:
        InvalidArgument: if it returned anything else.
    """
    pair = isinstance(result, tuple | list) and len(result) == len(("params", "opt_state"))
    if pair and isinstance(result[0], Mapping) and all(isinstance(value, torch.Tensor) for value in result[0].values()):
        return result[0], result[1]
    raise InvalidArgument(
        "update",
        expected="(params, opt_state), params as FQN -> tensor",
        found=shown(result),
        fix="return the new parameters, each under its name, and the new state of the optimizer",
    )


def step_metrics(verdict: WindowResult, rates: dict[str, float]) -> Metrics:
    """Return the metrics of a step: those of the loss function, then its own."""
    own = {"loss": verdict.loss, "grad_norm": verdict.grad_norm, **rates, "weight": verdict.weight}
    return {**verdict.metrics, **own}
