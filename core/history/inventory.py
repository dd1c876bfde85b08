"""`Inventory`: what was found in a run, as a value, and the order in which its checkpoints are to be believed."""

from collections.abc import Iterable
from typing import Final, final

import attrs

from trainfold.core.errors import Problem
from trainfold.core.format.manifest import Head, Manifest
from trainfold.core.state.descent import BEGINNING, Descent

OLDER: Final = "use an older checkpoint"  # how the fix of a problem begins that an older one does not have


@final
@attrs.frozen
class Entry:
    """One step directory of a run.

    Attributes:
        name: the directory, ``step-00000120``.
        head: what the manifest's first line claims; None where there is no manifest.
        manifest: the manifest, once it was read whole and proved; None before that.
        problem: why the checkpoint cannot be used, or None.
    """

    name: str
    head: Head | None
    manifest: Manifest | None = None
    problem: Problem | None = None

    @property
    def is_candidate(self) -> bool:
        """Whether it may turn out to be usable: it has a head, and nothing is known against it."""
        return self.head is not None and self.problem is None


@final
@attrs.frozen
class Inventory:
    """What a run holds.

    Attributes:
        run: where it is, for messages.
        run_id: from ``run.json``; None where there is no run.
        entries: every step directory, in the order of names; foreign names are not in here.
        problem: what is wrong with the run itself, or None.
        lost: what says that the run had a whole checkpoint, where it has none with a manifest; such as ``"latest names step-00000120"``.
    """

    run: str
    run_id: str | None
    entries: tuple[Entry, ...]
    problem: Problem | None = None
    lost: str | None = None

    def entry(self, name: str) -> Entry | None:
        """The entry of that name, or None."""
        return next((entry for entry in self.entries if entry.name == name), None)

    def with_entry(self, entry: Entry) -> "Inventory":
        """The inventory with one entry replaced by what is known now."""
        return attrs.evolve(self, entries=tuple(entry if old.name == entry.name else old for old in self.entries))


def lineage(inventory: Inventory) -> tuple[Entry, ...]:
    """The usable checkpoints of the current timeline and those that it grew from, the one to resume first.

    The newest timeline decides (E16): after a rewind, the steps that were left behind never win, however high they are. A
    checkpoint that turned out to be bad still tells where its timeline forked, as long as that leads anywhere.

    Examples:
        >>> def at(step, timeline=0, forks=()):
        ...     return Entry(f"step-{step:08d}", Head("run", step, timeline, forks))
        >>> found = Inventory("runs/a", "run", (at(100), at(110, 1, ((0, 100),)), at(500)))
        >>> [entry.name for entry in lineage(found)]
        ['step-00000110', 'step-00000100']
    """
    ordered = sorted(_claims(inventory.entries), key=lambda pair: _order(pair[0]), reverse=True)
    for source, _ in ordered:
        limits = dict(source.forks) | {source.timeline: None}
        found = tuple(entry for head, entry in ordered if entry.is_candidate and _within(head, limits))
        if found:
            return found
    return ()


def current_head(inventory: Inventory) -> Head | None:
    """The head of the newest checkpoint of the current timeline, usable or not; what a save continues."""
    return max((head for head, _ in _claims(inventory.entries)), key=_order, default=None)


def next_head(inventory: Inventory, run_id: str, step: int, *, descends_from: Descent | None = None) -> Head:
    """The head of a checkpoint about to be saved: same timeline if it continues the newest one, and else a new timeline.

    Law: the lineage of what is saved is that of what it descends from, as far as it lies below the step; whatever else the run
    holds, newer, damaged or in quarantine, is left behind.

    A checkpoint that it descends from and that is not there any more still says where a timeline was left, and the nearest
    ancestor that is there stands in as the parent. Where nobody knows what a state comes from, the steps decide: above the
    newest one it continues it, and below it comes from the newest usable one that is below.

    Args:
        inventory: the run as it is.
        run_id: the run.
        step: the step to be saved.
        descends_from: what the state comes from; None where nobody knows.

    Examples:
        >>> old = Inventory("r", "r", (Entry("step-00000100", Head("r", 100)), Entry("step-00000200", Head("r", 200))))
        >>> next_head(old, "r", 300).timeline, next_head(old, "r", 110).timeline, next_head(old, "r", 110).forks
        (0, 1, ((0, 100),))
        >>> rewound = next_head(old, "r", 300, descends_from=Descent(0, 100))
        >>> rewound.timeline, rewound.forks, rewound.parent
        (1, ((0, 100),), 'step-00000100')
    """
    newest = current_head(inventory)
    if descends_from == BEGINNING:
        taken = {of for head, _ in _claims(inventory.entries) for of in (head.timeline, *dict(head.forks))}
        return Head(run_id, step, max(taken, default=-1) + 1)
    origin = _by_steps(inventory, newest, step) if descends_from is None else descends_from
    if origin is None:
        return Head(run_id, step, 0 if newest is None else newest.timeline + 1)
    heads = [head for head, _ in _claims(inventory.entries)]
    earlier = origin.forks or next((head.forks for head in heads if head.timeline == origin.timeline), ())
    last = min(origin.step, step - 1)  # the step's own directory is about to hold something else
    left = tuple((of, min(at, last)) for of, at in (*earlier, (origin.timeline, origin.step)) if last >= 0)
    before = [head for head in heads if _within(head, dict(left))]
    nearest = max(before, key=_order, default=None)
    parent = None if nearest is None else f"step-{nearest.step:08d}"
    is_newest = newest is None or _order(newest) <= (origin.timeline, origin.step)
    if is_newest and origin.step <= step and left[:-1] == earlier:
        return Head(run_id, step, origin.timeline, earlier, parent)
    taken = {origin.timeline, *dict(earlier), *(of for head in heads for of in (head.timeline, *dict(head.forks)))}
    return Head(run_id, step, max(taken) + 1, left, parent)


def _by_steps(inventory: Inventory, newest: Head | None, step: int) -> Descent | None:
    """What a state of that step comes from, if the steps tell; None if it begins anew."""
    if newest is not None and newest.step <= step:
        return Descent(newest.timeline, newest.step)
    usable = [entry.head for entry in lineage(inventory) if entry.head is not None and entry.head.step < step]
    before = max(usable, key=_order, default=None)
    return None if before is None else Descent(before.timeline, before.step)


def _order(head: Head) -> tuple[int, int]:
    return head.timeline, head.step


def _claims(entries: Iterable[Entry]) -> list[tuple[Head, Entry]]:
    return [(entry.head, entry) for entry in entries if entry.head is not None]


def _within(head: Head, limits: dict[int, int | None]) -> bool:
    if head.timeline not in limits:
        return False
    limit = limits[head.timeline]
    return limit is None or head.step <= limit
