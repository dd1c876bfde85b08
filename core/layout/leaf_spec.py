"""Leaf specs: dtypes and shapes without the values, and all differences between two sets of specs. Imports no torch."""

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias, final

import attrs

from trainfold.core.layout.slices import Box

if TYPE_CHECKING:
    from trainfold.core.layout.placement import Placement

DifferenceKind: TypeAlias = Literal["missing", "unexpected", "shape", "dtype", "kind"]
_FORM: Final = attrgetter("dtype", "shape")


@final
@attrs.frozen(cache_hash=True)
class LeafSpec:
    """A tensor leaf without its values.

    Attributes:
        dtype: torch's name of the dtype, such as ``"bfloat16"``.
        shape: the global shape.
        slices: the half-open boxes of it that this rank holds, one (start, stop) pair per dimension; empty for all of it, or where
            the placement alone says it.
        placement: the rule by which it is cut; None if it is whole or cut in another way.
    """

    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Box, ...] = ()
    placement: "Placement | None" = None

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class HasForm(Protocol):
    """Something with a dtype and a shape."""

    @property
    def dtype(self) -> str: ...  # noqa: D102 - in the class

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102 - in the class


def leaf_specs(found: Mapping[str, HasForm]) -> dict[str, LeafSpec]:
    """The dtype and shape of each. Equal ones are one object: of most tensors there are many of one kind.

    Examples:
        >>> leaf_specs({"w": LeafSpec("float32", (2,), slices=(((0, 1),),))})
        {'w': LeafSpec(dtype='float32', shape=(2,), slices=(), placement=None)}
    """
    kinds = [*map(_FORM, found.values())]
    specs = {kind: LeafSpec(*kind) for kind in dict.fromkeys(kinds)}
    return dict(zip(found, map(specs.__getitem__, kinds), strict=True))


@final
@attrs.frozen
class ScalarSpec:
    """A leaf that is not a tensor, by the name of its Python type, such as ``"int"``."""

    kind: str

    def __str__(self) -> str:
        return self.kind


AnySpec: TypeAlias = LeafSpec | ScalarSpec


@final
@attrs.frozen
class Difference:
    """One difference between a saved and a wanted leaf.

    Attributes:
        path: the leaf path.
        kind: ``missing`` (wanted, not saved), ``unexpected`` (saved, not wanted), ``shape``, ``dtype``, or ``kind``
            (one is a tensor, the other a scalar, or scalars of different types).
        saved: what the checkpoint has, or None.
        wanted: what the target has, or None.
    """

    path: str
    kind: DifferenceKind
    saved: AnySpec | None
    wanted: AnySpec | None

    def __str__(self) -> str:
        return f"{self.path}: {self.kind}: saved {self.saved or 'nothing'}, wanted {self.wanted or 'nothing'}"


def diff_specs(saved: Mapping[str, AnySpec], wanted: Mapping[str, AnySpec]) -> tuple[Difference, ...]:
    """Return every difference between two specs: first in the order of ``wanted``, then the unexpected leaves.

    Examples:
        >>> wanted = {"w": LeafSpec("float32", (2,)), "b": LeafSpec("float32", (2,))}
        >>> saved = {"w": LeafSpec("float32", (3,)), "c": ScalarSpec("int")}
        >>> [(difference.path, difference.kind) for difference in diff_specs(saved, wanted)]
        [('w', 'shape'), ('b', 'missing'), ('c', 'unexpected')]
    """
    found: list[Difference] = []
    for path, want in wanted.items():
        have = saved.get(path)
        if have is None:
            found.append(Difference(path, "missing", None, want))
        else:
            found.extend(Difference(path, kind, have, want) for kind in _kinds(have, want))
    found.extend(Difference(path, "unexpected", have, None) for path, have in saved.items() if path not in wanted)
    return tuple(found)


def _kinds(have: AnySpec, want: AnySpec) -> list[DifferenceKind]:
    if isinstance(have, LeafSpec) and isinstance(want, LeafSpec):
        differs: list[tuple[DifferenceKind, bool]] = [
            ("shape", have.shape != want.shape),
            ("dtype", have.dtype != want.dtype),
        ]
        return [kind for kind, yes in differs if yes]
    return [] if have == want else ["kind"]
