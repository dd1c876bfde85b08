"""The manager saves when due, resumes exactly, keeps the last few checkpoints, and leaves everything else unchanged."""

import logging
import subprocess

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.adapters.manager.manager_cases import Job, steps_of
from kit.depth import IS_DEEP

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import load, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import (
    CheckpointError,
    CheckpointForeign,
    CheckpointHostile,
    IncompleteWindow,
    ResumeRefused,
)
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.layout.data_parallel import Replicas
from trainfold.core.save.triggers import should_save
from trainfold.core.state.state import Progress, TrainState

pytestmark = pytest.mark.slow(0.15)


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
    """V13: the same through files, at an epoch's end and inside an epoch."""
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
    """O06: the rule alone: each attempt continues from the newest checkpoint; the cadence counts from step 0."""

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


@pytest.mark.parametrize(
    ("every", "kills"), [(4, [3, 9, 13]), (5, [7, 7, 12]), *([(4, [6]), (3, [8, 10])] if IS_DEEP else [])]
)
@pytest.mark.parametrize("farewell", [False, True])
@pytest.mark.parametrize("keep_last", [None, 1])
def test_an_interrupted_run_saves_the_steps_that_an_uninterrupted_one_saves(every, kills, farewell, keep_last):
    """V14: killed between two saves; except for the last save of a run that was asked to stop, the saved steps are the same."""
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


def test_ranks_with_other_numbers_of_microbatches_save_at_the_same_steps():
    """P31: what is due is counted in optimizer steps, so no rank is at a boundary where another is not."""
    store = MemoryStore()

    def work(world):
        live = attach(torch.nn.Flatten(), parallelism=Replicas(world))
        with CheckpointManager(store, every=2, collectives=world) as manager:
            done = []
            for _ in range(5):
                for _ in range(world.rank):
                    live.advance(samples=0, steps=0)
                    assert manager.step(live) is None
                live.advance(samples=0)
                done.append(manager.step(live))
        return [each.step for each in done if each is not None]

    assert run_threads(3, work) == [[2, 4]] * 3
    assert steps_of(store) == [2, 4]


class Server:
    """It hands out units of work, and hands out again what was not acknowledged when its client has gone."""

    def __init__(self):
        self.acknowledged = self.at = 0

    def connect(self, done):
        self.acknowledged = self.at = max(self.acknowledged, done)

    def take(self):
        self.at += 1
        return self.at


@given(kills=st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=3), mode=st.sampled_from(["sync", "async"]))
@settings(max_examples=25)
def test_units_of_work_that_a_server_hands_out_are_done_once(kills, mode):
    """G09: the position is the server's, so a resume draws and skips nothing; what it acknowledges is what a durable checkpoint has."""
    store, server = MemoryStore(), Server()

    def run(until, *, hears):
        """Work until a step, and be killed there, or to the end; a client that is killed may not hear that its save is durable."""
        units = []
        notes = (lambda: {"units": units}, lambda saved: units.extend(saved["units"]))
        live = attach(torch.nn.Linear(1, 1, bias=False), extra={"notes": notes})

        def on_event(event):
            if event.kind == "committed" and hears:
                server.acknowledged = event.step  # a unit a step

        with CheckpointManager(store, every=2, mode=mode, on_event=on_event) as manager:
            manager.restore(live)
            assert server.acknowledged <= live.progress.step
            server.connect(live.progress.step)
            while live.progress.step < until:
                units.append(server.take())
                live.advance(samples=1)
                manager.step(live)
            if until == 9:
                manager.finish(live)
        return units

    for steps, hears in kills:
        run(min(8, server.acknowledged + steps), hears=hears)
    assert run(9, hears=True) == list(range(1, 10))
    assert server.acknowledged == 9


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


def test_a_fresh_start_is_said_to_whoever_configured_no_logging(warm_python, tmp_path):
    """Once, on standard error: a resume that finds nothing usually has a mistyped path."""
    code = (
        "import sys, torch, trainfold\n"
        "with trainfold.CheckpointManager(sys.argv[1]) as manager:\n"
        "    manager.restore(trainfold.attach(torch.nn.Linear(1, 1)))"
    )
    done = subprocess.run(
        warm_python.command("-c", code, tmp_path / "typo"), capture_output=True, text=True, check=True, timeout=120
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
    """R09: no older checkpoint can help; the manifests contain the id, so the fix prints the complete file."""
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
    """V02: only an empty run starts fresh; a checkpoint of a newer version, or a damaged one, makes it non-empty."""
    save(TrainState(trainer=Progress(step=1)), tmp_path)
    manifest = tmp_path / "step-00000001" / "manifest.json"
    good = manifest.read_bytes()
    for bad in (good.replace(b'"schema_version":1', b'"schema_version":9'), b"", b"{}", good[:-9]):
        manifest.write_bytes(bad)
        with CheckpointManager(tmp_path) as manager, pytest.raises(ResumeRefused):
            manager.restore(Job(0).live)


def test_what_a_killed_first_save_left_behind_is_a_fresh_start_too(tmp_path):
    """C02: torn directories are neither a run to resume nor a reason to refuse."""
    torn = tmp_path / "run" / "step-00000005"
    torn.mkdir(parents=True)
    (torn / "model-00000-of-00001.safetensors").write_bytes(b"half of it")
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.restore(Job(0).live).is_fresh


def test_an_explicit_step_that_is_not_there_is_an_error():
    """V02."""
    with CheckpointManager(MemoryStore()) as manager, pytest.raises(ResumeRefused):
        manager.restore(Job(0).live, step=7)
