"""The audit names state that changes with training and that no component saves: once, in a warning, with the fix (W07)."""

import logging
import warnings

import pytest
import torch
from kit.adapters.live.audit_cases import Net, attributes, run
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.core.errors import HiddenStateRefused


def mode_at(step):
    def change(net):
        net.calls = getattr(net, "calls", 0) + 1
        if net.calls >= step:
            net.norm.eval()

    return change


CHANGES = {
    "a non-persistent buffer": (lambda net: net.mask.add_(1), "model.mask"),
    "dropout": (lambda net: setattr(net.drop, "p", net.drop.p + 0.1), "model.drop.p"),
    "momentum": (lambda net: setattr(net.norm, "momentum", net.norm.momentum * 0.9), "model.norm.momentum"),
    "a tensor": (lambda net: setattr(net, "average", net.average + 1), "model.average"),
    "an array": (lambda net: net.seen.__iadd__(1), "model.seen"),
    "a counter": (lambda net: setattr(net, "calls", net.calls + 1), "model.calls"),
    "a list": (lambda net: net.losses.append(1.0), "model.losses"),
    "a queue": (lambda net: net.queue.append(net.calls) or setattr(net, "calls", net.calls), "model.queue"),
    "a dict": (lambda net: net.counts.update("a"), "model.counts"),
    "a generator": (lambda net: torch.rand(1, generator=net.generator), "model.generator"),
    "numpy's": (lambda net: net.rng.random(), "model.rng"),
    "python's": (lambda net: net.random.random(), "model.random"),
    "an object": (lambda net: net.helper.count(), "model.helper.n"),
    "slots": (lambda net: setattr(net.slots, "n", net.slots.n + 1), "model.slots.n"),
    "a module in a list": (lambda net: net.teachers[0].weight.data.mul_(0.9), "model.teachers[0].weight"),
    "a count": (lambda net: next(net.ids), "model.ids"),
}


@pytest.mark.parametrize("case", [name for name in CHANGES if name != "a queue"])
def test_what_changes_with_training_and_is_saved_nowhere_is_named_once(case):
    """W07: a buffer that is not persistent, an attribute, a mode, a generator; with the fix."""
    change, path = CHANGES[case]
    heard, listed = run(Net(change, **attributes()), steps=5)
    assert len(heard) == 1, heard
    assert f"  {path}: " in heard[0]
    assert list(listed) == [path]
    assert "a resume from step 1 would reset it" in heard[0]


def test_a_queue_of_a_constant_length_is_seen_by_what_is_in_it():
    def change(net):
        net.queue.append(net.queue[-1] + 1)

    assert list(run(Net(change, **attributes()))[1]) == ["model.queue"]


def test_a_submodule_that_changes_its_mode_on_the_way_is_named():
    heard, listed = run(Net(mode_at(2), calls=0), steps=4, unsaved=["model.calls"])
    assert listed == {"model.norm.training": "a mode (train or eval)"}
    assert "function of live.progress.step" in heard[0]


def test_a_model_that_goes_on_in_eval_mode_is_named():
    """The usual mistake: the loop does not call ``train()`` after the first evaluation."""
    model = Net()
    _, listed = run(model, steps=3, each=lambda step: model.eval() if step == 2 else None)
    assert list(listed) == ["model.training"]


def test_an_evaluation_before_each_save_is_none_of_it():
    """The same for frozen statistics: the loop sets them before the first step, and again after a resume."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer)
    for _ in range(4):
        model.train()
        model.norm.eval()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        live.advance(samples=4)
        model.eval()
        live.capture()
    assert "unsaved" not in live.contract()


def test_everything_is_named_at_once_and_what_comes_later_later():
    def change(net):
        net.calls += 1
        net.drop.p += 0.01
        if net.calls > 5:
            net.mask.add_(1)

    heard, listed = run(Net(change, calls=0), steps=16)
    assert len(heard) == 2
    assert heard[0].startswith("2 attributes change with training and are saved by no component")
    assert heard[1].startswith("1 attribute changes")
    assert sorted(listed) == ["model.calls", "model.drop.p", "model.mask"]


def test_a_steady_run_is_looked_at_less_and_less(monkeypatch):
    from trainfold.adapters.watch import audit as adapter

    looks = []
    look = adapter.Look
    monkeypatch.setattr(adapter, "Look", lambda *args: looks.append(1) or look(*args))
    run(Net(), steps=16, restore=False)
    assert len(looks) == 2 + 5  # at attach, after the first step, and at saves 1, 2, 4, 8, 16
    looks.clear()
    run(Net(), steps=8, every=100, restore=False)
    assert len(looks) == 2  # nothing was saved


def test_the_log_has_it_too(caplog):
    with caplog.at_level(logging.WARNING, "trainfold"):
        run(Net(lambda net: net.mask.add_(1)))
    assert sum("model.mask: a non-persistent buffer" in each.getMessage() for each in caplog.records) == 1


def test_a_program_without_a_log_is_told_once(monkeypatch, caplog):
    """Without a log handler, Python prints both warnings and log records to the terminal, so one of them is enough."""
    monkeypatch.setattr(logging.getLogger("trainfold"), "hasHandlers", lambda: False)
    assert len(run(Net(lambda net: net.mask.add_(1)), steps=8)[0]) == 1
    assert not [each for each in caplog.records if "model.mask" in each.getMessage()]


def test_what_a_resume_has_named_is_not_named_again_and_what_is_new_is():
    def change(net):
        net.mask.add_(1)
        net.calls += net.counts

    states = []
    for counts in (0, 0, 1):
        model = Net(change, calls=0, counts=counts)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        live = attach(model, optimizer, unsaved=["model.counts"])
        if states:
            live.restore(states[-1])
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for _ in range(2):
                model(torch.ones(4, 3)).sum().backward()
                optimizer.step()
                live.advance(samples=4)
                states.append(live.capture())
        assert [str(each.message).splitlines()[1] for each in heard] == [
            ["  model.mask: a non-persistent buffer"], [], ["  model.calls: a number"],
        ][(len(states) - 1) // 2]  # fmt: skip
        assert "model.mask" in live.contract()["unsaved"]


# --- what training creates -------------------------------------------------------------------------------------------


class Lazy(nn.Module):
    """An average that the first forward creates."""

    def __init__(self, way):
        super().__init__()
        self.layer, self.way, self.mean = nn.Linear(3, 1), way, None

    def forward(self, x):
        now = x.detach().mean(0)
        if self.way == "one line":
            self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        elif self.mean is None:
            self.mean = now.clone()
        self.mean.mul_(0.9).add_(now, alpha=0.2)
        return self.layer(x - self.mean)


def strict_at(model, saves, steps=5):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer, strict=True)
    for step in range(1, steps + 1):
        model(torch.rand(4, 3)).sum().backward()
        optimizer.step()
        live.advance(samples=4)
        if step in saves:
            live.capture()


@pytest.mark.parametrize("way", ["one line", "in place"])
def test_strict_refuses_what_the_first_forward_makes_and_the_others_change(way):
    """The first save after the second step finds it: that save compares with the state after the first step."""
    with pytest.raises(HiddenStateRefused, match=r"model\.mean: a tensor"):
        strict_at(Lazy(way), saves=[5])
    with pytest.raises(HiddenStateRefused, match=r"model\.mean: a tensor"):
        strict_at(Lazy(way), saves=[1, 2], steps=2)


def test_what_appears_between_two_looks_is_looked_at_in_the_next_save():
    def change(net):
        net.calls += 1
        if net.calls >= 5:
            net.log = getattr(net, "log", 0.5) + 1

    heard, _ = run(Net(change, calls=0), steps=9, unsaved=["model.calls"])
    assert [each.splitlines()[0].partition("step ")[2].split()[0] for each in heard] == ["9"]
