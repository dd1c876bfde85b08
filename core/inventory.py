"""`Inventory`: what was found in a run, as a value, and the order in which its checkpoints are to be believed."""

from collections.abc import Iterable
from typing import final

import attrs

from trainfold.core.errors import TrainfoldError
from trainfold.core.manifest import Head, Manifest


@final
@attrs.frozen
class Problem:
    """Why something cannot be used: the name of the error and its four parts."""

    error: str
    where: str
    expected: str
    found: str
    mend: str
    exit_code: int = attrs.field(default=1, eq=False)

    def __str__(self) -> str:
        return f"{self.error}: {self.where}: expected {self.expected}, found {self.found}; {self.mend}"


def problem_of(error: TrainfoldError) -> Problem:
    """The problem that an error describes.

    Examples:
        >>> from trainfold.core.errors import CheckpointTorn
        >>> print(problem_of(CheckpointTorn("step-7", expected="a manifest", found="none", mend="use an older one")))
        CheckpointTorn: step-7: expected a manifest, found none; use an older one
    """
    name = type(error).__name__
    return Problem(name, error.where, str(error.expected), str(error.found), error.mend, type(error).exit_code)


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
    """

    run: str
    run_id: str | None
    entries: tuple[Entry, ...]
    problem: Problem | None = None

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
    ordered = sorted(_claims(inventory.entries), key=lambda pair: (pair[0].timeline, pair[0].step), reverse=True)
    for source, _ in ordered:
        limits = dict(source.forks) | {source.timeline: None}
        found = tuple(entry for head, entry in ordered if entry.is_candidate and _within(head, limits))
        if found:
            return found
    return ()


def current_head(inventory: Inventory) -> Head | None:
    """The head of the newest checkpoint of the current timeline, usable or not; what a save continues."""
    return max((head for head, _ in _claims(inventory.entries)), key=lambda h: (h.timeline, h.step), default=None)


def next_head(inventory: Inventory, run_id: str, step: int) -> Head:
    """The head of a checkpoint about to be saved: same timeline if it goes forward, a new one after a rewind.

    Args:
        inventory: the run as it is.
        run_id: the run.
        step: the step to be saved.

    Examples:
        >>> old = Inventory("r", "r", (Entry("step-00000100", Head("r", 100)), Entry("step-00000200", Head("r", 200))))
        >>> next_head(old, "r", 300).timeline, next_head(old, "r", 110).timeline, next_head(old, "r", 110).forks
        (0, 1, ((0, 100),))
    """
    current = current_head(inventory)
    if current is None:
        return Head(run_id, step)
    usable = [entry.head for entry in lineage(inventory) if entry.head is not None]
    before = max((head for head in usable if head.step < step), key=lambda h: (h.timeline, h.step), default=None)
    parent = None if before is None else f"step-{before.step:08d}"
    if step >= current.step:
        return Head(run_id, step, current.timeline, current.forks, parent)
    if before is None:
        return Head(run_id, step, current.timeline + 1, (), None)
    kept = tuple(fork for fork in before.forks if fork[0] != before.timeline)
    return Head(run_id, step, current.timeline + 1, (*kept, (before.timeline, before.step)), parent)


def _claims(entries: Iterable[Entry]) -> list[tuple[Head, Entry]]:
    return [(entry.head, entry) for entry in entries if entry.head is not None]


def _within(head: Head, limits: dict[int, int | None]) -> bool:
    if head.timeline not in limits:
        return False
    limit = limits[head.timeline]
    return limit is None or head.step <= limit
