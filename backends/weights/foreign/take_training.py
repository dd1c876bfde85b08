"""`take_training`: a state with the model, the optimizer and the step of another program's checkpoint."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final, final

import attrs

from trainfold.backends.ranks.all_ranks import on_all_ranks
from trainfold.backends.ranks.in_process import ALONE
from trainfold.backends.user_warning import warn_user
from trainfold.backends.weights.foreign.settings import are_equal, setting_like
from trainfold.backends.weights.foreign.take_slots import check_none_missing, taken_slots
from trainfold.backends.weights.foreign.training import NO_SCHEDULER, SavedGroup, Training
from trainfold.backends.weights.take import take_weights
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.layout.world import Collectives
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.names.wrapper_names import canonical_name
from trainfold.core.state.state import Opaque, OptimizerState, ParamGroup, Progress, TrainState

_SHOWN: Final = 8  # names in a message
_OF_SCHEDULERS: Final = {
    "initial_lr",
    "max_lr",
    "min_lr",
    "base_momentum",
    "max_momentum",
    "swa_lr",
}  # which write them into groups
_OF_TORCH: Final = {
    "param_names",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "maximize",
    "decoupled_weight_decay",
}  # not in each of its versions


def take_training(state: TrainState, training: Training, *, collectives: Collectives | None = None) -> TrainState:
    """Return a state with the model, the optimizer, the scheduler and the step of another program's checkpoint.

    ``live.restore(take_training(live.capture(), training))`` continues a live run so. A rank reads its parts only. Hyperparameters are those of the
    checkpoint where the optimizer here has them: a tensor where it has a tensor, such as a learning rate that the loop writes, and a number for a number. Samples, epochs, the position in the data and random streams stay those of the state: no other program's can be carried over, so the
    run continues with the same numbers from there, and not with the same batches.

    Args:
        state: of a run with the same model and an optimizer over the same parameters; of the class that saved, which no such checkpoint names.
        training: print it to see what is taken.
        collectives: the ranks, all of which call. None for this process alone.

    Raises:
        InvalidState: if tensors or parameters are missing on either side, their number, order or shapes differ, groups here join parameters with other
            hyperparameters, or a slot is missing that an optimizer of torch makes. Nothing is taken then.
        InvalidArgument: if the state has no model, or an optimizer that is more than slots and groups.

    Examples:
        >>> import tempfile, torch, trainfold
        >>> from trainfold.weights import dcp_training, take_training, write_dcp_directory
        >>> sgd = trainfold.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        >>> model, folder = torch.nn.Linear(2, 1), tempfile.mkdtemp()
        >>> theirs = trainfold.init_state(model, sgd, seed=0)
        >>> write_dcp_directory(folder, theirs.evolve(trainer=trainfold.Progress(step=7)))
        >>> print(training := dcp_training(folder))  # doctest: +ELLIPSIS
        /...:
          model      2 tensors
          optimizer  0 values of 2 parameters, by name
          step       7
        >>> take_training(trainfold.init_state(torch.nn.Linear(2, 1), sgd, seed=1), training).trainer.step
        7
    """
    taken: list[Any] = []
    optimizer, world = state.optimizer, ALONE if collectives is None else collectives
    whole = _whole(state, world)
    if optimizer is not None and training.slots is not None:
        if not isinstance(optimizer, OptimizerState):
            raise InvalidArgument("take_training.state", expected="an optimizer with slots and groups", found=type(optimizer).__qualname__,
                                  fix="take the model alone: take_weights(state, training.model)")  # fmt: skip
        on_all_ranks(
            world, lambda: taken.append(_optimizer(state, optimizer, training, whole)), doing="take its optimizer"
        )
        state = state.evolve(optimizer=taken[0])
    state = take_weights(state, training.model, collectives=collectives)
    if unused := _unused(whole, training):
        warn_user(
            f"{training.where}: the model here has no {', '.join(unused[:_SHOWN])}{' ...' if unused[_SHOWN:] else ''}: {len(unused)} tensors that were saved are not taken"
        )
    if training.step is not None:
        state = state.evolve(trainer=attrs.evolve(state.trainer or Progress(), step=training.step))
    if training.scheduler is not None and isinstance(state.scheduler, Opaque):
        state = state.evolve(scheduler=Opaque(dict(training.scheduler)))
    elif training.scheduler is not None:
        warn_user(
            f"{training.where}: the scheduler that was saved is not taken: there is none here that is an object of torch"
        )
    elif state.scheduler is not None and (
        name := next((name for name, reason in training.left_out if reason == NO_SCHEDULER), None)
    ):
        warn_user(f"{training.where}: the scheduler here stays as it is: of {name}, {NO_SCHEDULER}")
    return state


@final
@attrs.frozen
class _Names:
    """The names of the whole model, of which a rank of a pipeline has some.

    Attributes:
        model: of its tensors.
        groups: of the parameters in each group of the optimizer.
        is_in_stages: whether ranks have stages of it.
    """

    model: frozenset[str]
    groups: tuple[tuple[str, ...], ...]
    is_in_stages: bool


def _whole(state: TrainState, world: Collectives) -> _Names:
    """The names that all ranks have.

    Raises:
        InvalidState: if stages have another number of groups.
    """
    groups = state.optimizer.groups if isinstance(state.optimizer, OptimizerState) else ()
    mine = _Names(
        frozenset() if state.model is None else frozenset({*state.model.params, *state.model.buffers}),
        tuple(each.params for each in groups),
        state.stage is not None,
    )
    nothing = _Names(frozenset(), (), is_in_stages=False)
    told = [
        each
        for each in on_all_ranks(world, lambda: mine if mine.is_in_stages else nothing, doing="name its tensors")
        if each.is_in_stages
    ]
    if not told:
        return mine
    if len({len(each.groups) for each in told}) > 1:
        raise InvalidState("optimizer.groups", expected="the groups of the whole model in one order on every stage", found=f"numbers of groups: {[len(each.groups) for each in told]}",
                           fix="give the optimizer of each stage all of them; one without parameters there is an empty list")  # fmt: skip
    together = (dict.fromkeys(chain.from_iterable(each)) for each in zip(*(each.groups for each in told), strict=True))
    return _Names(frozenset().union(*(each.model for each in told)), tuple(map(tuple, together)), is_in_stages=True)


def _optimizer(state: TrainState, mine: OptimizerState, training: Training, whole: _Names) -> OptimizerState:
    groups = _numbered(mine, training, whole) if training.is_numbered else _named_as_here(training, whole)
    hyper = {str(name): group.hyper for group in groups for name in group.params}
    names = dict.fromkeys(chain.from_iterable(whole.groups))
    missing, unknown = [each for each in names if each not in hyper], [each for each in hyper if each not in names]
    if missing or unknown:
        raise InvalidState("optimizer", expected=f"the {len(names)} parameters of the optimizer here",
                           found=f"{len(hyper)} in {training.where}; missing {missing[:_SHOWN]}, unexpected {unknown[:_SHOWN]}",
                           fix="make the optimizer of the parameters that it was saved with")  # fmt: skip
    order = {
        number: str(name)
        for theirs, group in zip(training.groups, groups, strict=True)
        for number, name in zip(theirs.params, group.params, strict=True)
    }
    _check_class(mine, groups, training)
    taken = [_group(each, names, hyper) for each, names in zip(mine.groups, whole.groups, strict=True)]
    settings = {name: group.hyper for group, names in zip(taken, whole.groups, strict=True) for name in names}
    slots = taken_slots(state, training, {str(number): name for number, name in order.items()}, settings)
    check_none_missing(mine.kind, state, slots, settings, training.where)
    return attrs.evolve(mine, slots=Leaves({name: slots[name] for name in names if name in slots}), groups=tuple(taken))


def _unused(whole: _Names, training: Training) -> list[str]:
    """Tensors of the saved model that the model here has not. Where a directory has the optimizer beside the model, under no name, only what has the model's first names counts."""
    mine = {*map(canonical_name, whole.model)}
    found = [name for name in training.model.specs() if canonical_name(name) not in mine]
    slots = () if training.slots is None else tuple(training.slots.specs())
    if slots and any(name.endswith(f".{slots[0]}") for name in found):
        first = {name.partition(".")[0] for name in mine}
        found = [name for name in found if name.partition(".")[0] in first]
    return found


def _named_as_here(training: Training, whole: _Names) -> tuple[SavedGroup, ...]:
    """The saved groups, whose names have no part that could be the prefix of a wrapper, with the names of the optimizer here."""
    names = list(chain.from_iterable(whole.groups))
    full = {canonical_name(name): name for name in names}
    if len(full) < len(names):
        return training.groups
    return tuple(
        attrs.evolve(each, params=tuple(full.get(str(name), name) for name in each.params)) for each in training.groups
    )


def _numbered(mine: OptimizerState, training: Training, whole: _Names) -> tuple[SavedGroup, ...]:
    """The saved groups with names: the n-th parameter of a group here is the n-th that was saved."""
    if whole.is_in_stages:
        raise InvalidState("optimizer", expected="names of parameters, where each rank has some of them", found=f"their order alone, in {training.where}",
                           fix="take it in one process that has the whole model, save a run there, and continue from that")  # fmt: skip
    here, there = [len(each.params) for each in mine.groups], [len(each.params) for each in training.groups]
    if here != there:
        raise InvalidState("optimizer.groups", expected=f"groups of {here} parameters, as here", found=f"groups of {there} in {training.where}",
                           fix="make the optimizer of the same parameters, in the same groups and order: it was saved without their names")  # fmt: skip
    return tuple(SavedGroup(each.params, saved.hyper) for each, saved in zip(mine.groups, training.groups, strict=True))


def _check_class(mine: OptimizerState, groups: Sequence[SavedGroup], training: Training) -> None:
    """Raise if the saved optimizer has hyperparameters that this one has not, as one of another class has. A checkpoint does not name the class."""
    here = {key for group in mine.groups for key in group.hyper}
    there = {key for group in groups if group.params for key in group.hyper}
    if unknown := sorted(there - here - _OF_SCHEDULERS - _OF_TORCH):
        raise InvalidState("optimizer", expected=f"one with the hyperparameters of the optimizer here: {', '.join(sorted(here))}",
                           found=f"also {', '.join(map(str, unknown[:_SHOWN]))} in {training.where}",
                           fix="make the optimizer of the class that saved, and with the keys that its groups had")  # fmt: skip


def _group(mine: ParamGroup, names: Sequence[str], hyper: Mapping[str, Mapping[str, Any]]) -> ParamGroup:
    """A group with the saved hyperparameters; one that the saved program did not have keeps the value that it has here.

    Args:
        mine: the group on this rank.
        names: of its parameters on all ranks.
        hyper: name -> what was saved.
    """
    found = dict(mine.hyper)
    if names:
        found = _settings(mine.hyper, hyper[names[0]], names[0])
    for name in names:
        other = _settings(mine.hyper, hyper[name], name)
        if keys := [key for key in found if not are_equal(other[key], found[key])]:
            raise InvalidState(f"optimizer: {name}", expected=f"the {', '.join(keys)} of {names[0]}, which is in the same group here",
                               found=[other[key] for key in keys], fix="make groups of the parameters as they were saved")  # fmt: skip
    return attrs.evolve(mine, hyper=found)


def _settings(mine: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {
        key: setting_like(value, theirs[key], f"optimizer: {name}.{key}") if key in theirs else value
        for key, value in mine.items()
    }
