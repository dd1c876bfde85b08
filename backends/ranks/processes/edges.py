"""`connect`: the edges of a rank in a tree, each of them a process group of two."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol, final

import attrs
import torch

from trainfold.backends.ranks.process_group import start_broadcast
from trainfold.core.layout.agreement.rank_tree import TreePlace

_LOWER = 1  # the number of the child in a group of two


class Edge(Protocol):
    """What connects a rank with one other. Both ends do the same in the same order: one sends what the other one receives."""

    def send(self, data: torch.Tensor, timeout_secs: float) -> Any:
        """Start to send bytes; the exchange."""

    def receive(self, data: torch.Tensor, timeout_secs: float) -> Any:
        """Start to overwrite bytes with those of the other end, which sends as many; the exchange."""


@final
@attrs.frozen(eq=False)
class PairEdge:
    """An edge that is a process group of two.

    A broadcast in it is one message. `send` and `recv` of gloo would be too, but cannot be polled, and a wait for them that times out breaks the connection.

    Attributes:
        group: the group.
        index: 0 for the parent, 1 for the child.
    """

    group: Any
    index: int

    def send(self, data: torch.Tensor, timeout_secs: float) -> Any:
        """Start to send bytes."""
        return start_broadcast(self.group, data, self.index, timeout_secs)

    def receive(self, data: torch.Tensor, timeout_secs: float) -> Any:
        """Start to overwrite bytes with those of the other end."""
        return start_broadcast(self.group, data, 1 - self.index, timeout_secs)


@final
@attrs.frozen(eq=False)
class Edges:
    """Those of one rank.

    Attributes:
        up: to its parent; None for rank 0.
        down: to its children, in rank order.
    """

    up: Edge | None
    down: Sequence[Edge]


def connect(dist: Any, store: Any, place: TreePlace, timeout_secs: float) -> Edges:
    """Connect a rank with its neighbours in a tree; each rank calls.

    A rank first connects to its parent, and then its children in order, so no two ranks wait for each other in turn.

    Args:
        dist: torch.distributed.
        store: shared by the ranks, where nothing else uses these names.
        place: of this rank.
        timeout_secs: how long a neighbour is waited for.

    Raises:
        RuntimeError: of gloo, if a neighbour does not come.
    """
    device = (
        dist.ProcessGroupGloo.create_default_device()
    )  # one for all edges, each of which would have a thread and a socket of its own

    def pair(child: int, index: int) -> PairEdge:
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - torch makes its own gloo groups with it
        options._devices, options._threads, options._timeout = [device], 1, timedelta(seconds=timeout_secs)  # noqa: SLF001
        return PairEdge(dist.ProcessGroupGloo(dist.PrefixStore(f"edge/{child}", store), index, 2, options), index)

    up = None if place.parent is None else pair(place.rank, _LOWER)
    return Edges(up, [pair(child.start, 1 - _LOWER) for child in place.children])
