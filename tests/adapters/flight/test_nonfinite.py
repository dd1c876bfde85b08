"""The first module whose output has a NaN: which one is named, and what it got."""

import pytest
import torch
from torch.nn.modules import module as hooks

from trainfold.adapters.flight.nonfinite import watch_nonfinite


class Residual(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, *, scale):
        return {"y": x + scale * self.inner(x)}


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_the_innermost_module_is_named_whichever_it_is(broken):
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    with torch.no_grad():
        model[broken].weight[0, 1] = float("nan")
    with watch_nonfinite() as watch:
        model(torch.ones(1, 2))
    assert (watch.found.module, watch.found.kind) == (str(broken), "Linear")
    assert [leaf.path for leaf in watch.found.tensors] == ["weight"]
    assert watch.found.inputs[0].bad == 0


def test_keyword_inputs_and_outputs_in_containers_are_named():
    model = Residual(torch.nn.Linear(2, 2))
    with watch_nonfinite() as watch:
        model(torch.ones(1, 2), scale=torch.tensor(float("inf")))
    assert (
        str(watch.found).splitlines()[0] == "the first output that is not finite is that of the whole model (Residual)"
    )
    assert {leaf.path: leaf.bad for leaf in (*watch.found.outputs, *watch.found.inputs)} == {
        "output['y']": 2,
        "inputs[0]": 0,
        "scale": 1,
    }


def test_a_finite_run_shows_nothing_and_the_hooks_go():
    model = torch.nn.Linear(2, 2)
    with watch_nonfinite() as watch:
        model(torch.ones(1, 2))
    model(torch.full((1, 2), float("nan")))
    assert watch.found is None
    assert not hooks._has_any_global_hook()


def test_an_error_in_a_forward_does_not_shift_the_names():
    class Raises(torch.nn.Module):
        def forward(self, x):
            raise ValueError("planted")

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with watch_nonfinite() as watch:
        with pytest.raises(ValueError, match="planted"):
            torch.nn.Sequential(Raises())(torch.ones(1, 2))
        model(torch.full((1, 2), float("nan")))
    assert watch.found.module == "0"


def test_the_name_is_that_of_the_model_without_wrappers():
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 2))
    with watch_nonfinite() as watch:
        torch.optim.swa_utils.AveragedModel(model)(torch.full((1, 2), float("nan")))
    assert watch.found.module == "0"
