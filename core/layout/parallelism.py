"""`Parallelism`: what a step and an attached loop have to know about ranks that train one model."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, final, runtime_checkable

import attrs

from trainfold.core.layout.world import World

if TYPE_CHECKING:
    import torch


@final
@attrs.frozen
class Coordinates:
    """Where a rank is among the ranks that train one model.

    Attributes:
        world: its index among all of them.
        data: its index among the shares of the data. Ranks that read the same samples, as in tensor parallelism, have the same one.
    """

    world: World
    data: World


@runtime_checkable
class Parallelism(Protocol):
    """How several ranks train one model. Every rank must make the same calls in the same order.

    `trainfold.ranks.Replicas` is the one of a pure step on whole states, and `trainfold.ranks.Sharded` that on parts. `trainfold.attach` finds that of a model that is wrapped in
    ``DistributedDataParallel`` or sharded with ``fully_shard``; pass your own as ``parallelism=``.
    `trainfold.properties.contracts.check_parallelism` checks whether an implementation keeps these promises.
    """

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank is."""

    @property
    def gradient_divisor(self) -> float | None:
        """What a synchronised backward divides the sum over the shares by: their number for a mean, as in DDP and FSDP2.

        None if a backward never communicates: then `all_sum` sums the gradients, once, at the boundary.
        """

    def gradient_sync(self, *, enabled: bool) -> AbstractContextManager[Any]:
        """Set whether a forward and backward inside synchronise gradients. The setting before comes back at the end, also after an error.

        Gradients of backwards that do not synchronise are kept, and are added to those of the next backward that does.
        """

    def all_sum(self, tensors: "list[torch.Tensor]") -> "list[torch.Tensor]":
        """Return new tensors, the sums over the shares of the data of tensors with equal shapes; the same bits on every rank."""

    def norm(self, gradients: "list[torch.Tensor]") -> "torch.Tensor":
        """Return the 2-norm of synchronised gradients as one vector, a tensor without dimensions; the same bits on every rank."""

    def local(self, leaf: "torch.Tensor") -> "torch.Tensor":
        """Return the part of a parameter, gradient or slot that is in this rank's memory: the memory itself, not a copy."""

    def fail(self, error: BaseException) -> Any:
        """Report to the other ranks that this rank has failed and takes part in no further call, if there is a way to report it."""
