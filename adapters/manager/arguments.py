"""Checks the arguments of a `CheckpointManager`. Each mistake is named with what was expected and how to fix it."""

from collections.abc import Mapping
from types import UnionType
from typing import Any, Final, final

import attrs

from trainfold.adapters.live.live import Live
from trainfold.adapters.manager.protocol import LoadDecision
from trainfold.adapters.requests.sources import RequestSource
from trainfold.backends.ranks.left_out import warn_of_nothing
from trainfold.backends.stores.direct_io import BUFFER_BYTES, BUFFERS
from trainfold.core.checks import count
from trainfold.core.component_names import torn_pairs, validate_components
from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown
from trainfold.core.save.replicas import LEVELS, Level, level_of
from trainfold.core.save.retention import Retention, check_keep_last, keep_last
from trainfold.core.save.triggers import Triggers, make_triggers
from trainfold.core.state.components import all_of
from trainfold.core.state.state import TrainState

PLACE: Final = "run"
_WRITERS_BYTES: Final = BUFFERS * BUFFER_BYTES
_COMPONENTS: Final = "CheckpointManager.components"


@final
@attrs.frozen(kw_only=True)
class SaveOptions:
    """How a manager saves. Make it with `save_options`.

    Attributes:
        components: which components are saved; None for all.
        contract: what must be equal at a resume, beside what the run says itself.
        is_async: whether a save continues in the background.
        skips: whether a save does nothing while another one is under way.
        room: how many bytes the copies of an async save may have; None for as many as the state.
        hold_check: whether an async save compares the bytes that it holds with those that it commits.
        reuses: whether a save refers to an earlier checkpoint for what has not changed.
        check_replicas: how much each save compares of what all ranks should have alike.
        check_every: so many steps lie between comparisons in the background; None for no such ones.
    """

    components: tuple[str, ...] | None
    contract: Mapping[str, Any]
    is_async: bool
    skips: bool
    room: int | None
    hold_check: bool
    reuses: bool
    check_replicas: Level
    check_every: int | None


def save_options(  # noqa: PLR0913 - keywords
    *,
    components: tuple[str, ...] | None,
    contract: Mapping[str, Any],
    mode: object,
    when_busy: object,
    max_extra_bytes: int | None,
    hold_check: object,
    reuse_unchanged: object,
    check_replicas: object,
) -> SaveOptions:
    """The options that these arguments of a manager name.

    Raises:
        InvalidArgument: for an invalid one.
    """
    level, check_every = _checks_given(check_replicas)
    return SaveOptions(
        components=components,
        contract=contract,
        is_async=one_of("mode", mode, ("sync", "async")) == "async",
        skips=one_of("when_busy", when_busy, ("wait", "skip")) == "skip",
        room=room_given(max_extra_bytes),
        hold_check=flag("hold_check", hold_check),
        reuses=flag("reuse_unchanged", reuse_unchanged),
        check_replicas=level,
        check_every=check_every,
    )


def _checks_given(value: object) -> tuple[Level, int | None]:
    """What a save compares, and each how many steps more is compared in the background."""
    if isinstance(value, str) and value in LEVELS:
        return level_of(value), None
    expected = f"{' or '.join(map(repr, LEVELS))}, or an int >= 1"
    every = count("CheckpointManager.check_replicas", value, least=1, expected=expected,
                  fix="pass a number of optimizer steps, such as check_replicas=500, or a level, such as 'quick'")  # fmt: skip
    return "quick", every


def alike(
    options: SaveOptions, every: object, every_secs: float | None, *, at_end: bool, place: str
) -> dict[str, object]:
    """The arguments by name that all ranks must give alike, or some would save where others train."""
    return {
        PLACE: place,
        "every": every,
        "every_secs": every_secs,
        "at_end": at_end,
        "mode": "async" if options.is_async else "sync",
        "when_busy": "skip" if options.skips else "wait",
        "components": None if options.components is None else sorted(options.components),
        "check_replicas": options.check_every or options.check_replicas,
        "reuse_unchanged": options.reuses,
    }


def triggers_given(every: object, every_secs: float | None, *, at_end: bool) -> tuple[Triggers, bool]:
    """The triggers, and whether the cadence is to be chosen."""
    if isinstance(every, str) and every != "auto":
        raise InvalidArgument("CheckpointManager.every", expected="an int >= 1, 'auto', or None", found=shown(every),
                              fix="pass a number of optimizer steps, such as every=500; convert a string with int(...)")  # fmt: skip
    steps: Any = None if every == "auto" else every
    triggers = make_triggers(every=steps, every_secs=every_secs, at_end=at_end)
    return triggers, every == "auto" and every_secs is None


@final
class RunCheck:
    """Checks the runs that a manager is called with.

    Args:
        components: which components the manager saves; None for all.
    """

    def __init__(self, components: tuple[str, ...] | None) -> None:
        self._components = components
        self._names_are_known = components is None

    def __call__(self, run: Live | TrainState, *, kinds: type | UnionType = Live | TrainState) -> None:
        """Check that a run is a live one, or a state if that is allowed, and that it has the components.

        Raises:
            InvalidArgument: if it is neither, or if the components have its optimizer without its scheduler, or the other way round.
            UnknownComponent: if the first run lacks a component; each save checks what is declared later.
        """
        if not isinstance(run, kinds):
            raise InvalidArgument(
                "CheckpointManager",
                expected="a live run" if kinds is Live else "a live run, or a state",
                found=shown(run),
                fix="pass what attach(model, optimizer, ...) returned",
            )
        if self._names_are_known:
            return
        if isinstance(run, Live):
            names = run.selected(self._components, where=_COMPONENTS)
            run.check_selected(names, where=_COMPONENTS, restores=False)
            warn_of_nothing(names, run.present)
        else:
            names, present = self._components, all_of(run)
            validate_components(names, declared=present, where=_COMPONENTS)
            for torn in torn_pairs(names, present=present, where=_COMPONENTS):
                raise torn
            warn_of_nothing(names, present)
        self._names_are_known = True


def cadence_text(every: object, every_secs: float | None) -> str:
    """The cadences of a manager, as its arguments.

    Examples:
        >>> cadence_text(500, None), cadence_text("auto", 600.0)
        ('every=500', 'every_secs=600')
    """
    if every_secs is None:
        return f"every={every!r}"
    both = "" if every in ("auto", None) else f"every={every!r}, "
    return f"{both}every_secs={every_secs:g}"


def check_decision(decision: object) -> None:
    """Check that a decision to load is one of a `CheckpointManager`, and can be carried out."""
    if not isinstance(decision, LoadDecision):
        found, fix = shown(decision), "pass what should_load returned, or None"
    elif not decision:
        found, fix = shown(str(decision)), "start fresh, or look at the reason"
    elif decision.source not in ("newest", "step") or (decision.source == "step" and decision.step is None):
        found, fix = shown(str(decision)), "pass it to the manager that made it"
    else:
        return
    raise InvalidArgument("decision", expected="one of this manager's that can be loaded", found=found, fix=fix)


def check_requests(requests: object) -> None:
    """Check that requests can come from there."""
    if requests is not None and not isinstance(requests, RequestSource):
        raise InvalidArgument("requests", expected="a source of requests, or None", found=shown(requests),
                              fix="pass one, such as SignalRequests() or StopFile(run)")  # fmt: skip


def retention_given(last: int | None, keep: Retention | None) -> Retention:
    """One policy of ``keep_last`` and ``keep``: what either keeps, if it is given."""
    newest = keep_last(check_keep_last(last))
    if keep is None:
        return newest
    policy = policy_given("keep", keep)
    return policy if last is None else policy | newest


def policy_given(name: str, keep: object) -> Retention:
    """A policy of retention."""
    if not isinstance(keep, Retention):
        raise InvalidArgument(name, expected="a Retention, or None", found=shown(keep),
                              fix="pass one, such as keep_last(3) | keep_every(10_000)")  # fmt: skip
    return keep


def room_given(max_extra_bytes: int | None) -> int | None:
    """How much memory of an async save is left for copies, beside the writer's own buffers."""
    if max_extra_bytes is None:
        return None
    count("max_extra_bytes", max_extra_bytes, least=0, expected="an int >= 0, or None",
          fix="pass 0 to make updates wait, or None to let a save copy what it must")  # fmt: skip
    return max(0, max_extra_bytes - _WRITERS_BYTES)


def one_of(name: str, value: object, known: tuple[str, ...]) -> str:
    """A word that is known."""
    if value not in known:
        raise InvalidArgument(f"CheckpointManager.{name}", expected=" or ".join(map(repr, known)), found=shown(value),
                              fix=f"pass {name}={known[0]!r}")  # fmt: skip
    return str(value)


def flag(name: str, value: object) -> bool:
    """True or False, not a value that only counts as one."""
    if type(value) is not bool:
        raise InvalidArgument(f"CheckpointManager.{name}", expected="True or False", found=shown(value),
                              fix=f"pass {name}=True or leave it out")  # fmt: skip
    return value
