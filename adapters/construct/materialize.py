"""`materialize`: gives a model on the meta device memory on a device, which says of every tensor that it has no value yet."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trainfold.adapters.construct.recipes import Slot, modules_given, slots_of
from trainfold.adapters.construct.replay import value_of
from trainfold.adapters.sharded.dtensor import is_dtensor, local_part
from trainfold.core.errors import InvalidState
from trainfold.core.tensor_memory import fill_unset

Modules = torch.nn.Module | Sequence[Any]


def materialize(modules: Modules, device: torch.device | str) -> None:
    """Give the tensors of a model on the meta device memory, each rank its own part; no random number is used, and no tensor is made whole.

    Parameters stay the same objects, so an optimizer may have been made from them, and tied tensors stay tied. What a checkpoint does not
    have, such as a table of rotary embeddings, and what is not a float, such as a count of batches, gets its value now, unless it is random.
    Every other element is a NaN of its own kind, until a load or `initialize` sets it: a run that forgets both cannot be saved.

    Args:
        modules: what `on_meta` returned, as a whole, as parts of it, or sharded; or the stages of a pipeline.
        device: where the memory is, such as ``"cuda"``.

    Raises:
        InvalidState: naming every tensor that no checkpoint has and of which nothing says how it is made; then nothing has changed. Or naming a parameter
            of which the build has computed something with gradients; then build it again.

    Examples:
        >>> from trainfold.construct import initialize, on_meta
        >>> model = on_meta(lambda: torch.nn.BatchNorm1d(2))
        >>> materialize(model, "cpu")
        >>> model.weight, model.num_batches_tracked
        (Parameter containing:
        tensor([nan, nan], requires_grad=True), tensor(0))
        >>> initialize(model, seed=0)
        ('weight', 'bias', 'running_mean', 'running_var')
    """
    roots, place = modules_given(modules), torch.device(device)
    slots = [slot for slot in slots_of(roots) if slot.tensor.is_meta]
    _check_recipes(slots)
    memory = _Memory(place)
    _apply(roots, memory.of)
    for slot in slots:
        if slot.kind == "attribute":
            setattr(slot.owner, slot.key, memory.of(slot.tensor))
    _set_now(slots, memory.of)


class _Memory:
    """New memory for tensors on meta: the same for the same, and one storage where they had one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the old one, so that no id comes twice
        self._storages: dict[int, tuple[Any, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with memory; one that has values is moved to the device."""
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = (tensor, self._made(tensor))
        return self._tensors[id(tensor)][1]

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            is_there = is_dtensor(tensor) or tensor.device.type == self._device.type
            return tensor if is_there else tensor.to(self._device)
        if is_dtensor(tensor):
            made = torch.empty_like(tensor, device=self._device)
            fill_unset(local_part(made).untyped_storage(), made.dtype)
            return made
        storage = tensor.untyped_storage()
        address = storage._cdata  # noqa: SLF001  # there is no public identity of a storage without memory
        if address not in self._storages:
            memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device=self._device)
            fill_unset(memory.untyped_storage(), tensor.dtype)
            self._storages[address] = (storage, memory)
        memory = self._storages[address][1]
        made = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return made.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _check_recipes(slots: Sequence[Slot]) -> None:
    lost = [slot.name for slot in slots if not slot.is_persistent and not is_known(slot)]
    if lost:
        raise no_recipe(lost, "no checkpoint has them")


def is_known(slot: Slot) -> bool:
    """Whether something says how the initial value of a tensor is made."""
    return slot.recipe is not None and slot.recipe.is_known


def no_recipe(names: Sequence[str], why: str) -> InvalidState:
    """Return the error for tensors that nothing can give a value.

    Args:
        names: of them.
        why: they need one, in words.
    """
    return InvalidState(
        "construct",
        expected="a way to make the value of each tensor",
        found=f"none for {', '.join(map(repr, names))}: {why}",
        fix="make these tensors, and give them values, inside the function that on_meta calls, not by torch.device('meta') nor afterwards",
    )


def _apply(roots: Sequence[torch.nn.Module], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change every tensor of modules; a parameter that was on meta stays the same object, with its attributes."""
    kept = {parameter: dict(vars(parameter)) for root in roots for parameter in root.parameters() if parameter.is_meta}
    with _parameters_stay(), torch.no_grad():
        for root in roots:
            if any(each.is_meta for each in (*root.parameters(), *root.buffers())):
                try:
                    root._apply(change)  # type: ignore[no-untyped-call] # noqa: SLF001  # FSDP2 overrides it, to see the memory of its parts
                except RuntimeError as error:
                    if error.__cause__ is None or "use_count" not in str(error.__cause__):
                        raise
                    raise InvalidState(
                        "construct.materialize",
                        expected="parameters of which nothing was computed with gradients in the build",
                        found=str(error),
                        fix="use a module of torch.nn.utils.parametrizations in place of torch.nn.utils.weight_norm, or compute under torch.no_grad()",
                    ) from error
    for parameter, attributes in kept.items():
        vars(parameter).update(attributes)


@contextmanager
def _parameters_stay() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # torch's
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _set_now(slots: Sequence[Slot], memory_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Give values to what no checkpoint has, and to what has no NaN, unless they are drawn."""
    loaded = {_storage(slot) for slot in slots if slot.is_persistent and _waits(slot)}
    done: set[int] = set()
    for slot in slots:
        recipe, target = slot.recipe, memory_of(slot.tensor)
        if (
            recipe is None
            or not recipe.is_known
            or is_dtensor(target)
            or id(target) in done
            or _storage(slot) in loaded
            or recipe.draws
        ):
            continue
        done.add(id(target))
        with torch.no_grad():
            target.copy_(value_of(recipe.tape, recipe.place, None))


def _waits(slot: Slot) -> bool:
    return slot.recipe is None or slot.tensor.is_floating_point() or slot.tensor.is_complex() or slot.recipe.draws


def _storage(slot: Slot) -> object:
    return slot.name if slot.recipe is None else slot.recipe.tie[0], slot.recipe and slot.recipe.place.storage
