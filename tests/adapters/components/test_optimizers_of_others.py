"""Every optimizer of torch and of four other packages: a resume is bitwise equal to the run, or it is refused by name."""

import contextlib
import importlib.util
import inspect
import io
import warnings

import pytest
import torch
from torch import nn

import trainfold
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import TrainfoldError

with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings of other packages during their import are not ours
    import lion_pytorch
    import pytorch_optimizer
    import schedulefree
    import torch_optimizer

BEFORE, AFTER = 6, 6
PACKAGES = {
    "torch": torch.optim,
    "lion_pytorch": lion_pytorch,
    "schedulefree": schedulefree,
    "torch_optimizer": torch_optimizer,
    "pytorch_optimizer": pytorch_optimizer,
}


class Net(nn.Module):
    """Parameters of one, two and three dimensions, or only of one and two."""

    def __init__(self, *, flat):
        super().__init__()
        self.first = nn.Linear(6, 4) if flat else nn.Conv1d(2, 4, 3)
        self.norm = nn.LayerNorm(4)
        self.hidden = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 1)
        self.flat = flat

    def forward(self, x):
        found = self.first(x.flatten(1)) if self.flat else self.first(x).mean(-1)
        return self.head(torch.tanh(self.hidden(self.norm(found))))


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 3, sparse=True)

    def forward(self, x):
        return self.table(x[:, 0].abs().long() % 6).mean((1, 2)).unsqueeze(1)


class Case:
    """An optimizer, made as in its documentation.

    Args:
        make: (model) -> optimizer.
        closure: "whole": ``step`` takes a closure that runs the backward; "twice": the closure is also called once
            before; "loss": the backward is run before, and the closure only returns the loss.
        graph: whether the gradients keep their graph.
        model: () -> the model.
    """

    def __init__(self, make, *, closure=None, graph=False, model=lambda: Net(flat=False), step=None):
        self.make, self.closure, self.graph, self.model, self.step = make, closure, graph, model, step

    def build(self, seed):
        torch.manual_seed(seed)
        model = self.model()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = self.make(model)
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()
        return model, optimizer


def batch(number):
    generator = torch.Generator().manual_seed(100 + number)
    x = torch.randn(6, 2, 3, generator=generator)
    return x, x.sum((1, 2)).unsqueeze(1)


def step(case, model, optimizer, number):
    x, y = batch(number)

    def loss_of():
        return (model(x) - y).square().mean()

    def closure(**_):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    if case.step is not None:
        case.step(model, optimizer, loss_of)
    elif case.closure in ("whole", "twice"):
        if case.closure == "twice":
            closure()
        optimizer.step(closure)
    else:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward(create_graph=case.graph)
        optimizer.step(lambda: loss) if case.closure == "loss" else optimizer.step()


def by_use(model, flag):
    """Matrices in one group, everything else in the other, as the authors of Muon recommend."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [{"params": matrices, flag: True}, {"params": rest, flag: False}]


def plain(kind):
    takes_lr = "lr" in inspect.signature(kind).parameters
    return Case(lambda model: kind(model.parameters(), **({"lr": 1e-2} if takes_lr else {})))


def muon(name):
    return Case(lambda model: pytorch_optimizer.load_optimizer(name)(by_use(model, "use_muon")))


def inner(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def two_steps(model, optimizer, loss_of):
    """SAM as in its paper: first ascend, then descend from there."""
    loss_of().backward()
    optimizer.first_step(zero_grad=True)
    loss_of().backward()
    optimizer.second_step(zero_grad=True)


def hill(model):
    base = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    rate = pytorch_optimizer.LinearScheduler(base, t_max=20, max_lr=1e-2)
    rho = pytorch_optimizer.ProportionScheduler(rate, max_lr=1e-2, max_value=0.05)
    return pytorch_optimizer.GSAM(model.parameters(), base, model, rho)


def gsam_step(model, optimizer, loss_of):
    optimizer.set_closure(nn.functional.mse_loss, *batch(0))
    optimizer.step()


def fused(model, optimizer, loss_of):
    optimizer.fused_backward(loss_of(), lr=1e-2)


def pc_step(model, optimizer, loss_of):
    optimizer.zero_grad()
    optimizer.pc_backward([loss_of(), loss_of() * 0.5])
    optimizer.step()


SPECIAL = {
    "pytorch_optimizer.adago": muon("adago"),
    "pytorch_optimizer.adamuon": muon("adamuon"),
    "pytorch_optimizer.muon": muon("muon"),
    "pytorch_optimizer.muonclip": muon("muonclip"),
    "pytorch_optimizer.normuon": muon("normuon"),
    "pytorch_optimizer.demo": Case(
        lambda m: pytorch_optimizer.load_optimizer("demo")(m.parameters(), lr=1e-2), model=lambda: Net(flat=True)
    ),
    "pytorch_optimizer.distributedmuon": muon("distributedmuon"),
    "pytorch_optimizer.adahessian": Case(lambda m: pytorch_optimizer.AdaHessian(m.parameters()), graph=True),
    "pytorch_optimizer.sophiah": Case(lambda m: pytorch_optimizer.SophiaH(m.parameters()), graph=True),
    "pytorch_optimizer.adalomo": Case(pytorch_optimizer.AdaLOMO, step=fused, model=lambda: Net(flat=True)),
    "pytorch_optimizer.lomo": Case(pytorch_optimizer.LOMO, step=fused),
    "pytorch_optimizer.adammini": Case(pytorch_optimizer.AdamMini),
    "pytorch_optimizer.alig": Case(lambda m: pytorch_optimizer.AliG(m.parameters(), max_lr=1e-2), closure="loss"),
    "pytorch_optimizer.bsam": Case(
        lambda m: pytorch_optimizer.BSAM(m.parameters(), num_data=36, foreach=False), closure="twice"
    ),
    "pytorch_optimizer.lbfgs": Case(lambda m: torch.optim.LBFGS(m.parameters(), max_iter=2), closure="whole"),
    "pytorch_optimizer.ranger21": Case(lambda m: pytorch_optimizer.Ranger21(m.parameters(), num_iterations=40)),
    "pytorch_optimizer.spectralsphere": Case(
        lambda m: pytorch_optimizer.load_optimizer("spectralsphere")([p for p in m.parameters() if p.ndim == 2])
    ),
    "torch.LBFGS": Case(
        lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe"), closure="whole"
    ),
    "torch.Muon": Case(lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2])),
    "torch.SparseAdam": Case(lambda m: torch.optim.SparseAdam(m.parameters()), model=Words),
    "torch_optimizer.Adafactor": Case(
        lambda m: torch_optimizer.Adafactor(m.parameters()), model=lambda: Net(flat=True)
    ),
    "torch_optimizer.Adahessian": Case(
        lambda m: torch_optimizer.Adahessian(m.parameters()), graph=True, model=lambda: Net(flat=True)
    ),
    "torch_optimizer.Lookahead": Case(lambda m: torch_optimizer.Lookahead(inner(m))),
    "schedulefree.ScheduleFreeWrapper": Case(lambda m: schedulefree.ScheduleFreeWrapper(momentum(m))),
    "schedulefree.ScheduleFreeWrapperReference": Case(lambda m: schedulefree.ScheduleFreeWrapperReference(momentum(m))),
}
WRAPPERS = {
    "pytorch_optimizer.WSAM": Case(
        lambda m: pytorch_optimizer.WSAM(m, m.parameters(), torch.optim.SGD, lr=1e-2, momentum=0.9), closure="twice"
    ),
    "pytorch_optimizer.GSAM": Case(hill, step=gsam_step),
    "pytorch_optimizer.Magma": Case(lambda m: pytorch_optimizer.Magma(inner(m))),
    "pytorch_optimizer.Lookahead": Case(lambda m: pytorch_optimizer.Lookahead(inner(m))),
    "pytorch_optimizer.Lookahead, pullback": Case(
        lambda m: pytorch_optimizer.Lookahead(momentum(m), pullback_momentum="pullback")
    ),
    "pytorch_optimizer.SAM": Case(
        lambda m: pytorch_optimizer.SAM(m.parameters(), torch.optim.AdamW, lr=1e-2), step=two_steps
    ),
    "pytorch_optimizer.SAM, by closure": Case(
        lambda m: pytorch_optimizer.SAM(m.parameters(), torch.optim.SGD, lr=1e-2, momentum=0.9), closure="twice"
    ),
    "pytorch_optimizer.LookSAM": Case(
        lambda m: pytorch_optimizer.LookSAM(m.parameters(), torch.optim.AdamW, lr=1e-2), step=two_steps
    ),
    "pytorch_optimizer.FriendlySAM": Case(
        lambda m: pytorch_optimizer.FriendlySAM(m.parameters(), torch.optim.AdamW, lr=1e-2), step=two_steps
    ),
    "pytorch_optimizer.TRAC": Case(lambda m: pytorch_optimizer.TRAC(inner(m))),
    "pytorch_optimizer.OrthoGrad": Case(lambda m: pytorch_optimizer.OrthoGrad(inner(m))),
    "pytorch_optimizer.PCGrad": Case(lambda m: pytorch_optimizer.PCGrad(inner(m)), step=pc_step),
    "pytorch_optimizer.ScheduleFreeWrapper": Case(lambda m: pytorch_optimizer.ScheduleFreeWrapper(momentum(m))),
}
CLOSURES = {
    f"schedulefree.{n}" for n in ("AdamWScheduleFreeClosure", "RAdamScheduleFreeClosure", "SGDScheduleFreeClosure")
}
# why no test can run them here
NOT_RUN = {
    name: why
    for name, why in {
        "pytorch_optimizer.demo": "needs einops, which is not a dependency of the development environment"
    }.items()
    if importlib.util.find_spec("einops") is None
}
IN_A_GROUP = {"pytorch_optimizer.demo", "pytorch_optimizer.distributedmuon"}  # they ask torch.distributed for its ranks
# state that no checkpoint can hold, by its name in the refusal
REFUSED = {
    "pytorch_optimizer.conda": r"slots\['hidden.weight'\]\['projector'\].*GaLoreProjector",
    "pytorch_optimizer.scalableshampoo": r"slots\['first.weight'\]\['pre_conditioner'\].*PreConditioner",
    "torch_optimizer.Lookahead": r"Lookahead.state_dict\(\).*_optimizer_state_dict_pre_hooks",
}


def cases():
    found = {}
    for name in pytorch_optimizer.get_supported_optimizers():
        found[f"pytorch_optimizer.{name}"] = lambda name=name: pytorch_optimizer.load_optimizer(name)
    for package in ("torch", "lion_pytorch", "schedulefree", "torch_optimizer"):
        for name in dir(PACKAGES[package]):
            kind = getattr(PACKAGES[package], name)
            if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
                found[f"{package}.{name}"] = lambda kind=kind: kind
    return {
        **{
            name: (
                SPECIAL.get(name)
                or (Case(lambda m, k=kind: k()(m.parameters()), closure="whole") if name in CLOSURES else plain(kind()))
            )
            for name, kind in found.items()
            if name not in NOT_RUN
        },
        **WRAPPERS,
    }


CASES = cases()


def trained(case, model, optimizer, live, numbers):
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # their warnings, and torch's about their create_graph
        for number in numbers:
            step(case, model, optimizer, number)
            live.advance(samples=6)


def attached_and_trained(case, store, seed, numbers):
    model, optimizer = case.build(seed)
    live = attach(model, optimizer)
    with CheckpointManager(store) as manager:
        is_fresh = manager.restore(live).is_fresh
        if is_fresh:
            trained(case, model, optimizer, live, range(numbers.start))
            manager.save(live)
        trained(case, model, optimizer, live, numbers)
    return is_fresh, trainfold.fingerprint(live.capture())


def resumed():
    """All of torch and of the small packages; a third of the largest one, and the others are long."""
    for number, name in enumerate(sorted(CASES.keys() - REFUSED.keys())):
        is_long = name.startswith("pytorch_optimizer.") and number % 3 and not CASES[name].closure
        yield pytest.param(name, marks=[pytest.mark.long] if is_long else [])


@pytest.mark.parametrize("name", [*resumed()])
def test_a_resume_has_the_bits_of_the_run(name, request):
    """W05, W06: six steps, save, rebuild everything, restore, six steps: bitwise equal to twelve steps."""
    if name in IN_A_GROUP:
        request.getfixturevalue("process_group")
    store, numbers = MemoryStore(), range(BEFORE, BEFORE + AFTER)
    whole = attached_and_trained(CASES[name], store, 0, numbers)
    assert attached_and_trained(CASES[name], store, 1, numbers) == (False, whole[1])


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_no_checkpoint_can_hold_is_refused_by_name(name):
    """W05, W06: the state never changes silently."""
    with pytest.raises(TrainfoldError, match=REFUSED[name]):
        attached_and_trained(CASES[name], MemoryStore(), 0, range(BEFORE, BEFORE + AFTER))
