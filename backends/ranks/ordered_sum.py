"""The arithmetic of a sum over ranks: each rank adds up one part of all tensors, in rank order, and sends its sums to the others.

It takes two exchanges, with as many bytes as a ring all-reduce. Only one rank adds each element, in rank order, so every rank gets the same
bits, whatever its processor does with the last bit or with a NaN. (A ring adds each part in an order that starts at another rank, so that its
sums of floats differ from those in rank order.)

Source: reduce-scatter and all-gather, R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005), with the parts exchanged directly, so that the order can be chosen.
"""

from collections.abc import Iterator, Sequence
from typing import final

import attrs
import torch

_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}  # torch can add these, with the same bits


@final
@attrs.frozen
class SumPlan:
    """How a list of tensors is cut into one part for each rank. It depends on dtypes and shapes only, so it is the same on every rank.

    Attributes:
        world_size: the number of parts.
        shapes: the shapes of the tensors.
        blocks: dtype -> indices of the tensors of that dtype, in order.
        widths: dtype -> how many elements of that dtype one part has.
    """

    world_size: int
    shapes: tuple[tuple[int, ...], ...]
    blocks: dict[torch.dtype, list[int]]
    widths: dict[torch.dtype, int]

    @property
    def part_bytes(self) -> int:
        """The size of one part."""
        return sum(width * dtype.itemsize for dtype, width in self.widths.items())

    def cut(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The bytes for each rank: uint8[world_size, part_bytes], on the CPU."""
        columns = []
        for dtype, indices in self.blocks.items():
            flat = torch.empty(self.world_size * self.widths[dtype], dtype=dtype)
            start = 0
            for index in indices:
                given = tensors[index].detach().reshape(-1)
                flat[start : start + given.numel()].copy_(given)
                start += given.numel()
            flat[start:].zero_()
            columns.append(flat.view(torch.uint8).reshape(self.world_size, -1))
        if not columns:
            return torch.empty(self.world_size, 0, dtype=torch.uint8)
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)

    def add(self, parts: torch.Tensor) -> torch.Tensor:
        """The sum of one part over the ranks: uint8[world_size, part_bytes] -> uint8[part_bytes]."""
        sums = []
        for _, each in self._columns(parts):
            sums.append(added(each).view(torch.uint8))
        return torch.cat(sums) if sums else parts[0]

    def join(self, sums: torch.Tensor) -> list[torch.Tensor]:
        """The sums as tensors, from all summed parts: uint8[world_size, part_bytes]."""
        results: dict[int, torch.Tensor] = {}
        for dtype, columns in self._columns(sums):
            flat = columns.reshape(-1)
            start = 0
            for index in self.blocks[dtype]:
                shape = torch.Size(self.shapes[index])
                total = flat[start : start + shape.numel()].reshape(shape)
                results[index] = total if len(self.shapes) == 1 else total.clone()
                start += shape.numel()
        return [results[index] for index in range(len(self.shapes))]

    def _columns(self, rows: torch.Tensor) -> Iterator[tuple[torch.dtype, torch.Tensor]]:
        start = 0
        for dtype, width in self.widths.items():
            stop = start + width * dtype.itemsize
            # aligned; a slice is not
            flat = rows[:, start:stop].clone(memory_format=torch.contiguous_format).reshape(-1)
            yield dtype, flat.view(dtype).reshape(len(rows), width)
            start = stop


def added(terms: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """The sum of equally shaped tensors of one dtype, in their order, as a new tensor.

    Unsigned integers wrap around as signed integers do.

    Examples:
        >>> added([torch.tensor([65535], dtype=torch.uint16), torch.tensor([2], dtype=torch.uint16)])
        tensor([1], dtype=torch.uint16)
    """
    dtype = terms[0].dtype
    total = terms[0].detach().clone().view(_SIGNED.get(dtype, dtype))
    for each in terms[1:]:
        total += each.detach().view(total.dtype)
    return total.view(dtype)


def sum_plan(tensors: list[torch.Tensor], world_size: int) -> SumPlan:
    """Plan the sum of tensors over the ranks.

    Law: cut on every rank, exchanged, added, exchanged again and joined, the result is bitwise ``((t0 + t1) + t2) + ...``.

    Args:
        tensors: of any shapes and dtypes, which must be the same on every rank.
        world_size: the number of ranks.

    Examples:
        >>> plan = sum_plan([torch.ones(3), torch.tensor(7)], world_size=2)
        >>> rows = [plan.cut([torch.ones(3) * rank, torch.tensor(7)]) for rank in (1, 2)]  # on two ranks
        >>> sums = [plan.add(torch.stack([row[part] for row in rows])) for part in (0, 1)]
        >>> plan.join(torch.stack(sums))
        [tensor([3., 3., 3.]), tensor(14)]
    """
    blocks: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        blocks.setdefault(tensor.dtype, []).append(index)
    widths = {
        dtype: -(-sum(tensors[index].numel() for index in indices) // world_size) for dtype, indices in blocks.items()
    }
    return SumPlan(world_size, tuple(tuple(tensor.shape) for tensor in tensors), blocks, widths)
