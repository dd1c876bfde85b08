"""`Rearranged`: the elements of a tensor in another order and shape: transposes, the rows of rotary embeddings, interleaved gates."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, final

import attrs

from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.json_values import shown
from trainfold.core.layout.slices import Box, volume
from trainfold.core.transform.expression import OfTensor, Read, SourceTensor, no_box, nothing_of

if TYPE_CHECKING:
    import torch

Groups = tuple[tuple[str, ...], ...]


@final
@attrs.frozen
class Rearrangement:
    """How dimensions are taken apart into axes and put together again, such as ``(h two d) i -> (h d two) i``.

    Attributes:
        before: for each dimension the axes that it consists of, from the slowest to the fastest.
        after: the same of the result.
        sizes: axis -> its size, of those that a dimension does not give.
    """

    before: Groups
    after: Groups
    sizes: Mapping[str, int] = attrs.field(factory=dict, hash=False)

    def __str__(self) -> str:
        text = f"{_text(self.before)} -> {_text(self.after)}"
        return text + "".join(f", {axis}={size}" for axis, size in self.sizes.items())

    @property
    def inverse(self) -> "Rearrangement":
        """The one that puts everything back."""
        return Rearrangement(self.after, self.before, self.sizes)

    def axes_of(self, name: str, shape: tuple[int, ...]) -> dict[str, int]:
        """The size of each axis in a tensor of this shape.

        Raises:
            InvalidState: if the tensor cannot be taken apart so.
        """
        found: dict[str, int] = {}
        for axes, size in zip(self.before, shape, strict=False):
            known = {axis: self.sizes[axis] for axis in axes if axis in self.sizes}
            rest = [axis for axis in axes if axis not in known]
            whole = prod(known.values())
            if size % whole if rest else size != whole:
                break
            found |= known | dict.fromkeys(rest, size // whole)
        else:
            if len(self.before) == len(shape):
                return found
        raise InvalidState(
            name, expected=f"a tensor that can be read as {_text(self.before)} with {dict(self.sizes)}", found=list(shape),
            fix="give the sizes of this model: its heads, its dimensions")  # fmt: skip


def rearrangement(pattern: str, sizes: Mapping[str, int]) -> Rearrangement:
    """Read a pattern.

    Args:
        pattern: dimensions and ``(axes of one)``, before and after ``->``.
        sizes: of axes that are part of a dimension; one of each dimension may be left out.

    Raises:
        InvalidArgument: if the sides have other axes, or sizes are missing, unknown or below 1.

    Examples:
        >>> print(rearrangement("(h two d) i -> (h d two) i", {"h": 4, "two": 2}))
        (h two d) i -> (h d two) i, h=4, two=2
    """
    sides = [_side(each) for each in pattern.split("->")] if isinstance(pattern, str) else []
    names = [sorted(axis for axes in side or () for axis in axes) for side in sides]
    if len(sides) != 2 or None in sides or names[0] != names[1] or len(set(names[0])) < len(names[0]):
        raise InvalidArgument("pattern", expected="the same axes on both sides of ->, each once, such as (h d) i -> i (h d)", found=shown(pattern),
                              fix="write each dimension as an axis, or as (axes) from the slowest to the fastest")  # fmt: skip
    if bad := [axis for axis in sizes if axis not in names[0] or type(sizes[axis]) is not int or sizes[axis] < 1]:
        raise InvalidArgument("sizes", expected=f"positive sizes of axes of {pattern}", found=f"{bad[0]}={shown(sizes[bad[0]])}",
                              fix="name an axis of the pattern, and pass an int")  # fmt: skip
    before, after = sides
    assert before is not None
    assert after is not None
    for axes in (*before, *after):
        if len(open_axes := [axis for axis in axes if axis not in sizes]) > 1:
            raise InvalidArgument("sizes", expected="a size for all axes of a dimension but one", found=f"none for {', '.join(open_axes)} of ({' '.join(axes)})",
                                  fix=f"pass {open_axes[0]}=")  # fmt: skip
    return Rearrangement(before, after, dict(sizes))


def _side(text: str) -> Groups | None:
    """The dimensions of a side; None if it is not one."""
    groups: list[tuple[str, ...]] = []
    inner: list[str] | None = None
    for word in text.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(" and inner is None:
            inner = []
        elif word == ")" and inner:
            groups.append(tuple(inner))
            inner = None
        elif not word.isidentifier():
            return None
        elif inner is None:
            groups.append((word,))
        else:
            inner.append(word)
    return tuple(groups) if inner is None else None


def _text(groups: Groups) -> str:
    return " ".join(axes[0] if len(axes) == 1 else f"({' '.join(axes)})" for axes in groups)


@final
@attrs.frozen
class Rearranged(OfTensor):
    """A tensor whose elements are in another order.

    A part of it is computed from the smallest part that can be taken apart into the same axes: a shard of transposed rows needs that shard, one that
    begins in the middle of a head the whole head.

    Attributes:
        of: the tensor.
        by: how it is rearranged.
        axes: the size of each axis.
    """

    by: Rearrangement
    axes: Mapping[str, int] = attrs.field(hash=False)

    @cached_property
    def shape(self) -> tuple[int, ...]:  # noqa: D102 - see `Expression`
        return tuple(prod(self.axes[axis] for axis in axes) for axes in self.by.after)

    def reads(self, box: Box) -> Iterator[tuple[SourceTensor, Box]]:
        """See `Expression`."""
        return self.of.reads(no_box(self.of) if not volume(box) else self._box(self.by.before, self._needed(box)[1]))

    def computed(self, box: Box, read: Read) -> "torch.Tensor":
        """See `Expression`."""
        if not volume(box):
            return nothing_of(self.of, box, read)
        wanted, needed = self._needed(box)
        tensor = self.of.computed(self._box(self.by.before, needed), read)
        names = [axis for axes in self.by.before for axis in axes]
        tensor = tensor.reshape([needed[axis][1] - needed[axis][0] for axis in names])
        for dim, axis in enumerate(names):
            start, stop = wanted[axis]
            tensor = tensor.narrow(dim, start - needed[axis][0], stop - start)
        tensor = tensor.permute([names.index(axis) for axes in self.by.after for axis in axes])
        whole = self._box(self.by.after, wanted)
        tensor = tensor.reshape([stop - start for start, stop in whole])
        for dim, ((start, stop), (first, _)) in enumerate(zip(box, whole, strict=True)):
            tensor = tensor.narrow(dim, start - first, stop - start)
        return tensor

    def _needed(self, box: Box) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
        """The parts of the axes that have a box of the result, and those that have them and are a box of the tensor."""
        wanted = self._parts(self.by.after, box)
        return wanted, self._parts(self.by.before, self._box(self.by.before, wanted))

    def _parts(self, groups: Groups, box: Box) -> dict[str, tuple[int, int]]:
        """The smallest parts of the axes that have all of a box, and are a box themselves."""
        found: dict[str, tuple[int, int]] = {}
        for axes, (start, stop) in zip(groups, box, strict=True):
            sizes = [self.axes[axis] for axis in axes]
            found |= zip(axes, _spans(sizes, start, stop), strict=True)
        return found

    def _box(self, groups: Groups, parts: Mapping[str, tuple[int, int]]) -> Box:
        """The smallest box that has these parts of the axes."""
        box = []
        for axes in groups:
            first = last = 0
            for axis in axes:
                start, stop = parts[axis]
                first, last = first * self.axes[axis] + start, last * self.axes[axis] + stop - 1
            box.append((first, last + 1))
        return tuple(box)


def _spans(sizes: Sequence[int], start: int, stop: int) -> list[tuple[int, int]]:
    """The part of each axis of a dimension that holds a run of its elements: whole axes below the first that the run crosses.

    Examples:
        >>> _spans([2, 3, 4], 12, 24), _spans([2, 3, 4], 13, 19), _spans([2, 3, 4], 13, 15)
        ([(1, 2), (0, 3), (0, 4)], [(1, 2), (0, 2), (0, 4)], [(1, 2), (0, 1), (1, 3)])
    """
    spans = []
    for place in range(len(sizes)):
        stride = prod(sizes[place + 1 :])
        first, last = start // stride, (stop - 1) // stride
        spans.append((first, last + 1))
        if first < last:
            return [*spans, *((0, each) for each in sizes[place + 1 :])]
        start, stop = start - first * stride, stop - first * stride
    return spans
