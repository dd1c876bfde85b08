"""Gradients that torch holds where `.grad` does not show them, and backwards that fail part way, on two ranks."""

import contextlib

import pytest
import torch
from kit.adapters.fsdp2_cases import whole
from kit.system.rank_refusals_cases import PATIENT, refusal
from torch import nn

from trainfold.adapters.live.attach import attach


class Fails(nn.Module):
    """Raises in its forward or in its backward, once."""

    armed: str | None = None

    def forward(self, x):
        if self.armed == "forward":
            self.fire()
        x = x.clone()
        if x.requires_grad:
            x.register_hook(lambda _: self.fire() if self.armed == "backward" else None)
        return x

    def fire(self):
        self.armed = None
        raise ZeroDivisionError


def built(kind, size):
    model, generator = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), Fails(), nn.Linear(6, 2)), torch.Generator()
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, generator=generator.manual_seed(each.numel())) / 4)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind in ("fsdp2", "hsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        shape, names = ((size, 1), ("r", "s")) if kind == "hsdp" else ((size,), ("s",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for part in (model[0], model[3], model):
            fully_shard(part, mesh=mesh)
    return model


def attached(kind, size):
    model = built(kind, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, attach(model, optimizer)


def backward(model, index, rank=0):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * index + rank))
    (model(x).square().mean() / 2).backward()


def gradients(model):
    return [whole(each.grad).tolist() for each in model.parameters()]


def weights(model):
    return [whole(each.detach()).tolist() for each in model.parameters()]


# --- HSDP that reduces each microbatch inside a replica, and sums the replicas in the last ----------------------------


def delayed_all_reduce(collectives):
    rank, size = collectives.rank, collectives.world_size

    def half_a_window(live, model, index=0):
        model.set_requires_all_reduce(False)
        backward(model, index, rank)
        model.set_requires_all_reduce(True)
        return live

    def next_gradients(model):
        backward(model, 5, rank)
        return gradients(model)

    model, optimizer, live = attached("hsdp", size)
    wanted = next_gradients(built("hsdp", size))
    found = {"save": refusal(half_a_window(live, model).capture)}
    live.drop_window()
    found |= {"dropped": refusal(live.capture), "after drop": next_gradients(model) == wanted}

    model, optimizer, live = attached("hsdp", size)
    state = live.capture()
    half_a_window(live, model)
    live.restore(state)
    found["after restore"] = next_gradients(model) == wanted

    model, optimizer, live = attached("hsdp", size)
    half_a_window(live, model)
    found["check"] = refusal(lambda: live.check(1.0))
    optimizer.step()
    found["advance"] = refusal(lambda: live.advance(samples=4))

    # another optimizer may step, whose parameters have nothing to do with the window
    other = nn.Linear(2, 1)
    of_other = torch.optim.SGD(other.parameters(), lr=0.1)
    model, optimizer, live = attached("hsdp", size)
    live.register("other", other)
    live.register("of_other", of_other)
    half_a_window(live, model)
    of_other.step()
    found["another"] = refusal(lambda: live.advance(samples=4))
    return found


def everything(collectives, folder):
    return {"delayed": delayed_all_reduce(collectives)}


@pytest.fixture(scope="module")
def two_ranks(processes, tmp_path_factory):
    """What each rank found; the world is started once."""
    return processes.run(2, everything, str(tmp_path_factory.mktemp("runs")), collectives=PATIENT)


@pytest.mark.slow(4)
def test_a_window_whose_replicas_are_not_summed_yet_is_open(two_ranks):
    """A06, F52: `set_requires_all_reduce(False)` keeps gradients that `.grad` does not show; a save, a check and a step are refused."""
    for found in (each["delayed"] for each in two_ranks):
        assert found["save"].startswith("IncompleteWindow"), found
        assert "FSDP2 holds back" in found["save"]
        assert found["dropped"] == "nothing"
        assert found["advance"].startswith("IncompleteWindow"), found
        assert "set_requires_all_reduce" in found["advance"]
        assert found["another"] == "nothing"


def test_dropping_a_window_and_a_restore_leave_nothing_of_it_behind(two_ranks):
    """The next window has the gradients of a model that never had the one before."""
    for found in (each["delayed"] for each in two_ranks):
        assert found["after drop"]
        assert found["after restore"]
