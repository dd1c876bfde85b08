"""`Metric`, the protocol of a metric, and `metric_text`, which writes a metric as text so that ranks and checkpoints can compare it."""

import enum
import functools
import re
import types
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from trainfold.core.digest import digest_of
from trainfold.core.tensor_memory import tensor_bytes

__all__ = ["Metric", "metric_text", "public_text"]

_PLAIN = (str, bytes, int, float, complex, Fraction, type(None), torch.dtype, torch.Size, enum.Enum)
_DEPTH = 8
_MODULE = re.compile(r"\btrainfold\.core\.metrics\.\w+\.(?=[A-Z])")


@runtime_checkable
class Metric(Protocol):
    """A measurement that does not depend on batch size, order or number of ranks. Any object with these methods is one.

    A metric is a commutative monoid: a value without state of its own, whose observations are kept in accumulators. The leaves
    of an accumulator are all int64 tensors, so they can be added up over ranks, saved in a checkpoint and compared to the bit.
    A leaf named ``special``, int64[..., 3], counts the terms that were NaN, infinity, minus infinity; an evaluation reports them.

    A class attribute ``additive = True`` promises more: accumulators have the structure of ``zero()``; their leaves can be
    added up as integers, the shorter ones padded with zeros at the end of each dimension; and ``merge(zero(), sum)`` equals
    merging them one by one. Then ranks need one all-reduce. Otherwise accumulators are gathered and merged.

    Laws, which `trainfold.properties.contracts.check_metric` checks for your own metric: ``merge`` is commutative and
    associative and ``zero()`` is its neutral element, all to the bit; observing a batch equals observing its parts and merging;
    no argument is changed; the result is None if nothing counted; and a NaN that changed something shows, in the result or
    in ``special``.
    """

    def zero(self) -> Any:
        """The empty accumulator; its ``result`` is None."""
        ...

    def observe(self, acc: Any, /, *outputs: Any, **named: Any) -> Any:
        """The accumulator with one more batch; outputs are numbers, or tensors on any device, which this must not wait for."""
        ...

    def merge(self, one: Any, other: Any, /) -> Any:
        """The accumulator of both, on the CPU: this may wait for a device."""
        ...

    def result(self, acc: Any, /) -> Any:
        """The number, or a list or dict of numbers, rounded once; None if nothing was seen or a denominator is 0."""
        ...


def metric_text(value: Any, depth: int = _DEPTH) -> str:
    """A metric, or one of its fields, as text that is the same in every process.

    It has kinds, fields and their values; no addresses, no devices and no order of a set.

    Examples:
        >>> from trainfold.metrics import TopK
        >>> metric_text(TopK(5))
        'trainfold.metrics.TopK(ignore_index=-100, k=5)'
        >>> metric_text({"b": frozenset({2, 1}), "a": max})
        "{'a': builtins.max, 'b': frozenset(1, 2)}"
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, torch.device):
        return f"device({value.type})"  # the index differs from rank to rank
    if isinstance(value, _PLAIN):
        return repr(value)
    name = public_text(f"{type(value).__module__}.{type(value).__qualname__}")
    if depth == 0:
        return name
    inner = functools.partial(metric_text, depth=depth - 1)
    if isinstance(value, torch.Tensor | np.ndarray):
        return _of_array(value, inner)
    if isinstance(value, Mapping):
        text = "{" + ", ".join(sorted(f"{inner(key)}: {inner(item)}" for key, item in value.items())) + "}"
    elif isinstance(value, list | tuple | set | frozenset):
        items = list(map(inner, value)) if isinstance(value, list | tuple) else sorted(map(inner, value))
        text = f"{type(value).__name__}({', '.join(items)})"
    elif isinstance(value, functools.partial):
        text = f"partial({inner(value.func)}, {inner(value.args)}, {inner(value.keywords)})"
    elif hasattr(value, "__qualname__"):
        held = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        of = getattr(value, "__self__", None)
        held += [] if of is None or isinstance(of, types.ModuleType) else [of]
        text = f"{value.__module__}.{value.__qualname__}" + (f"[{', '.join(map(inner, held))}]" if held else "")
    else:
        fields = sorted(f"{field}={inner(each)}" for field, each in _fields(value).items())
        text = f"{name}({', '.join(fields)})"
    return text


def public_text(text: str) -> str:
    """The text of a metric under the public names of trainfold's classes: older tallies name the module that a class lay in.

    Examples:
        >>> public_text("trainfold.core.metrics.topk.TopK(k=5)")
        'trainfold.metrics.TopK(k=5)'
    """
    return _MODULE.sub("trainfold.metrics.", text)


def _of_array(value: Any, inner: Any) -> str:
    tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" else value
    if not isinstance(tensor, torch.Tensor):
        return f"array{inner(value.tolist())}"
    return f"{tensor.dtype}{list(tensor.shape)} {digest_of(tensor_bytes(tensor.detach()))}"


def _fields(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots included, sorted by name."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        for name, member in vars(kind).items():
            if type(member) is types.MemberDescriptorType and hasattr(value, name):
                found[name] = getattr(value, name)
    return {name: each for name, each in sorted(found.items()) if name != "__weakref__"}
