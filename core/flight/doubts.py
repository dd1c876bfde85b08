"""`Cause`: why two runs part; `doubts`: the causes that nothing excludes where the cause is not certain."""

from typing import Final, Literal, TypeAlias

from trainfold.core.flight.evidence import Evidence
from trainfold.core.flight.leaf_kinds import is_order, is_stream, scheduled

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
position. ``component``: one of them saves what the other has not. ``setting``: another setting of the contract, or one that a schedule or the loop
changes, as a learning rate. ``streams``: other random numbers were drawn. ``buffer``: only buffers of modules differ. ``bit``: one element of one
tensor differs. ``state``: the state differs while all that the steps show is the same. ``fault``: one of them did what its program does not do again.
``chance``: a program does not do again what it did. ``unrecorded``: they came apart in steps of which a log has no record. ``environment``: only
results differ, and the numerical environment. ``arithmetic``: only results differ."""

_OPEN: Final[dict[Cause, str]] = {
    "position": "another position in the data",
    "seed": "another seed",
    "batch": "another batch",
    "component": "a component that one of them has not",
    "setting": "another setting, such as a learning rate that the loop or a scheduler changed in one of them alone",
    "streams": "other random numbers",
    "buffer": "a buffer that was updated or restored otherwise",
    "bit": "a fault of the memory or of the processor",
    "environment": "another numerical environment",
    "arithmetic": "another kernel, precision or version of the code, or results that do not repeat",
}
_SAME: Final[dict[Cause, Cause]] = {"fault": "bit", "chance": "arithmetic"}  # one cause by two names
_BEGAN: Final[tuple[Cause, ...]] = ("seed", "streams")
_UNSURE: Final = (
    "arithmetic",
    "environment",
    "state",
    "unrecorded",
    "fault",
    "chance",
)  # causes that say only that no other is known


def doubts(known: Evidence, cause: Cause, parts: frozenset[str], *, is_guess: bool = False) -> tuple[Cause, ...]:
    """What else it may be that two runs part, in the order of the rules.

    Args:
        known: what is known of them.
        cause: that was named.
        parts: what differs in the first step that differs, where that decided.
        is_guess: whether the cause is only a likely one.

    Examples:
        >>> shown = frozenset({"samples", "batch", "streams"})
        >>> doubts(Evidence(is_compared=True, shown=shown, is_settled=True, same_at=4), "arithmetic", frozenset({"loss"}))
        ('bit',)
    """
    is_host = known.draws != "no" and (known.host != () or (known.draws is not None and known.same_at is None))
    if is_guess or cause in _UNSURE:
        excluded = _excluded(known, parts, is_host=is_host)
        return tuple(each for each in _OPEN if each != _SAME.get(cause, cause) and not excluded[each])
    is_first = known.same_at is None and not known.before
    if cause in ("batch", "streams") and is_first and not known.generators:
        open_to = {
            "seed": not known.is_compared or any(is_order(leaf.path) for leaf in known.leaves),
            "streams": not known.is_compared
            or "streams" in parts
            or any(is_stream(leaf.path) for leaf in known.leaves),
        }
        return tuple[Cause, ...](each for each in _BEGAN if each != cause and (open_to[each] or is_host))
    if cause == "seed" and known.generators and not known.seeds:
        return ("streams",)
    return ("bit",) if cause == "buffer" and len(known.leaves) == 1 and known.leaves[0].differing == 1 else ()


def _excluded(known: Evidence, parts: frozenset[str], *, is_host: bool) -> dict[Cause, bool]:
    """Whether what is known excludes a cause.

    Args:
        known: what is known.
        parts: what differs in the first step that differs.
        is_host: whether streams of python or numpy, from which the programs draw, may be elsewhere.
    """
    paths = [leaf.path for leaf in known.leaves]
    is_saved = known.apart_at is not None
    has_same_order = known.same_at is not None or (is_saved and not any(map(is_order, paths)))
    has_same_streams = "streams" in known.shown or (is_saved and not any(map(is_stream, paths)))
    return {
        "position": "samples" in known.shown or is_saved,
        "seed": has_same_order and not is_host,
        "batch": "batch" in known.shown,
        "component": known.is_compared,
        "setting": known.is_compared and (known.is_settled or is_saved) and not scheduled(known.leaves),
        "streams": has_same_streams and not is_host,
        "buffer": known.is_settled and bool(parts),
        "bit": known.own == (True, True),
        "environment": known.is_compared and not known.environment,
        "arithmetic": False,
    }


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
