"""`Inventory`: the checkpoints of a run as a value, and the order in which they are preferred."""

from collections.abc import Collection, Mapping
from typing import Final, final

import attrs

from trainfold.core.format.file_names import MANIFEST, directory_of, step_of
from trainfold.core.format.manifest import Head, Manifest, Summary
from trainfold.core.problem import Problem

# the first words of a fix for a problem that an older checkpoint does not have
OLDER: Final = "use an older checkpoint"
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
        before: the checkpoints that were committed after it, as far as `with_order_known` can say without its manifest.
    """

    name: str
    head: Head | None
    manifest: Manifest | None = None
    problem: Problem | None = None
    summary: Summary | None = None
    before: tuple[str, ...] = ()

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
    """

    run: str
    run_id: str | None
    entries: tuple[Entry, ...]
    problem: Problem | None = None
    lost: str | None = None

    @property
    def current_steps(self) -> dict[int, int]:
        """The steps of the usable checkpoints of the current `lineage`: these are the run, and what a rewind left behind is not. With each, that of the checkpoint before; 0 without one."""
        heads = [entry.head for entry in lineage(self) if entry.head is not None]
        return {head.step: step_of(head.parent or "") or 0 for head in heads}

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
                status = f"{entry.problem.error}: {entry.problem.found}"
            elif entry is resumed:
                status = f"{status}; a resume tries it first"
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

        Args:
            head: of the other one; None to find all that cannot be read now.
        """

        def may_be(entry: Entry, head: Head) -> bool:
            if entry.head is not None:
                return head_order(entry.head) > head_order(head)
            # in a later timeline lower steps are newer
            is_higher = not head.timeline and (step_of(entry.name) or 0) >= head.step
            return is_higher or directory_of(head.step) not in entry.before

        return tuple(entry for entry in self.entries if entry.is_unreadable and (head is None or may_be(entry, head)))

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
        limits = dict(source.forks) | {source.timeline: None}
        found = tuple(entry for head, entry in ordered if entry.is_candidate and is_within(head, limits))
        if found:
            return found
    return ()


def current_head(inventory: Inventory) -> Head | None:
    """The head of the newest checkpoint of the current timeline, usable or not. A save continues it."""
    return max(heads_of(inventory), key=head_order, default=None)


def with_order_known(inventory: Inventory, committed_at: Mapping[str, float | None], latest: str | None) -> Inventory:
    """Mark of the checkpoints whose manifests are not known now before which others they were committed.

    Such as an object that a rule of the bucket has archived: without this it would stop each resume for good. One is older than another if its step is lower, or the other is in a timeline after the first,
    if it was committed before, and if the hint does not name it. Each of these alone can deceive: a lower step is newer after a rewind, and then it was
    committed later and named by the hint; the times of a copy are those of the copying, which says nothing of their order, and its hint is that of the run.
    What is not marked stops a resume; where a time or the hint is not known, or the hint names it, nothing is marked. A step that was saved again has
    the time of its last commit. That one is older than the newest says nothing of others: if that proves damaged, it may be the newest.

    Args:
        inventory: the run.
        committed_at: name -> when its manifest was committed, by the store's own clock; None if that is not known.
        latest: the checkpoint that the hint ``latest`` names, or None.

    Examples:
        >>> denied = Problem("CheckpointUnreadable", "runs/a", "bytes", "403", "wait")
        >>> found = Inventory("runs/a", "run", (Entry("step-00000002", None, problem=denied), Entry("step-00000007", Head("run", 7))))
        >>> times = {"step-00000002": 50.0, "step-00000007": 90.0}
        >>> with_order_known(found, times, "step-00000007").entries[0].before
        ('step-00000007',)
    """

    def others(entry: Entry) -> tuple[str, ...]:
        at = committed_at.get(entry.name)
        if at is None or latest is None or entry.name == latest:
            return ()
        heads = [each.name for each in inventory.entries if each.head is not None]
        return tuple(name for name in heads if at < (committed_at.get(name) or at))

    marked = (attrs.evolve(each, before=others(each)) if each.may_come_back else each for each in inventory.entries)
    return attrs.evolve(inventory, entries=tuple(marked))


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
