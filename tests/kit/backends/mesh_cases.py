"""The meshes on which people train, and how each cuts the tensors of a transformer: in torch's own words, which trainfold reads."""

from typing import NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from trainfold.adapters.sharded.dtensor import _cuts
from trainfold.core.layout import shard as leaf
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, OptimizerState, ParamGroup, Progress, TrainState


class Layout(NamedTuple):
    """A way to train, and the shape of its mesh."""

    kind: str
    sizes: tuple[int, ...]

    @property
    def size(self):
        """The number of ranks."""
        return make_mesh(self.sizes).size


def layouts(worlds):
    """Every layout over these numbers of ranks."""
    found = []
    for size in worlds:
        found += [Layout(kind, (size,)) for kind in ("dp", "fsdp", "tp")[: 3 if size > 1 else 2]]
        pairs = [(outer, size // outer) for outer in range(2, size) if not size % outer]
        found += [Layout(kind, pair) for kind in ("hsdp", "fsdp x tp") for pair in pairs]
    return found


ALL = layouts((1, 2, 3, 4, 8))
CUT = {
    "embedding": 0,
    "column": 0,
    "column bias": 0,
    "row": 1,
}  # the dimension that tensor parallelism cuts; norms and other biases are whole


def torchs(layout, role):
    """The placements that `parallelize_module` and `fully_shard` give a tensor."""
    kind, sizes = layout
    cut = CUT.get(role)
    of_tp = Replicate() if cut is None else Shard(cut)
    if kind == "dp":
        return (Replicate(),)
    if kind == "fsdp":
        return (Shard(0),)
    if kind == "hsdp":
        return Replicate(), Shard(0)
    if kind == "tp":
        return (of_tp,)
    return (_StridedShard(0, split_factor=sizes[1]) if cut == 0 else Shard(0)), of_tp


def shapes(vocabulary, width, hidden):
    """The tensors of a small transformer by role."""
    return {"embedding": (vocabulary, width), "norm": (width,), "column": (hidden, width), "column bias": (hidden,),
            "row": (width, hidden), "row bias": (width,)}  # fmt: skip


def part(value, layout, role, rank):
    """What a rank holds of a tensor: the tensor itself, or a shard."""
    placements = torchs(layout, role)
    cuts = _cuts(value.dim(), layout.sizes, placements)
    if not any(cuts):
        return value.clone()
    rule = make_placement(make_mesh(layout.sizes), cuts)
    at = rule.mesh.coordinate_of(rank)
    box = rule.box(tuple(value.shape), at)
    held = value[tuple(slice(low, high) for low, high in box)].clone()
    return leaf.Shard(held, tuple(value.shape), tuple(low for low, _ in box), rule.at(at).replicas > 1, rule)


def state(values, layout, rank, *, fill=None):
    """The state of a rank, with a slot beside each parameter."""

    def held(role, value):
        found = part(value, layout, role, rank)
        if fill is not None:
            (found.tensor if isinstance(found, leaf.Shard) else found).fill_(fill)
        return found

    params = {role: held(role, value) for role, value in values.items()}
    slots = {
        role: {"exp_avg": held(role, value + 0.5), "step": torch.tensor(3.0 if fill is None else 0.0)}
        for role, value in values.items()
    }
    optimizer = OptimizerState("torch.optim.adamw.AdamW", Leaves(slots), (ParamGroup({"lr": 0.1}, tuple(values)),))
    return TrainState(model=ModelState(Leaves(params), Leaves()), optimizer=optimizer, trainer=Progress(step=3))
