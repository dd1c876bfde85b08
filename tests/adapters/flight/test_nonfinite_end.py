"""Which steps end a replay until the first NaN: what is not finite by design ends none, and does not hide the module that is at fault."""

import json
import os
import sys

import pytest
import torch
from kit.adapters.nonfinite_cases import Ended
from torch.nn import functional

from trainfold import Progress, attach
from trainfold.adapters.flight.flight_recorder import FlightRecorder
from trainfold.adapters.flight.replay_orders import SUSPECTED_NAME
from trainfold.backends.flight.flight_file import FlightFile
from trainfold.core.flight.step_record import float_bits_of


class Odd(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError("planted")


class Gives(torch.nn.Module):
    def forward(self, x):
        return torch.Tensor._make_subclass(Odd, x)


class Scale(torch.nn.Module):
    """Where the fault is planted: a module in the middle."""

    factor = 1.0

    def forward(self, x):
        return x * self.factor


class Router(torch.nn.Module):
    """Scores that are minus infinity but for the best two, by design."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts, self.scale = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), Scale()
        self.top = Top()

    def forward(self, x):
        return (self.top(self.gate(x)).softmax(-1) * self.scale(self.experts(x))).sum(-1)


class Top(torch.nn.Module):
    def forward(self, scores):
        best = scores.topk(2, -1).indices
        return torch.full_like(scores, -torch.inf).scatter(-1, best, scores.gather(-1, best))


class Masked(torch.nn.Module):
    """Logits that are minus infinity where an action is not allowed: those of the whole model."""

    def __init__(self):
        super().__init__()
        self.first, self.scale = torch.nn.Linear(4, 4), Scale()

    def forward(self, x):
        return self.scale(self.first(x)).masked_fill(torch.tensor([False, True, False, False]), -torch.inf)


class Padded(torch.nn.Module):
    """A causal mask of infinities, which each layer gets as an input, and padding."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
        self.scale, self.head = Scale(), torch.nn.Linear(4, 1)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(2))

    def forward(self, x):
        found = self.layer(self.scale(x.reshape(-1, 2, 4)), src_mask=self.mask, is_causal=False)
        return self.head(found).mean((1, 2))


class Recurrent(torch.nn.Module):
    """Sequences of several lengths, packed; the nearest of centres, of which an absent one is infinitely far."""

    def __init__(self):
        super().__init__()
        self.scale, self.gru, self.far = Scale(), torch.nn.GRU(4, 4, batch_first=True), Top()

    def forward(self, x):
        lengths = torch.arange(len(x) // 2, 0, -1) % 2 + 1
        packed = torch.nn.utils.rnn.pack_padded_sequence(self.scale(x.reshape(-1, 2, 4)), lengths, batch_first=True, enforce_sorted=False)  # fmt: skip
        state = self.gru(packed)[1][0]
        return state.sum(-1) + (-self.far(state)).min(-1).values


MODELS = {"router": Router, "masked logits": Masked, "masks as inputs": Padded, "packed": Recurrent}


def loss_of(model, x):
    found = model(x)
    return functional.cross_entropy(found, torch.zeros(len(x), dtype=torch.int64)) if found.ndim == 2 else found.square().mean()  # fmt: skip


def trained(model, watch, *, steps, broken=None, loss_is_recorded=True, factor=torch.nan):
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        x = torch.randn(8, 4)
        model.scale.factor = factor if step == broken else 1.0
        loss = loss_of(model, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model.scale.factor = 1.0
            model(x)
        model.train()
        watch.stepped(step, float_bits_of(loss.item()) if loss_is_recorded else None)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("loss_is_recorded", [True, False])
@pytest.mark.parametrize("broken", [None, 1, 5])
@pytest.mark.parametrize("factor", [torch.nan, torch.inf])
def test_infinities_by_design_end_no_step_and_hide_no_fault(begun, name, loss_is_recorded, broken, factor):
    """C11: each such run ended at its first step, at a healthy module."""
    watch, found = begun
    model = MODELS[name]()
    if broken is None:
        trained(model, watch, steps=6, loss_is_recorded=loss_is_recorded)
        return
    with pytest.raises(Ended):
        trained(model, watch, steps=6, broken=broken, loss_is_recorded=loss_is_recorded, factor=factor)
    if (name, broken) != (
        "router",
        1,
    ) or factor != torch.inf:  # of two infinities in one step that is the first, none shows which was meant
        assert (found()["output"]["module"], found()["step"]) == ("scale", broken)


def test_steps_that_a_scaler_leaves_out_are_no_fault(begun):
    """Its scale begins so large that the first gradients are infinite, which it is for."""
    watch, found = begun
    model, scaler = Router(), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    norms = []
    for step in range(1, 9):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.scale.factor = torch.nan if step == 8 else 100.0
            loss = loss_of(model, torch.ones(8, 4) * 100)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]).item())
        scaler.step(optimizer)
        scaler.update()
        bits = float_bits_of(loss.item()), float_bits_of(norms[-1])
        if step < 8:
            watch.stepped(step, *bits)
        else:
            with pytest.raises(Ended):
                watch.stepped(step, *bits)
    assert not torch.tensor(norms[:2]).isfinite().any()
    assert (found()["output"]["module"], found()["step"]) == ("scale", 8)


class Biased(Scale):
    """Where the fault is planted, beside a mask of infinities."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((1,), -torch.inf))


def test_a_mask_in_a_buffer_does_not_excuse_a_module(begun):
    """In the first step of a replay nothing shows yet that the scores before it are so by design."""
    watch, found = begun
    biased = Biased()
    biased.factor = torch.nan
    Top()(torch.ones(1, 4))
    biased(torch.ones(1, 4))
    with pytest.raises(Ended):
        watch.stepped(1, float_bits_of(torch.nan))
    assert found()["output"]["kind"] == "Biased"


@pytest.mark.parametrize("has_mask", [False, True])
def test_parameters_that_a_gradient_broke_are_said_to_be_of_the_step_before(begun, has_mask):
    """The outputs of that step, and its loss, are finite: a root has no derivative at 0."""
    watch, found = begun
    model = torch.nn.Linear(2, 1, bias=False)
    for step in (1, 2):
        loss = model(torch.full((1, 2), 1.0 if step == 1 else 0.0)).square().sum().sqrt()
        loss.backward()
        if has_mask and step == 2:
            Top()(torch.ones(1, 4))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        watch.stepped(step, float_bits_of(loss.item()))
    loss = model(torch.ones(1, 2))
    with pytest.raises(Ended):
        watch.stepped(3, float_bits_of(loss.item()))
    assert (
        found()["text"].splitlines()[-2]
        == "parameters became so in step 2, by their gradients or the optimizer; step 3 shows it"
    )


@pytest.mark.parametrize("broken_in", [100, 99])
def test_parameters_that_nothing_shows_are_said_after_the_last_step(begun, tmp_path, broken_in):
    """A replay up to that step, or of a program that ends itself before it, said that all is finite. A module whose `forward` is called is seen by no hook."""
    watch, found = begun
    recorder = FlightRecorder(FlightFile(tmp_path / "flight-00000.log"), 0, orders=watch._orders)
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(2, 1), "never": torch.nn.Linear(1, 1)})
    torch.nn.init.constant_(model["never"].bias, -torch.inf)  # by design
    recorder.watch(attach(model))
    recorder.advanced(Progress(broken_in - 1))
    torch.nn.init.constant_(model["head"].weight, torch.nan)
    model["head"].forward(torch.ones(1, 2))
    if broken_in < 100:
        recorder.advanced(Progress(broken_in))
    with pytest.raises(Ended):
        recorder.advanced(Progress(100)) if broken_in == 100 else recorder._nonfinite._at_exit()
    assert found()["step"] == broken_in
    assert found()["text"].splitlines() == [
        "a parameter is not finite, and the output of every module is",
        f"parameters became so in step {broken_in}, by their gradients or the optimizer",
        "  head.weight: float32[1, 2], 2 not finite (nan)",
    ]


def test_a_module_that_gave_the_same_in_a_step_that_went_well_is_named_with_the_step(begun):
    """The step was that after it, and the module another one, where a loop records only losses that are finite, as one with a scaler may do."""
    watch, found = begun
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Scale())
    for step in range(1, 5):
        model[1].factor = torch.nan if step in (2, 4) else 1.0
        loss = model(torch.ones(1, 2)).sum()
        model.zero_grad()
        loss.backward()
        if step != 2:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        bits = float_bits_of(loss.item()) if loss.isfinite() else None
        if step < 4:
            watch.stepped(step, bits)
    with pytest.raises(Ended):
        watch.stepped(4, None)
    assert (found()["step"], found()["output"]) == (4, None)
    assert found()["text"].endswith(
        "but for those that gave the same in steps that went well: 1 (nan); Sequential (nan)"
    )


def test_a_parameter_with_infinities_by_design_ends_no_step(begun):
    """One that never lets an option be chosen, in a loop that records no loss."""
    watch, found = begun
    layer = torch.nn.Linear(2, 2)
    with torch.no_grad():
        layer.bias[1] = -torch.inf
    for step in (1, 2):
        layer(torch.ones(1, 2)).softmax(-1).sum().backward()
        watch.stepped(step)
    with torch.no_grad():
        layer.weight[0, 0] = torch.nan
    layer(torch.ones(1, 2))
    with pytest.raises(Ended):
        watch.stepped(3)
    assert found()["output"]["kind"] == "Linear"


@pytest.mark.parametrize(("part", "name"), [("critic", "critic.0"), ("average", "ema.0")])
def test_a_module_is_named_as_in_the_attached_model(begun, tmp_path, part, name):
    """Of two models that are called by themselves both have a module "0"."""
    watch, found = begun
    both = torch.nn.ModuleDict({each: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()) for each in ("generator", "critic")})  # fmt: skip
    average = torch.optim.swa_utils.AveragedModel(both["critic"])
    live = attach(both, extra={"ema": average})
    recorder = FlightRecorder(FlightFile(tmp_path / "flight-00000.log"), 0, orders=watch._orders)
    recorder.watch(live)
    both["generator"](torch.ones(1, 2))
    {"critic": both["critic"], "average": average}[part](torch.full((1, 2), torch.nan))
    recorder.record(1, {"loss": torch.nan})
    with pytest.raises(Ended):
        recorder.advanced(Progress(1))
    assert found()["output"]["module"] == name


def test_a_norm_of_a_step_that_was_taken_counts(begun):
    watch, found = begun
    model = torch.nn.Linear(1, 1)
    model(torch.ones(1, 1))
    watch.stepped(1, float_bits_of(1.0), float_bits_of(torch.inf))
    torch.nn.init.constant_(model.weight, torch.nan)
    with pytest.raises(Ended):
        watch.stepped(2, float_bits_of(1.0), float_bits_of(torch.inf))
    assert found()["text"] == "the recorded grad_norm is not finite, and the output of every module is"


def test_a_program_that_ends_itself_in_the_step_is_judged_there(begun, monkeypatch):
    """As many do when their loss is not finite; one that ends well after an evaluation is not."""
    watch, found = begun
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        model(torch.full((1, 1), torch.nan))
    watch._at_exit()
    watch.over()
    model(torch.full((1, 1), torch.inf))
    with pytest.raises(Ended):
        watch._at_exit()
    assert (found()["output"]["kind"], found()["step"]) == ("Linear", 7)
    watch.over()
    with torch.no_grad():
        torch.nn.Tanh()(torch.full((1, 1), torch.nan))
    monkeypatch.setattr(sys, "last_value", FloatingPointError("planted"), raising=False)
    with pytest.raises(Ended):
        watch._at_exit()
    assert "the program ended in step 7 with FloatingPointError: planted" in found()["text"]


def test_what_counts_if_the_program_ends_now_stands_in_a_file_until_its_step_went_well(begun, tmp_path, monkeypatch):
    """Python calls no exit handlers where `os._exit` or a signal ends it. A process that was forked, as for a loader, is not the program."""
    watch, _ = begun
    place = tmp_path / SUSPECTED_NAME.format(0)
    broken = torch.nn.Linear(1, 1)
    watch.begin({"model": broken})
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        Top()(torch.ones(1, 4))
    assert not place.exists()
    watch.over()
    with torch.no_grad():
        Top()(torch.ones(1, 4))
    assert not place.exists()
    watch.over()
    Top()(torch.ones(1, 4))
    assert (json.loads(place.read_text())["output"]["kind"], json.loads(place.read_text())["step"]) == ("Top", 7)
    watch.stepped(7, float_bits_of(1.0))
    assert not place.exists()
    torch.nn.init.constant_(broken.weight, torch.nan)
    watch.stepped(8)
    assert (json.loads(place.read_text())["output"], json.loads(place.read_text())["step"]) == (None, 8)


def test_infinities_alone_in_the_first_step_do_not_explain_why_a_program_fails(begun, tmp_path, monkeypatch):
    """Nothing shows yet that those of a mask are by design: a program that was killed there had its mask named, with exit code 0."""
    watch, found = begun
    place = tmp_path / SUSPECTED_NAME.format(0)
    layer = torch.nn.Linear(1, 1)

    def is_doubtful():
        return json.loads(place.read_text())["is_doubtful"]

    watch.begin({"model": layer})
    monkeypatch.setattr(sys, "last_value", MemoryError("planted"), raising=False)
    Top()(torch.ones(1, 4))
    assert is_doubtful()
    watch._at_exit()
    for place_of, name, value in ((sys, "last_value", None), (layer.bias, "data", torch.full((1,), torch.inf))):
        with monkeypatch.context() as patch:
            patch.setattr(place_of, name, value)  # it ends well, or has broken a parameter
            with pytest.raises(Ended):
                watch._at_exit()
    torch.nn.Softmax(-1)(torch.full((1,), -torch.inf))
    assert not is_doubtful()
    broken = Scale()
    broken.factor = torch.nan
    broken(torch.ones(1))
    assert not is_doubtful()
    with pytest.raises(Ended):
        watch._at_exit()
    assert found()["output"]["kind"] == "Scale"
    watch.stepped(7, float_bits_of(1.0))
    layer(torch.full((1, 1), torch.inf))
    assert not is_doubtful()
    with pytest.raises(Ended):
        watch._at_exit()


def test_what_is_not_attached_is_not_trained(begun, tmp_path):
    """A module of which nothing is used ended a healthy replay, as its parameters were not finite; the loss is finite."""
    watch, found = begun
    recorder = FlightRecorder(FlightFile(tmp_path / "flight-00000.log"), 0, orders=watch._orders)
    layer, beside = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    torch.nn.init.constant_(beside.weight, torch.nan)
    recorder.watch(attach(layer))
    for step in (1, 2):
        loss = layer(torch.ones(1, 1))
        beside(torch.ones(1, 1))
        recorder.record(step, {"loss": loss.detach()})
        recorder.advanced(Progress(step))
    torch.nn.MSELoss()(layer(torch.ones(1, 1)), torch.full((1, 1), torch.nan))
    recorder.record(3, {"loss": torch.nan})
    with pytest.raises(Ended):
        recorder.advanced(Progress(3))
    assert found()["text"].splitlines()[0] == "the first output that is not finite is that of MSELoss, which the program itself calls"  # fmt: skip


@pytest.mark.parametrize("gives_up", [True, False])
def test_what_a_program_does_after_its_manager_is_of_no_step(begun, tmp_path, gives_up):
    """An evaluation with gradients there was the step after the last one; a loop that breaks at its first loss that is not finite has its module named."""
    watch, found = begun
    recorder = FlightRecorder(FlightFile(tmp_path / "flight-00000.log"), 0, orders=watch._orders)
    layer = torch.nn.Linear(1, 1)
    recorder.watch(attach(layer))
    if gives_up:
        layer(torch.full((1, 1), torch.nan))
    recorder.close()
    torch.nn.Tanh()(layer(torch.full((1, 1), torch.nan)))
    if not gives_up:
        recorder._nonfinite._at_exit()
        return
    with pytest.raises(Ended):
        recorder._nonfinite._at_exit()
    assert (found()["output"]["kind"], found()["step"]) == ("Linear", 1)


def test_an_output_that_was_not_looked_at_is_said_with_the_answer(begun):
    watch, found = begun
    Gives()(torch.ones(1))
    with pytest.raises(Ended):
        watch.stepped(3, float_bits_of(torch.nan))
    assert found()["text"].splitlines() == [
        "the recorded loss is not finite, and the output of every module is",
        "not looked at: of Gives, output, Odd: NotImplementedError: planted",
    ]
