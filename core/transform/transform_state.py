"""`transform_state`: a state whose model has other names and pieces, with its optimizer, if that updates each element for itself."""

from collections.abc import Iterable, Mapping
from typing import Any, Final, final

import attrs
import torch

from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.json_values import shown
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import Box, volume, whole_box
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.spec import dtype_name
from trainfold.core.state.state import ModelState, OptimizerState, TrainState
from trainfold.core.tensor_memory import tensor_bytes
from trainfold.core.transform.expression import Expression, SourceTensor, computed_whole
from trainfold.core.transform.families.tied_heads import ties_among, with_aliases
from trainfold.core.transform.transform import Transform, transform_given

ELEMENTWISE: Final = frozenset(
    f"torch.optim.{name.lower()}.{name}"
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""Optimizers whose update of an element depends on that element of the parameter, the gradient and the slots, on counters and on settings alone."""

_COUNTERS: Final = frozenset({"step", "eta", "mu", "mu_product"})  # slots with one number for each parameter
_FIX: Final = "begin at step 0 with the weights alone: trainfold.weights.Transformed(source, rules); or leave the optimizer out: state.evolve(optimizer=None)"


def transform_state(state: TrainState, transform: Transform) -> TrainState:
    """Return a state whose model has the names and pieces that a transform makes, and the optimizer with it.

    Laws: with the inverse it is the state again, to the bit. A step of it is the same step: the moments of a fused projection are those of its parts, put together.

    Args:
        state: of which this process has everything. It is not changed.
        transform: one that has an inverse, so that it only gives names, and puts together, takes apart and rearranges: no cast, no merge of adapters.

    Returns:
        The state. What only has another name is the tensor of the state; all else is fresh memory. The contract and the other components stay as they are.

    Raises:
        InvalidArgument: for a transform without an inverse, a state without a model or in parts, and one with components under ``extra``, which may have the names too.
        InvalidState: naming the parameter: if the optimizer is not one of those that update each element for itself, as Adafactor and Muon are not; if the parts
            of a tensor are in several groups, or have other counters or slots; and as `transform_tensors`.

    Examples:
        >>> import trainfold
        >>> from trainfold.transforms import merge
        >>> model = torch.nn.ModuleDict({"q": torch.nn.Linear(2, 3), "k": torch.nn.Linear(2, 3)})
        >>> state = trainfold.init_state(model, trainfold.optimizer(torch.optim.AdamW, lr=0.1), seed=0)
        >>> fused = transform_state(state, merge(["q.{kind}", "k.{kind}"], "qk.{kind}"))
        >>> {name: tuple(each.shape) for name, each in fused.model.params.items()}
        {'qk.weight': (6, 2), 'qk.bias': (6,)}
    """
    model = _checked(state, transform)
    made = _Made(model, transform)
    kinds = {name: {each in model.params for each in sources} for name, sources in made.sources.items()}
    if mixed := next((name for name, each in kinds.items() if len(each) > 1), None):
        raise InvalidState(mixed, expected="parts that are all parameters, or all buffers", found=", ".join(made.sources[mixed]), fix="leave out the rule")  # fmt: skip
    params = [name for name, each in kinds.items() if each == {True}]
    optimizer = None if state.optimizer is None else _optimizer(state.optimizer, made, params)
    values = made.values({**model.params, **model.buffers}, made.sources)
    whole = ModelState(
        Leaves({name: values[name] for name in params}),
        Leaves({name: each for name, each in values.items() if kinds[name] != {True}}),
        made.ties,
    )
    return state.evolve(model=whole, optimizer=optimizer)


def _checked(state: TrainState, transform: Transform) -> ModelState:
    """The model of a state that can be transformed.

    Raises:
        InvalidArgument: if it cannot.
    """
    if transform_given("transform", transform).inverse is None:
        raise InvalidArgument("transform", expected="a transform that has an inverse, so that no value changes", found=str(transform),
                              fix="leave out what casts, drops or merges adapters; weights alone are cast by trainfold.weights.Transformed(source, rules)")  # fmt: skip
    model = state.model
    leaves = {} if model is None else {**model.params, **model.buffers}
    cut = next((name for name, each in leaves.items() if isinstance(each, Shard)), None)
    if model is None or cut is not None or state.stage is not None:
        found = (
            "none" if model is None else str(state.stage) if cut is None else f"the part that this rank has of {cut}"
        )
        raise InvalidArgument("state", expected="a whole model", found=found, fix="load the run in one process, and transform it there")  # fmt: skip
    if state.extra:
        raise InvalidArgument("state.extra", expected="nothing, because it may have the names of the model too", found=", ".join(state.extra),
                              fix="leave it out: state.evolve(extra={}); and make it again of the new state")  # fmt: skip
    return model


@final
class _Made:
    """What a transform makes of a model.

    Attributes:
        ties: pairs of another name of a result and its first one.
        sources: result -> the tensors of which it is made, in their order.
        changed: the results that are not one of the tensors under another name.
        shapes: tensor of the model -> its shape.
    """

    def __init__(self, model: ModelState, transform: Transform) -> None:
        self._leaves, self._ties, self._transform = {**model.params, **model.buffers}, dict(model.ties), transform
        table = self._table({})
        ties = ties_among(table, self._ties)
        self.ties: Final = tuple(ties.items())
        self.sources: Final = {name: _sources(name, each) for name, each in table.items() if name not in ties}
        self.changed: Final = frozenset(name for name in self.sources if not isinstance(table[name], SourceTensor))
        self.shapes: Final = {name: tuple(each.shape) for name, each in self._leaves.items()}

    def values(self, tensors: Mapping[str, Any], results: Iterable[str]) -> dict[str, Any]:
        """Results of the model's tensors, or of one slot of them."""
        table = self._table(tensors)
        return {name: _value(table[name], tensors) for name in results}

    def _table(self, tensors: Mapping[str, Any]) -> dict[str, Expression]:
        """What the results are made of, where the tensors may have other dtypes than those of the model."""
        found: dict[str, Expression] = {}
        for name, each in self._leaves.items():
            found[name] = SourceTensor(name, dtype_name(tensors.get(name, each).dtype), tuple(each.shape))
        return self._transform.on(with_aliases(found, self._ties))


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


def _optimizer(found: Any, made: _Made, params: list[str]) -> OptimizerState:
    """The optimizer of the results."""
    if not isinstance(found, OptimizerState) or (made.changed and found.kind not in ELEMENTWISE):
        known = ", ".join(sorted(each.rpartition(".")[2] for each in ELEMENTWISE))
        raise InvalidState("optimizer", expected=f"one that updates each element for itself: {known}",
                           found=found.kind if isinstance(found, OptimizerState) else type(found).__qualname__, fix=_FIX)  # fmt: skip
    group_of = {name: number for number, group in enumerate(found.groups) for name in group.params}
    masters: Mapping[str, Any] = {} if found.masters is None else found.masters
    groups: dict[int | None, list[str]] = {}
    slots: dict[str, dict[str, Any]] = {}
    for name in params:
        sources = made.sources[name]
        groups.setdefault(_same(name, "one param group", {each: group_of.get(each) for each in sources}), []).append(
            name
        )
        _same(name, "a gradient at all or at none", {each: each in found.with_grad for each in sources})
        _same(name, "an fp32 master at all or at none", {each: each in masters for each in sources})
        _same(name, "one set of slots", {each: sorted(found.slots.get(each, ())) for each in sources})
        if sources[0] in found.slots:
            slots[name] = dict(found.slots[sources[0]])
    for slot in dict.fromkeys(key for name in made.changed & slots.keys() for key in slots[name]):
        held = {name: each[slot] for name, each in found.slots.items() if slot in each}
        mine = [name for name in slots if name in made.changed and slot in slots[name]]
        values = _counters(slot, held, mine, made) if slot in _COUNTERS else _moments(slot, held, mine, made)
        for name, value in values.items():
            slots[name][slot] = value
    return attrs.evolve(
        found,
        slots=Leaves(slots),
        groups=tuple(attrs.evolve(group, params=tuple(groups.get(at, ()))) for at, group in enumerate(found.groups)),
        masters=None if found.masters is None else Leaves(made.values(masters, [name for name in params if made.sources[name][0] in masters])),
        with_grad=tuple(name for name in params if made.sources[name][0] in found.with_grad),
    )  # fmt: skip


def _moments(slot: str, held: Mapping[str, Any], results: list[str], made: _Made) -> dict[str, Any]:
    """A slot with the elements of its parameter, put together as these are; None where it is not there yet."""
    for name in dict.fromkeys(each for result in results for each in made.sources[result]):
        value, shape = held[name], made.shapes[name]
        if value is not None and (not isinstance(value, torch.Tensor) or tuple(value.shape) != shape):
            raise InvalidState(f"optimizer: {name}.{slot}", expected=f"a tensor of the shape {list(shape)} of its parameter",
                               found=list(value.shape) if isinstance(value, torch.Tensor) else shown(value), fix=_FIX)  # fmt: skip
    there = [name for name in results if not _same(name, f"a {slot} at all or at none", {each: held[each] is None for each in made.sources[name]})]  # fmt: skip
    return {**dict.fromkeys(results), **made.values({name: each for name, each in held.items() if each is not None}, there)}  # fmt: skip


def _counters(slot: str, held: Mapping[str, Any], results: list[str], made: _Made) -> dict[str, Any]:
    """A number that is equal in all parts; each result has its own."""
    found = {}
    for name in results:
        values = {each: held[each] for each in made.sources[name]}
        bits = {each: bytes(tensor_bytes(value)) if isinstance(value, torch.Tensor) else value for each, value in values.items()}  # fmt: skip
        _same(name, f"an equal {slot}", bits, shown_as={each: value.item() if isinstance(value, torch.Tensor) else value for each, value in values.items()})  # fmt: skip
        first = next(iter(values.values()))
        found[name] = first.clone() if isinstance(first, torch.Tensor) else first
    return found


def _same(name: str, what: str, values: Mapping[str, Any], *, shown_as: Mapping[str, Any] | None = None) -> Any:
    """What all parts of a result have.

    Raises:
        InvalidState: naming two of them, if they differ.
    """
    first, *others = values
    other = next((each for each in others if values[each] != values[first]), None)
    if other is not None:
        said = values if shown_as is None else shown_as
        raise InvalidState(f"optimizer: {name}", expected=f"parts that have {what}", found=f"{said[first]} for {first}, {said[other]} for {other}", fix=_FIX)  # fmt: skip
    return values[first]
