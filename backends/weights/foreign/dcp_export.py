"""`write_dcp_directory`: what a source or a state has, as a directory that `torch.distributed.checkpoint.load` reads, whatever its number of ranks."""

import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import attrs
import torch

from trainfold.backends.formats.dcp.dcp_writer import write_dcp
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.ranks.all_ranks import on_all_ranks, on_rank_zero
from trainfold.backends.ranks.in_process import ALONE
from trainfold.backends.weights.foreign.dcp_optimizer import optimizer_entries, whole_optimizer
from trainfold.backends.weights.held_by_ranks import reading_rank_zero
from trainfold.backends.weights.opened import ReusedMemory, opened_weights
from trainfold.core.errors import InvalidArgument
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import Box, whole_box
from trainfold.core.layout.world import Collectives
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.spec import dtype_name
from trainfold.core.state.state import ModelState, TrainState
from trainfold.core.torch_files.dcp_metadata import PathInState
from trainfold.core.torch_files.dcp_plan import plan_dcp
from trainfold.core.torch_files.model_place import keys_of_values
from trainfold.core.weights.open_weights import OpenWeights
from trainfold.core.weights.source import ListedSource

_FILE_BYTES: Final = 1 << 30
_TENSORS: Final = (torch.Tensor, Shard, LeafSpec)
_DOING: Final = "write a directory of torch.distributed.checkpoint"


def write_dcp_directory(  # noqa: PLR0913 - keywords
    path: str | Path,
    contents: ListedSource | TrainState,
    *,
    model: str = "model",
    optimizer: str = "optim",
    objects: Mapping[str, Any] | None = None,
    flatten_optimizer_state_dict: bool = False,
    file_bytes: int = _FILE_BYTES,
    collectives: Collectives | None = None,
) -> None:
    """Write a directory that `torch.distributed.checkpoint.load` reads: the model, and of a state the optimizer and the step too.

    Names are those of ``{"model": model_state_dict, "optim": optimizer_state_dict}``, as `torch.distributed.checkpoint.state_dict.get_state_dict`
    returns the two; the step is the object ``step``. One process writes, tensor by tensor, and holds no more than one; each
    is one chunk, of which a reader's ranks read their parts. The directory has its name when all of it is there and durable.

    Args:
        path: of the directory. It does not exist yet, is empty, or has the very files that are to be written, which are compared.
        contents: a source that lists what it has, such as a hub directory or a checkpoint; or a state, of which this process has everything, or
            each of several ranks its parts: FSDP2, tensor parallelism, stages of a pipeline.
        model: the key under which the model is; empty to have its tensors at the top.
        optimizer: the key under which the optimizer of a state is.
        objects: name -> a number, a text, a tensor, or lists, tuples and dicts of these, such as ``{"train_state": {"step": torch.tensor(120)}}``. A dict
            is written key by key, as torch writes it.
        flatten_optimizer_state_dict: whether the optimizer has the form of torch's ``StateDictOptions(flatten_optimizer_state_dict=True)``, which torchtitan and
            programs with pipelines load: the settings of a group for each of its parameters.
        file_bytes: after which a new file begins.
        collectives: the ranks, all of which call: rank 0 writes, and all leave together. None for this process alone.

    Raises:
        InvalidArgument: if there is something else at the path, an object has the name of a tensor, or other ranks that do not call have the rest of a leaf.
        InvalidState: for what torch has no name for: fp32 masters, the state of an optimizer with more than slots and groups. And if the state is
            written to meanwhile.
        RanksDisagree: if the stages of a pipeline do not make one model, or their optimizers not one.
        SaveFailed: if it cannot be written.
        RankFailed: if another rank fails.

    Examples:
        >>> import tempfile, trainfold
        >>> from trainfold.weights import DcpDirectory
        >>> adamw = trainfold.optimizer(torch.optim.AdamW, lr=1e-3)
        >>> state = trainfold.init_state(torch.nn.Linear(2, 1), adamw, seed=0)
        >>> folder = tempfile.mkdtemp()
        >>> write_dcp_directory(folder, state)
        >>> sorted(DcpDirectory(folder).specs())[:3], DcpDirectory(folder).objects()["step"]
        (['model.bias', 'model.weight'], 0)
    """
    world = ALONE if collectives is None else collectives
    write = partial(_write, path, top=(model,) if model else (), given=_by_key(objects or {}), file_bytes=file_bytes)
    if isinstance(contents, TrainState):
        made: list[_Parts] = []
        entries = partial(_entries, optimizer, is_flat=flatten_optimizer_state_dict)
        whole = whole_optimizer(world, contents)
        on_all_ranks(
            world,
            lambda: made.append(_parts(contents, entries(contents.optimizer), entries(whole))),
            doing="name its optimizer",
        )
        reading_rank_zero(world, made[0].tensors, partial(write, made[0]), doing=_DOING)
        return

    def from_source() -> None:
        with opened_weights(contents) as weights:
            write(None, weights)

    on_rank_zero(world, from_source, doing=_DOING)


@final
@attrs.frozen
class _Parts:
    """What a state has, in the form in which it is read.

    Attributes:
        tensors: the state, with the slots of its optimizer as parameters: all are read, and watched, alike.
        slots: the names that the slots have there -> their keys in the directory.
        objects: keys -> a value that is not a tensor.
    """

    tensors: TrainState
    slots: Mapping[str, PathInState]
    objects: Mapping[PathInState, Any]


def _write(  # noqa: PLR0913 - keywords
    path: str | Path,
    parts: _Parts | None,
    weights: OpenWeights,
    *,
    top: PathInState,
    given: Mapping[PathInState, Any],
    file_bytes: int,
) -> None:
    slots = {} if parts is None else parts.slots
    every = sorted((*weights.specs, *weights.ties), key=lambda name: name in slots)  # the model comes first
    paths: dict[str, PathInState] = {}
    of: dict[str, str] = {}
    for name in every:
        keys = slots.get(name, (*top, name))
        paths[_dotted(keys)], of[_dotted(keys)] = keys, weights.ties.get(name, name)
    specs = {full: weights.specs[name] for full, name in of.items()}
    others: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for keys, value in {**({} if parts is None else parts.objects), **given}.items():
        full = _dotted(keys)
        if len(keys) > 1:
            paths[full] = keys
        if not isinstance(value, torch.Tensor):
            others[full] = value
        elif full in of:
            raise _taken("objects", full)
        else:
            tensors[full] = value.detach()
            others.pop(full, None)
    specs |= {full: LeafSpec(dtype_name(each.dtype), tuple(each.shape)) for full, each in tensors.items()}
    plan = without_collecting(plan_dcp)(specs, others, paths=paths, file_bytes=file_bytes)
    read = (each for file in plan.files for each in file.entries if each.name in of)
    weights.expect((of[each.name], whole_box(each.spec.shape)) for each in read if each.spec is not None)
    memory = ReusedMemory(weights)

    def read_part(full: str, box: Box) -> torch.Tensor:
        return memory.read(of[full], box) if full in of else tensors[full]

    # values that are not known again are not gone on with
    write_dcp(plan, read_part, path, identity=weights.identity or os.urandom(16).hex(), check=weights.check)


def _dotted(keys: PathInState) -> str:
    return ".".join(map(str, keys))


def _by_key(objects: Mapping[str, Any]) -> dict[PathInState, Any]:
    """The keys of each value in nested dicts -> the value."""
    found: dict[PathInState, Any] = {}
    for keys in keys_of_values(objects):
        value: Any = objects
        for key in keys:
            value = value[key]
        found[keys] = value
    return found


def _entries(key: str, optimizer: Any, *, is_flat: bool) -> dict[PathInState, Any]:
    """The entries of an optimizer under its key."""
    if optimizer is None:
        return {}
    return {(key, *keys): value for keys, value in optimizer_entries(optimizer, is_flat=is_flat)}


def _parts(state: TrainState, mine: Mapping[PathInState, Any], whole: Mapping[PathInState, Any]) -> _Parts:
    """The parts of a state.

    Args:
        state: of this rank.
        mine: the entries of its optimizer.
        whole: those of all stages, with a spec in the place of each tensor; the same for a whole model.

    Raises:
        InvalidArgument: for a parameter with the name of a slot.
    """
    found = ModelState(Leaves({}), Leaves({}), ()) if state.model is None else state.model
    slots = {_dotted(keys): value for keys, value in mine.items() if isinstance(value, torch.Tensor | Shard)}
    if taken := sorted(slots.keys() & {*found.params, *found.buffers}):
        raise _taken("optimizer", taken[0])
    objects = {keys: value for keys, value in whole.items() if not isinstance(value, _TENSORS)}
    if state.trainer is not None:
        objects["step",] = state.trainer.step
    every: dict[str, Any] = {**found.params, **_apart(slots, [*found.params.values(), *found.buffers.values()])}
    tensors = state.evolve(model=attrs.evolve(found, params=Leaves(every)), optimizer=None)
    return _Parts(
        tensors, {_dotted(keys): keys for keys, value in whole.items() if isinstance(value, _TENSORS)}, objects
    )


def _apart(slots: Mapping[str, Any], others: Iterable[Any]) -> dict[str, Any]:
    """The slots, of which none has the memory of another tensor: a state has one name for such tensors, such as the learning rate of two groups, and a directory both."""
    seen, found = set(map(_address, others)), dict[str, Any]()
    for name, value in slots.items():
        mine = value.tensor if isinstance(value, Shard) else value
        if _address(mine) in seen:
            mine = mine.clone()
        seen.add(_address(mine))
        found[name] = attrs.evolve(value, tensor=mine) if isinstance(value, Shard) else mine
    return found


def _address(leaf: Any) -> int:
    tensor = leaf.tensor if isinstance(leaf, Shard) else leaf
    return tensor.data_ptr() or id(tensor)


def _taken(argument: str, name: str) -> InvalidArgument:
    return InvalidArgument(
        f"write_dcp_directory.{argument}",
        expected="a key that no tensor of the model has",
        found=name,
        fix="pass another one",
    )
