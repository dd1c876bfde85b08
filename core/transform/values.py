"""Transforms of values: `rearrange`, `transpose`, `cast` and `dequantise`."""

from collections.abc import Iterable, Mapping
from typing import Final, final

import attrs

from trainfold.core.checks import count
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.format.dtypes import STORED
from trainfold.core.json_values import shown
from trainfold.core.transform.expression import CastTo, Dequantised, Expression
from trainfold.core.transform.name_template import NameTemplate, check_captures, matching, template, templates
from trainfold.core.transform.naming import form_of
from trainfold.core.transform.rearrangement import Rearranged, Rearrangement, rearrangement
from trainfold.core.transform.transform import Table

_FLOATS: Final = ("float16", "bfloat16", "float32", "float64")
_QUANTISED: Final = frozenset(each for each in STORED if each.startswith(("float8", "int8", "uint8")))
_PACKED: Final = _QUANTISED | {"int32"}  # some keep numbers of 4 bits in whole words
_MATRIX: Final = 2
_BIAS: Final = "bias"


@final
@attrs.frozen
class Rearrange:
    """See `rearrange`."""

    names: tuple[NameTemplate, ...]
    by: Rearrangement

    def __str__(self) -> str:
        return f"rearrange {', '.join(map(str, self.names))}: {self.by}"

    @property
    def inverse(self) -> "Rearrange":
        """The order that it was."""
        return Rearrange(self.names, self.by.inverse)

    def on(self, table: Table) -> dict[str, Expression]:
        """See `Transform`."""
        found, axes = dict(table), dict[tuple[int, ...], Mapping[str, int]]()  # there are many tensors, and few shapes
        for name in matching(self.names, table):
            each = table[name]
            if each.shape not in axes:
                axes[each.shape] = self.by.axes_of(name, each.shape)
            found[name] = Rearranged(each, self.by, axes[each.shape])
        return found


@final
@attrs.frozen
class CastFloats:
    """See `cast`."""

    dtype: str
    only: tuple[NameTemplate, ...]
    without: tuple[NameTemplate, ...]

    def __str__(self) -> str:
        names = f" of {', '.join(map(str, self.only))}" if self.only else ""
        names += f" but {', '.join(map(str, self.without))}" if self.without else ""
        return f"cast floating tensors{names} to {self.dtype} (no inverse)"

    @property
    def inverse(self) -> None:
        """What was rounded cannot be put back."""
        return

    def on(self, table: Table) -> dict[str, Expression]:
        """See `Transform`."""
        only = matching(self.only, table) if self.only else table.keys() - _beside_quantised(table)
        without = matching(self.without, table)
        return {
            name: CastTo(each, self.dtype)
            if each.dtype in _FLOATS and each.dtype != self.dtype and name in only and name not in without
            else each
            for name, each in table.items()
        }


def _beside_quantised(table: Table) -> set[str]:
    """What modules have beside a quantised matrix, but a bias: its scales, whatever they are called."""
    modules = {_module_of(name) for name, each in table.items() if each.dtype in _PACKED and len(each.shape) >= _MATRIX}
    if not modules:
        return set()
    return {name for name in table if _module_of(name) in modules and not name.endswith(_BIAS)}


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


@final
@attrs.frozen
class Dequantise:
    """See `dequantise`."""

    weight: NameTemplate
    scale: NameTemplate
    block: tuple[int | None, ...]
    dtype: str

    def __str__(self) -> str:
        return f"dequantise {self.weight} by {self.scale} in blocks of {self._blocks} to {self.dtype} (no inverse)"

    @property
    def _blocks(self) -> str:
        return f"[{', '.join('whole' if each is None else str(each) for each in self.block)}]"

    @property
    def inverse(self) -> None:
        """What was rounded cannot be put back."""
        return

    def on(self, table: Table) -> dict[str, Expression]:
        """See `Transform`."""
        found = dict(table)
        for name, captures in self.scale.among(table).items():
            scale = table[name]
            weight = self.weight.fill(captures)
            each = table.get(weight)
            sizes = () if each is None else self._sizes(each.shape)
            blocks = (
                () if each is None else tuple(-(-size // block) for size, block in zip(each.shape, sizes, strict=True))
            )
            # a scale may lack dimensions at the end in which there is one block, as that of a row or of a tensor does
            is_fit = (
                bool(sizes) and scale.shape == blocks[: len(scale.shape)] and set(blocks[len(scale.shape) :]) <= {1}
            )
            if each is None or each.dtype not in _QUANTISED or not is_fit:
                raise InvalidState(
                    name, expected=f"the scales of blocks of {self._blocks} of a quantised {weight}",
                    found=f"{form_of(scale)} beside {form_of(each)}", fix="give the block of this model")  # fmt: skip
            found[weight] = Dequantised(each, scale, sizes, self.dtype)
            del found[name]
        bare = [name for name in self.weight.among(found) if found[name].dtype in _QUANTISED]
        if bare:
            raise InvalidState(str(self), expected="a scale for each quantised tensor", found=f"none for {', '.join(bare[:8])}",
                               fix="give the name that the scales of this model have")  # fmt: skip
        return found

    def _sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The size of a block in each dimension; none for a tensor of other dimensions."""
        if len(shape) != len(self.block):
            return ()
        return tuple(max(size, 1) if block is None else block for size, block in zip(shape, self.block, strict=True))


def rearrange(names: str | NameTemplate | Iterable[str | NameTemplate], pattern: str, **sizes: int) -> Rearrange:
    """Put the elements of tensors into another order or shape.

    Args:
        names: one template of names, or several.
        pattern: the dimensions before and after ``->``, such as ``"o i -> i o"``. A dimension that is taken apart is in parentheses, its slowest axis first: ``"(h two d) i -> (h d two) i"``
            makes the halves of each head into pairs, as rotary embeddings have them in one order or the other.
        sizes: of the axes in parentheses, all but one of each.

    Raises:
        InvalidArgument: for a text that is not a pattern, and sizes that are missing or of no axis.

    Source: the notation is that of einops (Rogozhnikov, 2022).
    """
    return Rearrange(templates(names), rearrangement(pattern, sizes))


def transpose(names: str | NameTemplate | Iterable[str | NameTemplate]) -> Rearrange:
    """Exchange the two dimensions of matrices, as the layers of GPT-2 have them."""
    return rearrange(names, "o i -> i o")


def cast(
    dtype: str,
    *,
    only: str | NameTemplate | Iterable[str | NameTemplate] = (),
    without: str | NameTemplate | Iterable[str | NameTemplate] = (),
) -> CastFloats:
    """Round floating tensors to another dtype. Integers, booleans and quantised numbers keep theirs, and so does what has that dtype already.

    A finite number that would become infinite is an error when its tensor is computed.

    What a module has beside a quantised matrix (of float8, int8, uint8, or packed in int32), but its bias, keeps its dtype too: rounded scales would change each of its numbers.

    Args:
        dtype: ``"float16"``, ``"bfloat16"``, ``"float32"`` or ``"float64"``.
        only: the names to which it applies, scales too; by default all but what is beside a quantised matrix.
        without: names to which it does not apply.

    Raises:
        InvalidArgument: for another dtype.
    """
    return CastFloats(float_dtype("cast.dtype", dtype), templates(only), templates(without))


def float_dtype(where: str, dtype: object) -> str:
    """The checked name of a dtype to which numbers are rounded.

    Raises:
        InvalidArgument: for another one.
    """
    if not isinstance(dtype, str) or dtype not in _FLOATS:
        raise InvalidArgument(where, expected=f"one of {', '.join(_FLOATS)}", found=shown(dtype), fix="pass the name of the dtype, without torch.")  # fmt: skip
    return dtype


def dequantise(
    weight: str | NameTemplate,
    scale: str | NameTemplate,
    *,
    block: Iterable[int | None] = (128, 128),
    dtype: str = "bfloat16",
) -> Dequantise:
    """Multiply quantised weights by the scales of their blocks, and leave out the scales. The product is computed in float32 and rounded once.

    Args:
        weight: the names of the weights, such as ``{layer*}.weight``.
        scale: the names of their scales, with the same captures, such as ``{layer*}.weight_scale_inv``.
        block: the size of a block in each dimension; those at the ends may be smaller. None for all of a dimension: ``(1, None)`` for a scale a row, ``(None, None)`` for one a tensor.
        dtype: of the result.

    Raises:
        InvalidArgument: for other captures, numbers below 1 and another dtype.
    """
    one, other = template(weight), template(scale)
    check_captures("dequantise", one, other)
    if not isinstance(block, Iterable):
        raise InvalidArgument("dequantise.block", expected="a size for each dimension", found=shown(block), fix="pass (128, 128), or (1, None) for a scale a row")  # fmt: skip
    sizes = tuple(
        None
        if each is None
        else count("dequantise.block", each, fix="pass the size of a block, or None for a whole dimension")
        for each in block
    )
    return Dequantise(one, other, sizes, float_dtype("dequantise.dtype", dtype))
