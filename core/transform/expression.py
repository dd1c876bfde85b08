"""`Expression`: what a tensor is made of, as a value. It says which parts of which tensors a part of it needs, and computes that part alone.

So one description serves a plan that reads nothing, a stream that holds one tensor at a time, and a rank that needs a shard. torch is imported when something is computed.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, final

import attrs

from trainfold.core.errors import InvalidState
from trainfold.core.layout.slices import Box, row_blocks, volume, whole_box
from trainfold.core.transform.rounding import check_in_range, rounded_to

if TYPE_CHECKING:
    import torch

_BAND_BYTES: Final = 1 << 22
"""How much of a result is computed in float32 at once, so that what is computed on the way needs no memory of its size."""
_FLOAT_BYTES: Final = 4
_NAMED: Final = 4

Read: TypeAlias = "Callable[[str, Box], torch.Tensor]"
"""Returns a part of a source tensor, by its name. What it returns is not written to."""


class Expression(Protocol):
    """A tensor that is made of others.

    Law: ``computed(box, read)`` is the part ``box`` of ``computed(whole, read)``, to the bit, and reads the parts that ``reads(box)`` yields.

    Attributes:
        dtype: torch's name of the dtype.
        shape: of the whole tensor.
    """

    @property
    def dtype(self) -> str: ...  # noqa: D102 - in the class

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102 - in the class

    def reads(self, box: Box) -> "Iterator[tuple[SourceTensor, Box]]":
        """Yield what a part needs of the source tensors. A part may be read twice, if it is needed twice."""

    def computed(self, box: Box, read: Read) -> "torch.Tensor":
        """Compute a part. It may share memory with what ``read`` returned."""


@final
@attrs.frozen
class SourceTensor:
    """A tensor as it is there.

    Attributes:
        name: its name.
        dtype: see `Expression`.
        shape: see `Expression`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def reads(self, box: Box) -> "Iterator[tuple[SourceTensor, Box]]":
        """See `Expression`."""
        yield self, box

    def computed(self, box: Box, read: Read) -> "torch.Tensor":
        """See `Expression`."""
        return read(self.name, box)


@attrs.frozen
class OfTensor:
    """What has the dtype of the tensor that it is made of.

    Attributes:
        of: the tensor.
    """

    of: Expression

    @property
    def dtype(self) -> str:  # noqa: D102 - see `Expression`
        return self.of.dtype


@attrs.frozen
class LikeTensor(OfTensor):
    """What has its shape too."""

    @property
    def shape(self) -> tuple[int, ...]:  # noqa: D102 - see `Expression`
        return self.of.shape


@final
@attrs.frozen
class CutOut(OfTensor):
    """A box of a tensor.

    Attributes:
        of: the tensor.
        box: one (start, stop) pair for each of its dimensions.
    """

    box: Box

    @property
    def shape(self) -> tuple[int, ...]:  # noqa: D102 - see `Expression`
        return tuple(stop - start for start, stop in self.box)

    def reads(self, box: Box) -> Iterator[tuple[SourceTensor, Box]]:
        """See `Expression`."""
        return self.of.reads(self._within(box))

    def computed(self, box: Box, read: Read) -> "torch.Tensor":
        """See `Expression`."""
        return self.of.computed(self._within(box), read)

    def _within(self, box: Box) -> Box:
        return tuple((first + start, first + stop) for (first, _), (start, stop) in zip(self.box, box, strict=True))


@final
@attrs.frozen
class Joined:
    """Tensors one after the other, along a dimension that they have.

    Attributes:
        parts: one or more, of one dtype, and of one shape but for that dimension.
        dim: the dimension.
    """

    parts: tuple[Expression, ...]
    dim: int

    @property
    def dtype(self) -> str:  # noqa: D102 - see `Expression`
        return self.parts[0].dtype

    @cached_property
    def shape(self) -> tuple[int, ...]:  # noqa: D102 - see `Expression`
        shape = list(self.parts[0].shape)
        shape[self.dim] = sum(each.shape[self.dim] for each in self.parts)
        return tuple(shape)

    def reads(self, box: Box) -> Iterator[tuple[SourceTensor, Box]]:
        """See `Expression`."""
        for part, inner, _ in self._meets(box):
            yield from part.reads(inner)

    def computed(self, box: Box, read: Read) -> "torch.Tensor":
        """See `Expression`."""
        import torch

        meets = list(self._meets(box))
        if len(meets) == 1:
            return meets[0][0].computed(meets[0][1], read)
        whole = None
        for part, inner, first in meets:
            found = part.computed(inner, read)
            if whole is None:
                whole = torch.empty([stop - start for start, stop in box], dtype=found.dtype, device=found.device)
            whole.narrow(self.dim, first, found.shape[self.dim]).copy_(found)
        assert whole is not None
        return whole

    def _meets(self, box: Box) -> Iterator[tuple[Expression, Box, int]]:
        """The parts that have something of a box, what of them it is, and where in the box it begins; the first part for an empty box."""
        low, high, at, is_any = *box[self.dim], 0, False
        for part in self.parts:
            size = part.shape[self.dim]
            start, stop = max(low - at, 0), min(high - at, size)
            if start < stop:
                is_any = True
                yield part, (*box[: self.dim], (start, stop), *box[self.dim + 1 :]), at + start - low
            at += size
        if not is_any:
            yield self.parts[0], (*box[: self.dim], (0, 0), *box[self.dim + 1 :]), 0


@final
@attrs.frozen
class Raised(OfTensor):
    """A tensor with another dimension of size 1 before the others.

    Attributes:
        of: the tensor.
    """

    @property
    def shape(self) -> tuple[int, ...]:  # noqa: D102 - see `Expression`
        return (1, *self.of.shape)

    def reads(self, box: Box) -> Iterator[tuple[SourceTensor, Box]]:
        """See `Expression`."""
        return self.of.reads(no_box(self.of) if not volume(box) else box[1:])

    def computed(self, box: Box, read: Read) -> "torch.Tensor":
        """See `Expression`."""
        if not volume(box):
            return nothing_of(self.of, box, read)
        return self.of.computed(box[1:], read).unsqueeze(0)


@final
@attrs.frozen
class Lowered(OfTensor):
    """A tensor without its first dimension, which is of size 1.

    Attributes:
        of: the tensor.
    """

    @property
    def shape(self) -> tuple[int, ...]:  # noqa: D102 - see `Expression`
        return self.of.shape[1:]

    def reads(self, box: Box) -> Iterator[tuple[SourceTensor, Box]]:
        """See `Expression`."""
        return self.of.reads(((0, 1), *box))

    def computed(self, box: Box, read: Read) -> "torch.Tensor":
        """See `Expression`."""
        return self.of.computed(((0, 1), *box), read).squeeze(0)


@final
@attrs.frozen
class CastTo:
    """A tensor in another dtype, rounded as torch rounds; a number that would become infinite is an error.

    Attributes:
        of: the tensor.
        dtype: the other dtype.
    """

    of: Expression
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:  # noqa: D102 - see `Expression`
        return self.of.shape

    def reads(self, box: Box) -> Iterator[tuple[SourceTensor, Box]]:
        """See `Expression`."""
        return self.of.reads(box)

    def computed(self, box: Box, read: Read) -> "torch.Tensor":
        """See `Expression`."""
        from trainfold.core.format.codec import torch_dtype

        return rounded_to(self.of.computed(box, read), torch_dtype(self.dtype), lambda: sources_of(self.of, box))


@final
@attrs.frozen
class Dequantised:
    """Quantised numbers times the scale of their block, rounded once.

    The blocks at the ends may be smaller: the scales of a dimension of 300 with blocks of 128 are three.

    Attributes:
        of: the quantised tensor.
        scale: a number for each block; without the last dimensions if they have one block.
        block: the size of a block in each dimension.
        dtype: of the result.
    """

    of: Expression
    scale: Expression
    block: tuple[int, ...]
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:  # noqa: D102 - see `Expression`
        return self.of.shape

    def reads(self, box: Box) -> Iterator[tuple[SourceTensor, Box]]:
        """See `Expression`."""
        yield from self.of.reads(box)
        yield from self.scale.reads(self._blocks(box))

    def computed(self, box: Box, read: Read) -> "torch.Tensor":
        """See `Expression`."""
        import torch

        from trainfold.core.format.codec import torch_dtype

        blocks = self._blocks(box)
        scale = self.scale.computed(blocks, read).to(torch.float32)
        scale = scale.reshape(*scale.shape, *[1] * (len(self.block) - scale.dim()))
        of = self.of.computed(box, read)
        found = torch.empty(of.shape, dtype=torch_dtype(self.dtype), device=of.device)
        origin = [start for start, _ in box]
        for band in row_blocks(whole_box(tuple(of.shape)), _FLOAT_BYTES, _BAND_BYTES):
            place = tuple(slice(*side) for side in band)
            part = scale
            for dim, (size, at, (start, stop)) in enumerate(zip(self.block, origin, band, strict=True)):
                first, last = at + start, at + stop
                low = first // size - at // size
                high = -(-last // size) - at // size if stop > start else low
                part = part.narrow(dim, low, high - low).repeat_interleave(size, dim)
                part = part.narrow(dim, first % size if stop > start else 0, stop - start)
            product = of[place].to(torch.float32) * part
            found[place] = product
            check_in_range(found[place], product, lambda: sources_of(self.of, box))
        return found

    def _blocks(self, box: Box) -> Box:
        """The scales of a part. A scale without the last dimensions has one for all of them."""
        blocks = tuple(
            (start // size, -(-stop // size) if stop > start else start // size)
            for size, (start, stop) in zip(self.block, box, strict=True)
        )
        return blocks[: len(self.scale.shape)]


@final
@attrs.frozen
class SameAs(LikeTensor):
    """A tensor that has to have the values of another one, which is left out: each part is compared bit by bit before it is used.

    Attributes:
        of: the tensor that stays.
        other: the one that is left out.
        names: of both, for the error.
    """

    other: Expression
    names: tuple[str, str]

    def reads(self, box: Box) -> Iterator[tuple[SourceTensor, Box]]:
        """See `Expression`."""
        yield from self.of.reads(box)
        yield from self.other.reads(box)

    def computed(self, box: Box, read: Read) -> "torch.Tensor":
        """See `Expression`.

        Raises:
            InvalidState: if the two differ.
        """
        from trainfold.core.tensor_memory import tensor_bytes

        kept = self.of.computed(box, read)
        if tensor_bytes(kept) != tensor_bytes(self.other.computed(box, read)):
            name, left_out = self.names
            raise InvalidState(
                left_out, expected=f"the values of {name}, as tied weights have", found="other values",
                fix="export it as a tensor of its own: leave out this tie, and say in the config that the weights are not tied")  # fmt: skip
        return kept


def sources_of(each: Expression, box: Box) -> str:
    """What a part is made of, for an error."""
    names = list(dict.fromkeys(source.name for source, _ in each.reads(box)))
    return f"{', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''}"


def computed_whole(each: Expression, read: Read) -> "torch.Tensor":
    """Compute all of a tensor."""
    return each.computed(whole_box(each.shape), read)


def nothing_of(each: Expression, box: Box, read: Read) -> "torch.Tensor":
    """A part without elements, in the form of a box."""
    nothing = each.computed(no_box(each), read)
    if not each.shape:
        nothing = nothing.reshape(1)[:0]
    return nothing.reshape([stop - start for start, stop in box])


def no_box(each: Expression) -> Box:
    """A box of a tensor without any of its elements; that of a scalar has its one, as there is no other."""
    return tuple((0, 0) for _ in each.shape)
