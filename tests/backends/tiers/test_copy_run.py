"""Copies of checkpoints from one store into another: the same manifests, every byte verified, and nothing torn wherever they are cut off."""

import itertools

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.backends.reuse_cases import SHAPES, Chain

import trainfold
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.runs.quarantine_file import end_attempt, quarantined
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import CrashAt, MemoryStore, SimulatedCrash
from trainfold.backends.tiers.compare_runs import planned_copy
from trainfold.backends.tiers.copy_run import copy_run, plan_copy
from trainfold.core.errors import (
    CheckpointDamaged,
    CheckpointForeign,
    CheckpointMissing,
    CheckpointTorn,
    CheckpointUnreadable,
    CommitConflict,
    InvalidArgument,
    ResumeRefused,
    RunEmpty,
    RunLocked,
)
from trainfold.core.format.file_names import MANIFEST
from trainfold.core.history.quarantine import LoadOutcome
from trainfold.core.save.reuse.base import NO_BASE
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Progress, TrainState

LIKE = TrainState(model=ModelState(Leaves({"w": torch.zeros(9)}), Leaves()), trainer=Progress())
CHANGES = st.lists(st.sets(st.sampled_from(sorted(SHAPES))), min_size=1, max_size=4)


def chain_of(changes, *, ranks=1):
    """A run whose save number k writes the leaves of the k-th set, and refers to earlier ones for the others."""
    run, versions = Chain(ranks), dict.fromkeys(SHAPES, 0)
    for step, changed in enumerate(changes, 1):
        versions = {name: version + (name in changed) for name, version in versions.items()}
        run.save(step, versions)
    return run


def held(run, store):
    """A chain with the checkpoints of a store."""
    found = Chain(run.ranks)
    found.store, found.expected = store, run.expected
    return found


def files_of(store):
    return {
        f"{name}/{file}": store.read(f"{name}/{file}")
        for name in store.list()
        if name.startswith("step-")
        for file in store.list(name)
    }


def actions(plan):
    return {each.name[-1]: each.action for each in plan.checkpoints}


@settings(max_examples=30)
@given(CHANGES, st.data())
def test_a_copy_has_the_same_manifests_and_each_file_that_they_need(changes, data):
    """Law: whatever refers to whatever, what is copied loads, and copying again sends nothing."""
    run = chain_of(changes)
    steps = data.draw(st.sets(st.integers(1, len(changes)), min_size=1))
    target = MemoryStore()
    plan = copy_run(run.store, target, steps=sorted(steps))
    held(run, target).check()
    source, copied = files_of(run.store), files_of(target)
    assert copied.items() <= source.items()
    assert {f"step-{step:08d}" for step in steps} <= {each.name for each in plan.checkpoints}
    assert target.pointers() == {"latest": f"step-{max(steps):08d}"}
    before = len(target.effects)
    assert set(actions(copy_run(run.store, target, steps=sorted(steps))).values()) == {"there"}
    assert [each.kind for each in target.effects[before:]] == ["point"]
    copy_run(run.store, target)
    assert files_of(target) == source
    assert target.read("run.json") == run.store.read("run.json")


@pytest.mark.parametrize("first", [0, *(pytest.param(each, marks=pytest.mark.long) for each in range(1, 8))])
def test_a_copy_that_dies_anywhere_is_continued_and_sends_no_whole_file_twice(first):
    """At each effect on the target: what is there is whole, and the same call completes it. Law of crashes."""
    run = chain_of([set(), {"large"}], ranks=2)
    whole = MemoryStore()
    copy_run(run.store, whole)
    sizes = {name: len(data) for name, data in files_of(whole).items() if not name.endswith("manifest.json")}
    points = itertools.product(range(len(whole.effects) + 1), [False, True])
    for index, keep in itertools.islice(points, first, None, 8):
        target = MemoryStore(fault=CrashAt(index))
        try:
            copy_run(run.store, target)
        except SimulatedCrash:
            pass
        else:
            assert index == len(whole.effects)
        after = target.after_crash(index, keep_unsynced=keep)
        held(run, after).check()
        kept = {name for name, data in files_of(after).items() if len(data) == sizes.get(name)}
        began = len(after.effects)
        copy_run(run.store, after)
        assert files_of(after) == files_of(run.store)
        assert not kept & {each.name for each in after.effects[began:] if each.kind == "begin"}


class Hidden:
    """A run of which the store does not give one manifest now."""

    def __init__(self, inner, name):
        self.inner, self.hidden = inner, f"{name}/{MANIFEST}"

    def __getattr__(self, verb):
        return getattr(self.inner, verb)

    def read(self, name, *, start=0, stop=None):
        if name == self.hidden:
            raise CheckpointUnreadable(f"memory:{name}", expected="bytes", found="503", fix="try again")
        return self.inner.read(name, start=start, stop=stop)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_copy_into_a_run_whose_newest_cannot_be_read_now_does_not_lead_to_an_older_one(is_there):
    """E01: after a rewind, the time of the copied one and the hint to it would prove that the newest is older. Two tiers fetch by the same call."""
    source, target = MemoryStore(), MemoryStore(clock=itertools.count(1.0).__next__)
    states = {step: attrs.evolve(LIKE, trainer=Progress(step=step)) for step in (1, 2, 3)}
    for step in (2, 1, 3):  # 1 begins a timeline
        trainfold.save(states[step], source)
    copy_run(source, target)
    if not is_there:
        target.delete("step-00000001/")
    hidden = Hidden(target, "step-00000003")
    copy_run(source, hidden, steps=[1])
    assert target.pointers() == {"latest": "step-00000003"}
    with pytest.raises(ResumeRefused):
        trainfold.load(hidden, like=LIKE)
    assert trainfold.load(target, like=LIKE).trainer.step == 3


def test_a_copy_does_not_lead_past_what_its_target_has_archived_also_where_the_source_has_that_step():
    """E01: the target went on by itself, and its step 2 is newer than all of the source. That it is another one could only be read in the manifest."""
    source, target = MemoryStore(), MemoryStore(clock=itertools.count(1.0).__next__)
    states = [attrs.evolve(LIKE, trainer=Progress(step=step)) for step in range(4)]
    for step in (1, 2, 3):
        trainfold.save(states[step], source)
    copy_run(source, target, steps=[1, 2])
    with trainfold.CheckpointManager(target) as manager:
        manager.load(LIKE, manager.should_load(LIKE, step=1))
        manager.save(states[2])
    hidden = Hidden(target, "step-00000002")
    copy_run(source, hidden, steps=[3])
    with pytest.raises(ResumeRefused, match="503"):
        trainfold.load(hidden, like=LIKE)
    assert trainfold.load(target, like=LIKE).trainer.step == 2


def test_a_start_with_the_step_of_a_copy_goes_on_beside_what_its_target_has_archived():
    """E01: the refusal names the way out, and one start with it is enough."""
    source, target = MemoryStore(), MemoryStore(clock=itertools.count(1.0).__next__)
    states = [attrs.evolve(LIKE, trainer=Progress(step=step)) for step in range(5)]
    for step in (1, 2):
        trainfold.save(states[step], source)
        copy_run(source, target)
    trainfold.save(states[3], source)
    hidden = Hidden(target, "step-00000002")
    copy_run(source, hidden)
    with pytest.raises(ResumeRefused, match=r"step=3 "):
        trainfold.load(hidden, like=LIKE)
    with trainfold.CheckpointManager(hidden) as manager:
        manager.load(LIKE, manager.should_load(LIKE, step=3))
        manager.save(states[4])
    with pytest.warns(CheckpointPassedOver, match="step-00000002"):
        assert trainfold.load(hidden, like=LIKE).trainer.step == 4


def test_wrong_bytes_never_become_a_checkpoint_and_the_others_are_copied():
    """E05: a digest is compared before the file appears; what refers to the damaged one is not copied either, and is named."""
    run = chain_of([set(), {"large"}])
    run.bases = [NO_BASE]  # the next save refers to no other
    run.save(3, dict.fromkeys(SHAPES, 5))
    name = next(name for name in run.store.list("step-00000001") if name.startswith("model"))
    data = bytearray(run.store.read(f"step-00000001/{name}"))
    data[-1] ^= 1
    run.store.write(f"step-00000001/{name}", [bytes(data)], size_bytes=len(data))
    target = MemoryStore()
    with pytest.raises(CheckpointDamaged, match=f"step-00000001/{name}") as raised:
        copy_run(run.store, target)
    assert "step-00000002" in raised.value.__notes__[0]
    assert not target.list("step-00000001").count(name)
    assert [each for each in ("1", "2", "3") if target.size(f"step-0000000{each}/manifest.json")] == ["3"]


def test_another_checkpoint_of_a_step_is_refused_before_anything_is_written():
    run, other = chain_of([set(), {"large"}]), MemoryStore()
    copy_run(run.store, other, steps=[1])
    run.save(1, dict.fromkeys(SHAPES, 7))
    effects = len(other.effects)
    with pytest.raises(CommitConflict, match="nothing is overwritten"):
        copy_run(run.store, other)
    assert len(other.effects) == effects
    plan = plan_copy(run.store, other)
    assert [each.error for each in plan.refused] == ["CommitConflict"]
    assert "refused" in str(plan)


def test_files_of_a_step_that_was_saved_again_go_along_for_those_that_refer_to_them():
    """Step 1 is replaced by a rewind; step 2 still refers to files of its first revision."""
    run = chain_of([set(), {"half"}])
    run.restart(1)
    run.descent = None
    run.save(1, dict.fromkeys(SHAPES, 3))
    target = MemoryStore()
    copy_run(run.store, target, steps=[2])
    held(run, target).check()
    assert run.names() == held(run, target).names()
    target = MemoryStore()
    copy_run(run.store, target, steps=[1])  # without what step 2 needs of it
    assert actions(copy_run(run.store, target)) == {"1": "completed", "2": "copied"}
    held(run, target).check()


def test_what_the_target_lost_is_sent_again():
    """A file that is gone or too short; and one with other bytes, once a load has found that and put the checkpoint in quarantine."""
    run = chain_of([set(), set(SHAPES)])
    target = MemoryStore()
    copy_run(run.store, target)
    files = [f"step-00000002/{name}" for name in run.store.list("step-00000002") if name.endswith("safetensors")]
    target.delete(files[0])
    target.write(files[1], [b"short"], size_bytes=5)
    assert actions(copy_run(run.store, target)) == {"1": "there", "2": "completed"}
    assert files_of(target) == files_of(run.store)
    data = bytearray(run.store.read(files[0]))
    data[-1] ^= 1
    target.write(files[0], [bytes(data)], size_bytes=len(data))
    assert actions(plan_copy(run.store, target)) == {"1": "there", "2": "there"}, "a plan reads no tensors"
    end_attempt(target, "step-00000002", LoadOutcome("damaged", "a digest"))
    assert actions(copy_run(run.store, target)) == {"1": "there", "2": "completed"}
    assert files_of(target) == files_of(run.store)
    assert not quarantined(target)


def test_files_beside_a_checkpoint_go_with_it_and_directories_are_named(tmp_path):
    """C13: those of a user, such as samples of an evaluation; and the record of the best, where the target has what it names."""
    run = tmp_path / "a"
    for step in (1, 2):
        trainfold.save(TrainState(trainer=Progress(step=step)), run)
    best = trainfold.retention.make_best_record(metric="loss", direction="min")
    trainfold.retention.save_best(run, trainfold.retention.updated(best, {"loss": 0.5}, step=1))
    (run / "step-00000002/samples.txt").write_text("once upon a time")
    (run / "step-00000002/export").mkdir()
    target = tmp_path / "b"
    plan = copy_run(run, target, steps="newest")
    assert [*plan.left_out] == ["step-00000002/export"]
    assert (target / "step-00000002/samples.txt").read_text() == "once upon a time"
    assert not (target / "best.json").exists()
    (run / "step-00000002/samples.txt").write_text("once upon another")
    assert actions(copy_run(run, target)) == {"1": "copied", "2": "completed"}
    assert (target / "step-00000002/samples.txt").read_text() == "once upon another"
    assert (target / "best.json").read_bytes() == (run / "best.json").read_bytes()
    assert LocalStore(target).pointers() == LocalStore(run).pointers()
    assert not copy_run(run, target).best


def trained_again(store, *steps):
    """A best at step 2 of steps 1 to 3; then the run goes back to step 1, and has these steps again."""
    with trainfold.CheckpointManager(store) as manager:
        for step in (1, 2, 3):
            manager.save(TrainState(trainer=Progress(step=step)))
        best = trainfold.retention.make_best_record(metric="loss", direction="min")
        trainfold.retention.save_best(store, trainfold.retention.updated(best, {"loss": 0.5}, step=2))
    with trainfold.CheckpointManager(store, keep_last=9) as manager:
        state = TrainState(trainer=Progress())
        state = manager.load(state, manager.should_load(state, step=1))
        for step in steps:
            manager.save(state.evolve(trainer=Progress(step=step)))


def test_the_pointer_to_the_best_does_not_lead_to_a_step_that_was_trained_again(tmp_path):
    """E12, E10: a copy, and the far tier, pointed to the state that came in place of the best, where the run itself had no such pointer any more."""
    trained_again(LocalStore(tmp_path / "a"), 2, 3)
    assert LocalStore(tmp_path / "a").pointers() == {"latest": "step-00000003"}
    copy_run(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b/best.json").exists()
    assert LocalStore(tmp_path / "b").pointers() == {"latest": "step-00000003"}
    far = MemoryStore()
    trained_again(trainfold.stores.TwoTiers(tmp_path / "near", far), 2)
    assert far.pointers() == {"latest": "step-00000002"}


def test_the_record_of_the_best_goes_only_to_the_checkpoint_that_it_means():
    """E02, E12: the target had the step as it was before a rewind, and got a record of the one that was trained again: it had no best any more."""
    source, target, state = MemoryStore(), MemoryStore(), TrainState(trainer=Progress())
    trained_again(source)
    copy_run(source, target)
    with trainfold.CheckpointManager(source) as manager:
        manager.load(state, manager.should_load(state, step=1))
        for step in (2, 3):
            manager.save(state.evolve(trainer=Progress(step=step)))
        best = trainfold.retention.make_best_record(metric="loss", direction="min")
        trainfold.retention.save_best(source, trainfold.retention.updated(best, {"loss": 0.1}, step=2))
    assert not planned_copy(source, target, steps=[3], replaces=True).best
    assert planned_copy(source, target, steps=[2], replaces=True).best
    target.delete("best.json")
    target.delete("step-00000003/")
    copy_run(source, target, steps=[3])
    assert target.size("best.json") is None


def test_what_cannot_be_copied_is_refused_by_name():
    run = chain_of([set(), {"large"}])
    for steps, error in (
        ([7], CheckpointMissing),
        ("last", InvalidArgument),
        ([], InvalidArgument),
        ([-1], InvalidArgument),
    ):
        with pytest.raises(error):
            copy_run(run.store, MemoryStore(), steps=steps)
    with pytest.raises(InvalidArgument, match="another place"):
        copy_run(run.store, run.store)
    with pytest.raises(CheckpointMissing):
        copy_run(MemoryStore(), MemoryStore())
    with pytest.raises(CheckpointForeign, match="one run"):
        copy_run(run.store, chain_of([set()]).store)
    target = MemoryStore()
    with target.lock(), pytest.raises(RunLocked, match="only writer of its target"):
        copy_run(run.store, target)
    run.store.delete("step-00000001/manifest.json")  # step 2 refers to its files
    with pytest.raises(CheckpointTorn, match="--flatten"):
        copy_run(run.store, MemoryStore(), steps=[2])
    assert [*plan_copy(run.store, MemoryStore()).left_out] == ["step-00000001", "step-00000002"]
    run.store.delete("step-00000002/")
    with pytest.raises(RunEmpty):
        copy_run(run.store, MemoryStore(), steps="newest")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("a", "a/"),
        ("a", "./b/../a"),
        ("a", "a/inside"),
        ("a/inside", "a"),
        ("a", "link"),
        ("s3://bucket/v/a", "s3://bucket/v//a/"),
        ("s3://bucket/v/a", "s3a://bucket/v/a/b"),
    ],
)
def test_a_copy_onto_its_source_or_into_it_is_refused(tmp_path, monkeypatch, source, target):
    """E01: it said that all was there, or put a run into a run."""
    monkeypatch.chdir(tmp_path)
    copy_run(chain_of([set()]).store, source if "://" not in source else "a")
    (tmp_path / "link").symlink_to("a")
    before = sorted(tmp_path.rglob("*"))
    for act in (plan_copy, copy_run):
        with pytest.raises(InvalidArgument, match="another place than the source, and neither inside the other"):
            act(source, target)
    assert sorted(tmp_path.rglob("*")) == before


def test_places_of_which_one_name_begins_with_the_other_are_two(tmp_path):
    copy_run(chain_of([set()]).store, tmp_path / "a")
    assert copy_run(tmp_path / "a", tmp_path / "ab").makes_run


def test_a_directory_and_a_torn_save_at_the_target_are_no_obstacle(tmp_path):
    """A save there that did not finish has files with the same names, and other bytes."""
    run = chain_of([set(), {"large"}])
    target = LocalStore(tmp_path / "b")
    for name in run.store.list("step-00000001"):
        if name.endswith("safetensors"):
            target.write(f"step-00000001/{name}", [b"other"], size_bytes=5)
    copy_run(run.store, target)
    held(run, target).check()
    state = trainfold.load(target, like=TrainState(trainer=Progress()))
    assert torch.equal(
        state.model.params["half"], trainfold.load(run.store, like=TrainState(trainer=Progress())).model.params["half"]
    )


def test_a_run_without_a_whole_checkpoint_is_refused_and_nothing_is_made():
    run, target = chain_of([set()]), MemoryStore()
    for name in [each for each in run.store.list("step-00000001") if each != "manifest.json"]:
        run.store.delete(f"step-00000001/{name}")
    assert [each.error for each in plan_copy(run.store, target).refused] == ["RunEmpty"]
    with pytest.raises(RunEmpty, match="step-00000001"):
        copy_run(run.store, target)
    assert target.list() == []


def test_what_refers_to_a_deleted_checkpoint_is_not_said_to_be_copied():
    run, target = chain_of([set(), {"large"}]), MemoryStore()
    run.bases = [NO_BASE]
    run.save(3, dict.fromkeys(SHAPES, 5))
    read_into = run.store.read_into

    def deletes(name, buffer, *, start=0):
        run.store.delete("step-00000001/")
        read_into(name, buffer, start=start)

    run.store.read_into = deletes
    plan = copy_run(run.store, target)
    assert actions(plan) == {"3": "copied"}
    assert sorted(plan.left_out) == ["step-00000001", "step-00000002"]
    held(run, target).check()


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_step_that_is_saved_again_while_it_is_copied_is_not_called_damaged(is_whole):
    """C13: a rewind replaced it, and the advice was to check the disk, or to list the run; the same call copies it."""
    run, target = chain_of([set()]), MemoryStore()
    read_into = run.store.read_into

    def replaces(name, buffer, *, start=0):
        run.store.read_into = read_into
        run.store.delete("step-00000001/")
        run.bases = [NO_BASE]
        run.save(1, dict.fromkeys(SHAPES, 5) if is_whole else {"rows": 5, "half": 5})
        read_into(name, buffer, start=start)

    run.store.read_into = replaces
    with pytest.raises(CheckpointTorn, match="the step was saved again meanwhile; copy it again"):
        copy_run(run.store, target)
    assert not [name for name in target.list("step-00000001") if name == "manifest.json"]
    assert actions(copy_run(run.store, target)) == {"1": "copied"}
    assert {each: target.read(f"step-00000001/{each}") for each in run.store.list("step-00000001")} == {
        each: run.store.read(f"step-00000001/{each}") for each in run.store.list("step-00000001")
    }


def test_a_record_of_the_best_that_cannot_be_read_is_left_out_by_name():
    run, target = chain_of([set(), {"large"}]), MemoryStore()
    run.store.commit("best.json", b"{}")
    assert [*copy_run(run.store, target).left_out] == ["best.json"]
    held(run, target).check()
    assert target.size("best.json") is None


class Retiring(LocalStore):
    """A run that saves a checkpoint, and deletes one, when a file of a given one is read."""

    saves = True

    def delete_at(self, *steps):
        self.steps = list(steps)

    def read_into(self, name, buffer, *, start=0):
        if self.steps and name.startswith(f"step-{self.steps[0]:08d}/"):
            if self.saves:
                trainfold.save(LIKE.evolve(trainer=Progress(step=self.steps[0] + 5)), LocalStore(self.url))
            self.delete(f"step-{self.steps.pop(0):08d}/")
        super().read_into(name, buffer, start=start)


@pytest.mark.parametrize(
    ("steps", "deleted", "left"), [("all", (1,), (2, 3, 6)), ("all", (1, 2), (3, 6)), ("newest", (3,), (8,))]
)
def test_a_copy_goes_on_with_what_is_newer_where_checkpoints_are_deleted_meanwhile(tmp_path, steps, deleted, left):
    """As by the retention of a run that trains on: those are named, and leave nothing at the target."""
    for step in (1, 2, 3):
        trainfold.save(LIKE.evolve(trainer=Progress(step=step)), tmp_path / "a")
    run, target = Retiring(tmp_path / "a"), LocalStore(tmp_path / "b")
    run.delete_at(*deleted)
    plan = copy_run(run, target, steps=steps)
    assert plan.left_out == {f"step-{step:08d}": "deleted from the source meanwhile" for step in deleted}
    assert {each.name for each in plan.checkpoints} == {each for each in target.list() if each[:4] == "step"}
    assert {f"step-{step:08d}" for step in left} <= {each.name for each in plan.checkpoints}
    for each in plan.checkpoints:
        trainfold.load(target, like=LIKE, step=int(each.name[5:]))


@pytest.mark.parametrize("steps", ["all", [2, 3]])
def test_a_deleted_checkpoint_is_an_error_where_it_was_asked_for_or_nothing_newer_was_copied(tmp_path, steps):
    for step in (1, 2, 3):
        trainfold.save(LIKE.evolve(trainer=Progress(step=step)), tmp_path / "a")
    run, target = Retiring(tmp_path / "a"), LocalStore(tmp_path / "b")
    run.delete_at(3)
    run.saves = False
    with pytest.raises(CheckpointMissing, match=r"step-00000003: deleted .*run it again"):
        copy_run(run, target, steps=steps)
    assert max(each for each in target.list() if each[:4] == "step") == "step-00000002"


class GoneSoon(LocalStore):
    """A run of which a step is deleted after it was listed, before its manifest is read again."""

    reads = 0

    def read(self, name, *, start=0, stop=None):
        if name == "step-00000002/manifest.json":
            self.reads += 1
            if self.reads == 2:
                self.delete("step-00000002/")
        return super().read(name, start=start, stop=stop)


@pytest.mark.parametrize("steps", ["all", [1, 2]])
def test_a_step_that_is_deleted_while_the_plan_is_made_is_called_so(tmp_path, steps):
    """It was called torn, as a save is that did not finish."""
    for step in (1, 2, 3):
        trainfold.save(LIKE.evolve(trainer=Progress(step=step)), tmp_path / "a")
    run = GoneSoon(tmp_path / "a")
    plan = plan_copy(run, LocalStore(tmp_path / "b"), steps=steps)
    said = str(plan)
    assert (
        "step-00000002: expected a checkpoint that stays until it is copied, found deleted from the source meanwhile; run it again"
        in said
    )
    assert [each.error for each in plan.refused] == ([] if steps == "all" else ["CheckpointMissing"])
