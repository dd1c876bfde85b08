"""Unannounced writes during a save: nothing torn is committed, and the written leaves are copied from then on."""

import os
import signal
import threading

import pytest
import torch
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.hold.hold import Hold
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import load
from trainfold.backends.runs.save import save_snapshot
from trainfold.backends.runs.snapshot import describe_state
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import RankFailed, SaveFailed
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import Progress, TrainState


class StandingStore:
    """A store whose writer pauses before its first byte, and calls ``during`` in the middle of each file and ``after`` at its end."""

    def __init__(self):
        self.inner = MemoryStore()
        self.during = self.after = lambda: None
        self.may_go_on = threading.Event()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def write(self, name, parts, *, size_bytes):
        def standing():
            assert self.may_go_on.wait(20)
            for number, part in enumerate(parts):
                yield part
                if number == 1:
                    self.during()

        self.inner.write(name, standing(), size_bytes=size_bytes)
        self.after()

    @property
    def checkpoints(self):
        return [name for name in self.inner.list() if name.startswith("step-")]


def written_through_a_hold(state, store, world, check=lambda _: None):
    """Save a state whose leaves are all held; ``check`` runs before the save's final checks."""
    snapshot = describe_state(state)
    hold = Hold(snapshot.named())
    real = hold.check_unchanged
    hold.check_unchanged = lambda: (check(hold), real())
    try:
        save_snapshot(lambda: snapshot, store, collectives=world, hold=hold)
    except (SaveFailed, RankFailed) as error:
        return isinstance(error, RankFailed), str(error)
    finally:
        hold.release()


def state_of(*tensors):
    return TrainState(trainer=Progress(step=1), extra={"w": {f"w{i}": tensor for i, tensor in enumerate(tensors)}})


def test_a_kernel_that_returns_when_everything_has_been_read_fails_the_save():
    """P10: torch bumps a tensor's counter after its kernel returns, which may be after the last piece was read."""
    weight, store = torch.zeros(1 << 20), StandingStore()
    store.may_go_on.set()
    store.during = lambda: weight.data.fill_(1.0)  # what the kernel has written by now
    store.after = lambda: weight.add_(0.0)  # it returns, and the counter moves
    ((_, said),) = run_threads(1, lambda world: written_through_a_hold(state_of(weight), store, world))
    assert "w0" in said
    assert "wait_staging" in said
    assert not store.checkpoints


def test_a_rank_whose_leaf_was_written_to_tells_all_others_and_nothing_is_committed():
    """C07, P10."""
    store = StandingStore()
    store.may_go_on.set()

    def run(world):
        tensors = [torch.zeros(1 << 10) for _ in range(4)]

        def kernel_returns(_):
            if world.rank == 1:
                for tensor in tensors:
                    tensor.add_(0.0)

        return written_through_a_hold(state_of(*tensors), store, world, kernel_returns)[0]

    assert run_threads(3, run) == [True, False, True]
    assert not store.checkpoints


def test_an_announced_write_before_the_last_look_is_no_failure():
    weight, store = torch.zeros(1 << 20), StandingStore()
    store.may_go_on.set()

    def update(hold):
        hold.protect()
        weight.fill_(1.0)

    assert run_threads(1, lambda world: written_through_a_hold(state_of(weight), store, world, update)) == [None]
    assert not load(store.inner, like=state_of(weight)).extra["w"]["w0"].any()


# --- forwards that write to parameters -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("place", ["model", "extra"])
def test_an_embedding_with_max_norm_is_saved_as_it_was_when_the_call_was_made(kind, place):
    """D01: its forward writes to its weights, in an ordinary loop that announces nothing."""
    torch.manual_seed(0)
    embedding, head = kind(50, 8, max_norm=1.0), nn.Linear(8, 1)
    optimizers = [torch.optim.SGD(module.parameters(), lr=1.0) for module in (embedding, head)]
    extra = {"head": head, "head_optimizer": optimizers[1]}
    if place == "model":
        live = attach(embedding, optimizers[0], extra=extra)
    else:
        live = attach(head, optimizers[1], extra={"embedding": embedding, "embedding_optimizer": optimizers[0]})

    def train():
        head(embedding(torch.arange(50)[:, None]).reshape(50, 8)).square().sum().backward()
        before = embedding.weight.detach().clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        live.advance(samples=50)
        return before

    train()
    wanted, weights, store = fingerprint(live.capture()), embedding.weight.detach().clone(), StandingStore()
    with CheckpointManager(store, mode="async") as manager:
        manager.save(live)
        assert not torch.equal(train(), weights)
        store.may_go_on.set()
        manager.drain()
    assert fingerprint(load(store.inner, like=live.capture())) == wanted


class Renormalised(nn.Module):
    """A trained weight whose columns are scaled to norm 1 by each forward, like the prototypes of self-supervised models."""

    def __init__(self):
        super().__init__()
        self.body, self.prototypes = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        with torch.no_grad():
            self.prototypes.weight.copy_(nn.functional.normalize(self.prototypes.weight, dim=1))
        return self.prototypes(self.body(x)).square().mean()


def test_a_trained_weight_that_the_forward_moves_fails_one_save_and_is_copied_from_then_on():
    """D01, P10: the first save fails with an error, and no later one."""
    torch.manual_seed(0)
    model = Renormalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer)

    def train():
        optimizer.zero_grad()
        model(torch.randn(4, 8)).backward()
        optimizer.step()
        live.advance(samples=4)

    store = StandingStore()
    with CheckpointManager(store, mode="async") as manager:
        manager.save(live)
        train()
        store.may_go_on.set()
        with pytest.raises(SaveFailed, match=r"prototypes.*copied from now on"):
            manager.drain()
        assert not store.checkpoints
        for _ in range(2):
            wanted = fingerprint(live.capture())
            store.may_go_on.clear()
            manager.save(live)
            train()
            store.may_go_on.set()
            manager.drain()
            assert fingerprint(load(store.inner, like=live.capture())) == wanted


def test_leaves_of_a_state_that_were_written_to_are_copied_from_then_on():
    store, weight = StandingStore(), torch.zeros(4)
    state = TrainState(trainer=Progress(step=1), extra={"w": Leaves({"w": weight})})
    with CheckpointManager(store, mode="async") as manager:
        manager.save(state)
        weight.add_(1.0)
        store.may_go_on.set()
        with pytest.raises(SaveFailed):
            manager.drain()
        store.may_go_on.clear()
        manager.save(state)
        weight.add_(1.0)
        store.may_go_on.set()
        manager.drain()
    assert load(store.inner, like=state).extra["w"]["w"].tolist() == [1.0] * 4


# --- other processes -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns of threads, which are the point
def test_a_forked_child_steps_its_optimizer_although_its_parents_save_is_under_way():
    """The thread to wait for exists only in the parent, and the child has its own memory."""
    model, store = nn.Linear(8, 8), StandingStore()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer)
    wanted = fingerprint(live.capture())
    with CheckpointManager(store, mode="async", max_extra_bytes=0) as manager:
        manager.save(live)
        pid = os.fork()
        if not pid:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(20)
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                manager.wait_staging()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        store.may_go_on.set()
        manager.drain()
    assert fingerprint(load(store.inner, like=live.capture())) == wanted
