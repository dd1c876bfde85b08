"""`plan_pruning`: which checkpoints and leftovers may be deleted after a commit, decided from the inventory before any deletion.

An interpreter asks in two steps, because a proof costs reads: `to_prove` and `may_be_torn` name what it must look at, and `plan_pruning`
decides with what it found.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import final

import attrs

from trainfold.core.best.best_json import BestFile
from trainfold.core.format.file_names import directory_of, is_data_file, step_of
from trainfold.core.history.inventory import Entry, Inventory, lineage
from trainfold.core.save.retention import Retention, RetentionPlan, Saved, plan_left_behind, plan_retention


@final
@attrs.frozen
class Pruning:
    """What may be deleted, and why the rest stays. Prints as a table.

    Attributes:
        lineage: the checkpoints of the present lineage.
        left_behind: those that rewinds have left behind.
        torn: the directories of saves and deletions that did not finish.
    """

    lineage: RetentionPlan
    left_behind: RetentionPlan
    torn: tuple[str, ...]

    @property
    def deleted(self) -> tuple[str, ...]:
        """The checkpoints to delete, those of the lineage first, each oldest first."""
        return self.lineage.deleted + self.left_behind.deleted

    def __str__(self) -> str:
        tables = [str(plan) for plan in (self.lineage, self.left_behind) if plan.kept or plan.deleted]
        return "\n".join([*tables, *(f"{name}  goes   a save or a deletion did not finish" for name in self.torn)])


def to_prove(inventory: Inventory, written: Saved, *, with_left_behind: bool) -> tuple[str, ...]:
    """The checkpoints that take part in the plan if all of their files exist.

    Args:
        inventory: the run; what is in quarantine has a problem in it, and so takes no part.
        written: the checkpoint that was committed just now; it needs no proof.
        with_left_behind: whether there is a policy for the checkpoints that rewinds have left behind.
    """
    present = [entry.name for entry in lineage(inventory) if entry.name != written.name]
    others = [entry.name for entry in _left_behind(inventory, written)] if with_left_behind else []
    return (*present, *others)


def may_be_torn(inventory: Inventory, written: Saved) -> tuple[str, ...]:
    """The directories whose file names decide whether they are leftovers of an unfinished save or deletion.

    They have no manifest that can be read, and a lower step than the checkpoint just written: nothing writes into them any more.
    """
    names = (entry.name for entry in inventory.entries if entry.head is None)
    return tuple(name for name in names if (step_of(name) or 0) < written.step)


def plan_pruning(  # noqa: PLR0913 - keywords
    inventory: Inventory,
    *,
    written: Saved,
    proved: Mapping[str, Saved],
    files: Mapping[str, Sequence[str]],
    policy: Retention,
    left_behind: Retention | None = None,
    protected: Mapping[str, str] | None = None,
) -> Pruning:
    """Say what may be deleted after a commit.

    Laws: only checkpoints that were proved are deleted, and only directories in which every file has a name that a save gives are torn.
    The checkpoint just written stays, and so do the protected ones. Planning again after the deletion deletes nothing.

    Args:
        inventory: the run, with what is in quarantine.
        written: the checkpoint that was committed just now.
        proved: name -> what is known of it, for each checkpoint of `to_prove` that has all its files.
        files: directory -> its file names, for each of `may_be_torn`.
        policy: what to keep of the present lineage.
        left_behind: what to keep of the checkpoints that rewinds have left behind; None for all.
        protected: name -> why it stays, such as the best.

    Examples:
        >>> from trainfold.core.format.manifest import Head
        >>> from trainfold.retention import keep_last
        >>> steps = [Entry(f"step-{step:08d}", Head("r", step)) for step in (10, 20, 30)]
        >>> run = Inventory("runs/a", "r", (*steps, Entry("step-00000005", None)))
        >>> saved = {entry.name: Saved(entry.name, entry.head.step) for entry in steps}
        >>> last = saved["step-00000030"]
        >>> files = {"step-00000005": ["model-00000-of-00001.safetensors"]}
        >>> print(plan_pruning(run, written=last, proved=saved, files=files, policy=keep_last(1), protected={"step-00000010": "the best"}))
        step-00000010  stays  the best
        step-00000030  stays  just written, the last one
        step-00000020  goes   nothing keeps it
        step-00000005  goes   a save or a deletion did not finish
    """
    kept = protected or {}
    present = [proved[entry.name] for entry in lineage(inventory) if entry.name in proved]
    mine = plan_retention(present, policy=policy, written=proved.get(written.name, written), protected=kept)
    left = [proved[entry.name] for entry in _left_behind(inventory, written) if entry.name in proved]
    others = (
        RetentionPlan({}, ()) if left_behind is None else plan_left_behind(left, policy=left_behind, protected=kept)
    )
    torn = (name for name in may_be_torn(inventory, written) if _is_torn(files.get(name, ())))
    return Pruning(mine, others, tuple(torn))


def best_still_there(inventory: Inventory, best: BestFile) -> str | None:
    """The best of the kept checkpoints on the current lineage; None if a rewind has left all of them behind.

    Args:
        inventory: the run.
        best: the best and the N best, each with its timeline.
    """
    present = {(entry.name, entry.head.timeline) for entry in lineage(inventory) if entry.head is not None}
    first = [] if best.record.step is None else [(directory_of(best.record.step), best.timeline)]
    ranked = [*first, *((directory_of(entry.step), timeline) for entry, timeline in best.kept)]
    return next((name for name, timeline in ranked if (name, timeline) in present), None)


def _left_behind(inventory: Inventory, written: Saved) -> list[Entry]:
    """The usable checkpoints of earlier timelines that the present lineage does not go through."""
    mine = {entry.name for entry in lineage(inventory)}
    return [
        entry
        for entry in inventory.entries
        if entry.is_candidate
        and entry.head is not None
        and entry.head.timeline < written.timeline
        and entry.name not in mine
    ]


def _is_torn(files: Collection[str]) -> bool:
    """Whether a directory without a readable manifest holds nothing but data files; an empty one may be about to be filled."""
    return bool(files) and all(is_data_file(name) for name in files)
