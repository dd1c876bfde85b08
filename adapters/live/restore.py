"""Writes a state into live objects: first every reason against it, then all of it or nothing, on all ranks or on none."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, final

import attrs

from trainfold.adapters.components.component import ComponentAdapter, Undo
from trainfold.adapters.components.module import ModulePart
from trainfold.adapters.components.optimizer import OptimizerPart
from trainfold.adapters.live.optional import unfit
from trainfold.backends.formats.native.unread import UnreadTensors
from trainfold.backends.ranks.all_ranks import on_all_ranks
from trainfold.backends.ranks.in_process import ALONE
from trainfold.backends.ranks.left_out import texts_of_left_out, warn_of_left_out
from trainfold.core.errors import (
    HalfRestored,
    InvalidState,
    RestoreRefused,
    TrainfoldError,
    error_text,
    place,
    rank_failed,
)
from trainfold.core.history.quarantine import LoadOutcome, outcome_of, worst_outcome
from trainfold.core.layout.world import Collectives

T = TypeVar("T")


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


def checked(
    parts: Mapping[str, ComponentAdapter],
    saved: Mapping[str, Any],
    chosen: Collection[str] | None,
    *,
    unknown: Sequence[TrainfoldError],
    optional: Collection[str],
) -> dict[str, str]:
    """The optional components that do not take their values, each with the reason; every other one does.

    Args:
        parts: the components of the run.
        saved: the components of the state.
        chosen: those to restore, or None for all.
        unknown: reasons that are known already.
        optional: names of those that may be left out.

    Raises:
        RestoreRefused: with every reason.
    """
    left_out = unfit(parts, saved, [name for name in optional if chosen is None or name in chosen])
    needed = {name: part for name, part in parts.items() if name not in left_out}
    reasons = (*unknown, *refusals(needed, saved, chosen))
    if reasons:
        raise RestoreRefused("live", reasons)
    return left_out


@final
@attrs.frozen
class OnAnyRank:
    """What some rank has, so that all ranks make the calls for it.

    Attributes:
        refusable: a part that may refuse its value when it is written.
        loaders: a loader.
    """

    refusable: bool
    loaders: bool


def checked_by_all(
    world: Collectives, check: Callable[[], tuple[T, dict[str, str]]], *, has: Callable[[T], OnAnyRank]
) -> tuple[T, dict[str, str], OnAnyRank]:
    """Check on all ranks; rank 0 warns of optional components that are left out.

    Args:
        world: the ranks; all of them call.
        check: returns a value, and the optional components that this rank leaves out, with the reasons.
        has: what this rank has, from that value.

    Returns:
        The value; the components that any rank leaves out; what any rank has.
    """
    found: list[T] = []

    def told() -> tuple[dict[str, str], OnAnyRank]:
        mine, reasons = check()
        found.append(mine)
        return reasons, has(mine)

    every = on_all_ranks(world, told, doing="check the state")
    texts = texts_of_left_out([reasons for reasons, _ in every])
    warn_of_left_out(texts, world)
    return found[0], texts, OnAnyRank(any(each.refusable for _, each in every), any(each.loaders for _, each in every))


def read_in_place(parts: Mapping[str, ComponentAdapter], components: Iterable[str] | None) -> UnreadTensors:
    """What a resume can leave unread: the tensors of modules and optimizers that are written when nothing refuses any more.

    Args:
        parts: the parts of the run, those that may refuse first.
        components: those to restore; None for all.
    """
    chosen = None if components is None else frozenset(components)
    parts = {name: part for name, part in parts.items() if chosen is None or name in chosen}
    last = _last_that_may_refuse(parts)
    return UnreadTensors(
        [name for name in list(parts)[last + 1 :] if isinstance(parts[name], ModulePart | OptimizerPart)]
    )


def has_refusable(parts: Mapping[str, ComponentAdapter]) -> bool:
    """Whether one of these parts may refuse its value when it is written."""
    return _last_that_may_refuse(parts) >= 0


def _last_that_may_refuse(parts: Mapping[str, ComponentAdapter]) -> int:
    return max((index for index, part in enumerate(parts.values()) if getattr(part, "may_refuse", True)), default=-1)


def write_all(  # noqa: PLR0913 - keywords
    parts: Mapping[str, ComponentAdapter],
    saved: Mapping[str, Any],
    optional: Collection[str] = (),
    world: Collectives = ALONE,
    *,
    begins: Callable[[], None] = lambda: None,
    unread: UnreadTensors | None = None,
    refusable: bool = True,
) -> None:
    """Write every part that is in ``saved``, on all ranks or on none.

    First those that may refuse, which a user's own code loads. If one raises, on any rank, they are undone on every rank; if it is optional, it
    alone is, on every rank. Then the others, whose values were checked: they overwrite the memory of the objects and keep no copy of what was
    there, so a failure among them leaves the process half restored. Gradients come last, because every module clears its own.

    Args:
        parts: the parts, those that may refuse first.
        saved: their values.
        optional: names of those that may be left out.
        world: the ranks; all of them call.
        begins: called when memory is about to be overwritten.
        unread: what is read now, straight into the memory of the objects, and gets the outcome of that; None if everything was read.
        refusable: whether some rank has a part that may refuse; then the ranks ask each other before any memory is overwritten.

    Raises:
        RestoreRefused: with what the part raised; nothing was changed.
        RankFailed: if a part of another rank raised; nothing was changed.
        HalfRestored: on every rank, if memory could not be overwritten on one.
    """
    wanted = {name: part for name, part in parts.items() if name in saved}
    last = _last_that_may_refuse(wanted)
    for name, part in wanted.items():
        if unread is not None and name in unread.components and isinstance(part, ModulePart | OptimizerPart):
            wanted[name] = attrs.evolve(part, fill=unread.write)
    names = list(wanted)
    if refusable:
        _write_refusable_on_all({name: wanted[name] for name in names[: last + 1]}, saved, optional, world)
    begins()
    _overwrite_all({name: wanted[name] for name in names[last + 1 :]}, wanted, saved, world, unread)


def _write_refusable_on_all(
    parts: Mapping[str, ComponentAdapter], saved: Mapping[str, Any], optional: Collection[str], world: Collectives
) -> None:
    undos: dict[str, Undo] = {}
    try:
        told = on_all_ranks(
            world, lambda: _write_refusable(parts, saved, optional, undos), doing="restore what may refuse"
        )
        texts = texts_of_left_out(told)
        for name in texts.keys() & undos.keys():
            undos.pop(name)()
        warn_of_left_out(texts, world)
    except BaseException:
        for undo in reversed(undos.values()):
            undo()
        raise


def _overwrite_all(
    parts: Mapping[str, ComponentAdapter],
    every: Mapping[str, ComponentAdapter],
    saved: Mapping[str, Any],
    world: Collectives,
    unread: UnreadTensors | None,
) -> None:
    """Overwrite memory on all ranks. One call says how all have ended, so that none has to ask again where one has died."""
    failures: list[Exception] = []

    def overwrite() -> LoadOutcome:
        try:
            _write_checked(parts, every, saved)
        except Exception as error:  # noqa: BLE001 - the outcome is a value, and the error is raised below
            failures.append(error)
        return outcome_of(failures[0] if failures else None)

    try:
        outcomes = on_all_ranks(world, overwrite, doing="overwrite its objects")
    except Exception as error:
        raise _half(error, world) from error
    if unread is not None:
        unread.outcome = worst_outcome(outcomes)
    first = next((rank for rank, each in enumerate(outcomes) if each.ending != "loaded"), None)
    if first is not None:
        told = rank_failed(first, expected="success", found=outcomes[first].reason, fix="see the error of that rank")
        cause = failures[0] if failures else told
        raise _half(cause, world) from cause


def _half(error: Exception, world: Collectives) -> HalfRestored:
    half = HalfRestored(
        "live",
        expected="a restore that ends on every rank once it has begun to overwrite memory",
        found=error_text(error),
        fix="end this process, on every rank, and start again from the checkpoint: the objects hold parts of two states",
    )
    failed = getattr(error, "rank", None)
    place(half, rank=None if world.world_size == 1 else world.rank if failed is None else failed)
    return half


def _write_refusable(
    parts: Mapping[str, ComponentAdapter], saved: Mapping[str, Any], optional: Collection[str], undos: dict[str, Undo]
) -> dict[str, str]:
    """Write them; returns the optional ones that raised, each with the reason."""
    left_out: dict[str, str] = {}
    for name, part in parts.items():
        try:
            undos[name] = part.write(saved[name])
        except Exception as error:
            if name in optional:
                left_out[name] = f"cannot be restored: {error_text(error)}"
                continue
            reason = InvalidState(
                name,
                expected="a state that its object accepts",
                found=f"{type(error).__qualname__}: {error}",
                fix="build the object as it was when the state was saved",
            )
            raise RestoreRefused("live", (reason,)) from error
    return left_out


def _write_checked(
    parts: Mapping[str, ComponentAdapter], every: Mapping[str, ComponentAdapter], saved: Mapping[str, Any]
) -> None:
    for name, part in parts.items():
        part.write(saved[name])
    for name, part in every.items():
        if isinstance(part, OptimizerPart):
            part.write_gradients(saved[name])
