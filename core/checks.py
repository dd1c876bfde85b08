"""Checks of arguments, made before anything is touched: numbers, choices, names, mappings and plain tensors."""

import difflib
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown

_FIXES = {
    "DTensor": "call .full_tensor() on it in forward, on every rank: it is a collective call",
    "AsyncCollectiveTensor": "call .wait() on it in forward",
    "MaskedTensor": "give the elements that count: .get_data()[.get_mask()]",
}
_EXAMPLES = {
    "policy": "{'dtype': 'adapt'}",
    "contract": "{'tokenizer': 'v2'}",
    "reset": "{'rng': 'a new seed on purpose'}",
}


def names_given(components: object) -> tuple[str, ...] | None:
    """Component names, each once, in the order given; None for all, and a text for the one that it names.

    Raises:
        InvalidArgument: for anything else.

    Examples:
        >>> names_given(["model", "rng", "model"]), names_given("model"), names_given(None)
        (('model', 'rng'), ('model',), None)
    """
    if components is None:
        return None
    names = (components,) if isinstance(components, str) else components
    names = tuple(names) if isinstance(names, Iterable) else names
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise InvalidArgument(
            "components",
            expected="names, or None",
            found=shown(components),
            fix="list them, as in ['model', 'trainer']",
        )
    return tuple(dict.fromkeys(names))


def nearest(names: Iterable[str], known: Iterable[str]) -> str:
    """A question for each name that is close to a known one, ready to go before the fix; empty where none is.

    Examples:
        >>> nearest(["modell", "x"], ["model", "optimizer"])
        "did you mean 'model'? "
    """
    known = list(known)
    near = [match for name in names for match in difflib.get_close_matches(name, known, n=1, cutoff=0.7)]
    return f"did you mean {' and '.join(map(repr, dict.fromkeys(near)))}? " if near else ""


def mapping_given(name: str, given: object, *, values: type = object) -> dict[str, Any]:
    """A mapping from text; empty for None.

    Args:
        name: the argument, for the message.
        given: what was given.
        values: what its values have to be.

    Raises:
        InvalidArgument: for anything else.

    Examples:
        >>> mapping_given("reset", None), mapping_given("policy", {"dtype": "adapt"}, values=str)
        ({}, {'dtype': 'adapt'})
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(
        isinstance(key, str) and isinstance(value, values) for key, value in given.items()
    ):
        raise InvalidArgument(
            name,
            expected="a mapping from text" + (" to text" if values is str else ""),
            found=shown(given),
            fix=f"give a dict, as in {name}={_EXAMPLES.get(name, {})}, or None",
        )
    return dict(given)


def real_given(value: object) -> float | None:
    """The float that a real number is, also one of numpy or in a tensor of one element; None for anything else.

    Examples:
        >>> real_given(torch.tensor(0.5)), real_given(np.float32(2)), real_given("1"), real_given(True)
        (0.5, 2.0, None, None)
    """
    if isinstance(value, torch.Tensor | np.ndarray) and value.shape.count(1) == len(value.shape):
        value = value.item()
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else None


def check_plain(where: str, tensor: torch.Tensor) -> None:
    """Refuse DTensors, masked, nested, sparse and wrapped tensors; subclasses that are plain memory, such as parameters, are fine.

    Args:
        where: what it is, for the message.
        tensor: any tensor.

    Raises:
        InvalidArgument: naming the kind of tensor.

    Examples:
        >>> check_plain("loss", torch.nn.Parameter(torch.ones(2)))
        >>> check_plain("loss", torch.eye(2).to_sparse())
        Traceback (most recent call last):
            ...
        trainfold.core.errors.InvalidArgument: loss: expected a tensor that is plain memory, found a tensor with torch.sparse_coo; \
make it a plain tensor in forward, as .to_dense() does
    """
    kind: Any = type(tensor)
    if kind is not torch.Tensor and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        found = kind.__name__
    elif tensor.is_nested:
        found = "a nested tensor"
    elif tensor.layout is not torch.strided:
        found = f"a tensor with {tensor.layout}"
    else:
        return
    fix = _FIXES.get(found, "make it a plain tensor in forward, as .to_dense() does")
    raise InvalidArgument(where, expected="a tensor that is plain memory", found=found, fix=fix)
