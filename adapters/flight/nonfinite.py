"""`NonFiniteWatch`: finds the first module whose output has a NaN or an infinity, and what its inputs and parameters were."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, final

import attrs
import torch
from torch.nn.modules import module as hooks
from torch.utils.hooks import RemovableHandle

from trainfold.core import tree
from trainfold.core.state.names.wrapper_names import path_in

_MOST: Final = 12


@final
@attrs.frozen
class LeafText:
    """One tensor of what a module got or gave.

    Attributes:
        path: which one, such as ``inputs[0]`` or ``weight``.
        kind: its dtype and shape.
        bad: how many of its elements are a NaN or an infinity.
        largest: the largest absolute value of the others; None if there are none.
    """

    path: str
    kind: str
    bad: int
    largest: float | None

    def __str__(self) -> str:
        largest = "" if self.largest is None else f", {'the others ' if self.bad else ''}up to {self.largest:.4g}"
        return f"{self.path}: {self.kind}, {f'{self.bad} not finite' if self.bad else 'finite'}{largest}"


@final
@attrs.frozen
class NonFiniteOutput:
    """A module whose output has a NaN or an infinity, and whose submodules' outputs have none.

    Attributes:
        module: its name below the outermost module that was called, without wrappers; empty for that one.
        kind: its class.
        outputs: the tensors of its output that are not finite.
        inputs: the tensors that it got.
        tensors: of its own parameters and buffers, those that are not finite.

    Examples:
        >>> layer = torch.nn.Linear(1, 1)
        >>> with watch_nonfinite() as watch:
        ...     _ = torch.nn.Sequential(layer, torch.nn.ReLU())(torch.tensor([[1.0], [float("inf")]]))
        >>> print(watch.found.module, "|", watch.found.inputs[0])
        0 | inputs[0]: float32[2, 1], 1 not finite, the others up to 1
    """

    module: str
    kind: str
    outputs: tuple[LeafText, ...]
    inputs: tuple[LeafText, ...]
    tensors: tuple[LeafText, ...]

    def __str__(self) -> str:
        name = f"{self.module} ({self.kind})" if self.module else f"the whole model ({self.kind})"
        leaves = [*self.outputs, *self.inputs, *self.tensors]
        return "\n".join([f"the first output that is not finite is that of {name}", *(f"  {leaf}" for leaf in leaves)])


@final
class NonFiniteWatch:
    """Looks at each output of each module; the model is not changed. It waits for a GPU at each module, so it is for a replay.

    It sees no module inside of what `torch.compile` has compiled; `uncompiled` lets all of them run as they are written.

    Args:
        seen: called with it when it is found.

    Attributes:
        found: the first such output; None until then.
    """

    def __init__(self, seen: Callable[[NonFiniteOutput], object] | None = None) -> None:
        self.found: NonFiniteOutput | None = None
        self._seen = seen
        self._called: dict[int, weakref.ref[torch.nn.Module]] = {}

    def begin(self, module: torch.nn.Module, inputs: Any) -> None:
        """A forward hook: note that a module was called. A part of it may be called again alone, as a checkpoint of activations does."""
        del inputs
        if not torch.compiler.is_compiling():
            self._called[id(module)] = weakref.ref(module)

    def look(self, module: torch.nn.Module, inputs: Any, named: Mapping[str, Any], output: Any) -> None:
        """A forward hook: look at an output."""
        if torch.compiler.is_compiling() or self.found is not None:
            return
        outputs = [leaf for leaf in _leaves("output", output) if leaf.bad]
        if outputs:
            given = [*_leaves("inputs", tuple(inputs)), *(leaf for name, each in named.items() for leaf in _leaves(name, each))]  # fmt: skip
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            broken = [leaf for name, each in own for leaf in _leaves(name, each) if leaf.bad]
            called = (each for ref in self._called.values() if (each := ref()) is not None)
            around = [each for each in called if any(inner is module for inner in each.modules())]
            outermost = max(around, key=lambda each: sum(1 for _ in each.modules()), default=module)
            name = next((name for name, each in outermost.named_modules() if each is module), "")
            self.found = NonFiniteOutput(path_in(outermost, name), type(module).__qualname__, *(tuple(each[:_MOST]) for each in (outputs, given, broken)))  # fmt: skip
            if self._seen is not None:
                self._seen(self.found)

    def install(self) -> list[RemovableHandle]:
        """Look at every module from here on, until the handles are removed."""
        return [
            hooks.register_module_forward_pre_hook(self.begin),
            hooks.register_module_forward_hook(self.look, with_kwargs=True),
        ]


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Run what `torch.compile` was asked to compile as it is written, from here on, or to the end of the block."""
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextlib.contextmanager
def watch_nonfinite() -> Iterator[NonFiniteWatch]:
    """Watch every module that is called in a block."""
    watch = NonFiniteWatch()
    handles = watch.install()
    try:
        with uncompiled():
            yield watch
    finally:
        for handle in handles:
            handle.remove()
            # torch 2.13 forgets to, and warns of hooks at each compilation from then on
            hooks._global_forward_hooks_with_kwargs.pop(handle.id, None)  # noqa: SLF001


def _leaves(name: str, value: Any) -> list[LeafText]:
    return [_text(path, leaf) for path, leaf in tree.named_leaves(value, name) if _is_floating(leaf)]


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _text(path: str, leaf: torch.Tensor) -> LeafText:
    leaf = leaf.detach()
    finite = torch.isfinite(leaf)
    bad = leaf.numel() - int(finite.sum())
    others = leaf[finite].abs()
    largest = float(others.max()) if others.numel() else None
    return LeafText(path, f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}", bad, largest)
