"""Lineage: which checkpoint of a rewound run is the newest, compared with a model that remembers its history."""

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kit.depth import IS_DEEP

from trainfold.core.format.file_names import directory_of
from trainfold.core.format.manifest import Head
from trainfold.core.history.inventory import Entry, Inventory, current_head, lineage, with_order_known
from trainfold.core.history.next_checkpoint import next_head
from trainfold.core.problem import Problem
from trainfold.core.state.parent_checkpoint import ParentCheckpoint

PROBLEM = Problem("CheckpointDamaged", "x", "a", "b", "c")


def run_of(entries):
    return Inventory("r", "r", tuple(entries))


def saved(*heads):
    """A run with these checkpoints; of those with the same step, only the last remains."""
    return run_of({head.step: Entry(directory_of(head.step), head) for head in heads}.values())


def steps_of(inventory):
    return [entry.head.step for entry in lineage(inventory)]


# --- a tree of checkpoints -------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Node:
    """A checkpoint of the model: its true ancestors, oldest first, and its head in the run."""

    head: Head
    ancestors: tuple["Node", ...]

    @property
    def chain(self):
        return (*self.ancestors, self)

    @property
    def descent(self):
        return ParentCheckpoint(self.head.timeline, self.head.step, self.head.forks)


class Tree(RuleBasedStateMachine):
    """A program that saves, loads and goes back. The model remembers the ancestors of each checkpoint.

    Attributes:
        order: every saved checkpoint, in the order of the saves.
        there: step -> the checkpoint in its directory.
        bad: steps whose checkpoint cannot be used.
        behind: the true ancestors of the state in memory, oldest first.
        descent: its descent as the program gives it; None before the first load or save.
    """

    @initialize()
    def start(self):
        self.order, self.there, self.bad = [], {}, set()
        self.behind, self.descent, self.step = (), None, 0

    def inventory(self):
        entries = {step: Entry(directory_of(step), node.head) for step, node in self.there.items()}
        return run_of(attrs.evolve(entries[step], problem=PROBLEM) if step in self.bad else entries[step]
                      for step in sorted(entries))  # fmt: skip

    @rule(ahead=st.sampled_from([0, 1, 1, 2, 3, 10]))
    def train_and_save(self, ahead):
        self.step += ahead
        head = next_head(run_of(self.inventory().entries), "r", self.step, descends_from=self.descent)
        ancestors = tuple(node for node in self.behind if node.head.step < self.step)
        nearest = [node.head.step for node in ancestors if self.is_there(node)][-1:]
        assert head.parent == (directory_of(nearest[0]) if nearest else None)
        node = Node(head, ancestors)
        self.order.append(node)
        self.there[self.step] = node
        self.bad.discard(self.step)
        self.behind, self.descent = node.chain, node.descent

    @precondition(lambda self: set(self.there) - self.bad)
    @rule(data=st.data())
    def load_a_step(self, data):
        self._loaded(self.there[data.draw(st.sampled_from(sorted(set(self.there) - self.bad)))])

    @precondition(lambda self: set(self.there) - self.bad)
    @rule()
    def load_the_newest(self):
        self._loaded(self.there[steps_of(self.inventory())[0]])

    def _loaded(self, node):
        self.behind, self.descent, self.step = node.chain, node.descent, node.head.step

    @precondition(lambda self: self.step > 0)
    @rule(data=st.data(), tells=st.booleans())
    def go_back_in_memory(self, data, tells):
        """To a kept state; the lineage is updated at once, or the change goes unnoticed until a lower step is saved."""
        self.step = data.draw(st.integers(0, self.step - 1))
        if self.descent is not None and (tells or self.step > self.descent.step):
            back = min(self.step, self.descent.step)
            self.descent = attrs.evolve(self.descent, step=back)
            self.behind = tuple(node for node in self.behind if node.head.step <= back)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def damage_or_fix(self, data):
        """Or quarantine it and release it again."""
        self.bad ^= {data.draw(st.sampled_from(sorted(self.there)))}

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def delete(self, data):
        """Any checkpoint, deleted by anyone."""
        step = data.draw(st.sampled_from(sorted(self.there)))
        del self.there[step]
        self.bad.discard(step)

    def is_there(self, node):
        return self.there.get(node.head.step) is node

    @invariant()
    def the_lineage_is_the_true_chain_of_ancestors_as_far_as_it_is_there(self):
        """E16, V03, M18: it excludes checkpoints left behind by a rewind, and damage does not bring them back."""
        newest_first = [node for node in reversed(self.order) if self.is_there(node)]
        chains = (
            [one.head.step for one in reversed(node.chain) if self.is_there(one) and one.head.step not in self.bad]
            for node in newest_first
        )
        assert steps_of(self.inventory()) == next((chain for chain in chains if chain), [])

    @invariant()
    def a_timeline_and_a_step_are_one_checkpoint(self):
        """E12: a score belongs to both."""
        known = [(node.head.timeline, node.head.step) for node in self.order if self.is_there(node)]
        assert len(set(known)) == len(known)


Tree.TestCase.settings = settings(max_examples=150 if IS_DEEP else 60, stateful_step_count=25, deadline=None)
TestTree = Tree.TestCase


# --- examples that can be checked by hand ----------------------------------------------------------------------------

HUNDREDS = saved(*(Head("r", step) for step in (100, 200, 300, 400, 500)))


def after(run, head):
    others = tuple(entry for entry in run.entries if entry.name != directory_of(head.step))
    return run_of((*others, Entry(directory_of(head.step), head)))


def test_a_rewind_that_next_saves_above_the_newest_step_leaves_the_rest_behind():
    """E16, T41: load 100 of 100 to 500, save 600."""
    head = next_head(HUNDREDS, "r", 600, descends_from=ParentCheckpoint(0, 100))
    assert (head.timeline, head.forks, head.parent) == (1, ((0, 100),), "step-00000100")
    run = after(HUNDREDS, head)
    assert steps_of(run) == [600, 100]
    assert steps_of(run.with_entry(Entry(directory_of(600), head, problem=PROBLEM))) == [100]


def test_a_step_that_is_trained_anew_is_of_another_timeline_than_the_one_it_replaces():
    """E12, E16: load 400, then save 500 over the existing 500."""
    head = next_head(HUNDREDS, "r", 500, descends_from=ParentCheckpoint(0, 400))
    assert (head.timeline, head.forks, head.parent) == (1, ((0, 400),), "step-00000400")
    assert steps_of(after(HUNDREDS, head)) == [500, 400, 300, 200, 100]


def test_a_run_that_takes_up_what_it_had_left_behind_leaves_the_other_way_behind():
    """E16: timeline 1 is at 120; 500 of timeline 0 is loaded, then 510 is saved."""
    run = after(HUNDREDS, Head("r", 120, 1, ((0, 100),), directory_of(100)))
    assert steps_of(run) == [120, 100]
    head = next_head(run, "r", 510, descends_from=ParentCheckpoint(0, 500))
    assert (head.timeline, head.forks, head.parent) == (2, ((0, 500),), "step-00000500")
    assert steps_of(after(run, head)) == [510, 500, 400, 300, 200, 100]


def test_the_newest_one_saved_again_stays_in_its_timeline_and_an_older_one_does_not():
    """E16: saving 400 again after loading it leaves 500 behind."""
    assert next_head(HUNDREDS, "r", 500, descends_from=ParentCheckpoint(0, 500)) == Head(
        "r", 500, parent="step-00000400"
    )
    head = next_head(HUNDREDS, "r", 400, descends_from=ParentCheckpoint(0, 400))
    assert (head.timeline, head.parent) == (1, "step-00000300")
    assert steps_of(after(HUNDREDS, head)) == [400, 300, 200, 100]


def test_a_newest_one_that_was_passed_over_is_left_behind_even_if_it_is_found_to_be_good_later():
    """P07, E16: 500 was in quarantine, so 400 was loaded."""
    run = HUNDREDS.with_entry(attrs.evolve(HUNDREDS.entries[-1], problem=PROBLEM))
    head = next_head(run, "r", 600, descends_from=ParentCheckpoint(0, 400))
    assert (head.timeline, head.parent) == (1, "step-00000400")
    assert steps_of(after(HUNDREDS, head)) == [600, 400, 300, 200, 100]


def test_where_the_parent_is_gone_the_nearest_ancestor_stands_in_for_it():
    """E16: the parent was deleted. If its whole timeline is gone, the forks in the loaded descent give the rest."""
    run = run_of(entry for entry in HUNDREDS.entries if entry.head.step != 400)
    head = next_head(run, "r", 600, descends_from=ParentCheckpoint(0, 400))
    assert (head.timeline, head.forks, head.parent) == (1, ((0, 400),), "step-00000300")
    assert steps_of(after(run, head)) == [600, 300, 200, 100]
    lost = ParentCheckpoint(3, 250, ((0, 200),))
    head = next_head(HUNDREDS, "r", 300, descends_from=lost)
    assert (head.timeline, head.forks, head.parent) == (3, ((0, 200),), "step-00000200")
    assert steps_of(after(HUNDREDS, head)) == [300, 200, 100]
    unknown = next_head(HUNDREDS, "r", 300, descends_from=ParentCheckpoint(3, 250))
    assert steps_of(after(HUNDREDS, unknown)) == [300], "nothing that may be of another way"
    assert next_head(run_of(()), "r", 300, descends_from=lost) == Head("r", 300, 3, ((0, 200),))


def test_a_state_that_went_back_in_memory_comes_from_the_newest_ancestor_at_or_below():
    """E16: saved at 500, back at 250 in memory, then saved at 260 or at 600; or the step fell below a fork."""
    for step in (260, 600):
        head = next_head(HUNDREDS, "r", step, descends_from=ParentCheckpoint(0, 250))
        assert (head.timeline, head.parent) == (1, "step-00000200")
        assert steps_of(after(HUNDREDS, head)) == [step, 200, 100]
    unnoticed = next_head(HUNDREDS, "r", 260, descends_from=ParentCheckpoint(0, 500))
    assert (unnoticed.timeline, unnoticed.parent) == (1, "step-00000200")
    below = next_head(HUNDREDS, "r", 260, descends_from=ParentCheckpoint(1, 250, ((0, 400),)))
    assert steps_of(after(HUNDREDS, below)) == [260, 200, 100]
    assert next_head(HUNDREDS, "r", 0, descends_from=ParentCheckpoint(0, 500)) == Head("r", 0, 1)


# --- unknown origin --------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 50), unique=True, max_size=8))
def test_without_a_rewind_the_order_is_the_order_of_steps(steps):
    entries = tuple(Entry(directory_of(step), next_head(Inventory("r", "r", ()), "r", step)) for step in steps)
    assert [entry.head.step for entry in lineage(Inventory("r", "r", entries))] == sorted(steps, reverse=True)


@given(steps=st.lists(st.integers(0, 30), max_size=12))
@example(steps=[10, 20, 15, 15, 12, 30])
def test_where_nobody_knows_what_a_state_comes_from_the_steps_decide(steps):
    """E16: the state continues the current lineage below its step, and stale higher steps never win."""
    run, path = run_of(()), []
    for step in steps:
        head = next_head(run, "r", step)
        path = [older for older in path if older < step]
        assert head.parent == (directory_of(path[-1]) if path else None)
        path.append(step)
        run = after(run, head)
        assert steps_of(run) == path[::-1]


# --- manifests that cannot be read -----------------------------------------------------------------------------------

DENIED = Problem("CheckpointUnreadable", "x", "bytes", "403", "wait")


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=8),
    st.sets(st.integers(1, 6)),
    st.sets(st.integers(1, 6)),
    st.booleans(),
)
@example([2, 4, 6], {2}, set(), True)
@example([2, 6, 4], {4}, set(), True)
def test_what_was_committed_last_is_never_taken_for_an_older_one(steps, unread, timeless, has_hint):
    """E01: also after rewinds and of steps that were saved again, whatever else cannot be read."""
    times = {directory_of(step): float(at) for at, step in enumerate(steps)}  # that of the last commit of each
    heads = {}
    for at, step in enumerate(steps):
        heads[step] = Head("r", step, timeline=at)
    found = run_of(
        Entry(directory_of(step), None, problem=DENIED) if step in unread else Entry(directory_of(step), head)
        for step, head in sorted(heads.items())
    )
    known = {name: None if name in {directory_of(step) for step in timeless} else at for name, at in times.items()}
    last = directory_of(steps[-1])
    marked = with_order_known(found, known, last if has_hint else None)
    for entry in marked.entries:
        assert not entry.before or (entry.head is None and known[entry.name] is not None and has_hint)
        later = {directory_of(step) for step in unread if times.get(directory_of(step), -1.0) > times[entry.name]}
        if entry.head is not None:
            assert later <= {each.name for each in marked.maybe_newer(entry.head)}
    assert (last in {each.name for each in marked.maybe_newer(current_head(marked))}) == (steps[-1] in unread)


@attrs.frozen
class Accident:
    """What became of a run: of each step, and what is known of the order."""

    states: dict[int, str]
    times: dict[str, float | None]
    latest: str | None
    is_exact: bool


STATES = st.sampled_from(["whole", "whole", "damaged", "torn", "unreadable", "unreadable", "files"])


@st.composite
def accidents(draw):
    """Histories with rewinds, saves of a step again and deletions; then damage, manifests that cannot be read, and copies whose times are in another order."""
    run, descent, order, hints = run_of(()), None, [], []
    for _ in range(draw(st.integers(2, 7))):
        usable = [entry.head for entry in run.entries]
        if usable and draw(st.integers(0, 2)) == 0:
            head = draw(st.sampled_from(usable))
            descent = ParentCheckpoint(head.timeline, head.step, head.forks)
        ahead = draw(st.sampled_from([1, 1, 2, 3]))
        step = (0 if descent is None else descent.step) + ahead
        head = next_head(run, "r", step, descends_from=descent)
        run = after(run, head)
        descent = ParentCheckpoint(head.timeline, head.step, head.forks)
        order = [name for name in order if name != directory_of(step)] + [directory_of(step)]
        hints.append(directory_of(step))
        if len(run.entries) > 2 and draw(st.integers(0, 4)) == 0:
            gone = draw(st.sampled_from([entry.name for entry in run.entries if entry.name != order[-1]]))
            run = run_of(entry for entry in run.entries if entry.name != gone)
            order.remove(gone)
    times = {name: float(at) for at, name in enumerate(order)}
    told = draw(st.sampled_from(["true", "copied", "in part", "not", "hint before"]))
    if told == "copied":
        times = dict(zip(order, map(float, draw(st.permutations(range(len(order))))), strict=True))
    elif told == "in part":
        times = {name: at if draw(st.booleans()) else None for name, at in times.items()}
    latest = hints[-1]
    if told == "not":
        latest = None
    elif told == "hint before":  # the process was killed before it wrote the hint; nothing has copied the run since
        latest = hints[-2]
    states = {entry.head.step: draw(STATES) for entry in run.entries}
    return run, Accident(states, times, latest, told == "true")


def as_found(run, accident, also=()):
    """The run as a reader sees it; those of `also` can be read after all."""

    def entry(each):
        state = accident.states[each.head.step]
        if state in ("unreadable", "files") and each.name not in also:
            return Entry(each.name, None if state == "unreadable" else each.head, problem=DENIED)
        if state == "torn":  # its first line has wrong bytes
            return Entry(each.name, None, problem=PROBLEM)
        return attrs.evolve(each, problem=PROBLEM if state == "damaged" else None)

    return run_of(sorted(map(entry, run.entries), key=lambda each: each.name))


@given(accidents(), st.data())
@settings(max_examples=1500 if IS_DEEP else 300, deadline=None)
def test_what_is_resumed_is_what_would_be_if_all_could_be_read(case, data):
    """E01, P07: after rewinds, saves of a step again, deletions and copies, with whatever damaged; else the resume is refused."""
    run, accident = case
    found = with_order_known(as_found(run, accident), accident.times, accident.latest)
    resumed = next(iter(lineage(found)), None)
    if resumed is None or found.maybe_newer(resumed.head):
        return
    hidden = [entry.name for entry in found.entries if entry.is_unreadable]
    also = data.draw(st.sets(st.sampled_from(hidden))) if hidden else set()
    assert lineage(as_found(run, accident, also))[0].name == resumed.name


@given(accidents(), st.data())
@settings(max_examples=1500 if IS_DEEP else 300, deadline=None)
def test_what_is_saved_is_resumed_next_whatever_can_be_read_by_then(case, data):
    """E01, A14: it goes on from any checkpoint, by step= too, one accident after another. The timeline of what cannot be read may be that of a rewind of which nothing else is left."""
    run, accident = case
    for now_ms in range(1_000_000, 1_000_000 + data.draw(st.integers(1, 4))):
        found = with_order_known(as_found(run, accident), accident.times, accident.latest)
        usable = [entry.head for entry in found.entries if entry.is_candidate]
        if not usable:
            return
        origin, ahead = data.draw(st.tuples(st.sampled_from(usable), st.integers(0, 5)))
        descent = ParentCheckpoint(origin.timeline, origin.step, origin.forks)
        clock = 0 if accident.is_exact else now_ms  # that of this machine, which counts only where the store has none
        head = next_head(found, "r", origin.step + ahead, descends_from=descent, now_ms=clock)
        run, last = after(run, head), directory_of(head.step)
        assert lineage(run)[0].head == head, "all is as it was once"
        assert len({(entry.head.timeline, entry.head.step) for entry in run.entries}) == len(run.entries)
        times = accident.times | {last: float(now_ms) if accident.is_exact else None}
        states = {entry.head.step: data.draw(STATES) for entry in run.entries}
        accident = attrs.evolve(accident, states=states, times=times, latest=accident.latest and last)


@given(accidents())
def test_a_newest_one_that_is_whole_is_resumed_whatever_older_ones_cannot_be_read(case):
    """E01: where the times are those of the commits, and the hint is there; also after rewinds."""
    run, accident = case
    newest = current_head(run)
    if accident.states[newest.step] != "whole" or not accident.is_exact:
        return
    found = with_order_known(as_found(run, accident), accident.times, accident.latest)
    assert lineage(found)[0].head == newest
    assert found.maybe_newer(newest) == ()


def test_an_old_manifest_that_cannot_be_read_is_older_by_step_time_and_hint():
    """E01: each of the three alone can deceive, after a rewind or a copy."""
    found = run_of([Entry(directory_of(2), None, problem=DENIED), Entry(directory_of(7), Head("r", 7))])
    old, new = directory_of(2), directory_of(7)

    def may_be_newest(run, times, latest, name=old):
        marked = with_order_known(run, times, latest)
        return marked.entry(name) in marked.maybe_newer(current_head(marked))

    assert not may_be_newest(found, {old: 1.0, new: 2.0}, new)
    assert may_be_newest(found, {old: 3.0, new: 2.0}, new), "it was committed later"
    assert may_be_newest(found, {old: 2.0, new: 2.0}, new)
    assert may_be_newest(found, {old: 1.0, new: 2.0}, old), "the hint names it"
    assert may_be_newest(found, {old: 1.0, new: 2.0}, None)
    assert may_be_newest(found, {old: None, new: 2.0}, new)
    assert may_be_newest(found, {old: 1.0}, new)
    higher = run_of([Entry(new, Head("r", 7)), Entry(directory_of(9), None, problem=DENIED)])
    assert may_be_newest(higher, {new: 2.0, directory_of(9): 1.0}, new, directory_of(9)), "a higher step"


def test_a_higher_step_is_older_than_what_came_after_a_rewind():
    """E01: step 4 was taken on purpose, as step 9 could not be read. Each later start was refused until the run came to step 10."""
    old, new = directory_of(9), directory_of(5)
    found = run_of([Entry(new, Head("r", 5, timeline=2, forks=((0, 4),))), Entry(old, None, problem=DENIED)])
    marked = with_order_known(found, {old: 1.0, new: 2.0}, new)
    assert marked.maybe_newer(current_head(marked)) == ()
    for times, latest in (({old: 2.0, new: 1.0}, new), ({old: 1.0, new: 2.0}, old), ({old: 1.0, new: 2.0}, None)):
        marked = with_order_known(found, times, latest)
        assert [entry.name for entry in marked.maybe_newer(current_head(marked))] == [old]


def test_what_is_older_than_the_newest_may_be_newer_than_the_one_before_that():
    """E01: the newest proved damaged, and the run went on from step 2 where step 4 could not be read for a moment."""
    names = [directory_of(step) for step in (2, 4, 7)]
    found = run_of(
        [Entry(names[0], Head("r", 2)), Entry(names[1], None, problem=DENIED), Entry(names[2], Head("r", 7))]
    )
    marked = with_order_known(found, dict(zip(names, (1.0, 2.0, 3.0), strict=True)), names[2])
    assert marked.maybe_newer(Head("r", 7)) == ()
    assert [entry.name for entry in marked.maybe_newer(Head("r", 2))] == [names[1]]


def test_where_the_newest_of_a_rewound_run_is_damaged_one_between_it_and_the_older_one_may_be_the_newest():
    """E01: the times are those of a copy, in another order. The older one was resumed in silence."""
    old, hidden, new = Head("r", 3, 1, ((0, 2),)), directory_of(5), Head("r", 7, 1, ((0, 2),))
    found = run_of([Entry(directory_of(3), old), Entry(hidden, None, problem=DENIED), Entry(directory_of(7), new)])
    marked = with_order_known(found, {hidden: 1.0, directory_of(3): 2.0, directory_of(7): 3.0}, directory_of(7))
    assert marked.maybe_newer(new) == ()
    assert [entry.name for entry in marked.maybe_newer(old)] == [hidden]


def test_what_a_rewind_has_left_behind_is_not_taken_where_that_before_the_rewind_cannot_be_read():
    """E01, E16: step 3 was resumed in silence, since step 1 is of a lower step."""
    heads = [Head("r", 1), Head("r", 2, 1, ((0, 1),)), Head("r", 3)]
    for hidden in (None, heads[0]):
        found = run_of(
            [
                Entry(directory_of(1), hidden, problem=DENIED),
                Entry(directory_of(2), heads[1], problem=PROBLEM),
                Entry(directory_of(3), heads[2]),
            ]
        )
        marked = with_order_known(found, {directory_of(at): float(at) for at in (1, 2, 3)}, directory_of(3))
        assert [entry.name for entry in marked.maybe_newer(heads[2])] == [directory_of(1)]


@pytest.mark.parametrize("knows_times", [True, False])
def test_saves_beside_a_manifest_that_stays_hidden_are_in_one_timeline_where_the_store_has_a_clock(knows_times):
    """E01, A14: a disk without links has no hint. Each save began a timeline, and the manifests grew with all of them."""
    run = run_of([Entry(directory_of(1), None, problem=DENIED), Entry(directory_of(2), Head("r", 2))])
    times = {directory_of(1): 5.0 if knows_times else None}
    descent = ParentCheckpoint(0, 2)
    for step in range(3, 9):
        head = next_head(with_order_known(run, times, None), "r", step, descends_from=descent, now_ms=step)
        descent = ParentCheckpoint(head.timeline, head.step, head.forks)
        run = after(run, head)
    assert [entry.head.timeline for entry in run.entries[2:]] == ([6000] * 6 if knows_times else [*range(3, 9)])
