"""A manager resumes a run whose settings differ only where a policy allows it; components come and go."""

import warnings

import pytest
import torch
from kit.adapters.manager.manager_cases import Job
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.load import ResumeDrift
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import (
    ResumeRefused,
    UnknownComponent,
)
from trainfold.core.format.fingerprint import fingerprint


@pytest.mark.parametrize(
    ("change", "words"),
    [({"hidden": 7}, "model.params"), ({"batch_size": 3}, "batch_size"), ({"decay": 0.02}, "weight_decay")],
)
def test_a_run_that_is_not_the_same_is_refused_and_left_as_it_is(change, words):
    """V08, V12, G12: every reason at once, nothing changed."""
    store = MemoryStore()
    with CheckpointManager(store, every=2) as manager:
        Job(0).run(manager, 2)
    job = Job(1, **change)
    before = fingerprint(job.live.capture())
    with CheckpointManager(store) as manager, pytest.raises(ResumeRefused, match=words):
        manager.restore(job.live)
    assert fingerprint(job.live.capture()) == before


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, torch.optim.SGD, torch.optim.LBFGS])
def test_optimizers_whose_parameters_have_different_slots_resume_through_the_store(optimizer):
    """B10: Adafactor keeps different slots for vectors and matrices; LBFGS keeps all slots under one parameter."""

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        made = optimizer(model.parameters(), lr=0.1)
        return model, made, attach(model, made)

    def step(model, made, live, times):
        for _ in range(times):

            def closure():
                made.zero_grad()
                loss = (model(torch.ones(1, 2)) - 3).square().sum()
                loss.backward()
                return loss

            made.step(closure)
            live.advance(samples=1)

    store, whole, first, second = MemoryStore(), build(), build(), build()
    step(*whole, 4)
    step(*first, 2)
    with CheckpointManager(store) as manager:
        manager.save(first[2])
        manager.restore(second[2])
    step(*second, 2)
    wanted = fingerprint(whole[2].capture())
    assert {name: digest for name, digest in fingerprint(second[2].capture()).items() if name != "rng"} == {
        name: digest for name, digest in wanted.items() if name != "rng"
    }


def test_another_base_learning_rate_under_a_scheduler_is_refused():
    """V08: the script's base rate is compared, not the rate that the scheduler computed from it."""
    store = MemoryStore()
    with CheckpointManager(store, every=3) as manager:
        Job(0).run(manager, 3)
        job = Job(1, lr=0.5)
        with pytest.raises(ResumeRefused, match=r"initial_lr: saved 0\.05, wanted 0\.5"):
            manager.restore(job.live)
        assert job.optimizer.param_groups[0]["lr"] == 0.5
        manager.restore(Job(1).live)


def test_the_peak_of_a_one_cycle_schedule_is_compared_and_what_it_cycles_is_not():
    """V08."""

    def build(max_lr):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=max_lr, total_steps=9)
        return model, optimizer, scheduler, attach(model, optimizer, scheduler=scheduler)

    store = MemoryStore()
    model, optimizer, scheduler, live = build(0.1)
    with CheckpointManager(store) as manager:
        for _ in range(3):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            scheduler.step()
            live.advance(samples=1)
        manager.save(live)
        same = build(0.1)
        manager.restore(same[3])
        for key in ("lr", "betas"):
            assert same[1].param_groups[0][key] == optimizer.param_groups[0][key]
        with pytest.raises(ResumeRefused, match=r"max_lr: saved 0\.1, wanted 0\.2"):
            manager.restore(build(0.2)[3])


class HandScheduled:
    """A loop without a scheduler: it sets the learning rate, and the weight decay, of each step by itself."""

    def __init__(self, seed, *, lr=0.1, momentum=0.9, decay=0.0):
        torch.manual_seed(seed)
        self.model, self.lr = nn.Linear(2, 1), lr
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum, weight_decay=decay)
        self.live = attach(self.model, self.optimizer)

    def run(self, manager, steps):
        for step in range(self.live.progress.step, steps):
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr / (1 + step)
                group["weight_decay"] = 0.01 * step
            self.optimizer.zero_grad()
            (self.model(torch.rand(3, 2)) - 1).square().mean().backward()
            self.optimizer.step()
            self.live.advance(samples=3)
            manager.step(self.live)
        return fingerprint(self.live.capture())


def test_a_loop_that_sets_its_learning_rate_by_hand_resumes_exactly():
    """V13: without a refusal or a warning, also after a second resume, although the saved rate is not the script's."""
    with CheckpointManager(MemoryStore()) as manager:
        wanted = HandScheduled(0).run(manager, 9)
    store = MemoryStore()
    for seed, stop in ((0, 3), (1, 7)):
        with CheckpointManager(store, every=1) as manager:
            job = HandScheduled(seed)
            manager.restore(job.live)
            job.run(manager, stop)
    job = HandScheduled(2)
    with CheckpointManager(store, every=1) as manager:
        assert manager.restore(job.live).step == 7
        assert job.optimizer.param_groups[0]["lr"] == 0.1 / 7
        assert job.run(manager, 9) == wanted


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": 0.5}, r"\.lr: saved 0\.1, wanted 0\.5"),
        ({"momentum": 0.8}, r"\.momentum: saved 0\.9, wanted 0\.8"),
        ({"decay": 0.1}, r"\.weight_decay: saved 0\.0, wanted 0\.1"),
    ],
)
def test_a_script_with_another_hyperparameter_is_refused_also_where_the_loop_sets_it_by_hand(change, words):
    """V08: a rate that changed in training is distinguished from that of another script, because the script's is compared."""
    store = MemoryStore()
    with CheckpointManager(store, every=3) as manager:
        HandScheduled(0).run(manager, 3)
        job = HandScheduled(1, **change)
        before = fingerprint(job.live.capture())
        with pytest.raises(ResumeRefused, match=words):
            manager.restore(job.live)
        assert fingerprint(job.live.capture()) == before


def test_a_policy_takes_the_learning_rate_of_the_script():
    """V08: on purpose."""
    store = MemoryStore()
    with CheckpointManager(store, every=3) as manager:
        HandScheduled(0).run(manager, 3)
    job = HandScheduled(1, lr=0.5)
    with CheckpointManager(store, every=1, policy={"hyperparameters": "warn"}) as manager:
        with pytest.warns(ResumeDrift, match=r"lr: saved 0\.1, wanted 0\.5"):
            manager.restore(job.live)
        assert job.optimizer.param_groups[0]["lr"] == 0.5
        job.run(manager, 4)
        again = HandScheduled(2, lr=0.5)
        manager.restore(again.live)
    assert again.optimizer.param_groups[0]["lr"] == 0.5 / 4


def test_a_policy_lets_another_batch_size_pass_where_it_divides():
    """G12, V08."""
    store = MemoryStore()
    with CheckpointManager(store, every=3) as manager:
        Job(0).run(manager, 3)
    job = Job(1, batch_size=6)
    with CheckpointManager(store, policy={"batch_size": "adapt"}) as manager:
        manager.restore(job.live)
    assert len(next(job.live.batches())[0]) == 6


def test_a_component_can_start_anew_on_purpose():
    """H04: rng is skipped with a reason, and this process's streams stay unchanged."""
    store = MemoryStore()
    with CheckpointManager(store, every=3) as manager:
        Job(0).run(manager, 3)
        job = Job(8)
        streams = torch.get_rng_state()
        manager.restore(job.live, reset={"rng": "another seed on purpose"})
    assert torch.equal(streams, torch.get_rng_state())
    assert job.live.progress.step == 3


def test_a_selection_of_components_is_saved_and_restored():
    """B01, B02."""
    store = MemoryStore()
    with CheckpointManager(MemoryStore(), components="trainer") as manager:
        assert set(manager.save(Job(0).live).result.fingerprints) == {"trainer"}
    chosen = ["model", "trainer", "ema"]
    with CheckpointManager(store, every=2, components=chosen) as manager:
        result = Job(0).run(manager, 2)
        assert result == [2]
        job = Job(1)
        manager.restore(job.live)
        assert job.live.progress.step == 2
        assert not job.optimizer.state
    with CheckpointManager(store, components=["weights"]) as manager, pytest.raises(UnknownComponent, match="weights"):
        manager.restore(Job(1).live)


def test_a_component_registered_after_the_restore_gets_what_was_saved():
    """B15: through the store."""
    store, first = MemoryStore(), Job(0)
    with CheckpointManager(store, every=2) as manager:
        first.run(manager, 2)
        job = Job(1, register=False)
        manager.restore(job.live)
        assert job.live.pending == ("ema",)
        job.live.register("ema", job.ema)
    assert torch.equal(job.ema.module[0].weight, first.ema.module[0].weight)


def test_a_component_that_was_never_saved_is_refused_or_starts_fresh_by_policy():
    """B15, B07: a missing name is reported, and never silently fresh."""
    store = MemoryStore()
    with CheckpointManager(store, every=2) as manager:
        Job(0, register=False).run(manager, 2)
        job = Job(1)
        with pytest.raises(ResumeRefused, match="ema"):
            manager.restore(job.live)
    average = job.ema.module[0].weight.clone()
    with (
        CheckpointManager(store, policy={"missing_component": "adapt"}) as manager,
        warnings.catch_warnings(record=True),
    ):
        manager.restore(job.live)
    assert job.live.progress.step == 2
    assert torch.equal(job.ema.module[0].weight, average)


# --- retention -------------------------------------------------------------------------------------------------------
