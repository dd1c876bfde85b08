"""A component that cannot be saved is reported at the first step, not at the first save (W14)."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainfold import CheckpointManager
from trainfold.adapters.live.attach import attach
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import CaptureRefused, InvalidState, UnsupportedLeaf


class Keeps(torch.optim.SGD):
    """An optimizer that keeps an object in a slot."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["history"] = object()


class Stateful:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state()

    def load_state_dict(self, state):
        raise NotImplementedError


def make(optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = optimizer(model.parameters(), lr=0.1)
    live = attach(model, optimizer, **options)
    step(model, optimizer)
    return live


def step(model, optimizer):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def fails():
    raise KeyError("ema")


def test_an_object_in_a_slot_is_found_out_at_the_first_step():
    live = make(Keeps)
    with pytest.raises(CaptureRefused, match=r"(?s)optimizer\.slots\['weight'\]\['history'\].*components="):
        live.advance(samples=2)


def test_all_of_it_is_said_at_once():
    live = make(Keeps, extra={"log": Stateful(lambda: {"file": object()}), "ema": (fails, print)})
    with pytest.raises(CaptureRefused) as refused:
        live.advance(samples=2)
    assert [reason.where for reason in refused.value.reasons] == [
        "log.value['file']",
        "ema",
        "optimizer.slots['weight']['history']",
    ]
    assert [type(reason) for reason in refused.value.reasons] == [UnsupportedLeaf, InvalidState, UnsupportedLeaf]
    assert "KeyError: 'ema'" in str(refused.value)


def test_a_contract_without_an_exact_form_is_found_out():
    live = make()
    live.optimizers["optimizer"].param_groups[0]["schedule"] = object()
    with pytest.raises(CaptureRefused, match="schedule"):
        live.advance(samples=2)


def test_a_run_that_can_be_saved_is_tried_once_and_asked_nothing_more():
    asked = []
    live = make(extra={"count": (lambda: asked.append(1) or len(asked), print)})
    for _ in range(3):
        live.advance(samples=2)
    assert len(asked) == 1
    live.register("more", (lambda: asked.append(2) or 0, print))
    live.advance(samples=2)
    assert asked == [1, 1, 2]


def test_a_window_that_is_open_is_not_tried():
    live = make(Keeps)
    live.drop_window()
    live.advance(samples=2, steps=0)
    with pytest.raises(CaptureRefused):
        live.advance(samples=2)


def test_a_component_that_the_manager_does_not_save_need_not_be_savable():
    with CheckpointManager(MemoryStore(), every=1, components=["model", "trainer"]) as manager:
        model = nn.Linear(3, 1)
        optimizer = Keeps(model.parameters(), lr=0.1)
        live = attach(model, optimizer)
        manager.restore(live)
        step(model, optimizer)
        live.advance(samples=2)
        assert manager.step(live).step == 1


def test_the_trial_moves_no_random_stream():
    """A killed and resumed run makes one more trial than an uninterrupted one."""
    live = make(extra={"drawn": (lambda: float(torch.rand(1)), print)})
    before = torch.get_rng_state()
    live.advance(samples=2)
    assert torch.equal(before, torch.get_rng_state())


def test_the_trial_copies_and_digests_nothing():
    live, kernels = make(torch.optim.Adam), set()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            kernels.add(str(function))
            return function(*args, **kwargs or {})

    with Recorder():
        live.advance(samples=2)
    assert kernels <= {"aten.detach.default", "aten.lift_fresh.default"}  # a view; the state of a stream


class Scaled(torch.Tensor):
    """A quantised weight as libraries have them: integers and a scale, which compute as floats."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)

    def __init__(self, data, scale):
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data_", "scale"], {}

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["data_"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_, args[0].scale)
        plain = [each.data_ * each.scale if isinstance(each, cls) else each for each in args]
        return func(*plain, **(kwargs or {}))


def test_a_weight_that_is_made_of_other_tensors_is_refused_before_the_first_step_with_what_it_is_made_of():
    """K09: its own memory has no values. A save of it would be a checkpoint without weights."""
    model = torch.nn.Linear(2, 2)
    weight = Scaled(torch.ones(2, 2, dtype=torch.int8), torch.tensor(0.5))
    model.weight = torch.nn.Parameter(weight, requires_grad=False)
    live = attach(model)
    with pytest.raises(
        CaptureRefused,
        match=r"model.params\['weight'\].*a Scaled, which is made of other tensors: data_, scale; train plain tensors",
    ):
        live.advance(samples=1)
