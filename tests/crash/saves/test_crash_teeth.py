"""Teeth: if a store omits a call, on purpose or as other libraries do, the same harness finds what is lost."""

import fcntl
import os
from collections import Counter
from contextlib import suppress

import pytest

from crash.disk.effects import Bind, Move, Resize, Sync, Unbind, Write
from crash.disk.states import Budget, before_syncs, crash_states
from crash.effort import say
from crash.saves import rivals
from crash.saves.large import MIB, O_DIRECT, LargeScene, call
from crash.saves.recovery import Examiner, promises
from crash.saves.rivals import RIVALS, failures
from crash.saves.scenarios import SCENARIOS, record
from trainfold.backends.stores.local import LocalStore
from trainfold.core.errors import CommitConflict, SaveFailed

pytestmark = pytest.mark.slow(0.2)

SMALL = Budget(32, 4)


@pytest.fixture(scope="module")
def effects():
    """The effects of each scenario, recorded once."""
    known = {}
    return lambda name: known.setdefault(name, record(SCENARIOS[name]))


def is_caught(mutant, saying=""):
    """The first broken promises that contain this text, or None."""
    promised, examiner = promises(mutant), Examiner(go_on_share=0)
    for state in crash_states(mutant, SMALL, places=before_syncs(mutant)):
        wrong = examiner.wrong(state, promised[state.done])
        if any(saying in each for each in wrong):
            return wrong
    return None


def syncs_of_files(effects, name):
    """The syncs of the files that get a name."""
    inodes = {effect.inode for effect in effects if isinstance(effect, Bind | Move) and effect.name == name}
    return [i for i, effect in enumerate(effects) if isinstance(effect, Sync) and effect.inode in inodes]


def is_named(effect, name):
    return isinstance(effect, Bind | Move) and effect.name == name


def first_name(effects, name):
    return next(i for i, effect in enumerate(effects) if is_named(effect, name))


def without(effects, *places):
    """A store without these effects; leaving out a sync changes none of its other effects."""
    assert places
    return [effect for i, effect in enumerate(effects) if i not in places]


def test_a_store_as_it_is_keeps_its_promises(effects):
    """Otherwise the tests below would prove nothing."""
    assert is_caught(effects("second_save")) is None


@pytest.mark.parametrize("name", ["model-00000-of-00001.safetensors", "manifest.json", "run.json"])
def test_a_store_that_does_not_sync_a_file_is_caught(effects, name):
    done = effects("second_save")
    assert is_caught(without(done, *syncs_of_files(done, name)))


def test_a_store_that_does_not_sync_the_directory_before_the_manifest_is_caught(effects):
    """The manifest can then be durable before the files that it names."""
    done = effects("first_save")
    manifest = first_name(done, "manifest.json")
    directory = done[manifest].directory
    places = [i for i, effect in enumerate(done[:manifest]) if isinstance(effect, Sync) and effect.inode == directory]
    assert any("not whole" in wrong or "refused" in wrong for wrong in is_caught(without(done, *places)))


def test_a_store_that_does_not_sync_the_directory_after_the_manifest_is_caught(effects):
    """A crash may then lose a save that has returned: a false acknowledgement."""
    done = effects("first_save")
    manifest = first_name(done, "manifest.json")
    directory = done[manifest].directory
    places = [i for i, e in enumerate(done) if i > manifest and isinstance(e, Sync) and e.inode == directory]
    assert is_caught(without(done, *places), "was acknowledged")


def test_a_store_that_does_not_sync_the_runs_directory_is_caught(effects):
    """A crash can then lose a step's directory with all its synced files."""
    done = effects("first_save")
    run = next(effect.inode for effect in done if is_named(effect, "run"))
    places = [i for i, effect in enumerate(done) if isinstance(effect, Sync) and effect.inode == run]
    assert is_caught(without(done, *places))


def test_a_store_that_deletes_the_manifest_with_the_rest_is_caught(effects):
    """Without the sync between them, a crash leaves a committed half."""
    done = effects("prune")
    first = next(i for i, effect in enumerate(done) if isinstance(effect, Unbind) and effect.name == "manifest.json")
    assert isinstance(done[first + 1], Sync)
    assert any("not whole" in wrong for wrong in is_caught(without(done, first + 1)))


def test_a_store_that_writes_the_manifest_in_place_is_caught(effects):
    """A manifest that has its name before it has its bytes is torn."""
    done = effects("second_save")
    manifest = first_name(done, "manifest.json")
    made = next(i for i, e in enumerate(done) if isinstance(e, Bind) and e.inode == done[manifest].inode)
    moved = [*done[: made + 1], done[manifest], *done[made + 1 : manifest], *done[manifest + 1 :]]
    assert is_caught(moved)


def test_a_save_again_that_removes_the_old_step_first_is_caught(effects):
    """A crash can then leave neither of the two."""
    done = effects("save_again")
    second = [i for i, effect in enumerate(done) if is_named(effect, "manifest.json")][1]
    removed = Unbind(done[second].directory, "manifest.json")
    assert any("acknowledged" in wrong for wrong in is_caught([*done[:second], removed, *done[second:]]))


def test_an_acknowledgement_that_comes_too_early_is_caught(effects):
    done = effects("first_save")
    manifest = first_name(done, "manifest.json")
    early = [*done[:manifest], done[-1], *done[manifest:-1]]
    assert any("acknowledged" in wrong for wrong in is_caught(early))


def test_a_lock_that_leaves_staged_files_behind_is_caught(effects, monkeypatch):
    """Otherwise a user would have to clean up."""
    done = effects("first_save")
    promised, examiner = promises(done), Examiner(go_on_share=1)
    monkeypatch.setattr("trainfold.backends.stores.local.collect", lambda _: [])
    wrong = (examiner.wrong(state, promised[state.done]) for state in crash_states(done, Budget(4, 1)))
    assert any("left after the lock was taken" in each for found in wrong for each in found)


# --- large files, several writers ------------------------------------------------------------------------------------

# Each is a store that omits a call, makes another one, or makes one too early. Mutants of calls apply them in a real save.


def large(size_mib, *, is_direct, writers=1, saves=1):
    return LargeScene(size_mib, is_direct=is_direct, writers=writers, saves=saves)


def what_is_lost(scene, mutant=None, change=list):
    """The first broken promise of a scene with changed calls or effects; None if every promise is kept."""
    done = change(scene.record(mutant))
    promised, examiner = promises(done), Examiner(go_on_share=0, make=scene.make)
    found = (
        examiner.wrong(state, promised[state.done]) for state in crash_states(done, SMALL, places=before_syncs(done))
    )
    return next((wrong for wrong in found if wrong), None)


def is_data(recorder, args, *, above_mib=0, part=""):
    """Whether a call concerns a data file above a size, whose name contains a text."""
    path, fd = recorder.target("fsync", args, {}), args[0]
    return ".safetensors" in (path or "") and part in path and os.fstat(fd).st_size > above_mib * MIB


@pytest.mark.parametrize("is_direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("above_mib", [1, 8, 32])
def test_a_store_that_does_not_sync_large_files_is_caught(above_mib, is_direct):
    """W18: 119 tests passed without that sync. Each size needs a scene, since smaller files are synced."""
    forgets = call(lambda recorder, name, args: name == "fsync" and is_data(recorder, args, above_mib=above_mib))
    assert what_is_lost(large(above_mib, is_direct=is_direct), forgets)


def test_a_store_that_does_not_sync_what_went_past_the_page_cache_is_caught():
    """W18: direct writes bypass the page cache, but are not durable on the device yet, and neither is the file size."""

    def is_lost(recorder, name, args):
        return name == "fsync" and is_data(recorder, args) and fcntl.fcntl(args[0], fcntl.F_GETFL) & O_DIRECT

    assert what_is_lost(large(1, is_direct=True), call(is_lost))
    assert what_is_lost(large(1, is_direct=False), call(is_lost)) is None


def test_a_second_writer_that_does_not_sync_is_caught():
    """W18, C01: a commit needs the files of every rank."""
    forgets = call(lambda recorder, name, args: name == "fsync" and is_data(recorder, args, part="-00001-of-"))
    assert what_is_lost(large(1, is_direct=False, writers=2), forgets)
    assert what_is_lost(large(1, is_direct=False), forgets) is None


def test_a_store_that_syncs_another_descriptor_is_caught():
    """W18: it syncs the directory's descriptor, which is open too."""
    other = call(
        lambda recorder, name, args: name == "fsync" and is_data(recorder, args, above_mib=1),
        lambda recorder, real, args, kwargs: recorder(
            "fsync", real, (recorder.descriptor_of_directory(args[0]),), kwargs
        ),
    )
    assert what_is_lost(large(1, is_direct=True), other)


def test_a_store_that_tries_a_failed_sync_again_is_caught():
    """C02: the second sync succeeds, but the kernel has dropped the data of the first one."""

    def again(recorder, real, args, kwargs):
        recorder.sync_failed(args[0])
        return recorder("fsync", real, args, kwargs)

    assert what_is_lost(
        large(1, is_direct=True), call(lambda r, name, args: name == "fsync" and is_data(r, args), again)
    )


def places_of_large(done):
    """The inode of the first large file, and the indices of its writes and resizes, its syncs, and its naming."""
    sizes = Counter()
    for effect in done:
        if isinstance(effect, Write):
            sizes[effect.inode] += len(effect.data)
    inode = next(inode for inode, size in sizes.items() if size > MIB)
    about = [i for i, effect in enumerate(done) if getattr(effect, "inode", None) == inode]
    contents = [i for i in about if isinstance(done[i], Write | Resize)]
    (synced,) = [i for i in about if isinstance(done[i], Sync)]
    (named,) = [i for i in about if isinstance(done[i], Move)]
    return contents, synced, named


def moved(done, place, to):
    """Move the effect at one index before the one at another index."""
    rest = [*done[:place], *done[place + 1 :]]
    at = to if to <= place else to - 1
    return [*rest[:at], done[place], *rest[at:]]


@pytest.mark.parametrize("is_direct", [False, True], ids=["buffered", "direct"])
def test_a_store_that_syncs_before_the_last_write_is_caught(is_direct):
    """W18: the last write is the size in direct mode, and the last extent in the other mode."""

    def early(done):
        contents, synced, _ = places_of_large(done)
        return moved(done, synced, contents[-1])

    assert what_is_lost(large(1, is_direct=is_direct), change=early)


def test_a_store_that_cuts_the_padding_off_after_the_sync_is_caught():
    """W18: O_DIRECT writes whole blocks; a crash then leaves a file that is longer than its manifest says."""

    def late(done):
        contents, synced, _ = places_of_large(done)
        assert isinstance(done[contents[-1]], Resize)
        return moved(done, contents[-1], synced + 1)

    assert any("not whole" in wrong for wrong in what_is_lost(large(8, is_direct=True), change=late))


def test_a_store_that_leaves_the_padding_is_caught():
    """The save itself detects it before the commit, because it checks the sizes again."""
    with pytest.raises(SaveFailed, match="bytes before the commit"):
        large(1, is_direct=True).record(
            call(lambda recorder, name, args: name == "ftruncate" and is_data(recorder, args))
        )


def test_a_manifest_that_does_not_wait_for_the_second_writer_is_caught():
    """C01: the writer's file is still synced and named, but a moment later."""

    def early(done):
        inode = next(e.inode for e in done if isinstance(e, Move) and e.name.startswith("large-00001"))
        late = [i for i, e in enumerate(done) if isinstance(e, Sync | Move) and e.inode == inode]
        manifest = first_name(done, "manifest.json")
        committed = next(i for i, e in enumerate(done) if i > manifest and isinstance(e, Sync))
        before = [e for i, e in enumerate(done[: committed + 1]) if i not in late]
        return [*before, *(done[i] for i in late), *done[committed + 1 :]]

    assert what_is_lost(large(1, is_direct=False, writers=2), change=early)


def test_a_store_that_does_not_sync_the_directory_of_large_files_is_caught():
    def forgets(done):
        manifest = first_name(done, "manifest.json")
        _, _, named = places_of_large(done)
        synced = [i for i, e in enumerate(done) if named < i < manifest and e == Sync(done[named].directory)]
        return without(done, *synced)

    assert any("not whole" in wrong for wrong in what_is_lost(large(8, is_direct=True), change=forgets))


def test_a_pointer_that_moves_before_the_commit_is_caught(effects):
    """E02: `latest` then leads to a directory that is not a checkpoint yet, or never becomes one."""
    done = effects("second_save")
    manifest = [i for i, effect in enumerate(done) if is_named(effect, "manifest.json")][-1]
    linked = next(
        i for i, effect in enumerate(done) if i > manifest and isinstance(effect, Bind) and effect.kind == "link"
    )
    early = moved(moved(done, linked, manifest), linked + 1, manifest + 1)
    assert any("which is not a checkpoint" in wrong for wrong in is_caught(early))


def test_a_manager_that_deletes_before_it_commits_is_caught(effects):
    """E03: a crash in between leaves too few checkpoints, and none if one is kept."""
    done = effects("prune")
    manifest = [i for i, effect in enumerate(done) if is_named(effect, "manifest.json")][-1]
    deleted = [
        i
        for i, effect in enumerate(done)
        if i > manifest and isinstance(effect, Unbind) and not effect.name.startswith(".")
    ]
    first = next(i for i in deleted if done[i].name == "manifest.json")
    early = moved(moved(done, first, manifest), first + 1, manifest + 1)  # with its sync
    assert any("acknowledged" in wrong for wrong in is_caught(early))


def test_a_commit_that_renames_and_does_not_link_is_caught(tmp_path):
    """C05: a rename would replace a checkpoint that another process has committed under this name meanwhile."""

    def commit_again(scene):
        scene.save(1)
        with suppress(CommitConflict):
            LocalStore(scene.run).commit("step-00000001/manifest.json", b"another writer's")

    def renames(recorder, real, args, kwargs):
        del real
        return recorder("rename", os_rename, args, {key: kwargs[key] for key in ("src_dir_fd", "dst_dir_fd")})

    os_rename = os.rename
    assert is_caught(record(commit_again)) is None
    mutant = call(lambda recorder, name, args: name == "link" and args[1] == "manifest.json", renames)
    assert any("acknowledged" in wrong for wrong in is_caught(record(commit_again, mutant=mutant)))


# --- other ways to save ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "verdicts"),
    [
        ("dcp", {"torn", "lost"}),
        ("torch.save, replace", {"torn", "lost"}),
        ("torch.save, fsync, replace", {"lost"}),
    ],
)
def test_what_others_have_acknowledged_a_crash_may_take_away(name, verdicts):
    """Torch's own ways to save sync the metadata before it is flushed, and never sync a directory."""
    counts = failures(RIVALS[name], rivals.record(RIVALS[name]), Budget(32, 8))
    say(f"{name}, after a save had returned: {dict(counts)}")
    assert counts["whole"], "the rival loads where nothing was lost"
    assert verdicts <= counts.keys()


def test_distributed_checkpoint_syncs_its_metadata_before_there_is_anything_in_it():
    """Independent of the model of a disk: the order of the calls shows it."""
    done = rivals.record(RIVALS["dcp"])
    inode = next(effect.inode for effect in done if isinstance(effect, Bind) and effect.name.startswith(".metadata"))
    about = [type(effect).__name__ for effect in done if getattr(effect, "inode", None) == inode]
    assert about == ["Bind", "Sync", "Write", "Move"]
