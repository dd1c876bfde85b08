"""`Parting`: where and why two runs part, decided from their logs, their checkpoints, and replays of them."""

from typing import Final, final

import attrs

from trainfold.core.flight.causes.doubts import Cause, doubts, in_words
from trainfold.core.flight.causes.evidence import Evidence
from trainfold.core.flight.causes.leaf_kinds import counts_of_updates, follows_results, is_position, is_rng, scheduled
from trainfold.core.markup.texts import steps_text

_WORDS: Final[dict[Cause, str]] = {
    "nothing": "nothing that is known differs",
    "position": "they are elsewhere in the data: one has read, skipped or dropped what the other has not, or counts other samples to a step",
    "seed": "they were seeded otherwise: their random streams began elsewhere",
    "batch": "they read other data at the same position",
    "component": "one of them has a component that the other has not",
    "setting": "they have other settings",
    "streams": "they drew other random numbers{same}: dropout or noise in one of them alone, in another order, by code that torch.compile has made, which draws otherwise, or as many as results ask for",
    "buffer": "only buffers of modules differ: they were updated or restored otherwise, and no loss has shown it yet",
    "bit": "one element of one tensor differs: it was changed from outside, as by a fault of the memory, or by a write beside the steps",
    "state": "their states differ, and nothing else that a step shows: something beside the steps wrote to it, or the update alone has other arithmetic",
    "fault": "the program does again what one of them did, and not what the other did: a fault, or something outside the program",
    "chance": "a program does not do again what it did: its results do not repeat",
    "unrecorded": "they came apart where a log has no record, so that the cause is not known",
    "update": "the optimizer took other steps: one was left out, or taken twice, for all parameters or for some, as by the loop, or by a gradient scaler that found an infinity, or its state was replaced",
    "environment": "only results differ, and so does the numerical environment, or the version of a library",
    "arithmetic": "only results differ: another kernel, precision, such as that of autocast, or version of the code, something that is not recorded, such as a buffer that is not saved, other values at the start or a generator that is not attached, or results that do not repeat",
}
_SAME: Final = ", from the same batch on"
_UNKNOWN: Final = (
    "; that they read the same data is not known, as the logs do not both have a whole digest of each batch"
)
# causes that may be seen where the batch is the cause
_OF_A_BATCH: Final = frozenset({"streams", "update", "environment", "arithmetic"})

_READ: Final = frozenset({"samples", "epoch", "batch", "streams"})
_RESULTS: Final = frozenset({"loss", "norm", "state"})
_SLIGHT_ULPS: Final = 16  # as sums in another order differ


@final
@attrs.frozen
class Parting:
    """Where two runs part, and why.

    Attributes:
        step: the first step that differs; None if none does.
        cause: the one that explains it, if one does.
        names: what it concerns: keys, leaves, components, streams.
        evidence: what was known.
        may_be: the causes that it may be instead, as nothing that is known excludes them. Empty where the cause is certain.

    Examples:
        >>> from trainfold.core.flight.causes.evidence import LeafApart
        >>> found = parting_of(Evidence(apart_at=8, same_at=4, leaves=(LeafApart("model.buffers['n.mean']"),)))
        >>> str(found).partition("; it may also be")[0]
        "part after step 4, at step 8 at the latest: only buffers of modules differ: they were updated or restored otherwise, and no loss has shown it yet: model.buffers['n.mean']"
    """

    step: int | None
    cause: Cause
    names: tuple[str, ...]
    evidence: Evidence
    may_be: tuple[Cause, ...] = ()

    def __str__(self) -> str:
        names = f": {', '.join(self.names[:6])}" if self.names else ""
        is_same = "batch" in self.evidence.alike
        words = _WORDS[self.cause].format(same=_SAME if is_same else "")
        unknown = _UNKNOWN if self.cause in _OF_A_BATCH and "batch" in self.may_be else ""
        return f"{self.where}{words}{names}{unknown}{in_words(self.may_be)}"

    @property
    def where(self) -> str:
        """The step, in words that end with a colon; empty if they do not part."""
        known = self.evidence
        if self.step is None:
            return ""
        if known.difference is not None and self.step == known.difference.step:
            is_read = known.is_whole and known.before & _RESULTS and {*known.difference.parts} & _READ
            late = "" if self.step == 1 or known.is_settled or is_read else " at the latest"
            return f"part in step {self.step}{late}{f' on rank {known.rank}' if known.rank else ''}: "
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
    by_state = evidence.is_by_state
    step = at if difference is None else min(difference.step, at or difference.step)
    parts = frozenset[str]() if by_state or difference is None else frozenset(difference.parts)
    cause, names = _cause(evidence, parts, by_state=by_state)
    return Parting(step, cause, names, evidence, doubts(evidence, cause, parts))


def _cause(known: Evidence, parts: frozenset[str], *, by_state: bool) -> tuple[Cause, tuple[str, ...]]:
    """The first rule that holds, of those that explain others to those that are explained by them."""
    paths, keys = tuple(leaf.path for leaf in known.leaves), tuple(key for key, *_ in known.settings)
    step, components = (None, ()) if known.difference is None else (known.difference.step, known.difference.components)
    drifts = tuple(key for key, *_ in known.environment)
    schedule = () if follows_results(known.leaves) else scheduled(paths)[:1] or tuple(key for key, *_ in known.rates)
    schedule = schedule or (components if by_state and {*components} == {"scheduler"} else ())
    is_counted = known.unrecorded is None or "samples" in known.alike
    moved = () if is_counted else tuple(path for path in paths if is_position(path))
    only_buffers = by_state and bool(paths) and all(".buffers[" in path for path in paths)
    is_first = known.same_at is None and not known.before & _RESULTS
    hole = () if known.unrecorded is None else (steps_text(*known.unrecorded),)
    drawn = not hole and {"streams", "host_streams"} & parts
    host = _host_streams(known)
    one_element = by_state and not hole and not drifts and _is_one_element(known)
    own = known.repeat_themselves
    is_fault = {*own} == {True, False} and not drifts
    chance = own[0] is False and own[1] in (False, None)
    # results come before the update of their step, and a later state may count what they have led to, as a gradient scaler does
    is_after = {"loss", "norm"} & parts and (known.is_settled or known.apart_at != step)
    updates = () if is_after else counts_of_updates(known.leaves)
    rules: tuple[tuple[object, Cause, tuple[str, ...]], ...] = (
        ({"samples", "epoch"} & parts or moved, "position", moved),
        (known.seeds and is_first, "seed", known.seeds or ()),
        ("batch" in parts, "batch", ()),
        (known.absent, "component", known.absent),
        (keys, "setting", keys),
        (drawn, "streams", ()),
        (known.generators and not hole, "seed" if known.same_at is None else "streams", known.generators),
        (schedule, "setting", schedule),
        (known.drew_beside and not hole, "streams", tuple(path for path in paths if is_rng(path))),
        (only_buffers, "buffer", paths),
        (one_element, "bit", paths),
        (host, "seed" if known.draws == "both" else "streams", host),
        (is_fault, "fault", ("the first" if own[1] else "the second",)),
        (chance, "chance", ()),
        (hole, "unrecorded", hole),
        (updates, "update", updates),
        (drifts, "environment", drifts),
        (by_state, "state", paths or components),
    )
    return next(((cause, names) for holds, cause, names in rules if holds), ("arithmetic", paths))


def _is_one_element(known: Evidence) -> bool:
    """Whether one element alone differs, by more than sums in another order do, where the step is known to have begun from one state or to have had one loss."""
    if len(known.leaves) != 1 or not (known.is_settled or "loss" in known.alike):
        return False
    leaf = known.leaves[0]
    return leaf.differing == 1 and (leaf.ulps is None or leaf.ulps > _SLIGHT_ULPS)


def _host_streams(known: Evidence) -> tuple[str, ...]:
    """The streams of python and numpy that were elsewhere from the first step on, and are used, if no results before are the same."""
    if known.draws in (None, "no") or known.unrecorded or known.same_at is not None or known.before & _RESULTS:
        return ()
    return known.host or ("python or numpy",)
