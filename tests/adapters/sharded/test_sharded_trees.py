"""Averages of sharded weights that an object or a pair of functions keeps: their parts are saved and come back as DTensors."""

import hashlib

import pytest
import torch
from kit.adapters.fsdp2_cases import OPTIMIZERS, Model, bits, sharded, whole
from kit.system.rank_refusals_cases import PATIENT, refusal

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import SingleProcess

pytestmark = pytest.mark.slow(1.5)


class Average:
    """An average as people write it: DTensors by name, moved by foreach, with a count."""

    def __init__(self, model):
        self.weights = {name: each.detach().clone() for name, each in model.named_parameters()}
        self.updates = 0

    def update(self, model):
        torch._foreach_lerp_(list(self.weights.values()), [each.detach() for each in model.parameters()], 0.25)
        self.updates += 1

    def state_dict(self):
        return {"weights": self.weights, "updates": self.updates}

    def load_state_dict(self, state):
        self.weights, self.updates = state["weights"], state["updates"]


def digest(weights):
    found = hashlib.sha1()
    for name in sorted(weights):
        found.update(whole(weights[name]).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def made(model):
    """The run: an average with methods, and another behind two functions."""
    stepper = OPTIMIZERS["adamw"](model.parameters())
    average, second = Average(model), Average(model)

    def put(tree):
        second.weights = tree

    live = attach(model, stepper, extra={"ema": average, "second": (lambda: second.weights, put)})
    return stepper, average, second, live


def steps(rank, model, stepper, averages, live, manager, *, until):
    while live.progress.step < until:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * live.progress.step + rank))
        model(x).square().mean().backward()
        stepper.step()
        stepper.zero_grad()
        for each in averages:
            each.update(model)
        live.advance(samples=4)
        manager.step(live)


def averaged(collectives, folder, restore):
    model = sharded(collectives.world_size, seed=0 if restore is None else 9)
    stepper, average, second, live = made(model)
    torch.manual_seed(collectives.rank)
    with CheckpointManager(folder, every=1, mode="async", collectives=collectives) as manager:
        manager.restore(live, step=restore)
        start = bits(model, stepper), digest(average.weights), digest(second.weights), average.updates
        cut = all(hasattr(each, "full_tensor") for kept in (average, second) for each in kept.weights.values())
        steps(collectives.rank, model, stepper, (average, second), live, manager, until=4)
    return start, (bits(model, stepper), digest(average.weights), digest(second.weights), average.updates), cut


def test_averages_in_objects_and_behind_functions_resume_exactly_and_fit_any_number_of_ranks(processes, tmp_path):
    """Each async save is overtaken by their foreach updates, which move no version counter."""
    folder = str(tmp_path)
    ((_, wanted, _), *_) = processes.run(2, averaged, folder, None, collectives=PATIENT)
    for start, end, cut in processes.run(2, averaged, folder, 2, collectives=PATIENT):
        assert cut
        assert end == wanted
        middle = start
    for start, _, cut in processes.run(3, averaged, folder, 2, collectives=PATIENT):
        assert cut
        assert start == middle
    model = Model()
    stepper, average, second, live = made(model)
    with CheckpointManager(folder, collectives=SingleProcess()) as manager:
        manager.restore(live, step=2)
    assert (bits(model, stepper), digest(average.weights), digest(second.weights), average.updates) == middle


def into_a_whole_one(collectives):
    model = sharded(collectives.world_size)
    state = made(model)[3].capture()
    other = Model()
    *_, live = made(other)
    return [refusal(lambda name=name: live.restore(state, components=[name])) for name in ("ema", "second")]


def test_a_part_of_a_tensor_is_refused_where_the_object_has_all_of_it(processes):
    for errors in processes.run(2, into_a_whole_one, collectives=PATIENT):
        assert all(error.startswith("RestoreRefused") for error in errors)
        assert all("expected the part that this rank holds" in error for error in errors), errors
