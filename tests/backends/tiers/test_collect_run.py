"""Runs whose files lie in folders of several nodes are put together, complete checkpoints only, whatever was lost on the way."""

import itertools
import shutil
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.backends.reuse_cases import SHAPES, Chain

from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import CrashAt, MemoryStore, SimulatedCrash
from trainfold.backends.tiers.collect_run import collect_run, plan_collect
from trainfold.backends.tiers.copy_run import copy_run
from trainfold.backends.tiers.node_folders import NodeFolders
from trainfold.core.errors import (
    CheckpointDamaged,
    CheckpointForeign,
    CheckpointMissing,
    CheckpointUnreadable,
    CommitConflict,
    InvalidArgument,
    RunEmpty,
)
from trainfold.core.format.file_names import MANIFEST

RANKS = 2
CHANGES = st.lists(st.sets(st.sampled_from(sorted(SHAPES))), min_size=1, max_size=3)
COPIES = st.sampled_from(["none", "whole", "short", "flipped"])


def chain_of(changes):
    """A run of two ranks whose save number k writes the leaves of the k-th set, and refers to earlier ones for the others."""
    run, versions = Chain(RANKS), dict.fromkeys(SHAPES, 0)
    for step, changed in enumerate(changes, 1):
        versions = {name: version + (name in changed) for name, version in versions.items()}
        run.save(step, versions)
    return run


def put(store, name, data):
    if data is not None:
        store.write(name, [data], size_bytes=len(data))


def as_copied(data, how):
    changed = bytes([*data[:-1], data[-1] ^ 1])
    return {"none": None, "whole": data, "short": data[: len(data) // 2], "flipped": changed}[how]


def files_of(store):
    return {f"{name}/{each}": store.read(f"{name}/{each}") for name in store.list() if name.startswith("step-") for each in store.list(name)}  # fmt: skip


def needs_of(run):
    """Checkpoint -> the files that it needs, its manifest among them, also those of others."""
    found = {}
    for name in run.names():
        manifest = read_manifest(run.store, name)
        found[name] = {f"{name}/{MANIFEST}", *(each.path(name) for each in (*manifest.files, *manifest.indexes))}
        for other in {each.checkpoint for each in manifest.references}:
            found[name] |= found[other]  # a copy of one brings along those to which it refers
    return found


def collected(nodes, target):
    """What of the plan is there afterwards."""
    with suppress(CheckpointDamaged, RunEmpty):
        collect_run(nodes, target)
    return {name for name in target.list() if name.startswith("step-") and target.size(f"{name}/{MANIFEST}") is not None}  # fmt: skip


@settings(max_examples=12)
@given(changes=CHANGES, data=st.data())
def test_the_checkpoints_are_collected_of_which_each_file_is_in_some_folder_and_no_others(changes, data):
    """R08: complete checkpoints only. The model is a set: a checkpoint is complete if each file that it needs has a copy with the right bytes."""
    run, nodes, target = chain_of(changes), [MemoryStore(), MemoryStore()], MemoryStore()
    original = files_of(run.store)
    found = set()
    put(nodes[data.draw(st.integers(0, 1))], "run.json", run.store.read("run.json"))
    put(nodes[0], "notes.txt", b"so that no folder is empty")
    put(nodes[1], "notes.txt", b"another")
    for name, content in original.items():
        copies = data.draw(st.one_of(st.just(("whole", "none")), st.just(("none", "whole")), st.tuples(COPIES, COPIES)))
        for node, how in zip(nodes, copies, strict=True):
            put(node, name, as_copied(content, how))
        found |= {name} if "whole" in copies else set()
    complete = {name for name, needed in needs_of(run).items() if needed <= found}
    plan = plan_collect(nodes, target)
    assert target.list() == []
    there = collected(nodes, target)
    assert there == complete
    after = files_of(target)
    assert {name for name in after if name.partition("/")[0] in there} >= {each for name in there for each in needs_of(run)[name]}  # fmt: skip
    assert all(original[name] == content for name, content in after.items())
    missing = {name for name in run.names() if name not in {each.name for each in plan.checkpoints}}
    assert missing <= plan.left_out.keys(), "each that is not planned is listed, with what lacks"
    assert collected(nodes, target) == complete
    held = Chain(RANKS)
    held.store, held.expected = target, run.expected
    held.check()


def parted(run, tmp_path=None):
    """The run on two nodes: the files of each rank on its own, the manifest on the first."""
    nodes = [MemoryStore(), MemoryStore()] if tmp_path is None else [LocalStore(tmp_path / "n0"), LocalStore(tmp_path / "n1")]  # fmt: skip
    put(nodes[0], "run.json", run.store.read("run.json"))
    for name, content in files_of(run.store).items():
        put(nodes["-00001-of-" in name], name, content)
    return nodes


@pytest.mark.parametrize("at", [0, -1])
def test_a_damaged_copy_is_passed_over_for_the_whole_one_of_the_next_node(at):
    """R08: in headers, data and indexes; the first node has all files, and each of them is damaged."""
    run, nodes, target = chain_of([set(SHAPES), {min(SHAPES)}]), [MemoryStore(), MemoryStore()], MemoryStore()
    put(nodes[0], "run.json", run.store.read("run.json"))
    for name, content in files_of(run.store).items():
        damaged = bytearray(content)
        damaged[at] ^= 1
        put(nodes[0], name, bytes(damaged))
        put(nodes[1], name, content)
    collect_run(nodes, target)
    assert files_of(target) == files_of(run.store)


def test_a_collection_that_is_cut_off_anywhere_goes_on():
    """R08, C02: at each effect on the target; what was committed before is complete."""
    run = chain_of([set(SHAPES), {min(SHAPES)}])
    nodes, whole = parted(run), MemoryStore()
    collect_run(nodes, whole)
    assert files_of(whole) == files_of(run.store)
    for index in range(0, len(whole.effects), 3):
        target = MemoryStore(fault=CrashAt(index))
        with pytest.raises(SimulatedCrash):
            collect_run(nodes, target)
        after = target.after_crash(index, keep_unsynced=False)
        for name in after.list():
            if after.size(f"{name}/{MANIFEST}") is not None:
                assert needs_of(run)[name] <= files_of(after).keys()
        collect_run(nodes, after)
        assert files_of(after) == files_of(run.store)


def test_incomplete_checkpoints_are_listed_with_what_they_lack(tmp_path):
    """R08: also that a file is a link, which is not followed, and that one is too short."""
    run = chain_of([set(SHAPES), set(SHAPES), set(SHAPES)])
    nodes = parted(run, tmp_path)
    (away, *_) = [name for name in files_of(nodes[1]) if name.startswith("step-00000002/") and name.endswith(".safetensors")]  # fmt: skip
    place = tmp_path / "n1" / away
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    (short, *_) = [name for name in files_of(nodes[0]) if name.startswith("step-00000003/") and name.endswith(".safetensors")]  # fmt: skip
    size = (tmp_path / "n0" / short).stat().st_size
    (tmp_path / "n0" / short).write_bytes(b"1")
    put(nodes[0], "step-00000004/notes.txt", b"")
    plan = plan_collect([tmp_path / "n0", tmp_path / "n1"], tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert [each.name for each in plan.checkpoints] == ["step-00000001"]
    assert dict(plan.left_out) == {
        "step-00000002": f"incomplete: lacks {away.partition('/')[2]}",
        "step-00000003": f"incomplete: lacks {short.partition('/')[2]} (1 of {size} bytes in {tmp_path / 'n0'})",
        "step-00000004": "incomplete: lacks manifest.json, whole, in any of the folders",
    }
    assert "lacks manifest.json" in str(plan)
    collect_run([tmp_path / "n0", tmp_path / "n1"], tmp_path / "run")
    assert {name.partition("/")[0] for name in files_of(LocalStore(tmp_path / "run"))} == {"step-00000001"}
    # into one of the folders, which then has what it lacked
    collect_run([tmp_path / "n0", tmp_path / "n1"], tmp_path / "n0", steps=[1])
    copy_run(tmp_path / "n0", MemoryStore(), steps=[1])


def test_a_manifest_that_a_folder_does_not_give_now_is_not_called_lacking(tmp_path, monkeypatch):
    """R08, C15: without the right to read the newest one, the command ended well with the one before it."""
    run = chain_of([set(SHAPES), set(SHAPES)])
    collect_run([run.store], tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    read = LocalStore.read

    def denied(store, name, **limits):
        if (store.url, name) == (str(tmp_path / "a"), f"step-00000002/{MANIFEST}"):
            raise CheckpointUnreadable(name, expected="a file that can be read", found="EACCES", fix="wait")
        return read(store, name, **limits)

    monkeypatch.setattr(LocalStore, "read", denied)
    done = collect_run([tmp_path / "a"], tmp_path / "run")
    assert [each.name for each in done.checkpoints] == ["step-00000001"]
    assert "found EACCES" in done.left_out["step-00000002"]
    assert done.newest_lost.found == "EACCES"
    assert collect_run([tmp_path / "a"], tmp_path / "old", steps=[1]).newest_lost is None
    whole = collect_run([tmp_path / "a", tmp_path / "b"], tmp_path / "run")
    assert (len(whole.checkpoints), [*whole.left_out], whole.newest_lost) == (2, ["step-00000002/"], None)


def test_folders_that_do_not_belong_together_are_refused_by_name():
    """R08: other manifests of a step, other runs, no run file; and nothing is written."""
    run, other = chain_of([set(SHAPES)]), chain_of([set(SHAPES)])
    nodes, target = parted(run), MemoryStore()
    with pytest.raises(CheckpointForeign, match="files of run"):
        collect_run([*nodes, other.store], target)
    stray = MemoryStore()
    put(stray, f"step-00000001/{MANIFEST}", other.store.read(f"step-00000001/{MANIFEST}"))
    with pytest.raises(
        CommitConflict, match=r"step-00000001/manifest.json: expected one manifest of a step, found xxh3:.* and xxh3:"
    ):
        collect_run([*nodes, stray], target)
    with pytest.raises(CheckpointForeign, match=r"run\.json|run file"):
        collect_run([nodes[1], stray], target)
    with pytest.raises(CheckpointMissing, match="a folder with files of a run"):
        collect_run([*nodes, MemoryStore()], target)
    for odd in ([], "runs/a", None):
        with pytest.raises(InvalidArgument, match="name the folder of each node"):
            collect_run(odd, target)
    assert target.list() == []
    with pytest.raises(InvalidArgument, match="only read"):
        NodeFolders(nodes).delete("x")


@pytest.mark.parametrize("is_first", [True, False])
def test_a_step_whose_manifests_differ_is_refused_where_another_one_refers_to_it(is_first):
    """R08: it went along with the first folder's manifest, and another folder's files, as a damaged checkpoint."""
    run, other = chain_of([set(SHAPES), {"rows"}]), MemoryStore()
    put(other, "run.json", run.store.read("run.json"))
    Chain(RANKS, store=other).save(1, dict.fromkeys(SHAPES, 3))
    nodes, target = [other, run.store] if is_first else [run.store, other], MemoryStore()
    assert "step-00000001" in {each.checkpoint for each in read_manifest(run.store, "step-00000002").references}
    with pytest.raises(CommitConflict, match=r"step-00000001/manifest.json: expected one manifest of a step"):
        collect_run(nodes, target, steps=[2])
    assert target.list() == []


def test_a_file_of_the_user_that_differs_between_nodes_is_left_out_and_listed():
    run = chain_of([set(SHAPES)])
    nodes, target = parted(run), MemoryStore()
    for number, node in enumerate(nodes):
        put(node, "step-00000001/log.txt", bytes([number]))
        put(node, "step-00000001/same.txt", b"1")
    plan = collect_run(nodes, target)
    assert target.list("step-00000001") == sorted([*run.store.list("step-00000001"), "same.txt"])
    assert "differs in" in plan.left_out["step-00000001/log.txt"]


def test_the_revision_of_a_manifest_without_files_of_its_own_is_known():
    """R08: what a save of that revision has left, which was killed, was said to be perhaps of a later one."""
    run, nodes = Chain(1), [MemoryStore()]
    for step in (1, 2, 2):
        run.save(step, dict.fromkeys(SHAPES, 0))
    assert run.store.list("step-00000002") == [MANIFEST]
    for name, data in files_of(run.store).items():
        put(nodes[0], name, data)
    put(nodes[0], "run.json", run.store.read("run.json"))
    put(nodes[0], "step-00000002/model-00000-of-00001.r1.safetensors", b"what a kill left")
    assert dict(collect_run(nodes, MemoryStore()).left_out) == {}
    put(nodes[0], "step-00000002/model-00000-of-00001.r2.safetensors", b"of a later one")
    assert [*collect_run(nodes, MemoryStore()).left_out] == ["step-00000002/"]


PARTS = ["", "old", "new", "new, without its manifest", "new, its manifest damaged", "new, its manifest alone, damaged"]


@pytest.mark.parametrize("parts", [*itertools.combinations(PARTS, 2)])
def test_an_earlier_revision_of_a_step_is_not_collected_without_a_word(parts):
    """R08: with the folder missing that has the manifest, the step was collected as it was before its last save, without a word."""
    run, target = chain_of([set(SHAPES)]), MemoryStore()
    old = files_of(run.store)
    run.save(1, dict.fromkeys(SHAPES, 7))
    new, manifest = files_of(run.store), f"step-00000001/{MANIFEST}"
    nodes = [MemoryStore(), MemoryStore()]
    for node, part in zip(nodes, parts, strict=True):
        put(node, "run.json", run.store.read("run.json"))
        for name, data in (old if part == "old" else new if part else {}).items():
            is_manifest = name == manifest
            if is_manifest or "alone" not in part:
                put(node, name, as_copied(data, "none" if is_manifest and "without" in part else "flipped" if is_manifest and "damaged" in part else "whole"))  # fmt: skip
    with suppress(CommitConflict, RunEmpty):
        plan = collect_run(nodes, target)
        taken = [files for files in (old, new) if target.read(manifest) == files[manifest]]
        noted = [text for name, text in plan.left_out.items() if name == "step-00000001/"]
        assert taken == [new] or (taken == [old] and (parts == ("", "old") or noted)), plan.left_out
        assert not noted or "new" in "".join(parts)
    assert not target.list() or files_of(target) in (old, new)
