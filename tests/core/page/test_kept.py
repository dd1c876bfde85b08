"""Why a checkpoint is kept, and what changed: the page asks the rules that the manager has."""

import attrs
from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.flight.journal_line import JournalLine, decode_journal, encode_journal_line
from trainfold.core.format.manifest import Head
from trainfold.core.history.inventory import Entry, Inventory
from trainfold.core.history.quarantine import Tried, quarantine_problem, with_quarantined
from trainfold.core.history.recognise import no_manifest
from trainfold.core.page.document import sections_html
from trainfold.core.page.kept import policy_of, why_kept
from trainfold.core.page.run_page import RunPage
from trainfold.core.problem import problem_of
from trainfold.core.save.retention import (
    Retention,
    keep_all,
    keep_best,
    keep_every,
    keep_last,
    keep_newer,
    plan_retention,
)
from trainfold.core.save.retention_rules import Saved, rules_from_json, rules_to_json

POLICIES = st.lists(st.sampled_from([keep_all(), keep_last(2), keep_last(7), keep_every(20), keep_best(2, direction="max"), keep_newer(3.5), keep_newer(0), keep_newer(1e300)]), min_size=1, max_size=4)  # fmt: skip


class Own:
    """A rule of a program."""

    def kept(self, checkpoints):
        return frozenset()

    def __str__(self):
        return "those of Mondays"


def run_of(steps, policy):
    entries = tuple(Entry(f"step-{step:08d}", Head("r", step)) for step in sorted(steps))
    line = JournalLine(1.0, "started", 0, data={"keep": rules_to_json(policy.rules)})
    return RunPage(Inventory("runs/a", "r", entries), 100.0, {entry.name: 99.0 for entry in entries}, journal=decode_journal([encode_journal_line(line)]).lines)  # fmt: skip


@given(steps=st.sets(st.integers(0, 99), min_size=1, max_size=12), policies=POLICIES)
def test_the_reasons_are_those_of_the_manager(steps, policies):
    """W22: what is kept, and why, is what the retention plans."""
    policy = Retention(tuple(rule for each in policies for rule in each.rules))
    page = run_of(steps, policy)
    saved = [Saved(entry.name, entry.head.step, age_secs=1.0) for entry in page.inventory.entries]
    planned = plan_retention(saved, policy=policy, written=saved[-1]).kept
    found = why_kept(page)
    assert found == {name: tuple("the newest" if each == "just written" else each for each in why) for name, why in planned.items()}  # fmt: skip
    assert policy_of(page.journal).rules == policy


def test_a_rule_of_a_program_is_named_and_not_asked():
    page = run_of({10, 20}, Retention((Own(),)))
    assert str(policy_of(page.journal)) == "those of Mondays"
    assert why_kept(page) == {"step-00000020": ("the newest",)}


def test_of_a_checkpoint_that_no_rule_keeps_it_is_said_what_becomes_of_it():
    """W22: `no reason is known` of one that a kill has left, or new rules, although the rules are known."""
    words = "no rule keeps it: the next save may delete it"
    assert sections_html(run_of({10, 20}, keep_last(1)))["checkpoints"].count(words) == 1
    own = sections_html(run_of({10, 20}, Retention((Own(),))))["checkpoints"]
    assert ("no reason is known" in own, words in own) == (True, False)


def test_of_a_checkpoint_that_cannot_be_used_it_is_said_why_it_is_there():
    """W22: of one in quarantine, the page had no word about why it stays."""
    page = run_of({10, 20, 30}, keep_last(1))
    quarantined = {"step-00000010": quarantine_problem(Tried("step-00000010", "d", 3), "runs/a")}
    torn = Entry("step-00000005", None, problem=problem_of(no_manifest("runs/a/step-00000005")))
    inventory = with_quarantined(attrs.evolve(page.inventory, entries=(torn, *page.inventory.entries)), quarantined)
    found = why_kept(attrs.evolve(page, inventory=inventory, pointers={"step-00000010": ("mine",)}))
    unused = "no rule of the retention counts it, because it cannot be used"
    assert found == {"step-00000010": (unused, "the pointer mine"), "step-00000030": ("the newest", "the last one")}


def test_the_reasons_of_a_quarantine_are_whole_on_the_page():
    """W22: three long ones were cut, and with them what to do."""
    reasons = tuple(f"{number}{'x' * 990}<end>" for number in range(3))
    problem = quarantine_problem(Tried("step-00000010", "d", 3, reasons=reasons), f"/{'d' * 200}/runs/a")
    page = run_of({10, 20}, keep_last(1))
    shown = sections_html(attrs.evolve(page, inventory=with_quarantined(page.inventory, {"step-00000010": problem})))["findings"]  # fmt: skip
    assert shown.count("&lt;end&gt;") == 3
    assert "it is free once it has loaded" in shown


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["last", "best", "own", "min", "newer", "all"]), lambda inner: st.lists(inner, max_size=4), max_leaves=8))  # fmt: skip
def test_rules_of_any_json_are_rules_or_left_out(value):
    rules, texts = rules_from_json(value)
    saved = (Saved("a", 1, score=0.5), Saved("b", 2))
    assert all(rule.kept(saved) <= {"a", "b"} for rule in rules)
    assert all(isinstance(text, str) for text in texts)
