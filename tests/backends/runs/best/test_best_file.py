"""The best of a run on a disk survives restarts, moves and crashes; it is never lost or replaced silently."""

import json
import math
import shutil
import warnings

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.backends import best_file_cases
from kit.backends.best_file_cases import LIKE, WANTED, best_name, best_names, best_scores, save_at, won
from kit.backends.runs_cases import state_at

from trainfold.backends.runs.api import load, save
from trainfold.backends.runs.best.best_file import (
    BestIgnored,
    load_best,
    load_best_n,
    save_best,
)
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.best.record import is_better, make_best_record, updated
from trainfold.core.best.top_n import BestEntry, plan_best, rewound
from trainfold.core.errors import (
    CheckpointUnreadable,
    InvalidArgument,
    InvalidState,
)
from trainfold.core.format.file_names import MANIFEST, directory_of
from trainfold.core.state.state import Progress, TrainState

store = best_file_cases.store


@settings(max_examples=40)
@given(
    history=st.lists(st.none() | st.sampled_from([math.nan, math.inf, 0.0, 0.1, 0.5, 1.0]), min_size=1, max_size=8),
    restarts=st.sets(st.integers(0, 8)),
    direction=st.sampled_from(["min", "max"]),
)
def test_a_run_with_restarts_has_the_best_of_one_without(history, restarts, direction):
    """E09, P24: a worse score never wins after a restart; NaN first, zero and absence included."""
    store, wanted = MemoryStore(), make_best_record(metric="loss", direction=direction)
    best = through = wanted
    for step, score in enumerate(history):
        save_at(store, step)
        best = updated(best, {"loss": score}, step=step)
        if step in restarts:
            through = load_best(store, wanted)
        if is_better(through, {"loss": score}):
            through = save_best(store, updated(through, {"loss": score}, step=step))
    assert (through.score, through.step) == (best.score, best.step)
    assert load_best(store, wanted).score == best.score


def test_after_a_restart_a_worse_score_does_not_win(store):
    """E09: the record is the earlier one, with the run's own id; also if the caller passes the id."""
    save_at(store, 10, 20)
    saved = save_best(store, won(0.5, 10))
    assert saved.run_id == read_inventory(store).run_id
    again = load_best(store, WANTED)
    assert again == saved == load_best(store, attrs.evolve(WANTED, run_id=saved.run_id))
    assert not is_better(again, {"loss": 0.6})


def test_another_min_delta_does_not_forget_the_best(store):
    """P24: min_delta sets how much better the next result must be; it does not change the current best."""
    save_at(store, 10)
    save_best(store, won(0.5, 10))
    found = load_best(store, attrs.evolve(WANTED, min_delta=0.1))
    assert (found.score, found.step, found.min_delta) == (0.5, 10, 0.1)


def test_a_run_that_was_moved_keeps_its_best(tmp_path):
    """E09, F43: the file does not contain the run's path."""
    save_at(tmp_path / "old", 10)
    saved = save_best(tmp_path / "old", won(0.5, 10))
    shutil.move(tmp_path / "old", tmp_path / "elsewhere" / "new")
    assert load_best(tmp_path / "elsewhere" / "new", WANTED) == saved
    assert str(tmp_path) not in (tmp_path / "elsewhere" / "new" / "best.json").read_text()


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (make_best_record(metric="accuracy", direction="min"), "metric 'loss', not 'accuracy'"),
        (make_best_record(metric="loss", direction="max"), "direction 'min', not 'max'"),
        (make_best_record(metric="loss", direction="min", run_id="b"), "not 'b'"),
    ],
)
def test_a_best_about_something_else_is_ignored_with_a_warning(store, wanted, reason):
    """E09: and the caller starts with the record that it asked for."""
    save_at(store, 10)
    save_best(store, won(0.5, 10))
    with pytest.warns(BestIgnored, match=reason):
        found = load_best(store, wanted)
    assert (found.metric, found.direction, found.min_delta, found.score) == (
        wanted.metric, wanted.direction, wanted.min_delta, None,
    )  # fmt: skip


def test_a_best_that_was_copied_from_another_run_is_ignored_with_a_warning(tmp_path):
    """E09: by the run id, although a checkpoint of the same step is there."""
    for name in ("a", "b"):
        save_at(tmp_path / name, 10)
    save_best(tmp_path / "a", won(0.5, 10))
    shutil.copy(tmp_path / "a" / "best.json", tmp_path / "b")
    with pytest.warns(BestIgnored, match="of run"):
        assert load_best(tmp_path / "b", WANTED).score is None


def test_a_best_whose_checkpoint_is_gone_or_broken_is_ignored_with_a_warning(tmp_path):
    """E09, P24: a dead best cannot be loaded, so it must not stand in the way of a living one."""
    state = TrainState(trainer=Progress(step=10), extra={"w": torch.ones(3)})
    save(state, tmp_path)
    save_at(tmp_path, 20)
    save_best(tmp_path, won(0.5, 10))
    for file in (tmp_path / directory_of(10)).glob("*.safetensors"):
        file.unlink()
    with pytest.warns(BestIgnored, match="the checkpoint of step 10 is not there any more"):
        assert load_best(tmp_path, WANTED).score is None
    shutil.rmtree(tmp_path / directory_of(10))
    with pytest.warns(BestIgnored, match="the checkpoint of step 10"):
        found = load_best(tmp_path, WANTED)
    assert save_best(tmp_path, won(0.9, 20, found)).score == 0.9


class Denied(MemoryStore):
    """A store that does not give some files now, or no list of a run."""

    files, lists = frozenset(), True

    def _check(self, name):
        if name in self.files or (not name and not self.lists):
            raise CheckpointUnreadable(f"{self.url}/{name}", expected="bytes from the store", found="503", fix="wait")

    def read(self, name, *, start=0, stop=None):
        self._check(name)
        return super().read(name, start=start, stop=stop)

    def size(self, name):
        self._check(name)
        return super().size(name)

    def list(self, prefix=""):
        self._check(prefix)
        return super().list(prefix)


@pytest.mark.parametrize("lost", [MANIFEST, "model-00000-of-00001.safetensors", None])
def test_a_best_that_cannot_be_read_now_is_not_taken_for_one_that_is_gone(lost):
    """E09, P07: a worse one took its place in best.json, and the retention deleted it, since the bucket answered 503 once."""
    store = Denied()
    for step in (10, 20, 30):
        save(state_at(step), store)
    best = save_best(store, won(0.3, 20), kept=[BestEntry(0.3, 20), BestEntry(0.5, 10)])
    was = store.read("best.json")
    store.files, store.lists = frozenset() if lost is None else {f"{directory_of(10)}/{lost}"}, lost is not None
    with pytest.raises(CheckpointUnreadable, match="503"):
        load_best_n(store, WANTED)
    with pytest.raises(CheckpointUnreadable, match="503"):
        save_best(store, won(0.1, 30, best))
    store.files, store.lists = frozenset(), True
    assert store.read("best.json") == was
    assert load_best_n(store, WANTED) == (BestEntry(0.3, 20), BestEntry(0.5, 10))


def test_what_a_best_that_cannot_be_read_says_to_delete_is_its_manifest_alone():
    """E09, P08: others may refer to its files; and of a `run.json` that could not be read, it said to delete the directory: the run."""
    store = Denied()
    for step in (10, 20):
        save(state_at(step), store)
    save_best(store, won(0.5, 10))
    for name in (f"{directory_of(10)}/{MANIFEST}", f"{directory_of(10)}/model-00000-of-00001.safetensors"):
        store.files = {name}
        with pytest.raises(CheckpointUnreadable) as caught:
            load_best(store, WANTED)
        assert caught.value.fix.endswith(f"delete {store.url}/{directory_of(10)}/{MANIFEST}, and the best goes on without it")  # fmt: skip
    store.files = {"run.json"}
    with pytest.raises(CheckpointUnreadable, match="503") as caught:
        load_best(store, attrs.evolve(WANTED, run_id="a"))
    assert "delete" not in caught.value.fix
    store.files = frozenset()
    store.delete(f"{directory_of(10)}/{MANIFEST}")
    with pytest.warns(BestIgnored, match="step 10 is not there any more"):
        assert load_best(store, WANTED).score is None


def test_an_old_best_that_cannot_be_read_does_not_stop_a_better_one():
    """E09: nothing depends on it."""
    store = Denied()
    save_at(store, 10, 20)
    best = save_best(store, won(0.5, 10))
    store.files = {f"{directory_of(10)}/{MANIFEST}"}
    assert save_best(store, won(0.1, 20, best)).step == 20


def test_where_there_is_no_best_none_is_warned_of(store):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_best(store, WANTED) == WANTED
        save_at(store, 10)
        assert load_best(store, WANTED).score is None
    assert best_name(store) is None


# --- rewinds ---------------------------------------------------------------------------------------------------------


def test_a_best_that_a_rewind_left_behind_is_gone_and_one_below_it_stays(store):
    """E12: once the new timeline is saved; until then a crash continues from the old one, and from its best."""
    save_at(store, 10, 20, 30)
    save_best(store, won(0.5, 20))
    load(store, like=LIKE, step=10)
    assert load_best(store, WANTED).step == 20
    save_at(store, 15)  # the rewind: a new timeline grows from step 10
    with pytest.warns(BestIgnored, match="step 20"):
        assert load_best(store, WANTED).score is None
    save_at(store, 20)  # a checkpoint of the same step, and not the one that was measured
    with pytest.warns(BestIgnored, match="step 20"):
        assert load_best(store, WANTED).score is None
    save_best(store, won(0.7, 15))
    save_at(store, 17)  # another rewind, behind 15
    assert load_best(store, WANTED).step == 15


def test_a_step_that_is_saved_again_keeps_its_best(store):
    save_at(store, 10)
    saved = save_best(store, won(0.5, 10))
    save_at(store, 10)
    assert load_best(store, WANTED) == saved


def test_after_going_back_a_worse_best_may_be_saved(store):
    """E12: the caller has cleared its record; the file of the steps left behind does not hinder it."""
    save_at(store, 10, 20)
    save_best(store, won(0.5, 20))
    assert save_best(store, won(0.9, 10)).step == 10


# --- the N best ------------------------------------------------------------------------------------------------------


def evaluated(store, record, kept, score, step, n):
    """Act as a loop after an evaluation: save a state that is the best, or one of the best."""
    record = updated(record, {"loss": score}, step=step)
    plan = plan_best(kept, BestEntry(score, step), n=n, direction=record.direction)
    if plan.accepted:
        record = save_best(store, record, kept=plan.kept)
    return record, plan.kept


@settings(max_examples=40)
@given(
    history=st.lists(st.none() | st.sampled_from([math.nan, math.inf, 0.0, 0.1, 0.5, 1.0]), min_size=1, max_size=8),
    restarts=st.sets(st.integers(0, 8)),
    n=st.integers(1, 3),
    direction=st.sampled_from(["min", "max"]),
)
def test_a_run_with_restarts_has_the_n_best_of_one_without(history, restarts, n, direction):
    """E09, E11, F43: and exactly their checkpoints are kept; the pointer leads to the first of them."""
    store, wanted = MemoryStore(), make_best_record(metric="loss", direction=direction)
    record, kept, model = wanted, (), ()
    for step, score in enumerate(history):
        save_at(store, step)
        if step in restarts:
            record, kept = load_best(store, wanted), load_best_n(store, wanted)
        record, kept = evaluated(store, record, kept, score, step, n)
        model = plan_best(model, BestEntry(score, step), n=n, direction=direction).kept
    assert kept == model == load_best_n(store, wanted)
    assert list(best_names(store)) == [directory_of(entry.step) for entry in model]
    assert best_scores(store) == {(directory_of(entry.step), 0): entry.score for entry in model}
    assert store.point_target("best") == (directory_of(model[0].step) if model else None)


def test_the_n_best_are_lost_to_no_restart_and_held_by_no_path(store):
    save_at(store, 10, 20, 30)
    kept = (BestEntry(0.3, 20), BestEntry(0.5, 10))
    save_best(store, won(0.3, 20), kept=kept[::-1])  # in any order
    assert load_best_n(store, WANTED) == kept
    assert load_best(store, WANTED).step == 20
    assert best_names(store) == {directory_of(20): "the best", directory_of(10): "one of the best 2"}
    assert best_name(store) == directory_of(20)


def test_a_best_that_is_saved_without_the_others_keeps_them(store):
    """A caller that forgets to pass the N best does not lose their checkpoints."""
    save_at(store, 10, 20, 30)
    kept = (BestEntry(0.3, 20), BestEntry(0.5, 10))
    best = save_best(store, won(0.3, 20), kept=kept)
    save_best(store, won(0.1, 30, best))
    assert load_best_n(store, WANTED) == kept
    assert set(best_names(store)) == {directory_of(step) for step in (10, 20, 30)}
    save_best(store, won(0.1, 30, best), kept=())
    assert load_best_n(store, WANTED) == (BestEntry(0.1, 30),)


def test_where_one_best_was_saved_it_is_the_only_entry(store):
    """As in a file of version 1, the format that such a best still has."""
    save_at(store, 10)
    save_best(store, won(0.5, 10))
    assert load_best_n(store, WANTED) == (BestEntry(0.5, 10),)
    assert json.loads(store.read("best.json"))["version"] == 1
    save_best(store, won(0.5, 10), kept=[BestEntry(0.5, 10)])
    assert json.loads(store.read("best.json"))["version"] == 2


def test_an_entry_whose_checkpoint_is_gone_is_left_out_with_a_warning_and_the_others_stay(tmp_path):
    """E09, P24."""
    save_at(tmp_path, 10, 20, 30)
    save_best(tmp_path, won(0.3, 20), kept=[BestEntry(0.3, 20), BestEntry(0.4, 30), BestEntry(0.5, 10)])
    shutil.rmtree(tmp_path / directory_of(30))
    with pytest.warns(BestIgnored, match="the checkpoint of step 30 is not there any more"):
        assert load_best_n(tmp_path, WANTED) == (BestEntry(0.3, 20), BestEntry(0.5, 10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_best(tmp_path, WANTED).step == 20


def test_n_best_about_something_else_are_ignored_with_a_warning(store):
    save_at(store, 10)
    save_best(store, won(0.5, 10), kept=[BestEntry(0.5, 10)])
    other = make_best_record(metric="accuracy", direction="max")
    with pytest.warns(BestIgnored, match="metric 'loss', not 'accuracy'; it is of direction"):
        assert load_best_n(store, other) == ()
    with pytest.raises(InvalidArgument, match="wanted"):
        load_best_n(store, "loss")


def test_a_rewind_drops_the_entries_behind_it_and_keeps_those_below(store):
    """E12: once the new timeline is saved; a step that is trained again is not the step that was scored."""
    save_at(store, 10, 20, 30)
    kept = (BestEntry(0.1, 20), BestEntry(0.2, 30), BestEntry(0.5, 10))
    save_best(store, won(0.1, 20), kept=kept)
    save_at(store, 15)
    save_at(store, 20)
    with pytest.warns(BestIgnored) as told:
        assert load_best_n(store, WANTED) == rewound(kept, 15) == (BestEntry(0.5, 10),)
    assert "step 20 is not there any more; the checkpoint of step 30" in str(told[0].message)
    plan = plan_best(rewound(kept, 15), BestEntry(0.4, 20), n=3, direction="min")
    save_best(store, won(0.4, 20), kept=plan.kept)
    assert load_best_n(store, WANTED) == (BestEntry(0.4, 20), BestEntry(0.5, 10))
    assert best_scores(store) == {(directory_of(20), 1): 0.4, (directory_of(10), 0): 0.5}


def test_n_best_that_nobody_loaded_are_not_lost_to_worse_ones(store):
    """P24: a restart that forgot load_best_n gets a warning."""
    save_at(store, 10, 20, 30)
    best = save_best(store, won(0.3, 10), kept=[BestEntry(0.3, 10), BestEntry(0.5, 20)])
    with pytest.raises(InvalidState, match=r"found 0\.5 at step 20, which would be dropped; start with load_best_n"):
        save_best(store, best, kept=[BestEntry(0.3, 10), BestEntry(0.6, 30)])
    save_best(store, best, kept=[BestEntry(0.3, 10), BestEntry(0.4, 30)])
    save_best(store, best, kept=[BestEntry(0.3, 10)])  # a lower n
    assert load_best_n(store, WANTED) == (BestEntry(0.3, 10),)
