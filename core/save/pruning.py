"""`plan_pruning`: which checkpoints and leftovers may be deleted after a commit, decided from the inventory before any deletion.

An interpreter asks in two steps, because a proof costs reads: `to_prove` and `may_be_torn` name what it must look at, and `plan_pruning`
decides with what it found.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, final

import attrs

from trainfold.core.best.best_json import BestFile
from trainfold.core.format.file_names import MANIFEST, directory_of, is_data_file, step_of
from trainfold.core.history.inventory import BEHIND, Entry, Inventory, lineage
from trainfold.core.problem import Problem
from trainfold.core.save.retention import Retention, RetentionPlan, Saved, plan_left_behind, plan_retention
from trainfold.core.save.retention_rules import All
from trainfold.core.save.reuse.referred import references_in, referrers_first, still_needed

UNFINISHED: Final = "a save or a deletion did not finish"
LEFT_BEHIND: Final = f"{BEHIND}, and no rule is for these"


@final
@attrs.frozen
class Pruning:
    """What may be deleted, and why the rest stays. Prints as a table.

    Attributes:
        lineage: the checkpoints of the present lineage.
        left_behind: those that rewinds have left behind.
        torn: the directories of saves and deletions that did not finish.
        left_alone: name -> why it stays although no rule counts it: it is damaged, in quarantine, left behind, or may be a save under way.
        refers: each checkpoint that refers to files of others -> these.
        held: why nothing goes of what no rule keeps; None if it does.
    """

    lineage: RetentionPlan
    left_behind: RetentionPlan
    torn: tuple[str, ...]
    left_alone: Mapping[str, str] = attrs.field(factory=dict)
    refers: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict, repr=False)
    held: Problem | None = None

    @property
    def deleted(self) -> tuple[str, ...]:
        """The checkpoints to delete, those of the lineage first, each oldest first; but none before one that refers to it."""
        return referrers_first(self.lineage.deleted + self.left_behind.deleted, self.refers)

    def __str__(self) -> str:
        tables = [str(plan) for plan in (self.lineage, self.left_behind) if plan.kept or plan.deleted]
        torn = [f"{name}  goes   {UNFINISHED}" for name in self.torn]
        return "\n".join([*tables, *torn, *(f"{name}  stays  {why}" for name, why in self.left_alone.items())])


def newest_to_examine(inventory: Inventory) -> str | None:
    """The checkpoint whose manifest must be read before `newest_complete` can answer, or None if enough is known."""
    newest = next(iter(lineage(inventory)), None)
    return newest.name if newest is not None and newest.manifest is None else None


def newest_complete(inventory: Inventory) -> Saved | None:
    """The newest checkpoint that has all its files: a torn one must not protect itself and let the complete ones go.

    Args:
        inventory: the run, with what is in quarantine, and with the manifests that `newest_to_examine` asked for.

    Returns:
        The checkpoint, to take the place of the one just written in `plan_pruning`; None if there is none.
    """
    newest = next(iter(lineage(inventory)), None)
    if newest is None or newest.manifest is None:
        return None
    manifest = newest.manifest
    parts = parts_of((each.name for each in manifest.components), manifest.omitted)
    return Saved(newest.name, manifest.head.step, manifest.head.timeline, parts=parts)


def parts_of(components: Iterable[str], omitted: Collection[str]) -> frozenset[str] | None:
    """The components of a checkpoint that was saved without others; None for a whole one."""
    return frozenset(components) if omitted else None


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


def deletes_none(policy: Retention, left_behind: Retention | None) -> bool:
    """Whether these policies delete no checkpoint of any run, so that none needs a proof.

    Args:
        policy: what to keep of the present lineage.
        left_behind: what to keep of the checkpoints that rewinds have left behind; None for all.

    Examples:
        >>> from trainfold.retention import keep_all, keep_last
        >>> deletes_none(keep_all() | keep_last(2), None), deletes_none(keep_all(), keep_last(1))
        (True, False)
    """
    return left_behind is None and any(isinstance(rule, All) for rule in policy.rules)


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
    problems: Mapping[str, Problem] | None = None,
) -> Pruning:
    """Say what may be deleted after a commit.

    Laws: only checkpoints that were proved are deleted, and only directories in which every file has a name that a save gives are torn.
    The checkpoint just written stays, and so do the protected ones, and those to whose files one that stays refers. Nothing goes while it is not known to what a checkpoint refers. A directory that may be a save
    under way stays. Each directory of the run is in the plan once, with the reason. Planning again after the deletion deletes nothing.

    Args:
        inventory: the run, with what is in quarantine.
        written: the checkpoint that was committed just now.
        proved: name -> what is known of it, for each checkpoint of `to_prove` that has all its files.
        files: directory -> its file names, for each of `may_be_torn`.
        policy: what to keep of the present lineage.
        left_behind: what to keep of the checkpoints that rewinds have left behind; None for all.
        protected: name -> why it stays, such as the best.
        problems: name -> what is wrong with it, for each checkpoint of `to_prove` that was not proved.

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
    torn = tuple(name for name in may_be_torn(inventory, written) if _is_torn(files.get(name, ())))
    refers, doomed = references_in(inventory), {*mine.deleted, *others.deleted, *torn}
    needed = still_needed(doomed, [entry.name for entry in inventory.entries if entry.name not in doomed], refers)
    if needed:
        mine, others = _without(mine, needed), _without(others, needed)
        torn = tuple(name for name in torn if name not in needed)
    planned = {*mine.kept, *mine.deleted, *others.kept, *others.deleted, *torn}
    alone = {
        entry.name: needed.get(entry.name)
        or _why_alone(entry, entry.problem or (problems or {}).get(entry.name), written, files.get(entry.name))
        for entry in inventory.entries
        if entry.name not in planned
    }
    plan = Pruning(mine, others, torn, alone, refers)
    unread = next(iter(inventory.unread), None)
    return _unread(plan, unread) if unread is not None and (plan.deleted or plan.torn) else plan


def _without(plan: RetentionPlan, needed: Mapping[str, str]) -> RetentionPlan:
    """The plan in which what others need stays."""
    more = {name: (needed[name],) for name in plan.deleted if name in needed}
    kept = dict(sorted({**plan.kept, **more}.items(), key=lambda pair: step_of(pair[0]) or 0)) if more else plan.kept
    return RetentionPlan(kept, tuple(name for name in plan.deleted if name not in needed))


def _unread(plan: Pruning, entry: Entry) -> Pruning:
    """The plan while it is not known to what a checkpoint refers: nothing goes."""
    assert entry.problem is not None  # it could not be read
    fix = f"{entry.problem.fix}; nothing was deleted, because {entry.name} may refer to files of the others: if it is lost for good, delete {entry.name}/{MANIFEST}, and not the files beside it"
    spared = _spared(plan, f"would go, but {entry.name} cannot be read now, and may refer to its files")
    return attrs.evolve(spared, refers=plan.refers, held=attrs.evolve(entry.problem, fix=fix))


def held_back(plan: Pruning, newest: str, problem: Problem) -> Pruning:
    """The plan if the newest complete checkpoint proves damaged when it is read whole: nothing goes, because it may be all that would be left.

    Args:
        plan: the plan that was made before it was read.
        newest: its name.
        problem: what is wrong with it.
    """
    spared = _spared(plan, "would go if the newest checkpoint were whole")
    alone = {**spared.left_alone, newest: f"the newest, but {_in_words(problem)}; nothing is deleted"}
    kept = {name: why for name, why in plan.lineage.kept.items() if name != newest}
    return attrs.evolve(spared, lineage=RetentionPlan(kept, ()), left_alone=dict(sorted(alone.items())), held=problem)


def _spared(plan: Pruning, why: str) -> Pruning:
    """The plan in which what would go stays for one reason."""
    alone = {**plan.left_alone, **dict.fromkeys((*plan.deleted, *plan.torn), why)}
    lineage, behind = RetentionPlan(plan.lineage.kept, ()), RetentionPlan(plan.left_behind.kept, ())
    return Pruning(lineage, behind, (), dict(sorted(alone.items())))


def best_still_there(inventory: Inventory, best: BestFile) -> str | None:
    """The best of the kept checkpoints on the current lineage; None if a rewind has left all of them behind. That of a best which cannot be read now is not known.

    Args:
        inventory: the run.
        best: the best and the N best, each with its timeline.
    """
    mine = inventory.entry(best.name)
    if mine is not None and mine.head is None and mine.is_unreadable:
        return best.name
    present = {(entry.name, entry.head.timeline) for entry in lineage(inventory) if entry.head is not None}
    ranked = [(directory_of(entry.step), timeline) for entry, timeline in (best.best, *best.kept)]
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


def _why_alone(entry: Entry, problem: Problem | None, written: Saved, files: Collection[str] | None) -> str:
    """Why a directory stays that no rule counts."""
    if problem is None:
        is_behind = entry.head is not None and entry.head.timeline < written.timeline
        return LEFT_BEHIND if is_behind else "not of the present lineage"
    if entry.head is not None or problem.error != "CheckpointTorn":
        return f"{_in_words(problem)}; no rule counts it"
    if files is None:
        return "a save that is under way or did not finish: the next save removes what did not finish"
    others = [name for name in files if not is_data_file(name)]
    return f"no manifest, and {'no file' if not files else f'{others[0]}, which no save writes'}: no rule counts it"


def _in_words(problem: Problem) -> str:
    return f"{problem.error}: expected {problem.expected}, found {problem.found}"
