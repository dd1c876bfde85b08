"""What is made of sources: `Cast` rounds, `Renamed` has other names, `Frozen` is for the frozen parameters alone, and `ByScript` leaves all to the script. `check_begins`: whether a run can begin with a source."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, final

import attrs

from trainfold.core.errors import InvalidArgument
from trainfold.core.transform.rounding import rounded_to
from trainfold.core.weights.account import is_rounded
from trainfold.core.weights.source import MemoryOf, Wanted, WeightSource, supply_of, without_memory

if TYPE_CHECKING:
    import torch


@final
@attrs.frozen
class Cast:
    """A source whose floating tensors are rounded to the dtype of the model. Without it another dtype is refused. Quantised numbers, as in float8, are never rounded: they mean something with their scales alone.

    Attributes:
        source: of which dtype it may be; or a list, each source of which is cast.

    Raises:
        InvalidArgument: for `Frozen` and `ByScript`, which go around it and beside it.

    Examples:
        >>> import torch
        >>> class Half:
        ...     def supply(self, wanted):
        ...         yield "w", torch.ones(1, dtype=torch.float16)
        >>> dict(Cast(Half()).supply({"w": Wanted("float32", (1,), ((0, 1),))}))
        {'w': tensor([1.])}
    """

    source: WeightSource

    def __attrs_post_init__(self) -> None:
        """Check what was given."""
        check_wrapped("Cast.source", self.source)

    def supply(self, wanted: Mapping[str, Wanted]) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield what the source has, with the dtypes of the model.

        Raises:
            InvalidState: if a number would become infinite in that dtype.
        """
        return self.supply_into(wanted, without_memory)

    def supply_into(self, wanted: Mapping[str, Wanted], memory: MemoryOf) -> "Iterator[tuple[str, torch.Tensor]]":
        """See `FillingSource`; what has the dtype of the model already is read into its memory."""
        from trainfold.core.format.codec import torch_dtype
        from trainfold.core.state.spec import dtype_name

        rounded = {name for name, each in wanted.items() if is_rounded(each.dtype)}
        any_float = {name: attrs.evolve(each, dtype="") if name in rounded else each for name, each in wanted.items()}
        for name, tensor in supply_of(self.source, any_float, memory):
            is_other = name in rounded and is_rounded(dtype_name(tensor.dtype))
            dtype = torch_dtype(wanted[name].dtype)
            yield name, rounded_to(tensor, dtype, name.__str__) if is_other and tensor.dtype != dtype else tensor


@final
@attrs.frozen
class Renamed:
    """A source that has other names, such as a base whose layers an adapter has wrapped.

    Attributes:
        source: of the weights.
        name_of: returns the name that the source has for a name of the model. Two tensors of the model must not get one name.

    Raises:
        InvalidArgument: for `Frozen` and `ByScript`, and for a list of sources: each of them has names of its own.

    Examples:
        >>> import torch
        >>> class Base:
        ...     def supply(self, wanted):
        ...         return iter([(name, torch.ones(1)) for name in wanted if name == "q.weight"])
        >>> source = Renamed(Base(), lambda name: name.removeprefix("base_model.").replace(".base_layer.", "."))
        >>> dict(source.supply({"base_model.q.base_layer.weight": Wanted("float32", (1,), ((0, 1),))}))
        {'base_model.q.base_layer.weight': tensor([1.])}
    """

    source: WeightSource
    name_of: Callable[[str], str]

    def __attrs_post_init__(self) -> None:
        """Check what was given."""
        check_wrapped("Renamed.source", self.source)
        if is_list(self.source):
            raise InvalidArgument("Renamed.source", expected="one source", found=type(self.source).__qualname__,
                                  fix="rename each of them: SeveralSources([LoadSpec(Renamed(source, name_of)), ...])")  # fmt: skip

    def supply(self, wanted: Mapping[str, Wanted]) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield what the source has, under the names of the model.

        Raises:
            InvalidArgument: if two tensors of the model get one name.
        """
        return self.supply_into(wanted, without_memory)

    def supply_into(self, wanted: Mapping[str, Wanted], memory: MemoryOf) -> "Iterator[tuple[str, torch.Tensor]]":
        """See `FillingSource`."""
        mine, theirs_wanted = self.asked(wanted)
        for theirs, tensor in supply_of(self.source, theirs_wanted, lambda theirs: memory(mine[theirs])):
            yield mine.get(theirs, theirs), tensor

    def asked(self, wanted: Mapping[str, Wanted]) -> tuple[dict[str, str], dict[str, Wanted]]:
        """The name of the model for each of the source's, and what the source is asked for.

        Raises:
            InvalidArgument: as in `supply`.
        """
        mine: dict[str, str] = {}
        for name in wanted:
            theirs = self.name_of(name)
            if theirs in mine:
                raise InvalidArgument(
                    "Renamed.name_of",
                    expected="another name for each tensor",
                    found=f"{theirs!r} for {mine[theirs]!r} and {name!r}",
                    fix="keep in the name what distinguishes the two",
                )
            mine[theirs] = name
        return mine, {theirs: _tied_by(self.name_of, wanted[name]) for theirs, name in mine.items()}


def _tied_by(name_of: Callable[[str], str], each: Wanted) -> Wanted:
    return each if each.tied_to is None else attrs.evolve(each, tied_to=name_of(each.tied_to))


@final
@attrs.frozen
class Frozen:
    """A source for the frozen parameters alone: those without ``requires_grad`` when the run is attached, such as the base of a LoRA model.

    The other parameters and all buffers are in the checkpoints, as ever. A checkpoint has the fingerprint of the frozen ones, and a resume with
    others is refused, wherever they come from.

    Attributes:
        source: of the frozen parameters.
    """

    source: WeightSource

    def supply(self, wanted: Mapping[str, Wanted]) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield what the source has of these."""
        return self.source.supply(wanted)


@final
@attrs.frozen
class ByScript:
    """The script has loaded these weights itself before it attached the model, and does so at each start. Nothing is supplied or checked."""

    def supply(self, wanted: Mapping[str, Wanted]) -> "Iterator[tuple[str, torch.Tensor]]":  # noqa: ARG002 - of the protocol
        """Yield nothing."""
        return iter(())


def is_list(source: object) -> bool:
    """Whether a source is several, in a `Cast` or not."""
    return is_list(source.source) if isinstance(source, Cast) else hasattr(source, "sources")


def check_wrapped(where: str, source: object) -> None:
    """Raise for what cannot be inside of another source: it says what becomes of weights, and has none.

    Raises:
        InvalidArgument: with the place where it goes.
    """
    if isinstance(source, Frozen | ByScript):
        name = type(source).__qualname__
        raise InvalidArgument(where, expected="a source of weights", found=name,
                              fix="put it around the whole: Frozen(...)" if name == "Frozen" else "list it beside: SeveralSources([..., ByScript()])")  # fmt: skip


def check_begins(source: object, *, where: str, is_outside: bool) -> None:
    """Raise if a run cannot begin with the weights of a source.

    Args:
        source: what was given.
        where: the call, for the message.
        is_outside: whether the model of the run comes from outside at each start.

    Raises:
        InvalidArgument: saying why.

    Examples:
        >>> check_begins(ByScript(), where="restore", is_outside=False)
        Traceback (most recent call last):
            ...
        trainfold.core.errors.InvalidArgument: restore.initial: expected a WeightSource that supplies what is trained, found ByScript; pass one of \
trainfold.weights, such as trainfold.weights.HubDirectory(path); what stays frozen and comes from outside at each start goes to attach(..., weights=Frozen(source))
    """
    if not isinstance(source, WeightSource) or isinstance(source, Frozen | ByScript):
        raise InvalidArgument(
            f"{where}.initial",
            expected="a WeightSource that supplies what is trained",
            found=type(source).__qualname__,
            fix="pass one of trainfold.weights, such as trainfold.weights.HubDirectory(path); what stays frozen and comes from outside at each "
            "start goes to attach(..., weights=Frozen(source))",
        )
    if is_outside:
        raise InvalidArgument(
            f"{where}.initial",
            expected="a run whose checkpoints have its model",
            found="one whose weights come from outside at each start, by attach(..., weights=...)",
            fix="leave one of the two out: initial= begins a run, whose own checkpoints count from then on",
        )
