"""`RunPage`: the facts about a run that its page shows, as a value."""

from collections.abc import Mapping
from typing import final

import attrs

from trainfold.core.best.best_json import BestFile
from trainfold.core.flight.journal_line import JournalLine
from trainfold.core.format.file_names import directory_of
from trainfold.core.history.inventory import BEHIND, Inventory, lineage
from trainfold.core.markup.curve import Curve


@final
@attrs.frozen
class FlightFacts:
    """What the page takes from a flight log.

    Attributes:
        loss: the losses that were recorded.
        norm: the norms of the gradient.
        first: the first step of the log; None if it has none.
        last: the last one.
        written_at: when its last line was written, in seconds since 1970; None if that is not known.
        others: the logs of other ranks that are shown, by rank.
        not_shown: how many other ranks have a log that is not shown.
        damage: what of the log cannot be read, in words; empty if all can.
        undone: which steps of the log a resume has undone, in words; they are not in the curves.
    """

    loss: Curve = attrs.field(factory=Curve)
    norm: Curve = attrs.field(factory=Curve)
    first: int | None = None
    last: int | None = None
    written_at: float | None = None
    others: Mapping[int, "FlightFacts"] = attrs.field(factory=dict)
    not_shown: int = 0
    damage: str = ""
    undone: tuple[str, ...] = ()


@final
@attrs.frozen
class ResumeFacts:
    """What a resume would do now, on the machine that made the page.

    Attributes:
        checkpoint: what it would load; None if it is refused.
        drifts: (verdict, kind, where, saved, here).
        problems: why checkpoints are passed over, or why it is refused.
    """

    checkpoint: str | None = None
    drifts: tuple[tuple[str, str, str, str, str], ...] = ()
    problems: tuple[str, ...] = ()


@final
@attrs.frozen
class RunPage:
    """The facts about a run. What is not recorded is empty here, and the page says that it is not known.

    Attributes:
        inventory: the checkpoints; the newest have manifests.
        made_at: when the facts were read, in seconds since 1970.
        committed_at: checkpoint -> when it was committed.
        pointers: checkpoint -> what names it, such as ``latest`` or ``best``.
        best: the run's ``best.json``; None without one.
        journal: what happened, in the order of its lines; empty for a run without a journal.
        left_out: how many lines of a long journal are not in it: of the older ones, it has the starts and ends of processes alone.
        is_copied: whether the logs got their times by a copy, so that the last line of the journal is the last sign of a process.
        place: where the run is, as a journal names a far tier.
        runs: whether the last process of the journal runs; None if that is not known.
        flight: from the flight log of rank 0; None for a run without one.
        resume: what a resume would do.
        unread: what of the run could not be read, and why.
    """

    inventory: Inventory
    made_at: float
    committed_at: Mapping[str, float] = attrs.field(factory=dict)
    pointers: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    best: BestFile | None = None
    journal: tuple[JournalLine, ...] = ()
    flight: FlightFacts | None = None
    resume: ResumeFacts = attrs.field(factory=ResumeFacts)
    unread: tuple[str, ...] = ()
    left_out: int = 0
    is_copied: bool = False
    place: str = ""
    runs: bool | None = None

    @property
    def has_several_ranks(self) -> bool:
        """Whether more ranks than one trained it, or saved a checkpoint that is read here."""
        logged = self.flight is not None and bool(self.flight.others or self.flight.not_shown)
        return logged or any(each.manifest is not None and each.manifest.world_size > 1 for each in self.inventory.entries)  # fmt: skip

    @property
    def lost_bests(self) -> dict[int, str]:
        """Step of a best -> why its checkpoint counts no more, in words; without those that count, or cannot be read now."""
        if self.best is None:
            return {}
        present = lineage(self.inventory)
        found = {}
        for best, timeline in (*self.best.entries, self.best.best):
            entry = self.inventory.entry(directory_of(best.step))
            if entry is None or (entry.head is not None and entry.head.timeline != timeline):
                found[best.step] = "its checkpoint is gone"
            elif entry.problem is not None:
                found |= {} if entry.is_unreadable else {best.step: "its checkpoint cannot be used"}
            elif entry not in present:
                found[best.step] = BEHIND
        return found

    @property
    def sizes(self) -> dict[str, int]:
        """Checkpoint -> bytes of its own data files, as its manifest or its first line says."""
        found = {}
        for entry in self.inventory.entries:
            summary = entry.summary if entry.manifest is None else entry.manifest.summary
            if summary is not None:
                found[entry.name] = summary.size_bytes
        return found
