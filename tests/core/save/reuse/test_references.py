"""What may be referred to, what a plan with references writes, and what stays because others refer to it: decided from values alone."""

import attrs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfold.core.format.indexes.contributions import contributions_of
from trainfold.core.format.manifest import FileRecord, Head, Summary
from trainfold.core.format.structure.describe import describe
from trainfold.core.history.inventory import Entry, Inventory
from trainfold.core.history.next_checkpoint import next_checkpoint
from trainfold.core.save.pruning import plan_pruning
from trainfold.core.save.retention import Saved, keep_last
from trainfold.core.save.reuse.base import NO_BASE, base_from, candidates, needed_files, there
from trainfold.core.save.reuse.references import referring
from trainfold.core.save.reuse.referred import referrers_first, still_needed
from trainfold.core.save.reuse.stand_alone import plan_alone, to_stand_alone
from trainfold.core.save.save_plan import plan_save
from trainfold.core.save.written import PartDigests, WrittenFile, Wrote, manifest_of, whole_manifest

OLD = "step-00000007"
TENSORS = {"a": torch.zeros(20_000), "b": torch.zeros(30_000, dtype=torch.int16), "c": torch.zeros(8)}
DIGEST = "xxh3:" + "0" * 32


def planned(tensors, step, ranks=1):
    return plan_save([{"ema": describe(tensors, "ema")[0]}] * ranks, step=step, only=0)


def saved(plan):
    """What rank 0 knows of the manifest after it has written the files of a plan."""
    wrote = {
        file.name: WrittenFile(file.name, file.size_bytes, DIGEST, tuple(PartDigests(DIGEST) for _ in file.tensors))
        for file in plan.files
    }
    mine = manifest_of(plan, wrote, head=Head("r", plan.step), contract={}, omitted=(), versions={})
    contributions = {each.name: contributions_of(each, mine, [0])[0] for each in mine.components}
    return whole_manifest(mine, [Wrote(mine.files, None, contributions)])


BASE = base_from(saved(planned(TENSORS, 7)), OLD, 0)


@settings(max_examples=30)
@given(chosen=st.sets(st.sampled_from(sorted(TENSORS))))
def test_what_is_written_and_what_is_referred_to_are_together_what_the_plan_writes(chosen):
    plan = planned(TENSORS, 8)
    found = candidates(plan, BASE, 0, least_bytes=0)
    assert [each.path for each in found] == ["ema['a']", "ema['c']", "ema['b']"]
    less = referring(plan, {each: None for each in found if each.path[5] in chosen})
    written = {(placed.path, placed.box) for file in less.files for placed in file.tensors}
    referred = {(each.path, each.shard.box) for each in less.references}
    assert written | referred == {(placed.path, placed.box) for file in plan.files for placed in file.tensors}
    assert not written & referred
    assert {each.file.checkpoint for each in less.references} <= {OLD}
    if not chosen:
        assert less == plan
    whole, manifest = saved(plan), saved(less)
    assert manifest.head.schema_version == (4 if chosen else 3)
    assert [each.fingerprint for each in manifest.components] == [each.fingerprint for each in whole.components]
    assert manifest.size_bytes <= whole.size_bytes


def test_what_is_small_of_other_shape_dtype_world_or_its_own_directory_is_not_referred_to():
    names = lambda plan, base=BASE: [each.path[5] for each in candidates(plan, base, 0)]
    assert names(planned(TENSORS, 8)) == ["a", "b"]
    assert names(planned({**TENSORS, "a": torch.zeros(2, 10_000)}, 8)) == ["b"]
    assert names(planned({**TENSORS, "b": TENSORS["b"].float()}, 8)) == ["a"]
    assert names(planned(TENSORS, 8, ranks=2)) == []
    assert names(planned(TENSORS, 7)) == []
    assert names(planned(TENSORS, 8), NO_BASE) == []


def test_a_file_that_is_not_there_in_its_size_or_whose_checkpoint_is_not_there_is_not_referred_to():
    found = candidates(planned(TENSORS, 8), BASE, 0)
    (file,) = found[0].files
    name, manifest = needed_files(found)
    assert (name, manifest) == (file.path(OLD), f"{OLD}/manifest.json")
    assert there(found, {name: file.size_bytes, manifest: 1}) == found
    for size, committed in ((file.size_bytes - 1, 1), (None, 1), (file.size_bytes, None)):
        assert there(found, {name: size, manifest: committed}) == []


def test_a_chain_of_saves_refers_to_what_has_the_bytes():
    plan = planned(TENSORS, 8)
    second = saved(referring(plan, dict.fromkeys(candidates(plan, BASE, 0))))
    base = base_from(second, "step-00000008", 0)
    third = candidates(planned(TENSORS, 9), base, 0, least_bytes=0)
    assert {each.path[5]: {file.checkpoint for file in each.files} for each in third} == {
        "a": {OLD}, "b": {OLD}, "c": {"step-00000008"}
    }  # fmt: skip


def test_a_checkpoint_that_stands_alone_again_says_of_each_tensor_what_it_said():
    plan = planned(TENSORS, 8)
    before = saved(referring(plan, dict.fromkeys(candidates(plan, BASE, 0))))
    alone = plan_alone(before, "step-00000008")
    (file,) = alone.files
    assert (file.name, file.header, file.size_bytes) == ("ema-00000-of-00001.r1.safetensors", plan.files[0].header, plan.files[0].size_bytes)  # fmt: skip
    after = alone.done({file.name: DIGEST})
    assert after.references == ()
    assert (after.head.revision, after.head.schema_version) == (1, 3)
    for one, other in zip(before.components[0].tensors[0], after.components[0].tensors[0], strict=True):
        assert [(s.box, s.digest, s.whole) for s in one.shards] == [(s.box, s.digest, s.whole) for s in other.shards]
    assert [each.name.partition("/")[0] for each in alone.sources[0]] == [OLD, "step-00000008", OLD]


NAMES = [f"step-{step:08d}" for step in range(8)]
REFERS = st.dictionaries(
    st.sampled_from(NAMES), st.sets(st.sampled_from(NAMES), max_size=3).map(lambda s: tuple(sorted(s)))
)


@given(refers=REFERS, doomed=st.sets(st.sampled_from(NAMES)))
def test_nothing_that_goes_is_referred_to_by_what_stays(refers, doomed):
    """Transitively, and whatever forged heads say of each other."""
    staying = set(NAMES) - doomed
    needed = still_needed(doomed, staying, refers)
    gone = doomed - needed.keys()
    assert all(target not in gone for name in {*staying, *needed} for target in refers.get(name, ()))
    assert all(any(name in refers.get(other, ()) for other in {*staying, *needed}) for name in needed)


@given(names=st.lists(st.sampled_from(NAMES), unique=True), refers=REFERS)
def test_what_refers_goes_before_what_it_refers_to(names, refers):
    earlier = {name: tuple(each for each in targets if each < name) for name, targets in refers.items()}
    ordered = referrers_first(names, earlier)
    assert sorted(ordered) == sorted(names)
    for place, name in enumerate(ordered):
        assert not {*earlier.get(name, ())} & {*ordered[:place]}
    assert referrers_first(names, {}) == tuple(names)
    assert sorted(referrers_first(names, refers)) == sorted(names)  # and it ends, if heads refer to each other


def run_with(refers, *, torn=()):
    entries = [
        Entry(
            name,
            None if name in torn else Head("r", step),
            summary=None if name in torn else Summary(0, (), {}, refers.get(name, ())),
        )
        for step, name in enumerate(NAMES)
    ]
    return Inventory("runs/a", "r", tuple(entries))


def pruned(inventory, **options):
    saved = {each.name: Saved(each.name, each.head.step) for each in inventory.entries if each.head is not None}
    files = {each.name: ["model-00000-of-00001.safetensors"] for each in inventory.entries if each.head is None}
    return plan_pruning(inventory, written=saved[NAMES[7]], proved=saved, files=files, policy=keep_last(1), **options)


def test_retention_keeps_what_is_referred_to_and_says_why():
    plan = pruned(run_with({NAMES[7]: (NAMES[3],), NAMES[3]: (NAMES[1],), NAMES[6]: (NAMES[5],)}))
    assert plan.lineage.kept == {
        NAMES[1]: (f"{NAMES[3]} refers to its files",),
        NAMES[3]: (f"{NAMES[7]} refers to its files",),
        NAMES[7]: ("just written", "the last one"),
    }
    assert plan.deleted == (NAMES[0], NAMES[2], NAMES[4], NAMES[6], NAMES[5])
    assert to_stand_alone(plan) == (NAMES[7],)


def test_a_torn_directory_whose_files_are_referred_to_stays():
    plan = pruned(run_with({NAMES[7]: (NAMES[3],)}, torn=[NAMES[3], NAMES[4]]))
    assert plan.torn == (NAMES[4],)
    assert plan.left_alone == {NAMES[3]: f"{NAMES[7]} refers to its files"}


def test_the_next_revision_of_a_step_has_names_of_its_own_if_others_refer_to_the_step():
    run = run_with({NAMES[7]: (NAMES[3],)}, torn=[NAMES[3]])
    assert next_checkpoint(run, "r", 3, files=["model-00000-of-00001.r2.safetensors"]).revision == 3
    assert next_checkpoint(run, "r", 4, files=[]).revision == 0


def test_a_checkpoint_counts_as_standing_alone_if_it_is_named():
    run = run_with({NAMES[7]: (NAMES[3],)})
    assert run.standing_alone([NAMES[7]]).entry(NAMES[7]).refers == ()
    assert run.standing_alone([NAMES[6]]) == run


def test_a_reference_prints_with_its_checkpoint():
    file = FileRecord("ema-00000-of-00001.safetensors", ("ema",), 0, 8, DIGEST, OLD)
    assert file.path("step-00000009") == file.label == f"{OLD}/{file.name}"
    own = attrs.evolve(file, checkpoint="")
    assert (own.path("step-00000009"), own.label) == (f"step-00000009/{file.name}", file.name)
