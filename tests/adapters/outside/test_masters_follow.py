"""P19: where weights alone are taken, fp32 masters follow them, in states and in the slots of an attached optimizer."""

import pytest
import torch
from torch import nn

import trainfold
from trainfold import Loss
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import load, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import InvalidArgument, InvalidState, RankFailed
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.layout.shard import make_shard
from trainfold.core.state.components import merge, select
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Progress, TrainState
from trainfold.weights import ByScript, CheckpointWeights, Frozen, take_weights

HALF = torch.bfloat16


def loss_fn(model, batch):
    return Loss(sum=model(batch).float().square().sum(), weight=len(batch))


def trained(steps, *, seed):
    torch.manual_seed(seed)
    model = nn.Linear(4, 4).to(HALF)
    adamw = trainfold.optimizer(torch.optim.AdamW, lr=1e-3, masters=True)
    state, step = trainfold.init_state(model, adamw, seed=seed), trainfold.make_step(model, loss_fn, adamw)
    for i in range(steps):
        state, _ = step(state, torch.full((2, 4), float(i + 1), dtype=HALF))
    return state, step


def farthest(state, step, wanted):
    """How far the weights are from those wanted after one more step, whose gradients are zero."""
    after, _ = step(state, torch.zeros(2, 4, dtype=HALF))
    return max(float((after.model.params[n].float() - w.float()).abs().max()) for n, w in wanted.model.params.items())


def test_weights_of_a_source_go_into_a_state_with_its_masters_and_nothing_else_changes():
    """P19, B08: the state before is left as it was."""
    base, _ = trained(3, seed=0)
    store = MemoryStore()
    save(base, store)
    state, step = trained(2, seed=1)
    before = fingerprint(state)
    found = take_weights(state, CheckpointWeights(store))
    assert fingerprint(state) == before
    assert fingerprint(found)["model"] == fingerprint(base)["model"]
    assert all(torch.equal(found.optimizer.masters[n], w.float()) for n, w in base.model.params.items())
    assert fingerprint(found)["rng"] == before["rng"]
    assert torch.equal(found.optimizer.slots["weight"]["exp_avg"], state.optimizer.slots["weight"]["exp_avg"])
    assert farthest(found, step, base) < 0.02


def test_an_optimizer_that_is_loaded_beside_weights_from_outside_does_not_revert_them():
    """P19, B03: the masters of a checkpoint without its model are those of other weights. Those that round to the weights keep their precision."""
    state, step = trained(3, seed=0)
    other, _ = trained(0, seed=1)
    store, names = MemoryStore(), ["optimizer", "trainer", "rng"]
    save(state, store, components=names)
    found = load(store, like=other, components=names)
    assert farthest(found, step, other) < 0.02
    assert farthest(merge(other, select(state, names)), step, other) < 0.02
    same = load(store, like=state, components=names)
    assert fingerprint(same) == fingerprint(state)
    assert fingerprint(merge(state, select(state, names))) == fingerprint(state)


def test_each_rank_of_a_state_takes_its_part_and_a_failure_is_that_of_all():
    """J03, J04: what is missing is named on every rank."""
    store = MemoryStore()
    whole = torch.arange(8.0).reshape(4, 2)
    save(TrainState(model=ModelState(Leaves({"w": whole}), Leaves()), trainer=Progress()), store)

    def taken(world, names=("w",)):
        shard = make_shard(torch.zeros(2, 2), shape=(4, 2), starts=(2 * world.rank, 0))
        params = Leaves(dict.fromkeys(names, shard))
        state = TrainState(model=ModelState(params, Leaves()), trainer=Progress(step=1))
        try:
            return take_weights(state, CheckpointWeights(store), collectives=world).model.params["w"].tensor.tolist()
        except (InvalidState, RankFailed) as error:
            return str(error)

    assert run_threads(2, taken) == [whole[:2].tolist(), whole[2:].tolist()]
    told = run_threads(2, lambda world: taken(world, ("w", "v") if world.rank else ("w",)))
    assert all("nothing for v" in each for each in told)
    for source in (Frozen(CheckpointWeights(store)), ByScript(), "runs/base"):
        with pytest.raises(InvalidArgument, match="supplies all weights"):
            take_weights(trained(0, seed=0)[0], source)
    with pytest.raises(InvalidArgument, match="a state with a model"):
        take_weights(TrainState(), CheckpointWeights(store))


class WithMasters(torch.optim.Optimizer):
    """As optimizers for bf16 have it: an fp32 copy of each parameter among its slots, from which the parameter is rounded."""

    def __init__(self, params, key):
        super().__init__(params, {"lr": 0.001})
        self.key = key

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            slots = self.state[parameter]
            if not slots:
                slots[self.key] = parameter.float()
                slots["momentum"] = torch.zeros_like(slots[self.key])
            slots["momentum"].mul_(0.9).add_(parameter.grad.float())
            slots[self.key].sub_(0.001 * slots["momentum"])
            parameter.copy_(slots[self.key])


def looped(seed, *, key="copy", steps=0, **more):
    torch.manual_seed(seed)
    model = nn.Linear(4, 4).to(HALF)
    optimizer = WithMasters(model.parameters(), key)
    live = attach(model, optimizer, unsaved=["optimizer.key"], **more)
    return model, optimizer, live


def step(model, optimizer, live, factor=0.0):
    (model(torch.ones(2, 4, dtype=HALF)).float().square().sum() * factor).backward()
    optimizer.step()
    optimizer.zero_grad()
    live.advance(samples=2)


def weights(model):
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def near(model, wanted):
    return all(torch.allclose(each, wanted[name], atol=0.02) for name, each in model.named_parameters())


def test_a_loop_that_restores_weights_alone_goes_on_from_them():
    """P19: the masters lie among the slots of the optimizer, which no call restores."""
    other, _, theirs = looped(0)
    store = MemoryStore()
    with CheckpointManager(store) as manager:
        manager.restore(theirs)
        theirs.advance(samples=1)
        manager.save(theirs)
    wanted = weights(other)
    for how in ("state", "manager"):
        model, optimizer, live = looped(1)
        step(model, optimizer, live, 1.0)
        momentum = optimizer.state[model.weight]["momentum"].clone()
        if how == "state":
            live.restore(theirs.capture(), components=["model"])
        else:
            with CheckpointManager(store, components=["model"]) as manager:
                manager.restore(live)
        assert torch.equal(optimizer.state[model.weight]["copy"], wanted["weight"].float())
        assert torch.equal(optimizer.state[model.weight]["momentum"], momentum)
        step(model, optimizer, live)
        assert near(model, wanted), how


def test_a_loop_that_takes_its_weights_from_outside_goes_on_from_them_after_a_resume():
    """P19, J01: the checkpoint has the masters of the weights that were trained then, and the source has others."""
    base, _, theirs = looped(0)
    outside, store = MemoryStore(), MemoryStore()
    save(theirs.capture(), outside)
    wanted = weights(base)
    for seed in (1, 2):
        model, optimizer, live = looped(seed, key="master_param", weights=CheckpointWeights(outside))
        with CheckpointManager(store, every=1) as manager:
            assert manager.restore(live).is_fresh == (seed == 1)
            if seed == 2:
                assert torch.equal(optimizer.state[model.weight]["master_param"], wanted["weight"].float())
            step(model, optimizer, live)
            assert near(model, wanted)
            for _ in range(9):
                step(model, optimizer, live, 1.0)
            manager.save(live)
            assert not near(model, wanted)


def test_moments_that_happen_to_be_zero_like_their_parameters_are_no_masters():
    """A slot that rounds to a parameter of zeros says nothing."""
    _, _, theirs = looped(0)
    model, optimizer, live = looped(1)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    optimizer.state[model.weight]["momentum"] = torch.zeros(4, 4)
    live.restore(theirs.capture(), components=["model"])
    assert not optimizer.state[model.weight]["momentum"].any()
