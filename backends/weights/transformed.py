"""`Transformed`: a source whose tensors have other names or forms than those of the model, such as a model hub's."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import final

import attrs
import torch

from trainfold.backends.weights.opened import opened_weights
from trainfold.core.errors import InvalidArgument
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import Box
from trainfold.core.transform.apply import table_of, transform_specs
from trainfold.core.transform.expression import Expression
from trainfold.core.transform.families.tied_heads import with_aliases
from trainfold.core.transform.transform import Transform, compose
from trainfold.core.weights.account import Account
from trainfold.core.weights.open_weights import OpenWeights
from trainfold.core.weights.source import ListedSource, Wanted, WeightSource, listed_by
from trainfold.core.weights.supplied import part_of, supplied


@final
@attrs.frozen
class Transformed:
    """A source of which a transform makes the tensors of the model. A rank asks for what its parts are made of, and for no more than a box of each tensor.

    Tensors wait until those are there with which they are put together.

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
    transform: Transform

    def specs(self) -> dict[str, LeafSpec]:
        """Name -> dtype and shape of each tensor that comes of what the source has.

        Raises:
            InvalidArgument: if the source does not list what it has.
            InvalidState: if that has not the form that the transform needs.
        """
        return transform_specs(self.transform, self._listed())

    def supply(self, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is made of the source's tensors, for each name that is wanted and comes of them.

        Raises:
            InvalidArgument: if the source does not list what it has.
            InvalidState: if that has not the form that the transform needs, tied tensors differ, or the source supplies another tensor than it lists.
            SourceFailed: for an error of the source's own.
        """
        table = table_of(self.transform, self._listed())
        mine = {name: each for name, each in wanted.items() if name in table}
        for name in [name for name, each in mine.items() if table[name].shape != each.shape]:
            del mine[name]
            yield name, torch.empty(table[name].shape, device="meta")  # it is refused for its shape, and not read
        asked, needs = _asked_for({name: table[name] for name in mine}, mine)
        left = {name: set(sources) for name, sources in needs.items()}  # result -> what is not there yet
        users: dict[str, dict[str, None]] = {
            name: {} for name in asked
        }  # source tensor -> results that are not made yet
        for result, sources in needs.items():
            for name in sources:
                users[name][result] = None
        there: dict[str, torch.Tensor] = {}

        def read(name: str, box: Box) -> torch.Tensor:
            spans = zip(box, asked[name].box, strict=True)
            return there[name][tuple(slice(start - at, stop - at) for (start, stop), (at, _) in spans)]

        account = Account(self.source, asked)
        with closing(supplied(self.source, asked)) as tensors:
            for name, tensor in tensors:
                there[name] = part_of(self.source, account, name, tensor)
                for result in users[name]:
                    left[result].discard(name)
                for result in [each for each in users[name] if not left[each]]:
                    yield result, table[result].computed(mine[result].box, read)
                    _forget(result, needs[result], users, there)
                if name in there:
                    there[name] = there[name].clone()  # a source may use its memory again for the next one

    @contextmanager
    def opened(self) -> Iterator[OpenWeights]:
        """See `OpenSource`: each part is made of parts of the source when it is asked for.

        Raises:
            InvalidArgument: as in `supply`, and so the others.
        """
        with opened_weights(self.source) as inner:
            table = self.transform.on(with_aliases(table_of(compose(), inner.specs), inner.ties, self.transform))
            specs = {name: LeafSpec(each.dtype, each.shape) for name, each in table.items()}
            identity = f"{inner.identity}\n{self.transform}" if inner.identity else ""
            yield OpenWeights(
                specs, lambda name, box: table[name].computed(box, inner.read), identity=identity, check=inner.check
            )

    def _listed(self) -> Mapping[str, LeafSpec]:
        """What the source has."""
        if not isinstance(self.source, ListedSource):
            raise InvalidArgument(
                "Transformed.source", expected="a source that lists what it has: HubDirectory, CheckpointWeights, or one with specs()",
                found=repr(self.source), fix="transform what has the names of files, and wrap the result: Cast(Transformed(HubDirectory(...), ...))")  # fmt: skip
        return listed_by(self.source)


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
