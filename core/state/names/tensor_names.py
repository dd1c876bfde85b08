"""The name of a tensor in its leaf path: `weight_name` is the one that a program gave it, and `storage_key` the one that it has in a safetensors file."""

import ast
import re
from typing import Final

_PARAMS: Final = "model.params['"
_BUFFERS: Final = "model.buffers['"
_END: Final = "']"
_PATH: Final = re.compile(r"^\w+(?:\.(?:params|buffers))?\[(?P<name>(['\"]).*\2)\]$")


def weight_name(path: str) -> str | None:
    """The name that a tensor with this leaf path was saved under; None if it is not at the top of its component.

    Examples:
        >>> weight_name("model.params['h.0.weight']"), weight_name("ema['w']"), weight_name("optimizer.slots['w']['step']")
        ('h.0.weight', 'w', None)
    """
    if (
        path.startswith(_PARAMS) and path.endswith(_END) and "\\" not in path
    ):  # nearly all; repr quotes so unless there is a quote inside
        return path[len(_PARAMS) : -len(_END)]
    match = _PATH.match(path)
    if match is None:
        return None
    quoted = match["name"]
    return str(ast.literal_eval(quoted)) if "\\" in quoted else quoted[1:-1]


def param_name(path: str) -> str | None:
    """The name of a parameter of the model; None for any other leaf path.

    Examples:
        >>> param_name("model.params['w']"), param_name("model.buffers['w']")
        ('w', None)
    """
    return weight_name(path) if path.startswith(_PARAMS[:-1]) else None


def storage_key(path: str) -> str:
    """The name of a tensor inside its safetensors file: the FQN for the model, else the leaf path. A name that the path escapes stays escaped, or is the path.

    Examples:
        >>> storage_key("model.params['h.0.weight']"), storage_key("optimizer.slots['w']['step']")
        ('h.0.weight', "optimizer.slots['w']['step']")
    """
    if not path.startswith("model."):  # most of them
        return path
    for prefix in (_PARAMS, _BUFFERS):
        if path.startswith(prefix) and path.endswith(_END):
            return path[len(prefix) : -len(_END)]
    return path
