"""`NonFiniteWatch`: finds the first module whose output has a NaN or an infinity, and what its inputs and parameters were."""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, final

import attrs
import torch
from torch.nn.modules import module as hooks
from torch.utils.hooks import RemovableHandle

from trainfold.adapters.flight.broken_leaves import BrokenLeaves
from trainfold.adapters.flight.leaf_text import LeafText, looked_at
from trainfold.core.state.names.wrapper_names import path_in

_LOG: Final = logging.getLogger("trainfold")
_MOST: Final = 12
_MOST_OUTPUTS: Final = 1000


@final
@attrs.frozen
class NonFiniteOutput:
    """A module whose output has a NaN or an infinity.

    Attributes:
        module: its name in what is attached, without wrappers, after its component if that is not the model; else below the outermost module that was
            called. Empty for the whole model, and for one that is called by itself, such as a loss.
        kind: its class.
        outputs: the tensors of its output that are not finite.
        inputs: the tensors that it got.
        tensors: of its own parameters and buffers, those that are not finite.

    Examples:
        >>> layer = torch.nn.Linear(1, 1)
        >>> with watch_nonfinite() as watch:
        ...     _ = torch.nn.Sequential(layer, torch.nn.ReLU())(torch.tensor([[1.0], [float("inf")]]))
        >>> print(watch.found.module, "|", watch.found.inputs[0])
        0 | inputs[0]: float32[2, 1], 1 not finite (inf), the others up to 1
    """

    module: str
    kind: str
    outputs: tuple[LeafText, ...]
    inputs: tuple[LeafText, ...]
    tensors: tuple[LeafText, ...]

    def __str__(self) -> str:
        name = f"{self.module} ({self.kind})" if self.module else f"{self.kind}, which the program itself calls"
        leaves = [*self.outputs, *self.inputs, *self.tensors]
        return "\n".join([f"the first output that is not finite is that of {name}", *(f"  {leaf}" for leaf in leaves)])


@final
@attrs.frozen
class _Seen:
    """An output that is not finite, the module that gave it, whether all that it got was finite, and whether a trainable parameter of its own was not."""

    output: NonFiniteOutput
    module: torch.nn.Module
    of_finite: bool
    is_broken: bool
    with_grad: bool

    @property
    def what(self) -> frozenset[str]:
        return frozenset(each for leaf in self.output.outputs for each in leaf.what)


@final
class NonFiniteWatch:
    """Looks at each output of each module, and changes and ends nothing. It waits for a GPU at each module, so it is for a replay.

    An infinity may be by design, as in a mask or in the scores of a router. So what is not finite is kept, in order, until its step has ended: then either it is `found`, or it
    was `harmless`, and the same of the same module is no longer kept.

    It sees no module inside of what `torch.compile` has compiled; `uncompiled` lets all of them run as they are written.

    Attributes:
        missed: what could not be looked at, in words.
        attached: component -> what is attached, to name modules by.
        is_looking: whether outputs are looked at.
        is_first_step: whether no step has ended yet, so that nothing shows which infinities are by design.
        on_kept: called after an output was kept.
    """

    def __init__(self) -> None:
        self.on_kept: Callable[[], None] = lambda: None
        self.missed: list[str] = []
        self.attached: Mapping[str, Any] = {}
        self.is_looking = True
        self.is_first_step = True
        self._kept: list[_Seen] = []
        self._known: dict[torch.nn.Module, frozenset[str]] = {}
        self._harmless: weakref.WeakKeyDictionary[torch.nn.Module, set[frozenset[str]]] = weakref.WeakKeyDictionary()
        self._called: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._leaves = BrokenLeaves()

    @property
    def found(self) -> NonFiniteOutput | None:
        """The first output that is not finite; None if all were."""
        return None if (first := self._first()) is None else first.output

    @property
    def is_broken(self) -> bool:
        """Whether the module of that output has a trainable parameter that was not finite before it."""
        return (first := self._first()) is not None and first.is_broken

    @property
    def has_nan(self) -> bool:
        """Whether one of what is kept has a NaN, and not infinities alone."""
        return any("nan" in each.what for each in self._kept)

    @property
    def is_trained(self) -> bool:
        """Whether one of what is kept was seen where gradients are."""
        return any(each.with_grad for each in self._kept)

    @property
    def known(self) -> list[str]:
        """The modules whose output is not finite in this step, and was the same in a step that went well, in words."""
        return [f"{self._name(each) or type(each).__qualname__} ({', '.join(sorted(what))})" for each, what in self._known.items()]  # fmt: skip

    @property
    def has_known_nan(self) -> bool:
        """Whether one of these has a NaN."""
        return any("nan" in what for what in self._known.values())

    def harmless(self) -> None:
        """Take what is kept as by design, since the step went well."""
        for each in self._kept:
            self._harmless.setdefault(each.module, set()).add(each.what)
        self.is_first_step = False
        self._kept.clear()
        self._known.clear()

    def attach(self, objects: Mapping[str, Any]) -> None:
        """Name modules as these, and take their parameters for all that is trained: a module may be used without a call, as by its `forward`."""
        self.attached = objects
        for module in self._trained():
            self._note(module)

    def broken(self) -> list[LeafText]:
        """The trainable parameters that are not finite, of what is attached, else of modules that were called. One that was so from the start is not at fault."""
        return self._named(self._leaves.parameters)

    def broken_buffers(self) -> list[LeafText]:
        """The buffers of the same modules that have become a NaN, and are saved."""
        return self._named(self._leaves.buffers)

    def _named(self, leaves: Callable[[torch.nn.Module], list[LeafText]]) -> list[LeafText]:
        return [
            attrs.evolve(leaf, path=".".join(filter(None, (self._name(module), leaf.path))))
            for module in self._trained() or self._modules()
            for leaf in leaves(module)
        ]

    def _trained(self) -> list[torch.nn.Module]:
        roots = [each for each in self.attached.values() if isinstance(each, torch.nn.Module)]
        return [*dict.fromkeys(module for root in roots for module in root.modules())]

    def begin(self, module: torch.nn.Module, inputs: Any) -> None:
        """A forward hook: note that a module was called. A part of it may be called again alone, as a checkpoint of activations does."""
        del inputs
        if torch.compiler.is_compiling():
            return
        self._called[id(module)] = weakref.ref(module)
        self._note(module)

    def _note(self, module: torch.nn.Module) -> None:
        if not _is_captured():
            self._leaves.note(module)

    def look(self, module: torch.nn.Module, inputs: Any, named: Mapping[str, Any], output: Any) -> None:
        """A forward hook: look at an output."""
        if not self.is_looking or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:  # noqa: SLF001
            return
        try:
            if _is_captured():
                self._miss(module, "output: it goes into a CUDA graph")  # to wait for it would end the capture
            else:
                self._look(module, inputs, named, output)
        except Exception as error:  # noqa: BLE001 - whatever a class of the program raises: a watch ends no program
            self._miss(module, f"output: {type(error).__name__}: {error}")

    def _look(self, module: torch.nn.Module, inputs: Any, named: Mapping[str, Any], output: Any) -> None:
        outputs = [leaf for leaf in looked_at("output", output, lambda text: self._miss(module, text)) if leaf.bad]
        what = frozenset(each for leaf in outputs for each in leaf.what)
        if outputs and what in self._harmless.get(module, ()):
            self._known[module] = what
            return
        is_kept = any(each.module is module and each.what == what for each in self._kept)
        if not outputs or is_kept or len(self._kept) >= _MOST_OUTPUTS:
            return
        values = [("inputs", tuple(inputs)), *named.items()]
        given = [leaf for name, each in values for leaf in looked_at(name, each, lambda _: None)]
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        broken = [leaf for name, each in own for leaf in looked_at(name, each, lambda _: None) if leaf.bad]
        seen = NonFiniteOutput(self._name(module), type(module).__qualname__, *(tuple(each[:_MOST]) for each in (outputs, given, broken)))  # fmt: skip
        of_finite = not any(leaf.bad for leaf in given)
        if of_finite and "nan" in what:
            self._leaves.used(module)
        self._kept.append(_Seen(seen, module, of_finite, bool(self._leaves.parameters(module)), torch.is_grad_enabled()))  # fmt: skip
        self.on_kept()

    def _first(self) -> _Seen | None:
        """The first one may have infinities by design. So if it has no NaN, and a later module made one of finite inputs and parameters, it is the first one in that."""
        if self._kept and "nan" not in self._kept[0].what:
            for each in self._kept:
                if each.of_finite and not each.is_broken and "nan" in each.what:
                    inside = set(each.module.modules())
                    return next(one for one in self._kept if one.module in inside)
        return self._kept[0] if self._kept else None

    def _name(self, module: torch.nn.Module) -> str:
        for component, root in self.attached.items():
            paths = root.named_modules() if isinstance(root, torch.nn.Module) else ()
            path = next((name for name, each in paths if each is module), None)
            if path is not None:
                return ".".join(filter(None, (component if component != "model" else "", path_in(root, path))))
        around = [each for each in self._modules() if any(inner is module for inner in each.modules())]
        outermost = max(around, key=lambda each: sum(1 for _ in each.modules()), default=module)
        return path_in(outermost, next((name for name, each in outermost.named_modules() if each is module), ""))

    def _modules(self) -> list[torch.nn.Module]:
        return [each for ref in [*self._called.values()] if (each := ref()) is not None]

    def _miss(self, module: torch.nn.Module, text: str) -> None:
        said = f"not looked at: of {type(module).__qualname__}, {' '.join(text.split())}"
        if said not in self.missed and len(self.missed) < _MOST:
            self.missed.append(said)
            _LOG.warning("%s", said)

    def install(self) -> list[RemovableHandle]:
        """Look at every module from here on, until the handles are removed."""
        return [
            hooks.register_module_forward_pre_hook(self.begin),
            hooks.register_module_forward_hook(self.look, with_kwargs=True),
        ]


def _is_captured() -> bool:
    """Whether operations go into a CUDA graph, which a look at their values would end."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


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
