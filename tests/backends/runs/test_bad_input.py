"""What a run on a real disk answers to bad input: a named error with the place and the fix, and nothing is touched."""

import contextlib
import errno
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import attrs
import pytest
import torch

import trainfold
from trainfold.adapters.cli.verify import verify_checkpoint
from trainfold.backends.formats.native.reader import read_header
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs import load as run_load
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.stores.local import LocalStore
from trainfold.core import errors
from trainfold.core.digest import digest_of
from trainfold.core.errors import Problem
from trainfold.core.format.file_names import RUN_FILE
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.format.manifest import END, TAIL
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, OptimizerState, ParamGroup, Progress, TrainState

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
        if isinstance(reason, Problem):
            says_all(reason)
    return caught.value


def says_all(error):
    """Check that an error names the place, both sides and the next move."""
    assert all(str(part).strip() for part in (error.where, error.expected, error.found, error.fix)), error


def falls_back(run, match=None, **options):
    """Check that the checkpoint before the bad one is loaded, bit for bit, with a warning (V03)."""
    with pytest.warns(CheckpointPassedOver, match=match):
        assert fingerprint(trainfold.load(run, like=state_at(0), **options)) == fingerprint(state_at(1))


def listing(root):
    """Every name below a folder, with what a write would change."""
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in sorted(root.rglob("*"))}


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
    """Other readers of the file find its tensors by it."""
    path = run / "step-00000002" / MODEL
    data = bytearray(path.read_bytes())
    data[at] ^= 0x08
    path.write_bytes(data)
    assert names_of(refused(run, step=2)) == ["CheckpointDamaged"]
    falls_back(run, "a header of")


def test_a_future_checkpoint_and_a_future_run_are_refused_by_name(run):
    edit_manifest(run / "step-00000002" / "manifest.json", lambda document: document.update(schema_version=99))
    assert names_of(refused(run, step=2)) == ["FutureVersion"]
    falls_back(run, "FutureVersion")
    shutil.rmtree(run / "step-00000001")
    refusal = refused(run).refusal
    assert "FutureVersion" in str(refusal)
    assert not refusal.finds_nothing, "a program must not begin anew over it"
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


HOSTILE = {
    "escape": (lambda d: d["files"][0].update(name="../../secret"), "CheckpointHostile"),
    "absolute": (lambda d: d["files"][0].update(name="/etc/passwd"), "CheckpointHostile"),
    "absurd size": (lambda d: d["files"][0].update(size_bytes=2**61), "CheckpointTorn"),
    "huge shape": (lambda d: d["components"][0]["tensors"][0][0].update(shape=[2**40, 3]), "CheckpointHostile"),
    "overlap": (lambda d: d["components"][0]["tensors"][0][1]["shards"][0].__setitem__(1, 4096), "CheckpointHostile"),
    "dangling index": (lambda d: d["components"][0].update(nodes=[{"t": 10**6}]), "CheckpointHostile"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_is_refused_by_name(run, case):
    """U04: names cannot escape. U05: overlapping offsets and absurd sizes fail cleanly with bounded memory."""
    change, name = HOSTILE[case]
    edit_manifest(run / "step-00000002" / "manifest.json", change)
    assert names_of(refused(run, step=2)) == [name]
    falls_back(run, name)


def fields_of(document, name):
    return next(each for each in document["components"] if each["name"] == name)["nodes"][0]["fields"]


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
    "model": lambda d: next(e for e in d["components"] if e["name"] == "model").update(nodes=[{"dict": {}}]),
    "trainer.step": lambda d: fields_of(d, "trainer").update(step=True),
    "optimizer.groups[0].hyper['lr']": lambda d: group_of(d)["fields"]["hyper"]["dict"].update(lr={"": 0}),
    "trainer.samples": lambda d: fields_of(d, "trainer").update(samples=1.0),
}


@pytest.mark.parametrize("place", WRONG_KINDS)
def test_a_field_of_another_kind_is_refused_by_its_place(run, place):
    """U05: what a reader is about to build or look into is checked first, and no tensor byte is read for it."""
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
    """C02: what save has acknowledged can be loaded."""
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
    """A process that may have only so much more memory than it has now; anything greedier fails."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("size_bytes", [2**20, 2**40])
def test_a_manifest_that_is_too_large_is_not_read(run, size_bytes):
    """U05: bounded memory, measured: what is not a manifest's head, or is over the limit, is not read."""
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
        with pytest.raises((errors.CheckpointHostile, errors.CheckpointTorn)):
            read_header(LocalStore(run), f"step-00000002/{MODEL}")


def claim_terabytes(run, size_bytes):
    """A checkpoint whose manifest, file size and header agree on a tensor that is one large hole."""
    trainfold.save(state_at(2).evolve(extra={"ema": {"w": torch.zeros(16)}}), run)

    def grow(document):
        (component,) = (each for each in document["components"] if each["name"] == "ema")
        (tensor,) = component["tensors"][0]
        file, start, _, _, digest = tensor["shards"][0]
        tensor["shape"] = [size_bytes // 4]
        tensor["shards"] = [[file, start, start + size_bytes, [[0, size_bytes // 4]], digest]]
        document["files"][file]["size_bytes"] = start + size_bytes
        os.truncate(run / "step-00000002" / document["files"][file]["name"], start + size_bytes)

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


def test_all_ranks_pass_over_what_one_of_them_cannot_use(run, monkeypatch):
    """V05: any unreadable rank counts everywhere; nobody waits for a rank that has given up."""
    resume = run_load.run_resume

    def failing(plan, like, *, store):
        if plan.step == 2 and threading.current_thread().name in failing.threads:
            raise failing.error
        return resume(plan, like, store=store)

    def body(world):
        if world.rank == 1:
            failing.threads = {threading.current_thread().name}
        world.gather(None)
        return trainfold.load(run, like=state_at(0), collectives=world).trainer.step

    monkeypatch.setattr(run_load, "run_resume", failing)
    failing.threads = set()
    for error in (errors.CheckpointHostile("x", expected="a", found="b", fix="c"), OSError(errno.EIO, "Input/output")):
        failing.error = error
        with pytest.warns(CheckpointPassedOver):
            assert run_threads(2, body) == [1, 1]
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
    """A path that a person might give by mistake, and a part of the fix."""
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
    return other, "folder of its own"


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
    """C15: permission errors fail the save; what is there can still be loaded."""
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
