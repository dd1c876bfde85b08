"""`Transform`: a pure function from a table of tensors to another one, with an inverse or without. `compose` puts several in order."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias, final, overload, runtime_checkable

import attrs

from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown
from trainfold.core.transform.expression import Expression

Table: TypeAlias = Mapping[str, Expression]
"""Name -> what the tensor is made of, in order."""


@runtime_checkable
class Transform(Protocol):
    """A pure function on tables. What it has no rule for it leaves as it is.

    Laws: it depends on names, dtypes and shapes alone. If it has an inverse, ``inverse.on(t.on(table))`` has the tensors of ``table``, bit by bit, for each
    table that it can be applied to. ``str`` describes it in full, a line for each rule.

    Attributes:
        inverse: the transform that puts everything back; None if there is none.
    """

    @property
    def inverse(self) -> "Transform | None": ...  # noqa: D102 - in the class

    def on(self, table: Table) -> dict[str, Expression]:
        """Apply it.

        Raises:
            InvalidState: if tensors have not the form that it needs, or two would get one name.
        """


class Invertible(Transform, Protocol):
    """A transform that has an inverse, for type checkers: `compose` of such transforms is one too, and its ``inverse`` needs no check for None."""

    @property
    def inverse(self) -> "Invertible": ...  # noqa: D102 - in `Transform`


@final
@attrs.frozen
class Composed:
    """Transforms, one after the other.

    Attributes:
        parts: in the order in which they are applied.
    """

    parts: tuple[Transform, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.parts)) if self.parts else "nothing"

    @property
    def inverse(self) -> "Composed | None":
        """The inverses in the opposite order; None if one of them has none."""
        found = [each.inverse for each in reversed(self.parts)]
        return Composed(tuple(each for each in found if each is not None)) if None not in found else None

    def on(self, table: Table) -> dict[str, Expression]:
        """See `Transform`."""
        found = dict(table)
        for each in self.parts:
            found = each.on(found)
        return found


if TYPE_CHECKING:

    class InvertibleComposed(Composed):  # type: ignore[misc]  # final at run time: this only narrows types
        """What `compose` returns for transforms that all have an inverse."""

        @property
        def inverse(self) -> "InvertibleComposed": ...  # noqa: D102 - in `Composed`

else:
    InvertibleComposed = Composed


@overload
def compose(*transforms: Invertible) -> InvertibleComposed: ...
@overload
def compose(*transforms: Transform) -> Composed: ...
def compose(*transforms: Transform) -> Composed:
    """Put transforms in order.

    Raises:
        InvalidArgument: for something else than a transform.

    Examples:
        >>> from trainfold.core.transform.naming import drop, rename
        >>> both = compose(rename("{i}.w", "layers.{i}.weight"), drop("{i}.b"))
        >>> print(both)
        rename {i}.w -> layers.{i}.weight
        drop {i}.b (no inverse)
        >>> both.inverse is None, print(compose(rename("a", "b")).inverse)
        rename b -> a
        (True, None)
    """
    for each in transforms:
        transform_given("compose", each)
    parts = (each.parts if isinstance(each, Composed) else (each,) for each in transforms)
    return Composed(tuple(one for each in parts for one in each))


def transform_given(where: str, value: object) -> Transform:
    """A transform.

    Args:
        where: the argument, for the message.
        value: what the caller passed.

    Raises:
        InvalidArgument: for anything else.

    Examples:
        >>> transform_given("rules", "llama")
        Traceback (most recent call last):
            ...
        trainfold.core.errors.InvalidArgument: rules: expected a transform, found 'llama'; pass one of trainfold.transforms, such as rename(old, new), several as \
compose(a, b), or the rules of a family: hub_rules_of(config); the inverse of one without an inverse is None
    """
    if isinstance(value, type) or not isinstance(value, Transform):
        raise InvalidArgument(where, expected="a transform", found=shown(value),
                              fix="pass one of trainfold.transforms, such as rename(old, new), several as compose(a, b), or the rules of a family: hub_rules_of(config); "
                              "the inverse of one without an inverse is None")  # fmt: skip
    return value
