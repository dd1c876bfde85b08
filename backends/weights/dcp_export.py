"""`write_dcp_directory`: what a source or a state has, as a directory that `torch.distributed.checkpoint.load` reads, whatever its number of ranks."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from trainfold.backends.formats.dcp.dcp_writer import ReadPart, write_dcp
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import Box
from trainfold.core.state.spec import dtype_name
from trainfold.core.state.state import OptimizerState, TrainState
from trainfold.core.torch_files.dcp_metadata import PathInState
from trainfold.core.torch_files.dcp_plan import plan_dcp
from trainfold.core.weights.source import ListedSource, Wanted

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
        InvalidArgument: if there is something at the path, or an object has the name of a tensor.
        InvalidState: for what torch has no name for: a rank's part of a leaf, fp32 masters, the state of an optimizer with more than slots and groups.
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
    if isinstance(contents, TrainState):
        tensors, others, paths = _of_state(contents, top, optimizer)
        specs = {name: LeafSpec(dtype_name(each.dtype), tuple(each.shape)) for name, each in tensors.items()}
        write_dcp(
            plan_dcp(specs, others | dict(objects or {}), paths=paths, file_bytes=file_bytes),
            lambda name, _: tensors[name].detach(),
            path,
            identity=os.urandom(16).hex(),  # values in memory are not known again
        )
        return
    if not isinstance(contents, ListedSource):
        raise InvalidArgument("write_dcp_directory.contents", expected="a state, or a source that lists what it has",
                              found=type(contents).__qualname__, fix="pass a TrainState, or one of trainfold.weights with specs()")  # fmt: skip
    listed = contents.specs()
    names = {".".join((*top, name)): name for name in listed}
    plan = plan_dcp(
        {full: listed[name] for full, name in names.items()},
        objects,
        paths={full: (*top, name) for full, name in names.items()},
        file_bytes=file_bytes,
    )
    read = _reader(contents, listed)
    write_dcp(plan, lambda full, box: read(names[full], box), path, identity=os.urandom(16).hex())


def _reader(source: ListedSource, listed: Mapping[str, LeafSpec]) -> ReadPart:
    """What reads a part of a tensor of a source."""

    def read(name: str, box: Box) -> torch.Tensor:
        spec = listed[name]
        for _, tensor in source.supply({name: Wanted(spec.dtype, spec.shape, box)}):
            return tensor
        raise InvalidState(
            name,
            expected=f"a tensor from {source!r}, which lists it",
            found="none",
            fix="let supply() yield what specs() lists",
        )

    return read


def _of_state(
    state: TrainState, top: PathInState, optimizer: str
) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, PathInState]]:
    """Tensors and objects by name, and the keys of each."""
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, Any] = {}
    paths: dict[str, PathInState] = {}

    def add(path: PathInState, value: Any) -> None:
        name = ".".join(map(str, path))
        paths[name] = path
        if isinstance(value, Shard):
            raise InvalidState(name, expected="a whole tensor", found="a rank's part of one",
                               fix="save a checkpoint on all ranks, and write the directory from that in one process")  # fmt: skip
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            others[name] = value

    if state.model is not None:
        leaves = {**state.model.params, **state.model.buffers}
        for name, leaf in leaves.items():
            add((*top, name), leaf)
        for alias, name in state.model.ties:
            add((*top, alias), leaves[name])
    if state.optimizer is not None:
        for path, value in _of_optimizer(state.optimizer):
            add((optimizer, *path), value)
    if state.trainer is not None:
        add(("step",), state.trainer.step)
    return tensors, others, paths


def _of_optimizer(found: Any) -> Iterator[tuple[PathInState, Any]]:
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
