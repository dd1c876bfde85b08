"""Gradients that torch holds where `.grad` does not show them, and backwards that fail part way, on two ranks."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from kit.adapters.fsdp2_cases import whole
from kit.system.rank_refusals_cases import PATIENT, refusal
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.parallel import interrupted
from trainfold.core.errors import InvalidState
from trainfold.ranks import SingleProcess


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


def everything(collectives):
    found = {kind: failed_microbatches(collectives, kind) for kind in ("ddp", "fsdp2", "hsdp")}
    return (
        found
        | {"delayed": delayed_all_reduce(collectives), "by hand": by_hand(collectives)}
        | {"evaluated": after_an_evaluation(collectives)}
    )


@pytest.fixture(scope="module")
def two_ranks(processes):
    """What each rank found; the world is started once."""
    return processes.run(2, everything, collectives=PATIENT)


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
        assert found["check"].startswith("IncompleteWindow: live.check"), found
        assert "set_requires_all_reduce" in found["check"]


def test_dropping_a_window_and_a_restore_leave_nothing_of_it_behind(two_ranks):
    """The next window has the gradients of a model that never had the one before."""
    for found in (each["delayed"] for each in two_ranks):
        assert found["after drop"]
        assert found["after restore"]


# --- a microbatch that fails ------------------------------------------------------------------------------------------

FAILURES = [(where, at) for where in ("forward", "backward") for at in (0, 1)]


def armed(model, where):
    for each in model.modules():
        if isinstance(each, Fails):
            each.armed = where


def failed_microbatches(collectives, kind):
    """By where and when a microbatch of two fails: what a second attempt says, and the gradients of a window after a drop."""
    rank = collectives.rank

    def microbatch(live, model, index):
        with live.microbatch(of=2):
            backward(model, index, rank)

    def window(live, model):
        for index in range(2):
            microbatch(live, model, index)
        return gradients(model)

    model, _, live = attached(kind, collectives.world_size)
    wanted, found = window(live, model), {}
    for where, at in FAILURES:
        model, optimizer, live = attached(kind, collectives.world_size)
        for index in range(at):
            microbatch(live, model, index)
        armed(model, where)
        with contextlib.suppress(ZeroDivisionError):
            microbatch(live, model, at)
        again = refusal(lambda: microbatch(live, model, at))  # noqa: B023 - called at once
        if again == "nothing":
            for index in range(at + 1, 2):
                microbatch(live, model, index)
            same = gradients(model) == wanted
            found[where, at] = again, same, same, "nothing", "nothing"
            continue
        refused = refusal(live.capture), refusal(lambda: live.advance(samples=4, steps=1))  # noqa: B023
        live.drop_window()
        is_same = window(live, model) == wanted
        optimizer.step()
        optimizer.zero_grad()
        live.advance(samples=0)
        live.capture()
        found[where, at] = again, is_same, window(live, model) == after_a_step(kind, collectives, window), *refused
    return found


def after_a_step(kind, collectives, window):
    model, optimizer, live = attached(kind, collectives.world_size)
    window(live, model)
    optimizer.step()
    optimizer.zero_grad()
    return window(live, model)


def check_failed(found):
    for (where, at), (again, is_same, is_same_later, save, step) in found.items():
        assert (is_same, is_same_later) == (True, True), (where, at)
        if where == "forward":
            assert again == "nothing", at
            continue
        for text in (again, save, step):
            assert text.startswith("IncompleteWindow"), (at, text)
            assert "live.drop_window()" in text


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hsdp"])
def test_a_microbatch_that_fails_in_its_backward_is_refused_until_its_window_is_dropped(two_ranks, kind):
    """A03: a second attempt would add what the first has left; after a forward that fails it has the bits of a whole window."""
    for found in two_ranks:
        check_failed(found[kind])


def test_a_microbatch_that_fails_on_one_process_is_refused_too():
    """The gradients of layers that the backward had passed would count twice."""
    check_failed(failed_microbatches(SingleProcess(), "plain"))


def by_hand(collectives):
    """The loop has no `microbatch`: its third backward fails, and after `drop_window` the weights are those of the other two."""
    found = []
    for fails in (True, False):
        model, optimizer, live = attached("fsdp2", collectives.world_size)
        for index in range(3):
            if index == 1:
                if fails:
                    armed(model, "backward")
                    with contextlib.suppress(ZeroDivisionError):
                        backward(model, index, collectives.rank)
                    live.drop_window()
                continue
            backward(model, index, collectives.rank)
            optimizer.step()
            optimizer.zero_grad()
            live.advance(samples=4)
            live.capture()
        found.append(weights(model))
    return found


def after_an_evaluation(collectives):
    """The root has gathered its parameters for a forward without gradients, and keeps them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Sequential(nn.Linear(4, 2)), mesh=init_device_mesh("cpu", (collectives.world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer)
    backward(model, 0, collectives.rank)
    with torch.no_grad():
        model(torch.ones(1, 4))
    live.drop_window()
    return [each.grad is None for each in optimizer.param_groups[0]["params"]]


def test_dropping_a_window_clears_the_gradients_of_the_optimizer_after_an_evaluation(two_ranks):
    for each in two_ranks:
        assert each["evaluated"] == [True, True]


def test_dropping_a_window_makes_fsdp2_ready_after_a_backward_that_failed(two_ranks):
    """Its root never reduced a gradient again, so each later step trained with none, or with those of one rank."""
    for after_failure, wanted in (each["by hand"] for each in two_ranks):
        assert after_failure == wanted


def test_torch_that_cannot_forget_a_backward_of_fsdp2_is_named(monkeypatch):
    """Before torch 2.13 there is no `reset_iter_state`."""
    state = SimpleNamespace(
        _is_root=True, _state_ctx=SimpleNamespace(post_backward_final_callback_queued=True), _fsdp_param_groups=[]
    )
    monkeypatch.setattr(interrupted, "fsdp2_modules", lambda _: [SimpleNamespace(_get_fsdp_state=lambda: state)])
    with pytest.raises(InvalidState, match="resumes from its checkpoint"):
        interrupted.forget_interrupted([])
    state._state_ctx.post_backward_final_callback_queued = False
    interrupted.forget_interrupted([])
