"""Models that FSDP2 shards, with uneven and empty parts, and their bits over all ranks."""

import hashlib

import torch
from torch import nn

from trainfold.core.state.names.wrapper_names import canonical_name

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
}


class Model(nn.Module):
    """Of its parts over two ranks some are uneven (7 rows), and one rank has nothing of some (1 row)."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.dropout = nn.Dropout(0.25)
        self.second = nn.Linear(7, 8)
        self.last = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.ones(3, 2))
        self.register_buffer("mean", torch.arange(5.0))

    def forward(self, x):
        x = self.dropout(torch.relu(self.first(x)))
        return self.last(torch.relu(self.second(x))) * self.scale.sum()


def sharded(world_size, *, mesh_shape=None, seed=0, **options):
    """The model as `fully_shard` makes it: two layers on their own, and the rest at the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = Model()
    shape = tuple(mesh_shape or (world_size,))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole(tensor):
    """All of a tensor, on every rank: a collective call for a DTensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def bits(model, optimizer=None):
    """A digest of every parameter, buffer and slot, whole; the same on all ranks, however they are cut."""
    found = hashlib.sha1()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, parameter in [] if optimizer is None else model.named_parameters():
        slots = optimizer.state.get(parameter, {})
        tensors += [(f"{name} {key}", slots[key]) for key in sorted(slots)]
    for name, tensor in tensors:
        found.update(canonical_name(name).encode())
        found.update(whole(tensor.detach()).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def train(model, optimizer, live, manager, *, steps):
    """Train to a step; each rank has data of its own."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    while live.progress.step < steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * live.progress.step + rank))
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        live.advance(samples=4)
        manager.step(live)
