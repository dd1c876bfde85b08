"""`Norm`: the norm of gradients and their clipping, with the bits of ``torch.nn.utils.clip_grad_norm_``.

If all gradients have one dtype and lie on a CPU, these are torch's own kernels without the grouping and wrappers around
them, which would slow a step of two milliseconds. Otherwise it is torch's function.
"""

from collections.abc import Sequence
from typing import final

import torch

_EPSILON = 1e-6  # torch adds it to the norm before it divides
_SURELY_BELOW = 0.99  # below the limit for any rounding of the norm


@final
class Norm:
    """The norm of the gradients of given parameters.

    Args:
        targets: the parameters.

    Examples:
        >>> w = torch.nn.Parameter(torch.zeros(2))
        >>> w.grad = torch.tensor([3.0, 4.0])
        >>> norm = Norm([w])
        >>> norm.of(norm.grads())
        tensor(5.)
        >>> norm.clip(norm.grads(), 1.0, torch.tensor(5.0), 5.0)
        >>> w.grad
        tensor([0.6000, 0.8000])
    """

    def __init__(self, targets: Sequence[torch.nn.Parameter]) -> None:
        self._targets = targets
        self._are_alike = len({target.dtype for target in targets}) == 1 and all(
            target.device.type == "cpu" for target in targets
        )

    def grads(self) -> list[torch.Tensor]:
        """The gradients of the targets that have one."""
        return [target.grad for target in self._targets if target.grad is not None]

    def of(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """The 2-norm of all gradients as one vector; 0 without gradients."""
        if self._are_alike and grads:
            norms: list[torch.Tensor] = list(torch._foreach_norm(grads))  # noqa: SLF001 (torch has no public name for it)
            total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
            return total
        return torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())

    def clip(self, grads: list[torch.Tensor], limit: float, norm: torch.Tensor, known: float) -> None:
        """Scale the gradients so that their norm is at most ``limit``.

        Args:
            grads: the result of `grads`.
            limit: the largest norm.
            norm: the result of `of`.
            known: the value of ``norm``, which the caller has read already; if it is small, torch would multiply by 1.
        """
        if known + _EPSILON < _SURELY_BELOW * limit:
            return
        if self._are_alike:
            torch._foreach_mul_(grads, torch.clamp(limit / (norm + _EPSILON), max=1.0))
        else:
            torch.nn.utils.clip_grads_with_norm_(self._targets, limit, norm)
