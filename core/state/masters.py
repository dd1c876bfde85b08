"""fp32 master copies of low-precision parameters, which are part of the optimizer's state."""

from collections.abc import Mapping

import attrs
import torch

from trainfold.core.errors import InvalidState
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import OptimizerState

_FULL_BYTES = 4


def is_low_precision(tensor: torch.Tensor) -> bool:
    """Whether a tensor is floating point with less than 32 bits.

    Examples:
        >>> is_low_precision(torch.zeros(1, dtype=torch.bfloat16)), is_low_precision(torch.zeros(1))
        (True, False)
    """
    return tensor.is_floating_point() and tensor.element_size() < _FULL_BYTES


def make_masters(params: Mapping[str, torch.Tensor]) -> Leaves[torch.Tensor]:
    """Return an fp32 copy of each low-precision parameter.

    Examples:
        >>> make_masters({"w": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2)})["w"].dtype
        torch.float32
    """
    return Leaves({name: value.detach().float() for name, value in params.items() if is_low_precision(value)})


def check_masters(masters: Mapping[str, torch.Tensor], params: Mapping[str, torch.Tensor]) -> None:
    """Refuse masters that do not belong to the parameters.

    Raises:
        InvalidState: naming the masters whose name, shape or dtype differs.
    """
    wanted = {name: tuple(value.shape) for name, value in params.items() if is_low_precision(value)}
    found = {name: tuple(value.shape) for name, value in masters.items()}
    wrong = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
    wrong += [name for name, value in masters.items() if value.dtype != torch.float32 and name not in wrong]
    if wrong:
        raise InvalidState(
            "state.optimizer.masters",
            expected={name: wanted.get(name) for name in wrong},
            found={name: (found.get(name), str(masters[name].dtype) if name in masters else None) for name in wrong},
            fix="set masters=None to clone them from the parameters: these belong to another model",
        )


def refresh_masters(opt_state: OptimizerState, params: Mapping[str, torch.Tensor]) -> OptimizerState:
    """Replace the masters by fp32 copies of the parameters. Call it after weights alone were loaded.

    Without it the first step would round the old masters into the weights, and so revert the load.

    Args:
        opt_state: an optimizer state, with or without masters.
        params: the loaded weights.

    Returns:
        The same state with masters equal to ``params``.

    Examples:
        >>> state = OptimizerState(kind="torch.optim.sgd.SGD", slots=Leaves(), groups=())
        >>> refresh_masters(state, {"w": torch.ones(1, dtype=torch.bfloat16)}).masters["w"]
        tensor([1.])
    """
    return attrs.evolve(opt_state, masters=make_masters(params))


def with_fitting_masters(opt_state: OptimizerState, params: Mapping[str, torch.Tensor]) -> OptimizerState:
    """Keep each master that rounds to its parameter, and clone the others from the parameters: they belong to other weights.

    Examples:
        >>> old, new = torch.tensor([1.001]), torch.tensor([1.0], dtype=torch.bfloat16)
        >>> state = OptimizerState("torch.optim.sgd.SGD", Leaves(), (), Leaves({"w": old}))
        >>> with_fitting_masters(state, {"w": new}).masters["w"], with_fitting_masters(state, {"w": new + 1}).masters["w"]
        (tensor([1.0010]), tensor([2.]))
    """
    masters = opt_state.masters
    if masters is None:
        return opt_state
    fresh = {
        name: value.detach().float()
        for name, value in params.items()
        if name in masters and not _rounds_to(masters[name], value)
    }
    return attrs.evolve(opt_state, masters=Leaves({**masters, **fresh})) if fresh else opt_state


def _rounds_to(master: torch.Tensor, param: torch.Tensor) -> bool:
    rounded = master.to(device=param.device, dtype=param.dtype)
    return rounded.shape == param.shape and bool(((rounded == param) | (rounded.isnan() & param.isnan())).all())
