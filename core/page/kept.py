"""`why_kept`: why each checkpoint of a run is there, with the rules of its retention and its references; `changes_between`: what changed from one to the next."""

import itertools
from collections.abc import Sequence
from typing import Final, final

import attrs

from trainfold.core.flight.journal_line import JournalLine
from trainfold.core.format.manifest import Manifest
from trainfold.core.history.inventory import BEHIND, Entry, lineage
from trainfold.core.json_values import shown
from trainfold.core.page.run_page import RunPage
from trainfold.core.save.retention import Retention, Saved, plan_left_behind, plan_retention
from trainfold.core.save.retention_rules import rules_from_json
from trainfold.core.state.contract_kinds import contract_kind
from trainfold.core.state.notes import CONVERTED, NOTES, RATES

_WRITTEN: Final = "just written"
_UNUSABLE: Final = "no rule of the retention counts it, because it cannot be used"
_UNREAD: Final = "no rule of the retention counts it while it cannot be read"
NEWEST: Final = "the newest"
_FEW: Final = 2  # names that are shown; each checkpoint may refer to all before it


@final
@attrs.frozen
class Policy:
    """The retention of a run, as the last process that trained it has recorded it.

    Attributes:
        rules: those that can be asked here.
        own: the texts of rules of the program's own.
        left_behind: the rules for checkpoints that rewinds have left behind; None for none.
    """

    rules: Retention | None = None
    own: tuple[str, ...] = ()
    left_behind: Retention | None = None

    def __str__(self) -> str:
        return ", ".join([*([str(self.rules)] if self.rules is not None else []), *self.own])


def policy_of(journal: Sequence[JournalLine], place: str = "") -> Policy | None:
    """The retention that the journal records last; None if it has none.

    Args:
        journal: its lines, which both tiers of a run have.
        place: where the run is that is shown; the far tier has rules of its own.
    """
    data = next((line.data for line in reversed(journal) if line.kind == "started"), {})
    is_far = bool(place) and data.get("far") == place
    rules, own = rules_from_json(data.get("keep_far" if is_far else "keep"))
    left, _ = rules_from_json(None if is_far else data.get("left_behind"))
    if not rules and not own:
        return None
    return Policy(Retention(rules) if rules else None, own, Retention(left) if left else None)


def why_kept(page: RunPage) -> dict[str, tuple[str, ...]]:
    """The reasons for which each checkpoint with a manifest is there: rules, names, references; empty if none of these is known.

    The rules are asked as a manager would ask them now. A checkpoint without a reason is one that the next save would delete, or one of a run
    whose rules are not recorded. No rule counts one that cannot be used, so none deletes it.
    """
    policy = policy_of(page.journal, page.place)
    present = [entry for entry in lineage(page.inventory) if entry.head is not None]
    names = {entry.name for entry in present}
    scores = {} if page.best is None else page.best.scores
    saved = {entry.name: _saved(entry, page, scores) for entry in page.inventory.entries if entry.is_candidate}
    protected = {name: "the pointer " + ", ".join(pointers) for name, pointers in page.pointers.items() if pointers}
    protected |= {} if page.best is None else page.best.names_in(page.inventory.timelines)
    found: dict[str, tuple[str, ...]] = {}
    if present:
        newest = saved[present[0].name]
        rules = None if policy is None else policy.rules
        if rules is not None:
            plan = plan_retention([saved[entry.name] for entry in present], policy=rules, written=newest, protected=protected)  # fmt: skip
            found |= {name: tuple(NEWEST if why == _WRITTEN else why for why in each) for name, each in plan.kept.items()}  # fmt: skip
        else:
            found[newest.name] = (NEWEST,)
    left = [each for name, each in saved.items() if name not in names]
    if policy is not None or not left:
        found |= plan_left_behind(left, policy=None if policy is None else policy.left_behind, protected=protected).kept
    else:
        found |= {each.name: (BEHIND,) for each in left}
    unusable = {
        each.name: _UNREAD if each.is_unreadable else _UNUSABLE
        for each in page.inventory.entries
        if each.problem is not None and not each.is_unfinished
    }
    found |= {name: (why,) for name, why in unusable.items()}
    for name, why in protected.items():
        if name in saved.keys() | unusable.keys() and why not in found.get(name, ()):
            found[name] = (*found.get(name, ()), why)
    for name, whose in _referrers(page).items():
        if name in saved.keys() | unusable.keys():
            verb = "refers" if len(whose) == 1 else "refer"
            found[name] = (*found.get(name, ()), f"{few_names(whose)} {verb} to it")
    return found


def _referrers(page: RunPage) -> dict[str, list[str]]:
    """Checkpoint -> those that refer to its files."""
    found: dict[str, list[str]] = {}
    for entry in page.inventory.entries:
        for name in entry.refers:
            found.setdefault(name, []).append(entry.name)
    return found


def few_names(names: Sequence[str]) -> str:
    """Some names, or how many there are.

    Examples:
        >>> few_names(["a"]), few_names(["a", "b"]), few_names(["a", "b", "c"])
        ('a', 'a and b', '3 checkpoints')
    """
    return " and ".join(names) if len(names) <= _FEW else f"{len(names):,} checkpoints"


def _saved(entry: Entry, page: RunPage, scores: dict[tuple[str, int], float]) -> Saved:
    head = entry.head
    assert head is not None
    at = page.committed_at.get(entry.name)
    summary = entry.summary if entry.manifest is None else entry.manifest.summary
    parts = None if summary is None or not summary.omitted else frozenset(summary.fingerprints)
    age = None if at is None else page.made_at - at
    return Saved(entry.name, head.step, head.timeline, scores.get((entry.name, head.timeline)), age, parts)


@final
@attrs.frozen
class Change:
    """Something that differs between two checkpoints that follow each other.

    Attributes:
        before: the earlier one.
        after: the later one.
        kind: of the drift.
        where: the setting, or the library.
        was: its value before.
        now: its value after.
    """

    before: str
    after: str
    kind: str
    where: str
    was: str
    now: str


def changes_between(entries: Sequence[Entry]) -> tuple[Change, ...]:
    """What changed from each checkpoint to the next one: versions, the number of ranks, settings, the environment.

    Args:
        entries: in the order of their steps; those without a manifest are passed over.
    """
    known = [(entry.name, entry.manifest) for entry in entries if entry.manifest is not None]
    return tuple(
        Change(before, after, *row)
        for (before, old), (after, new) in itertools.pairwise(known)
        for row in _differences(old, new)
    )


def _differences(old: Manifest, new: Manifest) -> list[tuple[str, str, str, str]]:
    rows = []
    if old.world_size != new.world_size:
        rows.append(("world", "ranks", str(old.world_size), str(new.world_size)))
    libraries = sorted({*old.versions, *new.versions})
    rows += [("versions", name, old.versions.get(name, "absent"), new.versions.get(name, "absent")) for name in libraries
             if old.versions.get(name) != new.versions.get(name)]  # fmt: skip
    keys = sorted({*old.contract, *new.contract} - NOTES - {RATES, CONVERTED})
    absent = object()
    for key in keys:
        was, now = old.contract.get(key, absent), new.contract.get(key, absent)
        if was != now:
            texts = ["absent" if each is absent else shown(each) for each in (was, now)]
            rows.append((contract_kind(key), key, texts[0], texts[1]))
    return rows
