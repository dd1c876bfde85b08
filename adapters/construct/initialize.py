"""`initialize`: gives each tensor that nothing has set the value that the code of the model gives it, and touches no other."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from trainfold.adapters.construct.materialize import Modules, is_known, no_recipe
from trainfold.adapters.construct.recipes import Slot, modules_given, slots_of
from trainfold.adapters.construct.replay import value_of
from trainfold.adapters.sharded.dtensor import is_dtensor, leaf_of, local_part
from trainfold.adapters.sharded.parts import part_for
from trainfold.backends.ranks.all_ranks import on_all_ranks
from trainfold.backends.ranks.in_process import ALONE
from trainfold.core.errors import InvalidArgument, InvalidState, error_text
from trainfold.core.layout.world import Collectives
from trainfold.core.rng import Key, fold_in, make_key
from trainfold.core.tensor_memory import byte_view, fill_unset, unset_elements


def initialize(modules: Modules, *, seed: int, collectives: Collectives | None = None) -> tuple[str, ...]:
    """Give each tensor that nothing has set since `materialize` its initial value; whatever a load has set keeps every bit.

    Law: the values depend on the seed and on the names of the tensors: not on the number of ranks, nor on how the model is cut into parts and
    stages, nor on what was loaded.

    No init function of the model runs. The value of a tensor is made in its memory; of one that is cut over ranks, or on another device, it is
    made on the CPU, whole, one tensor at a time, and this rank's part is copied.

    Args:
        modules: as for `materialize`; some may have been loaded.
        seed: of the run.
        collectives: the ranks, all of which call; None for this process alone.

    Returns:
        The names of the tensors that were set, in the order of the model; on each rank those of its own modules.

    Raises:
        InvalidState: naming tensors that are set only in part, that nothing can initialise, that were tied and have other values, or that
            only some of their ranks have set.

    Examples:
        >>> from trainfold.construct import materialize, on_meta
        >>> model = on_meta(lambda: torch.nn.Linear(2, 1))
        >>> materialize(model, "cpu")
        >>> _ = model.weight.data.zero_()  # as a load does
        >>> initialize(model, seed=0)
        ('bias',)
    """
    world = ALONE if collectives is None else collectives
    slots = _each_once(modules_given(modules))
    states = on_all_ranks(world, lambda: _states(slots, seed), doing="look for tensors that are not initialised")
    _check_agreed(states)
    mine, anywhere = set(states[world.rank].unset), {name for each in states for name in each.unset}
    wanted = [slot for slot in slots if slot.name in mine]
    key = fold_in(make_key(seed), "initial")
    on_all_ranks(world, lambda: _set_all(wanted, key), doing="initialise what was not loaded")
    return tuple(slot.name for slot in slots if slot.name in anywhere)  # also where this rank has no rows


@attrs.frozen
class _States:
    """The names of the tensors of a rank that have no value yet, and of those that have one; without those of which it holds nothing."""

    seed: int
    unset: tuple[str, ...]
    set: tuple[str, ...]


def _each_once(roots: Sequence[torch.nn.Module]) -> list[Slot]:
    found: dict[int, Slot] = {}
    for slot in slots_of(roots):
        found.setdefault(id(slot.tensor), slot)
    return list(found.values())


def _states(slots: Sequence[Slot], seed: int) -> _States:
    meta = [slot.name for slot in slots if slot.tensor.is_meta]
    if meta:
        raise InvalidState(
            "construct.initialize",
            expected="tensors with memory",
            found=f"{len(meta)} on the meta device, such as {meta[0]!r}",
            fix="call trainfold.construct.materialize(model, device) first",
        )
    names = Counter(slot.name for slot in slots)
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        raise InvalidArgument(
            "construct.initialize.modules",
            expected="one model, or parts of one model",
            found=f"two tensors named {twice!r}, as a copy of a model has them",
            fix="call it for each model on its own; for parts that are built apart, pass prefix= to on_meta",
        )
    counts = {slot.name: (unset_elements(local_part(slot.tensor)), local_part(slot.tensor).numel()) for slot in slots}
    partly = [name for name, (unset, count) in counts.items() if 0 < unset < count]
    if partly:
        raise InvalidState(
            "construct.initialize",
            expected="tensors that are set as a whole, or not at all",
            found=f"{', '.join(f'{counts[name][0]} of {counts[name][1]} elements of {name!r}' for name in partly)} without a value",
            fix="load or write each tensor as a whole; for rows that are new, set them after initialize",
        )
    found = _States(
        seed,
        tuple(name for name, (unset, count) in counts.items() if count and unset == count),
        tuple(name for name, (unset, count) in counts.items() if count and not unset),
    )
    unknown = [slot.name for slot in slots if slot.name in found.unset and not is_known(slot)]
    if unknown:
        raise no_recipe(unknown, "nothing has loaded them either")
    _check_ties(slots, found)
    return found


def _check_ties(slots: Sequence[Slot], states: _States) -> None:
    """Raise if tensors that were one in the build are several now, with values that differ or will."""
    first: dict[Any, Slot] = {}
    for slot in slots:
        if slot.recipe is None:
            continue
        other = first.setdefault(slot.recipe.tie, slot)
        if other is not slot and _differ(other, slot, states):
            raise InvalidState(
                f"construct.initialize: {slot.name}",
                expected=f"the values of {other.name!r}, with which it was tied when the model was built",
                found="other values",
                fix=f"tie them again before the load, such as by assigning one parameter to both, or load the same values into {slot.name!r}",
            )


def _differ(one: Slot, other: Slot, states: _States) -> bool:
    if (one.name in states.unset) != (other.name in states.unset):
        return True
    mine, theirs = local_part(one.tensor), local_part(other.tensor)
    return (
        mine.shape == theirs.shape
        and mine.dtype == theirs.dtype
        and not torch.equal(byte_view(mine), byte_view(theirs))
    )


def _check_agreed(found: Sequence[_States]) -> None:
    """Raise on every rank if some hold a value for a tensor, and others none, or they have other seeds."""
    seeds = [states.seed for states in found]
    if len(set(seeds)) > 1:
        raise InvalidArgument(
            "construct.initialize.seed", expected="the same seed on every rank", found=f"{seeds} by rank", fix="pass the seed of the run"
        )  # fmt: skip
    ranks: dict[str, list[int]] = {}
    for rank, states in enumerate(found):
        for name in states.unset:
            ranks.setdefault(name, []).append(rank)
    for rank, states in enumerate(found):
        both = next((name for name in states.set if name in ranks), None)
        if both is not None:
            raise InvalidState(
                f"construct.initialize: {both}",
                expected="a tensor that all of its ranks have loaded, or none",
                found=f"a value on rank {rank}, and none on rank {ranks[both][0]}",
                fix="load it on every rank, or on none",
            )


def _set_all(slots: Sequence[Slot], key: Key) -> None:
    with torch.no_grad():
        for slot in slots:
            recipe: Any = slot.recipe
            memory = _memory_of(slot)
            try:
                value = value_of(recipe.tape, recipe.place, key, memory=memory)
            except BaseException as error:
                if memory is not None:
                    fill_unset(memory, slot.tensor.dtype)  # what an interrupted build has left is not its value
                if isinstance(error, Exception):
                    raise _not_made(slot, error) from error
                raise
            if unset_elements(value):
                raise no_recipe([slot.name], "the build gives a value to only a part of it")
            if memory is None or value.data_ptr() != slot.tensor.data_ptr():
                local_part(slot.tensor).copy_(part_for(value, leaf_of(slot.tensor, slot.name)))


def _not_made(slot: Slot, error: Exception) -> InvalidState:
    return InvalidState(
        f"construct.initialize: {slot.name}",
        expected="a build whose calls succeed on the CPU",
        found=error_text(error),
        fix="build the model outside on_meta to see where it fails",
    )


def _memory_of(slot: Slot) -> torch.UntypedStorage | None:
    """The memory of a tensor that is alone in it, as it was in the build, so that its value can be made there; None for any other."""
    tensor, place = slot.tensor, slot.recipe and slot.recipe.place
    if place is None or is_dtensor(tensor) or not tensor.is_cpu or tensor.dtype != place.dtype:
        return None
    is_alike = tuple(tensor.stride()) == place.stride and tensor.storage_offset() == place.offset == 0
    sizes = {tensor.nbytes, tensor.untyped_storage().nbytes(), slot.recipe.tape.sizes[place.storage]}  # type: ignore[union-attr] # it has a place
    return tensor.untyped_storage() if is_alike and len(sizes) == 1 else None
