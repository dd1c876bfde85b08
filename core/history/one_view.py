"""Whether all ranks see the same run: rank 0 reads it for all of them, and each of the others says what differs in what it sees itself."""

from collections.abc import Collection, Sequence
from typing import Final, final

import attrs

from trainfold.core.errors import CheckpointMissing, RanksDisagree
from trainfold.core.format.file_names import step_of
from trainfold.core.history.inventory import Inventory
from trainfold.core.problem import Problem, worst_problem

_FIX: Final = "let every rank see the same files (no node-local or stale copies)"


@final
@attrs.frozen
class View:
    """What a rank sees of a checkpoint that all ranks examine.

    Attributes:
        is_same: whether its manifest is the one that rank 0 has read.
        problem: what the rank has found against the checkpoint; None if nothing.
        unlisted: the checkpoints that the rank sees and rank 0 did not list, where the lists are compared in the same call.
    """

    is_same: bool
    problem: Problem | None
    unlisted: tuple[str, ...] = ()


def unlisted(inventory: Inventory, names: Collection[str]) -> tuple[str, ...]:
    """The checkpoints among the names that a rank sees in a run and that an inventory lacks; none if the inventory refuses the run anyway.

    Examples:
        >>> unlisted(Inventory("runs/a", "a1", ()), ["run.json", "step-00000007"])
        ('step-00000007',)
    """
    if inventory.problem is not None and inventory.problem.error != CheckpointMissing.__name__:
        return ()
    known = {entry.name for entry in inventory.entries}
    return tuple(sorted(name for name in names if step_of(name) is not None and name not in known))


def other_lists(run: str, found: Sequence[Collection[str]]) -> RanksDisagree | None:
    """The error for ranks that see checkpoints that rank 0 does not see, or None.

    Args:
        run: its location.
        found: what is `unlisted`, by rank.
    """
    odd = [(rank, sorted(names)) for rank, names in enumerate(found) if names]
    if not odd:
        return None
    more = "; ".join(f"{', '.join(names[-3:])} on rank {rank}" for rank, names in odd[:4])
    return RanksDisagree(
        run, expected="the same checkpoints on every rank", found=f"{more}, and not on rank 0", fix=_FIX
    )


def other_views(checkpoint: str, views: Sequence[View]) -> RanksDisagree | None:
    """The error for ranks that see another checkpoint than rank 0, or that find something else against it; None if all see the same.

    A rank that cannot read it now has found nothing against it; see `with_unread`.

    Args:
        checkpoint: its location.
        views: by rank.
    """
    other = [rank for rank, view in enumerate(views) if not view.is_same]
    if other:
        found = f"on rank {', '.join(map(str, other))}, another one than on rank 0, or none"
        return RanksDisagree(checkpoint, expected="the same manifest on every rank", found=found, fix=_FIX)
    readers = [rank for rank, view in enumerate(views) if view.problem is None or not view.problem.is_unreadable]
    odd = [rank for rank in readers if _gist(views[rank].problem) != _gist(views[readers[0]].problem)]
    if not odd:
        return None
    told = [f"rank {rank}: {views[rank].problem or 'nothing is wrong'}" for rank in (readers[0], *odd[:3])]
    return RanksDisagree(checkpoint, expected="the same files on every rank", found="; ".join(told), fix=_FIX)


def with_unread(mine: Inventory, before: Inventory, name: str, views: Sequence[View]) -> Inventory:
    """The inventory of a rank that has examined a checkpoint, with the same problem on every rank if some could not read it now.

    Args:
        mine: what the rank has found.
        before: the inventory before that, which all ranks have.
        name: the checkpoint.
        views: of all ranks, of which `other_views` says nothing.
    """
    problems = [view.problem for view in views if view.problem is not None]
    entry = before.entry(name)
    if entry is None or not any(each.is_unreadable for each in problems):
        return mine
    return before.with_entry(attrs.evolve(entry, problem=worst_problem(problems)))


def _gist(problem: Problem | None) -> tuple[str, str, str] | None:
    """A problem without its place, because ranks may reach one run by different paths."""
    return None if problem is None else (problem.error, problem.expected, problem.found)
