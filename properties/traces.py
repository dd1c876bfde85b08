"""Copies what a side effect would change: the global random states, and a module's tensors and modes."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """The global random state of each library, as it is now.

    Examples:
        >>> before = random_states()
        >>> _ = random.random()
        >>> [library for library, now in random_states().items() if now != before[library]]
        ['random']
    """
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - the global one must not move
    return {
        "torch.random": torch.random.get_rng_state().tolist(),
        "numpy.random": _plain(numpy),
        "random": random.getstate(),
    }


def module_facts(module: torch.nn.Module) -> dict[str, Any]:
    """Path -> what must not change: a copy of each parameter, gradient and buffer, each flag.

    Examples:
        >>> module_facts(torch.nn.Dropout().eval())
        {"model.modules[''].training": False}
    """
    found: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        found[f"model.params[{name!r}]"] = parameter.detach().clone()
        found[f"model.params[{name!r}].requires_grad"] = parameter.requires_grad
        gradient = parameter.grad
        found[f"model.params[{name!r}].grad"] = None if gradient is None else gradient.detach().clone()
    for name, buffer in module.named_buffers():
        found[f"model.buffers[{name!r}]"] = buffer.detach().clone()
    for name, child in module.named_modules():
        found[f"model.modules[{name!r}].training"] = child.training
    return found


def _plain(tree_of_arrays: Any) -> Any:
    if isinstance(tree_of_arrays, Mapping):
        return {key: _plain(value) for key, value in tree_of_arrays.items()}
    return tree_of_arrays.tolist() if isinstance(tree_of_arrays, np.ndarray) else tree_of_arrays
