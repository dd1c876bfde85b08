"""Directories of distributed checkpoints that torch itself writes in one process, as any number of ranks with any cuts would."""

import warnings
from itertools import pairwise

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from trainfold.core.format.codec import torch_dtype
from trainfold.core.format.dtypes import STORED
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import whole_box
from trainfold.core.state.spec import dtype_name
from trainfold.core.tensor_memory import tensor_bytes
from trainfold.core.weights.source import Wanted

DTYPES = [name for name in STORED if name not in ("float4_e2m1fn_x2", "float8_e8m0fnu", "uint16", "uint32", "uint64")]


class _Parts(SavePlanner):
    """Gives the writer the parts of one rank."""

    def __init__(self, items):
        self.items = items

    def set_up_planner(self, *_, **__): ...
    def create_local_plan(self): ...
    def create_global_plan(self, all_plans): ...
    def finish_plan(self, new_plan): ...

    def resolve_data(self, write_item):
        return self.items[write_item.index]


def write_parts(path, tensors, cuts, *, ranks, **writer_options):
    """Write tensors as the given boxes of each, box number n by rank n modulo the ranks."""
    plans, data = [[] for _ in range(ranks)], {}
    number = 0
    for name, tensor in tensors.items():
        for box in cuts[name]:
            part = tensor[tuple(slice(*side) for side in box)]
            offsets = torch.Size([start for start, _ in box])
            index = MetadataIndex(name, offsets, len(plans))
            data[index] = part
            chunk = ChunkStorageMetadata(offsets, part.shape)
            written = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), tensor.shape)
            plans[number % ranks].append(WriteItem(index, WriteItemType.SHARD, tensor_data=written))
            number += 1
    writer = FileSystemWriter(path, sync_files=False, **writer_options)
    writer.set_up_storage_writer(True)
    plans = writer.prepare_global_plan([writer.prepare_local_plan(SavePlan(items)) for items in plans])
    plans, metadata = create_default_global_save_plan(plans)
    results = [writer.write_data(plan, _Parts(data)).wait() for plan in plans]
    writer.finish(metadata, results)


def save(path, state):
    """What a program of one process saves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)


def load(path, state):
    """What a program of one process loads, in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path, no_dist=True)


def bits(tensor):
    """The bytes of a tensor, to compare NaNs too."""
    return tensor.dtype, tuple(tensor.shape), bytes(tensor_bytes(tensor))


def all_bits(tensors):
    return {name: bits(each) for name, each in tensors.items()}


def everything(source):
    """Each tensor of a source, whole."""
    wanted = {name: Wanted(each.dtype, each.shape, whole_box(each.shape)) for name, each in source.specs().items()}
    return {name: tensor.clone() for name, tensor in source.supply(wanted)}


def specs_of(tensors):
    return {name: LeafSpec(dtype_name(each.dtype), tuple(each.shape)) for name, each in tensors.items()}


@st.composite
def tensors(draw, max_size=4):
    """Tensors of any dtype and shape, of random bytes."""
    found = {}
    names = draw(
        st.lists(st.sampled_from(["a", "b.weight", "layers.0.w", "layers.1.w", "c"]), unique=True, max_size=max_size)
    )
    for name in names:
        dtype = torch_dtype(draw(st.sampled_from(DTYPES)))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        count = torch.Size(shape).numel()
        data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
        if dtype is torch.bool:
            data = bytes(each & 1 for each in data)
        found[name] = (
            torch.frombuffer(bytearray(data), dtype=dtype).view(shape).clone()
            if count
            else torch.empty(shape, dtype=dtype)
        )
    return found


@st.composite
def cut_of(draw, shape):
    """Boxes that cover a shape once: a grid, whose lines may coincide, so that some boxes are empty."""
    boxes = [()]
    for size in shape:
        lines = sorted([0, size, *draw(st.lists(st.integers(0, size), max_size=2))])
        sides = list(dict.fromkeys(pairwise(lines)))
        boxes = [(*box, side) for box in boxes for side in sides]
    return boxes


@st.composite
def box_in(draw, shape):
    """A box of a shape that is not empty, unless the shape is."""
    found = []
    for size in shape:
        start = draw(st.integers(0, max(0, size - 1)))
        found.append((start, draw(st.integers(min(start + 1, size), size))))
    return tuple(found)
