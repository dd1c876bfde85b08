"""The names that components may have. Imports no torch: commands that read a run need it."""

from collections.abc import Collection
from typing import Final

from trainfold.core.errors import InvalidArgument

BUILTIN_COMPONENTS = ("model", "optimizer", "scheduler", "trainer", "dataset", "rng")
_TOGETHER: Final = (  # a component, one that it needs, and why
    ("scheduler", "optimizer", "the learning rate that a scheduler has set is in the optimizer's param groups"),
    ("optimizer", "scheduler", "the learning rate in its param groups belongs to the step that the scheduler counts"),
    ("dataset", "trainer", "a position belongs to a run that continues with its counters"),
)


def is_extra_name(name: object) -> bool:
    """Whether a user's own component may have this name.

    Examples:
        >>> is_extra_name("ema"), is_extra_name("model"), is_extra_name("a-b")
        (True, False, False)
    """
    return isinstance(name, str) and name.isidentifier() and name not in {*BUILTIN_COMPONENTS, "extra", "manifest"}


def torn_pairs(
    names: Collection[str] | None, *, present: Collection[str], where: str = "components"
) -> tuple[InvalidArgument, ...]:
    """What a selection tears apart: of two components that mean something only together, it has one.

    Args:
        names: the selection; None for all.
        present: the components that there are. One that is not there cannot be missed.
        where: the argument, for the message.

    Examples:
        >>> [error.fix for error in torn_pairs(["dataset"], present=["trainer", "dataset"])]
        ['select trainer too, or leave dataset out: a position belongs to a run that continues with its counters']
        >>> torn_pairs(["optimizer"], present=["model", "optimizer"])
        ()
    """
    return tuple(
        InvalidArgument(
            where,
            expected=f"{needed} with {name}",
            found=sorted(names),
            fix=f"select {needed} too, or leave {name} out: {reason}",
        )
        for name, needed, reason in _TOGETHER
        if names is not None and name in names and needed in present and needed not in names
    )
