"""`plan_pruning`: it deletes only proved, unprotected checkpoints, whatever the run contains, and keeps the newest."""

import attrs
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from trainfold.core.best.best_json import BestFile
from trainfold.core.best.record import BestRecord
from trainfold.core.best.top_n import BestEntry
from trainfold.core.format.file_names import directory_of
from trainfold.core.format.manifest import Head, Manifest
from trainfold.core.history.inventory import Entry, Inventory, lineage
from trainfold.core.problem import Problem
from trainfold.core.save.pruning import (
    best_still_there,
    held_back,
    may_be_torn,
    newest_complete,
    newest_to_examine,
    plan_pruning,
    to_prove,
)
from trainfold.core.save.retention import Saved, keep_every, keep_last

QUARANTINED = Problem("CheckpointQuarantined", "r", "one that loads", "none", "", 16)
TORN = Problem("CheckpointTorn", "r", "manifest.json", "none: a save that did not finish", "", 13)
UNREAD = st.sampled_from(
    [Problem(error, "r", "bytes", "none", "try again", 14) for error in ("CheckpointUnreadable", "FutureVersion")]
)
POLICIES = st.sampled_from([keep_last(1), keep_last(2), keep_every(3), keep_last(1) | keep_every(4)])
DATA = "model-00000-of-00001.safetensors"


@st.composite
def runs(draw):
    """A run after any saves, rewinds, damage and quarantine, and the last committed checkpoint."""
    steps = draw(st.lists(st.integers(0, 12), unique=True, min_size=1, max_size=8))
    heads, timeline, forks = {}, 0, ()
    for step in steps:
        if heads and draw(st.booleans()):
            left = draw(st.sampled_from(sorted(heads)))
            forks = (*(fork for fork in forks if fork[1] <= left), (timeline, left))
            timeline += 1
        heads[step] = Head("r", step, timeline, forks)
    written = heads[steps[-1]]
    entries = []
    for step in range(14):
        if step in heads:
            bad = heads[step] is not written and draw(st.integers(0, 4)) == 0
            entries.append(Entry(directory_of(step), heads[step], problem=QUARANTINED if bad else None))
        elif draw(st.booleans()):
            entries.append(Entry(directory_of(step), None, problem=TORN))
    return Inventory("runs/a", "r", tuple(entries)), Saved(directory_of(written.step), written.step, written.timeline)


def saved_of(entry):
    return Saved(entry.name, entry.head.step, entry.head.timeline)


FILES = st.lists(st.sampled_from([DATA, "manifest.json", "notes.txt"]), max_size=2)


@given(case=runs(), policy=POLICIES, others=st.none() | POLICIES, data=st.data())
def test_what_goes_is_proved_and_unprotected_and_planning_again_deletes_nothing(case, policy, others, data):
    """E01, E02, E05, E16."""
    run, written = case
    asked = to_prove(run, written, with_left_behind=others is not None)
    whole = data.draw(st.sets(st.sampled_from(asked)) if asked else st.just(set()))
    proved = {entry.name: saved_of(entry) for entry in run.entries if entry.name in whole}
    protected = dict.fromkeys(data.draw(st.sets(st.sampled_from([entry.name for entry in run.entries]))), "a pointer")
    files = {name: data.draw(FILES) for name in may_be_torn(run, written)}

    def planned(inventory):
        return plan_pruning(
            inventory,
            written=written,
            proved=proved,
            files=files,
            policy=policy,
            left_behind=others,
            protected=protected,
        )

    plan = planned(run)
    usable = {entry.name for entry in run.entries if entry.is_candidate}
    assert set(plan.deleted) <= (usable & whole) - {written.name, *protected}
    assert not set(plan.deleted) & set(plan.torn)
    assert len(plan.deleted) == len(set(plan.deleted))
    for name in plan.torn:
        assert set(files[name]) == {DATA}
        assert name < written.name
    assert all(name in plan.torn for name, each in files.items() if set(each) == {DATA})
    gone = {*plan.deleted, *plan.torn}
    told = [*plan.lineage.kept, *plan.left_behind.kept, *plan.left_alone, *gone]
    assert sorted(told) == [entry.name for entry in run.entries], "each directory is in the plan once"
    after = attrs.evolve(run, entries=tuple(entry for entry in run.entries if entry.name not in gone))
    again = planned(after)
    assert (again.deleted, again.torn) == ((), ())
    assert all(name in str(plan) for name in gone)
    back = held_back(plan, written.name, TORN)
    assert (back.deleted, back.torn) == ((), ())
    assert sorted([*back.lineage.kept, *back.left_behind.kept, *back.left_alone]) == sorted(told)
    assert "CheckpointTorn" in back.left_alone[written.name]
    event(f"{min(len(gone), 3)} go")


@given(case=runs(), policy=POLICIES, problem=UNREAD, data=st.data())
def test_nothing_goes_while_it_is_not_known_to_what_a_checkpoint_refers(case, policy, problem, data):
    """E02: and each directory is in the plan once, and one that would go has the reason."""
    run, written = case
    files = {name: [DATA] for name in may_be_torn(run, written)}
    proved = {entry.name: saved_of(entry) for entry in run.entries if entry.is_candidate}

    def planned(inventory):
        return plan_pruning(
            inventory, written=written, proved=proved, files=files, policy=policy, left_behind=keep_last(1)
        )

    name = directory_of(data.draw(st.integers(0, 30).filter(lambda step: run.entry(directory_of(step)) is None)))
    unread = Entry(name, None, problem=problem)
    before = planned(run)
    entries = tuple(sorted((*run.entries, unread), key=lambda entry: entry.name))
    plan = planned(attrs.evolve(run, entries=entries))
    gone = {*before.deleted, *before.torn}
    assert (plan.deleted, plan.torn) == ((), ())
    assert (plan.held is not None) == bool(gone)
    told = [*plan.lineage.kept, *plan.left_behind.kept, *plan.left_alone]
    assert sorted(told) == [entry.name for entry in entries]
    assert {each for each, why in plan.left_alone.items() if why.startswith(f"would go, but {name} ")} == gone


@given(case=runs())
def test_only_what_can_be_loaded_is_proved_and_the_written_one_needs_no_proof(case):
    """E05: a quarantined checkpoint neither counts nor is deleted."""
    run, written = case
    asked = to_prove(run, written, with_left_behind=True)
    usable = {entry.name for entry in run.entries if entry.is_candidate}
    assert set(asked) <= usable - {written.name}
    assert len(asked) == len(set(asked))
    mine = {entry.name for entry in lineage(run)} - {written.name}
    assert set(to_prove(run, written, with_left_behind=False)) == mine


@pytest.mark.parametrize(
    ("entry", "files", "said"),
    [
        (Entry("step-00000030", None, problem=TORN), None, "a save that is under way or did not finish"),
        (Entry("step-00000010", None, problem=TORN), [], "no file"),
        (Entry("step-00000010", None, problem=TORN), [DATA, "notes.txt"], "notes.txt, which no save writes"),
        (Entry("step-00000030", Head("r", 30), problem=QUARANTINED), None, "CheckpointQuarantined"),
        (Entry("step-00000010", Head("r", 10)), None, "CheckpointDamaged"),  # found when it was looked at
    ],
)
def test_what_stays_although_no_rule_counts_it_is_listed_with_the_reason(entry, files, said):
    """A user who wonders why a directory is still there reads why, and the table prints it."""
    newest = Entry("step-00000020", Head("r", 20))
    plan = plan_pruning(
        Inventory("runs/a", "r", tuple(sorted((entry, newest), key=lambda each: each.name))),
        written=saved_of(newest),
        proved={newest.name: saved_of(newest)},
        files={} if files is None else {entry.name: files},
        policy=keep_last(1),
        problems={"step-00000010": Problem("CheckpointDamaged", "r", "a digest", "another", "", 14)},
    )
    assert list(plan.left_alone) == [entry.name]
    assert said in plan.left_alone[entry.name]
    assert f"{entry.name}  stays  {plan.left_alone[entry.name]}" in str(plan)


def test_the_newest_complete_checkpoint_is_found_by_asking_for_one_manifest_after_another():
    """E05: without a store. Each answer of the interpreter is a manifest or a problem."""
    run = Inventory("r", "r", tuple(Entry(f"step-{step:08d}", Head("r", step)) for step in (10, 20, 30)))
    assert (newest_to_examine(run), newest_complete(run)) == ("step-00000030", None)
    run = run.with_entry(attrs.evolve(run.entries[2], problem=TORN))
    assert newest_to_examine(run) == "step-00000020"
    whole = Manifest(Head("r", 20), 1, (), ("rng",), {}, {}, ())
    run = run.with_entry(attrs.evolve(run.entries[1], manifest=whole))
    assert newest_to_examine(run) is None
    assert newest_complete(run) == Saved("step-00000020", 20, 0, parts=frozenset())
    nothing = attrs.evolve(run, entries=(attrs.evolve(run.entries[0], problem=TORN),))
    assert (newest_to_examine(nothing), newest_complete(nothing)) == (None, None)


@given(case=runs(), data=st.data())
def test_the_best_that_is_still_there_is_the_first_that_the_lineage_goes_through(case, data):
    """E12."""
    run, _ = case
    heads = [entry.head for entry in run.entries if entry.head is not None]
    ranked = data.draw(st.lists(st.sampled_from(heads), min_size=1, unique_by=lambda head: head.step))
    kept = tuple((BestEntry(float(place), head.step), head.timeline) for place, head in enumerate(ranked))
    record = BestRecord(run_id="r", metric="loss", direction="min", min_delta=0.0, score=0.0, step=ranked[0].step)
    found = best_still_there(run, BestFile(record, ranked[0].timeline, kept))
    present = {entry.head for entry in lineage(run)}
    assert found == next((directory_of(head.step) for head in ranked if head in present), None)


def test_a_best_that_cannot_be_read_now_is_not_called_left_behind():
    """E10: the pointer was removed for good, with the words that a rewind had left it behind."""
    denied = Problem("CheckpointUnreadable", "r", "bytes", "503", "wait")
    entries = [Entry(directory_of(10), None, problem=denied), Entry(directory_of(20), Head("r", 20))]
    best = BestFile(BestRecord(run_id="r", metric="loss", direction="min", min_delta=0.0, score=0.1, step=10))
    assert best_still_there(Inventory("r", "r", tuple(entries)), best) == directory_of(10)
    torn = attrs.evolve(entries[0], problem=attrs.evolve(denied, error="CheckpointDamaged"))
    assert best_still_there(Inventory("r", "r", (torn, entries[1])), best) is None
