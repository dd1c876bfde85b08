"""`opened_weights`: gives the weights of a source, or of a state, for reading in any order. `ReusedMemory`: reads them one after the other into the same memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

import attrs
import torch

from trainfold.backends.hold.write_watch import WriteWatch
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.format.codec import as_tensor, torch_dtype
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import Box, volume, whole_box
from trainfold.core.state.spec import dtype_name
from trainfold.core.state.state import TrainState
from trainfold.core.weights.open_weights import OpenSource, OpenWeights
from trainfold.core.weights.source import ListedSource, Wanted, listed_by
from trainfold.core.weights.supplied import supplied


@contextmanager
def opened_weights(weights: Any) -> Iterator[OpenWeights]:
    """Give weights for reading in any order, until the block ends.

    Args:
        weights: a source that lists what it has, or a state with a model.

    Raises:
        InvalidArgument: for anything else.
    """
    if isinstance(weights, TrainState):
        found = weights_of_state(weights)
        _check_whole(weights)
        yield attrs.evolve(found, check=unchanged(weights))
    elif isinstance(weights, OpenSource):
        with weights.opened() as found:
            yield found
    elif isinstance(weights, ListedSource):
        yield _of_listed(weights)
    else:
        raise InvalidArgument(
            "weights", expected="a source that lists what it has, such as CheckpointWeights(run) and HubDirectory(path), or a state with a model",
            found=type(weights).__qualname__, fix="pass CheckpointWeights(run), or live.capture()")  # fmt: skip


def _check_whole(state: TrainState) -> None:
    assert state.model is not None, "checked"
    leaves = {**state.model.params, **state.model.buffers}
    if cut := [name for name, each in leaves.items() if isinstance(each, Shard)]:
        raise InvalidArgument(f"weights: {cut[0]}", expected="a whole tensor", found="the part of it that this rank has",
                              fix="save it on all ranks, and pass CheckpointWeights(run) on one of them")  # fmt: skip


def weights_of_state(state: TrainState) -> OpenWeights:
    """The weights of a state. Of a tensor that ranks have in parts it can say dtype and shape, and not read it.

    Raises:
        InvalidArgument: if it has no model, or stages of one.
    """
    model = state.model
    if model is None or state.stage is not None:
        found = "one without a model" if model is None else "the stages of a pipeline that this rank has"
        raise InvalidArgument("weights", expected="a state with a whole model", found=found,
                              fix="save it, and pass CheckpointWeights(run)")  # fmt: skip
    leaves = {**model.params, **model.buffers}
    tensors = {name: as_tensor(each.tensor if isinstance(each, Shard) else each, name) for name, each in leaves.items()}
    shapes = {name: tuple(each.shape) for name, each in leaves.items()}

    def read(name: str, box: Box) -> torch.Tensor:
        return tensors[name][tuple(slice(*each) for each in box)]

    return OpenWeights(
        {name: LeafSpec(dtype_name(each.dtype), shapes[name]) for name, each in tensors.items()},
        read,
        ties=dict(model.ties),
        buffers=frozenset(model.buffers),
    )


def unchanged(state: TrainState) -> Callable[[], None]:
    """What raises if the model of a state has been written to since. Its bytes are read now and then, because a fused optimizer, ``tensor.data`` and numpy move no version counter.

    Args:
        state: of which this rank has a part, or all.
    """
    model = state.model
    leaves = {} if model is None else {**model.params, **model.buffers}
    tensors = {name: as_tensor(each.tensor if isinstance(each, Shard) else each, name) for name, each in leaves.items()}
    watched = {("", name): each.detach() for name, each in tensors.items()}
    watch = WriteWatch(watched, but={name for name, each in watched.items() if each.is_inference()}, by_bytes=True)

    def check() -> None:
        if model is not None:
            _ = [*model.params.values(), *model.buffers.values()]  # a step that took their memory is named
        watch.end()
        if watch.written:
            name = min(watch.written)[1]
            raise InvalidState(
                f"weights: {name}", expected="the values that it had at the call", found="a write to it while it was read",
                fix="save the run, and export the checkpoint: CheckpointWeights(run) has the values of that step, while training goes on")  # fmt: skip

    return check


def _of_listed(source: ListedSource) -> OpenWeights:
    specs = dict(listed_by(source))

    def read(name: str, box: Box) -> torch.Tensor:
        each = specs[name]
        for found, tensor in supplied(source, {name: Wanted(each.dtype, each.shape, box)}):
            if found == name:
                is_whole = tuple(tensor.shape) == each.shape and box != whole_box(each.shape)
                return tensor[tuple(slice(*side) for side in box)] if is_whole else tensor
        raise InvalidState(
            f"{source!r}: {name}", expected="a tensor, as it lists", found="none", fix="see why it was not supplied"
        )

    return OpenWeights(specs, read)


@final
class ReusedMemory:
    """Reads tensors into memory that the next one overwrites: to get fresh memory takes longer than to read into it.

    Args:
        weights: from which it reads.
    """

    def __init__(self, weights: OpenWeights) -> None:
        self.weights: Final = weights
        self._memory = torch.empty(0, dtype=torch.uint8)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A part of a tensor, until the next call."""
        if self.weights.read_into is None:
            return self.weights.read(name, box)
        dtype = torch_dtype(self.weights.specs[name].dtype)
        shape = [stop - start for start, stop in box]
        size = volume(box) * dtype.itemsize
        if size > self._memory.nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # before: both would be there at once
            self._memory = torch.empty(size, dtype=torch.uint8)
        found = self._memory[:size].view(dtype).view(shape)
        self.weights.read_into(name, box, found)
        return found
