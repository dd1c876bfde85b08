"""Places and arguments that cannot work: foreign paths, full and read-only disks, planted locks, values that are not states."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import attrs
import pytest
import torch
from kit.backends import bad_input_cases
from kit.backends.bad_input_cases import names_of, refused, says_all, state_at

import trainfold
from trainfold import plans
from trainfold.adapters.cli.verify import verify_checkpoint
from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.backends.runs import load as run_load
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.stores.local import LocalStore
from trainfold.core import errors
from trainfold.core.format.file_names import RUN_FILE
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState

run = bad_input_cases.run


def listing(root):
    """Every name below a folder, with what a write would change."""
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in sorted(root.rglob("*"))}


def test_all_ranks_pass_over_what_one_of_them_cannot_use(run, monkeypatch):
    """V05: what one rank finds damaged or cannot read is so on all; no rank waits for one that has given up."""
    resume = run_load.run_resume

    def failing(plan, like, **more):
        if plan.step == 2 and threading.current_thread().name in failing.threads:
            raise failing.error
        return resume(plan, like, **more)

    def body(world):
        if world.rank == 1:
            failing.threads = {threading.current_thread().name}
        world.gather(None)
        return trainfold.load(run, like=state_at(0), collectives=world).trainer.step

    monkeypatch.setattr(run_load, "run_resume", failing)
    failing.threads = set()
    failing.error = errors.CheckpointHostile("x", expected="a", found="b", fix="c")
    with pytest.warns(CheckpointPassedOver):
        assert run_threads(2, body) == [1, 1]
    failing.error = OSError(errno.ESTALE, "Stale file handle")
    for outcome in thread_outcomes(2, body):
        assert isinstance(outcome.error, errors.ResumeRefused)
        assert "Stale file handle" in str(outcome.error)
        assert "step=1" in str(outcome.error)
    failing.error = errors.InvalidState("like", expected="a", found="b", fix="c")
    seen = []

    def told(world):
        try:
            body(world)
        except errors.TrainfoldError as error:
            seen.append((world.rank, type(error), error.fix))

    run_threads(2, told)
    assert sorted(seen, key=lambda each: each[0]) == [(0, errors.RankFailed, "c"), (1, errors.InvalidState, "c")]


def wrong_place(run, tmp_path, case):
    """A path that a user might give by mistake, and part of the fix."""
    other = tmp_path / "other"
    if case == "a step":
        return run / "step-00000001", "the folder above"
    if case == "latest":
        return run / "latest", "the folder above"
    if case == "runs":
        trainfold.save(state_at(1), tmp_path / "run-b")
        return tmp_path, "name one of them"
    other.mkdir()
    for name in FORMATS[case]:
        (other / name).write_bytes(b"{}")
    return other, "use another folder"


FORMATS = {
    "hugging face": ("config.json", "model.safetensors"),
    "hugging face, sharded": ("config.json", "model.safetensors.index.json"),
    "hugging face, old": ("config.json", "pytorch_model.bin"),
    "torch.save": ("state.pt",),
    "dcp": (".metadata", "__0_0.distcp"),
}


@pytest.mark.parametrize("case", ["a step", "latest", "runs", *FORMATS])
def test_a_path_that_is_no_run_never_starts_one(run, tmp_path, case):
    """V04: several runs in one place raise. V15: the format is detected from disk and must agree with the request."""
    place, fix = wrong_place(run, tmp_path, case)
    before = listing(tmp_path)
    refusal = refused(place)
    assert names_of(refusal) == ["CheckpointForeign"]
    assert fix in str(refusal)
    assert not refusal.refusal.finds_nothing
    with pytest.raises(errors.CheckpointForeign, match=fix) as caught:
        trainfold.save(state_at(5), place)
    says_all(caught.value)
    assert listing(tmp_path) == before
    assert trainfold.load(run, like=state_at(0)).trainer.step == 2


@pytest.mark.parametrize("is_torn", [False, True])
def test_the_place_of_a_checkpoint_in_a_run_never_becomes_a_run(run, is_torn):
    """C03: a run began in it, which was a torn save to the run around it, and deleted as such."""
    place = run / "step-00000009"
    if is_torn:
        place.mkdir()
    before = listing(run)
    with pytest.raises(errors.CheckpointForeign, match=r"in the run .*; name the run, .*: the step of the state names"):
        trainfold.save(state_at(9), place)
    with pytest.raises(errors.CheckpointForeign, match="name the run"), trainfold.CheckpointManager(place) as manager:
        manager.save(state_at(9))
    assert names_of(refused(place)) == ["CheckpointMissing"], "a read makes nothing"
    assert listing(run) == before
    trainfold.save(state_at(9), run.parent / "step-00000009" / "run")  # no run is around it
    trainfold.save(state_at(9), run / "below")


def test_a_folder_with_a_users_own_files_may_become_a_run(tmp_path):
    for name in ("config.json", "train.log", "notes.md", "events.out.tfevents.1"):
        (tmp_path / name).write_text("x")
    (tmp_path / "plots").mkdir()
    assert names_of(refused(tmp_path)) == ["CheckpointMissing"]
    trainfold.save(state_at(1), tmp_path)
    assert trainfold.load(tmp_path, like=state_at(0)).trainer.step == 1


@pytest.mark.parametrize("below", ["", "/run"])
@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_a_path_that_is_a_file_is_refused_with_what_is_wanted(tmp_path, below, kind):
    path = tmp_path / "notes"
    path.symlink_to("nowhere") if kind == "dangling link" else path.write_text("text")
    for work in (
        lambda place: trainfold.save(state_at(1), place),
        lambda place: LocalStore(place).lock().__enter__(),
        lambda place: LocalStore(place).reserve(1),
    ):
        with pytest.raises(errors.CheckpointForeign, match="a directory") as caught:
            work(f"{path}{below}")
        says_all(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == ["notes"]


@pytest.mark.parametrize("kind", ["fifo", "link", "socket", "directory"])
def test_a_lock_that_was_planted_is_refused(run, kind):
    """U04: links and special files."""
    lock = run / ".lock"
    lock.unlink()
    if kind == "fifo":
        os.mkfifo(lock)
    elif kind == "socket":
        os.mknod(lock, 0o600 | stat.S_IFSOCK)
    elif kind == "link":
        lock.symlink_to(run / RUN_FILE)
    else:
        lock.mkdir()
    with pytest.raises(errors.CheckpointHostile, match=r"\.lock") as caught:
        trainfold.save(state_at(3), run)
    says_all(caught.value)
    assert trainfold.load(run, like=state_at(0)).trainer.step == 2
    lock.rmdir() if kind == "directory" else lock.unlink()
    trainfold.save(state_at(3), run)


def test_all_differences_of_a_model_are_listed_at_once(run):
    model = ModelState(
        Leaves({"w": torch.zeros(2, 3), "b": torch.zeros(3, dtype=torch.float16), "new": torch.zeros(1)}), Leaves()
    )
    error = refused(run, like=state_at(0).evolve(model=model))
    assert {reason.kind for reason in error.refusal.reasons} == {"shape", "dtype", "missing"}
    assert all(name in str(error) for name in ("model.params['w']", "model.params['b']", "model.params['new']"))


def test_an_unknown_component_is_refused(run):
    for work in (trainfold.load, trainfold.plan):
        with pytest.raises(errors.UnknownComponent, match="optimiser") as caught:
            work(run, like=state_at(0), components=["optimiser"])
        says_all(caught.value)
    with pytest.raises(errors.UnknownComponent, match="optimiser") as caught:
        trainfold.save(state_at(3), run, components=["optimiser"])
    says_all(caught.value)


def test_a_donated_state_is_not_saved(run):
    model = torch.nn.Linear(2, 2)
    sgd = trainfold.optimizer(torch.optim.SGD, lr=0.1)
    step = trainfold.make_step(
        model, lambda model, batch: trainfold.Loss(sum=model(batch).sum(), weight=1), sgd, donate=True
    )
    old = trainfold.init_state(model, sgd, seed=0)
    step(old, torch.ones(1, 2))
    with pytest.raises(errors.StateDonated) as caught:
        trainfold.save(old, run)
    says_all(caught.value)
    assert trainfold.load(run, like=state_at(0)).trainer.step == 2


def test_a_state_without_a_step_cannot_be_saved(run):
    with pytest.raises(errors.InvalidState, match="trainer"):
        trainfold.save(attrs.evolve(state_at(1), trainer=None), run)


def test_two_processes_saving_into_one_run_do_not_mix(run):
    """One of them gets RunLocked with the other's process id, and what is there stays whole."""
    code = (
        "import sys, time\nfrom trainfold.backends.stores.local import LocalStore\n"
        "with LocalStore(sys.argv[1]).lock():\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(errors.RunLocked, match=str(holder.pid)) as caught:
            trainfold.save(state_at(3), run)
        says_all(caught.value)
        assert trainfold.load(run, like=state_at(0)).trainer.step == 2
        holder.kill()
    trainfold.save(state_at(3), run)
    assert trainfold.load(run, like=state_at(0)).trainer.step == 3


def mounted(tmp_path, options):
    """A small tmpfs, or the reason why there is none here."""
    place = tmp_path / "mount"
    place.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small filesystem needs root")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.decode().strip()}")
    return place


def test_a_full_disk_is_found_before_anything_is_written(tmp_path):
    """C15: disk-full fails the save and keeps the old checkpoint; here before a byte is written."""
    place = mounted(tmp_path, "size=3m")
    try:
        trainfold.save(state_at(1), place / "run")
        big = state_at(2).evolve(extra={"ema": {"w": torch.zeros(2_000_000)}})
        with pytest.raises(errors.NoSpace) as caught:
            trainfold.save(big, place / "run")
        says_all(caught.value)
        assert not (place / "run" / "step-00000002").exists()
        assert fingerprint(trainfold.load(place / "run", like=state_at(0))) == fingerprint(state_at(1))
        trainfold.save(state_at(3), place / "run")
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_read_only_directory_is_named(tmp_path):
    """C15: permission errors fail the save; the existing checkpoints can still be loaded."""
    place = mounted(tmp_path, "size=8m")
    try:
        trainfold.save(state_at(1), place / "run")
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        with pytest.raises(errors.NotWritable) as caught:
            trainfold.save(state_at(2), place / "run")
        says_all(caught.value)
        assert trainfold.load(place / "run", like=state_at(0)).trainer.step == 1
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize(
    "path",
    ["", "a\0b", "\ud800", "x" * 300, "/".join(["x" * 200] * 30), None, 5, b"run"],
    ids=lambda path: repr(path)[:9],
)
def test_a_path_that_cannot_be_one_is_an_argument_that_cannot_work(tmp_path, path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    works = [
        lambda: trainfold.save(state_at(1), path),
        lambda: trainfold.plan(path, like=state_at(0)),
        lambda: trainfold.load(path, like=state_at(0)),
        lambda: trainfold.CheckpointManager(path, every=1),
    ]
    for work in works:
        with pytest.raises(errors.InvalidArgument) as caught:
            work()
        says_all(caught.value)
    assert not list(tmp_path.iterdir())
    if path and isinstance(path, str):
        with pytest.raises(errors.TrainfoldError) as caught:
            verify_checkpoint(Path(path))
        says_all(caught.value)


@pytest.mark.parametrize("state", [None, {}, torch.nn.Linear(1, 1)], ids=["none", "dict", "module"])
def test_what_is_no_state_is_refused_before_anything_is_touched(tmp_path, state):
    works = {
        "state": lambda: trainfold.save(state, tmp_path / "run"),
        "like": lambda: trainfold.load(tmp_path / "run", like=state),
        "like ": lambda: trainfold.plan(tmp_path / "run", like=state),
    }
    for argument, work in works.items():
        with pytest.raises(errors.InvalidArgument, match=f"{argument.strip()}: expected a TrainState") as caught:
            work()
        says_all(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_store_of_a_path_is_local(tmp_path):
    assert LocalStore(tmp_path / "x").url.endswith("x")


@pytest.mark.parametrize("call", [trainfold.plan, trainfold.load])
@pytest.mark.parametrize(
    "given",
    [
        {"policy": 3}, {"policy": {3: "warn"}}, {"policy": {"dtype": 3}}, {"policy": {"dtype": []}}, {"reset": 3},
        {"reset": {3: "x"}}, {"reset": {"rng": 3}}, {"components": 3}, {"components": [3]}, {"step": "1"}, {"contract": 3},
        {"contract": {3: 1}},
    ],
)  # fmt: skip
def test_an_argument_of_another_kind_is_refused_by_name(run, call, given):
    with pytest.raises(errors.InvalidArgument, match=next(iter(given))):
        call(run, like=state_at(2), **given)


@pytest.mark.parametrize("given", [{"components": 3}, {"components": [3]}, {"contract": 3}])
def test_a_save_refuses_an_argument_of_another_kind_and_writes_nothing(tmp_path, given):
    with pytest.raises(errors.InvalidArgument, match=next(iter(given))):
        trainfold.save(state_at(2), tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_the_parts_of_a_load_take_a_path_as_load_does(tmp_path):
    """A path, or the store of it; anything else is an InvalidArgument with the four fields."""
    trainfold.save(state_at(3), tmp_path / "run")
    for run in (str(tmp_path / "run"), tmp_path / "run", LocalStore(tmp_path / "run")):
        request, target = plans.resume_request(), plans.resume_target(state_at(0))
        inventory = plans.examined(run, plans.read_inventory(run), request, target.components)
        assert plans.run_resume(plans.plan_resume(inventory, target, request), state_at(0), store=run).trainer.step == 3
    for call in (plans.read_inventory, lambda run: plans.begin_checkpoint(run, 4)):
        with pytest.raises(errors.InvalidArgument) as refused:
            call(7)
        assert all((refused.value.where, refused.value.expected, refused.value.found, refused.value.fix))
    with pytest.raises(errors.InvalidArgument, match="LocalStore"):
        plans.begin_checkpoint(str(tmp_path / "run"), 4)
