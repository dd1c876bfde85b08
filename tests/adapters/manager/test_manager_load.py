"""A manager loads what it reports as loadable; it skips and counts bad checkpoints, and never deletes them (O01, P07)."""

import os
import signal

import attrs
import pytest
import torch
from torch import nn

import trainfold
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.decide_best import decide_best
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.best.best_file import save_best
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.best.record import make_best_record
from trainfold.core.errors import CheckpointDamaged, InvalidArgument, InvalidState, ResumeRefused
from trainfold.core.resume.resume_plan import Refusal
from trainfold.core.state.state import Progress, TrainState


def state_at(step):
    return TrainState(trainer=Progress(step=step), extra={"w": torch.full((64,), float(step))})


def damage(folder, step):
    """Flip one byte of a checkpoint's tensors."""
    (file,) = (folder / f"step-{step:08d}").glob("w-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    for step in (1, 2, 3):
        trainfold.save(state_at(step), folder)
    return folder


def test_a_manager_says_what_it_can_load_and_loads_it(run):
    """O01: whether it can load, from where, and how; the answer loads nothing."""
    with CheckpointManager(run) as manager:
        found = manager.should_load(state_at(0))
        assert (bool(found), found.checkpoint, found.step, found.source) == (True, "step-00000003", 3, "newest")
        assert manager.load(state_at(0), found).extra["w"][0] == 3.0
        older = manager.should_load(state_at(0), step=2)
        assert manager.load(state_at(0), older).trainer.step == 2
        missing = manager.should_load(state_at(0), step=9)
        assert not missing
        with pytest.raises(InvalidArgument, match="decision"):
            manager.load(state_at(0), missing)


def test_why_nothing_is_loaded_is_logged_where_checkpoints_are_there(run, tmp_path, caplog):
    """A loop that asks `if manager.should_load(state)` starts from scratch where its checkpoints are refused; its first save was refused, rounds later, without the reason."""
    with CheckpointManager(tmp_path / "new") as manager:
        assert not manager.should_load(state_at(0))
        assert not manager.should_load(state_at(0), step=9)
    assert not caplog.records  # nothing is there: a fresh start is expected
    other = TrainState(trainer=Progress(), extra={"w": torch.zeros(8)})
    with CheckpointManager(run) as manager:
        decision = manager.should_load(other)
    assert not decision
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(run) in record.getMessage()
    assert str(decision) in record.getMessage()
    assert "saved float32[64], wanted float32[8]" in record.getMessage()


def test_what_is_loaded_is_what_was_decided(run):
    """O01: an outdated decision is refused, and nothing else is loaded in its place."""
    with CheckpointManager(run) as manager:
        stale, older = manager.should_load(state_at(0)), manager.should_load(state_at(0), step=1)
        manager.load(state_at(0))
        manager.save(state_at(4))
        with pytest.raises(InvalidArgument, match=r"step-00000003.*step-00000004"):
            manager.load(state_at(0), stale)
        assert manager.load(state_at(0), older).trainer.step == 1
        for foreign in (attrs.evolve(older, source="peer"), attrs.evolve(older, step=None), True):
            with pytest.raises(InvalidArgument, match="decision"):
                manager.load(state_at(0), foreign)


def test_a_decision_waits_for_the_save_under_way():
    """O01: otherwise the run would change right after the decision."""
    with CheckpointManager(MemoryStore(), mode="async") as manager:
        for step in (1, 2):
            manager.save(state_at(step))
        decision = manager.should_load(state_at(0))
        assert (decision.step, decision.reason) == (2, "")
        assert manager.load(state_at(0), decision).trainer.step == 2


def test_a_manager_of_an_empty_run_can_load_nothing():
    with CheckpointManager(MemoryStore()) as manager:
        assert not manager.should_load(state_at(0))
        with pytest.raises(ResumeRefused):
            manager.load(state_at(0))


def test_a_live_run_is_written_in_place(tmp_path):
    model = nn.Linear(2, 1)
    live = attach(model)
    live.advance(samples=1)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(live)
        with torch.no_grad():
            model.weight.fill_(7.0)
        restored = manager.load(live, manager.should_load(live))
        assert (restored.step, restored.is_fresh) == (1, False)
        assert not (model.weight == 7.0).any()
        assert manager.step(live, is_last=True) is None, "what was resumed from is saved already (M49)"


def test_the_best_weights_come_back_and_nothing_else(tmp_path):
    """E15: optimizer, counters and random state stay as at the end of the run; the result names the step of the weights."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    live, store, best = attach(model, optimizer), LocalStore(tmp_path / "run"), {}
    record = make_best_record(metric="loss", direction="min")
    with CheckpointManager(store, every=1) as manager:
        with pytest.raises(InvalidState, match="save_best"):
            manager.load_best(live)
        for score in (3.0, 1.0, 2.0):
            model(torch.randn(4, 2)).sum().backward()
            optimizer.step()
            live.advance(samples=4)
            manager.step(live)
            record, won = decide_best(record, {"loss": score}, step=live.progress.step)
            if won:
                record = save_best(store, record)
                best = {name: value.clone() for name, value in model.state_dict().items()}
        before = trainfold.fingerprint(live.capture())
        assert manager.load_best(live).step == 2
        after = trainfold.fingerprint(live.capture())
    assert all(torch.equal(best[name], value) for name, value in model.state_dict().items())
    assert {name for name in before if before[name] != after[name]} == {"model"}


def test_what_is_damaged_is_passed_over_loudly_and_stays_in_quarantine(run):
    """P07, V03: the next older one is used; the bad one is neither deleted nor tried again."""
    damage(run, 3)
    with CheckpointManager(run, keep_last=2) as manager:
        decision = manager.should_load(state_at(0))
        assert decision.step == 3, "no load has read its bytes yet"
        with pytest.warns(CheckpointPassedOver):
            assert manager.load(state_at(0), decision).trainer.step == 2
        with pytest.warns(CheckpointPassedOver, match="Quarantined"):
            assert manager.load(state_at(0)).trainer.step == 2
        assert manager.should_load(state_at(0)).step == 2
        with pytest.raises(CheckpointDamaged):
            manager.load(state_at(0), manager.should_load(state_at(0), step=3))
    with pytest.warns(CheckpointPassedOver, match="Quarantined"):
        assert trainfold.load(run, like=state_at(0)).trainer.step == 2
    assert not isinstance(trainfold.plan(run, like=state_at(0)), Refusal)
    assert (run / "step-00000003").exists()


def test_a_quarantined_checkpoint_neither_counts_nor_protects(run):
    """E01: a budget of two means two loadable checkpoints."""
    damage(run, 3)
    with CheckpointManager(run, keep_last=2) as manager:
        with pytest.warns(CheckpointPassedOver):
            manager.load(state_at(0))
        manager.save(state_at(4))
    left = sorted(path.name for path in run.glob("step-*"))
    assert left == ["step-00000002", "step-00000003", "step-00000004"]


def test_a_step_that_is_saved_again_is_free_again(run):
    damage(run, 3)
    with CheckpointManager(run) as manager:
        with pytest.warns(CheckpointPassedOver):
            manager.load(state_at(0))
        manager.save(state_at(3))
        assert manager.load(state_at(0)).trainer.step == 3


def die_in_loading(run):
    """A process that takes the lock, begins to load the newest, and is killed."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        manager = CheckpointManager(run)
        trainfold.backends.runs.load.run_resume = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        manager.load(state_at(0))
    finally:
        os._exit(3)


def test_a_checkpoint_that_kills_its_loader_is_given_up_after_three_deaths(run):
    """P07: the run counts the deaths across processes; the fourth process uses the next older checkpoint."""
    for _ in range(3):
        with CheckpointManager(run) as manager:
            assert manager.should_load(state_at(0)).step == 3
        assert die_in_loading(run) == -signal.SIGKILL
    with CheckpointManager(run) as manager:
        assert manager.should_load(state_at(0)).step == 2
        with pytest.warns(CheckpointPassedOver, match="died"):
            assert manager.load(state_at(0)).trainer.step == 2


def test_a_load_that_succeeds_forgets_the_deaths_before_it(run):
    for _ in range(2):
        assert die_in_loading(run) == -signal.SIGKILL
    with CheckpointManager(run) as manager:
        assert manager.load(state_at(0)).trainer.step == 3
    for _ in range(2):
        assert die_in_loading(run) == -signal.SIGKILL
    with CheckpointManager(run) as manager:
        assert manager.load(state_at(0)).trainer.step == 3


def test_an_interrupted_load_is_no_death(run, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    for _ in range(4):
        with CheckpointManager(run) as manager, monkeypatch.context() as patched:
            patched.setattr("trainfold.backends.runs.load.run_resume", interrupt)
            with pytest.raises(KeyboardInterrupt):
                manager.load(state_at(0))
    with CheckpointManager(run) as manager:
        assert manager.load(state_at(0)).trainer.step == 3


def test_all_ranks_load_the_same_and_agree_on_what_they_can(run):
    damage(run, 3)
    store = LocalStore(run)

    def body(world):
        with CheckpointManager(store, collectives=world) as manager:
            found = manager.load(state_at(0), manager.should_load(state_at(0))).trainer.step
            return found, manager.should_load(state_at(0)).step

    with pytest.warns(CheckpointPassedOver):
        assert run_threads(3, body) == [(2, 2)] * 3
