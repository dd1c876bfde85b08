"""Components: the named parts of a state, and the selection of some of them."""

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
    """The components that a state has, by name, built-in ones first.

    Examples:
        >>> from trainfold.core.state.state import Progress
        >>> list(components_of(TrainState(trainer=Progress(), extra={"ema": {}})))
        ['trainer', 'ema']
    """
    found = {name: held for name, held in zip(BUILTIN_COMPONENTS, _BUILTIN(state), strict=True) if held is not None}
    for name, component in state.extra.items():
        _check_extra_name(name)
        found[name] = component
    return found


def in_order(names: Iterable[str]) -> list[str]:
    """Names of components as `components_of` has them: built-in ones first, the others as they come.

    Examples:
        >>> in_order(["ema", "rng", "model"])
        ['model', 'rng', 'ema']
    """
    given = list(names)
    builtin = [name for name in BUILTIN_COMPONENTS if name in given]
    return [*builtin, *(name for name in given if name not in builtin)]


def state_of(components: Mapping[str, Any]) -> TrainState:
    """The inverse of `components_of`: a state from named components.

    Examples:
        >>> state_of({"ema": 1}).extra
        {'ema': 1}
    """
    builtin = {name: value for name, value in components.items() if name in BUILTIN_COMPONENTS}
    extra = {name: value for name, value in components.items() if name not in BUILTIN_COMPONENTS}
    return TrainState(**builtin, extra=extra)


def validate_components(names: Iterable[str] | None, *, declared: Collection[str] = ()) -> tuple[str, ...] | None:
    """Check a selection when it is configured, before any state exists (B02).

    Args:
        names: component names, or None for all of them.
        declared: the names of the user's own components.

    Returns:
        The names, each once, in the order given; None for all.

    Raises:
        UnknownComponent: naming every unknown one and the known ones.

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
            "components",
            expected=f"names among {known}",
            found=unknown,
            fix=f"{nearest(unknown, known)}correct the name, or declare the component under `extra`",
        )
    return chosen


def check_likely(names: Iterable[str] | None) -> tuple[str, ...] | None:
    """Check a selection before it is known which components the run has of its own (B02).

    A name that nobody can have is refused, and one that is all but that of a built-in component: where it is a component of
    the user's, an index or a word after an underscore tells the two apart.

    Returns:
        The names, each once; None for all.

    Raises:
        UnknownComponent: naming the nearest one.

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


def select(state: TrainState, components: Iterable[str] | None) -> TrainState:
    """The part of a state that has only these components (B01).

    Law: ``merge(select(s, A), select(s, not A)) == s``.

    Args:
        state: the whole.
        components: names; None for all. An empty selection is legal. A known component that this state does not have
            is ignored (B02).

    Returns:
        A state whose other components are absent; its leaves are those of ``state``, not copies.

    Raises:
        UnknownComponent: for a name that no state has and this one does not declare.

    Examples:
        >>> from trainfold.core.state.state import Progress
        >>> s = TrainState(trainer=Progress(step=1), extra={"ema": 2})
        >>> select(s, ["ema"])
        TrainState(model=None, optimizer=None, scheduler=None, trainer=None, dataset=None, rng=None, extra={'ema': 2})
    """
    chosen = validate_components(components, declared=tuple(state.extra))
    if chosen is None:
        return state
    part = state_of({name: component for name, component in components_of(state).items() if name in chosen})
    return part.evolve(contract=state.contract, origin=state.origin)


def merge(base: TrainState, part: TrainState) -> TrainState:
    """A state with the components of ``part``, and those of ``base`` where ``part`` has none.

    Weights that replace others make the fp32 masters anew that do not round to them: these would revert them (B08).

    Examples:
        >>> from trainfold.core.state.state import Progress
        >>> merge(TrainState(trainer=Progress(step=1), rng=7), TrainState(trainer=Progress(step=2))).trainer.step
        2
    """
    whole = state_of({**components_of(base), **components_of(part)})
    new_weights = part.model is not None and part.optimizer is None and part.model is not base.model
    if new_weights and part.model is not None and isinstance(base.optimizer, OptimizerState):
        whole = whole.evolve(optimizer=with_fitting_masters(base.optimizer, part.model.params))
    origin = base.origin if part.trainer is None else part.origin  # of the counters
    return whole.evolve(contract={**base.contract, **part.contract}, origin=origin)


def _check_extra_name(name: object) -> None:
    if not is_extra_name(name):
        raise InvalidArgument(
            f"state.extra[{name!r}]",
            expected="an identifier that is not a built-in component's name",
            found=repr(name),
            fix="rename the component: it becomes a file name and a stable key (B15)",
        )
