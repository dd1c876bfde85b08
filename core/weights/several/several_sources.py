"""`SeveralSources`: several sources of weights as one, of which each tensor comes from exactly one. `specs_of`: the list that a source is."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, final

import attrs

from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.weights.several.cover import cover
from trainfold.core.weights.several.load_spec import LoadSpec
from trainfold.core.weights.several.source_text import described
from trainfold.core.weights.source import ListedSource, MemoryOf, Wanted, WeightSource, without_memory
from trainfold.core.weights.wrapped import ByScript, Cast

if TYPE_CHECKING:
    import torch


def _specs_given(given: Sequence[LoadSpec | WeightSource]) -> tuple[LoadSpec, ...]:
    found = tuple(each if isinstance(each, LoadSpec) else LoadSpec(each) for each in given)
    if not found:
        raise InvalidArgument(
            "sources",
            expected="one source or more",
            found="an empty list",
            fix="name a source; ByScript() keeps what the script gave",
        )
    return found


@final
@attrs.frozen
class SeveralSources:
    """Several sources as one. Each tensor of the model comes from exactly one of them, which is known before anything is read.

    `ByScript` is one of them: what it is for keeps the value that the script gave it, such as a new head. As ``LoadSpec(ByScript(), names="head.{name}")`` that
    is said by name, and as ``ByScript()`` it is whatever no other source has.

    Attributes:
        sources: them, in order; a source alone stands for ``LoadSpec(source)``.

    Examples:
        >>> import torch
        >>> class Ones:
        ...     def supply(self, wanted):
        ...         return ((name, torch.ones(each.shape)) for name, each in wanted.items())
        >>> source = SeveralSources([LoadSpec(Ones(), names="body.{name}"), LoadSpec(ByScript(), names="head.{name}")])
        >>> dict(source.supply({name: Wanted("float32", (1,), ((0, 1),)) for name in ("body.w", "head.w")}))
        {'body.w': tensor([1.])}
    """

    sources: tuple[LoadSpec, ...] = attrs.field(converter=_specs_given)

    def specs(self) -> dict[str, LeafSpec]:
        """Name -> dtype and shape of each tensor of all sources, as it comes.

        Raises:
            InvalidArgument: for a source that does not list what it has.
            InvalidState: as in `supply`.
        """
        found: dict[str, LeafSpec] = {}
        for spec in self.sources:
            if not isinstance(spec.source, ListedSource):
                raise InvalidArgument(
                    "SeveralSources.specs", expected="sources that list what they have", found=described(spec.source),
                    fix="leave it out, or give it specs(), which returns name -> dtype and shape")  # fmt: skip
            mine = {name: each for name, each in spec.source.specs().items() if spec.takes(name)}
            twice = [name for name in mine if name in found and not spec.overrides]
            if twice:
                raise InvalidState(
                    f"weights[{twice[0]!r}]", expected="one source", found=f"{described(spec.source)} and an earlier one",
                    fix="leave it out of one by LoadSpec(names=...), or declare the later one: LoadSpec(..., overrides=True)")  # fmt: skip
            found |= mine
        return found

    def supply(self, wanted: Mapping[str, Wanted]) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield what each source has of what it is for, one source after the other.

        Raises:
            InvalidState: if two sources have one tensor, and the later is not declared to override.
        """
        return self.supply_into(wanted, without_memory)

    def supply_into(self, wanted: Mapping[str, Wanted], memory: MemoryOf) -> "Iterator[tuple[str, torch.Tensor]]":
        """See `FillingSource`."""
        from trainfold.core.weights.supplied import supplied  # late: it imports torch

        coverage = cover(self.sources, wanted)
        coverage.check_overlaps()
        for spec, use in zip(self.sources, coverage.uses, strict=True):
            mine = {name: wanted[name] for name in use.names}
            if mine and not isinstance(spec.source, ByScript):
                yield from supplied(spec.source, mine, memory)


def specs_of(source: WeightSource) -> tuple[LoadSpec, ...]:
    """The list that a source is: its own, also in a `Cast`, which is around each of them then; or the source alone, of which what the model does not have is not used.

    Examples:
        >>> class Mine:
        ...     def supply(self, wanted):
        ...         return iter(())
        >>> from trainfold.core.weights.several.source_text import described
        >>> [described(each.source) for each in specs_of(Cast(SeveralSources([Mine(), ByScript()])))]
        ['Cast(Mine())', 'ByScript()']
    """
    return _list_in(source) or (LoadSpec(source, strict="any"),)


def _list_in(source: WeightSource) -> tuple[LoadSpec, ...]:
    """The list of sources that a source is; empty if it is one."""
    if isinstance(source, Cast):
        inner = _list_in(source.source)
        return tuple(each if isinstance(each.source, ByScript) else attrs.evolve(each, source=Cast(each.source)) for each in inner)  # fmt: skip
    return source.sources if isinstance(source, SeveralSources) else ()
