"""Plain modules, optimizers and schedulers of torch pass the audit; strict saves, and the list in the manifest."""

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kit.adapters.live.audit_cases import Helper, Net, run
from torch import nn

from trainfold import CheckpointManager
from trainfold.adapters.live.attach import attach
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import HiddenState, HiddenStateRefused, InvalidArgument
from trainfold.core.state import audit


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.GELU(), nn.Linear(8, 1)), (4, 8)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.PReLU()), (2, 3, 8, 8)),
    "lstm": (lambda: nn.LSTM(8, 8, 2, dropout=0.1, batch_first=True), (2, 5, 8)),
    "gru": (lambda: nn.GRU(8, 8, bidirectional=True), (2, 5, 8)),
    "transformer": (encoder, (2, 5, 8)),
    "spectral": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), (4, 8)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), (4, 8)),
    "compiled": (lambda: torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Dropout()), backend="eager"), (4, 8)),
}  # fmt: skip


OPTIMIZERS = [
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.LBFGS,
]  # fmt: skip


SCHEDULERS = [
    lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 20),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
]


def train(model, shape, optimizer, *, steps=5, **options):
    live = attach(model, optimizer, strict=True, **options)
    extra = options.get("extra", {})
    for _ in range(steps):

        def loss():
            optimizer.zero_grad()
            out = model(torch.randn(shape))
            found = (out[0] if isinstance(out, tuple) else out).square().mean()
            found.backward()
            return found

        optimizer.step(loss)
        if "ema" in extra:
            extra["ema"].update_parameters(model)
        if options.get("scheduler"):
            options["scheduler"].step()
        live.advance(samples=2)
        live.capture()
    assert "unsaved" not in live.contract()


@pytest.mark.parametrize("name", MODELS)
def test_plain_modules_of_torch_have_no_hidden_state(name):
    make, shape = MODELS[name]
    model = make()
    train(model, shape, torch.optim.AdamW(model.parameters(), lr=1e-3))


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_plain_optimizers_of_torch_have_no_hidden_state(kind):
    model = nn.Linear(3, 1)
    train(model, (4, 3), kind(model.parameters(), lr=1e-3))


@pytest.mark.parametrize("make", SCHEDULERS)
def test_plain_schedulers_of_torch_have_no_hidden_state(make):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ema = torch.optim.swa_utils.AveragedModel(model)
    extra = {"ema": ema, "scaler": torch.amp.GradScaler("cpu")}
    train(model, (4, 3), optimizer, scheduler=make(optimizer), extra=extra)


@pytest.mark.usefixtures("process_group")
def test_a_model_under_ddp_has_no_hidden_state():
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 1), nn.Dropout()))
    train(model, (4, 3), torch.optim.SGD(model.parameters(), lr=0.1))


# --- strict, and what is accepted ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_strict_refuses_the_save_with_the_names_and_leaves_nothing_half_done(mode):
    model = Net(lambda net: net.mask.add_(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    store = MemoryStore()
    with CheckpointManager(store, every=1, at_end=False, mode=mode) as manager:
        live = attach(model, optimizer, strict=True)
        manager.restore(live)
        for _ in range(2):  # each save is refused, not only the first one
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            live.advance(samples=4)
            with pytest.raises(
                HiddenStateRefused, match=r"(?s)model\.mask: a non-persistent buffer.*nothing was written"
            ):
                manager.step(live)
    assert not [name for name in store.list("") if name.startswith("step-")]


@pytest.mark.parametrize("accepted", [["model.helper"], ["model.helper.n"]])
def test_what_is_accepted_by_name_is_neither_named_nor_refused(accepted):
    assert run(Net(lambda net: net.helper.count(), helper=Helper()), strict=True, unsaved=accepted) == ([], {})


@pytest.mark.parametrize("accepted", ["model.helper", [1], None])
def test_what_cannot_be_names_is_refused_when_it_is_given(accepted):
    with pytest.raises(InvalidArgument, match=r"attach\.unsaved"):
        attach(nn.Linear(1, 1), unsaved=accepted)


# --- distinctions: pure ---------------------------------------------------------------------------------------------


KINDS = (audit.NUMBER, audit.TENSOR, audit.NOTHING, audit.LENGTH, audit.GENERATOR)


LOOKS = st.dictionaries(
    st.sampled_from(["m.a", "m.b", "m.c[0]", "n.a"]),
    st.builds(
        lambda kind, value, shape: audit.Fact(kind, value, "m", shape if kind == audit.TENSOR else ()),
        st.sampled_from(KINDS), st.sampled_from("0123"), st.sampled_from([(1,), (2, 3)]),
    ),
)  # fmt: skip


@given(before=LOOKS, now=LOOKS)
@example(
    before={"m.a": audit.Fact(audit.NUMBER, "0", "m"), "m.c[0]": audit.Fact(audit.GENERATOR, "0", "m")},
    now={"m.c[0]": audit.Fact(audit.GENERATOR, "1", "m"), "m.a": audit.Fact(audit.TENSOR, "0", "m", (1,))},
)
def test_only_what_was_there_before_and_differs_is_a_change(before, now):
    found = audit.changed(before, now)
    assert found == {path: now[path] for path in found}
    assert all(before[path].value != now[path].value for path in found)
    assert not audit.changed(now, now)
    assert not any({before[path].kind, now[path].kind} & {audit.NOTHING} for path in found)
    both = set(before) & set(now)
    assert all(
        path in found
        for path in both
        if before[path].kind == now[path].kind == audit.GENERATOR and before[path].value != now[path].value
    )


def test_a_manifest_lists_so_many_and_no_more():
    named = {f"model.p{i}": audit.NUMBER for i in range(100)}
    listed = audit.listed(named)
    assert len(listed) == audit.LISTED + 1
    assert listed["..."] == "and 36 more"
    text = audit.hidden_state_text(named, step=3)
    assert "  and 88 more" in text
    assert audit.not_restored({"unsaved": listed}, ["model"]) == listed
    assert list(audit.not_restored({"unsaved": listed}, ["optimizer"])) == ["..."]
    assert audit.unsaved_of({"unsaved": 7}) == {}


# --- afterwards ------------------------------------------------------------------------------------------------------


def test_a_resume_says_what_the_checkpoint_does_not_hold_and_compares_nothing_of_it(tmp_path, capsys):
    """A listed entry is not a difference: a run that has not trained yet has changed nothing, and lists nothing."""
    from trainfold.adapters.cli import main

    model = Net(lambda net: net.mask.add_(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CheckpointManager(tmp_path / "run", every=1) as manager:
        live = attach(model, optimizer)
        manager.restore(live)
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        live.advance(samples=4)
        with pytest.warns(HiddenState, match=r"model\.mask: a non-persistent buffer"):
            manager.step(live)
    for command in ("plan", "inspect"):
        assert main([command, str(tmp_path / "run")]) == 0
        assert "model.mask" in capsys.readouterr().out
        assert main([command, str(tmp_path / "run"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["unsaved"] == {"model.mask": "a non-persistent buffer"}
    model = Net()
    with (
        CheckpointManager(tmp_path / "run") as manager,
        pytest.warns(HiddenState, match=r"lacks state.*\n  model\.mask"),
    ):
        assert not manager.restore(attach(model, torch.optim.SGD(model.parameters(), lr=0.1))).is_fresh


def test_what_a_restore_changes_has_not_changed_with_training():
    def change(net):
        torch.rand(1, generator=net.generator)

    store = MemoryStore()
    for _ in range(2):
        model = Net(change, generator=torch.Generator(), table=None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        extra = {
            "stream": (model.generator.get_state, lambda state, m=model: (m.generator.set_state(state), m.mask.add_(1)))
        }
        live = attach(model, optimizer, extra=extra, strict=True)
        with CheckpointManager(store, every=1) as manager:
            manager.restore(live)
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            live.advance(samples=4)
            manager.step(live)


def test_a_component_that_is_registered_later_is_looked_at_from_then_on():
    model, other = Net(), Net()
    live = attach(model, strict=True)
    other.mask.add_(1)
    live.register("other", other)
    live.advance(samples=1)
    live.capture()
    other.mask.add_(1)
    live.advance(samples=1)
    with pytest.raises(HiddenStateRefused, match=r"other\.mask"):
        live.capture()


def test_the_audit_moves_nothing_and_runs_no_code_of_the_users():
    """C14."""

    class Guarded(Net):
        @property
        def secret(self):
            raise AssertionError

        def __getattr__(self, name):
            assert name not in ("secret", "anything")
            return super().__getattr__(name)

    class Trap(dict):
        def __iter__(self):
            raise AssertionError

        items = values = keys = __iter__

    model = Guarded(table=Trap(a=1), rng=np.random.default_rng(0), generator=torch.Generator())
    live = attach(model)
    before = (torch.get_rng_state(), model.generator.get_state(), model.rng.bit_generator.state, random.getstate())
    live.advance(samples=1)
    live.capture()
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], model.generator.get_state())
    assert before[2] == model.rng.bit_generator.state
    assert before[3] == random.getstate()


class Proxy:
    """A proxy whose object cannot be reached: even asking for its class raises."""

    @property
    def __class__(self):
        raise RuntimeError("not connected")


def test_what_is_odd_does_not_fail_a_save(tmp_path):
    np.arange(8.0).tofile(tmp_path / "data.bin")
    fixed = np.zeros(3)
    fixed.setflags(write=False)
    options = {"proxies": [Proxy()], "huge": 10**6000, "data": np.memmap(tmp_path / "data.bin", mode="r"), "fixed": fixed,
               "strided": np.zeros((4, 4))[:, ::2], "half": np.zeros(2, np.float16), "words": np.array(["a"])}  # fmt: skip

    def change(net):
        net.huge += 1
        net.strided[0] += 1

    assert sorted(run(Net(change, **options))[1]) == ["model.huge", "model.strided"]


def test_a_look_is_bounded():
    from trainfold.adapters.watch import facts

    class Link:
        def __init__(self, depth):
            self.next = Link(depth - 1) if depth else None

    class Loop:
        def __init__(self):
            self.me, self.n = self, 0

    data = [[i] for i in range(10**5)]
    look = facts.Look({}, set())
    look.module("model", Net(links=[Link(100) for _ in range(20)], loop=Loop(), data=data, big=torch.zeros(10**8 // 4)))
    assert len(look.facts) < 300
    assert "model.big" in look.facts
