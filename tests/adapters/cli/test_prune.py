"""`trainfold prune` deletes what a manager's retention would delete, never without the lock; --dry-run only lists it."""

import os
import shutil

import pytest
from kit.adapters import cli_cases
from kit.adapters.cli_cases import flip, state_at

from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.api import save
from trainfold.backends.runs.best.best_file import save_best
from trainfold.backends.runs.quarantine_file import begin_attempt
from trainfold.backends.stores.local import LocalStore
from trainfold.core.best.record import make_best_record, updated
from trainfold.core.history.quarantine import LIMIT
from trainfold.core.save.retention import keep_best, keep_every, keep_last, keep_newer
from trainfold.core.state.state import Progress, TrainState

call = cli_cases.call
answered = cli_cases.answered


def steps_of(run):
    return sorted(int(path.name[5:]) for path in run.glob("step-*"))


def small_run(path, *steps):
    for step in steps:
        save(TrainState(trainer=Progress(step=step)), path)
    return path


def files_of(run):
    return {path.relative_to(run): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


@pytest.fixture
def run(tmp_path):
    return small_run(tmp_path / "a", 10, 20, 30, 40, 50)


def test_a_dry_run_prints_the_plan_and_changes_no_byte(run, call, answered):
    before = files_of(run)
    out, err = call("prune", run, "--keep-last", "2", "--dry-run")
    rows = {line.split()[0]: line.split()[1] for line in out.splitlines()[2:]}
    assert rows == {
        "step-00000010": "goes", "step-00000020": "goes", "step-00000030": "goes", "step-00000040": "stays", "step-00000050": "stays"
    }  # fmt: skip
    assert "would free" in out
    assert err == ""
    found, _ = answered("prune", run, "--keep-last", "2", "--dry-run")
    assert found["dry_run"] is True
    assert [each["name"] for each in found["deleted"]] == ["step-00000010", "step-00000020", "step-00000030"]
    assert found["kept"][-1] == {"name": "step-00000050", "why": ["the newest", "the pointer latest", "the last 2"]}
    assert files_of(run) == before


def test_what_a_dry_run_announces_is_what_is_deleted_and_freed(run, answered):
    announced, _ = answered("prune", run, "--keep-every", "20", "--dry-run")
    sizes = {
        name: sum(path.stat().st_size for path in (run / name).iterdir()) for name in ("step-00000010", "step-00000030")
    }
    done, _ = answered("prune", run, "--keep-every", "20")
    assert {each["name"]: each["size_bytes"] for each in done["deleted"]} == sizes
    assert done["freed_bytes"] == sum(sizes.values())
    assert {**announced, "dry_run": False} == done
    assert steps_of(run) == [20, 40, 50]
    again, _ = answered("prune", run, "--keep-every", "20")
    assert again["deleted"] == []


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        (["--keep-last", "1"], keep_last(1)),
        (["--keep-every", "20"], keep_every(20)),
        (["--keep-last", "1", "--keep-every", "20"], keep_last(1) | keep_every(20)),
        (["--keep-last", "0"], keep_last(0)),
        (["--keep-best", "2"], keep_best(2, direction="min")),
        (["--keep-newer", "1h"], keep_newer(3600)),
    ],
)
def test_a_rule_keeps_what_the_same_rule_of_a_manager_keeps(run, answered, tmp_path, options, policy):
    """E07: the command is the manager's retention, with the newest checkpoint as the one just written."""
    record = make_best_record(metric="loss", direction="min")
    save_best(LocalStore(run), updated(record, {"loss": 0.5}, step=20))
    os.utime(run / "step-00000010" / "manifest.json", (1, 1))
    mine = tmp_path / "mine"
    shutil.copytree(run, mine, symlinks=True)
    with CheckpointManager(run, keep=policy) as manager:  # whose next save is the newest
        manager.load(state := TrainState(trainer=Progress()), manager.should_load(state))
        manager.save(TrainState(trainer=Progress(step=60)))
    small_run(mine, 60)
    answered("prune", mine, *options)
    assert steps_of(mine) == steps_of(run)


def test_a_run_that_a_program_saves_into_is_refused_and_left_alone(run, answered):
    """C12: only the holder of the lock deletes."""
    before = files_of(run)
    with LocalStore(run).lock():
        _, error = answered("prune", run, "--keep-last", "1", code=33)
        assert "another run" not in error["fix"]
        assert "with block" not in error["fix"]
        answered("prune", run, "--keep-last", "1", "--dry-run")
    assert {name: data for name, data in files_of(run).items() if name.name != ".lock"} == {
        name: data for name, data in before.items() if name.name != ".lock"
    }


def test_advice_about_a_value_is_for_a_command_line(run, answered):
    """A command line has no None."""
    for option, value in (
        ("--keep-last", "-1"),
        ("--left-behind-last", "-1"),
        ("--keep-every", "0"),
        ("--keep-best", "0"),
    ):
        save_best(LocalStore(run), updated(make_best_record(metric="loss", direction="min"), {"loss": 1.0}, step=50))
        _, error = answered("prune", run, "--keep-newer", "7d", option, value, code=2)
        assert "None" not in str(error)
        assert error["where"] == f"trainfold prune {option}"
        assert error["fix"].startswith("give ")


def test_no_rule_a_wrong_value_and_a_best_that_is_not_there_are_refused(run, call):
    for options in ([], ["--dry-run"], ["--left-behind-last", "1"], ["--keep-best", "1"], ["--keep-every", "0"],
                    ["--keep-last", "-1"], ["--keep-last", "1.5"], ["--keep-newer", "7"]):  # fmt: skip
        _, err = call("prune", run, *options, code=2)
        assert "fix" in err, options
    assert steps_of(run) == [10, 20, 30, 40, 50]


def test_a_newest_checkpoint_that_is_torn_protects_nothing(run, answered):
    """E05: if the newest is torn, the newest complete one stays, whatever number the rule allows."""
    next((run / "step-00000050").glob("manifest.json")).write_bytes(b"{}")
    save(state_at(60), run)
    next((run / "step-00000060").glob("model-*")).unlink()
    for _ in range(LIMIT):
        begin_attempt(LocalStore(run), "step-00000040")
    found, _ = answered("prune", run, "--keep-last", "1")
    assert [each["name"] for each in found["deleted"]] == ["step-00000010", "step-00000020"]
    assert steps_of(run) == [30, 40, 50, 60], "what is damaged, torn or in quarantine is not deleted"
    assert answered("plan", run)[0]["checkpoint"] == "step-00000030"


def test_a_damaged_newest_checkpoint_is_never_the_only_one_left(tmp_path, call, answered):
    """The sizes of its files do not show a flipped bit: it is read whole before the others go."""
    run = tmp_path / "b"
    for step in (1, 2, 3):
        save(state_at(step), run)
    flip(next((run / "step-00000003").glob("model-*")))
    before = files_of(run)
    for options in (["--dry-run"], []):
        found, error = answered("prune", run, "--keep-last", "1", *options, code=14)
        assert error["kind"] == "CheckpointDamaged"
        why = {each["name"]: each["why"] for each in found["left_alone"]}
        assert list(why) == ["step-00000001", "step-00000002", "step-00000003"]
        assert "CheckpointDamaged" in why["step-00000003"]
        assert (found["kept"], found["deleted"], found["freed_bytes"]) == ([], [], 0)
    assert {path: data for path, data in files_of(run).items() if path in before} == before
    out, _ = call("prune", run, "--keep-last", "1", code=14)
    assert out.count("stays") == 3


def test_what_a_killed_save_has_left_goes(run, answered):
    torn = run / "step-00000015"
    torn.mkdir()
    (torn / "model-00000-of-00001.safetensors").write_bytes(b"half")
    found, _ = answered("prune", run, "--keep-last", "0")
    assert found["torn"] == [{"name": "step-00000015", "size_bytes": 4}]
    assert not torn.exists()


def test_what_may_be_a_save_under_way_stays_and_is_listed_with_the_reason(run, call, answered):
    """C12: a directory newer than every complete checkpoint may be one that ranks still write into."""
    torn = run / "step-00000060"
    torn.mkdir()
    (torn / "model-00000-of-00001.safetensors").write_bytes(b"half")
    for options in (["--dry-run"], []):
        found, _ = answered("prune", run, "--keep-last", "1", *options)
        assert [each["name"] for each in found["left_alone"]] == ["step-00000060"]
        assert "the next save removes what did not finish" in found["left_alone"][0]["why"]
        assert torn.exists()
    out, _ = call("prune", run, "--keep-last", "1")
    assert [line.split()[:2] for line in out.splitlines()[2:]] == [
        ["step-00000050", "stays"],
        ["step-00000060", "stays"],
    ]
    small_run(run, 70)
    assert answered("prune", run, "--keep-last", "1")[0]["torn"] == [{"name": "step-00000060", "size_bytes": 4}]


def test_a_damaged_checkpoint_that_no_rule_counts_is_listed_with_what_is_wrong(run, answered):
    """E05: it stays, and the reason is listed."""
    next((run / "step-00000050").glob("manifest.json")).write_bytes(b"{}")
    save(state_at(60), run)
    next((run / "step-00000060").glob("model-*")).unlink()
    for _ in range(LIMIT):
        begin_attempt(LocalStore(run), "step-00000040")
    found, _ = answered("prune", run, "--keep-last", "1", "--dry-run")
    why = {each["name"]: each["why"].partition(":")[0] for each in found["left_alone"]}
    assert why["step-00000040"] == "CheckpointQuarantined"
    assert why["step-00000060"] == "CheckpointTorn"
    assert set(why) == {"step-00000040", "step-00000050", "step-00000060"}
    assert [each["name"] for each in found["kept"]] == ["step-00000030"]


def test_checkpoints_that_a_rewind_has_left_behind_stay_without_a_rule_for_them(run, answered):
    """E16: the present lineage is pruned; the others have their own rules."""
    with CheckpointManager(run) as manager:
        state = TrainState(trainer=Progress())
        state = manager.load(state, manager.should_load(state, step=20))
        manager.save(state.evolve(trainer=Progress(step=60)))
    answered("prune", run, "--keep-last", "1")
    assert steps_of(run) == [30, 40, 50, 60]
    found, _ = answered("prune", run, "--keep-last", "1", "--left-behind-last", "1")
    assert [each["name"] for each in found["deleted"]] == ["step-00000030", "step-00000040"]


def test_runs_without_a_complete_checkpoint_and_places_that_are_no_run_are_refused(tmp_path, run, answered):
    answered("prune", tmp_path / "nothing", "--keep-last", "1", code=11)
    for path in run.glob("*/manifest.json"):
        path.unlink()
    answered("prune", run, "--keep-last", "1", code=12)
    assert steps_of(run) == [10, 20, 30, 40, 50]


def test_a_best_that_cannot_be_read_stops_the_command(run, answered):
    """E02: otherwise the checkpoint that it names could be deleted."""
    save_best(LocalStore(run), updated(make_best_record(metric="loss", direction="min"), {"loss": 0.5}, step=20))
    flip(run / "best.json")
    answered("prune", run, "--keep-last", "1", code=14)
    assert steps_of(run) == [10, 20, 30, 40, 50]
