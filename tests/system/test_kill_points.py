"""A run of thirty steps on ranks, killed after any of them: what continues has every bit of the run that was not killed."""

import os
import random
import signal

import numpy as np
import pytest
import torch
from crash.effort import IS_SOAK
from kit.adapters.fsdp2_cases import Model, sharded
from kit.system.rank_refusals_cases import PATIENT
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainfold
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager

STEPS = 30
WORLDS = [(2, "fsdp2"), (3, "ddp"), *([(2, "ddp"), (3, "fsdp2")] if IS_SOAK else [])]
USUAL = [WORLDS[0], *(pytest.param(*each, marks=pytest.mark.long) for each in WORLDS[1:])]
EVERY = 1 if IS_SOAK else 2  # the two worlds of the usual run share the steps


def objects(collectives, kind, seed):
    """Everything that a script makes; each rank has its own streams, and the samples of an epoch are in another order each time."""
    torch.manual_seed(seed)
    model = (
        sharded(collectives.world_size, seed=seed) if kind == "fsdp2" else nn.parallel.DistributedDataParallel(Model())
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1)
    data = TensorDataset(torch.randn(44, 6, generator=torch.Generator().manual_seed(1)))
    sampler = trainfold.data.GlobalBatchSampler(data, 6, seed=2)
    loader = DataLoader(data, batch_sampler=sampler)
    torch.manual_seed(100 * seed + collectives.rank)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    return model, optimizer, scheduler, attach(model, optimizer, scheduler=scheduler, loader=loader)


def train(parts, manager, *, steps, after):
    """Train to a step; ``after`` is called after each."""
    model, optimizer, scheduler, live = parts
    for (x,) in live.batches(steps=steps):
        noise = random.random() + np.random.random()  # noqa: NPY002
        (model(x).square().mean() * noise).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        live.advance()
        manager.step(live)
        after(live)


def state_of(live):
    """The fingerprint of everything that this rank has, random streams and the place in the data included."""
    return trainfold.fingerprint(live.capture())


def steps_of(world_size):
    """The steps from which a world resumes."""
    return range(1 + world_size % EVERY, STEPS, EVERY)


def killed_anywhere(collectives, folder, kind):
    """The states of the whole run after each step; and for each step those of a run that resumes there, at once and a step later."""
    whole, resumed = {}, {}
    with CheckpointManager(folder, every=1, mode="async", collectives=collectives) as manager:
        parts = objects(collectives, kind, 0)
        manager.restore(parts[3])
        train(parts, manager, steps=STEPS, after=lambda live: whole.update({live.progress.step: state_of(live)}))
    for step in steps_of(collectives.world_size):
        parts = objects(collectives, kind, 9)
        with CheckpointManager(folder, every=None, at_end=False, collectives=collectives) as manager:
            manager.restore(parts[3], step=step)
            found = [state_of(parts[3])]
            train(parts, manager, steps=step + 1, after=lambda live, found=found: found.append(state_of(live)))
        resumed[str(step)] = found == [whole[step], whole[step + 1]]
    return resumed


@pytest.mark.slow(6)
@pytest.mark.long  # the test below is killed for real, and compares the same
@pytest.mark.parametrize(("world_size", "kind"), WORLDS)
def test_from_each_step_of_a_run_the_state_and_the_next_step_are_those_of_the_whole_run(
    processes, tmp_path, world_size, kind
):
    """V13, H01: equal states before and after a step make equal runs, by induction, so that no run has to be trained to its end."""
    for resumed in processes.run(world_size, killed_anywhere, str(tmp_path), kind, collectives=PATIENT):
        assert resumed == dict.fromkeys(map(str, steps_of(world_size)), True)


# --- real kills ---------------------------------------------------------------------------------------------------------


def life(collectives, folder, kind, kill_at):
    """A life of the run: from the newest checkpoint to the step where all ranks are killed, or to the end."""

    def after(live):
        if live.progress.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)  # a save may be under way, and the ranks are not at the same place

    parts = objects(collectives, kind, 3)
    with CheckpointManager(folder, every=2, keep_last=2, mode="async", collectives=collectives) as manager:
        manager.restore(parts[3])
        start = parts[3].progress.step
        train(parts, manager, steps=STEPS, after=after)
        manager.finish(parts[3])
    return start, state_of(parts[3])


@pytest.mark.slow(6)
@pytest.mark.parametrize(("world_size", "kind"), USUAL)
def test_a_run_that_is_really_killed_again_and_again_ends_with_the_bits_of_one_that_was_not(
    processes, tmp_path, world_size, kind
):
    """V13, A09: the soak kills after each of the thirty steps, in chains of lives."""
    whole = processes.run(world_size, life, str(tmp_path / "whole"), kind, 0, collectives=PATIENT)
    kills = range(1, STEPS) if IS_SOAK else (11, 28)
    for kill_at in kills:
        ended = processes.outcomes(world_size, life, str(tmp_path / "killed"), kind, kill_at, collectives=PATIENT)
        assert any(rank.code == -signal.SIGKILL for rank in ended), [rank.printed for rank in ended]
        assert all(rank.code for rank in ended)
    end = processes.run(world_size, life, str(tmp_path / "killed"), kind, 0, collectives=PATIENT)
    assert [state for _, state in end] == [state for _, state in whole]
    assert all(start >= kills[-1] - 4 for start, _ in end)
