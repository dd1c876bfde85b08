"""Retention: each budget is independent, and a checkpoint in use is never deleted."""

import math
from functools import reduce
from operator import or_

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainfold.core.best.top_n import BestEntry, plan_best
from trainfold.core.errors import InvalidArgument
from trainfold.core.format.file_names import directory_of
from trainfold.core.history.inventory import Entry, Inventory, lineage
from trainfold.core.history.next_checkpoint import next_head
from trainfold.core.save.retention import (
    Retention,
    Saved,
    keep_all,
    keep_best,
    keep_every,
    keep_last,
    keep_newer,
    plan_retention,
)

scores = st.none() | st.sampled_from([0.0, -0.0, 0.1, 0.2, 1.0, math.nan, math.inf, -math.inf])
ages = st.none() | st.sampled_from([-5.0, 0.0, 10.0, 60.0, 3600.0, math.nan])
rules = st.one_of(
    st.builds(keep_last, st.integers(1, 4)),
    st.builds(keep_every, st.integers(1, 12)),
    st.builds(keep_best, st.integers(1, 3), direction=st.sampled_from(["min", "max"])),
    st.builds(keep_newer, st.sampled_from([0, 10, 100.0])),
)
policies = st.lists(rules | st.just(keep_all()), min_size=1, max_size=3).map(lambda some: reduce(or_, some))


WHOLE = st.none()


@st.composite
def saved_lists(draw, *, min_size=0, kinds=WHOLE):
    """Checkpoints of a lineage in any order; a later timeline has later steps, unless the run was rewound."""
    steps = draw(st.lists(st.integers(0, 40), unique=True, min_size=min_size, max_size=10))
    return [Saved(directory_of(s), s, draw(st.integers(0, 2)), draw(scores), draw(ages), draw(kinds)) for s in steps]


parts = st.frozensets(st.sampled_from(["model", "optimizer", "trainer"]), min_size=1)


@st.composite
def situations(draw, *, kinds=WHOLE):
    """Checkpoints, the one just written, and the protected names."""
    saved = draw(saved_lists(min_size=1, kinds=kinds))
    written = draw(st.sampled_from(saved))
    names = [one.name for one in saved]
    return saved, written, draw(st.sets(st.sampled_from([*names, "step-99999999"])))


# --- parts of a run ---------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(situation=situations(kinds=st.none() | parts), policy=policies)
def test_exports_of_a_part_make_no_difference_to_what_stays_of_whole_checkpoints(situation, policy):
    """V06, E01: a model-only export by the user displaces no checkpoint that a full resume needs."""
    saved, written, protected = situation
    whole = [one for one in saved if one.parts is None]
    with_exports = plan_retention(saved, policy=policy, written=written, protected=protected)
    without = plan_retention(whole, policy=policy, written=written, protected=protected)
    names = {one.name for one in whole}
    assert names & set(with_exports.deleted) == names & set(without.deleted)


@settings(max_examples=150)
@given(situation=situations(kinds=st.none() | parts), policy=policies, k=st.integers(1, 3))
def test_a_checkpoint_goes_only_for_others_that_have_everything_that_it_has(situation, policy, k):
    """V06: for each deleted checkpoint, k newer ones with at least the same components remain."""
    saved, written, _ = situation
    plan = plan_retention(saved, policy=policy | keep_last(k), written=written)
    by_name = {one.name: one for one in [*saved, written]}
    for name in plan.deleted:
        gone = by_name[name]
        stay = [by_name[each] for each in plan.kept]
        able = [one for one in stay if one.parts is None or (gone.parts is not None and one.parts >= gone.parts)]
        assert sum((one.step, one.timeline) > (gone.step, gone.timeline) for one in able) >= k


# --- the plan --------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(situation=situations(kinds=st.none() | parts), policy=policies, data=st.data())
def test_a_plan_takes_nothing_that_anything_holds_on_to(situation, policy, data):
    """E02, E06: not the newest, no protected one, no later one; each is listed once; the order does not matter."""
    saved, written, protected = situation
    plan = plan_retention(saved, policy=policy, written=written, protected=protected)
    assert sorted([*plan.kept, *plan.deleted]) == sorted(one.name for one in saved)
    assert all(plan.kept.values())
    gone = [one for one in saved if one.name in plan.deleted]
    assert written.name not in plan.deleted
    assert not protected & set(plan.deleted)
    assert all(one.step <= written.step and one.timeline <= written.timeline for one in gone)
    steps = {one.name: one.step for one in saved}
    assert [steps[name] for name in plan.deleted] == sorted(one.step for one in gone)
    shuffled = data.draw(st.permutations(saved))
    again = plan_retention(shuffled, policy=policy, written=written, protected=protected)
    assert (dict(again.kept), again.deleted) == (dict(plan.kept), plan.deleted)


@settings(max_examples=100)
@given(situation=situations(kinds=st.none() | parts), policy=policies)
def test_after_a_plan_was_carried_out_there_is_nothing_left_to_do(situation, policy):
    """E04: so an interrupted deletion can be planned again and retried."""
    saved, written, protected = situation
    plan = plan_retention(saved, policy=policy, written=written, protected=protected)
    for done in range(len(plan.deleted) + 1):
        left = [one for one in saved if one.name not in plan.deleted[:done]]
        again = plan_retention(left, policy=policy, written=written, protected=protected)
        assert again.deleted == plan.deleted[done:]


@settings(max_examples=100)
@given(situation=situations(), a=policies, b=policies, c=policies)
def test_policies_add_up(situation, a, b, c):
    """E07: the result is a union, so budgets are independent; order, grouping and repetition do not matter."""
    saved, written, protected = situation
    assert (a | b).kept(saved, written) == a.kept(saved, written) | b.kept(saved, written)
    assert (a | b).kept(saved, written) == (b | a).kept(saved, written)
    assert (a | b) | c == a | (b | c)
    assert a | a == a
    more = plan_retention(saved, policy=a | b, written=written, protected=protected)
    less = plan_retention(saved, policy=a, written=written, protected=protected)
    assert set(more.deleted) <= set(less.deleted)


@settings(max_examples=100)
@given(
    history=st.lists(st.tuples(st.integers(1, 5), scores), min_size=1, max_size=14),
    policy=policies,
    secs_per_step=st.integers(1, 30),
)
def test_what_a_whole_history_would_keep_was_never_deleted_on_the_way(history, policy, secs_per_step):
    """E07, E11: the model has an infinite disk and prunes once; the run prunes after each save."""
    everything, disk, step = [], [], 0
    for more, score in history:
        step += more
        written = Saved(directory_of(step), step, score=score)
        everything.append(written)
        disk.append(written)
        aged = [attrs.evolve(one, age_secs=float(secs_per_step * (step - one.step))) for one in disk]
        plan = plan_retention(aged, policy=policy, written=aged[-1])
        disk = [one for one in disk if one.name not in plan.deleted]
    aged = [attrs.evolve(one, age_secs=float(secs_per_step * (step - one.step))) for one in everything]
    assert [one.name for one in disk] == list(plan_retention(aged, policy=policy, written=aged[-1]).kept)


@given(situation=situations(), k=st.integers(1, 5))
@example(situation=([Saved("a", 1), Saved("b", 2), Saved("c", 3)], Saved("c", 3), {"b"}), k=2)
@example(situation=([Saved("a", 1), Saved("b", 2), Saved("c", 3)], Saved("c", 3), {"c"}), k=2)
def test_what_is_protected_uses_up_no_budget(situation, k):
    """E02, E07: the last k are counted among the unprotected checkpoints and the one just written."""
    saved, written, protected = situation
    plan = plan_retention(saved, policy=keep_last(k), written=written, protected=protected)
    takes_part = [one for one in saved if one.step <= written.step and one.timeline <= written.timeline]
    free = [one for one in takes_part if one.name not in protected or one.name == written.name]
    newest = sorted(free, key=lambda one: one.step)[-k:]
    assert {one.name for one in takes_part} - set(plan.deleted) == {one.name for one in newest} | (
        {one.name for one in takes_part} & protected
    )


def test_a_rewind_deletes_neither_what_it_left_behind_nor_what_it_writes():
    """E06, M18, T41: load 100 while the disk has 200 to 500; the new 110 is the newest of its timeline."""
    saved = [Saved(directory_of(step), step) for step in (100, 200, 300, 400, 500)]
    written = Saved(directory_of(110), 110, timeline=1)
    plan = plan_retention([*saved, written], policy=keep_last(1), written=written)
    assert plan.deleted == (directory_of(100),)
    assert plan.kept[directory_of(500)] == ("later than what was written",)


@settings(max_examples=100)
@given(
    moves=st.lists(st.tuples(st.sampled_from(["on", "on", "on", "back"]), st.integers(1, 9)), min_size=1, max_size=14),
    k=st.integers(1, 3),
    n_steps=st.none() | st.integers(3, 10),
)
@example(moves=[("on", 9), ("on", 9), ("on", 9), ("back", 2), ("on", 1)], k=1, n_steps=None)
def test_however_often_a_run_goes_back_its_newest_checkpoints_stay_and_nothing_left_behind_goes(moves, k, n_steps):
    """E06, E16, M18, T41: the lineage comes from the manifests' heads, as in the manager; a resume finds the saved one."""
    policy = keep_last(k) if n_steps is None else keep_last(k) | keep_every(n_steps)
    run, step, deleted = Inventory("run", "run", ()), 0, set()
    for move, by in moves:
        found = [entry.head for entry in lineage(run)]
        if move == "back" and found:
            step = found[by % len(found)].step
            continue
        step += by
        head = next_head(run, "run", step)
        name = directory_of(step)
        others = tuple(entry for entry in run.entries if entry.name != name)
        run = Inventory("run", "run", (*others, Entry(name, head)))
        assert lineage(run)[0].name == name
        mine = [Saved(entry.name, entry.head.step, entry.head.timeline) for entry in lineage(run)]
        behind = {entry.name for entry in run.entries} - {one.name for one in mine}
        plan = plan_retention(mine, policy=policy, written=Saved(name, step, head.timeline))
        assert not behind & set(plan.deleted)
        assert {one.name for one in mine[:k]} <= set(plan.kept)  # mine is sorted newest first
        deleted |= set(plan.deleted)
        run = Inventory("run", "run", tuple(entry for entry in run.entries if entry.name not in plan.deleted))
        assert [entry.name for entry in lineage(run)] == [one.name for one in mine if one.name in plan.kept]


def test_the_one_just_written_counts_as_it_was_written_and_not_as_it_was_listed_before():
    """A step is saved again: the list was made before the commit."""
    old = Saved("step-1", 1, score=0.9)
    new = Saved("step-1", 1, timeline=1, score=0.1)
    other = Saved("step-0", 0, score=0.5)
    policy = keep_best(1, direction="min")
    assert plan_retention([other, old], policy=policy, written=new).deleted == ("step-0",)
    assert plan_retention([other], policy=policy, written=new).deleted == ("step-0",)


def test_a_plan_prints_as_a_table_with_its_reasons():
    saved = [Saved(f"step-{step}", step, score=step / 10) for step in (1, 2, 3, 4, 5)]
    policy = keep_last(2) | keep_best(1, direction="min") | keep_every(3) | keep_newer(60)
    assert str(policy) == "the last 2, the best one, every 3 steps, newer than 60 s"
    aged = [attrs.evolve(one, age_secs=100.0) for one in saved]
    plan = plan_retention(aged, policy=policy, written=aged[3], protected={"step-2": "a hold"})
    assert str(plan).splitlines() == [
        "step-1  stays  the best one",
        "step-2  stays  a hold",
        "step-3  stays  the last 2, every 3 steps",
        "step-4  stays  just written, the last 2",
        "step-5  stays  later than what was written",
    ]
    assert str(plan_retention(aged, policy=keep_last(1), written=aged[4], protected=["step-2"])).splitlines() == [
        "step-2  stays  protected",
        "step-5  stays  just written, the last one",
        "step-1  goes   nothing keeps it",
        "step-3  goes   nothing keeps it",
        "step-4  goes   nothing keeps it",
    ]


# --- the rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, None])
def test_zero_and_none_keep_all(k):
    """E01: the [:-0] trap."""
    saved = [Saved("a", 1), Saved("b", 2)]
    assert keep_last(k) == keep_all()
    assert plan_retention(saved, policy=keep_last(k), written=saved[-1]).deleted == ()


@given(saved=saved_lists(min_size=1), k=st.integers(1, 12))
def test_the_last_k_are_the_newest(saved, k):
    """E01."""
    saved = [attrs.evolve(one, timeline=0) for one in saved]
    newest = sorted(saved, key=lambda one: one.step)
    assert keep_last(k).kept(saved, newest[-1]) == {one.name for one in newest[-k:]}


@given(every=st.integers(1, 6), n_steps=st.integers(1, 20), total=st.integers(1, 60), extra=st.sets(st.integers(1, 60)))
@example(every=4, n_steps=10, total=41, extra={13})
def test_each_multiple_has_the_first_checkpoint_at_or_after_it(every, n_steps, total, extra):
    """E07: also if the save interval skips the multiples, and if there was a save in between."""
    steps = sorted({*range(every, total + 1, every), *(step for step in extra if step <= total)})
    if not steps:
        return
    saved = [Saved(directory_of(step), step) for step in steps]
    kept = keep_every(n_steps).kept(saved, saved[-1])
    buckets = [
        [step for step in steps if multiple <= step < multiple + n_steps]
        for multiple in range(n_steps, total + 1, n_steps)
    ]
    wanted = {bucket[0] for bucket in buckets if bucket}
    assert kept == {directory_of(step) for step in wanted}


@given(
    history=st.lists(scores, min_size=1, max_size=12), n=st.integers(1, 4), direction=st.sampled_from(["min", "max"])
)
def test_the_best_are_those_of_plan_best(history, n, direction):
    """E11, F43: the same order and ties; NaN, infinite and unknown scores are left out; 0.0 is a score."""
    kept = ()
    for step, score in enumerate(history):
        kept = plan_best(kept, BestEntry(score, step), n=n, direction=direction).kept
    saved = [Saved(directory_of(step), step, score=score) for step, score in enumerate(history)]
    assert keep_best(n, direction=direction).kept(saved, saved[-1]) == {directory_of(entry.step) for entry in kept}


@pytest.mark.parametrize(
    ("age_secs", "stays"), [(59.0, True), (60.0, True), (60.5, False), (None, True), (math.nan, True), (-1e9, True)]
)
def test_an_age_that_is_not_known_is_no_reason_to_delete(age_secs, stays):
    """After a clock is set back, no checkpoint becomes old."""
    saved = [Saved("a", 1, age_secs=age_secs), Saved("b", 2, age_secs=0.0)]
    assert ("a" in keep_newer(60).kept(saved, saved[-1])) is stays


def test_a_rule_of_the_users_own_adds_up_like_the_others():
    """E07: through its two methods, without a base class."""

    @attrs.frozen
    class Named:
        names: frozenset[str]

        def kept(self, checkpoints):
            return self.names & {one.name for one in checkpoints}

        def __str__(self):
            return "named by me"

    saved = [Saved(name, step) for step, name in enumerate("abcd")]
    policy = keep_last(1) | Retention((Named(frozenset("az")),))
    plan = plan_retention(saved, policy=policy, written=saved[-1])
    assert plan.deleted == ("b", "c")
    assert plan.kept["a"] == ("named by me",)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: keep_last(-1), "k: expected an int >= 0"),
        (lambda: keep_last(True), "k: expected an int >= 0"),
        (lambda: keep_last(1.0), "k: expected an int >= 0"),
        (lambda: keep_every(0), "n_steps: expected an int >= 1"),
        (lambda: keep_every(None), "n_steps"),
        (lambda: keep_best(0, direction="min"), "n: expected an int >= 1"),
        (lambda: keep_best(1, direction="lower"), "direction: expected 'min' or 'max'"),
        (lambda: keep_newer(-1), "age_secs"),
        (lambda: keep_newer(math.nan), "age_secs"),
        (lambda: keep_newer("1d"), "age_secs"),
        (lambda: Retention(()), "at least one rule"),
        (lambda: plan_retention([], policy=keep_all(), written=Saved("a", 1), protected="a"), "protected"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    """E01: a negative number is rejected."""
    with pytest.raises(InvalidArgument, match=words):
        make()


def test_a_policy_adds_up_with_policies_alone():
    with pytest.raises(TypeError, match="unsupported operand"):
        keep_last(1) | 3


def test_the_best_has_no_direction_by_itself():
    with pytest.raises(TypeError, match="direction"):
        keep_best(1)
