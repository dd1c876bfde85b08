"""Models built on meta and cut over real ranks: values at any sharding, loads of what is missing, and what ranks must agree on."""

import warnings
from pathlib import Path

import pytest
import torch
from kit.adapters.construct_cases import KINDS, Net, all_bits, built
from kit.system.rank_refusals_cases import PATIENT
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.construct import initialize, materialize, on_meta
from trainfold.core.errors import InvalidArgument, InvalidState, RankFailed

pytestmark = pytest.mark.slow(2)
CHOSEN = [*KINDS, "linear"]


def sharded(world_size, *, mesh_shape=None):
    """The net on meta, cut by FSDP2: some layers on their own, tied ones at the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = on_meta(lambda: Net(CHOSEN))
    shape = tuple(mesh_shape or (world_size,))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for index in (0, 1, len(CHOSEN) - 1):
        fully_shard(model.layers[index], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def initialised(collectives, mesh_shape=None):
    model = sharded(collectives.world_size, mesh_shape=mesh_shape)
    before = list(model.parameters())
    materialize(model, "cpu")
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    found = initialize(model, seed=0, collectives=collectives)
    held = sum(each.untyped_storage().nbytes() for each in (getattr(p, "_local_tensor", p) for p in model.parameters()))
    return found, all_bits(model), held


@pytest.mark.parametrize(("world_size", "mesh_shape"), [(2, None), (4, None), (4, (2, 2))])
def test_values_are_the_same_at_any_sharding(processes, world_size, mesh_shape):
    """I08, I06: uneven and empty parts, replicas of parts; each rank holds its rows, padded, and not the model."""
    model = built(CHOSEN)
    wanted, names = all_bits(model), initialize(on_memory(), seed=0)
    whole = sum(each.nbytes for each in model.parameters())
    for found, bits, held in processes.run(world_size, initialised, mesh_shape, collectives=PATIENT):
        assert bits == wanted
        assert found == names
        assert held < whole / (1.5 if world_size == 2 or mesh_shape else 2.5)


def on_memory():
    model = on_meta(lambda: Net(CHOSEN))
    materialize(model, "cpu")
    return model


def run(collectives, folder, *, steps, layers, policy=None):
    """Train a sharded model that was built on meta; returns what was initialised, and the bits at the start and at the end."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = on_meta(lambda: nn.Sequential(*(nn.Linear(5, 5) for _ in range(layers))))
    mesh = init_device_mesh("cpu", (collectives.world_size,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    materialize(model, "cpu")
    live = attach(model, adamw)
    with CheckpointManager(folder, every=1, collectives=collectives, policy=policy) as manager:
        manager.restore(live, in_place=True)
        found = initialize(model, seed=0, collectives=collectives)
        start = all_bits(model)
        while live.progress.step < steps:
            model(torch.ones(2, 5)).square().mean().backward()
            adamw.step()
            adamw.zero_grad()
            live.advance(samples=2)
            manager.step(live)
        manager.finish(live)
    return found, start, all_bits(model)


def resumed(collectives, folder):
    first = run(collectives, folder, steps=2, layers=2)
    again = run(collectives, folder, steps=2, layers=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grown = run(collectives, folder, steps=2, layers=3, policy={"missing": "adapt"})
    return first, again, grown


def test_a_sharded_run_resumes_and_a_new_layer_is_initialised(processes, tmp_path):
    """I01, P17, I05: read in place, so that no second copy of a part is made; a layer that the checkpoint lacks is that of a fresh run."""
    for first, again, grown in processes.run(2, resumed, str(tmp_path), collectives=PATIENT):
        assert first[0] == ("0.weight", "0.bias", "1.weight", "1.bias")
        assert again[0] == ()
        assert again[1] == first[2]
        assert grown[0] == ("2.weight", "2.bias")
        assert first[2].items() <= grown[1].items()


def disagreeing(collectives):
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4)))
    materialize(model, "cpu")
    problems = []
    with pytest.raises(InvalidArgument, match="same seed") as caught:
        initialize(model, seed=collectives.rank, collectives=collectives)
    problems.append(str(caught.value))
    if collectives.rank:
        with torch.no_grad():
            model[0].bias.zero_()
    with pytest.raises(InvalidState, match=r"a value on rank 1, and none on rank 0") as caught:
        initialize(model, seed=0, collectives=collectives)
    problems.append(str(caught.value))
    if collectives.rank:
        with torch.no_grad():
            model[0].weight[0] = 1
    with pytest.raises((InvalidState, RankFailed), match=r"12 of 16|rank 1") as caught:
        initialize(model, seed=0, collectives=collectives)
    problems.append(str(caught.value))
    return problems


def test_ranks_agree_on_what_is_initialised_or_all_are_refused(processes):
    """I08: another seed, a load that only one rank made, and a failure of one rank."""
    one, other = processes.run(2, disagreeing, collectives=PATIENT)
    assert one[:2] == other[:2]
    assert "12 of 16" in other[2]


def staged(collectives):
    """Each rank keeps its layers of the whole model on meta, as a stage of a pipeline; the last is tied to the first."""
    from torch.distributed.pipelining import PipelineStage

    class Stage(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            for layer in self.layers.values():
                x = layer(x)
            return x

    kinds = ["embedding", "linear", "rope", "norm", "tied"]
    whole = on_meta(lambda: Net(kinds))
    mine = range(3) if collectives.rank == 0 else range(3, 5)
    part = Stage(nn.ModuleDict({str(index): whole.layers[index] for index in mine}))
    materialize(part, "cpu")
    stage = PipelineStage(part, collectives.rank, 2, torch.device("cpu"))
    found = initialize(stage, seed=0, collectives=collectives)
    attach([stage])
    return found, all_bits(part), all_bits(built(kinds))


def test_two_stages_of_a_pipeline_have_the_values_of_the_whole(processes):
    """I05, I08: each rank makes its stage only; a tied tensor has the same values in both stages."""
    (one, first, whole), (other, last, _) = processes.run(2, staged, collectives=PATIENT)
    assert first.items() <= whole.items()
    assert last.items() <= whole.items()
    assert last["layers.4.weight"] == first["layers.0.weight"]
    assert not set(one) & set(other)


def peak_of_a_rank(collectives):
    """How many bytes this rank's resident set grows by at most while it makes its part; and of a whole model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def build():
        return nn.Sequential(*(nn.Linear(512, 512) for _ in range(96)))

    def field(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

    mesh = init_device_mesh("cpu", (collectives.world_size,))
    fully_shard(on_meta(lambda: nn.Linear(2, 2)), mesh=mesh)
    before = field("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    model = on_meta(build)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    materialize(model, "cpu")
    initialize(model, seed=0, collectives=collectives)
    return field("VmHWM") - before, sum(each.numel() * 4 for each in model.parameters())


def test_no_rank_builds_the_whole_model(processes):
    """I06: each rank has its part and one tensor at a time; 96 layers of 1 MiB on two ranks."""
    for peak, whole in processes.run(2, peak_of_a_rank, collectives=PATIENT):
        assert peak < whole / 2 + 16 * 2**20 < 0.7 * whole
