"""A run whose model was built on meta: fresh, resumed, with new layers, and with what a user forgets."""

import warnings

import pytest
import torch
from kit.adapters.construct_cases import Net, all_bits, built
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.construct import initialize, materialize, on_meta
from trainfold.core.errors import InvalidState, ResumeRefused
from trainfold.core.step.init_state import init_state
from trainfold.core.step.optimizer import optimizer
from trainfold.weights import CheckpointWeights, Frozen


class Model(nn.Module):
    """With a table that no checkpoint has."""

    def __init__(self, *, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.register_buffer("scale", torch.linspace(0.5, 1, 4), persistent=False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x


def run(folder, *, steps, layers=2, policy=None, begin=initialize):
    model = on_meta(lambda: Model(layers=layers))
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)  # before there is memory
    materialize(model, "cpu")
    live = attach(model, adamw)
    with CheckpointManager(folder, every=1, policy=policy) as manager:
        manager.restore(live)
        found = begin(model, seed=0)
        while live.progress.step < steps:
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(live.progress.step))
            model(x).square().mean().backward()
            adamw.step()
            adamw.zero_grad()
            live.advance(samples=3)
            manager.step(live)
        manager.finish(live)
    return found, all_bits(model)


def test_a_run_resumes_with_the_same_lines_that_began_it(tmp_path):
    """I01, I03, B17: what is loaded is loaded, what no checkpoint has is computed, and the end is that of a run that was not stopped."""
    names = ("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # also HiddenState: what is kept in modules is not state
        assert run(tmp_path / "a", steps=2)[0] == names
        found, end = run(tmp_path / "a", steps=4)
    assert found == ()
    assert end == run(tmp_path / "b", steps=4)[1]


def test_layers_that_a_checkpoint_lacks_are_initialised_if_the_policy_allows_it(tmp_path):
    """P17: by default the resume is refused; where it is allowed, exactly the new layer is initialised, as in a fresh run."""
    run(tmp_path, steps=1)
    with pytest.raises(ResumeRefused, match=r"layers\.2"):
        run(tmp_path, steps=1, layers=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, bits = run(tmp_path, steps=1, layers=3, policy={"missing": "adapt"})
    assert found == ("layers.2.weight", "layers.2.bias")
    fresh = on_meta(lambda: Model(layers=3))
    materialize(fresh, "cpu")
    initialize(fresh, seed=0)
    wanted = all_bits(fresh)
    assert [name for name in wanted if wanted[name] == bits[name]] == [*found, "scale"]


def test_a_run_that_forgets_to_initialise_is_refused_at_its_first_step_and_at_a_save(tmp_path):
    """I07: the model on meta without a source: the error names the tensors and the next move; a pure step is refused as well."""
    with pytest.raises(InvalidState, match=r"4 that nothing has set .*layers\.0\.weight.*initialize"):
        run(tmp_path, steps=1, begin=lambda model, seed: ())
    model = on_meta(Model)
    with pytest.raises(InvalidState, match="materialize"):
        attach(model)
    materialize(model, "cpu")
    live = attach(model)
    with pytest.raises(InvalidState, match=r"layers\.0\.weight"):
        live.capture()
    with pytest.raises(InvalidState, match=r"layers\.0\.weight"):
        init_state(model, optimizer(torch.optim.SGD, lr=0.1), seed=0)
    initialize(model, seed=0)
    live.capture()
    init_state(model, optimizer(torch.optim.SGD, lr=0.1), seed=0)


@pytest.mark.parametrize("make", [
    lambda params: torch.optim.SGD(params, lr=0.1),
    lambda params: torch.optim.AdamW(params, lr=0.1),
    lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    lambda params: torch.optim.Adagrad(params, lr=0.1),
])  # fmt: skip
def test_a_step_from_values_that_nobody_set_is_seen_whatever_the_optimizer_made_of_them(make):
    """I07: arithmetic may turn one NaN into another."""
    model = on_meta(Model)
    materialize(model, "cpu")
    step = make(model.parameters())
    live = attach(model, step)
    model(torch.zeros(3, 4)).square().mean().backward()
    step.step()
    with pytest.raises(InvalidState, match=r"layers\.0\.weight"):
        live.advance(samples=3)


def test_another_nan_is_still_no_value():
    """I07: such as that of a negation, which is the NaN of no memory that was never written."""
    model = on_meta(Model)
    materialize(model, "cpu")
    live = attach(model)
    with torch.no_grad():
        for each in model.parameters():
            each.neg_()
    with pytest.raises(InvalidState, match=r"layers\.0\.weight"):
        live.advance(samples=3)


def test_an_attached_average_is_looked_at_too():
    """B13: a copy of the model that was made before the load."""
    model = on_meta(Model)
    materialize(model, "cpu")
    average = torch.optim.swa_utils.AveragedModel(model)
    initialize(model, seed=0)
    live = attach(model, extra={"ema": average})
    with pytest.raises(InvalidState, match=r"layers\.0\.weight"):
        live.capture()
    initialize(average, seed=0)
    live.capture()
    assert torch.equal(average.module.layers[0].weight, model.layers[0].weight)


def test_a_frozen_base_comes_from_outside_and_what_is_trained_is_initialised(tmp_path):
    """J03, I01: a source supplies what is frozen, `initialize` sets the rest, and a resume needs neither memory nor values twice."""
    base = built(["linear", "embedding"])
    with CheckpointManager(tmp_path / "base", components=["model"]) as manager:
        live = attach(base)
        live.advance(samples=1)
        manager.save(live)

    def start():
        model = on_meta(lambda: Net(["linear", "embedding", "linear"]))
        for layer in model.layers[:2]:
            layer.requires_grad_(requires_grad=False)
        sgd = torch.optim.SGD(model.layers[2].parameters(), lr=0.1)
        materialize(model, "cpu")
        source = CheckpointWeights(str(tmp_path / "base"))
        live = attach(model, sgd, weights=Frozen(source))
        with CheckpointManager(tmp_path / "tuned", every=1) as manager:
            manager.restore(live)
            found = initialize(model, seed=4)
            while live.progress.step < 1:
                model.layers[2](torch.ones(2, 3)).sum().backward()
                sgd.step()
                sgd.zero_grad()
                live.advance(samples=2)
                manager.step(live)
            manager.finish(live)
        return found, all_bits(model)

    found, bits = start()
    assert found == ("layers.2.weight", "layers.2.bias")
    assert all_bits(base).items() <= bits.items()
    assert start() == ((), bits)


def test_hostile_init_functions_after_a_load_do_not_run(tmp_path):
    """F16: nothing calls the init functions again, so a module with one loaded and one missing tensor keeps the loaded bits."""
    model = on_meta(lambda: Net(["hostile", "norm"]))
    materialize(model, "cpu")
    with torch.no_grad():
        model.layers[0].weight.fill_(7)
    assert initialize(model, seed=0) == (
        "layers.1.weight",
        "layers.1.bias",
        "layers.0.scale",
        "layers.1.running_mean",
        "layers.1.running_var",
    )
    assert (model.layers[0].weight == 7).all()
    assert torch.equal(model.layers[0].scale, built(["hostile"]).layers[0].scale)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_parameter_that_a_graph_holds_is_refused_with_a_way_out():
    """I04: torch raised that it could not swap it."""
    model = on_meta(lambda: nn.utils.weight_norm(nn.Linear(2, 2)))
    with pytest.raises(InvalidState, match=r"Linear.weight_g; use a module of torch.nn.utils.parametrizations"):
        materialize(model, "cpu")
