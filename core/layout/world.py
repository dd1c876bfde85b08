"""`World` and the `Collectives` protocol: core knows nothing else about ranks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final, runtime_checkable

import attrs

from trainfold.core.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@final
@attrs.frozen
class World:
    """The number of ranks, and the index of this one."""

    rank: int = 0
    size: int = 1


def make_world(rank: int, size: int) -> World:
    """Return a checked world.

    Raises:
        InvalidArgument: unless ``0 <= rank < size``.

    Examples:
        >>> make_world(1, 4)
        World(rank=1, size=4)
    """
    if not 0 <= rank < size:
        raise InvalidArgument(
            "world", expected="0 <= rank < size", found=f"rank {rank} of {size}", fix="count ranks from 0"
        )
    return World(rank, size)


class PendingRows(Protocol):
    """The numbers of all ranks, on their way; `Collectives.start_gather` returns it."""

    def wait(self) -> list[tuple[int, ...]]:
        """Return the numbers of each rank, in rank order; once.

        Raises:
            RankFailed: if a rank failed, or did not start its own in time.
        """


@runtime_checkable
class HasCome(Protocol):
    """Pending rows that may also know whether all ranks have sent theirs."""

    @property
    def has_come(self) -> bool:
        """Whether `wait` returns, or raises, at once."""


class Bulletin(Protocol):
    """The last whole number that each rank has put up, for ranks that wait for it. No rank waits here, and it costs microseconds."""

    def put(self, number: int) -> None:
        """Put up the number of this rank."""

    def check(self) -> None:
        """Raise `RankFailed` if another rank has reported a failure."""

    def numbers(self) -> list[int]:
        """The number of each rank; -1 where there is none."""


@runtime_checkable
class HasBulletin(Protocol):
    """Collectives that may also have bulletins."""

    def bulletin(self) -> Bulletin | None:
        """A new bulletin, which all ranks ask for in the same order; None if these ranks cannot have one."""


@runtime_checkable
class Exchanges(Protocol):
    """Collectives by which each rank can send every other rank something else."""

    def exchange(
        self,
        parts: Sequence[Sequence[memoryview]],
        sizes: Sequence[int],
        *,
        among: Sequence[int] | None = None,
        doing: str = "",
    ) -> Sequence[bytes | memoryview]:
        """Send bytes to each rank, and return what each rank has sent to this one.

        Args:
            parts: for each rank, the bytes that it gets, in one part or several; none for this rank itself.
            sizes: for each rank, how many bytes come from it, which both know beforehand.
            among: the ranks of which ``parts`` and ``sizes`` are, this one among them; None for all. All ranks call, each of them in a group, and the ranks of a group name
                the same ones in the same order.
            doing: see `Collectives`.
        """


@runtime_checkable
class Collectives(Protocol):
    """Communication between ranks. Every rank must make the same calls in the same order.

    ``doing`` is what each rank does before it comes to a call, such as ``"write its files"``: the same on every rank, for the error that says
    which rank did not come. No rank waits for ever for another. A call for which no rank has to read or write much is a vote
    (``is_vote``), which has a shorter deadline.
    """

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    def all_sum(self, tensors: "list[torch.Tensor]") -> "list[torch.Tensor]":
        """Return the sums over the ranks of tensors of equal shapes, added in rank order; every rank gets the same bits."""

    def broadcast(self, value: T, *, source: int = 0, doing: str = "", is_vote: bool = False) -> T:
        """Return the value of rank ``source``: a small object, such as a JSON value or a class of attrs."""

    def gather(self, value: T, *, doing: str = "", is_vote: bool = False) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank; small objects."""

    def start_gather(self, numbers: Sequence[int], *, doing: str = "") -> PendingRows:
        """Start to gather a few whole numbers below 2**63, as many on every rank; return at once, also if a rank has failed.

        It counts as a call where it is started. Other calls may be made before the numbers are waited for.
        """

    def barrier(self, *, timeout_secs: float) -> None:
        """Return once every rank has called this; raise `RankFailed` after the deadline."""

    def fail(self, error: BaseException) -> Any:
        """Report to the other ranks that this rank has failed and will not take part in any further call."""

    def duplicate(self) -> "Collectives":
        """Return independent collectives over the same ranks, for another thread: neither object's calls wait for the other's.

        Every rank must call this, like the other methods.
        """
