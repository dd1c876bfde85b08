"""`init_state`: the first state of a run, copied from a model."""

from collections.abc import Mapping
from typing import Any

import torch

from trainfold.core.errors import InvalidState
from trainfold.core.optim.schedule import ScheduleFunction, describe_schedule
from trainfold.core.rng import make_key
from trainfold.core.state.aliasing import check_apart
from trainfold.core.state.fqn import NamedTensors, check_real, check_set, check_uncut
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.names.wrapper_names import name_in
from trainfold.core.state.state import ModelState, Progress, TrainableState
from trainfold.core.step.optimizer import Optimizer, OptimizerLike, pair_of


def init_state(  # noqa: PLR0913 (the public surface: two arguments, and names for the rest)
    model: torch.nn.Module,
    optimizer: OptimizerLike,
    *,
    seed: int = 0,
    schedule: ScheduleFunction | None = None,
    dataset: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> TrainableState:
    """Make the state before the first step.

    Args:
        model: a module with real tensors. They are copied; the module does not change.
        optimizer: what `trainfold.optimizer` returns, or another pair ``(init, update)``.
        seed: the root of all randomness of the steps.
        schedule: its description, which includes the horizon, becomes the ``scheduler`` component.
        dataset: the data position, such as a `DataCursor`.
        extra: user-declared components by name.

    Returns:
        The state, with each tied parameter once.

    Raises:
        InvalidState: if the model is on the meta device or has tensors that are not initialised, or DTensors; or if its
            ``state_dict()`` has more than parameters and buffers, which a pure step would lose.
        SharedStorage: if two tensors of the model share storage without being the same tensor.

    Examples:
        >>> from trainfold import optimizer
        >>> state = init_state(torch.nn.Linear(2, 1), optimizer(torch.optim.SGD, lr=0.1), seed=1)
        >>> list(state.model.params), state.trainer.step
        (['weight', 'bias'], 0)
    """
    named = check_uncut(check_real(model))
    check_set(model, named)
    _check_plain_state_dict(model, named)
    check_apart(
        [*named.params.items(), *named.buffers.items()],
        fix="tie by assigning the same Parameter object, or give each tensor its own storage",
    )
    params = {name: value.detach().clone() for name, value in named.params.items()}
    init, _ = pair_of(optimizer)
    given = params
    # the rules of its groups see what trains; a user's own functions get plain tensors
    if isinstance(optimizer, Optimizer):
        given = {
            name: value.detach().requires_grad_(named.params[name].requires_grad) for name, value in params.items()
        }
    return TrainableState(
        model=ModelState(
            params=Leaves(params),
            buffers=Leaves({name: value.detach().clone() for name, value in named.buffers.items()}),
            ties=named.ties,
        ),
        optimizer=init(given),
        scheduler=describe_schedule(schedule),
        trainer=Progress(),
        dataset=dataset,
        rng=make_key(seed),
        extra=dict(extra or {}),
    )


def _check_plain_state_dict(model: torch.nn.Module, named: NamedTensors) -> None:
    """Refuse a module with state that is neither a parameter nor a buffer, because a pure step cannot carry it."""
    known = {*named.params, *named.buffers, *(alias for alias, _ in named.ties)}
    places = {value.data_ptr() for value in (*named.params.values(), *named.buffers.values())}
    more = [
        key
        for key, value in model.state_dict().items()
        if name_in(model, key) not in known and not (isinstance(value, torch.Tensor) and value.data_ptr() in places)
    ]
    if more:
        raise InvalidState(
            "model",
            expected="a state_dict() of parameters and buffers alone",
            found=f"{len(more)} more: {', '.join(map(repr, more[:4]))}",
            fix="register the changing state as a buffer; or write your own loop with trainfold.attach(model, optimizer), which saves it",
        )
