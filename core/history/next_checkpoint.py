"""`next_checkpoint`: the identity of the checkpoint about to be saved: its timeline, parent and revision."""

from collections.abc import Collection

import attrs

from trainfold.core.format.file_names import MANIFEST, directory_of
from trainfold.core.format.manifest import Head
from trainfold.core.history.inventory import Entry, Inventory, current_head, head_order, heads_of, is_within, lineage
from trainfold.core.state.parent_checkpoint import BEGINNING, ParentCheckpoint


def next_checkpoint(  # noqa: PLR0913 - keywords
    inventory: Inventory,
    run_id: str,
    step: int,
    *,
    files: Collection[str] = (),
    descends_from: ParentCheckpoint | None = None,
    least_revision: int = 0,
    now_ms: int = 0,
) -> Head:
    """The head of the next checkpoint, with a revision that differs from those of all files of the step.

    Law: a step that has a manifest gets a higher revision than its files have, so that the old checkpoint stays whole until the new
    manifest replaces the old one. A step without a manifest has revision 0: what it holds was never a checkpoint. If another checkpoint refers to
    files of the step, its own are new ones all the same. No revision is below the least one, whose lower ones writers that are lost may still use.

    Args:
        inventory: the run.
        run_id: its id.
        step: the step to save.
        files: the names of the files that the step's directory holds now.
        descends_from: the checkpoint that the state was loaded from or saved as last; None if unknown.
        least_revision: that of a store whose lost writers may still write.
        now_ms: as in `next_head`.

    Examples:
        >>> from trainfold.core.history.inventory import Entry
        >>> old = Inventory("r", "r", (Entry("step-00000100", Head("r", 100)),))
        >>> next_checkpoint(old, "r", 200).parent, next_checkpoint(old, "r", 100, files=["manifest.json"]).revision
        ('step-00000100', 1)
        >>> torn = Inventory("r", "r", (Entry("step-00000100", None),))
        >>> next_checkpoint(torn, "r", 100, files=["manifest.json", "model-00000-of-00001.r2.safetensors"]).revision
        3
    """
    head = next_head(inventory, run_id, step, descends_from=descends_from, now_ms=now_ms)
    head = attrs.evolve(head, revision=least_revision)
    is_referred = inventory.refers_to(directory_of(step))
    if MANIFEST not in files and not is_referred:
        return head
    entry = inventory.entry(directory_of(step))
    known = None if entry is None or entry.head is None else entry.head.revision
    if known is None or is_referred:
        known = max(known or 0, _revision_in(files))
    return attrs.evolve(head, revision=max(known + 1, least_revision))


def _revision_in(files: Collection[str]) -> int:
    """The highest revision in the names of files, for a manifest that cannot be read, or files that others refer to."""
    parts = (part for name in files for part in name.split("."))
    return max((int(part[1:]) for part in parts if part[:1] == "r" and part[1:].isdecimal()), default=0)


def next_head(
    inventory: Inventory,
    run_id: str,
    step: int,
    *,
    descends_from: ParentCheckpoint | None = None,
    now_ms: int = 0,
) -> Head:
    """The head of the next checkpoint: in the same timeline if it continues the newest checkpoint, else in a new one.

    Law: the lineage of the new checkpoint is the lineage of what it descends from, up to the step below. Everything else that the run
    holds, whether newer, damaged or in quarantine, is left behind.

    A deleted ancestor still says where its timeline was left, and the nearest ancestor that exists becomes the parent. If the descent
    is unknown, the steps decide: a step above the newest checkpoint continues it, and a lower step descends from the newest usable
    checkpoint below it. A checkpoint whose manifest cannot be read now, or has wrong bytes, and that may be newer than what the state comes from, is left behind too, as
    when an older one was named: the new one is in a timeline that is later than any which that may be in.

    Args:
        inventory: the run.
        run_id: its id.
        step: the step to save.
        descends_from: the checkpoint that the state was loaded from or saved as last; None if unknown.
        now_ms: milliseconds since 1970; 0 if not known. A timeline that begins beside manifests that are not known has the time of the newest of them as its number, or now where
            the store does not say it: how many rewinds lie before those is not known, and one of them may itself be in a timeline that began so.

    Examples:
        >>> from trainfold.core.history.inventory import Entry
        >>> old = Inventory("r", "r", (Entry("step-00000100", Head("r", 100)), Entry("step-00000200", Head("r", 200))))
        >>> next_head(old, "r", 300).timeline, next_head(old, "r", 110).timeline, next_head(old, "r", 110).forks
        (0, 1, ((0, 100),))
        >>> rewound = next_head(old, "r", 300, descends_from=ParentCheckpoint(0, 100))
        >>> rewound.timeline, rewound.forks, rewound.parent
        (1, ((0, 100),), 'step-00000100')
    """
    newest, heads = current_head(inventory), heads_of(inventory)
    hidden = [each for each in inventory.entries if each.may_come_back]
    least = max((_after(each, now_ms) for each in hidden), default=0)
    known = {of for head in heads for of in (head.timeline, *dict(head.forks))}
    if descends_from == BEGINNING:
        return Head(run_id, step, max(0, least, *(of + 1 for of in known)))
    origin = _by_steps(inventory, newest, step) if descends_from is None else descends_from
    if origin is None:
        return Head(run_id, step, max(least, 0 if newest is None else newest.timeline + 1))
    earlier = origin.forks or next((head.forks for head in heads if head.timeline == origin.timeline), ())
    last = min(origin.step, step - 1)  # the step's own directory is about to hold something else
    left = tuple((of, min(at, last)) for of, at in (*earlier, (origin.timeline, origin.step)) if last >= 0)
    before = [head for head in heads if is_within(head, dict(left))]
    nearest = max(before, key=head_order, default=None)
    parent = None if nearest is None else f"step-{nearest.step:08d}"
    hides = any(_hides(each, origin) for each in hidden)
    is_newest = not hides and (newest is None or head_order(newest) <= (origin.timeline, origin.step))
    if is_newest and origin.step <= step and left[:-1] == earlier:
        return Head(run_id, step, origin.timeline, earlier, parent)
    taken = {origin.timeline, *dict(earlier), *known}
    return Head(run_id, step, max(least if hides else 0, *(of + 1 for of in taken)), left, parent)


def _hides(entry: Entry, origin: ParentCheckpoint) -> bool:
    """Whether a checkpoint whose manifest is not known may be newer than that from which a state comes: it would be taken for what came of it."""
    began_later = entry.committed_at is not None and _after(entry, 0) <= origin.timeline
    return not began_later and directory_of(origin.step) not in entry.before


def _after(entry: Entry, now_ms: int) -> int:
    """The number of a timeline that begins after a manifest was committed which is not known: the time, in milliseconds. By the store's clock, which may not be that of this machine; a store knows seconds."""
    return now_ms if entry.committed_at is None else int(entry.committed_at) * 1000 + 1000


def _by_steps(inventory: Inventory, newest: Head | None, step: int) -> ParentCheckpoint | None:
    """The descent of a state of that step if only steps are known; None for a run that starts from scratch."""
    if newest is not None and newest.step <= step:
        return ParentCheckpoint(newest.timeline, newest.step)
    usable = [entry.head for entry in lineage(inventory) if entry.head is not None and entry.head.step < step]
    before = max(usable, key=head_order, default=None)
    return None if before is None else ParentCheckpoint(before.timeline, before.step)
