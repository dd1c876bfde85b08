"""Names: canonical FQNs, and the named tensors of a module, each once and with its ties."""

from types import MethodType
from typing import Any, Final, final

import attrs
import torch

from trainfold.core.errors import InvalidState
from trainfold.core.state.names.wrapper_names import ANY, CHECKPOINTS, name_in, wrapped_name
from trainfold.core.tensor_memory import looks_unset

RECIPES: Final = "_trainfold_recipes"
"""The attribute of a module that was built by `trainfold.construct.on_meta`: how its tensors are made. It is neither a setting nor state."""
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


@final
@attrs.frozen(eq=False)
class BufferSlot:
    """The location of a buffer in a module; a forward may write to the buffer or replace it.

    Attributes:
        owner: the dict of the submodule that holds the buffer.
        key: its key in that dict.
        name: the canonical FQN; of a tensor that is registered twice, that of the first place.
        persistent: whether it is part of a state.
    """

    owner: dict[str, torch.Tensor | None]
    key: str
    name: str
    persistent: bool


@final
@attrs.frozen(eq=False)
class NamedTensors:
    """The tensors of a module under canonical names: those of torch without the prefixes of wrappers.

    Attributes:
        params: FQN -> parameter, each once, under its first name.
        buffers: FQN -> persistent buffer, each once.
        ties: (alias, FQN) pairs of names of the same tensor.
        slots: every place of a buffer, persistent or not.
        rescaled: weights that a forward overwrites when it looks them up (``max_norm``).
    """

    params: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]
    ties: tuple[tuple[str, str], ...]
    slots: tuple[BufferSlot, ...]
    rescaled: tuple[torch.Tensor, ...] = ()


def named_tensors(module: torch.nn.Module) -> NamedTensors:
    """Name the parameters and buffers of a module; nothing is copied.

    Raises:
        InvalidState: if two tensors have the same name without the prefixes.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        >>> found = named_tensors(model)
        >>> list(found.params), list(found.buffers)
        (['0.weight', '0.bias', '1.weight', '1.bias'], ['1.running_mean', '1.running_var', '1.num_batches_tracked'])
    """
    modules: list[tuple[str, torch.nn.Module]] = []
    _walk(module, "", modules)
    params, param_ties = _each_once(_named_parameters(module, modules))
    places = [
        (owner, key, prefix + key, value)
        for prefix, owner in modules
        for key, value in owner._buffers.items()  # noqa: SLF001 (named_buffers yields the tensors, not their places)
    ]
    buffers, buffer_ties = _each_once([(name, value) for _, _, name, value in places if value is not None])
    first = {id(value): name for name, value in buffers.items()}
    persistent_ids = {
        id(value)
        for (owner, key, _, value) in places
        if key not in owner._non_persistent_buffers_set  # noqa: SLF001
    }  # torch has no public name for it
    slots = tuple(
        BufferSlot(
            owner._buffers,  # noqa: SLF001  # as above
            key,
            first.get(id(value), name),
            persistent=value is not None and id(value) in persistent_ids,
        )
        for owner, key, name, value in places
    )
    kept = {slot.name for slot in slots if slot.persistent}
    clashes = kept & params.keys()
    if clashes:
        raise _clash(min(clashes))
    return NamedTensors(
        params=params,
        buffers={name: value for name, value in buffers.items() if name in kept},
        ties=(*param_ties, *((alias, name) for alias, name in buffer_ties if name in kept)),
        slots=slots,
        rescaled=_rescaled(modules),
    )


def _rescaled(modules: list[tuple[str, torch.nn.Module]]) -> tuple[torch.Tensor, ...]:
    found: list[torch.Tensor | None] = []
    for _, each in modules:
        if isinstance(each, _EMBEDDINGS) and each.max_norm is not None:
            # not `each.weight`, which may be computed, and then changes buffers and random streams
            found.append(each._parameters.get("weight"))  # noqa: SLF001
            computed = each._modules.get("parametrizations")  # noqa: SLF001
            found += [] if computed is None else computed.parameters()
    return tuple(weight for weight in found if weight is not None)


def _walk(module: torch.nn.Module, prefix: str, found: list[tuple[str, torch.nn.Module]]) -> None:
    """Collect every place of a module and its canonical prefix. A module that overrides `named_modules` is called."""
    if type(module).named_modules is not torch.nn.Module.named_modules or "named_modules" in vars(module):
        for path, each in module.named_modules(None, "", False):  # noqa: FBT003  # as torch calls it for a child
            found.append((prefix + name_in(module, f"{path}.") if path else prefix, each))
        return
    found.append((prefix, module))
    children = module._modules  # noqa: SLF001  # as torch's `named_modules` does, at half the cost
    wrapped = wrapped_name(module) if children else None
    for name, child in children.items():
        if child is not None:
            _walk(child, prefix if wrapped in (name, ANY) else f"{prefix}{name}.", found)


def _named_parameters(module: torch.nn.Module, modules: list[tuple[str, torch.nn.Module]]) -> list[tuple[str, Any]]:
    """Return every place of a parameter. A module that overrides `named_parameters` is called, which costs a second walk."""
    members = module._named_members  # noqa: SLF001  # what torch's own `named_parameters` calls
    is_torchs = (module.named_parameters, members) == (
        MethodType(torch.nn.Module.named_parameters, module),
        MethodType(torch.nn.Module._named_members, module),  # noqa: SLF001  # as above
    )
    # its method takes the prefix out of every place in a name, also where a module of the user's is called so
    is_checkpointed = getattr(type(module).named_parameters, "__module__", "") == CHECKPOINTS
    if not is_torchs and not is_checkpointed:
        try:
            named = module.named_parameters(remove_duplicate=False)
        except TypeError:  # written for a torch without that argument
            named = module.named_parameters()
        return [(name_in(module, name), value) for name, value in named]
    return [
        (prefix + key, value)
        for prefix, owner in modules
        for key, value in owner._parameters.items()  # noqa: SLF001  # there is no public iterator that skips None
        if value is not None
    ]


def _each_once(pairs: list[tuple[str, Any]]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    found: dict[str, Any] = dict(pairs)
    if len(found) == len(pairs) == len(set(map(id, found.values()))):
        return found, []  # nearly always
    found = {}
    first: dict[int, str] = {}
    ties: list[tuple[str, str]] = []
    for name, value in pairs:
        if id(value) in first:
            if name != first[id(value)]:
                ties.append((name, first[id(value)]))
        elif name in found:
            raise _clash(name)
        else:
            first[id(value)] = name
            found[name] = value
    return found, ties


def _clash(name: str) -> InvalidState:
    return InvalidState(
        f"model[{name!r}]",
        expected="one tensor for each name",
        found="two tensors whose names are equal without the prefixes of wrappers",
        fix="rename one of the submodules; or attach several models as one torch.nn.ModuleDict, which gives each a name",
    )


def check_real(model: torch.nn.Module) -> NamedTensors:
    """Return the named tensors of a model, if they have values.

    Raises:
        InvalidState: naming the parameters or buffers on the meta device, or not initialised.
    """
    named = named_tensors(model)
    lazy = [name for name, value in named.params.items() if torch.nn.parameter.is_lazy(value)]
    if lazy:
        raise InvalidState(
            "model",
            expected="initialised parameters",
            found=f"lazy parameters: {lazy}",
            fix="run the model once on a batch, so that their shapes are known",
        )
    meta = [name for name, value in {**named.params, **named.buffers}.items() if value.is_meta]
    if meta:
        raise InvalidState(
            "model",
            expected="parameters with values",
            found=f"{len(meta)} on the meta device, such as {meta[0]!r}",
            fix="build it by trainfold.construct.on_meta and call trainfold.construct.materialize(model, device); or call "
            "model.to_empty(device=...) and initialise it, or build it outside torch.device('meta')",
        )
    return named


def check_set(model: torch.nn.Module, named: NamedTensors) -> None:
    """Raise if a model that was built on meta has tensors that nothing has loaded or initialised.

    Raises:
        InvalidState: naming them.

    Examples:
        >>> model = torch.nn.Linear(1, 1)
        >>> check_set(model, named_tensors(model))
    """
    if not any(RECIPES in vars(each) for each in model.modules()):
        return
    unset = [name for name, value in {**named.params, **named.buffers}.items() if looks_unset(value)]
    if unset:
        raise unset_error("model", unset)


def unset_error(where: str, names: list[str]) -> InvalidState:
    """Return the error for tensors that have memory and no values.

    Args:
        where: for the error.
        names: of the tensors.
    """
    others = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return InvalidState(
        where,
        expected="tensors that a checkpoint or an initialisation has set",
        found=f"{len(names)} that nothing has set since the model was built on meta: {', '.join(names[:3])}{others}",
        fix="load a checkpoint, and then call trainfold.construct.initialize(model, seed=...), which sets exactly what was not loaded",
    )


def check_uncut(named: NamedTensors) -> NamedTensors:
    """Return the tensors of a model for a pure step, which cuts its state and not its model.

    Raises:
        InvalidState: naming the first DTensor.

    Examples:
        >>> check_uncut(named_tensors(torch.nn.Linear(1, 1))).ties
        ()
    """
    found: Any = next(
        (pair for pair in [*named.params.items(), *named.buffers.items()] if hasattr(pair[1], "device_mesh")), None
    )
    if found is not None:
        name, cut = found
        raise InvalidState(
            f"model: {name}",
            expected="a plain tensor, of which a pure step computes with all",
            found=f"a DTensor of {list(cut.shape)} with the placements {cut.placements} on {cut.device_mesh}",
            fix="make the model without fully_shard, and cut its state: trainfold.ranks.Sharded(collectives).cut(state); for tensor parallelism, or "
            "where a whole model does not fit, write your own loop with trainfold.attach(model, optimizer)",
        )
    return named
