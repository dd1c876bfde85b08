"""Rewinds on a disk: descendants of the loaded checkpoint are resumed, kept and scored; abandoned steps stay unchanged."""

import errno
import itertools
import warnings
from contextlib import suppress

import attrs
import pytest
import torch
from kit.backends.best_file_cases import best_scores

from trainfold.adapters.live.attach import attach
from trainfold.adapters.live.live import Live
from trainfold.adapters.manager.loading import RunLoader
from trainfold.backends.ranks.in_process import SingleProcess, run_threads
from trainfold.backends.runs.api import load
from trainfold.backends.runs.best.best_file import BestIgnored, load_best, load_best_n, save_best
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.runs.quarantine_file import begin_attempt, end_attempt, quarantined
from trainfold.backends.runs.save import save_snapshot
from trainfold.backends.runs.scan import read_inventory, read_manifest
from trainfold.backends.runs.snapshot import describe_state
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import CrashAt, ErrorAt, MemoryStore, SimulatedCrash
from trainfold.backends.tiers.pruner import Pruner
from trainfold.core.best.record import make_best_record, updated
from trainfold.core.best.top_n import BestEntry
from trainfold.core.data.cursor import DataCursor
from trainfold.core.errors import InvalidState, RestoreRefused, ResumeRefused, SaveFailed
from trainfold.core.format.file_names import MANIFEST, directory_of
from trainfold.core.history.inventory import lineage
from trainfold.core.history.quarantine import LoadOutcome
from trainfold.core.layout.shard import make_shard
from trainfold.core.rng import make_key
from trainfold.core.save.retention import keep_best, keep_last
from trainfold.core.state.parent_checkpoint import ParentCheckpoint
from trainfold.core.state.state import Progress, TrainState

WANTED = make_best_record(metric="loss", direction="min")
DAMAGED = LoadOutcome("damaged", "its digest is another one")


def state_at(step, value=None):
    weights = torch.full((8,), float(step if value is None else value))
    return TrainState(trainer=Progress(step=step), rng=make_key(step), extra={"w": weights})


def save_from(store, descent, step, value=None, *, world=None, keeper=None):
    """Save, and delete what may go, as a manager does; the result."""
    result = save_snapshot(
        lambda: describe_state(state_at(step, value)),
        store,
        collectives=world or SingleProcess(),
        lock=False,
        descends_from=descent,
    )
    if keeper is not None:
        keeper.retain(result)
    return result


def trained(store, *steps, descent=None, keeper=None):
    """Save these, one after the other; the last result."""
    for step in steps:
        result = save_from(store, descent, step, keeper=keeper)
        descent = result.descent
    return result


def resumer_of(store, world=None, components=None):
    return RunLoader(store, world or SingleProcess(), components, None, {})


def loaded_from(store, step):
    resumer = resumer_of(store)
    resumer.load(state_at(0), step=step, reset=None)
    return resumer.descent


def damage(store, step):
    """Lose a file of a checkpoint."""
    name = next(name for name in store.list(directory_of(step)) if name != MANIFEST)
    store.delete(f"{directory_of(step)}/{name}")


def steps_of(store):
    return [entry.head.step for entry in lineage(read_inventory(store))]


def present(store):
    return [entry.head.step for entry in read_inventory(store).entries if entry.head is not None]


@pytest.fixture
def store():
    store = MemoryStore()
    trained(store, 100, 200, 300, 400, 500)
    return store


# --- what is resumed, and what is kept -------------------------------------------------------------------------------


def test_a_save_above_everything_goes_on_from_what_was_loaded(store):
    """E16, E05, T41, M18: load 100, save 600, keep three: the parent stays, what was left behind stays, and never wins."""
    save_from(store, loaded_from(store, 100), 600, keeper=Pruner(store, keep_last(3)))
    assert present(store) == [100, 200, 300, 400, 500, 600]
    assert steps_of(store) == [600, 100]
    damage(store, 600)
    with pytest.warns(CheckpointPassedOver):
        assert load(store, like=state_at(0)).trainer.step == 100


def test_retention_counts_the_ancestors_of_the_new_path_and_no_others(store):
    """E05, E06, E16: keep three of 600, 610, 300, 200, 100; 400 and 500 neither count nor go."""
    trained(store, 600, 610, descent=loaded_from(store, 300), keeper=Pruner(store, keep_last(3)))
    assert present(store) == [300, 400, 500, 600, 610]
    assert steps_of(store) == [610, 600, 300]
    trained(store, 520, descent=loaded_from(store, 500), keeper=Pruner(store, keep_last(2)))
    assert present(store) == [500, 520, 600, 610], "300 and 400 are ancestors of 520"
    assert steps_of(store) == [520, 500]


def test_a_way_that_was_left_behind_can_be_taken_up_again(store):
    """E16: timeline 1 is at 120, 500 of timeline 0 is loaded, and 510 saved: its parent is 500."""
    trained(store, 110, 120, descent=loaded_from(store, 100))
    result = save_from(store, loaded_from(store, 500), 510)
    assert result.descent == ParentCheckpoint(2, 510, ((0, 500),))
    assert read_manifest(store, directory_of(510)).head.parent == directory_of(500)
    assert steps_of(store) == [510, 500, 400, 300, 200, 100]


def test_what_was_passed_over_and_left_behind_never_wins_though_it_loads_again(store):
    """E16, P07: 500 did not load three times, 400 was taken, 600 saved; then 500 is found to be good."""
    for _ in range(3):
        begin_attempt(store, directory_of(500))
    with pytest.warns(CheckpointPassedOver, match="Quarantined"):
        descent = loaded_from(store, None)
    assert descent == ParentCheckpoint(0, 400)
    save_from(store, descent, 600)
    loaded_from(store, 500)
    assert quarantined(store) == {}
    assert steps_of(store) == [600, 400, 300, 200, 100]


@pytest.mark.parametrize("fault", [CrashAt, lambda index: ErrorAt(index, errno.EIO)])
@pytest.mark.parametrize("step", [300, 600])
def test_a_rewound_save_that_fails_loses_nothing_of_what_it_would_leave_behind(fault, step):
    """E16, S08: at whichever effect it fails or the machine dies, in the place of a step or in a new one; and retention after it."""
    for index in itertools.count():
        store = MemoryStore()
        trained(store, 100, 200, 300, 400)
        descent, acknowledged = loaded_from(store, 200), []
        begun = store._attempts
        store._fault = fault(begun + index)
        with suppress(SaveFailed, SimulatedCrash):
            acknowledged.append(save_from(store, descent, step, -1, keeper=Pruner(store, keep_last(2))))
        for keeps in (True, False):
            _check_disk(store.after_crash(len(store.effects), keep_unsynced=keeps), step, bool(acknowledged))
        if store._attempts <= begun + index:
            break
    assert index > 10
    assert present(store) == sorted({200, 300, 400, step}), "100 is all that goes"


def _check_disk(disk, step, is_acknowledged):
    """A resume there continues from the new one or from the newest old one, and the others are unchanged."""
    there = present(disk)
    values = {one: load(disk, like=state_at(0), step=one).extra["w"][0].item() for one in there}
    is_new = values.get(step) == -1
    assert is_new or not is_acknowledged
    assert {200, 300, 400} <= set(there)
    assert 100 in there or is_new, "nothing is deleted before the new one is durable"
    assert values == {one: -1.0 if one == step and is_new else float(one) for one in there}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointPassedOver)
        assert load(disk, like=state_at(0)).trainer.step == (step if is_new else 400)


# --- a step that is trained again ------------------------------------------------------------------------------------


def test_the_score_of_a_step_does_not_go_to_the_one_that_takes_its_place(store):
    """E12: load 400, train 500 again: the score in best.json is not of these weights, for the best, the N best and retention."""
    save_best(store, updated(WANTED, {"loss": 0.1}, step=500), kept=[BestEntry(0.1, 500), BestEntry(0.3, 200)])
    keeper = Pruner(store, keep_best(1, direction="min"))
    assert save_from(store, loaded_from(store, 400), 500, -1, keeper=keeper).timeline == 1
    assert (directory_of(500), 1) not in best_scores(store)
    with pytest.warns(BestIgnored, match="step 500"):
        assert load_best(store, WANTED).score is None
    with pytest.warns(BestIgnored, match="step 500"):
        assert load_best_n(store, WANTED) == (BestEntry(0.3, 200),)
    with pytest.raises(InvalidState, match="found timeline 1"):
        resumer_of(store).load_best(state_at(0))
    trained(store, 510, descent=ParentCheckpoint(1, 500, ((0, 400),)), keeper=keeper)
    assert present(store) == [200, 510], "500 is another state than the best, and has no score"
    assert store.point_target("best") == directory_of(200)
    save_best(store, updated(WANTED, {"loss": 0.2}, step=510))
    assert load_best(store, WANTED).score == 0.2


def test_the_weights_of_a_best_that_was_left_behind_are_not_taken_for_the_runs_best(store):
    """E12, E15: until something is measured on the new way; nothing is lost, and a step can be asked for."""
    save_best(store, updated(WANTED, {"loss": 0.1}, step=500))
    save_from(store, loaded_from(store, 100), 600)
    with pytest.raises(InvalidState, match="left behind"):
        resumer_of(store).load_best(state_at(0))
    assert load(store, like=state_at(0), step=500).extra["w"][0] == 500


def test_what_takes_the_place_of_a_quarantined_step_is_free(store):
    """P07: it is another checkpoint, of another timeline."""
    begin_attempt(store, directory_of(500))
    end_attempt(store, directory_of(500), DAMAGED)
    assert list(quarantined(store)) == [directory_of(500)]
    save_from(store, loaded_from(store, 400), 500, -1, keeper=Pruner(store, keep_last(2)))
    assert quarantined(store) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(store, like=state_at(0)).extra["w"][0] == -1
    assert present(store) == [400, 500]


# --- retention and what lies beside ----------------------------------------------------------------------------------


def test_directories_that_are_torn_or_only_look_like_checkpoints_neither_count_nor_go(tmp_path):
    """T40, E01: however many they are, the last good ones stay; what is not named as a step is, is not touched."""
    store = LocalStore(tmp_path)
    keeper = Pruner(store, keep_last(2))
    strange = ["old-step-00000001", "step-00000001.bak", "step-1", "step-00000004x", "xstep-00000005"]
    for name in strange:
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    result = trained(store, 10, 20, keeper=keeper)
    for step in (30, 40, 50):
        (tmp_path / directory_of(step)).mkdir()  # torn, and newer than what comes next
        (tmp_path / directory_of(step) / "w-00000-of-00001.safetensors").write_bytes(b"half")
    trained(store, 25, descent=result.descent, keeper=keeper)
    assert steps_of(store) == present(store)[::-1] == [25, 20]
    assert all((tmp_path / name / "notes.txt").read_text() == "mine" for name in strange)


def test_a_generation_goes_as_a_whole(tmp_path):
    """M21, E05: counters, random state, data position and every rank's files lie in the checkpoint's directory and go with it."""
    store = LocalStore(tmp_path)
    keeper = Pruner(store, keep_last(2))
    for step in (1, 2, 3, 4):
        state = state_at(step).evolve(dataset=DataCursor(epoch=0, next_index=step, length=9, seed=0))

        def save_one(world, state=state):
            part = make_shard(torch.full((8,), float(world.rank)), shape=(24,), starts=(8 * world.rank,))
            mine = state.evolve(extra={"w": part})
            return save_snapshot(lambda: describe_state(mine), store, collectives=world, lock=world.rank == 0)

        results = run_threads(3, save_one)
        keeper.retain(results[0])
    kept = [directory_of(step) for step in (3, 4)]
    steps = [path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()]
    assert sorted(path.name for path in steps) == kept
    assert {path.name for path in tmp_path.iterdir() if not path.is_dir()} <= {"run.json", ".lock", "lock"}
    for name in kept:
        named = set(read_manifest(store, name).names)
        assert {"index-00001-of-00003.json", "index-00002-of-00003.json"} <= named
        assert {path.name for path in (tmp_path / name).iterdir()} == {MANIFEST, *named}


# --- what a load says of its origin ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_was_loaded_is_known_and_the_same_on_every_rank(store, world_size):
    """E16: the newest, an explicit step, and what a damaged one was passed over for."""
    save_from(store, loaded_from(store, 300), 350)
    damage(store, 350)

    def look(world):
        resumer = resumer_of(store, world)
        found = [resumer.descent]
        for step in (500, 200, None):
            resumer.load(state_at(0), step=step, reset=None)
            found.append(resumer.descent)
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointPassedOver)
        outcomes = run_threads(world_size, look)
    assert (
        outcomes == [[None, ParentCheckpoint(0, 500), ParentCheckpoint(0, 200), ParentCheckpoint(0, 300)]] * world_size
    )


def test_a_load_that_failed_and_the_weights_of_the_best_do_not_change_where_a_state_comes_from(monkeypatch):
    store, live = MemoryStore(), attach(torch.nn.Linear(1, 1))
    for _ in range(2):
        live.advance(samples=1)
        save_snapshot(lambda: describe_state(live.capture()), store, collectives=SingleProcess())
    save_best(store, updated(WANTED, {"loss": 0.0}, step=2))
    resumer = resumer_of(store)
    resumer.load(live, step=1, reset=None)
    assert resumer.load_best(live)[1] == 2
    with pytest.raises(ResumeRefused):
        resumer.load(live, step=7, reset=None)

    def refuse(*_, **__):
        raise RestoreRefused("live", ("no",))

    monkeypatch.setattr(Live, "restore", refuse)
    with pytest.raises(RestoreRefused):
        resumer.load(live, step=2, reset=None)
    assert resumer.descent == ParentCheckpoint(0, 1)


def test_every_rank_is_told_what_a_save_has_become_and_rank_0_decides_it(store):
    """E16: the descent of rank 0 counts."""

    def save_one(world):
        return save_from(store, ParentCheckpoint(0, 200 + 100 * world.rank), 600, world=world)

    results = run_threads(2, save_one)
    assert [result.descent for result in results] == [ParentCheckpoint(1, 600, ((0, 200),))] * 2
    assert attrs.evolve(results[0].descent, step=250) == ParentCheckpoint(1, 250, ((0, 200),))
