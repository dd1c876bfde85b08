"""`Inventory`: the checkpoints of a run as a value, and the order in which they are preferred."""

from collections.abc import Collection, Mapping
from typing import Final, final

import attrs

from trainfold.core.format.file_names import MANIFEST, directory_of, step_of
from trainfold.core.format.manifest import Head, Manifest, Summary
from trainfold.core.problem import Problem

# the first words of a fix for a problem that an older checkpoint does not have
OLDER: Final = "use an older checkpoint"
BEHIND: Final = "left behind by the run"
_NO_MANIFEST: Final = "CheckpointTorn"
_WRONG_BYTES: Final = ("CheckpointDamaged", "CheckpointForeign", "CheckpointHostile")


@final
@attrs.frozen
class Entry:
    """One step directory of a run.

    Attributes:
        name: the directory, ``step-00000120``.
        head: what the first line of the manifest claims; None without a manifest.
        manifest: the manifest, once it was read whole and proved; None before that.
        problem: why the checkpoint cannot be used; None if nothing is known against it.
        summary: what the first line of the manifest claims about the rest; None before version 3.
        before: the checkpoints than which it is not newer in their timelines, as far as `with_order_known` can say without its manifest.
        committed_at: when its manifest was committed, by the store's clock in seconds since 1970, if that is not known otherwise; None if the store does not say.
    """

    name: str
    head: Head | None
    manifest: Manifest | None = None
    problem: Problem | None = None
    summary: Summary | None = None
    before: tuple[str, ...] = ()
    committed_at: float | None = None

    @property
    def is_candidate(self) -> bool:
        """Whether it may be usable: it has a head, and nothing is known against it."""
        return self.head is not None and self.problem is None

    @property
    def is_unfinished(self) -> bool:
        """Whether it has no manifest: a save that did not finish, or is under way."""
        return self.head is None and self.problem is not None and self.problem.expected == MANIFEST

    @property
    def is_unreadable(self) -> bool:
        """Whether the store did not give it now, which proves nothing against it."""
        return self.problem is not None and self.problem.is_unreadable

    @property
    def may_come_back(self) -> bool:
        """Whether it has a manifest of which not even the first line is known: that may be given later, or put back."""
        return self.head is None and self.problem is not None and self.problem.error != _NO_MANIFEST

    @property
    def refers(self) -> tuple[str, ...]:
        """The other checkpoints whose files it refers to, as far as its first line says."""
        summary = self.summary if self.manifest is None else self.manifest.summary
        return () if summary is None else summary.refers


@final
@attrs.frozen
class Inventory:
    """What a run holds.

    Attributes:
        run: its location, for messages.
        run_id: the id in ``run.json``; None if there is no run.
        entries: every step directory, sorted by name; foreign names are ignored.
        problem: what is wrong with the run itself, or None.
        lost: evidence of a whole checkpoint in a run that has no manifest now, such as ``"latest names step-00000120"``; else None.
        writers: checkpoint without a manifest -> the process that may be writing it now. For people: two inventories that differ only here are equal, and it decides nothing.
    """

    run: str
    run_id: str | None
    entries: tuple[Entry, ...]
    problem: Problem | None = None
    lost: str | None = None
    writers: Mapping[str, str] = attrs.field(factory=dict, eq=False)

    @property
    def current_steps(self) -> dict[int, int]:
        """The steps of the usable checkpoints of the current `lineage`: these are the run, and what a rewind left behind is not. With each, that of the checkpoint before; 0 without one."""
        heads = [entry.head for entry in lineage(self) if entry.head is not None]
        return {head.step: step_of(head.parent or "") or 0 for head in heads}

    @property
    def timelines(self) -> dict[str, int]:
        """Checkpoint -> its timeline, for each whose head is known."""
        return {entry.name: entry.head.timeline for entry in self.entries if entry.head is not None}

    def _repr_html_(self) -> str:
        from trainfold.core.markup.html_table import html_table, notebook  # late: commands show no HTML

        resumed = next(iter(lineage(self)), None)
        rows = []
        for entry in self.entries:
            head = (
                ("", "", "")
                if entry.head is None
                else (str(entry.head.step), str(entry.head.timeline), entry.head.parent or "")
            )
            status = "a manifest, not read yet" if entry.manifest is None else "complete"
            if entry.problem is not None:
                writer = self.writers.get(entry.name)
                status = f"being written by {writer}" if writer else f"{entry.problem.error}: {entry.problem.found}"
            elif entry is resumed:
                status = f"{status}; {self.refuses(entry) or 'a resume tries it first'}"
            rows.append((entry.name, *head, status))
        if self.problem is not None:
            rows.append(("the run", "", "", "", str(self.problem)))
        table = html_table(
            f"{self.run}  run {self.run_id}", ("checkpoint", "step", "timeline", "after", "status"), rows
        )
        return notebook(f"{self._chart()}{table}")

    def _chart(self) -> str:
        """The timelines, as on the page of a run; empty without checkpoints."""
        from trainfold.core.markup.chart import chart_html
        from trainfold.core.markup.timelines import lineage_chart

        heads = [(entry, entry.head) for entry in self.entries if entry.head is not None]
        present = {entry.name for entry in lineage(self)}
        marks = [(head.step, head.timeline, entry.name in present) for entry, head in heads]
        if not marks:
            return ""
        return chart_html(lineage_chart(marks, {head.timeline: head.forks for _, head in heads}), "trainfold-lineage")

    def entry(self, name: str) -> Entry | None:
        """The entry of that name, or None."""
        return next((entry for entry in self.entries if entry.name == name), None)

    @property
    def unread(self) -> tuple[Entry, ...]:
        """The checkpoints that may refer to files of any other one, because the first lines of their manifests are not known.

        A manifest that could not be read now, or that a newer trainfold wrote, is whole as far as anyone knows. One with wrong bytes counts
        only in a run in which checkpoints refer to others: it was one of those, and a copy of it may be put back.
        """
        refer = any(entry.refers for entry in self.entries)
        return tuple(
            entry
            for entry in self.entries
            if entry.may_come_back and entry.problem is not None and (refer or entry.problem.error not in _WRONG_BYTES)
        )

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The checkpoints that have no manifest."""
        return tuple(entry.name for entry in self.entries if entry.is_unfinished)

    def refers_to(self, name: str) -> bool:
        """Whether a checkpoint refers to files of this directory, or may."""
        return any(name in entry.refers for entry in self.entries) or any(entry.name != name for entry in self.unread)

    def maybe_newer(self, head: Head | None) -> tuple[Entry, ...]:
        """The checkpoints that cannot be read now, and that may be newer than another one: that is not taken for them. Nothing proves damage, so to go on from it could part the run in two.

        Where a rewind has left the other one behind, and what came after the rewind is damaged, that are all from which it may have come.

        Args:
            head: of the other one; None to find all that cannot be read now.
        """

        def may_be(entry: Entry, head: Head) -> bool:
            newer = [each for each in heads_of(self) if head_order(each) > head_order(head)]
            if any(_may_be_before(entry, each) for each in newer if not is_within(head, _limits(each))):
                return True
            return directory_of(head.step) not in entry.before if entry.head is None else entry.head in newer

        return tuple(entry for entry in self.entries if entry.is_unreadable and (head is None or may_be(entry, head)))

    def refuses(self, newest: Entry) -> str:
        """Why no resume takes the newest checkpoint that is known, in words; empty if one does.

        Args:
            newest: the first of the `lineage`.
        """
        unread = self.maybe_newer(newest.head)
        return f"a resume is refused while {unread[-1].name}, which may be newer, cannot be read" if unread else ""

    def with_entry(self, entry: Entry) -> "Inventory":
        """The inventory with one entry replaced."""
        return attrs.evolve(self, entries=tuple(entry if old.name == entry.name else old for old in self.entries))

    def standing_alone(self, names: Collection[str]) -> "Inventory":
        """The inventory in which these checkpoints refer to no others. Their manifests are not in it."""
        alone = (
            attrs.evolve(entry, manifest=None, summary=attrs.evolve(entry.summary, refers=()))
            if entry.name in names and entry.summary is not None
            else entry
            for entry in self.entries
        )
        return attrs.evolve(self, entries=tuple(alone))


def lineage(inventory: Inventory) -> tuple[Entry, ...]:
    """The usable checkpoints of the current timeline and of the timelines that it forked from, the preferred one first.

    The newest timeline decides: after a rewind, the steps that were left behind never win, however high they are. A checkpoint that turned
    out to be bad still shows where its timeline forked, if a usable checkpoint lies on that lineage.

    Examples:
        >>> def at(step, timeline=0, forks=()):
        ...     return Entry(f"step-{step:08d}", Head("run", step, timeline, forks))
        >>> found = Inventory("runs/a", "run", (at(100), at(110, 1, ((0, 100),)), at(500)))
        >>> [entry.name for entry in lineage(found)]
        ['step-00000110', 'step-00000100']
    """
    claims = [(entry.head, entry) for entry in inventory.entries if entry.head is not None]
    ordered = sorted(claims, key=lambda pair: head_order(pair[0]), reverse=True)
    for source, _ in ordered:
        limits = _limits(source)
        found = tuple(entry for head, entry in ordered if entry.is_candidate and is_within(head, limits))
        if found:
            return found
    return ()


def current_head(inventory: Inventory) -> Head | None:
    """The head of the newest checkpoint of the current timeline, usable or not. A save continues it."""
    return max(heads_of(inventory), key=head_order, default=None)


def with_order_known(inventory: Inventory, committed_at: Mapping[str, float | None], latest: str | None) -> Inventory:
    """Mark of the checkpoints whose manifests are not known now than which others they are not newer.

    Such as an object that a rule of the bucket has archived: without this it would stop each resume for good. What the hint names was committed last. So another one that was
    committed before, by the store's clock, is older than that, or a rewind has left it behind; and so it is with those that the named one descends from, unless its step lies
    between the two: steps rise along a lineage. One that descends from the named one was committed after the hint, and only lower steps are older than that.

    The times of a copy are those of the copying, and say nothing of the order; so a time decides nothing alone, and none between two of which the hint names neither. What is not
    marked stops a resume. Nothing is marked where a time, the hint, or the head that it names is not known, or where the three contradict one another.

    Args:
        inventory: the run.
        committed_at: name -> when its manifest was committed, by the store's own clock; None if that is not known. Only the times of the checkpoints that are not
            known, and of the named one, are used.
        latest: the checkpoint that the hint ``latest`` names, or None.

    Examples:
        >>> denied = Problem("CheckpointUnreadable", "runs/a", "bytes", "403", "wait")
        >>> found = Inventory("runs/a", "run", (Entry("step-00000002", None, problem=denied), Entry("step-00000007", Head("run", 7))))
        >>> times = {"step-00000002": 50.0, "step-00000007": 90.0}
        >>> with_order_known(found, times, "step-00000007").entries[0].before
        ('step-00000007',)
    """
    heads = {entry.name: entry.head for entry in inventory.entries if entry.head is not None}
    named = heads.get(latest or "")
    named_at = committed_at.get(latest or "")

    def others(entry: Entry) -> tuple[str, ...]:
        at, step = committed_at.get(entry.name), step_of(entry.name) or 0
        if named is None or named_at is None or at is None or at >= named_at:
            return ()
        if not named.timeline and step > named.step:  # none of a higher step was committed before it
            return ()
        return tuple(name for name, head in heads.items() if _is_not_newer(step, head, named))

    marked = (
        attrs.evolve(each, before=others(each), committed_at=committed_at.get(each.name))
        if each.may_come_back
        else each
        for each in inventory.entries
    )
    return attrs.evolve(inventory, entries=tuple(marked))


def _is_not_newer(step: int, head: Head, named: Head) -> bool:
    """Whether a checkpoint of that step, committed before the one that the hint names, is not newer than another one in the lineage of these two."""
    if is_within(head, _limits(named)):
        return not head.step < step < named.step
    return is_within(named, _limits(head)) and step < named.step


def _may_be_before(entry: Entry, head: Head) -> bool:
    """Whether another checkpoint may be on the lineage of a newer one."""
    return (step_of(entry.name) or 0) < head.step if entry.head is None else is_within(entry.head, _limits(head))


def _limits(head: Head) -> Mapping[int, int | None]:
    return dict(head.forks) | {head.timeline: head.step}


def heads_of(inventory: Inventory) -> list[Head]:
    """The head of every manifest, including those that cannot be used."""
    return [entry.head for entry in inventory.entries if entry.head is not None]


def head_order(head: Head) -> tuple[int, int]:
    """The key that sorts heads by preference: the newest timeline last, and in it the highest step."""
    return head.timeline, head.step


def is_within(head: Head, limits: Mapping[int, int | None]) -> bool:
    """Whether a checkpoint is on a lineage, given as timeline -> the last step on it, or None for all steps."""
    if head.timeline not in limits:
        return False
    limit = limits[head.timeline]
    return limit is None or head.step <= limit
