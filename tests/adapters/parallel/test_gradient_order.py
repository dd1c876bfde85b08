"""The order of DDP's sums: on three ranks their bits depend on it, and a process that resumes takes the order of the one that saved."""

import logging
from contextlib import nullcontext

import pytest
import torch
from kit.adapters.fsdp2_cases import bits
from kit.system.rank_refusals_cases import PATIENT
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.parallel import ddp_wrappers, gradient_order
from trainfold.core.state.notes import ORDERS, gradient_orders_of

pytestmark = pytest.mark.slow(4)


class Crossed(nn.Module):
    """Its layers are used in another order than they are registered in, and are so large that gloo sums them in parts."""

    def __init__(self):
        super().__init__()
        self.last, self.second = nn.Linear(200, 1), nn.Linear(200, 200)
        self.first, self.third = nn.Linear(8, 200), nn.Linear(200, 200)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.last(torch.relu(self.third(x))) * self.scale


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Crossed()

    def forward(self, x):
        return self.body(x)


class Tabled(Crossed):
    """The gradients of its table are sparse."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=True)

    def forward(self, x):
        return super().forward(x + self.table((10 * x[:, 0].abs()).long()))


class Odd(Crossed):
    """One layer is used twice and becomes ready twice, and one is not used, which DDP takes with a static graph only."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(10, 10)

    def forward(self, x):
        x = torch.relu(self.first(x))
        for _ in range(2):
            x = checkpoint(lambda x: torch.relu(self.second(x)), x, use_reentrant=True)
        return self.last(torch.relu(self.third(x))) * self.scale


def summed_twice(_, bucket):
    """A communication hook; without it the gradients would be half as large."""
    summed = torch.distributed.all_reduce(2 * bucket.buffer(), async_op=True).get_future()
    return summed.then(lambda future: future.value()[0])


def wrapped(seed, *, kinds=(Crossed,), communicates=False, **options):
    """A model, or two that are attached as parts of one."""
    torch.manual_seed(seed)
    models = [nn.parallel.DistributedDataParallel(kind(), **options) for kind in kinds]
    for model in models if communicates else ():
        model.register_comm_hook(None, summed_twice)
    parameters = [each for model in models for each in model.parameters()]
    return models, torch.optim.SGD(
        parameters, lr=0.05, momentum=0.0 if Tabled in kinds else 0.9
    )  # sparse slots are refused


def backward(models, step, rank, index=0):
    generator = torch.Generator().manual_seed(100 * step + 10 * index + rank)
    x = torch.randn(4, 8, generator=generator)
    sum(model(x).square().mean() for model in models).backward()


def attached(models, optimizer, *, is_around=False):
    models = [model.module for model in models] if is_around else models
    return attach(models if len(models) > 1 else models[0], optimizer)


def bits_of(models, optimizer):
    return [bits(model, optimizer) for model in models]


def train(model, optimizer, live, rank, *, steps, of=1, each_time=False, clears_late=False):
    """Train to a step, in windows, whose backwards may all synchronise; returns the bits after each step."""
    found = []
    while live.progress.step < steps:
        if clears_late:
            optimizer.zero_grad()
        if each_time:
            backward(model, live.progress.step, rank, 1)
        for index in range(of):
            with live.microbatch(of=of) if of > 1 else nullcontext():
                backward(model, live.progress.step, rank, index)
            if index < of - 1:
                live.advance(samples=4)
        optimizer.step()
        if not clears_late:
            optimizer.zero_grad()
        live.advance(samples=4)
        found.append(bits_of(model, optimizer))
    return found


def by_hand(rank, *, steps):
    model, optimizer = wrapped(0)
    found = []
    for step in range(steps):
        backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
        found.append(bits_of(model, optimizer))
    return found


def resumed(collectives, folder, *, of=1, each_time=False, clears_late=False, is_around=False, hooks=False, **options):
    """The bits of a whole run, and of runs that resume after the first step and after the third, where torch has summed in both orders."""
    window, called = {"of": of, "each_time": each_time, "clears_late": clears_late}, []
    model, optimizer = wrapped(0, **options)
    live = attached(model, optimizer, is_around=is_around)
    with CheckpointManager(folder, every=None, at_end=False, collectives=collectives) as manager:
        whole = train(model, optimizer, live, collectives.rank, steps=1, **window)
        manager.save(live)
        whole += train(model, optimizer, live, collectives.rank, steps=3, **window)
        manager.save(live)
        whole += train(model, optimizer, live, collectives.rank, steps=6, **window)
    found = {"whole": whole, "orders": sorted(live.capture().contract.get(ORDERS, {})), "said": []}
    for step in (1, 3):
        model, optimizer = wrapped(9, **options)
        for each in model[0].parameters() if hooks else ():
            each.register_hook(called.append)
        live = attached(model, optimizer, is_around=is_around)

        def restore(live=live, step=step):
            with CheckpointManager(folder, collectives=collectives, every=None, at_end=False) as manager:
                manager.restore(live, step=step)

        found["said"] += said_by(restore)
        left = [each.grad for each in optimizer.param_groups[0]["params"] if each.grad is not None]
        assert not any(each.any() for each in left)
        assert not left or clears_late
        assert not called  # a hook of the user's has nothing to do with a restore
        found[step] = whole[:step] + train(model, optimizer, live, collectives.rank, steps=6, **window)
        called.clear()
    return found


class Said(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def said_by(run):
    """What a run says of the order of sums."""
    said = Said()
    logging.getLogger("trainfold").addHandler(said)
    try:
        run()
    finally:
        logging.getLogger("trainfold").removeHandler(said)
    return [text for text in said.texts if "rounded otherwise" in text]


def restore_late(collectives, folder, prepare, **options):
    model, optimizer = wrapped(9, **options)
    prepare(model[0])
    live = attached(model, optimizer)
    with CheckpointManager(folder, collectives=collectives, every=None, at_end=False) as manager:
        return said_by(lambda: manager.restore(live, step=3))


def wrapped_late(collectives, folder):
    """A restore of the module, which is wrapped afterwards."""
    torch.manual_seed(9)
    model = Crossed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    live = attach(model, optimizer)
    with CheckpointManager(folder, collectives=collectives, every=None, at_end=False) as manager:
        manager.restore(live, step=3)
    model.forward = lambda x: model.first(x).sum() + sum(each.sum() for each in model.parameters())
    models = [nn.parallel.DistributedDataParallel(model)]
    return said_by(lambda: train(models, optimizer, live, collectives.rank, steps=5))


def the_usual(collectives, folder):
    return {
        "plain": resumed(collectives, f"{folder}/plain"),
        "by hand": by_hand(collectives.rank, steps=6),
        "static": resumed(collectives, f"{folder}/static", static_graph=True),
    }


def everything(collectives, folder):
    static, small = {"static_graph": True}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.1}
    found = the_usual(collectives, folder) | {
        "views": resumed(collectives, f"{folder}/views", **small),
        "late views": resumed(collectives, f"{folder}/late", clears_late=True, **small),
        "windows": resumed(collectives, f"{folder}/windows", of=2),
        "each time": resumed(collectives, f"{folder}/each", each_time=True),
        "two": resumed(collectives, f"{folder}/two", kinds=(Crossed, Named)),
        "unused": resumed(collectives, f"{folder}/unused", find_unused_parameters=True),
        "hooks": resumed(collectives, f"{folder}/hooks", hooks=True),
        "around": resumed(collectives, f"{folder}/around", is_around=True),
        "sparse": resumed(collectives, f"{folder}/sparse", kinds=(Tabled,), **small),
        "static odd": resumed(collectives, f"{folder}/odd", kinds=(Odd,), communicates=True, **static, **small),
        "static sparse": resumed(collectives, f"{folder}/both", kinds=(Tabled,), **static),
    }

    def stepped(model):
        """A backward in another order."""
        model.module.forward = lambda x: (
            model.module.first(x).sum() + sum(each.sum() for each in model.module.parameters())
        )
        for _ in range(2):
            model(torch.ones(4, 8)).backward()
        model.logger.set_runtime_stats_and_log()

    def built_in(model):
        model._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.ALLREDUCE)

    found["built in"] = restore_late(collectives, f"{folder}/static", built_in, **static)
    found["static late"] = restore_late(collectives, f"{folder}/static", stepped, **static)
    found["late"] = restore_late(collectives, f"{folder}/plain", stepped)
    found["wrapped late"] = wrapped_late(collectives, f"{folder}/around")
    return found


EXACT = ("plain", "views", "late views", "windows", "each time", "two", "unused", "hooks", "around", "sparse")
ORDERED = {kind: ["model[0]"] for kind in EXACT} | {"unused": [], "two": ["model[0]", "model[1]"]}


@pytest.mark.parametrize("loops", [the_usual, pytest.param(everything, marks=pytest.mark.long)])
def test_a_resume_on_three_ranks_has_the_bits_of_a_run_that_was_not_stopped_and_of_plain_torch(
    loops, processes, tmp_path
):
    """V13, C05: after the first step DDP has summed in one order only, and sums in the other from then on."""
    for rank, found in enumerate(processes.run(3, loops, str(tmp_path), collectives=PATIENT)):
        assert found["plain"]["whole"] == found["by hand"]
        for kind, ordered in ORDERED.items():
            if kind not in found:
                continue
            whole = found[kind]["whole"]
            assert found[kind]["orders"] == ordered, kind
            assert [found[kind][step] == whole for step in (1, 3)] == [True, True], kind
            assert found[kind]["said"] == [], kind
        for kind in {"static", "static odd"} & found.keys():
            assert found[kind][3] == found[kind]["whole"], kind
        said = {kind: found[kind]["said"] for kind in ("static", "static odd", "static sparse") if kind in found}
        said |= {kind: found[kind] for kind in ("late", "static late", "wrapped late", "built in") if kind in found}
        if rank > 0:  # one message a run
            assert not any(said.values()), said
            continue
        early, sparse = "saved before the second backward", "the order of sparse gradients cannot be set"
        expected = {"static": [early], "static odd": [early], "static sparse": [early, sparse]}
        expected |= {
            "late": ["restore before it"],
            "wrapped late": ["restore before it"],
            "built in": ["a built-in comm"],
        }
        for kind, texts in expected.items():
            if kind not in found:
                continue
            assert len(said[kind]) == len(texts), said
            assert all(part in text for part, text in zip(texts, said[kind], strict=True)), said


def pair(collectives):
    model, optimizer = wrapped(0)
    live = attached(model, optimizer)
    train(model, optimizer, live, collectives.rank, steps=2)
    return live.capture().contract.get(ORDERS)


def test_two_ranks_have_no_order_to_save(processes):
    assert processes.run(2, pair, collectives=PATIENT) == [None, None]


@pytest.mark.parametrize("noted", [None, 5, {"model": 5}, {"model": "1 x"}, {"model": "²"}])
def test_what_is_not_an_order_is_left_out(noted):
    assert gradient_orders_of({ORDERS: noted}) == {}


def test_wrappers_around_a_module_are_searched_for_once_and_not_by_a_load_without_orders(monkeypatch):
    """R02: the search looks at every object of the process, 20 ms and more, and such a load has no use for what it finds."""
    searches = []
    monkeypatch.setattr(ddp_wrappers, "_are_ranks", lambda least: True)
    monkeypatch.setattr(ddp_wrappers.gc, "get_referrers", lambda *kinds: searches.append(kinds) or [])
    orders = gradient_order.GradientOrder(lambda: {"model": nn.Linear(2, 2)})
    orders.take({})
    assert (len(searches), orders.unknown) == (0, None), "the first step looks"
    for _ in range(3):
        orders.stepped()
    assert (len(searches), orders.unknown) == (1, {})
    orders.take({"model[0]": "0 1"})
    assert len(searches) == 2
