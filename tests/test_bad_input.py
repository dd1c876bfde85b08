"""What a run on a real disk answers to bad input: a named error with the place and the mend, and nothing is touched."""

import json
import os
import shutil
import subprocess
import sys

import attrs
import pytest
import torch

import trainfold
from trainfold.backends.inventory import RUN_FILE
from trainfold.backends.local import LocalStore
from trainfold.backends.runs import CheckpointPassedOver
from trainfold.core import errors
from trainfold.core.codec import digest_of
from trainfold.core.fingerprint import fingerprint
from trainfold.core.leaves import Leaves
from trainfold.core.manifest import END, TAIL
from trainfold.core.state import ModelState, OptimizerState, ParamGroup, Progress, TrainState

MODEL = "model-00000-of-00001.safetensors"


def state_at(step):
    model = ModelState(Leaves({"w": torch.full((64, 3), float(step)), "b": torch.zeros(3)}), Leaves())
    slots = Leaves({"w": {"exp_avg": torch.full((64, 3), float(step))}})
    optimizer = OptimizerState("torch.optim.sgd.SGD", slots, (ParamGroup({"lr": 0.1}, ("w", "b")),))
    return TrainState(model=model, optimizer=optimizer, trainer=Progress(step))


@pytest.fixture
def run(tmp_path):
    for step in (1, 2):
        trainfold.save(state_at(step), tmp_path / "run")
    return tmp_path / "run"


def refused(run, like=None, **request):
    """The refusal, after checking that the target was left alone and that every reason says what to do."""
    like = state_at(0) if like is None else like
    before = fingerprint(like)
    with pytest.raises(errors.ResumeRefused) as caught:
        trainfold.load(run, like=like, **request)
    assert fingerprint(like) == before
    for reason in caught.value.refusal.reasons:
        assert reason.where
        assert getattr(reason, "mend", "policy")
    return caught.value


def names_of(error):
    return [getattr(reason, "error", getattr(reason, "kind", None)) for reason in error.refusal.reasons]


def edit_manifest(path, change):
    """Change a manifest and give it a digest that fits, as somebody would who means harm."""
    data = path.read_bytes()
    document = json.loads(data)
    change(document)
    document.pop("digest")
    head = ["format", "schema_version", "run_id", "step", "timeline", "forks", "parent", "revision"]
    first = json.dumps({key: document.pop(key) for key in head}, separators=(",", ":"))[:-1].encode()
    covered = first + b",\n" + json.dumps(document, separators=(",", ":"))[1:-1].encode()
    path.write_bytes(covered + TAIL + digest_of(covered).encode() + END)


def test_a_missing_run_an_empty_folder_and_an_empty_run(tmp_path):
    assert names_of(refused(tmp_path / "nowhere")) == ["CheckpointMissing"]
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "empty").mkdir()
    assert names_of(refused(tmp_path / "empty")) == ["CheckpointMissing"]
    (tmp_path / "empty" / RUN_FILE).write_text('{"format":"trainfold-run","version":1,"run_id":"a"}')
    assert names_of(refused(tmp_path / "empty")) == ["RunEmpty"]


def test_a_torn_checkpoint_is_passed_over_and_refused_when_asked_for(run):
    """C01, C02: a directory without its manifest is no checkpoint."""
    (run / "step-00000002" / "manifest.json").unlink()
    with pytest.warns(CheckpointPassedOver, match="did not finish"):
        assert trainfold.load(run, like=state_at(0)).trainer.step == 1
    assert names_of(refused(run, step=2)) == ["CheckpointTorn"]


@pytest.mark.parametrize("size", [0, 7, 8, 4096, 4100])
def test_a_truncated_file_is_found_before_anything_is_read(run, size):
    os.truncate(run / "step-00000002" / MODEL, size)
    assert names_of(refused(run, step=2)) == ["CheckpointTorn"]
    with pytest.warns(CheckpointPassedOver):
        assert trainfold.load(run, like=state_at(0)).trainer.step == 1


def test_a_flipped_bit_in_the_data_is_found_by_its_digest(run):
    path = run / "step-00000002" / MODEL
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10
    path.write_bytes(data)
    like = state_at(0)
    before = fingerprint(like)
    with pytest.raises(errors.CheckpointDamaged) as caught:
        trainfold.load(run, like=like, step=2)
    assert MODEL in caught.value.where
    assert caught.value.mend
    assert fingerprint(like) == before
    with pytest.warns(CheckpointPassedOver):
        assert trainfold.load(run, like=like).trainer.step == 1


def test_a_flipped_bit_in_the_manifest_is_found(run):
    path = run / "step-00000002" / "manifest.json"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x01
    path.write_bytes(data)
    assert names_of(refused(run, step=2)) == ["CheckpointDamaged"]


def test_a_future_checkpoint_and_a_future_run_are_refused_by_name(run):
    edit_manifest(run / "step-00000002" / "manifest.json", lambda document: document.update(schema_version=99))
    assert names_of(refused(run, step=2)) == ["FutureVersion"]
    (run / RUN_FILE).write_text('{"format":"trainfold-run","version":7,"run_id":"a"}')
    assert names_of(refused(run)) == ["FutureVersion"]
    with pytest.raises(errors.FutureVersion):
        trainfold.save(state_at(3), run)


def test_a_foreign_folder_is_neither_loaded_from_nor_taken_for_a_run(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "run.json").write_text('{"speed": 12}')
    assert names_of(refused(tmp_path / "photos")) == ["CheckpointForeign"]
    with pytest.raises(errors.CheckpointForeign):
        trainfold.save(state_at(1), tmp_path / "photos")


def test_a_run_that_lost_its_run_file_is_refused_not_renamed(run):
    (run / RUN_FILE).unlink()
    assert names_of(refused(run)) == ["CheckpointForeign"]
    with pytest.raises(errors.CheckpointForeign):
        trainfold.save(state_at(3), run)


def test_a_step_of_another_run_copied_in_is_foreign(run, tmp_path):
    """C04: manifest of another dir copied in. V04: several runs in one place."""
    trainfold.save(state_at(9), tmp_path / "other")
    shutil.copytree(tmp_path / "other" / "step-00000009", run / "step-00000009")
    assert names_of(refused(run, step=9)) == ["CheckpointForeign"]
    with pytest.warns(CheckpointPassedOver):
        assert trainfold.load(run, like=state_at(0)).trainer.step == 2


def test_a_renamed_step_is_foreign(run):
    (run / "step-00000002").rename(run / "step-00000005")
    assert names_of(refused(run, step=5)) == ["CheckpointForeign"]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["files"][0].update(name="../../secret"),
        lambda d: d["files"][0].update(name="/etc/passwd"),
        lambda d: d["files"][0].update(size_bytes=2**61),
        lambda d: d["components"][0]["tensors"][0][0].update(shape=[2**40, 3]),
        lambda d: d["components"][0]["tensors"][0][1]["shards"][0].__setitem__(1, 4096),
        lambda d: d["components"][0].update(nodes=[{"t": 10**6}]),
    ],
    ids=["escape", "absolute", "absurd size", "huge shape", "overlap", "dangling index"],
)
def test_a_hostile_manifest_is_refused_by_name(run, change):
    """U04: names cannot escape. U05: overlapping offsets and absurd sizes fail cleanly with bounded memory."""
    edit_manifest(run / "step-00000002" / "manifest.json", change)
    assert set(names_of(refused(run, step=2))) <= {"CheckpointHostile", "CheckpointTorn"}


@pytest.mark.parametrize("what", ["file", "manifest", "directory", "fifo"])
def test_links_and_special_files_are_refused(run, tmp_path, what):
    """U04: symlinks cannot lead out of the run, whatever they point at."""
    outside = tmp_path / "outside"
    shutil.copytree(run / "step-00000002", outside)
    step = run / "step-00000002"
    if what == "directory":
        shutil.rmtree(step)
        step.symlink_to(outside)
    else:
        name = "manifest.json" if what == "manifest" else MODEL
        (step / name).unlink()
        if what == "fifo":
            os.mkfifo(step / name)
        else:
            (step / name).symlink_to(outside / name)
    assert set(names_of(refused(run, step=2))) <= {"CheckpointHostile", "CheckpointMissing"}


def test_a_manifest_that_is_too_large_is_not_read(run):
    """U05: bounded memory."""
    path = run / "step-00000002" / "manifest.json"
    os.truncate(path, 2**40)
    assert names_of(refused(run, step=2)) == ["CheckpointHostile"]


def test_all_differences_of_a_model_are_listed_at_once(run):
    model = ModelState(
        Leaves({"w": torch.zeros(2, 3), "b": torch.zeros(3, dtype=torch.float16), "new": torch.zeros(1)}), Leaves()
    )
    error = refused(run, like=state_at(0).evolve(model=model))
    assert {reason.kind for reason in error.refusal.reasons} == {"shape", "dtype", "missing"}
    assert all(name in str(error) for name in ("model.params['w']", "model.params['b']", "model.params['new']"))


def test_an_unknown_component_is_refused(run):
    with pytest.raises(errors.UnknownComponent, match="optimiser"):
        trainfold.load(run, like=state_at(0), components=["optimiser"])


def test_a_state_without_a_step_cannot_be_saved(run):
    with pytest.raises(errors.InvalidState, match="trainer"):
        trainfold.save(attrs.evolve(state_at(1), trainer=None), run)


def test_two_processes_saving_into_one_run_do_not_mix(run):
    """One of them gets RunLocked with the other's process id, and what is there stays whole."""
    code = (
        "import sys, time\nfrom trainfold.backends.local import LocalStore\n"
        "with LocalStore(sys.argv[1]).lock():\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(errors.RunLocked, match=str(holder.pid)):
            trainfold.save(state_at(3), run)
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
        assert caught.value.mend
        assert not (place / "run" / "step-00000002").exists()
        assert fingerprint(trainfold.load(place / "run", like=state_at(0))) == fingerprint(state_at(1))
        trainfold.save(state_at(3), place / "run")
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_read_only_directory_is_named(tmp_path):
    """C15: permission errors fail the save; what is there can still be loaded."""
    place = mounted(tmp_path, "size=8m")
    try:
        trainfold.save(state_at(1), place / "run")
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        with pytest.raises(errors.NotWritable) as caught:
            trainfold.save(state_at(2), place / "run")
        assert caught.value.mend
        assert trainfold.load(place / "run", like=state_at(0)).trainer.step == 1
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_the_store_of_a_path_is_local(tmp_path):
    assert LocalStore(tmp_path / "x").url.endswith("x")
