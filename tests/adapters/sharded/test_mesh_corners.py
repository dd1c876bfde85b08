"""The mesh matrix with real ranks: `parallelize_module` (row, column, sequence, embedding), alone and under `fully_shard`, HSDP, and names of the user's own."""

import pytest
import torch
from kit.adapters.fsdp2_cases import bits
from kit.backends.mesh_cases import Layout, layouts
from kit.system.rank_refusals_cases import PATIENT
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import SingleProcess

WORLDS = (1, 2, 3, 4, 8)
DRIFTS = "ignore::trainfold.backends.runs.load.ResumeDrift"  # another foreach=, and another numerical environment of the ranks


class Block(nn.Module):
    """Seven rows, which no number of ranks divides, and on eight ranks one has none."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.norm = nn.LayerNorm(5)
        self.up, self.down = nn.Linear(5, 10), nn.Linear(10, 5)


def made(layout, *, seed):
    """The model on a layout, and its optimizer; under tensor parallelism that works on each tensor alone, as torch demands where some are whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(seed)
    model = Block()
    nn.init.normal_(model.norm.weight)
    kind, sizes = layout
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("island", "wire")[-len(sizes) :]) if kind != "dp" else None
    if "tp" in kind:
        plan = {
            "embedding": RowwiseParallel(),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(model, mesh["wire"], plan)
    if kind in ("fsdp", "hsdp", "fsdp x tp"):
        inner = mesh["island"] if kind == "fsdp x tp" else mesh
        for each in (model.up, model.down, model):
            fully_shard(each, mesh=inner)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False if "tp" in kind else None)


def name_of(layout):
    return f"{layout.kind.replace(' ', '')}-{'x'.join(map(str, layout.sizes))}"


def save_all(collectives, folder, chosen):
    """Take a step, whose gradients are the weights, and save, on each layout; return the bits of the gathered tensors."""
    found = {}
    for layout in (Layout(kind, tuple(sizes)) for kind, sizes in chosen):
        model, optimizer = made(layout, seed=0)
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        live = attach(model, optimizer)
        live.advance(samples=1)
        with CheckpointManager(f"{folder}/{name_of(layout)}", every=None, collectives=collectives) as manager:
            manager.save(live)
        found[name_of(layout)] = bits(model, optimizer)
    return found


def load_all(collectives, folder, names, chosen):
    """Load each checkpoint on each layout; return the bits of the gathered tensors, or the errors."""
    found = {}
    for layout in (Layout(kind, tuple(sizes)) for kind, sizes in chosen):
        for name in names:
            model, optimizer = made(layout, seed=1)
            live = attach(model, optimizer)
            with CheckpointManager(
                f"{folder}/{name}", every=None, at_end=False, collectives=collectives or SingleProcess()
            ) as manager:
                assert manager.restore(live).step == 1
            found[f"{name} onto {'one process' if collectives is None else name_of(layout)}"] = bits(model, optimizer)
    return found


def plain(chosen):
    return [[layout.kind, layout.sizes] for layout in chosen]


@pytest.mark.slow(2)
@pytest.mark.filterwarnings(DRIFTS)
def test_tensor_parallelism_over_two_ranks_loads_onto_fsdp2_over_three_and_onto_one_process(processes, tmp_path):
    """X01, N01."""
    (bits_of,) = {
        *processes.run(2, save_all, str(tmp_path), plain([Layout("tp", (2,))]), collectives=PATIENT)[0].values()
    }
    loaded = processes.run(3, load_all, str(tmp_path), ["tp-2"], plain([Layout("fsdp", (3,))]), collectives=PATIENT)
    alone = load_all(None, tmp_path, ["tp-2"], [Layout("dp", (1,))])
    assert {bits for rank in (*loaded, alone) for bits in rank.values()} == {bits_of}


@pytest.mark.long
@pytest.mark.slow(60)
@pytest.mark.filterwarnings(DRIFTS)
def test_each_layout_over_two_to_eight_real_ranks_loads_onto_each_other_one_and_onto_one_process(processes, tmp_path):
    """X01, N01: every pair of the matrix; all have the bits of one another's gathered tensors, as all began with the same ones."""
    saved = {}
    for size in WORLDS:
        saved |= processes.run(size, save_all, str(tmp_path), plain(layouts((size,))), collectives=PATIENT)[0]
    assert len(set(saved.values())) == 1
    found = load_all(None, tmp_path, list(saved), [Layout("dp", (1,))])
    for size in WORLDS:
        found |= processes.run(
            size, load_all, str(tmp_path), list(saved), plain(layouts((size,))), collectives=PATIENT, timeout_secs=600
        )[0]
    assert len(found) == len(saved) * (len(saved) + 1)
    assert {pair: bits for pair, bits in found.items() if bits not in saved.values()} == {}
