"""`Transformed`: a source whose tensors have other names or forms than those of the model, such as a model hub's."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import final

import attrs
import torch

from trainfold.backends.weights.opened import opened_weights
from trainfold.core.errors import InvalidArgument, SourceFailed, TrainfoldError, error_text
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import Box
from trainfold.core.transform.apply import is_made_of, table_of
from trainfold.core.transform.expression import Expression, Read, SourceTensor
from trainfold.core.transform.families.tied_heads import ties_among, with_aliases
from trainfold.core.transform.transform import Transform, compose, transform_given
from trainfold.core.weights.account import Account
from trainfold.core.weights.open_weights import OpenSource, OpenWeights
from trainfold.core.weights.several.source_text import pinned
from trainfold.core.weights.source import (
    FIX_OF_SOURCE,
    ListedSource,
    MemoryOf,
    Wanted,
    WeightSource,
    listed_by,
    source_name,
    without_memory,
)
from trainfold.core.weights.supplied import part_of, supplied


@final
@attrs.frozen
class Transformed:
    """A source of which a transform makes the tensors of the model. A rank asks for what its parts are made of, and for no more than a box of each tensor.

    What is put together of several tensors is read for it, one result after the other, if the source can be opened (see `OpenSource`), as those of trainfold can.
    Of another source tensors wait until those are there with which they are put together.

    Attributes:
        source: of the tensors; it lists what it has, as a hub directory and a checkpoint do.
        transform: makes those of the model; see `trainfold.transforms`.

    Examples:
        >>> import trainfold
        >>> from trainfold.transforms import rename
        >>> from trainfold.stores import MemoryStore
        >>> from trainfold.weights import CheckpointWeights
        >>> model, base = torch.nn.Linear(2, 1), MemoryStore()
        >>> _ = trainfold.save(trainfold.attach(torch.nn.ModuleDict({"old": model})).capture(), base)
        >>> new = torch.nn.ModuleDict({"new": torch.nn.Linear(2, 1)})
        >>> source = Transformed(CheckpointWeights(base), rename("old.{name}", "new.{name}"))
        >>> trainfold.attach(new, weights=source).take_weights()
        >>> torch.equal(new["new"].weight, model.weight)
        True
    """

    source: WeightSource
    transform: Transform = attrs.field(validator=lambda _, __, each: transform_given("Transformed.transform", each))

    def specs(self) -> dict[str, LeafSpec]:
        """Name -> dtype and shape of each tensor that comes of what the source has.

        Raises:
            InvalidArgument: if the source does not list what it has.
            InvalidState: if that has not the form that the transform needs.
        """
        return {name: LeafSpec(each.dtype, each.shape) for name, each in self._table(self.source).items()}

    def supply(self, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is made of the source's tensors, for each name that is wanted and comes of them.

        Raises:
            InvalidArgument: if the source does not list what it has.
            InvalidState: if that has not the form that the transform needs, tied tensors differ, or the source supplies another tensor than it lists.
            SourceFailed: for an error of the source's own.
        """
        return self.supply_into(wanted, without_memory)

    def supply_into(self, wanted: Mapping[str, Wanted], memory: MemoryOf) -> Iterator[tuple[str, torch.Tensor]]:
        """See `FillingSource`; what has another name alone is read into its memory."""
        source = pinned(self.source)  # one checkpoint, however often it is asked
        table = self._table(source)
        mine = {name: each for name, each in wanted.items() if name in table}
        for name in [name for name, each in mine.items() if table[name].shape != each.shape]:
            del mine[name]
            yield name, torch.empty(table[name].shape, device="meta")  # it is refused for its shape, and not read
        asked, needs = _asked_for({name: table[name] for name in mine}, mine)
        in_turn = {name for name, sources in needs.items() if len(sources) > 1} if _can_be_opened(source) else set()
        if in_turn:
            needs = {name: sources for name, sources in needs.items() if name not in in_turn}
            asked = _asked_for({name: table[name] for name in needs}, mine)[0]
        yield from _streamed(source, table, mine, asked, needs, memory)
        if in_turn:
            with attrs.evolve(self, source=source).opened() as found:
                parts = {name: (found.ties.get(name, name), mine[name].box) for name in table if name in in_turn}
                found.expect(iter(parts.values()))
                for name, part in parts.items():
                    yield name, found.read(*part)
                found.check()

    @contextmanager
    def opened(self) -> Iterator[OpenWeights]:
        """See `OpenSource`: each part is made of parts of the source when it is asked for.

        Raises:
            InvalidArgument: as in `supply`, and so the others.
        """
        with opened_weights(self.source) as inner:
            whole = self.transform.on(with_aliases(table_of(compose(), inner.specs), inner.ties, self.transform))
            ties = ties_among(whole, inner.ties)
            table = {name: each for name, each in whole.items() if name not in ties}
            read = _checked(self.source, inner)
            yield OpenWeights(
                {name: LeafSpec(each.dtype, each.shape) for name, each in table.items()},
                lambda name, box: table[name].computed(box, read),
                identity=f"{inner.identity}\n{self.transform}" if inner.identity else "",
                ties=ties,
                buffers=frozenset(name for name, each in table.items() if is_made_of(each, inner.buffers)),
                check=inner.check,
                expect=lambda parts: inner.expect(
                    (source.name, of) for name, box in parts for source, of in table[name].reads(box)
                ),
            )

    def _table(self, source: WeightSource) -> dict[str, Expression]:
        """What each result is made of."""
        if not isinstance(source, ListedSource):
            raise InvalidArgument(
                "Transformed.source", expected="a source that lists what it has: HubDirectory, CheckpointWeights, or one with specs()",
                found=repr(source), fix="transform what has the names of files, and wrap the result: Cast(Transformed(HubDirectory(...), ...))")  # fmt: skip
        return self.transform.on(with_aliases(table_of(compose(), listed_by(source)), {}, self.transform))


def _can_be_opened(source: WeightSource) -> bool:
    """Whether a source gives parts in any order; another one would be asked for everything again, for each of them."""
    while isinstance(source, Transformed):
        source = source.source
    return isinstance(source, OpenSource)


def _checked(source: WeightSource, inner: OpenWeights) -> Read:
    """What reads parts of a source, each of which has the form that the source lists."""

    def read(name: str, box: Box) -> torch.Tensor:
        spec = inner.specs[name]
        try:
            found = inner.read(name, box)
        except TrainfoldError:
            raise
        except Exception as error:
            raise SourceFailed(
                f"weights[{name!r}] from {source_name(source)}", expected="a part of a tensor", found=error_text(error), fix=FIX_OF_SOURCE) from error  # fmt: skip
        return part_of(source, Account(source, {name: Wanted(spec.dtype, spec.shape, box)}), name, found)

    return read


def _streamed(  # noqa: PLR0913, PLR0917 - private
    source: WeightSource,
    table: Mapping[str, Expression],
    wanted: Mapping[str, Wanted],
    asked: Mapping[str, Wanted],
    needs: Mapping[str, frozenset[str]],
    memory: MemoryOf,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield results in the order in which the source supplies what they are made of."""
    left = {name: set(sources) for name, sources in needs.items()}  # result -> what is not there yet
    users: dict[str, dict[str, None]] = {name: {} for name in asked}  # source tensor -> results that are not made yet
    for result, sources in needs.items():
        for name in sources:
            users[name][result] = None
    there: dict[str, torch.Tensor] = {}
    same = {name: next(iter(results)) for name, results in users.items() if len(results) == 1}
    same = {name: result for name, result in same.items() if type(table[result]) is SourceTensor}

    def read(name: str, box: Box) -> torch.Tensor:
        spans = zip(box, asked[name].box, strict=True)
        return there[name][tuple(slice(start - at, stop - at) for (start, stop), (at, _) in spans)]

    account = Account(source, asked)
    with closing(supplied(source, asked, lambda name: memory(same[name]) if name in same else None)) as tensors:
        for name, tensor in tensors:
            there[name] = part_of(source, account, name, tensor)
            for result in users[name]:
                left[result].discard(name)
            for result in [each for each in users[name] if not left[each]]:
                yield result, table[result].computed(wanted[result].box, read)
                _forget(result, needs[result], users, there)
            if name in there:
                there[name] = there[name].clone()  # a source may use its memory again for the next one


def _forget(
    result: str, sources: frozenset[str], users: Mapping[str, dict[str, None]], there: dict[str, torch.Tensor]
) -> None:
    """Drop what nothing but a result that is made was waiting for."""
    for name in sources:
        del users[name][result]
        if not users[name]:
            del there[name]


def _asked_for(
    table: Mapping[str, Expression], wanted: Mapping[str, Wanted]
) -> tuple[dict[str, Wanted], dict[str, frozenset[str]]]:
    """What is wanted of the source, and for each result the source tensors that it is made of."""
    asked: dict[str, Wanted] = {}
    needs: dict[str, frozenset[str]] = {}
    for name, expression in table.items():
        reads = list(expression.reads(wanted[name].box))
        needs[name] = frozenset(source.name for source, _ in reads)
        for source, box in reads:
            before = asked.get(source.name)
            hull = box if before is None else _hull(before.box, box)
            asked[source.name] = Wanted(source.dtype, source.shape, hull)
    return asked, needs


def _hull(one: Box, other: Box) -> Box:
    """The smallest box that has both."""
    return tuple((min(low, start), max(high, stop)) for (low, high), (start, stop) in zip(one, other, strict=True))
