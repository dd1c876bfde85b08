"""What the script has made of the model before it gets other weights: a copy follows it, or the user hears that it does not."""

import copy
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.disabled import DisabledManager
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import StaleCopy
from trainfold.core.format.fingerprint import fingerprint
from trainfold.weights import CheckpointWeights, Frozen


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


def a_base():
    store, model = MemoryStore(), network(7)
    model(torch.randn(5, 3))
    save(attach(model).capture(), store)
    return store


BASE = a_base()
COPIES = {
    "average": AveragedModel,
    "with_buffers": lambda model: AveragedModel(model, use_buffers=True),
    "copied": copy.deepcopy,
    "in_double": lambda model: copy.deepcopy(model).double(),
    "in_half": lambda model: copy.deepcopy(model).to(torch.bfloat16),
}


def begun(names, *, first, door):
    """The extra components of a run that begins with the weights of BASE, with its copies made before the restore, or of these weights."""
    model = network(1)
    if not first:
        attach(model, weights=CheckpointWeights(BASE)).take_weights()
    extra = {name: COPIES[name](model) for name in sorted(names)}
    frozen = {"weights": CheckpointWeights(BASE)} if door == "outside" else {}
    live = attach(model, extra=extra, **frozen)
    initial = {} if door == "outside" else {"initial": CheckpointWeights(BASE)}
    with DisabledManager() if door == "disabled" else CheckpointManager(MemoryStore()) as manager:
        restored = manager.restore(live, **initial)
    return fingerprint(live.capture()), restored


@settings(deadline=None, max_examples=20)
@given(st.sets(st.sampled_from(sorted(COPIES))), st.sampled_from(("manager", "disabled", "outside")))
def test_a_copy_that_was_made_before_is_the_one_that_is_made_afterwards(names, door):
    """V07, P35: masters are refreshed, and so is an average, a target network or a teacher that was a copy of the model."""
    found, restored = begun(names, first=True, door=door)
    wanted, _ = begun(names, first=False, door=door)
    assert found == wanted
    if door != "outside":
        assert restored.copies == tuple(sorted(names))
        assert all(f"copy     {name}: " in str(restored) for name in names)


class Average:
    """An average that holds tensors in a list."""

    def __init__(self, model):
        self.shadow = [each.detach().clone() for each in model.parameters()]

    def state_dict(self):
        return {"decay": 0.9, "shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = [each.clone() for each in state["shadow"]]


def test_a_copy_that_stays_as_it_is_is_named_with_what_to_do():
    """Of an object of a user's own it is not known what it is made of."""
    model = network(1)
    live = attach(model, extra={"mine": Average(model), "other": Average(network(2))})
    with CheckpointManager(MemoryStore()) as manager, pytest.warns(StaleCopy) as told:
        assert manager.restore(live, initial=CheckpointWeights(BASE)).copies == ()
    (text,) = [str(each.message) for each in told]
    assert text.startswith("mine: it has the values that the model had")
    assert "live.register('mine', ...)" in text
    assert "follow=['mine']" in text


def test_what_is_no_copy_or_comes_from_elsewhere_stays_as_it_is():
    """A network of its own, one that was trained, one of zeros, the model itself, and what follows a checkpoint."""
    model = network(1)
    other, trained = network(2), copy.deepcopy(model)
    trained[0].bias.data[0] += 1
    spoken = MemoryStore()
    average = Average(network(3))
    save(attach(network(7), extra={"mine": average}).capture(), spoken)
    mine = Average(model)
    attached = {"other": other, "trained": trained, "part": model[0], "mine": mine}
    before = {name: copy.deepcopy(attached[name].state_dict()) for name in ("other", "trained")}
    live = attach(model, extra=attached)
    with CheckpointManager(MemoryStore()) as manager, warnings.catch_warnings(action="error", category=StaleCopy):
        restored = manager.restore(live, initial=CheckpointWeights(spoken), follow=["mine"])
    assert restored.copies == ()
    for name, state in before.items():
        assert all(torch.equal(each, state[key]) for key, each in attached[name].state_dict().items())
    assert all(map(torch.equal, mine.shadow, average.shadow))
    zero = nn.Linear(2, 1, bias=False)
    zero.weight.data.zero_()
    base = MemoryStore()
    save(attach(nn.Linear(2, 1, bias=False)).capture(), base)
    target = copy.deepcopy(zero)
    with CheckpointManager(MemoryStore()) as manager:
        assert manager.restore(attach(zero, extra={"zero": target}), initial=CheckpointWeights(base)).copies == ()


def test_of_a_frozen_base_from_outside_the_copies_follow_too():
    """The copy has the base that the source supplies, and what is trained as the script has it."""
    model = network(1)
    model[0].requires_grad_(False)
    ema = copy.deepcopy(model)
    live = attach(model, extra={"ema": ema}, weights=Frozen(CheckpointWeights(BASE)))
    with CheckpointManager(MemoryStore()) as manager:
        manager.restore(live)
    assert all(map(torch.equal, ema.state_dict().values(), model.state_dict().values()))


def test_a_resume_loads_what_was_averaged_and_no_copy():
    store = MemoryStore()
    for steps in (1, 2):
        model = network(steps)
        ema = copy.deepcopy(model)
        live = attach(model, extra={"ema": ema}, weights=CheckpointWeights(BASE))
        with CheckpointManager(store, every=1) as manager:
            manager.restore(live)
            if steps == 2:
                assert ema[0].bias.tolist() == [5.0, 5.0]
            ema[0].bias.data.fill_(5)
            live.advance(samples=1)
            manager.step(live)


def test_one_rank_warns_and_an_error_of_the_warning_is_that_of_all():
    """J03: the ranks ask each other before one of them raises."""

    def begin(world):
        model = network(1)
        live = attach(model, extra={"mine": Average(model)})
        with CheckpointManager(MemoryStore(), collectives=world, check_replicas="none") as manager:
            try:
                manager.restore(live, initial=CheckpointWeights(BASE))
            except (StaleCopy, Exception) as error:  # noqa: BLE001 - compared below
                return str(error)
        return ""

    with warnings.catch_warnings(action="error", category=StaleCopy):
        told = run_threads(2, begin)
    assert all("mine: it has the values" in each for each in told)
