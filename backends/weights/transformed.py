"""`Transformed`: a source whose tensors have other names or forms than those of the model, such as a model hub's."""

from collections.abc import Iterator, Mapping
from typing import final

import attrs
import torch

from trainfold.core.errors import InvalidArgument
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import Box, whole_box
from trainfold.core.transform.expression import Expression, SourceTensor
from trainfold.core.transform.transform import Transform
from trainfold.core.weights.source import ListedSource, Wanted, WeightSource


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
        return {name: LeafSpec(each.dtype, each.shape) for name, each in self._table().items()}

    def supply(self, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is made of the source's tensors, for each name that is wanted and comes of them.

        Raises:
            InvalidArgument: if the source does not list what it has.
            InvalidState: if that has not the form that the transform needs, or tied tensors differ.
        """
        table = self._table()
        needs: dict[str, set[str]] = {}
        asked: dict[str, Wanted] = {}
        for name, each in wanted.items():
            if name not in table:
                continue
            if table[name].shape != each.shape:
                yield name, torch.empty(table[name].shape, device="meta")  # it is refused for its shape, and not read
                continue
            needs[name] = set()
            for source, box in table[name].reads(each.box):
                before = asked.get(source.name)
                hull = box if before is None else _hull(before.box, box)
                asked[source.name] = Wanted(source.dtype, source.shape, hull)
                needs[name].add(source.name)
        there: dict[str, tuple[torch.Tensor, Box]] = {}

        def read(name: str, box: Box) -> torch.Tensor:
            tensor, held = there[name]
            return tensor[tuple(slice(start - at, stop - at) for (start, stop), (at, _) in zip(box, held, strict=True))]

        for name, tensor in self.source.supply(asked):
            shape = asked[name].shape
            there[name] = tensor, whole_box(shape) if tuple(tensor.shape) == shape else asked[name].box
            for done in [each for each, sources in needs.items() if sources <= there.keys()]:
                yield done, table[done].computed(wanted[done].box, read)
                del needs[done]
            still = set().union(*needs.values())
            for used in [each for each in there if each not in still]:
                del there[used]

    def _table(self) -> Mapping[str, Expression]:
        """What each result is made of."""
        if not isinstance(self.source, ListedSource):
            raise InvalidArgument(
                "Transformed.source", expected="a source that lists what it has: HubDirectory, CheckpointWeights, or one with specs()",
                found=repr(self.source), fix="transform what has the names of files, and wrap the result: Cast(Transformed(HubDirectory(...), ...))")  # fmt: skip
        specs = self.source.specs()
        return self.transform.on({name: SourceTensor(name, each.dtype, each.shape) for name, each in specs.items()})


def _hull(one: Box | None, other: Box) -> Box:
    """The smallest box that has both."""
    if one is None:
        return other
    return tuple((min(low, start), max(high, stop)) for (low, high), (start, stop) in zip(one, other, strict=True))
