"""`on_meta`: builds a model on the meta device, and keeps how each of its tensors is made."""

from collections.abc import Callable
from typing import TypeVar

import torch

from trainfold.adapters.construct.build_recorder import recorded
from trainfold.adapters.construct.recipes import Kind, Recipe, Recipes, tensors_of
from trainfold.core.errors import InvalidArgument
from trainfold.core.state.fqn import RECIPES
from trainfold.core.state.names.wrapper_names import name_in

M = TypeVar("M", bound=torch.nn.Module)
_KINDS: tuple[Kind, ...] = ("parameter", "buffer", "attribute")


def on_meta(build: Callable[[], M], *, prefix: str = "") -> M:
    """Build a model without memory, and keep for each of its tensors how it is made.

    All of the build runs, its init functions too, and nothing is computed: each call that makes or writes a tensor is recorded. `materialize`
    gives the model memory, and `initialize` gives values to what no checkpoint has set. A tensor made from values, such as by ``torch.tensor``,
    has them at once.

    Args:
        build: makes the model; call its init functions inside.
        prefix: the name of this model in the whole one, such as ``"layers.3"``, if the ranks build parts: random numbers belong to the
            whole name.

    Returns:
        What ``build`` returns, with its tensors on the meta device.

    Raises:
        InvalidArgument: if ``build`` does not return a module.
        InvalidState: for a build that looks at random numbers while it draws them.

    Examples:
        >>> model = on_meta(lambda: torch.nn.Linear(2, 1))
        >>> model.weight.device
        device(type='meta')
    """
    with recorded() as recorder:
        module = build()
    if not isinstance(module, torch.nn.Module):
        raise InvalidArgument(
            "construct.on_meta.build", expected="a function that returns a torch.nn.Module", found=type(module).__name__,
            fix="return the model",
        )  # fmt: skip
    tape = recorder.finish()
    named: dict[str, int] = {}
    found: list[tuple[torch.nn.Module, dict[str, Recipe]]] = []
    for kind in _KINDS:
        for path, each in module.named_modules():
            recipes: dict[str, Recipe] = {}
            for key, tensor in tensors_of(each, kind):
                if not tensor.is_meta or not recorder.knows(tensor):
                    continue
                name = ".".join(filter(None, (prefix, name_in(module, f"{path}.{key}" if path else key))))
                recipes[key] = Recipe(tape, recorder.place(tensor), name)
                named[name] = recipes[key].place.storage
            if recipes:
                found.append((each, recipes))
    tape.give_owners(named)
    for each, recipes in found:
        vars(each).setdefault(RECIPES, Recipes()).of.update(recipes)
    return module
