"""What is made of sources: `Cast` rounds, `Frozen` is for the frozen parameters alone, and `ByScript` leaves all to the script."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, final

import attrs

from trainfold.core.weights.source import Wanted, WeightSource

if TYPE_CHECKING:
    import torch


@final
@attrs.frozen
class Cast:
    """A source whose floating tensors are rounded to the dtype of the model. Without it another dtype is refused.

    Attributes:
        source: of which dtype it may be.

    Examples:
        >>> import torch
        >>> class Half:
        ...     def supply(self, wanted):
        ...         yield "w", torch.ones(1, dtype=torch.float16)
        >>> dict(Cast(Half()).supply({"w": Wanted("float32", (1,), ((0, 1),))}))
        {'w': tensor([1.])}
    """

    source: WeightSource

    def supply(self, wanted: Mapping[str, Wanted]) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield what the source has, with the dtypes of the model."""
        from trainfold.core.format.codec import torch_dtype

        floating = {name for name, each in wanted.items() if torch_dtype(each.dtype).is_floating_point}
        asked = {name: attrs.evolve(each, dtype="") if name in floating else each for name, each in wanted.items()}
        for name, tensor in self.source.supply(asked):
            is_other = name in floating and tensor.is_floating_point()
            yield name, tensor.to(torch_dtype(wanted[name].dtype)) if is_other else tensor


@final
@attrs.frozen
class Frozen:
    """A source for the frozen parameters alone: those without ``requires_grad`` when the run is attached, such as the base of a LoRA model.

    The other parameters and all buffers are in the checkpoints, as ever. A checkpoint has the fingerprint of the frozen ones, and a resume with
    others is refused, wherever they come from.

    Attributes:
        source: of the frozen parameters.
    """

    source: WeightSource

    def supply(self, wanted: Mapping[str, Wanted]) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield what the source has of these."""
        return self.source.supply(wanted)


@final
@attrs.frozen
class ByScript:
    """The script has loaded these weights itself before it attached the model, and does so at each start. Nothing is supplied or checked."""

    def supply(self, wanted: Mapping[str, Wanted]) -> "Iterator[tuple[str, torch.Tensor]]":  # noqa: ARG002 - of the protocol
        """Yield nothing."""
        return iter(())
