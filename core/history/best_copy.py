"""`best_copy`: what a copy of a run's ``best.json`` needs of its checkpoints, and which of them neither place has whole."""

from collections.abc import Mapping
from typing import final

import attrs

from trainfold.core.format.manifest import Head
from trainfold.core.history.inventory import Inventory, lineage
from trainfold.core.problem import Problem


@final
@attrs.frozen
class BestCopy:
    """What becomes of the checkpoints that a run's best names. Those that the target has, and those that a rewind has left behind or replaced, are not among them.

    Attributes:
        lacking: those that are to be sent, by their steps.
        damaged: checkpoint -> why the source has it not whole, where the target has it neither.
        unread: why others cannot be read now.
        nowhere: those of which neither has anything.
    """

    lacking: tuple[int, ...] = ()
    damaged: Mapping[str, Problem] = attrs.field(factory=dict)
    unread: tuple[Problem, ...] = ()
    nowhere: tuple[str, ...] = ()


def usable_heads(target: Inventory) -> dict[str, Head]:
    """Checkpoint -> its identity, of those in a target that may be usable."""
    return {entry.name: entry.head for entry in target.entries if entry.head is not None and entry.is_candidate}


def best_copy(best: Mapping[str, int], source: Inventory, target: Inventory) -> BestCopy:
    """Decide what becomes of each checkpoint of the best.

    Args:
        best: checkpoint -> the timeline in which it was measured.
        source: the run; those that the target has otherwise are examined.
        target: where its copies are.

    Examples:
        >>> from trainfold.core.history.inventory import Entry
        >>> run = Inventory("runs/a", "r", (Entry("step-00000001", Head("r", 1)), Entry("step-00000002", Head("r", 2))))
        >>> best_copy({"step-00000002": 0, "step-00000003": 0}, run, Inventory("s3://b/a", "r", run.entries[:1]))
        BestCopy(lacking=(2,), damaged={}, unread=(), nowhere=('step-00000003',))
    """
    usable, there = lineage(source), usable_heads(target)
    lacking: list[int] = []
    damaged: dict[str, Problem] = {}
    nowhere: list[str] = []
    for name, timeline in best.items():
        entry, copied = source.entry(name), there.get(name)
        head = None if entry is None else entry.head
        if (head is not None and head.timeline != timeline) or (head is not None and head == copied):
            continue
        if entry is not None and head is not None and entry in usable:
            lacking.append(head.step)
        elif copied is not None and copied.timeline == timeline:
            continue
        elif entry is None or entry.is_unfinished:
            nowhere.append(name)
        elif entry.problem is not None:
            damaged[name] = entry.problem
    unread = tuple(damaged.pop(name) for name, problem in list(damaged.items()) if problem.is_unreadable)
    return BestCopy(tuple(lacking), damaged, unread, tuple(nowhere))
