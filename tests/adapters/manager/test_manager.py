"""The manager: saves when due, resumes exactly, keeps the last few, and gets in nobody's way."""

import logging
import random
import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainfold.adapters.live.live import attach
from trainfold.adapters.manager.disabled import DisabledManager
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.api import load, plan, save
from trainfold.backends.runs.load import ResumeDrift
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import (
    CheckpointError,
    CheckpointForeign,
    CheckpointHostile,
    IncompleteWindow,
    InvalidArgument,
    InvalidState,
    ResumeRefused,
    RunLocked,
    UnknownComponent,
    UnsupportedLeaf,
)
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.resume.resume_plan import ResumePlan
from trainfold.core.save.retention import Saved, plan_retention
from trainfold.core.save.retention import keep_last as keep_the_last
from trainfold.core.save.triggers import should_save
from trainfold.core.state.state import Progress, TrainState


class Job:
    """A small run with everything in it, made anew each time."""

    def __init__(self, seed, *, hidden=6, batch_size=4, lr=0.05, decay=0.01, register=True):
        torch.manual_seed(seed)
        random.seed(seed)
        x = torch.linspace(-1, 1, 44).reshape(22, 2)
        self.model = nn.Sequential(nn.Linear(2, hidden), nn.Dropout(0.2), nn.Linear(hidden, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=decay)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=15)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size, shuffle=True)
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        extra = {"ema": self.ema} if register else {}
        self.live = attach(self.model, self.optimizer, scheduler=self.scheduler, loader=loader, extra=extra)

    def run(self, manager, steps):
        saved = []
        for x, y in self.live.batches(steps=steps):
            loss = ((self.model(x + random.random()) - y) ** 2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.ema.update_parameters(self.model)
            self.live.advance(samples=len(x))
            result = manager.step(self.live)
            saved += [result.step] if result else []
        return saved


def steps_of(store):
    return [entry.head.step for entry in read_inventory(store).entries if entry.head is not None]


# --- the law, through the real format ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted():
    store = MemoryStore()
    job = Job(0)
    with CheckpointManager(store, every=1) as manager:
        job.run(manager, 14)
    return store, fingerprint(job.live.capture())


@given(k=st.integers(1, 14), seed=st.integers(1, 2**31))
@example(k=6, seed=1)
@example(k=12, seed=1)
@settings(deadline=None, max_examples=12)
def test_a_run_resumed_from_any_of_its_checkpoints_ends_with_the_same_bits(uninterrupted, k, seed):
    """V13, G01, G03, H01: save, new objects, load, go on; every component's fingerprint."""
    store, wanted = uninterrupted
    job = Job(seed)
    manager = CheckpointManager(store)
    try:
        assert manager.restore(job.live, step=k).step == k
        job.run(manager, 14)
        assert fingerprint(job.live.capture()) == wanted
    finally:
        manager.close()


def test_the_law_holds_on_a_disk(tmp_path):
    """V13: the same through files, at an epoch's end and inside one."""
    whole = Job(0)
    with CheckpointManager(tmp_path / "whole", every=6) as manager:
        whole.run(manager, 14)
    wanted = fingerprint(whole.live.capture())
    for killed_at in (6, 9):
        with CheckpointManager(tmp_path / f"k{killed_at}", every=3) as manager:
            Job(0).run(manager, killed_at)
        job = Job(5)
        with CheckpointManager(tmp_path / f"k{killed_at}", every=3) as manager:
            assert manager.restore(job.live).step == killed_at
            job.run(manager, 14)
        assert fingerprint(job.live.capture()) == wanted


# --- when ------------------------------------------------------------------------------------------------------------


@given(
    every=st.integers(1, 7),
    total=st.integers(0, 40),
    crashes=st.lists(st.integers(1, 39), max_size=4),
    jump=st.integers(1, 3),
)
def test_the_steps_that_are_saved_do_not_depend_on_interruptions(every, total, crashes, jump):
    """O06: the rule alone: each attempt goes on from the newest checkpoint; the cadence counts from step 0."""

    def saved_steps(stops):
        saved = []
        for stop in [*stops, total]:
            last = max(saved, default=None)
            step = last or 0
            while step < stop:
                step += jump
                if should_save(step, every=every, last_saved=last):
                    saved.append(step)
                    last = step
        return saved

    assert saved_steps([stop for stop in sorted(crashes) if stop < total]) == saved_steps([])


class Recording(MemoryStore):
    """Remembers the step of every save, whatever retention does."""

    def __init__(self):
        super().__init__()
        self.committed = []

    def commit(self, name, data, **kwargs):
        super().commit(name, data, **kwargs)
        if name.endswith("/manifest.json"):
            self.committed.append(int(name[len("step-") :].removesuffix("/manifest.json")))


@pytest.mark.parametrize(("every", "kills"), [(4, [6]), (4, [3, 9, 13]), (5, [7, 7, 12]), (3, [8, 10])])
@pytest.mark.parametrize("farewell", [False, True])
@pytest.mark.parametrize("keep_last", [None, 1])
def test_an_interrupted_run_saves_the_steps_that_an_uninterrupted_one_saves(every, kills, farewell, keep_last):
    """V14: killed between two saves; beside the farewell of a run that was told to stop, the saved steps are the same."""
    whole, parts, total = Recording(), Recording(), 15
    with CheckpointManager(whole, every=every, keep_last=keep_last) as manager:
        Job(0).run(manager, total)
    for attempt, stop in enumerate([*kills, total]):
        with CheckpointManager(parts, every=every, keep_last=keep_last) as manager:
            job, before = Job(attempt), kills[attempt - 1] if attempt else 0
            assert manager.restore(job.live).step == (before if farewell else before // every * every)
            job.run(manager, stop)
            if farewell and stop != total:
                manager.save(job.live)
    assert [step for step in parts.committed if not (farewell and step in kills)] == whole.committed
    assert whole.committed == list(range(every, total + 1, every))


@pytest.mark.parametrize(
    ("arguments", "due"),
    [
        ({"step": 0, "every": 1}, False),
        ({"step": 1, "every": 1}, True),
        ({"step": 1, "every": 5}, False),
        ({"step": 5, "every": None}, False),
        ({"step": 7, "every": 5, "last_saved": 5, "events": ["final"]}, True),
        ({"step": 7, "every": 5, "last_saved": 7, "events": ["final"]}, False),
        ({"step": 0, "every": None, "events": ["final"]}, True),
        ({"step": 10, "every": 5, "last_saved": 20}, True),
    ],
)
def test_the_first_and_the_last_step_are_no_special_cases(arguments, due):
    """O06: step 0, step 1, the last."""
    assert should_save(**arguments) is due


def test_the_manager_saves_the_multiples_and_says_what_it_did():
    """C16."""
    store = MemoryStore()
    with CheckpointManager(store, every=4) as manager:
        assert Job(0).run(manager, 11) == [4, 8]
    assert steps_of(store) == [4, 8]


def test_nothing_is_saved_inside_a_declared_window():
    """A06: the boundary that closes the window decides."""
    store, job = MemoryStore(), Job(0)
    with CheckpointManager(store, every=1) as manager:
        batches = job.live.batches()
        for _ in range(3):
            job.live.advance(samples=len(next(batches)[0]), steps=0)
            assert manager.step(job.live) is None
        next(batches)
        with pytest.raises(IncompleteWindow):
            manager.save(job.live)
        job.live.advance()
        assert manager.step(job.live).step == 1


# --- resuming --------------------------------------------------------------------------------------------------------


def test_an_empty_run_starts_fresh_and_says_so(caplog, tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        restored = manager.restore(Job(0).live)
        assert restored.is_fresh
        assert restored.step == 0
        assert caplog.messages == [f"{tmp_path / 'run'} holds no checkpoint: the run starts fresh"]
        job = Job(0)
        job.run(manager, 1)
        manager.save(job.live)
        caplog.clear()
        assert not manager.restore(Job(0).live).is_fresh
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def test_a_fresh_start_is_said_to_whoever_configured_no_logging(tmp_path):
    """Once, on the standard error: a resume that finds nothing is most often a path that was mistyped."""
    code = (
        "import sys, torch, trainfold\n"
        "with trainfold.CheckpointManager(sys.argv[1]) as manager:\n"
        "    manager.restore(trainfold.attach(torch.nn.Linear(1, 1)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "typo")], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stderr == f"{tmp_path / 'typo'} holds no checkpoint: the run starts fresh\n"
    assert done.stdout == ""


@pytest.mark.parametrize(
    "damaged",
    [
        b"{",
        b"",
        b"x" * (1 << 20),
        b"[]",
        b"{}",
        b'{"format":"trainfold-run","version":1}',
        b'{"format":"trainfold-run","version":"one","run_id":"a"}',
        None,
    ],
    ids=lambda value: "absent" if value is None else repr(value[:40]),
)
def test_what_a_damaged_run_file_needs_is_said_and_helps(tmp_path, damaged):
    """R09: no older checkpoint can help; the manifests know the id, so the fix names the whole file."""
    for step in (1, 2):
        save(TrainState(trainer=Progress(step=step)), tmp_path)
    path = tmp_path / "run.json"
    whole = path.read_text()
    if damaged is None:
        path.unlink()
    else:
        path.write_bytes(damaged)
    like = TrainState(trainer=Progress())
    with pytest.raises(ResumeRefused) as caught:
        load(tmp_path, like=like)
    assert "older" not in str(caught.value)
    fix = caught.value.refusal.reasons[0].fix
    assert "copy" in fix
    assert whole in fix
    with pytest.raises(CheckpointError) as again:
        CheckpointManager(tmp_path)
    assert whole in again.value.fix
    path.write_text(whole)
    assert load(tmp_path, like=like).trainer.step == 2


def test_a_damaged_run_file_beside_no_checkpoint_has_a_fix_too(tmp_path):
    (tmp_path / "run.json").write_bytes(b"{")
    with pytest.raises(CheckpointHostile, match="copy of the run, or save into another folder"):
        CheckpointManager(tmp_path)


@pytest.mark.parametrize("place", ["runs", "runs/a/step-00000001", "runs/a/latest", "weights"])
def test_a_path_given_by_mistake_is_no_fresh_start(place, tmp_path):
    """V04: several runs in one place raise. V15: another format is not taken for an empty run. V02."""
    for name in ("a", "b"):
        save(TrainState(trainer=Progress(step=1)), tmp_path / "runs" / name)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"x")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointForeign):
        CheckpointManager(tmp_path / place)
    assert sorted(tmp_path.rglob("*")) == before, "not even a lock"


def test_a_folder_that_becomes_somebody_elses_is_not_resumed_or_written_to(tmp_path):
    """V15: the manager was made before the weights were put there."""
    job = Job(0)
    with CheckpointManager(tmp_path) as manager:
        (tmp_path / "model.safetensors").write_bytes(b"x")
        with pytest.raises(ResumeRefused, match="CheckpointForeign"):
            manager.restore(job.live)
        with pytest.raises(CheckpointForeign):
            manager.save(job.live)
    assert {path.name for path in tmp_path.iterdir()} <= {"model.safetensors", ".lock"}


def test_a_run_whose_only_checkpoint_cannot_be_read_is_no_fresh_start(tmp_path):
    """V02: only a run that holds nothing starts fresh; one of a newer version, or a damaged one, is something."""
    save(TrainState(trainer=Progress(step=1)), tmp_path)
    manifest = tmp_path / "step-00000001" / "manifest.json"
    good = manifest.read_bytes()
    for bad in (good.replace(b'"schema_version":1', b'"schema_version":9'), b"", b"{}", good[:-9]):
        manifest.write_bytes(bad)
        with CheckpointManager(tmp_path) as manager, pytest.raises(ResumeRefused):
            manager.restore(Job(0).live)


def test_what_a_killed_first_save_left_behind_is_a_fresh_start_too(tmp_path):
    """C02: torn directories are not a run to resume, and not a reason to refuse."""
    torn = tmp_path / "run" / "step-00000005"
    torn.mkdir(parents=True)
    (torn / "model-00000-of-00001.safetensors").write_bytes(b"half of it")
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.restore(Job(0).live).is_fresh


def test_an_explicit_step_that_is_not_there_is_an_error():
    """V02."""
    with CheckpointManager(MemoryStore()) as manager, pytest.raises(ResumeRefused):
        manager.restore(Job(0).live, step=7)


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
    """B10: Adafactor keeps other slots for a vector than for a matrix; LBFGS keeps all of them under one parameter."""

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
    """V08: what the scheduler has made of the rate is not compared; what the script gave it is."""
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
    """V13: without a refusal or a warning, and again after a resume, though the saved rate is not the script's."""
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
    """V08: a rate that moved is told from another script's, because the script's is what is compared."""
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
    """H04: rng is skipped with a reason, and stays what this process has."""
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

saved_runs = st.lists(st.integers(0, 30), unique=True, min_size=1).map(lambda steps: [(f"s{s}", s) for s in steps])


@given(saved=saved_runs, keep_last=st.integers(1, 6), data=st.data())
def test_retention_keeps_its_budget_and_never_takes_the_newest_or_a_protected_one(saved, keep_last, data):
    """E01, E02, E06."""
    written = data.draw(st.sampled_from(saved))
    protected = set(data.draw(st.lists(st.sampled_from(saved)))) - {written}
    names = {name for name, _ in protected}
    found = [Saved(name, step) for name, step in saved]
    gone = plan_retention(found, policy=keep_the_last(keep_last), written=Saved(*written), protected=names).deleted
    assert written[0] not in gone
    assert not set(gone) & names
    steps = dict(saved)
    assert all(steps[name] < written[1] for name in gone)
    kept = [name for name, step in saved if step <= written[1] and name not in gone and name not in names]
    assert len(kept) == min(keep_last, len([n for n, s in saved if s <= written[1] and n not in names]))
    assert all(steps[name] < min(steps[k] for k in kept) for name in gone)


@pytest.mark.parametrize("keep_last", [0, None])
def test_zero_and_none_keep_everything(keep_last):
    """E01: the [:-0] trap."""
    saved = [Saved("a", 1), Saved("b", 2)]
    assert plan_retention(saved, policy=keep_the_last(keep_last), written=saved[-1]).deleted == ()
    store = MemoryStore()
    with CheckpointManager(store, every=1, keep_last=keep_last) as manager:
        Job(0).run(manager, 4)
    assert steps_of(store) == [1, 2, 3, 4]


@pytest.mark.parametrize("keep_last", [1, 2])
def test_the_last_few_are_kept_and_those_that_are_not_whole_do_not_count(tmp_path, keep_last):
    """E01, E03: a torn directory neither counts nor protects, and is left alone."""
    store = LocalStore(tmp_path / "run")
    with CheckpointManager(store, every=2, keep_last=keep_last) as manager:
        job = Job(0)
        job.run(manager, 4)
        damaged = tmp_path / "run" / "step-00000004" / "manifest.json"
        damaged.write_bytes(damaged.read_bytes()[:-40])
        manager._saves._keeper._proved.clear()  # as after a restart
        job.run(manager, 10)
    whole = [step for step in steps_of(LocalStore(tmp_path / "run")) if step != 4]
    assert whole == [10, 8][:keep_last][::-1]
    assert damaged.exists()


class CannotDelete(MemoryStore):
    def delete(self, name):
        raise OSError(f"cannot delete {name}")


def test_a_deletion_that_fails_is_a_warning_and_not_a_failed_save(caplog):
    """E04."""
    store = CannotDelete()
    with CheckpointManager(store, every=1, keep_last=1) as manager:
        assert Job(0).run(manager, 3) == [1, 2, 3]
    assert "could not be deleted" in caplog.text


# --- its life --------------------------------------------------------------------------------------------------------


def test_a_second_manager_of_one_run_is_refused_until_the_first_is_closed(tmp_path):
    manager = CheckpointManager(tmp_path / "run")
    with pytest.raises(RunLocked, match=r"which is this one; close the manager"):
        CheckpointManager(tmp_path / "run")
    manager.close()
    manager.close()
    CheckpointManager(tmp_path / "run").close()


def test_managers_of_two_runs_do_not_interfere():
    """O03."""
    one, other = MemoryStore(), MemoryStore()
    with CheckpointManager(one, every=2, keep_last=1) as first, CheckpointManager(other, every=3) as second:
        jobs = Job(0), Job(1)
        jobs[0].run(first, 4)
        jobs[1].run(second, 6)
        jobs[0].run(first, 6)
    assert steps_of(one) == [6]
    assert steps_of(other) == [3, 6]


def test_a_closed_manager_says_so_and_does_not_hide_what_was_raised():
    """D07."""
    job = Job(0)
    with pytest.raises(KeyError, match="the loop"), CheckpointManager(MemoryStore()) as manager:
        raise KeyError("the loop failed")
    for call in (manager.step, manager.save, manager.restore):
        with pytest.raises(InvalidState, match="open manager"):
            call(job.live)


def test_a_state_can_be_saved_as_it_is():
    store = MemoryStore()
    with CheckpointManager(store, keep_last=1) as manager:
        for step in (1, 2):
            assert manager.save(TrainState(trainer=Progress(step=step))).step == step
    assert steps_of(store) == [2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "background"}, "mode='sync'"),
        ({"mode": "threads"}, "mode"),
        ({"every": 0}, "every"),
        ({"every": 2.5}, "every"),
        ({"keep_last": -1}, "keep_last"),
        ({"policy": {"shape": "adapt"}}, "shape"),
        ({"every": "10"}, "every"),
        ({"keep_last": "3"}, "keep_last"),
        ({"mode": None}, "mode"),
        ({"components": 3}, "components"),
        ({"components": ["model", 3]}, "components"),
        ({"policy": 3}, "policy"),
        ({"policy": ["dtype"]}, "policy"),
        ({"policy": {3: "warn"}}, "policy"),
        ({"policy": {"dtype": ["warn"]}}, "policy"),
        ({"contract": 3}, "contract"),
        ({"contract": "tokenizer"}, "contract"),
        ({"contract": [("a", 1)]}, "contract"),
        ({"contract": {3: 1}}, "contract"),
        ({"contract": {"a": 1, 3: 1}}, "contract"),
    ],
)
def test_a_manager_that_cannot_be_is_refused_before_it_touches_the_run(tmp_path, arguments, words):
    """D10, E01: a mode that is not there is an error of the configuration, not a run without checkpoints."""
    with pytest.raises(InvalidArgument, match=words):
        CheckpointManager(tmp_path / "run", **arguments)
    with pytest.raises(UnsupportedLeaf, match=r"contract\['a'\]"):
        CheckpointManager(tmp_path / "run", contract={"a": object()})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"step": "3"}, "step"),
        ({"step": -1}, "step"),
        ({"reset": 3}, "reset"),
        ({"reset": ["rng"]}, "reset"),
        ({"reset": {3: "a reason"}}, "reset"),
        ({"reset": {"rng": 3}}, "reset"),
        ({"reset": {"rng": " "}}, "reset"),
    ],
)
def test_a_restore_that_cannot_be_is_refused_and_the_live_run_is_left_as_it_is(arguments, words):
    """V12."""
    store, job = MemoryStore(), Job(0)
    with CheckpointManager(store, every=1) as manager:
        job.run(manager, 1)
        other = Job(1)
        before = fingerprint(other.live.capture())
        with pytest.raises(InvalidArgument, match=words):
            manager.restore(other.live, **arguments)
        assert fingerprint(other.live.capture()) == before


@pytest.mark.parametrize("call", ["restore", "step", "save"])
def test_a_manager_takes_a_live_run_and_not_its_model(call):
    with CheckpointManager(MemoryStore()) as manager, pytest.raises(InvalidArgument, match="attach"):
        getattr(manager, call)(nn.Linear(1, 1))


def test_a_contract_is_taken_as_it_was_given():
    """What the caller does with his dictionary later changes no promise."""
    store, contract = MemoryStore(), {"tokenizer": ["a"]}
    state = TrainState(trainer=Progress(1))
    with CheckpointManager(store, contract=contract) as manager:
        contract["tokenizer"].append("b")
        contract["late"] = object()
        manager.save(state)
    assert isinstance(plan(store, like=state, contract={"tokenizer": ["a"]}), ResumePlan)


def test_a_disabled_manager_does_nothing_safely():
    """O07."""
    job = Job(0)
    with DisabledManager() as manager:
        assert manager.restore(job.live).is_fresh
        assert job.run(manager, 3) == []
        assert manager.save(job.live) is None
    manager.close()


def test_a_save_by_value_and_a_save_by_the_manager_are_the_same_checkpoint():
    one, other, job = MemoryStore(), MemoryStore(), Job(0)
    with CheckpointManager(one) as manager:
        managed = manager.save(job.live)
    assert save(job.live.capture(), other).fingerprints == managed.result.fingerprints


def test_a_run_saved_by_value_is_resumed_by_a_manager_and_the_other_way_round():
    """V08: a captured state says of the loop around it what the manager would have said."""
    store, job = MemoryStore(), Job(0)
    job.run(DisabledManager(), 2)
    save(job.live.capture(), store)
    assert isinstance(plan(store, like=Job(0).live.capture()), ResumePlan)
    resumed = Job(1)
    with CheckpointManager(store) as manager:
        assert manager.restore(resumed.live).step == 2
        resumed.run(manager, 3)
        manager.save(resumed.live)
    again = load(store, like=Job(0).live.capture())
    assert again.trainer.step == 3
    assert again.contract == Job(0).live.contract()
    for other, where in ((Job(0, decay=0.5), "weight_decay"), (Job(0, batch_size=2), "batch_size")):
        refusal = plan(store, like=other.live.capture())
        assert any(where in reason.where for reason in refusal.reasons), refusal


def test_what_a_rewind_left_behind_neither_counts_nor_goes():
    """E05: retention is per run and timeline. E16: the left-behind steps are not deleted before they are superseded."""
    store = MemoryStore()
    for step in (100, 200, 300):
        save(TrainState(trainer=Progress(step)), store)
    state = load(store, like=TrainState(trainer=Progress()), step=100)
    with CheckpointManager(store, keep_last=2) as manager:
        for step in (110, 120, 250):
            manager.save(state.evolve(trainer=Progress(step)))
    assert [name for name in store.list("") if name.startswith("step-")] == [
        f"step-{step:08d}" for step in (120, 200, 250, 300)
    ]


def test_a_tree_behind_two_functions_may_have_grown_since_the_run_began():
    """B15: its shape is its owner's: a history that got longer, a best score that was None."""
    store = MemoryStore()
    kept = {"history": [1.0, 2.0], "best": torch.ones(2)}
    live = attach(nn.Linear(1, 1), extra={"log": (lambda: kept, kept.update)})
    live.advance(samples=1)
    with CheckpointManager(store) as manager:
        manager.save(live)
    fresh = {"history": [], "best": None}
    again = attach(nn.Linear(1, 1), extra={"log": (lambda: fresh, fresh.update)})
    with CheckpointManager(store) as manager:
        assert manager.restore(again).step == 1
    assert fresh["history"] == [1.0, 2.0]
    assert torch.equal(fresh["best"], torch.ones(2))
