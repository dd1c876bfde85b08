"""Teeth: where something is left out on purpose, and where others leave it out, the same harness finds what is lost."""

import pytest

from crash import rivals
from crash.effects import Bind, Move, Sync, Unbind
from crash.effort import say
from crash.recovery import Examiner, promises
from crash.rivals import RIVALS, failures
from crash.scenarios import SCENARIOS, record
from crash.states import Budget, crash_states

SMALL = Budget(32, 4)


@pytest.fixture(scope="module")
def effects():
    """The effects of each scenario; recorded once."""
    known = {}
    return lambda name: known.setdefault(name, record(SCENARIOS[name]))


def is_caught(mutant):
    """The first broken promise, or None."""
    promised, examiner = promises(mutant), Examiner(go_on_share=0)
    for state in crash_states(mutant, SMALL):
        if wrong := examiner.wrong(state, promised[state.done]):
            return wrong
    return None


def syncs_of_files(effects, name):
    """Where the file is synced that gets a name."""
    inodes = {effect.inode for effect in effects if isinstance(effect, Bind | Move) and effect.name == name}
    return [i for i, effect in enumerate(effects) if isinstance(effect, Sync) and effect.inode in inodes]


def is_named(effect, name):
    return isinstance(effect, Bind | Move) and effect.name == name


def first_name(effects, name):
    return next(i for i, effect in enumerate(effects) if is_named(effect, name))


def without(effects, *places):
    """A store that does not do these effects: a sync that is left out changes nothing else of what is done."""
    assert places
    return [effect for i, effect in enumerate(effects) if i not in places]


def test_a_store_as_it_is_keeps_its_promises(effects):
    """Else the tests below would prove nothing."""
    assert is_caught(effects("second_save")) is None


@pytest.mark.parametrize("name", ["model-00000-of-00001.safetensors", "manifest.json", "run.json"])
def test_a_store_that_does_not_sync_a_file_is_caught(effects, name):
    done = effects("second_save")
    assert is_caught(without(done, *syncs_of_files(done, name)))


def test_a_store_that_does_not_sync_the_directory_before_the_manifest_is_caught(effects):
    """The manifest is then there before the files that it names."""
    done = effects("first_save")
    manifest = first_name(done, "manifest.json")
    directory = done[manifest].directory
    places = [i for i, effect in enumerate(done[:manifest]) if isinstance(effect, Sync) and effect.inode == directory]
    assert any("not whole" in wrong or "refused" in wrong for wrong in is_caught(without(done, *places)))


def test_a_store_that_does_not_sync_the_directory_after_the_manifest_is_caught(effects):
    """The save has then returned, and a crash may lose it: a false acknowledgement."""
    done = effects("first_save")
    manifest = first_name(done, "manifest.json")
    directory = done[manifest].directory
    places = [i for i, e in enumerate(done) if i > manifest and isinstance(e, Sync) and e.inode == directory]
    assert any("acknowledged" in wrong for wrong in is_caught(without(done, *places)))


def test_a_store_that_does_not_sync_the_runs_directory_is_caught(effects):
    """A step's directory is then lost with all that was synced in it."""
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
    """A crash then finds neither."""
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
    """Somebody would have to clean up by hand."""
    done = effects("first_save")
    promised, examiner = promises(done), Examiner(go_on_share=1)
    monkeypatch.setattr("trainfold.backends.local.collect", lambda _: [])
    wrong = (examiner.wrong(state, promised[state.done]) for state in crash_states(done, Budget(4, 1)))
    assert any("left after the lock was taken" in each for found in wrong for each in found)


@pytest.mark.parametrize(
    ("name", "verdicts"),
    [
        ("dcp", {"torn", "lost"}),
        ("torch.save, replace", {"torn", "lost"}),
        ("torch.save, fsync, replace", {"lost"}),
    ],
)
def test_what_others_have_acknowledged_a_crash_may_take_away(name, verdicts):
    """Torch's own ways to save: the metadata is synced before it is flushed, and no directory ever is."""
    counts = failures(RIVALS[name], rivals.record(RIVALS[name]), Budget(32, 8))
    say(f"{name}, after a save had returned: {dict(counts)}")
    assert counts["whole"], "the rival loads where nothing was lost"
    assert verdicts <= counts.keys()


def test_distributed_checkpoint_syncs_its_metadata_before_there_is_anything_in_it():
    """So that nobody has to take the model's word for it: it is the order of the calls."""
    done = rivals.record(RIVALS["dcp"])
    inode = next(effect.inode for effect in done if isinstance(effect, Bind) and effect.name.startswith(".metadata"))
    about = [type(effect).__name__ for effect in done if getattr(effect, "inode", None) == inode]
    assert about == ["Bind", "Sync", "Write", "Move"]
