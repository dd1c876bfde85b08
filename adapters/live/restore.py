"""Writes a state into live objects: first every reason against it, then all of it or nothing, on all ranks or on none."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from trainfold.adapters.components.component import ComponentAdapter, Undo
from trainfold.adapters.components.optimizer import OptimizerPart
from trainfold.adapters.live.optional import fitting, warn_left_out
from trainfold.backends.ranks.all_ranks import on_all_ranks
from trainfold.core.errors import (
    HalfRestored,
    InvalidArgument,
    InvalidState,
    RestoreRefused,
    TrainfoldError,
    error_text,
)
from trainfold.core.layout.world import Collectives

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


def accepted(
    parts: Mapping[str, ComponentAdapter],
    saved: Mapping[str, Any],
    chosen: Collection[str] | None,
    *,
    unknown: Sequence[TrainfoldError],
    optional: Collection[str],
) -> dict[str, ComponentAdapter]:
    """The parts that take their values; optional ones that do not are left out.

    Args:
        parts: the components of the run.
        saved: the components of the state.
        chosen: those to restore, or None for all.
        unknown: reasons that are known already.
        optional: names of those that may be left out.

    Raises:
        RestoreRefused: with every reason.
    """
    found = fitting(parts, saved, [name for name in optional if chosen is None or name in chosen])
    reasons = (*unknown, *refusals(found, saved, chosen))
    if reasons:
        raise RestoreRefused("live", reasons)
    return found


def on_ranks(world: Collectives | None, action: Callable[[], object], *, doing: str) -> None:
    """Run an action, on every rank of a world: if it fails on one, it raises on all."""
    if world is None or world.world_size == 1:
        action()
    else:
        on_all_ranks(world, lambda: action() and None, doing=doing)


def write_all(
    parts: Mapping[str, ComponentAdapter],
    saved: Mapping[str, Any],
    *,
    optional: Collection[str] = (),
    world: Collectives | None = None,
    begins: Callable[[], None] = lambda: None,
) -> None:
    """Write every part that is in ``saved``, on all ranks or on none.

    First those that may refuse, which a user's own code loads. If one raises, on any rank, they are undone on every rank; if it is optional, it
    is left out. Then the others, whose values were checked: they overwrite the memory of the objects and keep no copy of what was there, so a
    failure among them leaves the process half restored. Gradients come last, because every module clears its own.

    Args:
        parts: the parts, those that may refuse first.
        saved: their values.
        optional: names of those that may be left out.
        world: the ranks; all of them call. None for one process.
        begins: called when memory is about to be overwritten.

    Raises:
        RestoreRefused: with what the part raised; nothing was changed.
        RankFailed: if a part of another rank raised; nothing was changed.
        HalfRestored: on every rank, if memory could not be overwritten on one.
    """
    wanted = {name: part for name, part in parts.items() if name in saved}
    last = max((index for index, part in enumerate(wanted.values()) if getattr(part, "may_refuse", True)), default=-1)
    names = list(wanted)
    undos: list[Undo] = []
    try:
        on_ranks(
            world,
            lambda: _write_refusable({name: wanted[name] for name in names[: last + 1]}, saved, optional, undos),
            doing="restore what may refuse",
        )
    except BaseException:
        for undo in reversed(undos):
            undo()
        raise
    begins()
    try:
        on_ranks(
            world,
            lambda: _write_checked({name: wanted[name] for name in names[last + 1 :]}, wanted, saved),
            doing="overwrite its objects",
        )
    except Exception as error:
        raise HalfRestored(
            "live",
            expected="a restore that ends on every rank once it has begun to overwrite memory",
            found=error_text(error),
            fix="end this process, on every rank, and start again from the checkpoint: the objects hold parts of two states",
        ) from error


def _write_refusable(
    parts: Mapping[str, ComponentAdapter], saved: Mapping[str, Any], optional: Collection[str], undos: list[Undo]
) -> None:
    for name, part in parts.items():
        try:
            undos.append(part.write(saved[name]))
        except Exception as error:
            if name in optional:
                warn_left_out(name, f"cannot be restored: {error_text(error)}")
                continue
            reason = InvalidState(
                name,
                expected="a state that its object accepts",
                found=f"{type(error).__qualname__}: {error}",
                fix="build the object as it was when the state was saved",
            )
            raise RestoreRefused("live", (reason,)) from error


def _write_checked(
    parts: Mapping[str, ComponentAdapter], every: Mapping[str, ComponentAdapter], saved: Mapping[str, Any]
) -> None:
    for name, part in parts.items():
        part.write(saved[name])
    for name, part in every.items():
        if isinstance(part, OptimizerPart):
            part.write_gradients(saved[name])
