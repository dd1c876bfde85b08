"""`Call`: a collective call as a value, and `Deadline`: how long it may take."""

import time
from collections.abc import Iterable
from typing import Final, final

import attrs

from trainfold.core.errors import InvalidArgument, RanksDisagree

_LEAST_SECS: Final = 1e-3


@final
@attrs.frozen
class Call:
    """One collective call of a rank. All ranks must make equal calls in the same order.

    Attributes:
        kind: the method.
        detail: what must be equal on all ranks: the source, or the dtypes and shapes.
        doing: what each rank does before it comes to the call; empty if the caller did not say it.
    """

    kind: str
    detail: str = ""
    doing: str = ""

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(part for part in (self.detail, self.doing) if part)})"

    def late(self, secs: float) -> str:
        """What a rank has not done that did not come in time.

        Examples:
            >>> Call("gather", doing="write its files").late(600.0), Call("barrier").late(5.0)
            ('it did not write its files within 600 s', 'not all ranks came to barrier() in time, which is 5 s')
        """
        if self.doing:
            return f"it did not {self.doing} within {secs:g} s"
        return f"not all ranks came to {self} in time, which is {secs:g} s"


@final
class Deadline:
    """How long a call may take, and when that time is over."""

    def __init__(self, secs: float) -> None:
        self.secs = secs
        self.at = time.monotonic() + secs

    def left(self) -> float:
        """The seconds until then; never 0, which gloo takes for no deadline."""
        return max(self.at - time.monotonic(), _LEAST_SECS)


def check_broadcast(source: int, world_size: int) -> None:
    """Check the source of a broadcast.

    Raises:
        InvalidArgument: unless it is a rank of the world.

    Examples:
        >>> check_broadcast(1, world_size=2)
    """
    if not 0 <= source < world_size:
        raise InvalidArgument("source", expected=f"a rank below {world_size}", found=source, fix="count ranks from 0")


def parted(calls: Iterable[str]) -> RanksDisagree:
    """The error of ranks that do not do the same next.

    Args:
        calls: what each one does, such as ``"rank 1 has returned"``.

    Examples:
        >>> print(parted(["rank 0 calls gather(begin a checkpoint)", "rank 1 has returned"]))  # doctest: +ELLIPSIS
        what the ranks do next: expected the same on every rank, found rank 0 calls gather(begin a checkpoint); rank 1 has returned; ...
    """
    return RanksDisagree(
        "what the ranks do next",
        expected="the same on every rank",
        found="; ".join(calls),
        fix="save, load, evaluate and finish on every rank in one order; let no condition around these calls depend on what only one rank knows",
    )
