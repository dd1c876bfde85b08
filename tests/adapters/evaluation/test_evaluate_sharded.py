"""Models whose forward communicates: FSDP2 and DDP over gloo, with uneven shares of the data."""

import pytest
import torch
from torch import nn

import trainfold
from trainfold import metrics as M

PATIENT = {"timeout_secs": 60.0, "grace_secs": 10.0}
SUITE = {"loss": M.Ratio(), "largest": M.Max()}
DATA = torch.arange(56.0).view(14, 4) / 7


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 4))


def measure(model):
    def forward(batch):
        found = model(batch)
        return {"loss": (found.square(), found.numel()), "largest": found}

    return forward


def shares(rank):
    """Rank 0 has three batches, the last one smaller, rank 1 one of another size, rank 2 none."""
    return [list(DATA[:10].split(4)), [DATA[10:]], []][rank]


def evaluated(collectives, kind, steps):
    model = make_model()
    if kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (collectives.world_size,))
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=mesh)
        wrapped = model
    else:
        wrapped = nn.parallel.DistributedDataParallel(model)
    before = [parameter.requires_grad for parameter in wrapped.parameters()]
    random_state = torch.get_rng_state()
    mine = shares(collectives.rank)
    found = trainfold.evaluate(measure(wrapped), mine, SUITE, collectives=collectives, steps=steps)
    assert all(part.training for part in wrapped.modules())
    assert [parameter.requires_grad for parameter in wrapped.parameters()] == before
    assert kind == "ddp" or all(type(parameter.data).__name__ == "DTensor" for parameter in wrapped.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    wrapped(DATA).sum().backward()  # it still trains
    assert all(parameter.grad is not None for parameter in wrapped.parameters())
    return {name: value.hex() for name, value in found.items()}, found.batches, found.complete


@pytest.mark.parametrize("steps", [3, None])
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_uneven_shares_of_a_model_that_communicates_do_not_hang_and_count_once(processes, kind, steps):
    """Q05: a rank without a batch takes its part in the model's collectives; what it repeats is not counted.

    Without steps, ranks ask each other; what FSDP2 gathered it shards again.
    """
    model = make_model()
    wanted = trainfold.evaluate(measure(model), [batch for rank in range(3) for batch in shares(rank)], SUITE)
    ranks = processes.run(3, evaluated, kind, steps, collectives=PATIENT)
    for found, batches, complete in ranks:
        assert (batches, complete) == (4, True)
        assert found.keys() == wanted.keys()
        for name, value in found.items():  # a sharded model may round otherwise than a whole one, never by much
            assert float.fromhex(value) == pytest.approx(wanted[name], rel=1e-6)
    assert all(found == ranks[0][0] for found, *_ in ranks)


def refused(collectives):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (collectives.world_size,))
    losses = distribute_tensor(torch.arange(100.0), mesh, [Shard(0)])
    whole = trainfold.evaluate(
        lambda d: {"loss": (d.full_tensor(), d.numel())},
        [losses],
        {"loss": M.Ratio()},
        collectives=trainfold.SingleProcess(),
    )
    try:
        trainfold.evaluate(lambda d: {"loss": (d, d.numel())}, [losses], SUITE, collectives=collectives)
    except trainfold.TrainfoldError as error:
        return whole["loss"], str(error)


def test_a_dtensor_is_refused_and_its_whole_is_not(processes):
    """Q02: sums would be of this rank's shard, and numbers of elements of all."""
    for loss, text in processes.run(2, refused, collectives=PATIENT):
        assert loss == 49.5
        assert "what forward returned for 'loss'" in text
        assert "found DTensor" in text
        assert ".full_tensor()" in text
