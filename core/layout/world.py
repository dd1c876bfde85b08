"""`World` and the `Collectives` protocol: what core needs to know of ranks, which is all that it knows."""

from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final, runtime_checkable

import attrs

from trainfold.core.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@final
@attrs.frozen
class World:
    """How many ranks there are, and which one this is."""

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


@runtime_checkable
class Collectives(Protocol):
    """Communication between ranks. Every rank must make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    def all_sum(self, tensors: "list[torch.Tensor]") -> "list[torch.Tensor]":
        """The sums of equally shaped tensors over the ranks, added in rank order; the same bits on every rank."""

    def broadcast(self, value: T, *, source: int = 0) -> T:
        """The value that rank ``source`` has (a small object: what JSON or attrs can hold)."""

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank (small objects)."""

    def barrier(self, *, timeout_secs: float) -> None:
        """Return when every rank is here; raise `RankFailed` after the deadline."""

    def fail(self, error: BaseException) -> Any:
        """Tell the other ranks that this one will not take part any more."""

    def duplicate(self) -> "Collectives":
        """The same ranks once more: calls to one and to the other do not wait for each other, so threads can have one each.

        Every rank calls this, as it does the others.
        """
