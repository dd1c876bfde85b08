"""`Parting`: where and why two runs part, decided from their logs, their checkpoints, and replays of them."""

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, final

import attrs

from trainfold.core.flight.step_difference import StepDifference

Cause: TypeAlias = Literal[
    "nothing",
    "position",
    "seed",
    "batch",
    "component",
    "setting",
    "streams",
    "buffer",
    "bit",
    "state",
    "fault",
    "chance",
    "unrecorded",
    "environment",
    "arithmetic",
]
"""``position``: other counts of samples or epochs, as after a lost window. ``seed``: the program was seeded otherwise. ``batch``: other data at the same
position. ``component``: one of them saves what the other has not. ``setting``: another setting of the contract. ``streams``: other random numbers were
drawn. ``buffer``: only buffers of modules differ. ``bit``: one element of one tensor differs. ``state``: the state differs while all that the steps
show is the same. ``fault``: one of them did what its program does not do again. ``chance``: neither did what its program does again. ``unrecorded``: they came
apart in steps of which a log has no record. ``environment``: only results differ, and the numerical environment.
``arithmetic``: only results differ."""

_WORDS: Final = {
    "nothing": "nothing that is known differs",
    "position": "they are elsewhere in the data: one has read, skipped or dropped what the other has not",
    "seed": "they were seeded otherwise: their random streams began elsewhere",
    "batch": "they read other data at the same position",
    "component": "one of them has a component that the other has not",
    "setting": "they have other settings",
    "streams": "they drew other random numbers in this step, from the same batch on: dropout or noise in one of them alone, or in another order",
    "buffer": "only buffers of modules differ: they were updated or restored otherwise, and no loss has shown it yet",
    "bit": "one element of one tensor differs, and nothing that a step shows: it was changed from outside, as by a fault of the memory",
    "state": "their states differ, and nothing else that a step shows: something beside the steps wrote to it, or the update alone has other arithmetic",
    "fault": "the program does again what one of them did, and not what the other did: a fault, or something outside the program",
    "chance": "neither program does again what it did: its results do not repeat",
    "unrecorded": "they came apart where a log has no record, so that the cause is not known",
    "environment": "only the arithmetic differs, and so does the numerical environment",
    "arithmetic": "only the arithmetic differs: another kernel, another version of the code, or results that do not repeat",
}


@final
@attrs.frozen
class LeafApart:
    """One leaf of two states that differs.

    Attributes:
        path: of the leaf.
        text: by how much, in words.
        differing: how many elements differ; None where that is not known.
        size: the largest difference of values; None where it is not known.
    """

    path: str
    text: str = ""
    differing: int | None = None
    size: float | None = None


@final
@attrs.frozen
class Evidence:
    """What is known of two runs.

    Attributes:
        difference: the first step in which their logs differ; None if none does, or one of them has no log.
        rank: whose logs differ there; 0 without such a difference.
        same_at: the latest step at which both have a checkpoint, and the same state; None if there is none.
        apart_at: the first one after it at which they have different states; None if there is none.
        leaves: those that differ there.
        absent: components that only one of them has there.
        settings: keys of their contracts that differ: (key, of the first, of the second).
        environment: those of the numerical environment, in the same form.
        seeds: the seeds of their streams, if they differ.
        unrecorded: the first and the last step just before the difference, and after the last state that is the same, of which a log has no record;
            None without any.
        repeats: whether the program of the first did again what the first, and the second, did; None where that was not tried.
        own: whether the program of each did again what that run did; None where that was not tried.
    """

    difference: StepDifference | None = None
    rank: int = 0
    same_at: int | None = None
    apart_at: int | None = None
    leaves: tuple[LeafApart, ...] = ()
    absent: tuple[str, ...] = ()
    settings: tuple[tuple[str, str, str], ...] = ()
    environment: tuple[tuple[str, str, str], ...] = ()
    seeds: tuple[str, str] | None = None
    unrecorded: tuple[int, int] | None = None
    repeats: tuple[bool | None, bool | None] = (None, None)
    own: tuple[bool | None, bool | None] = (None, None)


@final
@attrs.frozen
class Parting:
    """Where two runs part, and why.

    Attributes:
        step: the first step that differs; None if none does.
        cause: the one that explains it, if one does.
        names: what it concerns: keys, leaves, components.
        evidence: what was known.

    Examples:
        >>> print(parting_of(Evidence(apart_at=8, same_at=4, leaves=(LeafApart("model.buffers['n.mean']"),))))
        part after step 4, at step 8 at the latest: only buffers of modules differ: they were updated or restored otherwise, and no loss has shown it yet: model.buffers['n.mean']
    """

    step: int | None
    cause: Cause
    names: tuple[str, ...]
    evidence: Evidence

    def __str__(self) -> str:
        names = f": {', '.join(self.names[:6])}" if self.names else ""
        return f"{self.where}{_WORDS[self.cause]}{names}"

    @property
    def where(self) -> str:
        """The step, in words that end with a colon; empty if they do not part."""
        known = self.evidence
        if self.step is None:
            return ""
        if known.difference is not None and self.step == known.difference.step:
            return f"part in step {self.step}{f' on rank {known.rank}' if known.rank else ''}: "
        since = "" if known.same_at is None else f"after step {known.same_at}, "
        return f"part {since}at step {self.step} at the latest: "


def parting_of(evidence: Evidence) -> Parting:
    """Where and why two runs part: what comes first, and of that the cause that explains the others.

    Examples:
        >>> parting_of(Evidence()).cause
        'nothing'
    """
    difference = evidence.difference
    at = evidence.apart_at
    if difference is None and at is None:
        return Parting(None, "nothing", (), evidence)
    by_state = difference is None or (at is not None and at < difference.step) or _is_write(difference)
    step = at if difference is None else min(difference.step, at or difference.step)
    parts: Sequence[str] = () if by_state or difference is None else difference.parts
    cause, names = _cause(evidence, parts, by_state=by_state)
    return Parting(step, cause, names, evidence)


def steps_text(first: int, last: int) -> str:
    """Some steps, in words.

    Examples:
        >>> steps_text(16, 20), steps_text(4, 4)
        ('steps 16 to 20', 'step 4')
    """
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _is_write(difference: StepDifference) -> bool:
    """Whether only the state after a step differs, and not in both model and optimizer, as after another gradient."""
    return difference.parts == ("state",) and not {"model", "optimizer"} <= {*difference.components}


def _cause(known: Evidence, parts: Sequence[str], *, by_state: bool) -> tuple[Cause, tuple[str, ...]]:
    """The first rule that holds, of those that explain others to those that are explained by them."""
    paths, keys = tuple(leaf.path for leaf in known.leaves), tuple(key for key, *_ in known.settings)
    components = () if known.difference is None else known.difference.components
    drifts = tuple(key for key, *_ in known.environment)
    only_buffers = by_state and bool(paths) and all(".buffers[" in path for path in paths)
    one_element = by_state and len(paths) == 1 and known.leaves[0].differing == 1
    hole = () if known.unrecorded is None else (steps_text(*known.unrecorded),)
    tried = (
        known.repeats if None in known.own else known.own
    )  # what the other program does not do again may be the work of its own
    rules: tuple[tuple[object, Cause, tuple[str, ...]], ...] = (
        ({"samples", "epoch"} & {*parts}, "position", ()),
        (known.seeds, "seed", known.seeds or ()),
        ("batch" in parts, "batch", ()),
        (known.absent, "component", known.absent),
        (keys, "setting", keys),
        (not hole and {"streams", "host_streams"} & {*parts}, "streams", ()),
        (only_buffers, "buffer", paths),
        (one_element, "bit", paths),
        ({*tried} == {True, False}, "fault", ("the first" if tried[1] else "the second",)),
        (known.own == (False, False), "chance", ()),
        (hole, "unrecorded", hole),
        (drifts, "environment", drifts),
        (by_state, "state", paths or components),
    )
    return next(((cause, names) for holds, cause, names in rules if holds), ("arithmetic", paths))
