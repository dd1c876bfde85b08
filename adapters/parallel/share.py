"""`share_of_rank`: which share of the data a rank reads; `PositionOfShare`: the position of a loader, with its share."""

from typing import Any, Protocol, final

import attrs
import torch

from trainfold.adapters.components.component import ComponentAdapter, Undo
from trainfold.adapters.parallel.torch_parallelism import TorchParallelism
from trainfold.core.errors import DataPositionMismatch, InvalidArgument, TrainfoldError
from trainfold.core.layout.parallelism import Coordinates, Parallelism
from trainfold.core.layout.world import Collectives
from trainfold.core.state.state import Opaque


class HasParallelism(Protocol):
    """What says how the ranks train."""

    @property
    def parallelism(self) -> Parallelism:
        """How the ranks train."""


class ReadsShare(Protocol):
    """A run whose ranks read shares of the data."""

    share: int | None

    @property
    def parallelism(self) -> Parallelism:
        """How the ranks train."""


def share_of_rank(run: ReadsShare, world: Collectives) -> int:
    """The data-parallel coordinate of this rank: of its loader, or of its model; the rank itself if neither says it.

    Ranks that read the same samples, such as those of a tensor-parallel group, have the same one.

    Args:
        run: with a share that its loader knows, or None.
        world: the ranks that load together.
    """
    if run.share is not None:
        return run.share
    here = _coordinates(run)
    return world.rank if here is None or here.world.size != world.world_size else here.data.rank


@final
@attrs.frozen
class PositionOfShare:
    """The adapter of a loader's position that is kept for a share of the data: every rank that reads the share takes it.

    Args:
        part: the adapter of the position.
        ranks: how the ranks train.
    """

    part: ComponentAdapter
    ranks: HasParallelism

    def capture(self) -> Opaque:
        """The position, and the share if it is known."""
        found: Opaque = self.part.capture()
        here = _coordinates(self.ranks)
        if here is None or (here.world.size == 1 and _is_a_guess(self.ranks.parallelism)):
            return found
        return Opaque({**found.value, "share": here.data.rank, "shares": here.data.size})

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every reason why the position cannot be taken, or the epoch not begun."""
        if not self._joins(saved):
            return self.part.problems(saved)
        epoch, now = saved.value.get("epoch"), self.part.capture().value
        if type(epoch) is not int or epoch < 0 or now["epoch"] or now["batches"]:
            return [
                DataPositionMismatch(
                    "state.dataset",
                    expected="a loader from which nothing was read, for a share that joins at the start of an epoch",
                    found=f"epoch {now['epoch']} after {now['batches']} batches, to join in epoch {epoch!r}",
                    fix="restore before the first batch",
                )
            ]
        return []

    def write(self, saved: Any) -> Undo:
        """Take the position; a share that was not saved begins the epoch in which the others are."""
        if not self._joins(saved):
            return self.part.write(saved)
        return self.part.write(Opaque({**self.part.capture().value, "epoch": saved.value["epoch"]}))

    def _joins(self, saved: Any) -> bool:
        """Whether the position is that of another share; the plan gives it only to a share for which none was saved."""
        value = saved.value if isinstance(saved, Opaque) and isinstance(saved.value, dict) else {}
        here = _coordinates(self.ranks) if "share" in value and value.get("kind") == "stateful" else None
        return here is not None and here.data.size > 1 and here.data.rank != value["share"]


def _is_a_guess(ranks: Parallelism) -> bool:
    """Whether one share is only what the modules of one process look like; ranks may be threads of it."""
    is_initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return isinstance(ranks, TorchParallelism) and not is_initialized


def _coordinates(run: HasParallelism) -> Coordinates | None:
    try:
        return run.parallelism.coordinates
    except InvalidArgument:  # nothing says how the ranks train
        return None
