"""Writes a state into live objects: first every reason against it, then all of it or nothing."""

from collections.abc import Collection, Mapping
from typing import Any

from trainfold.adapters.components.component import ComponentAdapter, Undo
from trainfold.adapters.components.optimizer import OptimizerPart
from trainfold.adapters.live.optional import warn_left_out
from trainfold.core.errors import InvalidArgument, InvalidState, RestoreRefused, TrainfoldError, error_text

_DEPENDS = {
    "scheduler": ("optimizer", "the learning rate that it has set is in the optimizer's param groups"),
    "dataset": ("trainer", "a position belongs to a run that continues with its counters"),
}


def refusals(
    parts: Mapping[str, ComponentAdapter], saved: Mapping[str, Any], chosen: Collection[str] | None
) -> tuple[TrainfoldError, ...]:
    """Every reason why these components cannot be restored; nothing is changed.

    Args:
        parts: the components of the run.
        saved: the components of the state.
        chosen: those to restore, or None for all.

    Returns:
        The reasons, in the order of the components.
    """
    wanted = [name for name in parts if chosen is None or name in chosen]
    found: list[TrainfoldError] = []
    for name, (needed, reason) in _DEPENDS.items():
        if chosen is not None and name in chosen and needed in parts and needed not in chosen:
            fix = f"select {needed} too, or leave {name} out: {reason}"
            found.append(InvalidArgument("components", expected=f"{needed} with {name}", found=sorted(chosen), fix=fix))
    for name in wanted:
        if name in saved:
            found.extend(parts[name].problems(saved[name]))
        else:
            found.append(
                InvalidState(
                    name,
                    expected="a component that this run has",
                    found=f"a state with {sorted(saved)} only",
                    fix=f"leave {name} out with components=, on purpose, to continue with what the run has now",
                )
            )
    return tuple(found)


def write_all(
    parts: Mapping[str, ComponentAdapter], saved: Mapping[str, Any], *, optional: Collection[str] = ()
) -> None:
    """Write every part that is in ``saved``. If one raises, undo those before it; if it is optional, leave it out.

    Gradients come last, because every module clears its own.

    Raises:
        RestoreRefused: with what the part raised.
    """
    undos: list[Undo] = []
    for name, part in parts.items():
        if name not in saved:
            continue
        try:
            undos.append(part.write(saved[name]))
        except Exception as error:
            if name in optional:
                warn_left_out(name, f"cannot be restored: {error_text(error)}")
                continue
            for undo in reversed(undos):
                undo()
            reason = InvalidState(
                name,
                expected="a state that its object accepts",
                found=f"{type(error).__qualname__}: {error}",
                fix="build the object as it was when the state was saved",
            )
            raise RestoreRefused("live", (reason,)) from error
    for name, part in parts.items():
        if name in saved and isinstance(part, OptimizerPart):
            part.write_gradients(saved[name])
