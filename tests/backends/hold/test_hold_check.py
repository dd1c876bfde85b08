"""Writes that neither hooks nor version counters show: their target is copied in the call, or `hold_check` finds them."""

import contextlib
import threading

import attrs
import pytest
import torch
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.config import CheckpointConfig, create_checkpoint_manager
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.hold.hold import Hold
from trainfold.backends.runs.api import load
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import InvalidArgument, SaveFailed
from trainfold.core.format.codec import leaf_digest


class StandingStore:
    """A store that waits for a signal before its first write, and on request again after its last data file."""

    def __init__(self):
        self.inner = MemoryStore()
        self.may_begin, self.may_end, self.has_written = (threading.Event() for _ in range(3))
        self.may_end.set()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def write(self, name, parts, *, size_bytes):
        assert self.may_begin.wait(20)
        self.inner.write(name, parts, size_bytes=size_bytes)
        self.has_written.set()
        assert self.may_end.wait(20)

    @property
    def checkpoints(self):
        return [
            name for name in self.inner.list() if name.startswith("step-") and "manifest.json" in self.inner.list(name)
        ]


def make_run():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    live = attach(model, optimizer)
    live.advance(samples=8)
    return live, model, optimizer


def through_numpy(model, _):
    model[0].weight.detach().numpy()[...] += 1.0


def through_dlpack(model, _):
    torch.from_dlpack(model[0].weight.detach()).data.add_(1.0)


def through_the_storage(model, _):
    """Make the module's parameters views of one flat parameter, which has its own version counter."""
    weight = model[0].weight
    flat = torch.empty(0).set_(weight.untyped_storage(), 0, (weight.numel(),), (1,))
    with torch.no_grad():
        flat.add_(1.0)


def through_a_kernel(model, optimizer):
    weight = model[0].weight
    state = optimizer.state[weight]
    torch._fused_adamw_([weight.detach()], [weight.grad], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
                        lr=0.1, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False)  # fmt: skip


WRITERS = {
    "tensor.data": lambda model, _: model[0].weight.data.add_(1.0),
    "numpy": through_numpy,
    "dlpack": through_dlpack,
    "a flat parameter": through_the_storage,
    "a fused kernel": through_a_kernel,
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("when", ["before it is read", "after it was read", "then the optimizer steps"])
def test_a_writer_that_goes_around_is_found_and_nothing_is_committed(writer, when):
    """W16: whenever it writes between the call and the commit, or the next announced update."""
    live, model, optimizer = make_run()
    store = StandingStore()
    with CheckpointManager(store, mode="async", hold_check=True) as manager:
        manager.save(live)
        if when == "after it was read":
            store.may_end.clear()
            store.may_begin.set()
            assert store.has_written.wait(20)
        WRITERS[writer](model, optimizer)
        if when == "then the optimizer steps":
            optimizer.step()
            live.advance(samples=8)
        store.may_begin.set()
        store.may_end.set()
        with pytest.raises(SaveFailed, match=r"\['0\.weight'\].*other bytes.*hold_check"):
            manager.drain()
        assert not store.checkpoints
        manager.save(live)  # from then on it is copied in the call
        WRITERS[writer](model, optimizer)
        assert manager.drain() is not None
    assert len(store.checkpoints) == 1


@pytest.mark.parametrize("writer", ["tensor.data", "a fused kernel"])
def test_without_the_check_such_a_writer_is_not_found(writer):
    """The other side of the law: as the README says, `wait_staging()` must come before such a write. Without it, a torn leaf is committed."""
    live, model, optimizer = make_run()
    before = model[0].weight.detach().clone()
    store = StandingStore()
    with CheckpointManager(store, mode="async") as manager:
        manager.save(live)
        WRITERS[writer](model, optimizer)
        store.may_begin.set()
        assert manager.drain() is not None
    assert not torch.equal(load(store.inner, like=live.capture()).model.params["0.weight"], before)


def test_a_loop_that_announces_its_updates_is_not_disturbed_by_the_check():
    live, model, optimizer = make_run()
    saved = []
    store = MemoryStore()
    with CheckpointManager(store, mode="async", hold_check=True) as manager:
        for _ in range(3):
            saved.append({name: value.detach().clone() for name, value in model.named_parameters()})
            manager.save(live)
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
            live.advance(samples=8)
    for step, wanted in enumerate(saved, start=1):
        found = load(store, like=live.capture(), step=step).model.params
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


class Teacher(nn.Module):
    """A student, and a teacher that the forward updates through ``.data``, as older code does; no counter shows it."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)
        self.teacher.requires_grad_(requires_grad=False)

    def forward(self, x):
        for mine, theirs in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            theirs.data.mul_(0.9).add_(mine.data, alpha=0.1)
        return self.student(x) - self.teacher(x)


@pytest.mark.parametrize(
    "place", ["frozen", "in no optimizer", "frozen just then", "in an optimizer that is not attached"]
)
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("room", [None, 0])
def test_parameters_in_no_attached_optimizer_are_copied_in_the_call(place, check, room):
    """W16: a teacher, a frozen part, or a newly frozen one: no write to it is announced, and it is saved as it was."""
    torch.manual_seed(0)
    model = Teacher()
    if place in {"in no optimizer", "in an optimizer that is not attached", "frozen just then"}:
        model.teacher.requires_grad_(requires_grad=True)
    trained = model.parameters() if place == "frozen just then" else model.student.parameters()
    optimizer = torch.optim.SGD(trained, lr=0.1)
    live = attach(model, optimizer)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    live.advance(samples=8)
    if place == "frozen just then":
        model.teacher.requires_grad_(requires_grad=False)
    wanted = {name: value.detach().clone() for name, value in model.named_parameters()}
    store = StandingStore()
    with CheckpointManager(store, mode="async", hold_check=check, max_extra_bytes=room) as manager:
        manager.save(live)
        model(torch.randn(8, 4))
        store.may_begin.set()
        assert manager.drain() is not None
    found = load(store.inner, like=live.capture()).model.params
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_the_check_is_an_argument_and_a_field_of_the_config(tmp_path):
    with pytest.raises(InvalidArgument, match="hold_check"):
        CheckpointManager(tmp_path / "a", hold_check="yes")
    config = CheckpointConfig(run=tmp_path / "a", mode="async", hold_check=True)
    assert attrs.evolve(config).hold_check
    live, model, optimizer = make_run()
    with create_checkpoint_manager(config) as manager:
        manager.save(live)
        optimizer.step()
        live.advance(samples=8)
        manager.drain()
    assert load(tmp_path / "a", like=live.capture()).trainer.step == 1
    assert model[0].weight.requires_grad


@pytest.mark.parametrize("check", [False, True])
def test_what_was_written_is_compared_with_what_was_held(check):
    """W16: the digests of the files are compared too, not only the memory at the last check."""
    weight = torch.ones(4)
    hold = Hold(
        {("model", "w"): weight, ("model", "copied"): weight.clone()}, unannounced={("model", "copied")}, check=check
    )
    hold.check_written("model", {"w": leaf_digest(weight), "copied": "xxh3:anything", "other": "xxh3:anything"})
    with pytest.raises(SaveFailed, match=r"w: .*other bytes") if check else contextlib.nullcontext():
        hold.check_written("model", {"w": leaf_digest(torch.zeros(4))})
    hold.release()
