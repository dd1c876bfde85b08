"""The first module whose output has a NaN: which one is named, and what it got."""

import pytest
import torch
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint

from trainfold.adapters.flight.nonfinite import NonFiniteWatch, watch_nonfinite


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
        str(watch.found).splitlines()[0]
        == "the first output that is not finite is that of Residual, which the program itself calls"
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


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.shared = torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)

    def forward(self, x, scale):
        return self.shared(self.shared(self.inner(x)) * scale)


class Blocks(torch.nn.Module):
    def __init__(self, *, reentrant=None):
        super().__init__()
        self.b, self.reentrant = torch.nn.ModuleList(Block() for _ in range(3)), reentrant

    def forward(self, x, scale):
        for number, block in enumerate(self.b):
            words = (x, scale if number == 1 else torch.ones(()))
            x = block(*words) if self.reentrant is None else checkpoint(block, *words, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_name_is_whole_where_activations_are_checkpointed(reentrant):
    """Blocks are called again alone in the backward pass, which leaves some of them by an error: the name began at the block."""
    model = Blocks(reentrant=reentrant)
    with watch_nonfinite() as watch:
        for scale in (1.0, float("inf")):
            model(torch.ones(1, 2, requires_grad=True), torch.tensor(scale)).sum().backward()
    assert watch.found.module == "b.1.shared"


@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # the hooks see the wrapper, too
@pytest.mark.parametrize("way", ["a wrapper", "in place", "watched by hand"])
def test_compiled_modules_are_named_as_they_are_written(way):
    """The hooks ended the program inside of the compiler; a watch without `uncompiled` sees the outermost module alone."""
    model = Blocks()
    called = model if way == "in place" else torch.compile(model, backend="eager", fullgraph=True)
    if way == "in place":
        model.compile(backend="eager", fullgraph=True)
    called(torch.ones(1, 2), torch.tensor(1.0))
    if way == "watched by hand":
        watch = NonFiniteWatch()
        handles = watch.install()
        try:
            called(torch.ones(1, 2), torch.tensor(float("inf")))
        finally:
            for handle in handles:
                handle.remove()
                hooks._global_forward_hooks_with_kwargs.pop(handle.id, None)
    else:
        with watch_nonfinite() as watch:
            called(torch.ones(1, 2), torch.tensor(float("inf")))
    named = "" if way == "watched by hand" else "b.1.shared"
    assert watch.found.module == named
