"""`Account`: whether a source of weights has supplied what was asked for, each tensor once and as it has to be."""

from collections.abc import Mapping, Sequence
from typing import Final, final

from trainfold.core.errors import InvalidState, TrainfoldError
from trainfold.core.weights.source import Wanted, source_name

_SHOWN: Final = 8  # names in a message
_DEQUANTISE: Final = "multiply it by its scales: trainfold.weights.Transformed(source, trainfold.transforms.dequantise(weight, scale)); without them its numbers mean nothing"


@final
class Account:
    """Counts what a source supplies.

    Args:
        source: what supplies it, for messages.
        wanted: what it was asked for.

    Examples:
        >>> account = Account(object(), {"w": Wanted("float32", (4,), ((2, 4),))})
        >>> account.part_of("w", "float32", (4,))
        (slice(2, 4, None),)
        >>> account.missing()
        []
    """

    def __init__(self, source: object, wanted: Mapping[str, Wanted]) -> None:
        self._source = source_name(source)
        self._wanted = wanted
        self._came: dict[str, str] = {}  # first name -> the name under which it came
        self._names = set[str]()  # all under which something came

    def came_as(self, name: str) -> str | None:
        """The name under which a tensor has come already; None if it has not, or was not asked for."""
        return self._came.get(self.first_name(name)) if name in self._wanted else None

    def first_name(self, name: str) -> str:
        """The name under which the model has a tensor."""
        return self._wanted[name].tied_to or name

    def part_of(self, name: str, dtype: str, shape: Sequence[int]) -> tuple[slice, ...]:
        """Note that a tensor has come; return which part of it belongs to this rank.

        Raises:
            InvalidState: if it was not asked for, has come already under this name, or has another dtype or shape.
        """
        where, wanted = f"weights[{name!r}] from {self._source}", self._wanted.get(name)
        if wanted is None:
            raise InvalidState(
                where,
                expected=f"one of the {len(self._wanted)} names that were asked for",
                found="another one",
                fix="let supply() yield no more than it is asked for; names are those of model.state_dict(), without the prefixes of wrappers",
            )
        if name in self._names:
            raise InvalidState(
                where,
                expected="each name once",
                found="it a second time",
                fix="let supply() yield one tensor for each name; of two with one name none is surely the right one",
            )
        held = tuple(stop - start for start, stop in wanted.box)
        if tuple(shape) not in (wanted.shape, held):
            raise other_shape(where, wanted, shape)
        if dtype != wanted.dtype and (wanted.dtype or not is_floating(dtype)):
            raise other_dtype(where, wanted, dtype)
        self._names.add(name)
        self._came.setdefault(self.first_name(name), name)
        if tuple(shape) == wanted.shape:
            return tuple(slice(start, stop) for start, stop in wanted.box)
        return tuple(slice(0, size) for size in held)

    def missing(self) -> list[str]:
        """The first names of the tensors that have not come."""
        return [name for name, each in self._wanted.items() if each.tied_to is None and name not in self._came]

    def problem(self) -> TrainfoldError | None:
        """Why the weights are not complete; None if every tensor has come."""
        missing = self.missing()
        return not_supplied(self._source, missing, len(self._came) + len(missing)) if missing else None


def other_shape(where: str, wanted: Wanted, found: Sequence[int]) -> InvalidState:
    """The error for a tensor of another shape."""
    held = [stop - start for start, stop in wanted.box]
    return InvalidState(
        where,
        expected=f"the shape {list(wanted.shape)}" + ("" if wanted.is_whole else f", or {held} of this rank"),
        found=list(found),
        fix="build the model as the weights were trained, or supply this tensor from elsewhere",
    )


def other_dtype(where: str, wanted: Wanted, found: str) -> InvalidState:
    """The error for a tensor of another dtype."""
    return InvalidState(
        where,
        expected=wanted.dtype or "a floating dtype",
        found=found,
        fix=_DEQUANTISE if is_quantised(found) and not is_quantised(wanted.dtype)
        else "build the model with that dtype; or wrap the source in trainfold.weights.Cast(...), if the values are floats and may be rounded to floats",
    )  # fmt: skip


def not_supplied(source: str, missing: Sequence[str], total: int) -> InvalidState:
    """The error for tensors that a source does not have.

    Args:
        source: what was asked, in words.
        missing: their names.
        total: how many tensors were asked for.
    """
    return InvalidState(
        "weights",
        expected=f"all {total} tensors from {source}",
        found=f"nothing for {some_names(missing)}",
        fix="supply these too; what is trained here and not there belongs to the checkpoints: weights=trainfold.weights.Frozen(source)",
    )


def some_names(names: Sequence[str]) -> str:
    """The first names of many, for a message."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def is_floating(dtype: str) -> bool:
    """Whether a dtype is one of floating-point numbers, by its name."""
    return dtype.startswith(("float", "bfloat"))


def is_quantised(dtype: str) -> bool:
    """Whether numbers of a floating dtype mean something with their scales alone, by its name."""
    return dtype.startswith(("float8", "float4"))


def is_rounded(dtype: str) -> bool:
    """Whether numbers of a dtype may be rounded to those of another one, or from them."""
    return is_floating(dtype) and not is_quantised(dtype)
