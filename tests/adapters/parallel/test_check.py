"""`live.check`: what it checks is found again when that changes, and ranks without a loss, such as the first stages of a pipeline, take part; gradients that nothing sums are equal."""

import contextlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.system.rank_refusals_cases import PATIENT
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.core.errors import InvalidArgument, InvalidBatch, InvalidState, NonFinite, RanksDisagree, TrainfoldError
from trainfold.core.step.reduce import unequal_gradients
from trainfold.ranks import Coordinates, Replicas, World, run_threads


class Stages:
    """Each rank trains a stage of one model, on the same samples. Gradients need no sum; their norm is that of all stages."""

    gradient_divisor = 1.0

    def __init__(self, ranks):
        self._ranks = ranks
        here = World(ranks.rank, ranks.world_size)
        self.coordinates = Coordinates(here, here)

    def gradient_sync(self, *, enabled):
        return contextlib.nullcontext(enabled)

    def all_sum(self, tensors):
        return [sum(each) for each in zip(*self._ranks.gather(tensors), strict=True)]

    def norm(self, gradients):
        squares = sum(each.square().sum() for each in gradients)
        return sum(self._ranks.gather(squares)).sqrt()

    def local(self, leaf):
        return leaf


def stage_of(rank):
    stage = nn.Linear(2, 3) if rank == 0 else nn.Linear(3, 1)
    for each in stage.parameters():
        nn.init.constant_(each, 0.25)
    return stage


def whole_model():
    """The norm and the loss of both stages on one process."""
    model = nn.Sequential(stage_of(0), stage_of(1))
    loss = model(torch.ones(4, 2)).square().mean()
    loss.backward()
    return loss.item(), nn.utils.get_total_norm([each.grad for each in model.parameters()]).item()


def test_the_last_stage_of_a_pipeline_has_the_loss_and_all_stages_check_it():
    """A09: the loss is that of the last stage, and the norm that of all; both are the same on every rank."""
    sent, back = [], []

    def train(ranks):
        stage = stage_of(ranks.rank)
        live = attach(stage, torch.optim.SGD(stage.parameters(), lr=0.1), parallelism=Stages(ranks))
        if ranks.rank == 0:
            sent.append(stage(torch.ones(4, 2)))
            ranks.gather(None)
            ranks.gather(None)
            sent[0].backward(back[0])
            return live.check(None, clip_norm=0.01)
        ranks.gather(None)
        received = sent[0].detach().requires_grad_()
        loss = stage(received).square().mean()
        loss.backward()
        back.append(received.grad)
        ranks.gather(None)
        return live.check(loss.detach(), clip_norm=0.01)

    loss, norm = whole_model()
    for found in run_threads(2, train):
        assert (found.loss, found.weight) == (pytest.approx(loss), 1)
        assert found.grad_norm == pytest.approx(norm)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_on_one_stage_stops_all(where):
    """A09: also if the rank with the loss is not the one with the gradient."""

    def train(ranks):
        stage = stage_of(ranks.rank)
        live = attach(stage, torch.optim.SGD(stage.parameters(), lr=0.1), parallelism=Stages(ranks))
        for each in stage.parameters():
            each.grad = torch.full_like(each, math.inf if (where, ranks.rank) == ("gradient", 0) else 1.0)
        with pytest.raises(NonFinite) as caught:
            live.check(None if ranks.rank == 0 else math.nan if where == "loss" else 1.0)
        return str(caught.value)

    for text in run_threads(2, train):
        assert ("not finite on ranks [1]" in text) == (where == "loss")


class Peers(Stages):
    """Two ranks that hold parts of one model have one share of the data, as under tensor parallelism; sums go over the ranks with the same parts."""

    def __init__(self, ranks):
        super().__init__(ranks)
        self.coordinates = Coordinates(self.coordinates.world, World(ranks.rank // 2, ranks.world_size // 2))

    def all_sum(self, tensors):
        every = self._ranks.gather(tensors)
        return [sum(each) for each in zip(*every[self._ranks.rank % 2 :: 2], strict=True)]


def test_ranks_are_named_and_not_their_shares_of_the_data():
    """A09, R09: an operator drains the node of the rank that an error names."""

    def train(ranks):
        model = stage_of(1)
        live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), parallelism=Peers(ranks))
        for each in model.parameters():
            each.grad = torch.ones_like(each)
        with pytest.raises(NonFinite) as caught:
            live.check(math.nan if ranks.rank in (4, 5) else 1.0)
        return str(caught.value), caught.value.rank

    for rank, (text, named) in enumerate(run_threads(6, train)):
        assert f"not finite on ranks [{4 + rank % 2}]" in text
        assert named == 4 + rank % 2


def test_a_share_without_gradients_is_not_taken_for_a_rank():
    """A09, R09: share 2 is on the ranks 4 and 5."""

    def train(ranks):
        model = stage_of(1)
        live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), parallelism=Peers(ranks))
        for each in model.parameters() if ranks.rank < 4 else ():
            each.grad = torch.ones_like(each)
        with pytest.raises(RanksDisagree, match="none on share 2 of 3") as caught:
            live.check(1.0)
        return caught.value.rank

    assert run_threads(6, train) == [None] * 6


def test_a_rank_without_a_batch_adds_no_loss_and_a_step_without_any_loss_is_refused():
    """A06: with weights, the gradients are those of the samples that there were."""

    def train(ranks):
        model = stage_of(1)
        live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), parallelism=Replicas(ranks))
        if ranks.rank == 0:
            total = model(torch.ones(4, 3)).square().sum()
            total.backward()
        found = live.check(total.detach() if ranks.rank == 0 else None, weight=4 if ranks.rank == 0 else 0)
        gradients = [each.grad.tolist() for each in model.parameters()]
        with pytest.raises(
            InvalidBatch, match=r"live\.check\.loss: expected the loss of at least one rank, found None on every rank"
        ):
            live.check(clip_norm=1.0)
        return found, gradients

    alone = stage_of(1)
    loss = alone(torch.ones(4, 3)).square().mean()
    loss.backward()
    for found, gradients in run_threads(2, train):
        assert (found.loss, found.weight) == (pytest.approx(loss.item()), 4)
        for mine, each in zip(gradients, alone.parameters(), strict=True):
            assert torch.allclose(torch.tensor(mine), each.grad)


def test_check_sees_parameters_that_an_optimizer_gets_later():
    """A09: what is checked is found once, and again when an optimizer steps other parameters, or another one is registered."""
    model, added, registered = nn.Linear(2, 2), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer)
    for each in (*model.parameters(), added, registered):
        each.grad = torch.ones_like(each)
    before = live.check(1.0).grad_norm ** 2
    assert live.check(1.0).grad_norm ** 2 == before
    optimizer.add_param_group({"params": [added]})
    assert live.check(1.0).grad_norm ** 2 == pytest.approx(before + 2)
    live.register("second", nn.ParameterList([registered]))
    live.register("third", torch.optim.SGD([registered], lr=0.1))
    assert live.check(1.0).grad_norm ** 2 == pytest.approx(before + 5)
    optimizer.param_groups[1]["params"][0] = nn.Parameter(torch.ones(2))
    assert live.check(1.0).grad_norm ** 2 == pytest.approx(before + 3)


def test_gradients_that_a_scaler_has_scaled_are_refused():
    """A09: the norm of scaled gradients is thousands of times too large, so that clipping left almost nothing of them."""
    model = nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    live = attach(model, optimizer, extra={"scaler": scaler})
    for is_unscaled in (True, False, True):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 2)).square().mean()
        scaler.scale(loss).backward()
        if is_unscaled:
            scaler.unscale_(optimizer)
            assert live.check(loss, clip_norm=1.0).grad_norm < 100
        else:
            with pytest.raises(InvalidArgument, match=r"call scaler\.unscale_\(optimizer\) before live\.check"):
                live.check(loss, clip_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        live.advance(samples=4)
    off = torch.amp.GradScaler("cpu", enabled=False)
    alone = attach(model, optimizer, extra={"scaler": off})
    off.scale(model(torch.ones(4, 2)).mean()).backward()
    assert alone.check(1.0).grad_norm > 0


class Averaging(Stages):
    """Each rank has the whole model, and the backward averages the gradients."""

    gradient_divisor = 2.0

    def norm(self, gradients):
        return nn.utils.get_total_norm(gradients)


@pytest.mark.parametrize("bare", [[1], [0], [0, 1]])
def test_ranks_of_which_some_have_no_gradient_are_refused_on_all_and_named(bare):
    """R07, R09: the one alone raised an error about its loss function, and the others stepped."""

    def train(ranks):
        model = stage_of(1)
        live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), parallelism=Averaging(ranks))
        if ranks.rank not in bare:
            model(torch.ones(4, 3)).square().mean().backward()
        with pytest.raises(TrainfoldError) as caught:
            live.check(1.0, clip_norm=1.0)
        return type(caught.value), str(caught.value), caught.value.rank

    one, other = run_threads(2, train)
    assert one == other
    if bare == [0, 1]:
        assert one[0] is InvalidArgument
    else:
        assert one[0] is RanksDisagree
        assert f"live.check: expected gradients on every rank, found none on rank {bare[0]} of 2" in one[1]
        assert one[2] == bare[0]


@pytest.mark.parametrize("parallelism", [Averaging, Replicas])
def test_a_weight_that_only_some_ranks_pass_is_refused_on_all(parallelism):
    """A06: the gradients of the others were not divided, so that the ranks went on with other weights."""

    def train(ranks):
        model = stage_of(1)
        live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), parallelism=parallelism(ranks))
        model(torch.ones(4, 3)).square().sum().backward()
        with pytest.raises(RanksDisagree) as caught:
            live.check(1.0, weight=4 if ranks.rank else None)
        return str(caught.value)

    (text,) = set(run_threads(2, train))
    assert "weight: expected one on every rank, or on none, found none on rank 0 of 2; pass weight=0" in text


@pytest.mark.usefixtures("process_group")
def test_a_parameter_that_is_unfrozen_after_ddp_has_wrapped_it_is_refused_by_name():
    """A05, R07: nothing sums its gradient, so each rank trained it apart in silence."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    model[:2].requires_grad_(False)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model[1:].parameters(), lr=0.1)
    model[0].requires_grad_(True)  # before the attach; no optimizer steps it
    live = attach(wrapped, optimizer)

    def step():
        optimizer.zero_grad()
        loss = wrapped(torch.ones(1, 2)).sum()
        loss.backward()
        live.check(loss.detach())
        optimizer.step()
        return live.advance(samples=1).step

    assert step() == 1
    assert live.parallelism.unsummed(model.parameters()) == [*model[0].parameters()]
    model[1].weight.requires_grad_(True)
    with pytest.raises(
        InvalidState, match=r"the gradient of 1\.weight: expected one that DistributedDataParallel sums"
    ) as caught:
        step()
    assert live.progress.step == 1
    assert "and of" not in str(caught.value)
    model[1].weight.requires_grad_(False)
    assert step() == 2
    model[1].requires_grad_(True)
    rewrapped = attach(nn.parallel.DistributedDataParallel(model), optimizer)
    assert rewrapped.advance(samples=1).step == 1
    assert rewrapped.parallelism.unsummed(model.parameters()) == []


# --- gradients that nothing sums --------------------------------------------------------------------------------------


def with_ignored(collectives):
    """A model of which ``fully_shard`` ignores a parameter, and a module that nothing wraps; what a check finds, and what it exchanges."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, head = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)), nn.Linear(3, 1)
    ignored = model[0].bias
    model = fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params={ignored})
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    live = attach(model, optimizer, extra={"head": head})

    def check(*averaged, poison=1.0):
        optimizer.zero_grad()
        loss = model(torch.full((4, 6), 1.0 + collectives.rank)).square().mean()
        loss.backward()
        (head(torch.full((1, 3), 1.0 + collectives.rank)).sum() * poison).backward()
        for each in averaged:
            torch.distributed.all_reduce(each.grad)
            each.grad /= 2
        try:
            return live.check(loss.detach(), clip_norm=0.1).grad_norm, ignored.grad.tolist()
        except TrainfoldError as error:
            return type(error).__name__, str(error)

    found = {"ignored": check(*head.parameters()), "both": check(), "none": check(ignored, *head.parameters())}
    found["poison"] = check(ignored, *head.parameters(), poison=torch.nan if collectives.rank else 1.0)
    return found


@pytest.mark.slow(2)
def test_gradients_that_nothing_sums_are_equal_on_all_ranks_or_refused_by_name(processes):
    """A05, R07: every rank found another norm there, and clipped by it."""
    one, other = processes.run(2, with_ignored, collectives=PATIENT)
    for found in (one, other):
        assert found["ignored"][0] == found["both"][0] == "RanksDisagree"
        assert "the gradient of 0.bias: expected the same on every rank" in found["ignored"][1]
        assert "and of 1 more" in found["both"][1]
        assert found["poison"][0] == "NonFinite"
    assert one == other
    assert one["none"][0] > 0


@given(
    columns=st.lists(
        st.lists(st.sampled_from([None, 0.0, 1.0, 1.0 + 2**-50, 2.0, math.inf, math.nan]), min_size=3, max_size=3),
        max_size=3,
    )
)
@settings(max_examples=20)
def test_the_gradients_that_differ_are_found_by_their_places(columns):
    def find(ranks):
        mine = [column[ranks.rank] for column in columns]
        held = [None if each is None else torch.tensor([each, 0.0], dtype=torch.float64) for each in mine]
        return unequal_gradients(held, Replicas(ranks))

    expected = [place for place, column in enumerate(columns) if len(set(map(str, column))) > 1]
    assert run_threads(3, find) == [expected] * 3
