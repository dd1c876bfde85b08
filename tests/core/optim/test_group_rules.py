"""Rules of param groups: an expression for the name, or a function of the name or of the name and the tensor."""

import functools
import re

import pytest
import torch

import trainfold
from trainfold.core.errors import InvalidArgument
from trainfold.core.state.contract import contract_of


def members_of(rule, params=None):
    """The names that a rule selects for its group."""
    params = params or {"w": torch.ones(2, 2), "norm": torch.ones(2), "b": torch.ones(2)}
    init, _ = trainfold.optimizer(torch.optim.SGD, lr=1.0, groups=[(rule, {"weight_decay": 0.5})])
    return [name for group in init(params).groups if group.hyper["weight_decay"] == 0.5 for name in group.params]


class Rules:
    """Rules as methods."""

    def by_name(self, name):
        return name == "b"

    def by_tensor(self, name, p):
        return name != "norm" and p.dim() < 2

    def __call__(self, name, p):
        return p.dim() < 2

    @staticmethod
    def static(name, p):
        return p.dim() < 2


def by_name(name):
    return name == "b"


@functools.wraps(by_name)
def wrapped(*args, **kwargs):
    return by_name(*args, **kwargs)


def dim_below(limit, name, p, *, strict=True):
    return strict and p.dim() < limit


@pytest.mark.parametrize(
    ("rule", "members"),
    [
        (r"^b$", ["b"]),
        (re.compile("^b$"), ["b"]),
        (by_name, ["b"]),
        (wrapped, ["b"]),
        (Rules().by_name, ["b"]),
        (frozenset({"b"}).__contains__, ["b"]),
        (re.compile("^b$").search, ["b"]),
        (str.islower, ["w", "norm", "b"]),
        (len, ["w", "norm", "b"]),
        (lambda *names: names == ("b",), ["b"]),
        (lambda name="w": name == "b", ["b"]),
        (lambda name, p=None: p is None and name == "b", ["b"]),
        (functools.partial(lambda wanted, name: name == wanted, "b"), ["b"]),
        (lambda name, p: p.dim() < 2, ["norm", "b"]),
        (lambda name, p, limit=2: p.dim() < limit, ["norm", "b"]),
        (lambda name, *more: name == "b" and not more, ["b"]),
        (lambda name, p, *more: p.dim() < 2 and not more, ["norm", "b"]),
        (Rules().by_tensor, ["b"]),
        (Rules(), ["norm", "b"]),
        (Rules.static, ["norm", "b"]),
        (functools.partial(dim_below, 2), ["norm", "b"]),
        (functools.partial(dim_below, 2, strict=False), []),
    ],
)
def test_a_rule_takes_the_name_or_the_name_and_the_tensor(rule, members):
    """A function that accepts the name alone gets only the name; one that needs two arguments also gets the tensor."""
    assert members_of(rule) == members


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        (lambda: True, "()"),
        (lambda name, p, more: True, "(name, p, more)"),
        (lambda name, *, p: True, "(name, *, p)"),
        (functools.partial(dim_below), "(limit, name, p, *, strict=True)"),
        (functools.partial(by_name, "b"), "()"),
        (Rules, "()"),
        (7, "7"),
        (None, "None"),
        ("(", "unterminated subpattern"),
    ],
)
def test_a_rule_that_takes_neither_is_refused_before_there_is_a_state(rule, found):
    with pytest.raises(InvalidArgument, match=r"^groups: .*a regular expression, or a function of the name") as caught:
        trainfold.optimizer(torch.optim.SGD, lr=1.0, groups=[(rule, {"lr": 0.0})])
    assert found in str(caught.value.found)
    assert "lambda name, p: p.dim() < 2" in caught.value.fix


def test_a_rule_is_inspected_once_and_not_once_a_parameter(monkeypatch):
    import inspect

    seen = []
    original = inspect.signature
    rules = trainfold.optimizer(torch.optim.SGD, lr=1.0, groups=[(lambda name, p: p.dim() < 2, {"lr": 0.0})])
    monkeypatch.setattr(inspect, "signature", lambda what: seen.append(what) or original(what))
    rules.init({f"p{index}": torch.ones(1) for index in range(50)})
    assert len(seen) == 0


def test_a_rule_sees_whether_a_parameter_trains():
    model = torch.nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    rules = [(lambda name, p: not p.requires_grad, {"lr": 0.5})]
    state = trainfold.init_state(model, trainfold.optimizer(torch.optim.SGD, lr=1.0, groups=rules))
    assert [group.params for group in state.optimizer.groups] == [("bias",), ("weight",)]
    assert not any(value.requires_grad for value in state.model.params.values())


def test_a_rule_of_the_tensor_with_masters_sees_the_parameter_and_not_its_master():
    params = {"w": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2)}
    rules = [(lambda name, p: p.dtype == torch.bfloat16, {"lr": 0.5})]
    init, _ = trainfold.optimizer(torch.optim.SGD, lr=1.0, groups=rules, masters=True)
    assert [group.params for group in init(params).groups] == [("w",), ("b",)]


def test_rules_of_names_and_of_tensors_that_choose_alike_make_one_state():
    """The state does not record how a rule selects: contract and fingerprint depend only on its groups."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    made = [
        trainfold.init_state(model, trainfold.optimizer(torch.optim.AdamW, lr=0.1, groups=[(rule, {"lr": 0.5})]))
        for rule in (r"bias$|^1\.", lambda name: name != "0.weight", lambda name, p: p.dim() < 2)
    ]
    assert len({str(contract_of(state)) for state in made}) == 1
    assert len({str(trainfold.fingerprint(state)) for state in made}) == 1
    assert trainfold.fingerprint(made[0])["optimizer"] == "xxh3:38b6a298bbf615779629d90b8d74ebcf", (
        "as before rules of tensors"
    )
