"""`CopyPlan`: which checkpoints of a run go into another store, with which files, and what keeps others from going; as a value that prints."""

from collections.abc import Collection, Iterable, Mapping
from typing import Final, Literal, TypeAlias, final

import attrs

from trainfold.core.errors import CheckpointTorn, CommitConflict
from trainfold.core.format.manifest import Head
from trainfold.core.history.best_copy import usable_heads
from trainfold.core.history.inventory import Inventory, head_order
from trainfold.core.problem import Problem, problem_of

CopyAction: TypeAlias = Literal["copied", "completed", "replaced", "there"]
"""``copied``: the target has no such checkpoint. ``completed``: it has the manifest, and not all of its files. ``replaced``: it has an earlier revision of the same
step. ``there``: it has all of it."""

_ALONE: Final = (
    "trainfold prune RUN --keep-last 0 --flatten writes all of them so that they stand alone; or copy another step"
)


@final
@attrs.frozen
class CopiedFile:
    """A file that a checkpoint needs, or that lies beside its files.

    Attributes:
        path: its name in the run.
        size_bytes: its size.
        digest: of all its bytes; empty for a file that no manifest names.
    """

    path: str
    size_bytes: int
    digest: str

    @property
    def directory(self) -> str:
        """The checkpoint in whose directory it is."""
        return self.path.partition("/")[0]


@final
@attrs.frozen
class Offered:
    """A checkpoint of the source, whole as far as the sizes of its files say.

    Attributes:
        head: its identity.
        digest: of the bytes of its manifest.
        files: what its manifest names, also in the directories of others; none are asked for if the target has it whole.
        beside: the other files in its directory, such as a user's.
        folders: the directories in it, which no store can read.
    """

    head: Head
    digest: str
    files: tuple[CopiedFile, ...] = attrs.field(repr=False)
    beside: tuple[CopiedFile, ...] = ()
    folders: tuple[str, ...] = ()


@final
@attrs.frozen
class Present:
    """What the target has under the name of a checkpoint.

    Attributes:
        head: its identity; None if its manifest cannot be read, or its bytes are proved wrong: any other one may replace it.
        digest: of the bytes of its manifest.
        is_whole: whether its files are there, in their sizes, and it is not in quarantine.
    """

    head: Head | None
    digest: str
    is_whole: bool


@final
@attrs.frozen
class CheckpointCopy:
    """What happens to one checkpoint.

    Attributes:
        name: its directory.
        action: what is done.
        why: the reason why it is among them.
        digest: of the bytes of its manifest.
        files: what must be in its directory. Those that are there and have the digest are not sent again.
        replaces: the digest of the manifest that is replaced; empty for none.
        refers: the other checkpoints to whose files it refers.
    """

    name: str
    action: CopyAction
    why: str
    digest: str
    files: tuple[CopiedFile, ...] = attrs.field(default=(), repr=False)
    replaces: str = ""
    refers: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of its files; it is not known yet which of them are there."""
        return sum(file.size_bytes for file in self.files)


@final
@attrs.frozen
class CopyPlan:
    """What a copy of checkpoints does, in this order. Prints as a table.

    Attributes:
        source: the location of the run that is read.
        target: the location that is written.
        makes_run: whether the target becomes a run, with the id of the source.
        checkpoints: what happens to each; one that refers to files of others comes after them.
        left_out: name -> why it is not copied, of checkpoints that were not asked for by name, and of directories in those that are.
        refused: why nothing can be copied; empty if it can.
        best: whether ``best.json`` goes with them.
        newest_lost: why the newest checkpoint is left out, where all, or the newest, were asked for; None if it is not.
    """

    source: str
    target: str
    makes_run: bool
    checkpoints: tuple[CheckpointCopy, ...]
    left_out: Mapping[str, str] = attrs.field(factory=dict)
    refused: tuple[Problem, ...] = ()
    best: bool = False
    newest_lost: Problem | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the files that are looked at, and sent if they are not there."""
        return sum(each.size_bytes for each in self.checkpoints)

    def outcome(self, copy: CheckpointCopy) -> str:
        """What is done with a checkpoint: its action, or ``not copied`` where something refuses the whole copy."""
        return "not copied" if self.refused and copy.action != "there" else copy.action

    def rows(self) -> tuple[tuple[str, str, int, str], ...]:
        """Checkpoint, what is done, bytes, and why."""
        found: list[tuple[str, str, int, str]] = [
            (each.name, self.outcome(each), each.size_bytes, each.why) for each in self.checkpoints
        ]
        if self.best and not self.refused:
            found.append(("best.json", "copied", 0, "the target has the checkpoints that it names"))
        found += [(name, "left out", 0, why) for name, why in self.left_out.items()]
        return (*found, *(("", "refused", 0, str(problem)) for problem in self.refused))

    def __str__(self) -> str:
        lines = [f"copy {self.source} to {self.target}{', which becomes a run' if self.makes_run else ''}"]
        lines += [f"{name:24} {action:10} {size:>18,}  {why}" for name, action, size, why in self.rows()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from trainfold.core.markup.html_table import html_table, notebook  # late: commands show no HTML

        columns = ("checkpoint", "action", "bytes", "why")
        return notebook(html_table(f"{self.source} to {self.target}", columns, self.rows(), numbers=("bytes",)))


def in_copy_order(inventory: Inventory, names: Iterable[str]) -> dict[str, str]:
    """Name -> why it is copied, of some checkpoints and of those to whose files they refer: the oldest first, and none before one that it refers to.

    Examples:
        >>> from trainfold.core.format.manifest import Summary
        >>> from trainfold.core.history.inventory import Entry
        >>> def entry(step, *refers):
        ...     return Entry(f"step-{step:08d}", Head("r", step), summary=Summary(0, (), {}, refers))
        >>> run = Inventory("runs/a", "r", (entry(1), entry(2), entry(3, "step-00000001")))
        >>> in_copy_order(run, ["step-00000003"])
        {'step-00000001': 'step-00000003 refers to its files', 'step-00000003': 'asked for'}
    """
    entries = {entry.name: entry for entry in inventory.entries}
    wanted = [name for name in names if name in entries]
    found: dict[str, str] = {}
    begun: set[str] = set()

    def add(name: str, why: str) -> None:
        if name in entries and name not in begun:
            begun.add(name)
            for other in entries[name].refers:
                add(other, "asked for" if other in wanted else f"{name} refers to its files")
            found[name] = why

    def age(name: str) -> tuple[int, int]:
        head = entries[name].head if name in entries else None
        return (0, 0) if head is None else head_order(head)

    for name in sorted(wanted, key=age):
        add(name, "asked for")
    return found


def decide_copy(  # noqa: PLR0913 - keywords
    source: Inventory,
    target: Inventory,
    order: Mapping[str, str],
    *,
    offered: Mapping[str, Offered],
    problems: Mapping[str, Problem],
    present: Mapping[str, Present],
    sizes: Mapping[str, int | None],
    asked: Collection[str] | None = None,
    replaces: bool = False,
    best: Mapping[str, int] | None = None,
) -> CopyPlan:
    """Decide what a copy does.

    Law: a target on which the plan was carried out has each checkpoint of it with the same manifest, and all files that it names; what it had before is unchanged, except
    for earlier revisions that are replaced. Deciding again finds all of them ``there``.

    Args:
        source: the run that is read.
        target: the store that is written.
        order: as `in_copy_order` returns it.
        offered: those of the source that are whole.
        problems: why the others of them are not.
        present: what the target has under their names.
        sizes: path -> its size in the target, None if it is not there, for the files that are referred to and for those beside.
        asked: the names that were asked for one by one, which may not be left out; None if all were asked for.
        replaces: whether a later revision, or one of a later timeline, replaces what the target has; or any, what is damaged there.
        best: checkpoint -> its timeline, of those that the source's ``best.json`` names, if it is to go along.
    """
    lost: dict[str, Problem] = {}
    refused: list[Problem] = []
    going: dict[str, CopyAction] = {}
    for name in order:
        problem = problems.get(name) or _unmet(source, name, offered[name], lost)
        if problem is None:
            needs_room = present.get(name) is None and _referrers(target, name) - order.keys()
            action = None if needs_room else _action(offered[name], present.get(name), sizes, replaces=replaces)
            if action is not None:
                going[name] = action
                continue
            problem = _conflict(target.run, name, offered[name], present.get(name))
            refused.append(problem)
        elif asked is not None:
            refused.append(problem)
        lost[name] = problem
    needed: dict[str, dict[str, CopiedFile]] = {}
    for name, action in going.items():
        for file in (*offered[name].files, *offered[name].beside) if action != "there" else ():
            if going.get(file.directory, "there") != "there" or sizes.get(file.path) != file.size_bytes:
                needed.setdefault(file.directory, {})[file.path] = file
    copies = tuple(
        CheckpointCopy(
            name,
            "completed" if action == "there" and name in needed else action,
            order[name],
            offered[name].digest,
            tuple(needed.get(name, {}).values()),
            present[name].digest if action != "copied" else "",
            tuple(sorted({file.directory for file in offered[name].files} - {name})),
        )
        for name, action in going.items()
    )
    folders = ((name, folder) for name in going for folder in offered[name].folders)
    left_out = {name: str(problem) for name, problem in lost.items() if problem not in refused}
    left_out |= {
        f"{name}/{folder}": "a directory in the directory of a checkpoint, which does not belong to it"
        for name, folder in folders
    }
    there = usable_heads(target) | {name: offered[name].head for name in going}
    return CopyPlan(
        source.run,
        target.run,
        target.run_id is None,
        copies,
        left_out,
        tuple(dict.fromkeys(refused)),
        best is not None and all(_has_best(source, there.get(name), name, of) for name, of in best.items()),
        lost.get(max((*going, *lost), default="")) if asked is None else None,
    )


def _has_best(source: Inventory, head: Head | None, name: str, timeline: int) -> bool:
    """Whether a target has one of the best, as it was measured; of a step that the source has trained again since, whatever it has."""
    return head is not None and (head.timeline == timeline or source.timelines.get(name, timeline) != timeline)


def _action(
    offered: Offered, present: Present | None, sizes: Mapping[str, int | None], *, replaces: bool
) -> CopyAction | None:
    """What is done about a checkpoint; None if the target has another one of that step."""
    if present is None:
        return "copied"
    if present.digest == offered.digest:
        has_all = all(sizes.get(file.path) == file.size_bytes for file in offered.beside)
        return "there" if present.is_whole and has_all else "completed"
    new, old = offered.head, present.head
    is_later = old is None or (new.timeline, new.revision) > (old.timeline, old.revision)
    return "replaced" if replaces and is_later else None


def _unmet(source: Inventory, name: str, offered: Offered, lost: Mapping[str, Problem]) -> Problem | None:
    """Why the files of others to which a checkpoint refers cannot go with it."""
    for other in sorted({file.directory for file in offered.files} - {name}):
        entry = source.entry(other)
        if other in lost or entry is None or not entry.is_candidate:
            error = CheckpointTorn(f"{source.run}/{other}", expected=f"a whole checkpoint, because {name} refers to its files",
                                   found="one that cannot be copied", fix=_ALONE)  # fmt: skip
            return problem_of(error)
    return None


def _referrers(target: Inventory, name: str) -> set[str]:
    """The checkpoints of the target that refer to files in a directory."""
    return {entry.name for entry in target.entries if name in entry.refers}


def _conflict(target: str, name: str, offered: Offered, present: Present | None) -> Problem:
    found = (
        f"one with {present.digest}" if present is not None else "files without one, to which other checkpoints refer"
    )
    error = CommitConflict(f"{target}/{name}", expected=f"no checkpoint, or the one with the manifest {offered.digest}", found=found,
                           fix="copy into another run, or leave this step out: nothing is overwritten")  # fmt: skip
    return problem_of(error)
