"""`LowRank` and `Decomposed`: what a weight and its adapter make together, as expressions whose parts have the bits of the whole."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, final

import attrs

from trainfold.core.layout.slices import Box, volume
from trainfold.core.transform.expression import Expression, Read, SourceTensor, sources_of
from trainfold.core.transform.rounding import check_in_range

if TYPE_CHECKING:
    import torch

_AT_ONCE: Final = 1 << 16  # elements, which stay in a cache while the terms are added


@final
@attrs.frozen
class LowRank:
    """A matrix plus the scaled product of two thin ones, rounded once.

    Each element is summed over the rank in order, so a part has the bits that it has in the whole; a matrix product sums large and small ones in other orders.

    Attributes:
        of: the matrix.
        a: of shape (rank, inputs).
        b: of shape (outputs, rank).
        scale: of the product.
        is_transposed: whether the matrix has its inputs first.
    """

    of: Expression
    a: Expression
    b: Expression
    scale: float
    is_transposed: bool

    @property
    def dtype(self) -> str:  # noqa: D102 - see `Expression`
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, ...]:  # noqa: D102 - see `Expression`
        return self.of.shape

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

        base, bands = self.bands(box, read)
        found = torch.empty(base.shape, dtype=torch_dtype(self.dtype), device=base.device)
        by_row = found.T if self.is_transposed else found
        for start, part in bands:
            rows = by_row[start : start + part.shape[0]]
            check_in_range(rows.copy_(part), part, lambda: sources_of(self.of, box))
        return found

    def bands(self, box: Box, read: Read) -> "tuple[torch.Tensor, Iterator[tuple[int, torch.Tensor]]]":
        """The matrix itself, and a part before it is rounded, some rows at once, each with the first: in float32, or float64 for such a matrix.

        A row is what leads to one output.
        """
        import torch

        base = self.of.computed(box, read)
        dtype = torch.float64 if self.dtype == "float64" else torch.float32
        b, a = (part.computed(inner, read).to(dtype) for part, inner in self._thin(box))
        rows = max(1, _AT_ONCE // a.shape[1])

        def each() -> "Iterator[tuple[int, torch.Tensor]]":
            by_row = base.T if self.is_transposed else base
            for start in range(0, b.shape[0], rows):
                thin = b[start : start + rows]
                part = torch.zeros(thin.shape[0], a.shape[1], dtype=dtype, device=base.device)
                term = torch.empty_like(part)
                for number in range(a.shape[0]):
                    torch.mul(thin[:, number, None], a[None, number], out=term)
                    part.add_(term)  # rounded apart: a fused operation would depend on the place in the row
                part *= self.scale
                part += by_row[start : start + rows].to(dtype)
                yield start, part

        return base, each()

    def _thin(self, box: Box) -> Iterator[tuple[Expression, Box]]:
        outputs, inputs = reversed(box) if self.is_transposed else box
        rank = (0, self.a.shape[0])
        yield self.b, (outputs, rank)
        yield self.a, (rank, inputs)


@final
@attrs.frozen
class Decomposed:
    """A matrix with an adapter, of which each row has a length of its own, as DoRA trains it. A row is what leads to one output.

    Lengths are of whole rows, whatever part is computed, and squares are added in one order.

    Attributes:
        of: the matrix with its adapter.
        magnitude: the length of each row.
    """

    of: LowRank
    magnitude: Expression

    @property
    def dtype(self) -> str:  # noqa: D102 - see `Expression`
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, ...]:  # noqa: D102 - see `Expression`
        return self.of.shape

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
        base, bands = self.of.bands(whole, read)
        magnitude = self.magnitude.computed((rows,), read)
        found = torch.empty([high - low for low, high in box], dtype=torch_dtype(self.dtype), device=base.device)
        by_row = found.T if self.of.is_transposed else found
        for first, part in bands:
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


def _lengths(rows: "torch.Tensor") -> "torch.Tensor":
    """The length of each row: its halves are added to each other, which gives the same bits wherever a row is."""
    squares = rows * rows
    while (size := squares.shape[1]) > 1:
        half = (size + 1) // 2
        squares[:, : size - half] += squares[:, half:].clone()
        squares = squares[:, :half]
    return squares[:, 0].sqrt()
