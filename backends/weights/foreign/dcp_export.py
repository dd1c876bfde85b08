"""`write_dcp_directory`: what a source or a state has, as a directory that `torch.distributed.checkpoint.load` reads, whatever its number of ranks."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from trainfold.backends.formats.dcp.dcp_writer import write_dcp
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.weights.opened import ReusedMemory, opened_weights
from trainfold.core.errors import InvalidState
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import Box
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.spec import dtype_name
from trainfold.core.state.state import ModelState, OptimizerState, TrainState
from trainfold.core.torch_files.dcp_metadata import PathInState
from trainfold.core.torch_files.dcp_plan import plan_dcp
from trainfold.core.weights.source import ListedSource

_FILE_BYTES: Final = 1 << 30


def write_dcp_directory(  # noqa: PLR0913 - keywords
    path: str | Path,
    contents: ListedSource | TrainState,
    *,
    model: str = "model",
    optimizer: str = "optim",
    objects: Mapping[str, Any] | None = None,
    file_bytes: int = _FILE_BYTES,
) -> None:
    """Write a directory that `torch.distributed.checkpoint.load` reads: the model, and of a state the optimizer and the step too.

    Names are those of ``{"model": model_state_dict, "optim": optimizer_state_dict}``, as `torch.distributed.checkpoint.state_dict.get_state_dict`
    returns the two; the step is the object ``step``. One process writes, tensor by tensor, and holds no more than one; each
    is one chunk, of which a reader's ranks read their parts. The directory has its name when all of it is there and durable.

    Args:
        path: of the directory. It does not exist yet, or is empty.
        contents: a source that lists what it has, such as a hub directory or a checkpoint; or a state whose leaves are whole.
        model: the key under which the model is; empty to have its tensors at the top.
        optimizer: the key under which the optimizer of a state is.
        objects: name -> a number, a text, or lists, tuples and dicts of these, such as ``{"step": 120}``.
        file_bytes: after which a new file begins.

    Raises:
        InvalidArgument: if there is something at the path, an object has the name of a tensor, or a leaf is a rank's part.
        InvalidState: for what torch has no name for: a rank's part of a slot, fp32 masters, the state of an optimizer with more than slots and groups. And if the
            state is written to meanwhile.
        SaveFailed: if it cannot be written.

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
    top = (model,) if model else ()
    beside = dict(_beside_model(contents, optimizer)) if isinstance(contents, TrainState) else {}
    slots = {_dotted(keys): each.detach() for keys, each in beside.items() if isinstance(each, torch.Tensor)}
    if isinstance(contents, TrainState) and contents.model is None:
        contents = contents.evolve(model=ModelState(Leaves({}), Leaves({}), ()))
    with opened_weights(contents, beside=slots) as weights:
        listed = {name: weights.specs[name] for name in weights.specs} | {
            alias: weights.specs[name] for alias, name in weights.ties.items()
        }
        paths: dict[str, PathInState] = {".".join((*top, name)): (*top, name) for name in listed}
        specs = {full: listed[str(path[-1])] for full, path in paths.items()}
        others = dict(objects or {})
        for keys, value in beside.items():
            name = _dotted(keys)
            paths[name] = keys
            if name in slots:
                specs[name] = LeafSpec(dtype_name(value.dtype), tuple(value.shape))
            else:
                others.setdefault(name, value)
        memory = ReusedMemory(weights)

        def read(full: str, box: Box) -> torch.Tensor:
            name = paths[full][-1]
            return slots[full] if full in slots else memory.read(weights.ties.get(str(name), str(name)), box)

        # values that are not known again are not gone on with
        identity = weights.identity or os.urandom(16).hex()
        write_dcp(
            without_collecting(plan_dcp)(specs, others, paths=paths, file_bytes=file_bytes),
            read,
            path,
            identity=identity,
            check=weights.check,
        )


def _dotted(keys: PathInState) -> str:
    return ".".join(map(str, keys))


def _beside_model(state: TrainState, optimizer: str) -> Iterator[tuple[PathInState, Any]]:
    if state.optimizer is not None:
        yield from (((optimizer, *path), value) for path, value in optimizer_entries(state.optimizer))
    if state.trainer is not None:
        yield ("step",), state.trainer.step


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
            if isinstance(value, Shard):
                raise InvalidState(f"optimizer: {name}.{slot}", expected="a whole tensor", found="the part of it that this rank has",
                                   fix="save a checkpoint on all ranks; the model alone is written from CheckpointWeights(run)")  # fmt: skip
            yield ("state", name, slot), value
    for number, group in enumerate(found.groups):
        for key, value in group.hyper.items():
            yield ("param_groups", number, key), value
        yield ("param_groups", number, "params"), list(group.params)
