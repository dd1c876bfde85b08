"""Components: the named parts of a state, and how to select and merge them."""

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, TypeVar

import attrs

from trainfold.core.component_names import BUILTIN_COMPONENTS, in_order, is_extra_name, validate_components
from trainfold.core.errors import InvalidArgument
from trainfold.core.state.masters import with_fitting_masters
from trainfold.core.state.state import OptimizerState, TrainState

S = TypeVar("S")
_BUILTIN = attrgetter(*BUILTIN_COMPONENTS)


def components_of(state: TrainState) -> dict[str, Any]:
    """Return the components of a state by name, built-in ones first.

    Examples:
        >>> from trainfold import Progress
        >>> list(components_of(TrainState(trainer=Progress(), extra={"ema": {}})))
        ['trainer', 'ema']
    """
    found = {name: value for name, value in zip(BUILTIN_COMPONENTS, _BUILTIN(state), strict=True) if value is not None}
    for name, component in state.extra.items():
        _check_extra_name(name)
        found[name] = component
    return found


def state_of(components: Mapping[str, Any]) -> TrainState:
    """Make a state from named components: the inverse of `components_of`.

    Examples:
        >>> state_of({"ema": 1}).extra
        {'ema': 1}
    """
    builtin = {name: value for name, value in components.items() if name in BUILTIN_COMPONENTS}
    extra = {name: value for name, value in components.items() if name not in BUILTIN_COMPONENTS}
    return TrainState(**builtin, extra=extra)


def select(state: TrainState, components: Iterable[str] | None) -> TrainState:
    """Return the part of a state that has only these components.

    Law: ``merge(select(s, A), select(s, not A)) == s``.

    Args:
        state: the whole.
        components: names; None for all. The selection may be empty. A known component that this state lacks is
            ignored.

    Returns:
        A state whose other components are absent; its leaves are those of ``state``, not copies.

    Raises:
        UnknownComponent: for a name that is neither built in nor a component of this state, or of the whole that it was selected from.

    Examples:
        >>> from trainfold import Progress
        >>> s = TrainState(trainer=Progress(step=1), extra={"ema": 2})
        >>> select(s, ["ema"])
        TrainState(model=None, optimizer=None, scheduler=None, trainer=None, dataset=None, rng=None, extra={'ema': 2})
    """
    chosen = validate_components(components, declared=all_of(state))
    if chosen is None:
        return state
    every = components_of(state)
    part = state_of({name: component for name, component in every.items() if name in chosen})
    without = state.origin.without | (every.keys() - {*chosen})
    origin = attrs.evolve(state.origin, without=without, outside=state.origin.outside - {*chosen})
    return part.evolve(contract=state.contract, origin=origin, stage=state.stage)


def all_of(state: TrainState) -> tuple[str, ...]:
    """The names of the components of the whole that a state was selected from; of any other state, of its own.

    Examples:
        >>> from trainfold import Progress
        >>> all_of(select(TrainState(trainer=Progress(), extra={"ema": 2}), ["ema"]))
        ('trainer', 'ema')
    """
    held = components_of(state)
    return tuple(in_order([*held, *sorted(state.origin.without - held.keys())]))


def names_to_save(state: TrainState, components: S) -> S | tuple[str, ...]:
    """The names that a save or a load means: those that it selects. Where it selects nothing, they are all (None), without what comes from outside.

    Examples:
        >>> names_to_save(TrainState(), ["model"]), names_to_save(TrainState(), None)
        (['model'], None)
    """
    outside = state.origin.outside
    return (
        components
        if components is not None or not outside
        else tuple(name for name in components_of(state) if name not in outside)
    )


def merge(base: TrainState, part: TrainState) -> TrainState:
    """Return a state with the components of ``part``, and those of ``base`` that ``part`` lacks.

    Where weights and optimizer come from different sides, fp32 masters that do not round to the weights are cloned from them; otherwise the next
    step would revert the weights.

    Examples:
        >>> from trainfold import Progress
        >>> merge(TrainState(trainer=Progress(step=1), rng=7), TrainState(trainer=Progress(step=2))).trainer.step
        2
    """
    whole = state_of({**components_of(base), **components_of(part)})
    new_weights = part.model is not None and part.model is not base.model and part.optimizer is None
    new_optimizer = part.optimizer is not None and part.optimizer is not base.optimizer and part.model is None
    if (new_weights or new_optimizer) and whole.model is not None and isinstance(whole.optimizer, OptimizerState):
        whole = whole.evolve(optimizer=with_fitting_masters(whole.optimizer, whole.model.params))
    origin = base.origin if part.trainer is None else part.origin  # the origin of the counters
    without = (base.origin.without | part.origin.without) - components_of(whole).keys()
    origin = origin if origin.without == without else attrs.evolve(origin, without=without)
    return whole.evolve(contract={**base.contract, **part.contract}, origin=origin, stage=base.stage)


def _check_extra_name(name: object) -> None:
    if not is_extra_name(name):
        raise InvalidArgument(
            f"state.extra[{name!r}]",
            expected="an identifier in ASCII that is not a built-in component's name",
            found=repr(name),
            fix="rename the component: its name becomes a file name and a stable key",
        )
