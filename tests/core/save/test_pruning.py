"""`plan_pruning`: it deletes only proved, unprotected checkpoints, whatever the run contains, and keeps the newest."""

import attrs
from hypothesis import event, given
from hypothesis import strategies as st

from trainfold.core.best.best_json import BestFile
from trainfold.core.best.record import BestRecord
from trainfold.core.best.top_n import BestEntry
from trainfold.core.format.file_names import directory_of
from trainfold.core.format.manifest import Head
from trainfold.core.history.inventory import Entry, Inventory, lineage
from trainfold.core.problem import Problem
from trainfold.core.save.pruning import best_still_there, may_be_torn, plan_pruning, to_prove
from trainfold.core.save.retention import Saved, keep_every, keep_last

QUARANTINED = Problem("CheckpointQuarantined", "r", "one that loads", "none", "", 16)
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
            entries.append(Entry(directory_of(step), None, problem=QUARANTINED))
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
    after = attrs.evolve(run, entries=tuple(entry for entry in run.entries if entry.name not in gone))
    again = planned(after)
    assert (again.deleted, again.torn) == ((), ())
    assert all(name in str(plan) for name in gone)
    event(f"{min(len(gone), 3)} go")


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
