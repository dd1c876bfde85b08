"""Bad input to a run on a real disk gives a named error with the place and the fix, and changes nothing."""

import contextlib
import json
import os
import resource
import shutil
from pathlib import Path

import attrs
import pytest
import torch
from kit.backends import bad_input_cases
from kit.backends.bad_input_cases import names_of, refused, says_all, state_at
from kit.core.roots import resealed

import trainfold
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.core import errors
from trainfold.core.format.file_names import RUN_FILE
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.state.state import ParamGroup

run = bad_input_cases.run


MODEL = "model-00000-of-00001.safetensors"


def falls_back(run, match=None, **options):
    """Check that the checkpoint before the bad one is loaded, bit for bit, with a warning (V03)."""
    with pytest.warns(CheckpointPassedOver, match=match):
        assert fingerprint(trainfold.load(run, like=state_at(0), **options)) == fingerprint(state_at(1))


def edit_manifest(path, change):
    """Change a manifest and give it a matching digest, as an attacker would."""
    data = path.read_bytes()
    document = json.loads(data)
    change(document)
    path.write_bytes(resealed(document))


def test_a_missing_run_an_empty_folder_and_an_empty_run(tmp_path):
    assert names_of(refused(tmp_path / "nowhere")) == ["CheckpointMissing"]
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "empty").mkdir()
    assert names_of(refused(tmp_path / "empty")) == ["CheckpointMissing"]
    (tmp_path / "empty" / RUN_FILE).write_text('{"format":"trainfold-run","version":1,"run_id":"a"}')
    assert names_of(refused(tmp_path / "empty")) == ["RunEmpty"]


def test_a_torn_checkpoint_is_passed_over_and_refused_when_asked_for(run):
    """C01, C02: a directory without its manifest is not a checkpoint."""
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
    says_all(caught.value)
    assert fingerprint(like) == before
    with pytest.warns(CheckpointPassedOver):
        assert trainfold.load(run, like=like).trainer.step == 1


def test_a_flipped_bit_in_the_manifest_is_found(run):
    path = run / "step-00000002" / "manifest.json"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x01
    path.write_bytes(data)
    assert names_of(refused(run, step=2)) == ["CheckpointDamaged"]
    falls_back(run, "CheckpointDamaged")


@pytest.mark.parametrize("at", range(8))
def test_a_flipped_bit_in_a_header_length_is_found_though_no_tensor_needs_it(run, at):
    """Other readers of the file need it to find the tensors."""
    path = run / "step-00000002" / MODEL
    data = bytearray(path.read_bytes())
    data[at] ^= 0x08
    path.write_bytes(data)
    assert names_of(refused(run, step=2)) == ["CheckpointDamaged"]
    falls_back(run, "a header of")


def test_a_future_checkpoint_and_a_future_run_are_refused_by_name(run):
    edit_manifest(run / "step-00000002" / "manifest.json", lambda document: document.update(schema_version=99))
    assert names_of(refused(run, step=2)) == ["FutureVersion"]
    assert names_of(refused(run)) == ["FutureVersion"], "it is whole as far as this release knows"
    assert trainfold.load(run, like=state_at(0), step=1).trainer.step == 1
    shutil.rmtree(run / "step-00000001")
    refusal = refused(run).refusal
    assert "FutureVersion" in str(refusal)
    assert not refusal.finds_nothing, "a program must not start fresh over it"
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


def absurd_size(document):
    """Claim that a file is huge, and let the summary agree."""
    document["size_bytes"] += 2**61 - document["files"][0]["size_bytes"]
    document["files"][0]["size_bytes"] = 2**61


HOSTILE = {
    "escape": (lambda d: d["files"][0].update(name="../../secret"), "CheckpointHostile"),
    "absolute": (lambda d: d["files"][0].update(name="/etc/passwd"), "CheckpointHostile"),
    "absurd size": (absurd_size, "CheckpointTorn"),
    "a size that the summary lacks": (lambda d: d["files"][0].update(size_bytes=2**61), "CheckpointHostile"),
    "huge shape": (lambda d: d["components"][0]["tensors"]["kinds"][0].__setitem__(1, [2**40, 3]), "CheckpointHostile"),
    "overlap": (lambda d: d["index"]["shards"]["model"][1].__setitem__(1, 4096), "CheckpointHostile"),
    "dangling index": (lambda d: d["components"][0].update(node={"t": 10**6}), "CheckpointHostile"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_is_refused_by_name(run, case):
    """U04: names cannot escape. U05: overlapping offsets and absurd sizes fail cleanly with bounded memory."""
    change, name = HOSTILE[case]
    edit_manifest(run / "step-00000002" / "manifest.json", change)
    assert names_of(refused(run, step=2)) == [name]
    falls_back(run, name)


def fields_of(document, name):
    return next(each for each in document["components"] if each["name"] == name)["node"]["fields"]


def group_of(document):
    return fields_of(document, "optimizer")["groups"]["tuple"][0]


WRONG_KINDS = {
    "optimizer.masters": lambda d: fields_of(d, "optimizer").update(masters="x"),
    "optimizer.groups[0].params[0]": lambda d: group_of(d)["static"]["params"]["tuple"].__setitem__(0, {"dict": {}}),
    "optimizer.slots['w']": lambda d: fields_of(d, "optimizer")["slots"]["leaves"].update(w=5),
    "optimizer.groups": lambda d: fields_of(d, "optimizer").update(groups=5),
    "optimizer.groups[1]": lambda d: fields_of(d, "optimizer")["groups"]["tuple"].append({"dict": {}}),
    "optimizer.groups[0].hyper": lambda d: group_of(d)["fields"].update(hyper="x"),
    "optimizer.groups[0]": lambda d: group_of(d)["static"].pop("params"),
    "optimizer.kind": lambda d: fields_of(d, "optimizer").update(kind=5),
    "optimizer.color": lambda d: fields_of(d, "optimizer").update(color="red"),
    "model.params['w']": lambda d: fields_of(d, "model")["params"]["leaves"].update(w={"t": 0, "as": "numpy"}),
    "model.buffers": lambda d: fields_of(d, "model").update(buffers={"dict": {}}),
    "model": lambda d: next(e for e in d["components"] if e["name"] == "model").update(node={"dict": {}}),
    "trainer.step": lambda d: fields_of(d, "trainer").update(step=True),
    "optimizer.groups[0].hyper['lr']": lambda d: group_of(d)["fields"]["hyper"]["dict"].update(lr={"": 0}),
    "trainer.samples": lambda d: fields_of(d, "trainer").update(samples=1.0),
}


@pytest.mark.parametrize("place", WRONG_KINDS)
def test_a_field_of_another_kind_is_refused_by_its_place(run, place):
    """U05: a value is checked before a reader builds from it, and the check reads no tensor bytes."""
    edit_manifest(run / "step-00000002" / "manifest.json", WRONG_KINDS[place])
    error = refused(run, step=2)
    assert names_of(error) == ["CheckpointHostile"]
    (problem,) = error.refusal.reasons
    assert str(run / "step-00000002" / "manifest.json") in problem.where
    assert problem.where.endswith(f": {place}")
    assert isinstance(trainfold.plan(run, like=state_at(0), step=2), trainfold.Refusal)
    falls_back(run, "CheckpointHostile")


@pytest.mark.parametrize(
    "change", [{"kind": 5}, {"slots": {"w": {}}}, {"masters": "x"}, {"groups": [ParamGroup({}, ())]}]
)
def test_what_a_reader_would_refuse_is_not_saved(run, change):
    """C02: every acknowledged save can be loaded."""
    state = state_at(3)
    with pytest.raises(errors.InvalidState, match=f"state.optimizer.{next(iter(change))}") as caught:
        trainfold.save(state.evolve(optimizer=attrs.evolve(state.optimizer, **change)), run)
    says_all(caught.value)
    assert not (run / "step-00000003").exists()


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
    assert names_of(refused(run, step=2)) == ["CheckpointHostile"]
    falls_back(run, "CheckpointHostile")


@contextlib.contextmanager
def memory_limited(more_bytes):
    """A process with a limit on memory beyond its present use; larger allocations fail."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("size_bytes", [2**20, 2**40])
def test_a_manifest_that_is_too_large_is_not_read(run, size_bytes):
    """U05: bounded memory, measured: a file without a manifest's head, or over the limit, is not read."""
    os.truncate(run / "step-00000002" / "manifest.json", size_bytes)
    with memory_limited(64 << 20):
        assert names_of(refused(run, step=2)) == ["CheckpointDamaged" if size_bytes < 2**29 else "CheckpointHostile"]
        falls_back(run)


def test_a_manifest_that_does_not_fit_into_memory_is_refused_by_name(run):
    """U05: bounded memory."""
    os.truncate(run / "step-00000002" / "manifest.json", 2**29)
    with memory_limited(64 << 20):
        assert names_of(refused(run, step=2)) == ["CheckpointHostile"]
        falls_back(run, "fits into memory")


@pytest.mark.parametrize("size_bytes", [99_999_999, 2**40, 2**63])
def test_a_header_that_claims_to_be_huge_is_found_by_its_length_alone(run, size_bytes):
    """U05: huge header length; measured."""
    path = run / "step-00000002" / MODEL
    path.write_bytes(size_bytes.to_bytes(8, "little") + path.read_bytes()[8:])
    with memory_limited(64 << 20):
        assert names_of(refused(run, step=2)) == ["CheckpointDamaged"]


def claim_terabytes(run, size_bytes):
    """A checkpoint whose manifest, file size and header agree on a tensor that is one large hole."""
    trainfold.save(state_at(2).evolve(extra={"ema": {"w": torch.zeros(16)}}), run)

    def grow(document):
        (component,) = (each for each in document["components"] if each["name"] == "ema")
        (kind,) = component["tensors"]["kinds"]
        kind[1] = [size_bytes // 4]
        (shard,) = document["index"]["shards"]["ema"]
        shard[4] = "0" * (32 * size_bytes // 2**20)  # a digest for each piece
        (file,) = (each for each in document["files"] if each["component"] == "ema")
        document["size_bytes"] += shard[1] + size_bytes - file["size_bytes"]
        file["size_bytes"] = shard[1] + size_bytes
        os.truncate(run / "step-00000002" / file["name"], file["size_bytes"])

    edit_manifest(run / "step-00000002" / "manifest.json", grow)


@pytest.mark.parametrize("size_bytes", [2**31, 2**40])
def test_a_sparse_file_of_terabytes_is_refused_by_name_and_passed_over(run, size_bytes):
    """U05: corrupt or hostile sizes fail cleanly with bounded memory; sizes that agree with each other too."""
    claim_terabytes(run, size_bytes)
    like = state_at(0)
    before = fingerprint(like)
    with memory_limited(512 << 20):
        with pytest.raises(errors.CheckpointHostile) as caught:
            trainfold.load(run, like=like, step=2)
        says_all(caught.value)
        assert "ema['w']" in caught.value.where
        assert str(size_bytes) in caught.value.found
        falls_back(run, "CheckpointHostile")
    assert fingerprint(like) == before
