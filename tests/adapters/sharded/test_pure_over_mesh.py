"""A pure step whose state is cut by rows equals the attached loop whose model FSDP2 has cut, bit for bit; and each takes the other's checkpoints."""

import math

import pytest
import torch
from kit.system.rank_refusals_cases import PATIENT
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.api import load, save
from trainfold.core.errors import InvalidArgument, InvalidState, NonFinite
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState
from trainfold.core.step.init_state import init_state
from trainfold.core.step.loss import Loss
from trainfold.core.step.optimizer import optimizer as pure
from trainfold.core.step.rows.parts import rows_of
from trainfold.core.step.step import make_step
from trainfold.ranks import Sharded

CLASSES = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1}),
    "fused": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
}
ROWS = ((1, 3, 2, 4), (5, 1, 1, 2), (2, 2, 3, 1))  # of each microbatch, by rank: every share has another weight
OF, STEPS, BAD = 4, 5, 2  # microbatches, steps, and the step in which a rank has a batch that is not finite


def plain():
    """Of its parts over two ranks some are uneven, and one rank has nothing of some."""
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, generator=generator) / 4)
    return model


def window(number, rank):
    generator = torch.Generator().manual_seed(10 * number + rank)
    found = [torch.randn(rows, 6, generator=generator) for rows in ROWS[rank]]
    if number == BAD and rank == 1:
        found[0][0, 0] = math.inf
    return found


def fully_sharded(size, change=lambda module: None):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = plain(), init_device_mesh("cpu", (size,))
    for part in (model[0], model[2], model):
        change(fully_shard(part, mesh=mesh))
    return model


def bits(parameters):
    return [(each.full_tensor() if hasattr(each, "full_tensor") else each).tolist() for each in parameters]


def attached(collectives, kind, clip_norm, model=None):
    """The loop, and the bits of its parameters and slots."""
    model = model or fully_sharded(collectives.world_size)
    cls, hyper = CLASSES[kind]
    optimizer = cls(model.parameters(), **hyper)
    live, norms = attach(model, optimizer), []
    for number in range(STEPS):
        total, weight, parts = 0.0, 0, window(number, collectives.rank)
        for index, x in enumerate(parts):
            with live.microbatch(of=OF):
                loss = model(x).square().sum()
                loss.backward()
            total, weight = total + float(loss.detach()), weight + len(x)
            if index < OF - 1:
                live.advance(samples=1)
        try:
            norms.append(live.check(total, weight=weight, clip_norm=clip_norm).grad_norm)
        except NonFinite:
            live.drop_window()
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
        live.advance(samples=1)
    slots = [optimizer.state[each][key] for each in model.parameters() for key in sorted(optimizer.state[each])]
    return bits(model.parameters()), bits(slots), norms, live


def loss_fn(model, batch):
    return Loss(sum=model(batch).square().sum(), weight=len(batch))


def pure_whole(collectives, kind, clip_norm):
    """The step on whole states, as `stepped` is on parts."""
    cls, hyper = CLASSES[kind]
    model, chosen = plain(), pure(cls, **hyper)
    step = make_step(model, loss_fn, chosen, accumulate=OF, clip_norm=clip_norm, collectives=collectives)
    state, norms = folded(init_state(model, chosen), step, collectives.rank, range(STEPS))
    slots = [leaf for of_one in state.optimizer.slots.values() for _, leaf in sorted(of_one.items())]
    return bits(state.model.params.values()), bits(slots), norms


def pure_parts(collectives, kind="adamw", **how):
    cls, hyper = CLASSES[kind]
    ranks, model, chosen = Sharded(collectives), plain(), pure(cls, **hyper)
    return (
        ranks,
        ranks.cut(init_state(model, chosen)),
        make_step(model, loss_fn, chosen, accumulate=OF, parallelism=ranks, **how),
    )


def folded(state, step, rank, numbers):
    norms = []
    for number in numbers:
        try:
            state, metrics = step(state, window(number, rank))
            norms.append(metrics["grad_norm"])
        except NonFinite as error:
            state = error.skipped
    return state, norms


def stepped(collectives, kind, clip_norm, **how):
    ranks, state, step = pure_parts(collectives, kind, clip_norm=clip_norm, **how)
    state, norms = folded(state, step, collectives.rank, range(STEPS))
    whole = ranks.whole(state)
    slots = [leaf for of_one in whole.optimizer.slots.values() for _, leaf in sorted(of_one.items())]
    return bits(whole.model.params.values()), bits(slots), norms


def both(collectives):
    """The attached loop and the step, with each optimizer, with and without clipping."""
    cases = [("sgd", 0.5), ("adamw", 0.05), ("adamw", None), ("fused", 0.05)]
    found = {
        f"{kind} {clip}": (attached(collectives, kind, clip)[:3], stepped(collectives, kind, clip, donate=clip is None))
        for kind, clip in cases
    }
    for kind, clip in cases[:3]:
        wrapped = nn.parallel.DistributedDataParallel(plain())
        found[f"ddp {kind} {clip}"] = (
            attached(collectives, kind, clip, wrapped)[:3],
            pure_whole(collectives, kind, clip),
        )
    return found


def resumed(collectives, folder, mode):
    """A run of values that stops after three of six windows, and goes on."""
    donate = mode == "async"
    _, state, step = pure_parts(collectives, clip_norm=0.5, donate=donate)
    through, _ = folded(state, step, collectives.rank, range(10, 16))
    for numbers in (range(10, 13), range(13, 16)):
        _, state, step = pure_parts(collectives, clip_norm=0.5, donate=donate)
        with CheckpointManager(f"{folder}/{mode}", mode=mode, collectives=collectives, hold_check=donate) as manager:
            state = manager.load(state) if numbers.start > 10 else state
            for number in numbers:
                state, _ = folded(state, step, collectives.rank, [number])
                manager.save(state)
    return fingerprint(state) == fingerprint(through), state.trainer.step


def exchanged(collectives, folder):
    """A checkpoint of parts in an attached loop, and one of an attached loop as parts; neither has the other's random state."""
    ranks, state, step = pure_parts(collectives)
    state, _ = folded(state, step, collectives.rank, range(10, 12))
    save(state, f"{folder}/pure", collectives=collectives)
    model = fully_sharded(collectives.world_size)
    live = attach(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    with CheckpointManager(
        f"{folder}/pure", collectives=collectives, components=["model", "optimizer", "trainer"]
    ) as manager:
        manager.restore(live)
    taken = bits(model.parameters()) == bits(ranks.whole(state).model.params.values()), live.progress.step
    parameters, _, _, live = attached(collectives, "adamw", 0.5)
    save(live.capture().evolve(rng=None), f"{folder}/attached", collectives=collectives)
    found = load(f"{folder}/attached", like=pure_parts(collectives)[1].evolve(rng=None), collectives=collectives)
    whole = ranks.whole(found)
    moments = [tuple(whole.optimizer.slots[name]["exp_avg"].shape) for name in whole.model.params]
    assert moments == [tuple(each.shape) for each in whole.model.params.values()]
    return taken, bits(whole.model.params.values()) == parameters


def on_two(collectives, folder):
    return {
        "both": both(collectives),
        "resumed": [resumed(collectives, folder, mode) for mode in ("sync", "async")],
        "exchanged": exchanged(collectives, folder),
        "refused": refusals(collectives),
    }


def refusals(collectives):
    """What a step cannot take, in words: a model and a state that are cut already, and a state whose loop would not be."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh, sgd = init_device_mesh("cpu", (2,)), pure(torch.optim.SGD, lr=0.1)
    cut = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": ColwiseParallel()})
    state = pure_parts(collectives)[1]
    name, part = next(iter(state.model.params.items()))
    columns = distribute_tensor(torch.zeros(part.shape), mesh, [Shard(1)])
    odd = state.evolve(model=ModelState(Leaves({**state.model.params, name: columns}), Leaves()))
    calls = {
        "init": lambda: init_state(cut, sgd),
        "step": lambda: make_step(cut, loss_fn, sgd),
        "state": lambda: rows_of(odd, Sharded(collectives).box),
        "attach": lambda: attach(plain(), parallelism=Sharded(collectives)),
    }
    found = {}
    for what, call in calls.items():
        with pytest.raises((InvalidArgument, InvalidState)) as caught:
            call()
        found[what] = str(caught.value)
    return found


class InRankOrder:
    """A reduce-scatter of FSDP2 that adds in rank order, as the step does. Gloo begins at another rank in another part."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        size, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
        rows = [torch.empty_like(input_tensor) for _ in range(size)]
        torch.distributed.all_gather(rows, input_tensor, group=group)
        total = rows[0].clone()
        for each in rows[1:]:
            total += each
        output_tensor.copy_(total.view(size, -1)[rank])


def in_rank_order(module):
    module.set_custom_reduce_scatter(InRankOrder())
    module.set_gradient_divide_factor(1.0)  # the weight divides, once


def on_three(collectives, folder):
    """With FSDP2's own sums, and with sums in rank order; and what two ranks have saved."""
    ordered = fully_sharded(collectives.world_size, in_rank_order)
    ranks, state, _ = pure_parts(collectives)
    loaded = ranks.whole(load(f"{folder}/pure", like=state, collectives=collectives))
    return {
        "own": attached(collectives, "adamw", None)[0],
        "ordered": attached(collectives, "adamw", None, ordered)[:2],
        "step": stepped(collectives, "adamw", None)[:2],
        "loaded": bits(loaded.model.params.values()),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def two_ranks(processes, folder):
    """What each of two ranks found; a world is started once."""
    return processes.run(2, on_two, folder, collectives=PATIENT)


def test_a_step_has_the_bits_of_an_attached_loop_on_two_ranks_on_parts_under_fsdp2_and_on_whole_states_under_ddp(
    two_ranks,
):
    """A01-A03, A09: shares and microbatches of other sizes, the norm over all parts, a batch that is not finite on one rank."""
    for each in two_ranks:
        for case, (wanted, found) in each["both"].items():
            assert found == wanted, case
            assert len(wanted[2]) == STEPS - 1, case


def test_a_run_of_parts_that_stops_and_resumes_is_the_run_that_did_not(two_ranks):
    """L08: saved in the call, and in the background with donation."""
    assert [each["resumed"] for each in two_ranks] == [[(True, 6), (True, 6)]] * 2


def test_an_attached_loop_and_a_step_on_parts_take_each_others_checkpoints(two_ranks):
    """A05: names, parts and slots agree."""
    assert [each["exchanged"] for each in two_ranks] == [((True, 2), True)] * 2


@pytest.mark.slow(3)
def test_on_three_ranks_the_order_of_the_sums_is_the_only_difference(two_ranks, processes, folder):
    """A02: equal bits if FSDP2 adds in rank order and does not divide; else to rounding. Two ranks' checkpoint has the same bits on three and on one."""
    assert two_ranks
    found = processes.run(3, on_three, folder, collectives=PATIENT)
    alone = load(f"{folder}/pure", like=init_state(plain(), pure(torch.optim.AdamW, lr=0.1)))
    for each in found:
        assert each["step"] == each["ordered"]
        for mine, theirs in zip(each["step"][0], each["own"], strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-4, atol=1e-5)
        assert each["loaded"] == bits(alone.model.params.values())


def test_what_is_cut_already_is_refused_with_the_attached_loop_as_the_next_move(two_ranks):
    """Tensor parallelism in a model and in a state, each by name with its mesh; and an attached loop that nothing would cut."""
    for each in two_ranks:
        found = each["refused"]
        assert all("model: 0.weight: expected a plain tensor" in found[what] for what in ("init", "step"))
        assert "state.model.params['0.weight']: expected [" in found["state"]
        assert "found a DTensor of [7, 6] on DeviceMesh" in found["state"]
        assert all("trainfold.attach(model, optimizer)" in found[what] for what in ("init", "step", "state"))
        assert "every rank would train all of the model; shard the model with fully_shard" in found["attach"]
