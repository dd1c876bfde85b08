"""`Replicas`: the parallelism of a model that every rank has whole, and whose backward does not communicate."""

from contextlib import AbstractContextManager, nullcontext
from typing import final

import attrs
import torch

from trainfold.core.layout.parallelism import Coordinates
from trainfold.core.layout.world import Collectives, World


@final
@attrs.frozen(eq=False)
class Replicas:
    """Every rank has the whole model and its own share of the data. Gradients are summed once a step, at its boundary.

    Args:
        collectives: the ranks.

    Examples:
        >>> from trainfold.ranks import SingleProcess
        >>> alone = Replicas(SingleProcess())
        >>> alone.coordinates.data, alone.norm([torch.tensor([3.0, 4.0])])
        (World(rank=0, size=1), tensor(5.))
    """

    collectives: Collectives

    @property
    def coordinates(self) -> Coordinates:
        """Each rank has a share of the data."""
        here = World(self.collectives.rank, self.collectives.world_size)
        return Coordinates(here, here)

    @property
    def gradient_divisor(self) -> None:
        """None: a backward does not communicate."""
        return

    def gradient_sync(self, *, enabled: bool) -> AbstractContextManager[None]:  # noqa: ARG002 (of the protocol)
        """Do nothing."""
        return nullcontext()

    def all_sum(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The sums over the ranks, added in rank order."""
        return self.collectives.all_sum(tensors)

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The norm that each rank computes alone, with the bits of ``torch.nn.utils.get_total_norm``."""
        return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())

    def local(self, leaf: torch.Tensor) -> torch.Tensor:
        """The leaf itself."""
        return leaf

    def fail(self, error: BaseException) -> None:
        """Make every other rank raise `RankFailed`."""
        self.collectives.fail(error)
