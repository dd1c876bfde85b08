"""`share_of_rank`: which share of the data a rank reads."""

from typing import Protocol

from trainfold.core.errors import InvalidArgument
from trainfold.core.layout.parallelism import Parallelism
from trainfold.core.layout.world import Collectives


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
    try:
        here = run.parallelism.coordinates
    except InvalidArgument:  # nothing says how the ranks train
        return world.rank
    return here.data.rank if here.world.size == world.world_size else world.rank
