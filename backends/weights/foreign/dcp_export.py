"""`write_dcp_directory`: what a source or a state has, as a directory that `torch.distributed.checkpoint.load` reads, whatever its number of ranks."""

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import attrs
import torch

from trainfold.backends.formats.dcp.dcp_writer import write_dcp
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.ranks.all_ranks import on_all_ranks, on_rank_zero
from trainfold.backends.ranks.in_process import ALONE
from trainfold.backends.weights.held_by_ranks import reading_rank_zero
from trainfold.backends.weights.opened import ReusedMemory, opened_weights
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import Box, whole_box
from trainfold.core.layout.world import Collectives
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, OptimizerState, TrainState
from trainfold.core.torch_files.dcp_metadata import PathInState
from trainfold.core.torch_files.dcp_plan import plan_dcp
from trainfold.core.weights.open_weights import OpenWeights
from trainfold.core.weights.source import ListedSource

_FILE_BYTES: Final = 1 << 30
_DOING: Final = "write a directory of torch.distributed.checkpoint"


def write_dcp_directory(  # noqa: PLR0913 - keywords
    path: str | Path,
    contents: ListedSource | TrainState,
    *,
    model: str = "model",
    optimizer: str = "optim",
    objects: Mapping[str, Any] | None = None,
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
            each of several ranks its parts: FSDP2, tensor parallelism, and stages of a pipeline without their optimizer.
        model: the key under which the model is; empty to have its tensors at the top.
        optimizer: the key under which the optimizer of a state is.
        objects: name -> a number, a text, or lists, tuples and dicts of these, such as ``{"step": 120}``.
        file_bytes: after which a new file begins.
        collectives: the ranks, all of which call: rank 0 writes, and all leave together. None for this process alone.

    Raises:
        InvalidArgument: if there is something else at the path, an object has the name of a tensor, or other ranks that do not call have the rest of a leaf.
        InvalidState: for what torch has no name for: fp32 masters, the state of an optimizer with more than slots and groups; and for an optimizer
            of stages. And if the state is written to meanwhile.
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
    write = partial(_write, path, top=(model,) if model else (), objects=objects, file_bytes=file_bytes)
    if isinstance(contents, TrainState):
        made: list[_Parts] = []
        on_all_ranks(world, lambda: made.append(_parts(contents, optimizer)), doing="name its optimizer")
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
    objects: Mapping[str, Any] | None,
    file_bytes: int,
) -> None:
    slots = {} if parts is None else parts.slots
    names = [name for name in weights.specs if name not in slots]
    of = {".".join(map(str, (*top, name))): weights.ties.get(name, name) for name in (*names, *weights.ties)}
    paths: dict[str, PathInState] = {".".join(map(str, (*top, name))): (*top, name) for name in (*names, *weights.ties)}
    of |= {name: name for name in slots}
    paths |= dict(slots)
    others = dict(objects or {})
    for keys, value in ({} if parts is None else parts.objects).items():
        paths[_dotted(keys)] = keys
        others.setdefault(_dotted(keys), value)
    specs = {full: weights.specs[name] for full, name in of.items()}
    plan = without_collecting(plan_dcp)(specs, others, paths=paths, file_bytes=file_bytes)
    tensors = (each for file in plan.files for each in file.entries if each.spec is not None)
    weights.expect((of[each.name], whole_box(each.spec.shape)) for each in tensors if each.spec is not None)
    memory = ReusedMemory(weights)

    def read(full: str, box: Box) -> torch.Tensor:
        return memory.read(of[full], box)

    # values that are not known again are not gone on with
    write_dcp(plan, read, path, identity=weights.identity or os.urandom(16).hex(), check=weights.check)


def _dotted(keys: PathInState) -> str:
    return ".".join(map(str, keys))


def _parts(state: TrainState, optimizer: str) -> _Parts:
    """The parts of a state.

    Raises:
        InvalidState: for what torch has no name for, and for an optimizer of stages, whose groups are those of this rank alone.
        InvalidArgument: for a parameter with the name of a slot.
    """
    found = ModelState(Leaves({}), Leaves({}), ()) if state.model is None else state.model
    entries = {} if state.optimizer is None else {(optimizer, *keys): value for keys, value in optimizer_entries(state.optimizer)}  # fmt: skip
    if state.stage is not None and entries:
        raise InvalidState("optimizer", expected="one that has the groups of the whole model", found=f"that of {state.stage}",
                           fix="write the model alone: state.evolve(optimizer=None)")  # fmt: skip
    slots = {_dotted(keys): (keys, value) for keys, value in entries.items() if isinstance(value, torch.Tensor | Shard)}
    if taken := sorted(slots.keys() & {*found.params, *found.buffers}):
        raise InvalidArgument("write_dcp_directory.optimizer", expected="a key that no tensor of the model has", found=taken[0],
                              fix="pass another one")  # fmt: skip
    objects = {keys: value for keys, value in entries.items() if not isinstance(value, torch.Tensor | Shard)}
    if state.trainer is not None:
        objects["step",] = state.trainer.step
    every: dict[str, Any] = {**found.params, **{name: value for name, (_, value) in slots.items()}}
    tensors = state.evolve(model=attrs.evolve(found, params=Leaves(every)), optimizer=None)
    return _Parts(tensors, {name: keys for name, (keys, _) in slots.items()}, objects)


def optimizer_entries(found: Any) -> Iterator[tuple[PathInState, Any]]:
    """The keys and the value of each entry of an optimizer, as `get_state_dict` has them.

    Args:
        found: slots and groups.

    Raises:
        InvalidState: for what torch has no name for.
    """
    if not isinstance(found, OptimizerState) or found.masters is not None:
        what = "fp32 masters beside its slots" if isinstance(found, OptimizerState) else type(found).__qualname__
        raise InvalidState("optimizer", expected="slots and groups, as torch names them", found=what,
                           fix="write the model alone: state.evolve(optimizer=None)")  # fmt: skip
    for name, slots in found.slots.items():
        for slot, value in slots.items():
            yield ("state", name, slot), value
    for number, group in enumerate(found.groups):
        for key, value in group.hyper.items():
            yield ("param_groups", number, key), value
        yield ("param_groups", number, "params"), list(group.params)
