"""`LeafText`: what is said of a tensor that a module got or gave; and all tensors in a value of any class."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, final

import attrs
import torch
from torch.utils._python_dispatch import _disable_current_modes

from trainfold.core.leaf_path import join

_functorch: Any = torch._C._functorch  # noqa: SLF001 - vmap and grad give their tensors no public way to what they wrap
_NO_NODES: Final = (str, bytes, int, float, complex, type(None), type, ModuleType, FunctionType, MethodType, torch.nn.Module)  # fmt: skip
_MOST_NODES: Final = 10_000


@final
@attrs.frozen
class LeafText:
    """One tensor of what a module got or gave.

    Attributes:
        path: which one, such as ``inputs[0]`` or ``weight``.
        kind: its dtype and shape.
        bad: how many of its elements are a NaN or an infinity.
        largest: the largest absolute value of the others; None if there are none.
        what: of ``nan``, ``inf`` and ``-inf`` those that it has.
    """

    path: str
    kind: str
    bad: int
    largest: float | None
    what: tuple[str, ...] = ()

    def __str__(self) -> str:
        largest = "" if self.largest is None else f", {'the others ' if self.bad else ''}up to {self.largest:.4g}"
        what = f" ({', '.join(self.what)})" if self.what else ""
        bad = f"{self.bad} not finite{what}" if self.bad else "finite"
        return f"{self.path}: {self.kind}, {bad}{largest}"


def looked_at(name: str, value: Any, missed: Callable[[str], object]) -> list[LeafText]:
    """Look at each tensor of floating point in a value.

    Args:
        name: of the value.
        value: a tensor, or containers, dataclasses and objects of any class that have some.
        missed: called with the reason for each tensor that cannot be looked at.

    Examples:
        >>> print(*looked_at("x", {"a": [torch.tensor([1.0, float("nan")])], "b": torch.tensor(1)}, print))
        x['a'][0]: float32[2], 1 not finite (nan), the others up to 1
    """
    found = []
    for path, leaf in tensors_in(name, value, missed):
        try:
            text = _text(path, leaf)
        except Exception as error:  # noqa: BLE001 - whatever its class raises
            missed(f"{path}, {type(leaf).__qualname__}: {_short(error)}")
        else:
            found += [] if text is None else [text]
    return found


def tensors_in(name: str, value: Any, missed: Callable[[str], object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor in a value, with its path. No iterator is drawn from; modules are left out.

    Args:
        name: of the value.
        value: anything.
        missed: called with the reason for what cannot be looked into.
    """
    met: dict[int, Any] = {}  # holds them, so that no other object gets the same id
    waiting = [(name, value)]
    while waiting:
        path, each = waiting.pop()
        if isinstance(each, torch.Tensor):
            yield path, each
        elif not isinstance(each, _NO_NODES) and id(each) not in met:
            if len(met) >= _MOST_NODES:
                missed(f"{name}: only the first {_MOST_NODES} objects of it")
                return
            met[id(each)] = each
            try:
                waiting += [(join(path, type(each), entry), part) for entry, part in [*_parts(each)][::-1]]
            except Exception as error:  # noqa: BLE001 - whatever its class raises
                missed(f"{path}, {type(each).__qualname__}: {_short(error)}")


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=False)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from enumerate(value)
    else:
        yield from getattr(value, "__dict__", {}).items()
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name != "__weakref__" and hasattr(value, name):
                    yield name, getattr(value, name)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _text(path: str, leaf: torch.Tensor) -> LeafText | None:
    """None for a tensor of integers, and for one that has no values, as on meta."""
    with contextlib.ExitStack() as aside:  # nothing of the program sees this: no mode, no transform of torch.func
        aside.enter_context(torch.no_grad())
        aside.enter_context(_disable_current_modes())
        while _functorch.is_functorch_wrapped_tensor(leaf):
            leaf = _functorch.get_unwrapped(leaf)
        if _functorch.peek_interpreter_stack() is not None:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            aside.enter_context(temporarily_clear_interpreter_stack())
        if not (leaf.is_floating_point() or leaf.is_complex()):
            return None
        shape = "" if leaf.is_nested else str(list(leaf.shape))
        kind = f"{'nested ' if leaf.is_nested else ''}{str(leaf.dtype).removeprefix('torch.')}{shape}"
        values = _values(leaf)
        return None if values is None else _counted(path, kind, values)


def _values(leaf: torch.Tensor) -> torch.Tensor | None:
    """The values of this process as a plain tensor; None if it has none."""
    leaf = leaf.detach()
    if leaf.is_meta or _is_fake(leaf):
        return None
    local = getattr(
        leaf, "to_local", None
    )  # a part of a tensor over a mesh: a number of the whole would be a collective
    if local is not None:
        return _values(local())
    if leaf.is_nested or leaf.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return _values(leaf.values())
    if leaf.layout is torch.sparse_coo:
        return _values(leaf._values())  # noqa: SLF001 - of one that is not coalesced, too
    if leaf.layout is not torch.strided:
        return _values(leaf.to_dense())
    return leaf.float() if leaf.dtype.itemsize == 1 else leaf  # float8 has few operations, and a wrong isfinite


def _is_fake(leaf: torch.Tensor) -> bool:
    if type(leaf) in (torch.Tensor, torch.nn.Parameter):
        return False
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(leaf, FakeTensor)


def _counted(path: str, kind: str, values: torch.Tensor) -> LeafText:
    finite = torch.isfinite(values)
    bad = values.numel() - int(finite.sum())
    others = (values[finite] if bad else values).abs()
    largest = float(others.max()) if others.numel() else None
    return LeafText(path, kind, bad, largest, _what(values) if bad else ())


def _what(values: torch.Tensor) -> tuple[str, ...]:
    if values.is_complex():
        return _what(torch.view_as_real(values))
    has = (torch.isnan(values), torch.isposinf(values), torch.isneginf(values))
    return tuple(name for name, each in zip(("nan", "inf", "-inf"), has, strict=True) if bool(each.any()))
