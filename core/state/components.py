"""Components: the named parts of a state, and how to select and merge them."""

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from operator import attrgetter
from typing import Any

from trainfold.core.checks import names_given, nearest
from trainfold.core.component_names import BUILTIN_COMPONENTS, is_extra_name
from trainfold.core.errors import InvalidArgument, UnknownComponent
from trainfold.core.state.masters import with_fitting_masters
from trainfold.core.state.state import OptimizerState, TrainState

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


def in_order(names: Iterable[str]) -> list[str]:
    """Sort names of components as `components_of` does: built-in ones first, the others in the given order.

    Examples:
        >>> in_order(["ema", "rng", "model"])
        ['model', 'rng', 'ema']
    """
    given = list(names)
    builtin = [name for name in BUILTIN_COMPONENTS if name in given]
    return [*builtin, *(name for name in given if name not in builtin)]


def state_of(components: Mapping[str, Any]) -> TrainState:
    """Make a state from named components: the inverse of `components_of`.

    Examples:
        >>> state_of({"ema": 1}).extra
        {'ema': 1}
    """
    builtin = {name: value for name, value in components.items() if name in BUILTIN_COMPONENTS}
    extra = {name: value for name, value in components.items() if name not in BUILTIN_COMPONENTS}
    return TrainState(**builtin, extra=extra)


def validate_components(
    names: Iterable[str] | None, *, declared: Collection[str] = (), where: str = "components"
) -> tuple[str, ...] | None:
    """Check a selection when it is configured, before any state exists.

    Args:
        names: component names, or None for all of them.
        declared: the names of the user's own components.
        where: the argument, for the message.

    Returns:
        The names, each once, in the order given; None for all.

    Raises:
        UnknownComponent: naming every unknown component, and the known ones.

    Examples:
        >>> validate_components(["model", "ema"], declared=["ema"])
        ('model', 'ema')
        >>> validate_components(["data_loader"])
        Traceback (most recent call last):
            ...
        trainfold.core.errors.UnknownComponent: components: expected names among ['model', 'optimizer', 'scheduler', \
'trainer', 'dataset', 'rng'], found ['data_loader']; correct the name, or declare the component under `extra`
    """
    chosen = names_given(names)
    if chosen is None:
        return None
    known = [*BUILTIN_COMPONENTS, *declared]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise UnknownComponent(
            where,
            expected=f"names among {known}",
            found=unknown,
            fix=f"{nearest(unknown, known)}correct the name, or declare the component under `extra`",
        )
    return chosen


def check_likely(names: Iterable[str] | None) -> tuple[str, ...] | None:
    """Check a selection before the user's own components are known.

    It refuses a name that no component can have, and a name that is nearly that of a built-in component. A user's own
    component may have a similar name if it differs by an index, or by a word after an underscore.

    Returns:
        The names, each once; None for all.

    Raises:
        UnknownComponent: naming the nearest component.

    Examples:
        >>> check_likely(["model", "model_2", "ema"])
        ('model', 'model_2', 'ema')
        >>> check_likely(["modell"])
        Traceback (most recent call last):
            ...
        trainfold.core.errors.UnknownComponent: components: expected names among ['model', 'optimizer', 'scheduler', \
'trainer', 'dataset', 'rng'] or of your own components, found ['modell']; did you mean 'model'? correct the name
    """
    chosen = names_given(names)
    odd = [
        name for name in chosen or () if name not in BUILTIN_COMPONENTS and (not is_extra_name(name) or _is_slip(name))
    ]
    if odd:
        raise UnknownComponent(
            "components",
            expected=f"names among {list(BUILTIN_COMPONENTS)} or of your own components",
            found=odd,
            fix=f"{nearest(odd, BUILTIN_COMPONENTS)}correct the name",
        )
    return chosen


def _is_slip(name: str) -> bool:
    stem = name.partition("_")[0].rstrip("0123456789")
    return stem not in BUILTIN_COMPONENTS and bool(get_close_matches(name, BUILTIN_COMPONENTS, n=1, cutoff=0.85))


def within(
    declared: tuple[str, ...] | None, asked: tuple[str, ...] | None, *, present: Collection[str], where: str
) -> tuple[str, ...] | None:
    """What is selected of a run that has declared its components itself.

    Args:
        declared: what the run has declared; None for all.
        asked: what a call asks for; None for all.
        present: the components that the run has.
        where: the argument, for the message.

    Returns:
        The names that are in both; None for all.

    Raises:
        InvalidArgument: if the call asks for a component that the run has, but has not declared.

    Examples:
        >>> within(("model", "trainer"), ("trainer", "dataset"), present=["model", "trainer", "rng"], where="components")
        ('trainer',)
    """
    if declared is None or asked is None:
        return asked if declared is None else declared
    beyond = [name for name in asked if name in present and name not in declared]
    if beyond:
        raise InvalidArgument(
            where,
            expected=f"components among those that the run was attached with, {list(declared)}",
            found=sorted(beyond),
            fix="name them in attach(..., components=[...]) too, or leave them out here",
        )
    return tuple(name for name in asked if name in declared)


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
        UnknownComponent: for a name that is neither built in nor a component of this state.

    Examples:
        >>> from trainfold import Progress
        >>> s = TrainState(trainer=Progress(step=1), extra={"ema": 2})
        >>> select(s, ["ema"])
        TrainState(model=None, optimizer=None, scheduler=None, trainer=None, dataset=None, rng=None, extra={'ema': 2})
    """
    chosen = validate_components(components, declared=tuple(state.extra))
    if chosen is None:
        return state
    part = state_of({name: component for name, component in components_of(state).items() if name in chosen})
    return part.evolve(contract=state.contract, origin=state.origin, stage=state.stage)


def merge(base: TrainState, part: TrainState) -> TrainState:
    """Return a state with the components of ``part``, and those of ``base`` that ``part`` lacks.

    If weights replace others, fp32 masters that do not round to them are cloned from them; otherwise the next step would
    revert the weights.

    Examples:
        >>> from trainfold import Progress
        >>> merge(TrainState(trainer=Progress(step=1), rng=7), TrainState(trainer=Progress(step=2))).trainer.step
        2
    """
    whole = state_of({**components_of(base), **components_of(part)})
    new_weights = part.model is not None and part.optimizer is None and part.model is not base.model
    if new_weights and part.model is not None and isinstance(base.optimizer, OptimizerState):
        whole = whole.evolve(optimizer=with_fitting_masters(base.optimizer, part.model.params))
    origin = base.origin if part.trainer is None else part.origin  # the origin of the counters
    return whole.evolve(contract={**base.contract, **part.contract}, origin=origin, stage=base.stage)


def _check_extra_name(name: object) -> None:
    if not is_extra_name(name):
        raise InvalidArgument(
            f"state.extra[{name!r}]",
            expected="an identifier that is not a built-in component's name",
            found=repr(name),
            fix="rename the component: its name becomes a file name and a stable key",
        )
