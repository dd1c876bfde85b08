"""The first module with a NaN is named whatever it returns, and a watch ends no program: containers of any class, tensors of any kind."""

import collections
import dataclasses
import logging

import attrs
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from trainfold.adapters.flight.leaf_text import looked_at
from trainfold.adapters.flight.nonfinite import watch_nonfinite

Named = collections.namedtuple("Named", "h")  # noqa: PYI024 - as models return it


@dataclasses.dataclass
class Data:
    h: torch.Tensor
    aux: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    h: torch.Tensor


@attrs.frozen
class Attrs:
    h: torch.Tensor


class Slotted:
    __slots__ = ("absent", "h")

    def __init__(self, h):
        self.h = h


class Thing:
    def __init__(self, h):
        self.h, self.itself, self.rest = h, self, iter([1])


class ModelOutput(collections.OrderedDict):
    def __getattr__(self, name):
        return self[name]


class Gives(torch.nn.Module):
    def __init__(self, made):
        super().__init__()
        self.made = made

    def forward(self, x):
        return self.made(x)


CONTAINERS = {
    "dataclass": Data,
    "frozen": Frozen,
    "attrs": Attrs,
    "slots": Slotted,
    "object": Thing,
    "namedtuple": Named,
    "list": lambda h: [h],
    "list subclass": lambda h: type("Sub", (list,), {})([h]),
    "set": lambda h: {h},
    "deque": lambda h: collections.deque([h]),
    "dict": lambda h: {"h": h},
    "dict subclass": lambda h: ModelOutput(h=h),
    "user dict": lambda h: collections.UserDict(h=h),
    "nested": lambda h: (Data(Thing([{"a": Named(ModelOutput(b=h))}])), None, "text"),
    "distribution": lambda h: torch.distributions.Normal(h, 1.0, validate_args=False),
}
TENSORS = {
    "float64": torch.Tensor.double,
    "float16": torch.Tensor.half,
    "bfloat16": torch.Tensor.bfloat16,
    "complex64": lambda h: torch.complex(torch.ones_like(h), h),
    **{name: lambda h, name=name: h.to(getattr(torch, name))
       for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")},
    "sparse": torch.Tensor.to_sparse,
    "sparse twice": lambda h: torch.sparse_coo_tensor(torch.zeros(2, 2, dtype=torch.int64), h.flatten()[:2], h.shape),
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
    "bsr": lambda h: h.to_sparse_bsr((1, 1)),
    "mkldnn": torch.Tensor.to_mkldnn,
    "nested": lambda h: torch.nested.nested_tensor([h, h[:1]]),
    "jagged": lambda h: torch.nested.nested_tensor([h, h[:1]], layout=torch.jagged),
    "packed": lambda h: pack_padded_sequence(h[None], torch.tensor([2]), batch_first=True),
    "parameter": torch.nn.Parameter,
    "expanded": lambda h: h.expand(3, 2, 2),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("made", [*CONTAINERS.values(), *TENSORS.values()], ids=[*CONTAINERS, *TENSORS])
def test_the_module_is_named_whatever_it_returns(made):
    """C11: an output that was not looked at let a later module be named."""
    last = Gives(lambda _: torch.full((1,), torch.nan))
    for value, named in ((torch.nan, "0"), (1.0, "1")):
        with watch_nonfinite() as watch:
            torch.nn.Sequential(Gives(made), last)(torch.full((2, 2), value))
        assert (watch.found.module, watch.missed) == (named, [])
        assert str(watch.found)


def mapped(model, x):
    def loss(params, one):
        return functional_call(model, params, (one[None],)).square().sum()

    return vmap(grad(loss), in_dims=(None, 0))({name: each.detach() for name, each in model.named_parameters()}, x)


def faked(model, x):
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(x)
        torch.nn.Linear(2, 2)(torch.empty(1, 2))


def on_meta(model, x):
    with torch.device("meta"):
        torch.nn.Linear(2, 2)(torch.empty(1, 2))


class Odd(torch.Tensor):
    """A class of tensors that can do nothing."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"no {function}")


class Raises:
    @property
    def __dict__(self):
        raise RuntimeError("planted")


WAYS = {
    "vmap": mapped,
    "fake": faked,
    "meta": on_meta,
    "traced": lambda model, x: torch.jit.trace(model, x, check_trace=False),
    "exported": lambda model, x: torch.export.export(model, (x,)),
    "scripted": lambda model, x: torch.jit.script(torch.nn.ReLU())(x),
    "fx": lambda model, x: torch.fx.experimental.proxy_tensor.make_fx(model)(x),
    "a class without operations": lambda model, x: Gives(lambda x: torch.Tensor._make_subclass(Odd, x))(x),
    "an object without attributes": lambda model, x: Gives(lambda _: Raises())(x),
    "an object that is large": lambda model, x: Gives(lambda _: [[None] for _ in range(11_000)])(x),
    "its inputs": lambda model, x: Gives(lambda _: torch.full((1,), torch.inf))(Raises()),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("way", WAYS)
def test_a_watch_ends_no_program_and_changes_none(way, caplog):
    """It raised inside of the forward: a hook of ours must not be seen by the program. What it could not look at is said."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh())
    with watch_nonfinite() as watch, caplog.at_level(logging.WARNING, logger="trainfold"):
        WAYS[way](model, torch.ones(2, 2))
    assert (watch.found is None) == (way != "its inputs")
    unseen = {"a class without operations": "Odd: ", "an object without attributes": "Raises: RuntimeError: planted", "an object that is large": "10000 objects"}  # fmt: skip
    assert unseen.get(way, "") in " ".join(watch.missed)
    assert bool(watch.missed) == (way in unseen)
    assert caplog.messages == watch.missed


def test_a_nan_under_vmap_and_grad_is_named():
    """A model of per-sample gradients is looked at through what torch.func wraps around its tensors."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh())
    with watch_nonfinite() as watch:
        mapped(model, torch.tensor([[1.0, 1.0], [1.0, torch.nan]]))
    assert watch.found.module == "0"


def test_a_mode_of_the_program_does_not_see_the_watch():
    """One that counts operations counts those of the program."""
    counts = []
    for is_watched in (False, True):
        seen = []

        class Counts(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None, seen=seen):
                seen.append(str(function))
                return function(*args, **(kwargs or {}))

        with watch_nonfinite() if is_watched else torch.no_grad(), torch.no_grad(), Counts():
            torch.nn.Linear(2, 3)(torch.ones(2, 2))
        counts.append(seen)
    assert counts[0] == counts[1]


def test_a_tensor_over_a_mesh_is_looked_at_by_its_own_part():
    """A number of the whole would be a collective, which the other ranks do not call."""

    class Mesh(torch.Tensor):
        def to_local(self):
            return torch.tensor([1.0, torch.inf])

    found = looked_at("x", torch.ones(4).as_subclass(Mesh), pytest.fail)
    assert [(leaf.bad, leaf.what, leaf.kind) for leaf in found] == [(1, ("inf",), "float32[4]")]
