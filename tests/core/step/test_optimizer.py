"""Optimizers as pure functions: bitwise equal to the mutable optimizer, for every torch optimizer."""

import itertools

import attrs
import pytest
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument, InvalidState, MastersRebuilt, UnsupportedOptimizer
from trainfold.core.optim.param_groups import check_partition
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.masters import refresh_masters
from trainfold.core.state.state import ParamGroup
from trainfold.core.step.engine import bound_optimizer
from trainfold.core.step.optimizer import optimizer

SHAPES = {"h.0.weight": (5, 3), "h.0.scale": (3,), "h.1.weight": (4, 5), "never": (2, 2), "late": (3, 2)}
MATRICES = {name: shape for name, shape in SHAPES.items() if len(shape) == 2}
FLOAT_GRADS = {"SparseAdam", "LBFGS"}

TABLE = [
    ("Adadelta", {"lr": 0.1}),
    ("Adadelta", {"lr": 0.1, "weight_decay": 0.1}),
    ("Adafactor", {"lr": 0.1}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1}),
    ("Adam", {"lr": 0.1, "amsgrad": True}),
    ("Adam", {"lr": torch.tensor(0.1)}),
    ("Adamax", {"lr": 0.1}),
    ("AdamW", {"lr": 0.1, "weight_decay": 0.1}),
    ("ASGD", {"lr": 0.1, "t0": 2}),
    ("Muon", {"lr": 0.1, "momentum": 0.9}),
    ("NAdam", {"lr": 0.1, "momentum_decay": 0.01}),
    ("RAdam", {"lr": 0.1}),
    ("RMSprop", {"lr": 0.1, "momentum": 0.5, "centered": True}),
    ("Rprop", {"lr": 0.1}),
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "maximize": True}),
]


def _implementations():
    for name, hyper in TABLE:
        cls = getattr(torch.optim, name)
        known = cls.__init__.__code__.co_varnames
        yield name, hyper
        if "foreach" in known and not isinstance(hyper["lr"], torch.Tensor):
            yield name, {**hyper, "foreach": True}
            yield name, {**hyper, "foreach": False}
        if "fused" in known and not hyper.get("maximize"):
            yield name, {**hyper, "fused": True}


CASES = list(_implementations())


def _grads(step, params):
    """``late`` gets its first gradient at step 2, ``never`` gets none; a gradient can also disappear again."""
    generator = torch.Generator().manual_seed(100 + step)
    grads = {name: torch.randn(value.shape, generator=generator) for name, value in params.items()}
    grads["never"] = None
    if step < 2:
        grads["late"] = None
    if step == 3:
        grads["h.0.weight"] = None
    return grads


def _params(shapes):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _plain(hyper):
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in hyper.items()}


def _ids(case):
    return "-".join([case[0], *(f"{key}={value}" for key, value in case[1].items() if key != "lr")])


def _same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


def test_every_optimizer_of_torch_is_in_the_table():
    classes = {
        name
        for name in dir(torch.optim)
        if isinstance(getattr(torch.optim, name), type)
        and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    }
    assert classes - {"Optimizer"} == {name for name, _ in TABLE} | FLOAT_GRADS


@pytest.mark.parametrize("case", CASES, ids=map(_ids, CASES))
def test_pure_updates_give_the_bits_of_the_mutable_optimizer(case):
    """B09, B10: slots, dtypes and laziness match torch, including parameters that get a gradient late or never."""
    name, hyper = case
    cls = getattr(torch.optim, name)
    start = _params(MATRICES if name == "Muon" else SHAPES)
    mutable = {key: torch.nn.Parameter(value.clone()) for key, value in start.items()}
    theirs = cls(list(mutable.values()), **_plain(hyper))
    schedule = torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: 1.0 / (step + 1))
    init, update = optimizer(cls, **_plain(hyper))
    params, state = dict(start), init(start)
    for step in range(6):
        grads = _grads(step, start)
        for key, value in mutable.items():
            value.grad = None if grads[key] is None else grads[key].clone()
        theirs.step()
        schedule.step()
        params, state = update(grads, state, params, lr_factor=1.0 / (step + 1))
        assert all(torch.equal(params[key], mutable[key].detach()) for key in start), step
    for key, value in mutable.items():
        mine = state.slots.get(key, {})
        other = theirs.state.get(value, {})
        assert mine.keys() == other.keys()
        assert all(_same(mine[slot], other[slot]) for slot in other), key
    assert "never" not in state.slots or name == "Adagrad"


@pytest.mark.parametrize("case", CASES, ids=map(_ids, CASES))
def test_an_update_leaves_the_bits_of_its_arguments_and_gives_the_same_twice(case):
    name, hyper = case
    start = _params(MATRICES if name == "Muon" else SHAPES)
    init, update = optimizer(getattr(torch.optim, name), **_plain(hyper))
    params, state = update(_grads(2, start), init(start), start)
    grads = _grads(4, start)
    before = tree.map_tensors(torch.clone, (grads, state, params))
    first = update(grads, state, params, lr_factor=0.5)
    second = update(grads, state, params, lr_factor=0.5)
    for a, b in ((before, (grads, state, params)), (first, second)):
        assert tree.structure(a) == tree.structure(b)
        assert all(itertools.starmap(_same, zip(tree.leaves(a), tree.leaves(b), strict=True)))


def test_groups_by_name_are_the_groups_of_torch():
    start = _params(SHAPES)
    rules = [(r"^h\.1", {"weight_decay": 0.5}), (lambda name: name.endswith("scale"), {"lr": 0.01})]
    init, update = optimizer(torch.optim.AdamW, lr=0.1, groups=rules)
    state = init(start)
    assert [group.params for group in state.groups] == [
        ("h.1.weight",),
        ("h.0.scale",),
        ("h.0.weight", "never", "late"),
    ]
    mutable = {key: torch.nn.Parameter(value.clone()) for key, value in start.items()}
    theirs = torch.optim.AdamW(
        [
            {"params": [mutable["h.1.weight"]], "weight_decay": 0.5},
            {"params": [mutable["h.0.scale"]], "lr": 0.01},
            {"params": [mutable["h.0.weight"], mutable["never"], mutable["late"]]},
        ],
        lr=0.1,
    )
    params = dict(start)
    for step in range(3):
        grads = _grads(step, start)
        for key, value in mutable.items():
            value.grad = grads[key]
        theirs.step()
        params, state = update(grads, state, params)
    assert all(torch.equal(params[key], mutable[key].detach()) for key in start)


def test_the_hyperparameters_of_the_state_are_the_truth():
    start = {"w": torch.ones(2)}
    saved = optimizer(torch.optim.SGD, lr=0.5).init(start)
    other = optimizer(torch.optim.SGD, lr=100.0)
    params, state = other.update({"w": torch.ones(2)}, saved, start)
    assert params["w"].tolist() == [0.5, 0.5]
    assert state.groups[0].hyper["lr"] == 0.5


def test_an_optimizer_that_counts_in_its_param_group_keeps_its_count():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            return super().step(closure)

    start = {"w": torch.ones(2)}
    init, update = optimizer(Counting, lr=0.5)
    params, state = start, init(start)
    for _ in range(3):
        params, state = update({"w": torch.ones(2)}, state, params, lr_factor=0.5)
    assert state.groups[0].hyper["count"] == 3
    assert state.groups[0].hyper["lr"] == 0.5


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch warns inside SparseAdam
def test_sparse_adam_takes_sparse_gradients():
    start = {"w": torch.zeros(4, 2)}
    grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (4, 2), check_invariants=True)
    mutable = torch.nn.Parameter(torch.zeros(4, 2))
    theirs = torch.optim.SparseAdam([mutable], lr=0.1)
    mutable.grad = grad.clone()
    theirs.step()
    init, update = optimizer(torch.optim.SparseAdam, lr=0.1)
    params, _ = update({"w": grad}, init(start), start)
    assert torch.equal(params["w"], mutable.detach())


def test_an_optimizer_that_needs_a_closure_is_refused_by_name():
    with pytest.raises(UnsupportedOptimizer, match="LBFGS"):
        optimizer(torch.optim.LBFGS, lr=1.0)
    with pytest.raises(UnsupportedOptimizer):
        optimizer(torch.nn.Linear)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optimizer(torch.optim.SGD, learning_rate=1.0),
        lambda: optimizer(torch.optim.SGD, lr=lambda step: 1.0),
        lambda: optimizer(torch.optim.SGD, lr=1.0, groups=[("b", {"weight_dekay": 1.0})]).init({"b": torch.ones(1)}),
        lambda: optimizer(torch.optim.SGD, lr=1.0).init({}),
    ],
)
def test_bad_hyperparameters_are_refused(make):
    with pytest.raises(InvalidArgument):
        make()


def test_a_state_of_another_optimizer_or_model_is_refused():
    start = _params(SHAPES)
    adam, sgd = optimizer(torch.optim.Adam, lr=0.1), optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(InvalidState, match="kind"):
        sgd.update({}, adam.init(start), start)
    with pytest.raises(InvalidState, match="late"):
        adam.update({}, adam.init({k: v for k, v in start.items() if k != "late"}), start)
    with pytest.raises(InvalidState, match="nobody"):
        adam.update({"nobody": torch.ones(1)}, adam.init(start), start)


class Looked(str):
    """A name that counts how often it is hashed or compared."""

    __slots__ = ()
    count = 0

    def __hash__(self):
        Looked.count += 1
        return super().__hash__()

    def __eq__(self, other):
        Looked.count += 1
        return super().__eq__(other)


def looks_of(check):
    Looked.count = 0
    check()
    return Looked.count


@pytest.mark.parametrize("size", [10, 1000])
def test_the_names_of_groups_are_checked_in_linear_time(size):
    """The test bounds the number of looks at each name, not the seconds."""
    names = [Looked(f"layer.{index}.weight") for index in range(size)]
    groups = (ParamGroup({}, tuple(names[::2])), ParamGroup({}, tuple(names[1::2])))
    assert looks_of(lambda: check_partition(groups, names)) <= 10 * size
    wrong = (ParamGroup({}, (*names[1:], *names[1:3], "other")),)
    Looked.count = 0
    with pytest.raises(InvalidState, match=r"missing: \['layer\.0.*unknown: \['other.*twice: \['layer\.1\..*layer\.2"):
        check_partition(wrong, names)
    assert Looked.count <= 10 * size


def test_groups_that_did_not_change_are_not_checked_again(monkeypatch):
    """A step that does not donate binds a copy of the state each time; the names are those of the previous step."""
    checks = []
    monkeypatch.setattr(bound_optimizer, "check_partition", lambda groups, names: checks.append(groups))
    sgd = optimizer(torch.optim.SGD, lr=0.1)
    params = {"a": torch.nn.Parameter(torch.ones(2)), "b": torch.nn.Parameter(torch.ones(2))}
    state, bound = sgd.init(params), sgd.bound_to(params)
    for _ in range(3):
        bound.bind(tree.map_tensors(torch.clone, state))
    assert len(checks) == 1
    bound.bind(attrs.evolve(state, groups=(ParamGroup(state.groups[0].hyper, ("a",)),)))
    assert len(checks) == 2


def test_a_parameter_without_slots_is_fine_and_one_with_a_part_of_them_is_damage():
    """B10: slots may be absent, as they are created lazily; a partial set is fatal and named."""
    start = _params(SHAPES)
    adam = optimizer(torch.optim.Adam, lr=0.1)
    params, state = adam.update(_grads(0, start), adam.init(start), start)
    assert set(state.slots) == {"h.0.weight", "h.0.scale", "h.1.weight"}
    broken = {name: dict(slots) for name, slots in state.slots.items()}
    del broken["h.1.weight"]["exp_avg_sq"]
    with pytest.raises(InvalidState, match="exp_avg_sq"):
        adam.update(_grads(1, start), attrs.evolve(state, slots=Leaves(broken)), params)


def test_slots_keep_their_dtype_in_low_precision():
    """B09: bf16 moments stay bf16, and the step counter stays float32."""
    start = {"w": torch.ones(3, dtype=torch.bfloat16)}
    adam = optimizer(torch.optim.Adam, lr=0.1)
    _, state = adam.update({"w": torch.ones(3, dtype=torch.bfloat16)}, adam.init(start), start)
    assert state.slots["w"]["exp_avg"].dtype == torch.bfloat16
    assert state.slots["w"]["step"].dtype == torch.float32


def test_masters_keep_what_the_parameters_round_away():
    """B08: the optimizer state holds fp32 masters; the parameters are rounded from them."""
    start = {"w": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(2)}
    sgd = optimizer(torch.optim.SGD, lr=2.0**-10, masters=True)
    params, state = start, sgd.init(start)
    assert set(state.masters) == {"w"}
    for _ in range(8):
        params, state = sgd.update({"w": torch.ones(3, dtype=torch.bfloat16)}, state, params)
    assert state.masters["w"].tolist() == [1 - 8 * 2.0**-10] * 3
    assert torch.equal(params["w"], state.masters["w"].bfloat16())
    assert params["w"].tolist() != [1.0] * 3
    plain = optimizer(torch.optim.SGD, lr=2.0**-10)
    lost, _ = plain.update({"w": torch.ones(3, dtype=torch.bfloat16)}, plain.init(start), start)
    assert lost["w"].tolist() == [1.0] * 3


def test_masters_that_are_absent_are_cloned_with_a_warning_and_wrong_ones_refused():
    """B08: absent masters give an explicit warning and new clones; wrong names, shapes or dtypes give an error."""
    start = {"w": torch.ones(3, dtype=torch.bfloat16)}
    grads = {"w": torch.ones(3, dtype=torch.bfloat16)}
    sgd = optimizer(torch.optim.SGD, lr=0.5, masters=True)
    state = sgd.init(start)
    with pytest.warns(MastersRebuilt, match="masters"):
        _, after = sgd.update(grads, attrs.evolve(state, masters=None), start)
    assert after.masters["w"].tolist() == [0.5] * 3
    for wrong in ({"v": torch.ones(3)}, {"w": torch.ones(4)}, {"w": torch.ones(3, dtype=torch.float64)}, {}):
        with pytest.raises(InvalidState, match="masters"):
            sgd.update(grads, attrs.evolve(state, masters=Leaves(wrong)), start)
    with pytest.raises(InvalidState, match="masters=True"):
        optimizer(torch.optim.SGD, lr=0.5).update(grads, state, start)


def test_refreshed_masters_do_not_revert_weights_that_were_loaded():
    """B08: after a weights-only load the first step starts from the loaded weights."""
    sgd = optimizer(torch.optim.SGD, lr=0.5, masters=True)
    state = sgd.init({"w": torch.zeros(2, dtype=torch.bfloat16)})
    loaded = {"w": torch.full((2,), 8.0, dtype=torch.bfloat16)}
    grads = {"w": torch.ones(2, dtype=torch.bfloat16)}
    reverted, _ = sgd.update(grads, state, loaded)
    kept, _ = sgd.update(grads, refresh_masters(state, loaded), loaded)
    assert reverted["w"].tolist() == [-0.5, -0.5]
    assert kept["w"].tolist() == [7.5, 7.5]
