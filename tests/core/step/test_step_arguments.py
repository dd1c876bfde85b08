"""Invalid arguments and results of a step, its loss, its schedule and a user's own update are refused by name."""

import functools

import numpy as np
import pytest
import torch
from torch import nn

import trainfold
from trainfold import Loss
from trainfold.core.errors import InvalidArgument, InvalidSchedule, InvalidState, SpecMismatch
from trainfold.core.format.fingerprint import fingerprint
from trainfold.properties import laws

SGD = trainfold.optimizer(torch.optim.SGD, lr=0.1)
BATCHES = [torch.arange(12.0).reshape(4, 3) / (i + 1) for i in range(3)]


def loss_fn(model, batch):
    return Loss(sum=model(batch).square().sum(), weight=len(batch))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.mark.parametrize(
    "call",
    [
        lambda model: trainfold.make_step(model, None, SGD),
        lambda model: trainfold.make_step(model, loss_fn, SGD, clip_norm="1"),
        lambda model: trainfold.make_step(model, loss_fn, SGD, clip_norm=True),
        lambda model: trainfold.init_state(model, trainfold.optimizer(torch.optim.SGD, lr=1, groups=[("(", {})])),
        lambda model: trainfold.make_step(model, lambda m, b: Loss(sum=m(b).sum() * 1j, weight=4), SGD)(
            trainfold.init_state(model, SGD), BATCHES[0]
        ),
        lambda model: trainfold.make_step(model, lambda m, b: Loss(sum=m(b).sum(), weight=10**400), SGD)(
            trainfold.init_state(model, SGD), BATCHES[0]
        ),
        *(
            lambda model, metric=metric: trainfold.make_step(
                model, lambda m, b: Loss(sum=m(b).sum(), weight=4, metrics={"q": metric}), SGD
            )(trainfold.init_state(model, SGD), BATCHES[0])
            for metric in ("x", [1, 2], (1, "x"), (1, 2, 3), None)
        ),
    ],
)
def test_an_argument_that_can_never_work_is_refused_by_name(call):
    with pytest.raises(InvalidArgument):
        call(make_model())


@pytest.mark.parametrize("state", [{}, None, 3, make_model()])
def test_what_is_no_state_is_refused_by_name(state):
    step = trainfold.make_step(make_model(), loss_fn, SGD)
    with pytest.raises(InvalidState, match="init_state"):
        step(state, BATCHES[0])


@pytest.mark.parametrize(
    "call",
    [
        lambda: trainfold.schedules.linear("10"),
        lambda: trainfold.schedules.linear(10.5),
        lambda: trainfold.schedules.cosine(10, warmup_steps=1.5),
        lambda: trainfold.schedules.constant(warmup_steps=True),
        lambda: trainfold.schedules.cosine(10, floor="0"),
        lambda: trainfold.schedules.wsd(10, decay_steps=2.5),
        lambda: trainfold.schedules.wsd(0, decay_steps=0, decay="none"),
        lambda: trainfold.schedules.wsd(5, warmup_steps=9, decay_steps=0, decay="none"),
        lambda: trainfold.schedules.horizon(total=1.5),
        lambda: trainfold.schedules.cosine(10)(-1),
        lambda: trainfold.schedules.constant(warmup_steps=2)(-1),
        lambda: trainfold.schedules.cosine(10)(1.5),
    ],
)
def test_steps_are_whole_numbers(call):
    """A13: the error gives the argument to set."""
    with pytest.raises(InvalidSchedule):
        call()


def test_an_infinite_norm_measures_and_resumes(tmp_path):
    """V08: the step's settings are compared as they are saved."""
    model = make_model()
    step = trainfold.make_step(model, loss_fn, SGD, clip_norm=float("inf"))
    state, _ = step(trainfold.init_state(model, SGD), BATCHES[0])
    trainfold.save(state, tmp_path / "run")
    resumed = trainfold.load(tmp_path / "run", like=trainfold.init_state(model, SGD))
    assert fingerprint(step(resumed, BATCHES[1])[0]) == fingerprint(step(state, BATCHES[1])[0])
    laws.resumes_exactly(step, trainfold.init_state(model, SGD), BATCHES)


def forget_gradient(param):
    param.grad.mul_(0)


def add_hooks(model, kind):
    if kind == "hook":
        model[0].weight.register_hook(lambda grad: grad * 0)
    elif kind == "after":
        model[0].weight.register_post_accumulate_grad_hook(forget_gradient)
    else:
        model[0].weight.register_hook(lambda grad: grad * 2)
        model[0].weight.register_hook(torch.zeros_like)
        model[1].bias.register_hook(lambda grad: None)
    return model


@pytest.mark.parametrize("kind", ["hook", "after", "several"])
@pytest.mark.parametrize("options", [{}, {"donate": True}, {"clip_norm": 1e9}])
def test_hooks_on_parameters_act_as_in_a_loop_by_hand(kind, options):
    model, by_hand = add_hooks(make_model(), kind), add_hooks(make_model(), kind)
    inner = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    step = trainfold.make_step(model, loss_fn, SGD, **options)
    state = trainfold.init_state(model, SGD)
    first = {name: value.clone() for name, value in state.model.params.items()}
    for batch in BATCHES:
        state, _ = step(state, batch)
        inner.zero_grad()
        loss = loss_fn(by_hand, batch)
        (loss.sum / loss.weight).backward()
        inner.step()
    assert torch.equal(state.model.params["0.weight"], first["0.weight"])
    assert not torch.equal(state.model.params["1.weight"], first["1.weight"])
    for name, value in by_hand.named_parameters():
        assert torch.equal(state.model.params[name], value.detach())
    assert all(param.grad is None for param in model.parameters())


def pair_with(update):
    return (lambda params: {}), update


@pytest.mark.parametrize(
    ("update", "error"),
    [
        (lambda grads, slots, params: None, InvalidArgument),
        (lambda grads, slots, params: (params, slots, 3), InvalidArgument),
        (lambda grads, slots, params: (3, slots), InvalidArgument),
        (lambda grads, slots, params: (dict.fromkeys(params, 3), slots), InvalidArgument),
        (lambda grads, slots, params: ({}, slots), SpecMismatch),
        (lambda grads, slots, params: ({**params, "more": torch.zeros(1)}, slots), SpecMismatch),
        (lambda grads, slots, params: ({name: value[:1] for name, value in params.items()}, slots), SpecMismatch),
        (lambda grads, slots, params: ({name: value.double() for name, value in params.items()}, slots), SpecMismatch),
    ],
)
def test_an_update_of_ones_own_gives_parameters_of_the_same_names_shapes_and_dtypes(update, error):
    model = make_model()
    pair = pair_with(update)
    state = trainfold.init_state(model, pair)
    before = fingerprint(state)
    step = trainfold.make_step(model, loss_fn, pair)
    with pytest.raises(error, match="update"):
        step(state, BATCHES[0])
    assert fingerprint(state) == before
    honest = pair_with(lambda grads, slots, params: ({n: v - 0.1 * grads[n] for n, v in params.items()}, slots))
    assert trainfold.make_step(model, loss_fn, honest)(state, BATCHES[0])[0].trainer.step == 1


def clamped(grad):
    return grad.clamp(-0.5, 0.5)


@pytest.mark.parametrize("hold", ["closure", "default", "partial", "method"])
def test_a_hook_that_holds_a_parameter_is_refused_because_it_would_read_the_models(hold):
    model = make_model()
    param = model[0].weight
    hooks = {
        "closure": lambda grad: grad + 0.5 * param,
        "default": lambda grad, held=param: grad + 0.5 * held,
        "partial": functools.partial(torch.add, param),
        "method": model.forward,
    }
    param.register_hook(hooks[hold])
    with pytest.raises(InvalidArgument, match=r"0\.weight"):
        trainfold.make_step(model, loss_fn, SGD)
    trainfold.bind_model(model, trainfold.init_state(model, SGD))  # no gradient flows here


def test_hooks_are_refused_where_gradients_are_divided_at_the_end():
    model = make_model()
    model[0].weight.register_hook(clamped)
    trainfold.make_step(model, loss_fn, SGD)
    with pytest.raises(InvalidArgument, match="accumulate=1"):
        trainfold.make_step(model, loss_fn, SGD, accumulate=2)


def test_the_hooks_of_a_frozen_parameter_wait():
    model = make_model()
    model[0].weight.register_hook(clamped)
    model[1].weight.register_post_accumulate_grad_hook(forget_gradient)
    for param in (model[0].weight, model[1].weight):
        param.requires_grad_(False)
    state = trainfold.init_state(model, SGD)
    after, _ = trainfold.make_step(model, loss_fn, SGD, accumulate=2)(state, BATCHES[0])
    assert torch.equal(after.model.params["0.weight"], state.model.params["0.weight"])


@pytest.mark.parametrize("number", [np.int64(4), np.float32(4), 4.0, torch.tensor(4), torch.ones(4, dtype=torch.bool)])
def test_numbers_of_numpy_and_tensors_are_numbers(number):
    def counted(model, batch):
        return Loss(sum=model(batch).square().sum(), weight=number, metrics={"q": (np.float32(1), number), "p": True})

    model = make_model()
    state = trainfold.init_state(model, SGD)
    options = {"schedule": lambda step: np.ones(1) if step else torch.tensor(1.0), "clip_norm": torch.tensor(1.0)}
    step = trainfold.make_step(model, counted, SGD, **options)
    after, metrics = step(state, BATCHES[0])
    plain, wanted = trainfold.make_step(model, loss_fn, SGD, clip_norm=1.0)(state, BATCHES[0])
    assert fingerprint(after)["model"] == fingerprint(plain)["model"]
    assert (metrics["loss"], metrics["q"], metrics["p"]) == (wanted["loss"], 0.25, 0.25)
    assert type(step(after, BATCHES[1])[0].trainer.tokens) is int
    laws.round_trips(after)


def test_a_step_that_ends_with_its_data_is_still_pure():
    model = make_model()
    inner = trainfold.make_step(model, loss_fn, SGD)

    def step(state, batch):
        if state.trainer.step >= 1:
            raise IndexError("the data has one batch")
        return inner(state, batch)

    laws.is_pure(step, trainfold.init_state(model, SGD), BATCHES[0])
