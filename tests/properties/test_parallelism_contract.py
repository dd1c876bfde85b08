"""The contract of a parallelism accepts ranks with whole replicas, silent or synchronised in the backward, and names each broken promise."""

import contextlib

import pytest
import torch

from trainfold.core.errors import InvalidArgument, NonFinite
from trainfold.core.step.init_state import init_state
from trainfold.core.step.loss import Loss
from trainfold.core.step.optimizer import optimizer
from trainfold.core.step.step import make_step
from trainfold.properties.contracts import ContractBroken, check_parallelism
from trainfold.ranks import Coordinates, Replicas, Sharded, World, run_threads


class Silent:
    """As `Replicas`; the tests break one promise each."""

    gradient_divisor = None

    def __init__(self, ranks, model):
        self.replicas, self.model = Replicas(ranks), model
        self.coordinates = self.replicas.coordinates
        self.is_on = True

    def gradient_sync(self, *, enabled):
        return self.replicas.gradient_sync(enabled=enabled)

    def all_sum(self, tensors):
        return self.replicas.all_sum(tensors)

    def norm(self, gradients):
        return self.replicas.norm(gradients)

    def local(self, leaf):
        return self.replicas.local(leaf)

    def fail(self, error):
        self.replicas.fail(error)


class Synchronised(Silent):
    """As DistributedDataParallel: a backward sums over the ranks and divides by their number."""

    def __init__(self, ranks, model):
        super().__init__(ranks, model)
        self.gradient_divisor = float(ranks.world_size)
        for each in model.parameters():
            each.register_post_accumulate_grad_hook(self.mean)

    def mean(self, parameter):
        if self.is_on:
            (total,) = self.all_sum([parameter.grad])
            parameter.grad = total / self.gradient_divisor

    @contextlib.contextmanager
    def gradient_sync(self, *, enabled):
        before, self.is_on = self.is_on, enabled
        try:
            yield
        finally:
            self.is_on = before


class ForgetsAtErrors(Synchronised):
    @contextlib.contextmanager
    def gradient_sync(self, *, enabled):
        before, self.is_on = self.is_on, enabled
        yield
        self.is_on = before


class SynchronisesAlways(Synchronised):
    def gradient_sync(self, *, enabled):
        return contextlib.nullcontext()


class NeverSynchronises(Synchronised):
    def mean(self, parameter):
        pass


class CopiesLocals(Silent):
    def local(self, leaf):
        return leaf.clone()


class NormOfItself(Silent):
    def norm(self, gradients):
        return super().norm(gradients) * (1 + self.coordinates.data.rank)


class NormFailsOnNothing(Silent):
    def norm(self, gradients):
        return super().norm(gradients) if gradients else torch.tensor(torch.nan)


class SumsOnlyItself(Silent):
    def all_sum(self, tensors):
        return [each.clone() for each in tensors]


class SumsInPlace(Silent):
    def all_sum(self, tensors):
        for each, total in zip(tensors, super().all_sum(tensors), strict=True):
            each.copy_(total)
        return tensors


class WrongShare(Silent):
    def __init__(self, ranks, model):
        super().__init__(ranks, model)
        self.coordinates = Coordinates(self.coordinates.world, World(0, ranks.world_size))


class SumsInItsOwnOrder(Silent):
    """Begins with its own terms: of three shares the sums have other bits on each rank."""

    def __init__(self, ranks, model):
        super().__init__(ranks, model)
        self.ranks = ranks

    def all_sum(self, tensors):
        gathered = self.ranks.gather([each.clone() for each in tensors])
        first, *others = [*gathered[self.ranks.rank :], *gathered[: self.ranks.rank]]
        for other in others:
            first = [one + two for one, two in zip(first, other, strict=True)]
        return first


def runner(kind):
    def wrap(ranks):
        return lambda model: (model, kind(ranks, model))

    return lambda size, play: run_threads(size, lambda ranks: play(wrap(ranks)))


@pytest.mark.parametrize("kind", [Silent, Synchronised, lambda ranks, _: Sharded(ranks)])
def test_whole_replicas_keep_the_promises(kind):
    """A03: silent until the boundary, or synchronised at it, on 1 to 3 ranks."""
    check_parallelism(runner(kind), world_sizes=(1, 2, 3))


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (ForgetsAtErrors, "comes back after an error"),
        (SynchronisesAlways, "only the boundary synchronises"),
        (NeverSynchronises, "has the gradients of all microbatches and shares"),
        (CopiesLocals, "is its memory"),
        (NormOfItself, "with the same bits on every rank"),
        (NormFailsOnNothing, "no gradients have the norm 0"),
        (SumsOnlyItself, "sums are over the shares"),
        (SumsInPlace, "leave their terms alone"),
        (WrongShare, "each share of the data has as many ranks"),
    ],
)
def test_each_broken_promise_is_named(kind, rule):
    with pytest.raises(ContractBroken, match=rule):
        check_parallelism(runner(kind), world_sizes=(2,))


def test_sums_that_each_rank_makes_in_its_own_order_are_named_on_three_ranks():
    """A02: the order of two terms makes no difference, so the default is up to three ranks."""
    with pytest.raises(ContractBroken, match="with 3 ranks: sums have the same bits on every rank"):
        check_parallelism(runner(SumsInItsOwnOrder))
    check_parallelism(runner(SumsInItsOwnOrder), world_sizes=(1, 2))


def loss_fn(model, batch):
    return Loss(sum=model(batch).square().sum(), weight=len(batch))


def steps_with(ranks, **how):
    model, sgd = torch.nn.Linear(3, 2), optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    torch.nn.init.constant_(model.weight, 0.25)  # not drawn: threads share one global generator
    torch.nn.init.constant_(model.bias, -0.5)
    state = init_state(model, sgd)
    step = make_step(model, loss_fn, sgd, accumulate=2, clip_norm=0.5, **how)
    for index in range(3):
        batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * index + ranks.rank))
        state, metrics = step(state, batch)
    return [each.tolist() for each in state.model.params.values()], metrics["grad_norm"]


def test_a_step_takes_a_parallelism_of_ones_own():
    """A02: the bits are those of the ranks themselves."""
    wanted = run_threads(2, lambda ranks: steps_with(ranks, collectives=ranks))
    assert run_threads(2, lambda ranks: steps_with(ranks, parallelism=Silent(ranks, None))) == wanted
    assert wanted[0] == wanted[1]


def test_a_step_refuses_a_parallelism_whose_backward_communicates():
    """A step sums the gradients itself; a second sum would count each share again."""
    model, sgd = torch.nn.Linear(1, 1), optimizer(torch.optim.SGD, lr=0.1)

    def made(ranks):
        with pytest.raises(InvalidArgument, match="sums the gradients itself"):
            make_step(model, loss_fn, sgd, parallelism=Synchronised(ranks, torch.nn.Linear(1, 1)))
        with pytest.raises(InvalidArgument, match="without collectives beside it"):
            make_step(model, loss_fn, sgd, parallelism=Replicas(ranks), collectives=ranks)

    run_threads(2, made)


def test_an_error_of_a_step_names_the_step_and_the_rank():
    """R09, A09: a loss that is not finite on one rank; and what the user's own loss raises."""

    def played(ranks):
        model, sgd = torch.nn.Linear(3, 2), optimizer(torch.optim.SGD, lr=0.1)
        state = init_state(model, sgd)

        def broken(model, batch):
            loss = loss_fn(model, batch)
            return Loss(sum=loss.sum * (torch.nan if ranks.rank == 1 else 1.0), weight=loss.weight)

        state, _ = make_step(model, loss_fn, sgd, collectives=ranks)(state, torch.full((2, 3), 1.0 + ranks.rank))
        with pytest.raises(NonFinite) as caught:
            make_step(model, broken, sgd, collectives=ranks)(state, torch.full((2, 3), 1.0 + ranks.rank))
        return caught.value.step, caught.value.rank, caught.value.__notes__

    assert run_threads(2, played) == [(1, 1, ["on rank 1", "at step 1"])] * 2
