"""Limbs: an integer of 2,176 bits as int64 tensors with 32 bits in each, which add up like vectors until carries are due.

Limb i counts multiples of 2**(32 * i - 1074): 2**-1074 is the smallest float64, of which every float is a multiple.

Source: the accumulator of Kulisch, "Computer Arithmetic and Validity" (2008).
"""

import numpy as np
import torch

from trainfold.core.errors import InvalidArgument

UNIT = 1074
LIMB_BITS = 32
LIMBS = 68  # the 2,098 bits of float64, a sign, and 77 more: 2**77 terms of the largest
MASK = (1 << LIMB_BITS) - 1
_BYTES = LIMBS * LIMB_BITS // 8
_SIGN = np.int64(-(1 << 63))
_SHIFT = sum(1 << (63 + LIMB_BITS * place) for place in range(LIMBS))
_LIMIT = 1 << (8 * _BYTES - 1)


def carried(limbs: torch.Tensor) -> torch.Tensor:
    """Limbs of the same sum, after one carry: each but the last passes the bits above its lowest 32 to the next.

    The result lies within 2**31 of a limb without a carry, so there is room for 2**28 more terms. The call does not wait for a
    device.

    Args:
        limbs: int64[..., LIMBS].

    Examples:
        >>> carried(torch.tensor([[2**33 + 5, 1, 7]]))
        tensor([[5, 3, 7]])
    """
    carry = limbs[..., :-1] >> LIMB_BITS
    rest = torch.cat([limbs[..., :-1] & MASK, limbs[..., -1:]], -1)
    rest[..., 1:] += carry
    return rest


def settled(limbs: torch.Tensor) -> torch.Tensor:
    """Limbs on the CPU with all carries done."""
    if limbs.dim() == 1:
        return limbs_of(units_of(limbs))
    while bool((limbs[..., :-1] >> LIMB_BITS).any()):
        limbs = carried(limbs)
    return limbs


def units_of(limbs: torch.Tensor) -> int:
    """The integer that limbs represent, carried or not."""
    shifted = limbs.numpy() ^ _SIGN  # adds 2**63 to each limb, so that no limb is negative
    even, odd = (int.from_bytes(shifted[first::2].tobytes(), "little") for first in (0, 1))
    return even + (odd << LIMB_BITS) - _SHIFT


def limbs_of(units: int) -> torch.Tensor:
    """An integer as limbs with all carries done."""
    if not -_LIMIT <= units < _LIMIT:
        raise InvalidArgument(
            "exact sum",
            expected=f"less than 2**{8 * _BYTES - 1 - UNIT}",
            found="more",
            fix="pass fewer terms: no float is this large",
        )
    words = np.frombuffer(units.to_bytes(_BYTES, "little", signed=True), dtype="<u4").astype(np.int64)
    if units < 0:
        words[-1] -= MASK + 1
    return torch.from_numpy(words)
