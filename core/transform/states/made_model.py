"""`MadeModel`: which results a transform makes of the tensors of a model, each element once, and which of them are tied."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final, final

import torch

from trainfold.core.errors import InvalidState
from trainfold.core.layout.slices import Box, volume, whole_box
from trainfold.core.state.spec import dtype_name
from trainfold.core.state.state import ModelState
from trainfold.core.transform.expression import Expression, SameAs, SourceTensor, computed_whole
from trainfold.core.transform.families.tied_heads import with_aliases
from trainfold.core.transform.transform import Transform


@final
class MadeModel:
    """What a transform makes of a model. Results that are made of the same elements in the same way are tied.

    Args:
        model: whose tensors are whole.
        transform: what makes the results.

    Attributes:
        ties: another name of a result -> its first one.
        sources: result -> the tensors of which it is made, in their order.
        changed: the results that are not one of the tensors under another name.
        shapes: tensor of the model -> its shape.
        places: tensor of the model, or another name of one -> the results that have something of it.
        renamed: tensor of the model, or another name of one -> the first result that it is.

    Raises:
        InvalidState: naming the result, if an element of it is made of several, or an element of the model is in several places that are not tied.
    """

    def __init__(self, model: ModelState, transform: Transform) -> None:
        self._leaves, self._ties, self._transform = {**model.params, **model.buffers}, dict(model.ties), transform
        table = self._table({})
        first = dict[Expression, str]()
        self.ties: Final = {name: kept for name, each in table.items() if (kept := first.setdefault(each, name)) != name}  # fmt: skip
        apart = {name: each for name, each in table.items() if name not in self.ties}
        self.sources: Final = {name: _sources(name, each) for name, each in apart.items()}
        self.changed: Final = frozenset(name for name, each in apart.items() if not isinstance(each, SourceTensor))
        self.shapes: Final = {name: tuple(each.shape) for name, each in self._leaves.items()}
        self._check_once(apart)
        of_names = {
            name: SourceTensor(name, *_form(self._leaves[self._ties.get(name, name)]))
            for name in (*self._leaves, *self._ties)
        }
        every = {name: _kept(each) for name, each in transform.on(of_names).items()}
        self.places: Final = dict[str, list[str]]()
        for name, each in every.items():
            for old in {source.name: None for source, _ in each.reads(whole_box(each.shape))}:
                self.places.setdefault(old, []).append(name)
        self.renamed: Final = {
            old: each[0] for old, each in self.places.items() if isinstance(every[each[0]], SourceTensor)
        }

    def values(self, tensors: Mapping[str, Any], results: Iterable[str]) -> dict[str, Any]:
        """Results of the model's tensors, or of one slot of them."""
        table = self._table(tensors)
        return {name: _value(table[name], tensors) for name in results}

    def _table(self, tensors: Mapping[str, Any]) -> dict[str, Expression]:
        """What the results are made of, where the tensors may have other dtypes than those of the model."""
        found: dict[str, Expression] = {}
        for name, each in self._leaves.items():
            found[name] = SourceTensor(name, _form(tensors.get(name, each))[0], tuple(each.shape))
        return self._transform.on(with_aliases(found, self._ties))

    def _check_once(self, table: Mapping[str, Expression]) -> None:
        """Raise if elements of the model would be in two places, each of which would be trained for itself."""
        reads = Counter[str]()
        for each in table.values():
            for source, part in each.reads(whole_box(each.shape)):
                reads[source.name] += volume(part)
        for name, count in reads.items():
            if count > volume(whole_box(self.shapes[name])):
                users = [result for result, sources in self.sources.items() if name in sources]
                aliases = [alias for alias, kept in self._ties.items() if kept == name]
                raise InvalidState(
                    users[-1], expected="elements of its own, or a tie: the same pieces as the other name has",
                    found=f"elements of {name}{', which is tied to ' + ', '.join(aliases) if aliases else ''}, in {' and '.join(users)}",
                    fix="give all names of a tied tensor the same pieces, such as transpose for each of them; or load the weights alone into a model that is not tied: trainfold.weights.Transformed(source, rules)")  # fmt: skip


def _kept(each: Expression) -> Expression:
    """A result without the other names that a tie leaves out."""
    return _kept(each.of) if isinstance(each, SameAs) else each


def _form(leaf: Any) -> tuple[str, tuple[int, ...]]:
    return dtype_name(leaf.dtype), tuple(leaf.shape)


def _value(each: Expression, tensors: Mapping[str, Any]) -> Any:
    if isinstance(each, SourceTensor):
        return tensors[each.name]
    memory = set[int]()

    def read(name: str, box: Box) -> torch.Tensor:
        memory.add(tensors[name].untyped_storage().data_ptr())
        return tensors[name].detach()[tuple(slice(*side) for side in box)]  # type: ignore[no-any-return]

    found = computed_whole(each, read)
    is_view = found.untyped_storage().data_ptr() in memory
    return found.clone(memory_format=torch.contiguous_format) if is_view else found


def _sources(name: str, each: Expression) -> tuple[str, ...]:
    """The tensors of which a result is made.

    Raises:
        InvalidState: if an element is made of two, as that of a tie of tensors that are not one.
    """
    box = whole_box(each.shape)
    reads = list(each.reads(box))
    names = tuple(dict.fromkeys(source.name for source, _ in reads))
    if sum(volume(part) for _, part in reads) != volume(box):
        raise InvalidState(name, expected="elements that are each one of the model's", found=f"several for each, of {', '.join(names)}",
                           fix="tie the weights in the model before, or leave out the tie")  # fmt: skip
    return names
