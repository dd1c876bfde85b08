"""Lineage: which checkpoint is the newest of a run that was rewound, checked against a run that remembers its history."""

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from trainfold.core.inventory import Entry, Inventory, Problem, lineage, next_head
from trainfold.core.save_plan import directory_of

PROBLEM = Problem("CheckpointDamaged", "x", "a", "b", "c")


class History(RuleBasedStateMachine):
    """A run whose model is the list of steps that a person would say led to now."""

    @initialize()
    def start(self):
        self.entries = {}
        self.path = []

    @rule(ahead=st.integers(1, 30))
    def save_ahead(self, ahead):
        self._save((self.path[-1] if self.path else 0) + ahead)

    @rule(data=st.data(), ahead=st.integers(1, 30))
    def rewind_and_save(self, data, ahead):
        """Load an older step of the present history, train a little, save below what was reached."""
        if len(self.path) > 1:
            back = data.draw(st.sampled_from(self.path[:-1]))
            step = min(back + ahead, self.path[-1] - 1)
            following = self.path[self.path.index(back) + 1]
            if back < step < following:
                self._save(step)

    @rule()
    def save_the_newest_again(self):
        if self.path:
            self._save(self.path[-1])

    def _save(self, step):
        inventory = Inventory("r", "r", tuple(self.entries.values()))
        head = next_head(inventory, "r", step)
        self.path = [older for older in self.path if older < step]
        assert head.parent == (directory_of(self.path[-1]) if self.path else None)
        self.path.append(step)
        self.entries[step] = Entry(directory_of(step), head)

    @invariant()
    def the_newest_of_the_present_history_is_first(self):
        """E16: stale steps beyond a rewind never win."""
        inventory = Inventory("r", "r", tuple(self.entries.values()))
        found = [entry.head.step for entry in lineage(inventory)]
        assert found[:1] == self.path[-1:]

    @invariant()
    def with_the_newest_damaged_the_one_before_it_is_first(self):
        """V03: latest = highest complete step of the current timeline; falls back past bad ones."""
        if len(self.path) > 1:
            bad = attrs.evolve(self.entries[self.path[-1]], problem=PROBLEM)
            inventory = Inventory("r", "r", tuple(self.entries.values())).with_entry(bad)
            found = [entry.head.step for entry in lineage(inventory)]
            assert found[0] == self.path[-2]


History.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestHistory = History.TestCase


@given(st.lists(st.integers(0, 50), unique=True, max_size=8))
def test_without_a_rewind_the_order_is_the_order_of_steps(steps):
    entries = tuple(Entry(directory_of(step), next_head(Inventory("r", "r", ()), "r", step)) for step in steps)
    assert [entry.head.step for entry in lineage(Inventory("r", "r", entries))] == sorted(steps, reverse=True)
