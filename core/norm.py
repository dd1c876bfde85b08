"""The norm of gradients and their clipping, with the bits of ``torch.nn.utils.clip_grad_norm_``.

Where all gradients are of one dtype on one device, these are torch's own kernels without the grouping and the wrappers
around them, which a step of two milliseconds feels. Elsewhere it is torch's function.
"""

import torch

_EPSILON = 1e-6  # torch adds it to the norm before it divides
_SURELY_BELOW = 0.99  # whatever the norm was rounded to
_FOREACH_DEVICES = ("cpu", "cuda")


def total_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients as one vector; 0 where there are none.

    Examples:
        >>> total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
        tensor(5.)
    """
    if _are_alike(grads):
        norms: list[torch.Tensor] = list(torch._foreach_norm(grads))  # noqa: SLF001 (as the foreach optimizers of torch)
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return total
    return torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())


def clip(targets: list[torch.nn.Parameter], clip_norm: float, norm: torch.Tensor, known: float) -> None:
    """Scale the gradients so that their norm is at most ``clip_norm``.

    Args:
        targets: the parameters.
        clip_norm: the largest norm.
        norm: what `total_norm` returned for their gradients.
        known: its value, which somebody has read already; where it is small, torch would multiply by 1.

    Examples:
        >>> w = torch.nn.Parameter(torch.zeros(1))
        >>> w.grad = torch.tensor([4.0])
        >>> clip([w], 1.0, torch.tensor(4.0), 4.0)
        >>> w.grad
        tensor([1.0000])
    """
    if known + _EPSILON < _SURELY_BELOW * clip_norm:
        return
    grads = [target.grad for target in targets if target.grad is not None]
    if _are_alike(grads):
        torch._foreach_mul_(grads, torch.clamp(clip_norm / (norm + _EPSILON), max=1.0))
    else:
        torch.nn.utils.clip_grads_with_norm_(targets, clip_norm, norm)


def _are_alike(grads: list[torch.Tensor]) -> bool:
    kinds = {(grad.dtype, grad.device) for grad in grads}
    return len(kinds) == 1 and grads[0].device.type in _FOREACH_DEVICES and type(grads[0]) is torch.Tensor
