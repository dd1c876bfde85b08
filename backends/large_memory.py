"""`copy_into` and `fill_bytes`: write large memory of the CPU in pieces, each by the thread that is free next."""

from functools import partial
from typing import Any, Final

import numpy as np
import torch

from trainfold.backends.side_by_side import at_once
from trainfold.core.tensor_memory import byte_array

_PIECE_BYTES: Final = 2 << 20  # so that threads end at about the same time
_FROM_BYTES: Final = 4 << 20  # below this, torch is as fast
_THREADS: Final = 4  # two of them have the bandwidth of a small machine
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


def copy_into(memory: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into the memory of a tensor, as ``memory.copy_(value)`` does without gradients.

    torch cuts a copy into one part a core, and waits for all of them: where another process has one of the cores, that takes several times as long.

    Args:
        memory: it is overwritten.
        value: of a shape and a dtype that ``copy_`` takes.

    Raises:
        RuntimeError: as ``copy_`` does.

    Examples:
        >>> weight = torch.zeros(2)
        >>> copy_into(weight, torch.ones(2))
        >>> weight
        tensor([1., 1.])
    """
    with torch.no_grad():
        if not _is_one_block(memory, value):
            memory.copy_(value)
            return
        target, source = byte_array(memory.detach()), byte_array(value.detach())
        starts = range(0, len(target), _PIECE_BYTES)
        at_once(
            [partial(np.copyto, target[start : start + _PIECE_BYTES], source[start : start + _PIECE_BYTES]) for start in starts],
            threads=_threads(),
        )  # fmt: skip
        torch.autograd.graph.increment_version([memory])  # other writes are torch's own


def fill_bytes(memory: torch.UntypedStorage, byte: int) -> None:
    """Set each byte of new memory, which gets its pages by that.

    Examples:
        >>> weight = torch.ones(2)
        >>> fill_bytes(weight.untyped_storage(), 0)
        >>> weight
        tensor([0., 0.])
    """
    whole = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
    if not whole.is_cpu or whole.nbytes < _FROM_BYTES:
        whole.fill_(byte)
        return
    target = byte_array(whole)
    starts = range(0, len(target), _PIECE_BYTES)
    at_once([partial(target[start : start + _PIECE_BYTES].fill, byte) for start in starts], threads=_threads())


def _threads() -> int:
    return min(_THREADS, torch.get_num_threads())


def _is_one_block(memory: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a copy moves the bytes of one block of memory to another as they are."""
    both: tuple[Any, Any] = (memory, value)
    return (
        all(type(each) in _PLAIN and each.layout is torch.strided and each.is_cpu and each.is_contiguous() for each in both)
        and memory.nbytes >= _FROM_BYTES
        and (memory.dtype, memory.shape) == (value.dtype, value.shape)
        and memory.dtype is not torch.bool  # torch makes each byte a 0 or a 1
        and not any(each.is_conj() or each.is_neg() or each.is_inference() for each in both)
        and memory.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
    )  # fmt: skip
