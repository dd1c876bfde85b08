"""`Hooks`: the hooks that a user registered on parameters, such as a mask of a gradient, for a template of the model."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import attrs
import torch

from trainfold.core.errors import InvalidArgument
from trainfold.core.printable import with_article

Hook = Callable[..., Any]


@final
@attrs.frozen
class Hooks:
    """The hooks of one parameter; torch copies a parameter without its hooks.

    Attributes:
        on_grad: hooks that receive each gradient and may return another.
        after_grad: hooks that receive the parameter once its gradient is accumulated.
    """

    on_grad: tuple[Hook, ...] = ()
    after_grad: tuple[Hook, ...] = ()

    def register(self, param: torch.nn.Parameter) -> None:
        """Register the hooks on another parameter."""
        for hook in self.on_grad:
            param.register_hook(hook)  # type: ignore[no-untyped-call]
        for hook in self.after_grad:
            param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def hooks_of(params: Mapping[str, torch.nn.Parameter]) -> dict[str, Hooks]:
    """Return FQN -> hooks for each trained parameter that has hooks.

    Args:
        params: FQN -> parameter of the user's model.

    Examples:
        >>> linear = torch.nn.Linear(2, 1)
        >>> _ = linear.weight.register_hook(lambda grad: grad * 0)
        >>> {name: len(hooks.on_grad) for name, hooks in hooks_of(dict(linear.named_parameters())).items()}
        {'weight': 1}
    """
    found: dict[str, Hooks] = {}
    for name, param in params.items():
        hooks = Hooks(
            tuple((param._backward_hooks or {}).values()),  # noqa: SLF001 (torch has no other list of them)
            tuple((param._post_accumulate_grad_hooks or {}).values()),  # noqa: SLF001
        )
        if param.requires_grad and (hooks.on_grad or hooks.after_grad):
            found[name] = hooks
    return found


def check_hooks(hooks: Mapping[str, Hooks], *, alone: bool) -> None:
    """Check that hooks have the same effect in a step as in a hand-written loop.

    A window of several microbatches or ranks adds up the gradients of sums and divides once, at its end. A hook would
    receive the gradient of a sum, for which only a linear hook has the same effect. A hook that holds a parameter or a
    module would read the user's model, which does not change, instead of the state.

    Args:
        hooks: FQN -> hooks.
        alone: whether a step is one microbatch on one rank.

    Raises:
        InvalidArgument: naming the parameter.
    """
    for name, of_one in hooks.items():
        for hook in (*of_one.on_grad, *of_one.after_grad):
            _check_apart(name, hook)
    if hooks and not alone:
        raise InvalidArgument(
            f"model: the hooks of {next(iter(hooks))}",
            expected="no hooks in a step of several microbatches or ranks",
            found="a hook on a gradient, which is divided by the weight of the whole step only after the last microbatch",
            fix="train with accumulate=1 on one rank, or move the hook into the model, as a parametrization or a mask in forward",
        )


def _check_apart(name: str, hook: Hook) -> None:
    held = next((value for value in _held(hook) if isinstance(value, torch.nn.Parameter | torch.nn.Module)), None)
    if held is not None:
        raise InvalidArgument(
            f"model: a hook of {name}",
            expected="a function of the gradient, or of the parameter that it receives",
            found=f"a function that holds {with_article(type(held).__name__)}, whose values are not those of the state",
            fix="use register_post_accumulate_grad_hook, whose function receives the parameter with its gradient",
        )


def _held(hook: Any) -> Iterator[Any]:
    """The values that a function holds: its closure, its defaults, the object of a bound method."""
    if isinstance(hook, functools.partial):
        yield from (*hook.args, *hook.keywords.values())
        yield from _held(hook.func)
        return
    for cell in getattr(hook, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name without a value yet
            continue
    yield from getattr(hook, "__defaults__", None) or ()
    yield getattr(hook, "__self__", None)
