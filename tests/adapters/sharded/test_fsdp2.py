"""FSDP2 (`fully_shard`): real ranks save their parts, and a run that resumes on as many ranks ends with the same bits."""

import pytest
import torch
from kit.adapters.fsdp2_cases import OPTIMIZERS, Model, bits, sharded, train
from kit.depth import IS_DEEP
from kit.system.rank_refusals_cases import PATIENT
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.disabled import DisabledManager
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import SingleProcess

pytestmark = pytest.mark.slow(2)

# Each optimizer, each way to save, and saves in the background of the step that leaves no trace in a version counter.
RUNS = [("sgd", "sync"), ("adamw", "async"), ("foreach", "async"), ("fused", "sync"), ("amsgrad", "sync")]
if IS_DEEP:
    RUNS = [(kind, mode) for kind in OPTIMIZERS for mode in ("sync", "async")]


def run(collectives, folder, *, kind="adamw", mode="sync", steps=6, restore=None, in_place=False, seed=0, **options):
    """A run to a step, or from a checkpoint; returns the bits at its start and at its end."""
    model = sharded(collectives.world_size, seed=seed, **options)
    optimizer = OPTIMIZERS[kind](model.parameters())
    torch.manual_seed(5 + collectives.rank)  # other dropout masks on each rank
    live = attach(model, optimizer)
    with CheckpointManager(folder, every=2, mode=mode, collectives=collectives) as manager:
        found = manager.restore(live, step=restore, in_place=in_place)
        assert found.is_fresh == (restore is None)
        start = bits(model, optimizer)
        train(model, optimizer, live, manager, steps=steps)
    return start, bits(model, optimizer)


def undisturbed(collectives, folder):
    return {(kind, mode): run(collectives, f"{folder}/{kind}-{mode}", kind=kind, mode=mode) for kind, mode in RUNS}


def resumed(collectives, folder):
    options = {"restore": 4, "seed": 9}
    return {
        (kind, mode): run(
            collectives, f"{folder}/{kind}-{mode}", kind=kind, mode=mode, in_place=mode == "sync", **options
        )
        for kind, mode in RUNS
    }


def test_a_run_that_resumes_on_as_many_ranks_ends_with_the_bits_of_one_that_was_not_stopped(processes, tmp_path):
    """Each torch optimizer, its saves in the call and in the background; seven rows on two ranks, and one row on two ranks; restored in both ways."""
    whole = processes.run(2, undisturbed, str(tmp_path), collectives=PATIENT)
    parts = processes.run(2, resumed, str(tmp_path), collectives=PATIENT)
    assert whole[0] == whole[1]
    for key, (_, end) in whole[0].items():
        assert parts[0][key][1] == parts[1][key][1] == end, key


# --- other worlds -----------------------------------------------------------------------------------------------------


def saved(collectives, folder, kinds):
    return {kind: run(collectives, f"{folder}/{kind}", kind=kind, steps=4)[1] for kind in kinds}


def loaded(collectives, folder, kinds, mesh_shape=None):
    options = {"steps": 4, "restore": 4, "seed": 9, "mesh_shape": mesh_shape}
    return {
        kind: run(collectives, f"{folder}/{kind}", kind=kind, in_place=kind != "fused", **options)[0] for kind in kinds
    }


def alone(folder, kind):
    """The whole model, without `fully_shard`, in one process."""
    torch.manual_seed(9)
    model = Model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    live = attach(model, optimizer)
    with CheckpointManager(folder, collectives=SingleProcess()) as manager:
        assert manager.restore(live).step == 4
    found = bits(model, optimizer)
    train(model, optimizer, live, DisabledManager(), steps=5)
    return found


def test_what_two_ranks_saved_has_the_same_bits_on_any_number_of_ranks_and_without_fsdp2(processes, tmp_path):
    """F40, N01, P09: parameters and slots of uneven, padded and empty parts."""
    kinds = ["sgd", "fused", "amsgrad"] if IS_DEEP else ["fused", "amsgrad"]
    wanted = processes.run(2, saved, str(tmp_path), kinds, collectives=PATIENT)[0]
    for world_size in (1, 2, 3, 4) if IS_DEEP else (3,):
        for found in processes.run(world_size, loaded, str(tmp_path), kinds, collectives=PATIENT):
            assert found == wanted, world_size
    assert {kind: alone(tmp_path / kind, kind) for kind in kinds} == wanted


def from_one(folder, kind):
    model = Model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    live = attach(model, optimizer)
    with CheckpointManager(folder, collectives=SingleProcess()) as manager:
        train(model, optimizer, live, manager, steps=4)
        manager.save(live)
    return bits(model, optimizer)


def test_what_one_process_saved_without_fsdp2_has_the_same_bits_on_three_ranks_of_it(processes, tmp_path):
    wanted = {"adamw": from_one(tmp_path / "adamw", "adamw")}
    for found in processes.run(3, loaded, str(tmp_path), ["adamw"], collectives=PATIENT):
        assert found == wanted


def in_parts(collectives, folder):
    """The layers of the model as two modules, each sharded on its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (collectives.world_size,))
    parts = [sharded(collectives.world_size), Model()]
    last = nn.ModuleDict({"more": fully_shard(parts[1].second, mesh=mesh)})
    optimizer = torch.optim.AdamW([*parts[0].parameters(), *last.parameters()], lr=0.1)
    live = attach([parts[0], last], optimizer)
    last["more"](parts[0](torch.ones(2, 6)).expand(2, 7)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    live.advance(samples=2)
    with CheckpointManager(folder, collectives=collectives) as manager:
        manager.save(live)
    return {name: tuple(leaf.shape) for name, leaf in live.capture().model.params.items()}, bits(parts[0]), bits(last)


def test_a_list_of_sharded_modules_is_saved_under_the_names_of_its_parts(processes, tmp_path):
    shapes, *wanted = processes.run(2, in_parts, str(tmp_path), collectives=PATIENT)[0]
    assert shapes["first.weight"] == (7, 6)
    assert shapes["more.weight"] == (8, 7)
    model, more = Model(), nn.ModuleDict({"more": nn.Linear(7, 8)})
    live = attach([model, more])
    with CheckpointManager(tmp_path, collectives=SingleProcess(), components=["model"]) as manager:
        manager.restore(live)
    assert [bits(model), bits(more)] == wanted


# --- tensor parallelism -----------------------------------------------------------------------------------------------


def parallel(collectives, dp, hidden, *, seed=0):
    """A model that is cut over two ranks by tensor parallelism, in both dimensions, and over the others by `fully_shard`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 3), nn.LayerNorm(3))
    if collectives is None:
        return model
    mesh = init_device_mesh("cpu", (dp, collectives.world_size // dp), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if dp > 1:
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh["dp"])
    return model


def parallel_run(collectives, folder, dp, hidden, *, steps, restore=None, seed=0):
    model = parallel(collectives, dp, hidden, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)  # some parameters are plain tensors
    live = attach(model, optimizer)
    with CheckpointManager(folder, every=2, collectives=collectives or SingleProcess()) as manager:
        manager.restore(live, step=restore, in_place=hidden == 10)
        start = bits(model, optimizer)
        group = 0 if collectives is None else collectives.rank // 2  # ranks of one replica have the same data
        while live.progress.step < steps:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * live.progress.step + group))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            live.advance(samples=4)
            manager.step(live)
    return start, bits(model, optimizer)


def widths(dp):
    """Columns that all ranks have alike, and such that they do not."""
    return (8, 10) if IS_DEEP else (8,) if dp == 1 else (10,)


def parallel_runs(collectives, folder, options):
    """Of ten columns that two ranks have five each of, FSDP2 gives three to one and two to the other."""
    dp = collectives.world_size // 2
    return [parallel_run(collectives, f"{folder}/{dp}-{hidden}", dp, hidden, **options) for hidden in widths(dp)]


def test_tensor_parallelism_alone_and_under_fsdp2_resumes_exactly_and_fits_the_model_without_both(processes, tmp_path):
    folder = str(tmp_path)
    for world_size, dp in ((2, 1), (4, 2)):
        whole = processes.run(world_size, parallel_runs, folder, {"steps": 6}, collectives=PATIENT)
        options = {"steps": 6, "restore": 4, "seed": 9}
        parts = processes.run(world_size, parallel_runs, folder, options, collectives=PATIENT)
        assert [[end for _, end in rank] for rank in parts] == [[end for _, end in rank] for rank in whole]
        for hidden, (start, _) in zip(widths(dp), parts[0], strict=True):
            assert start == parallel_run(None, f"{folder}/{dp}-{hidden}", dp, hidden, steps=4, restore=4, seed=7)[0]
