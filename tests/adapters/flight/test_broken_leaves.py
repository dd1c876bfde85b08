"""Which parameters and buffers count as broken in a replay until the first NaN: those that a step broke, and not those that were so from the start."""

import pytest
import torch
from kit.adapters.nonfinite_cases import Ended

from trainfold import Progress, attach
from trainfold.adapters.flight.flight_recorder import FlightRecorder
from trainfold.backends.flight.flight_file import FlightFile

LAST = 100  # of the replay


class Recorded:
    """A loop of an attached model, of which each step is judged."""

    def __init__(self, watch, tmp_path, model, **attached):
        self.recorder = FlightRecorder(FlightFile(tmp_path / "flight-00000.log"), 0, orders=watch._orders)
        self.live = attach(model, **attached)
        self.recorder.watch(self.live)

    def step(self, number, **values):
        self.recorder.record(number, values)
        self.recorder.advanced(Progress(number))


def unset(model, *names):
    """Make some parameters what `torch.empty` may give."""
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).fill_(torch.nan)
    return model


def two():
    return torch.nn.ModuleDict({"head": torch.nn.Linear(2, 1), "never": torch.nn.Linear(2, 1)})


@pytest.mark.parametrize("values", [{"loss": 1.0}, {}, {"loss": 1.0, "grad_norm": torch.inf}])
def test_a_parameter_that_nothing_has_set_ends_no_healthy_replay(begun, tmp_path, values):
    """An average that is filled later, or a head that is never used: each such run was not finite. A scaler leaves a step out, whose norm is infinite."""
    watch, found = begun
    model = unset(two(), "never.weight", "never.bias")
    loop = Recorded(watch, tmp_path, model)
    for number in (1, 2, LAST):
        model["head"](torch.ones(1, 2))
        loop.step(number, **values)
    loop.recorder._nonfinite._at_exit()
    with torch.no_grad():
        model["head"].weight[0, 0] = torch.nan
    with pytest.raises(Ended):
        loop.step(LAST, **values)
    assert "head.weight: float32[1, 2], 1 not finite" in found()["text"] or "grad_norm" in values
    assert "never" not in found()["text"]


@pytest.mark.parametrize("places", [(0, 1), (1,)])
def test_a_parameter_of_which_more_becomes_a_nan_is_named(begun, tmp_path, places):
    watch, found = begun
    model = two()
    with torch.no_grad():
        model["never"].weight[0, 0] = torch.nan
    loop = Recorded(watch, tmp_path, model)
    loop.step(1, loss=1.0)
    with torch.no_grad():
        model["never"].weight[0, 0] = (
            torch.nan if 0 in places else 1.0
        )  # set at last; then broken again, with another one
    loop.step(2, loss=1.0)
    with torch.no_grad():
        model["never"].weight[:] = torch.nan
    loop.step(3, loss=1.0)
    with pytest.raises(Ended):
        loop.step(LAST, loss=1.0)
    assert found()["step"] == 3
    assert found()["text"].splitlines()[-1] == "  never.weight: float32[1, 2], 2 not finite (nan)"


def test_what_was_set_meanwhile_counts_if_it_breaks_again(begun, tmp_path):
    watch, found = begun
    model = unset(two(), "never.bias")
    loop = Recorded(watch, tmp_path, model)
    torch.nn.init.zeros_(model["never"].bias)
    loop.step(1, loss=1.0)
    unset(model, "never.bias")
    with pytest.raises(Ended):
        loop.step(LAST, loss=1.0)
    assert "never.bias" in found()["text"]


@pytest.mark.parametrize("values", [{"loss": torch.nan}, {}])
def test_a_parameter_that_is_used_is_at_fault_though_it_was_so_from_the_start(begun, tmp_path, values):
    """As in a checkpoint that has the NaN already; a loop may record no loss."""
    watch, found = begun
    model = unset(two(), "head.weight")
    loop = Recorded(watch, tmp_path, model)
    model["head"](torch.ones(1, 2))
    with pytest.raises(Ended):
        loop.step(1, **values)
    assert (found()["step"], found()["output"]["module"]) == (1, "head")


def test_a_frozen_mask_of_infinities_may_be_trained_later(begun, tmp_path):
    watch, _ = begun
    model = two()
    mask = model["never"].weight.requires_grad_(False)
    mask.fill_(-torch.inf)
    loop = Recorded(watch, tmp_path, model)
    loop.step(1, loss=1.0)
    mask.requires_grad_(True)
    loop.step(2)
    loop.step(LAST, loss=1.0, grad_norm=torch.inf)


@pytest.mark.parametrize("ends_early", [False, True])
def test_a_buffer_that_became_a_nan_is_named_at_the_end(begun, tmp_path, ends_early):
    """A scaler leaves out a step whose NaN the statistics of a batch norm have taken: the training goes on well, and each evaluation is worth nothing."""
    watch, found = begun
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    model.register_buffer("range", torch.full((2,), torch.inf))
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    loop = Recorded(watch, tmp_path, model)
    for number in (1, 2, 3):
        model(torch.full((4, 2), torch.nan) if number == 2 else torch.randn(4, 2))
        model.scratch.fill_(torch.nan)
        model.range[0] = 1.0
        loop.step(number, **({} if number == 2 else {"loss": 1.0}))
    with pytest.raises(Ended):
        loop.recorder._nonfinite._at_exit() if ends_early else loop.step(LAST, loss=1.0)
    assert found()["step"] == 2
    assert found()["text"].splitlines() == [
        "a buffer is not finite, and each loss and trainable parameter is; an evaluation may show it",
        "buffers became so in step 2",
        "  0.running_mean: float32[2], 2 not finite (nan)",
        "  0.running_var: float32[2], 2 not finite (nan)",
    ]


def test_a_step_whose_gradients_broke_the_parameters_is_the_one_that_is_named(begun, tmp_path):
    """It was the step after it, whose outputs show it."""
    watch, found = begun
    model = torch.nn.Linear(2, 1, bias=False)
    model.register_parameter("last", torch.nn.Parameter(torch.ones(1)))
    loop = Recorded(watch, tmp_path, model)
    for number in (7, 8):
        loss = model(torch.full((1, 2), 1.0 if number == 8 else 0.0)).square().sum().sqrt()
        model.zero_grad()
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        if number == 7:
            loop.step(7, loss=loss.detach())
    unset(
        model, "last"
    )  # as the optimizer does in step 8, with all others: of the step before it is said what broke there
    with pytest.raises(Ended):
        loop.step(8, loss=loss.detach())
    assert found()["step"] == 7
    assert found()["text"].splitlines()[-2:] == [
        "parameters became so in step 7, by their gradients or the optimizer; step 8 shows it",
        "  weight: float32[1, 2], 2 not finite (nan)",
    ]
