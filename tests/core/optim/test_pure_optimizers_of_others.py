"""Pure steps with optimizers of other packages: a resume is bitwise equal to the run, or it is refused by name."""

import contextlib
import inspect
import io
import warnings

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import trainfold
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import ResumeRefused, TrainfoldError, UnsupportedLeaf

with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings of other packages during their import are not ours
    import pytorch_optimizer
    import torch_optimizer

BEFORE, AFTER = 6, 6
NOT_RUN = {"demo", "distributedmuon", "lbfgs"}  # the first two need a process group, the last a closure


def kinds():
    found = {
        name: pytorch_optimizer.load_optimizer(name)
        for name in pytorch_optimizer.get_supported_optimizers()
        if name not in NOT_RUN
    }
    return {**found, "torch_optimizer.RAdam": torch_optimizer.RAdam, "torch.Adam": torch.optim.Adam}


KINDS = kinds()


class Net(nn.Module):
    """Parameters of one, two and three dimensions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(2, 4, 3)
        self.hidden = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(self.first(x).mean(-1))))


def loss_fn(model, batch):
    return trainfold.Loss(sum=(model(batch) - batch.sum((1, 2)).unsqueeze(1)).square().sum(), weight=len(batch))


def batch(number):
    return torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(100 + number))


def made(name, seed, *, donate, **changed):
    torch.manual_seed(seed)
    kind, model = KINDS[name], Net()
    rate = {"lr": 1e-2} if "lr" in inspect.signature(kind).parameters else {}
    pure = trainfold.optimizer(kind, **{**rate, **changed})
    return trainfold.init_state(model, pure, seed=0), trainfold.make_step(model, loss_fn, pure, donate=donate)


def trained(state, step, numbers):
    for number in numbers:
        state, _ = step(state, batch(number))
    return state


@contextlib.contextmanager
def quiet():
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@given(name=st.sampled_from(sorted(KINDS)), donate=st.booleans())
@example(name="lamb", donate=True)
@example(name="prodigy", donate=False)
@example(name="soap", donate=True)
@example(name="dash", donate=False)
@example(name="torch_optimizer.RAdam", donate=True)
@settings(max_examples=30)
def test_a_resume_of_a_pure_step_has_the_bits_of_the_run_or_is_refused(name, donate):
    """W06: new entries of a group are state, and existing ones are settings; through two saves and loads."""
    store = MemoryStore()
    with quiet():
        try:
            state, step = made(name, 0, donate=donate)
            state = trained(state, step, range(BEFORE))
        except Exception:  # noqa: BLE001  # one that no pure step can run fails at once
            return
        try:
            trainfold.save(state, store)
        except UnsupportedLeaf:
            return
        whole = trainfold.fingerprint(trained(state, step, range(BEFORE, BEFORE + AFTER)))
        for seed in (1, 2):
            like, step = made(name, seed, donate=donate)
            state = trainfold.load(store, like=like)
            trainfold.save(state, store)
        assert trainfold.fingerprint(trained(state, step, range(BEFORE, BEFORE + AFTER))) == whole


@pytest.mark.parametrize("name", ["lamb", "prodigy", "torch_optimizer.RAdam"])
@pytest.mark.parametrize("donate", [False, True])
def test_optimizers_that_write_into_their_groups_are_resumed(name, donate):
    """W06: they could be saved, but each resume was refused."""
    store = MemoryStore()
    with quiet():
        state, step = made(name, 0, donate=donate)
        trainfold.save(trained(state, step, range(3)), store)
        like, step = made(name, 1, donate=donate)
        assert trained(trainfold.load(store, like=like), step, range(3)).trainer.step == 6
        like, _ = made(name, 1, donate=donate, weight_decay=0.5)
        with pytest.raises(ResumeRefused, match=r"weight_decay: saved .*, wanted 0\.5"):
            trainfold.load(store, like=like)
        changed = trainfold.load(store, like=like, policy={"hyperparameters": "adapt"})
        trainfold.save(changed, store)
        assert trainfold.load(store, like=like).optimizer.groups[0].hyper["weight_decay"] == 0.5, "taken, and noted"


def test_a_slot_that_would_come_back_in_another_layout_is_refused_by_name():
    """W05: SOAP's bases are column-major; restored row-major, its next step silently had other bits."""
    with quiet():
        state, step = made("soap", 0, donate=False)
        state = trained(state, step, range(2))
        with pytest.raises(TrainfoldError, match=r"optimizer\.slots\['.*'\].*strides.*trainfold\.attach"):
            trainfold.save(state, MemoryStore())


class Noisy(torch.optim.SGD):
    """Langevin dynamics: its step draws random numbers."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter), alpha=1e-3)
        return loss


def by_function(grads, state, params):
    return {name: value - 0.01 * (grads[name] + torch.randn_like(value)) for name, value in params.items()}, state


@pytest.mark.parametrize("pure", [trainfold.optimizer(Noisy, lr=0.01), (lambda params: {}, by_function)])
def test_what_an_update_draws_depends_on_the_step_alone(pure):
    """A step is a function of its arguments: it does not use the global stream, and each step has new draws."""
    torch.manual_seed(0)
    model = Net()
    state, step = trainfold.init_state(model, pure, seed=0), trainfold.make_step(model, loss_fn, pure)
    found, before = [], torch.get_rng_state()
    for seed in (1, 2):
        torch.manual_seed(seed)
        stream = torch.get_rng_state()
        found.append(trainfold.fingerprint(trained(state, step, range(2)))["model"])
        assert torch.equal(torch.get_rng_state(), stream)
    assert found[0] == found[1]
    torch.set_rng_state(before)
    moved = [
        {name: value - state.model.params[name] for name, value in after.model.params.items()}
        for after in (
            step(state, batch(0))[0],
            step(state.evolve(trainer=trainfold.states.make_progress(step=1)), batch(0))[0],
        )
    ]
    assert not torch.equal(moved[0]["head.weight"], moved[1]["head.weight"])


class Scaled(nn.Module):
    """A module with an extra state other than tensors."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(2, 1), 1.0

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


def test_a_module_that_says_more_than_tensors_is_refused_by_a_pure_step():
    """W05: torch's own state_dict() would save it, but it was lost silently. Ties, wrappers and aliases do not count as more."""
    adam = trainfold.optimizer(torch.optim.Adam)
    with pytest.raises(trainfold.TrainfoldError, match=r"1 more: '0\._extra_state'.*trainfold\.attach"):
        trainfold.init_state(nn.Sequential(Scaled()), adam)
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    tied[1].weight = tied[0].weight
    tied.register_state_dict_post_hook(lambda module, found, prefix, local: found.update(other=found["0.weight"]))
    trainfold.init_state(tied, adam)
    trainfold.init_state(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), adam)
