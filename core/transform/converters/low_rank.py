"""`LowRank` and `Decomposed`: what a weight and its adapter make together, as expressions whose parts have the bits of the whole."""

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final, final

import attrs

from trainfold.core.layout.slices import Box, volume
from trainfold.core.transform.expression import Expression, LikeTensor, Read, SourceTensor, sources_of
from trainfold.core.transform.rounding import check_in_range

if TYPE_CHECKING:
    import torch

_ROWS: Final = 128  # of a tile: all products have one shape, and threads of torch meet seldom
_COLUMNS: Final = 1024


@final
@attrs.frozen
class LowRank(LikeTensor):
    """A matrix plus the scaled product of two thin ones, rounded once.

    The product is made in tiles of one size, at places that the whole matrix gives them, with zeros where a part has nothing. So each element comes out of the same
    computation in every part: a product of another shape would sum in another order. It is in float64, so that no setting of the process makes it less exact.

    Attributes:
        of: the matrix.
        a: of shape (rank, inputs).
        b: of shape (outputs, rank).
        scale: of the product.
        is_transposed: whether the matrix has its inputs first.
    """

    a: Expression
    b: Expression
    scale: float
    is_transposed: bool

    def reads(self, box: Box) -> Iterator[tuple[SourceTensor, Box]]:
        """See `Expression`."""
        yield from self.of.reads(box)
        for part, inner in self._thin(box):
            yield from part.reads(inner)

    def computed(self, box: Box, read: Read) -> "torch.Tensor":
        """See `Expression`."""
        if not volume(box):
            return self.of.computed(box, read)
        import torch

        from trainfold.core.format.codec import torch_dtype

        base, tiles = self.tiles(box, read)
        found = torch.empty(base.shape, dtype=torch_dtype(self.dtype), device=base.device)
        by_row = found.T if self.is_transposed else found
        for start, left, part in tiles:
            rounded = by_row[start : start + part.shape[0], left : left + part.shape[1]].copy_(part)
            check_in_range(rounded, part, lambda: sources_of(self.of, box))
        return found

    def tiles(self, box: Box, read: Read) -> "tuple[torch.Tensor, Iterator[tuple[int, int, torch.Tensor]]]":
        """The matrix itself, and a part before it is rounded, in float64: what is in each tile, until the next one, with its first row and column; the tiles of some rows, then of the next.

        A row is what leads to one output.
        """
        import torch

        base = self.of.computed(box, read)
        b, a = (part.computed(inner, read) for part, inner in self._thin(box))
        (first_row, _), (first_column, _) = reversed(box) if self.is_transposed else box
        sides = [
            (start, stop, at, _padded(a[:, start:stop].T, at, _COLUMNS).T)
            for start, stop, at in _tiles(first_column, a.shape[1], _COLUMNS)
        ]

        def each() -> "Iterator[tuple[int, int, torch.Tensor]]":
            by_row = base.T if self.is_transposed else base
            product = torch.empty(_ROWS, _COLUMNS, dtype=torch.float64, device=base.device)
            for start, stop, at in _tiles(first_row, b.shape[0], _ROWS):
                thin = _padded(b[start:stop], at, _ROWS)
                for left, right, inside, side in sides:
                    torch.mm(thin, side, out=product)
                    part = product[at : at + stop - start, inside : inside + right - left]
                    part *= self.scale
                    part += by_row[start:stop, left:right]
                    yield start, left, part

        return base, each()

    def _thin(self, box: Box) -> Iterator[tuple[Expression, Box]]:
        outputs, inputs = reversed(box) if self.is_transposed else box
        rank = (0, self.a.shape[0])
        yield self.b, (outputs, rank)
        yield self.a, (rank, inputs)


@final
@attrs.frozen
class Decomposed(LikeTensor):
    """A matrix with an adapter, of which each row has a length of its own, as DoRA trains it. A row is what leads to one output.

    Lengths are of whole rows, whatever part is computed, and squares are added in one order.

    Attributes:
        of: the matrix with its adapter.
        magnitude: the length of each row.
    """

    of: LowRank
    magnitude: Expression

    def reads(self, box: Box) -> Iterator[tuple[SourceTensor, Box]]:
        """See `Expression`."""
        rows, _, whole = self._rows(box)
        yield from self.of.reads(whole)
        yield from self.magnitude.reads((rows,))

    def computed(self, box: Box, read: Read) -> "torch.Tensor":
        """See `Expression`."""
        import torch

        from trainfold.core.format.codec import torch_dtype

        if not volume(box):
            return self.of.computed(box, read)
        rows, (start, stop), whole = self._rows(box)
        base, tiles = self.of.tiles(whole, read)
        magnitude = self.magnitude.computed((rows,), read)
        found = torch.empty([high - low for low, high in box], dtype=torch_dtype(self.dtype), device=base.device)
        by_row = found.T if self.of.is_transposed else found
        for first, group in groupby(tiles, key=itemgetter(0)):
            part = torch.cat([each.clone() for _, _, each in group], dim=1)
            last = first + part.shape[0]
            factor = magnitude[first:last].to(part.dtype) / _lengths(part)
            scaled = part[:, start:stop] * factor[:, None]
            check_in_range(by_row[first:last].copy_(scaled), scaled, lambda: sources_of(self.of.of, box))
        return found

    def _rows(self, box: Box) -> tuple[tuple[int, int], tuple[int, int], Box]:
        """The rows and the columns of a part, and the box of these rows; none of no rows."""
        rows, columns = reversed(box) if self.of.is_transposed else box
        inputs = (0, self.of.a.shape[1] if volume(box) else 0)
        return rows, columns, (inputs, rows) if self.of.is_transposed else (rows, inputs)


@final
@attrs.frozen
class PlusScaled(LikeTensor):
    """A tensor plus another one of its shape times a number, rounded once: a bias with that of an adapter.

    Attributes:
        of: the tensor.
        other: what is added.
        scale: of it.
    """

    other: Expression
    scale: float

    def reads(self, box: Box) -> Iterator[tuple[SourceTensor, Box]]:
        """See `Expression`."""
        yield from self.of.reads(box)
        yield from self.other.reads(box)

    def computed(self, box: Box, read: Read) -> "torch.Tensor":
        """See `Expression`."""
        import torch

        from trainfold.core.format.codec import torch_dtype

        one = self.of.computed(box, read)
        whole = one.to(torch.float64) + self.other.computed(box, read).to(torch.float64) * self.scale
        found = whole.to(torch_dtype(self.dtype))
        check_in_range(found, whole, lambda: sources_of(self.of, box))
        return found


def _lengths(rows: "torch.Tensor") -> "torch.Tensor":
    """The length of each row: its halves are added to each other, which gives the same bits wherever a row is."""
    squares = rows * rows
    while (size := squares.shape[1]) > 1:
        half = (size + 1) // 2
        squares[:, : size - half] += squares[:, half:].clone()
        squares = squares[:, :half]
    return squares[:, 0].sqrt()


def _tiles(first: int, size: int, step: int) -> Iterator[tuple[int, int, int]]:
    """The parts of a side that lie in one tile each, with their places in the tiles.

    Args:
        first: where the side begins in the whole, whose tiles begin at multiples of a step.
        size: of the side.
        step: the size of a tile.

    Examples:
        >>> list(_tiles(30, 40, 32))
        [(0, 2, 30), (2, 34, 0), (34, 40, 0)]
    """
    at = first % step
    start = 0
    while start < size:
        stop = min(size, start + step - at)
        yield start, stop, at
        start, at = stop, 0


def _padded(rows: "torch.Tensor", at: int, count: int) -> "torch.Tensor":
    """So many rows in float64, with these at their place, in memory of their own."""
    import torch

    found = torch.zeros(count, rows.shape[1], dtype=torch.float64, device=rows.device)
    found[at : at + rows.shape[0]] = rows
    return found
