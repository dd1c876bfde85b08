"""`Cause`: why two runs part; `doubts`: the causes that nothing excludes. A cause is certain only where all others are excluded."""

from typing import Final, Literal, TypeAlias

from trainfold.core.flight.causes.evidence import Evidence
from trainfold.core.flight.causes.leaf_kinds import counts_of_updates

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
    "update",
    "environment",
    "arithmetic",
]
"""``position``: other counts of samples or epochs, as after a lost window. ``seed``: the program was seeded otherwise. ``batch``: other data at the same
position. ``component``: one of them saves what the other has not. ``setting``: another setting of the contract, or one that a schedule or the loop
changes, as a learning rate. ``streams``: other random numbers were drawn. ``buffer``: only buffers of modules differ. ``bit``: one element of one
tensor differs. ``state``: the state differs while all that the steps show is the same. ``fault``: one of them did what its program does not do again.
``chance``: a program does not do again what it did. ``unrecorded``: they came apart in steps of which a log has no record. ``update``: the optimizer
took other steps. ``environment``: only results differ, and the numerical environment. ``arithmetic``: only results differ."""

_OPEN: Final[dict[Cause, str]] = {
    "batch": "another batch",
    "position": "another position in the data",
    "seed": "another seed",
    "component": "a component that one of them has not",
    "setting": "another setting, such as a learning rate that the loop or a scheduler changed in one of them alone",
    "streams": "other random numbers",
    "buffer": "a buffer that was updated or restored otherwise",
    "bit": "a fault of the memory or of the processor",
    "update": "an optimizer step that was left out, or taken twice",
    "environment": "another numerical environment, or another version of a library",
    "arithmetic": "another kernel, precision or version of the code, or results that do not repeat",
}
_STREAMS: Final = frozenset({"streams", "order", "generators", "host_streams"})
_SET: Final = frozenset({"settings", "schedule"})
EXCLUSIONS: Final[tuple[tuple[tuple[Cause, ...], frozenset[str], str], ...]] = (
    (("position",), frozenset({"samples"}), "both count the same samples"),
    (("batch",), frozenset({"batch"}), "the batches of each step have the same digests"),
    (("batch",), frozenset({"elsewhere"}), "they are not at the same position, and were before"),
    (("seed",), frozenset({"start", "host_streams"}), "all streams were in the same place in an earlier state"),
    (("seed",), _STREAMS - {"streams"} | {"seed"}, "the seeds are known and the same"),
    (("seed", "streams"), _STREAMS, "all streams are in the same place"),
    (("component",), frozenset({"component"}), "both have saved the same components"),
    (("setting",), _SET | {"forward"}, "settings and rates are the same, and a rate changes no loss before it changes a state"),
    (("setting",), _SET | {"read"}, "settings are the same, and a rate changes nothing that is read"),
    (("setting",), _SET | {"drawn"}, "settings are the same, and a rate moves no stream"),
    (("buffer",), frozenset({"settled", "buffers"}), "the buffers were the same before the step and after it"),
    (("environment",), frozenset({"environment"}), "the environments are known and the same"),
    (("bit",), frozenset({"repeated"}), "the program of each run does again what it did: a fault comes once"),
    (("update",), frozenset({"forward"}), "an update changes no loss before it changes a state"),
    (("update", "bit", "environment", "arithmetic"), frozenset({"one program"}), "one program in one environment does again what both did"),
    (("update", "buffer", "bit", "arithmetic"), frozenset({"read"}), "what a step reads is made before its results, which were the same"),
    (("environment",), frozenset({"read", "versions"}), "what a step reads is made before its results, and by the same libraries"),
    (("update", "buffer", "bit", "arithmetic"), frozenset({"drawn"}), "no result moves a stream"),
)  # fmt: skip
"""Causes, what is known where they are excluded, and why: all that makes a cause certain. A piece of evidence that is missing excludes nothing."""


def doubts(known: Evidence, cause: Cause, parts: frozenset[str]) -> tuple[Cause, ...]:
    """What else it may be that two runs part: each known cause that nothing excludes.

    Args:
        known: what is known of them.
        cause: that was named.
        parts: what differs in the first step that differs, where that decided.

    Examples:
        >>> found = frozenset({"samples", "batch", "seed", "order", "streams", "generators", "host_streams", "component", "environment"})
        >>> doubts(Evidence(alike=found, same_at=4), "arithmetic", frozenset({"loss"}))
        ('setting', 'buffer', 'bit')
    """
    facts = _facts(known, parts)
    excluded = {each for causes, needed, _ in EXCLUSIONS if needed <= facts for each in causes}
    named = "bit" if cause == "fault" else cause
    excluded |= set() if counts_of_updates(known.leaves) else {"update"}  # without counters it is other code
    return () if cause == "nothing" else tuple(each for each in _OPEN if each != named and each not in excluded)


def _facts(known: Evidence, parts: frozenset[str]) -> frozenset[str]:
    """What is known, by the names that the exclusions use."""
    is_repeated = known.repeat_themselves == (True, True)
    found = {
        "order": "batch" in known.alike,
        "settled": known.is_settled,
        "forward": known.is_settled and {"loss", "norm"} & parts,
        "read": known.is_whole and {"samples", "epoch", "batch"} & parts,
        "elsewhere": known.is_whole and {"samples", "epoch"} & parts,
        "drawn": "streams before" in known.alike and "streams" in parts,
        "repeated": is_repeated,
        "one program": is_repeated and known.is_one_program,
    }
    return known.alike | {name for name, holds in found.items() if holds}


def in_words(may_be: tuple[Cause, ...]) -> str:
    """What it may be instead, to end a sentence with.

    Examples:
        >>> in_words(("bit", "arithmetic"))
        '; it may also be a fault of the memory or of the processor, or another kernel, precision or version of the code, or results that do not repeat'
    """
    words = [_OPEN[each] for each in may_be]
    return (
        f"; it may also be {', or '.join([', '.join(words[:-1]), words[-1]] if words[1:] else words)}" if words else ""
    )
