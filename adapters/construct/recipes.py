"""`Recipe`: how the initial value of a tensor is made, kept beside the modules and never in a tensor or a checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, final

import attrs
import torch

from trainfold.adapters.construct.tape import EMPTY, Place, RecordedCall, Tape
from trainfold.core.state.fqn import RECIPES
from trainfold.core.state.names.wrapper_names import name_in

Kind = Literal["parameter", "buffer", "attribute"]


@final
@attrs.frozen(eq=False)
class Recipe:
    """How a tensor's initial value is made.

    Attributes:
        tape: of the build.
        place: of the tensor on it.
        name: the FQN that the tensor had in the build.
    """

    tape: Tape
    place: Place
    name: str

    def calls(self) -> list[RecordedCall]:
        """The calls that make it, in their order."""
        return self.tape.calls_for(self.place.storage)

    @property
    def draws(self) -> bool:
        """Whether the value depends on random numbers."""
        return any(each.draws for each in self.calls())

    @property
    def is_known(self) -> bool:
        """Whether any call gives it a value."""
        return 0 in self.place.shape or any(each.function not in EMPTY for each in self.calls())

    @property
    def tie(self) -> tuple[int, Place]:
        """Equal for tensors that were one tensor in the build."""
        return id(self.tape), self.place


@final
class Recipes:
    """The recipes of a module's own tensors, by attribute. A deep copy of the module shares them; a pickle of it has none."""

    __slots__ = ("of",)

    def __init__(self, of: Mapping[str, Recipe] | None = None) -> None:
        self.of = dict(of or {})

    def __repr__(self) -> str:
        """How many there are."""
        return f"<{len(self.of)} recipes>"

    def __deepcopy__(self, memo: Any) -> "Recipes":
        """The same recipes: they never change."""
        return self

    def __reduce__(self) -> tuple[type["Recipes"], tuple[()]]:
        """None of them: they are of this process."""
        return Recipes, ()


@final
@attrs.frozen(eq=False)
class Slot:
    """A place of a tensor in a module.

    Attributes:
        owner: the module.
        key: the attribute.
        name: the FQN in the build if it has a recipe, else in the module that was passed.
        tensor: what is there now.
        kind: of the attribute.
        is_persistent: whether a checkpoint has it.
        recipe: None if nothing was recorded for it.
    """

    owner: torch.nn.Module
    key: str
    name: str
    tensor: torch.Tensor
    kind: Kind
    is_persistent: bool
    recipe: Recipe | None


def slots_of(modules: Sequence[torch.nn.Module]) -> Iterator[Slot]:
    """Yield each tensor of the modules, once for each module that has it; parameters come first."""
    kinds: tuple[Kind, ...] = ("parameter", "buffer", "attribute")
    for kind in kinds:
        for root in modules:
            for path, module in root.named_modules():
                recipes = getattr(vars(module).get(RECIPES), "of", {})
                for key, tensor in tensors_of(module, kind):
                    name = name_in(root, f"{path}.{key}" if path else key)
                    recipe = recipes.get(key)
                    if kind == "attribute" and recipe is None:
                        continue
                    if recipe is not None and recipe.place.shape != tuple(tensor.shape):
                        recipe = None  # another tensor was put in its place
                    persistent = kind == "parameter" or (
                        kind == "buffer" and key not in module._non_persistent_buffers_set  # noqa: SLF001  # torch has no public name for it
                    )
                    found = name if recipe is None else recipe.name
                    yield Slot(module, key, found, tensor, kind, persistent, recipe)


def tensors_of(module: torch.nn.Module, kind: Kind) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that a module itself holds: parameters, buffers, or plain attributes."""
    if kind == "parameter":
        found: Any = module._parameters  # noqa: SLF001  # named_parameters leaves out ties
    else:
        found = module._buffers if kind == "buffer" else vars(module)  # noqa: SLF001  # as above
    return [(key, value) for key, value in found.items() if isinstance(value, torch.Tensor)]


def modules_given(modules: Any) -> list[torch.nn.Module]:
    """Return one module, or several, as a list; a pipeline stage counts as its module."""
    given = list(modules) if isinstance(modules, list | tuple) else [modules]
    return [each if isinstance(each, torch.nn.Module) else each.submod for each in given]
