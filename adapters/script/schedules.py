"""`Schedules`: keeps the schedulers of a live run as attached, and replays them to continue a run under other settings."""

import copy
import logging
import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, final

import attrs
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainfold.adapters.components.component import copied
from trainfold.adapters.components.optimizer import OptimizerPart
from trainfold.adapters.components.optimizer_state import base_of
from trainfold.adapters.components.schedule_settings import scheduler_settings
from trainfold.adapters.components.scheduler import SchedulerPart, opaques
from trainfold.adapters.script.script_contract import bare
from trainfold.core import tree
from trainfold.core.errors import InvalidArgument, InvalidState, TrainfoldError
from trainfold.core.json_values import Json
from trainfold.core.printable import with_article
from trainfold.core.state.contract_kinds import BASE_RATES, SCHEDULED
from trainfold.core.state.state import Opaque, OptimizerState, OwnOptimizerState

_LOG: Final = logging.getLogger("trainfold")
_PREFIX: Final = "attached."
_PLATEAU_MOVES: Final = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch", "_last_lr")
_LOGGED_ABOVE: Final = 100_000  # replayed steps


@final
@attrs.frozen(eq=False)
class _Made:
    """One scheduler, and its state when it was attached."""

    path: str
    scheduler: Any
    fresh: Any

    @property
    def is_plateau(self) -> bool:
        return isinstance(self.scheduler, ReduceLROnPlateau)

    def count(self, saved: Any) -> float | None:
        """How often ``step`` was called since the scheduler was made, according to a saved state; None if the state does not show it."""
        now, then = _last_epoch(saved.value if isinstance(saved, Opaque) else None), _last_epoch(self.fresh)
        return None if now is None or then is None else now - then

    def with_measurements(self, saved: Any) -> Any:
        """The current settings with the saved measurements, for a ``ReduceLROnPlateau``."""
        if not isinstance(saved, Opaque) or not isinstance(saved.value, Mapping):
            return saved
        kept = {key: saved.value[key] for key in _PLATEAU_MOVES if key in saved.value}
        return Opaque({**copied(self.fresh), **copied(kept)})


@final
class Schedules:
    """The schedulers of a run as they were attached: their states, and the param groups of their optimizers.

    Args:
        part: the schedulers; None if there are none.
        optimizers: the attached optimizers, by component.
        extra: the other attached objects; torch schedulers among them count as well.
    """

    def __init__(
        self, part: SchedulerPart | None, optimizers: Mapping[str, OptimizerPart], extra: Mapping[str, Any]
    ) -> None:
        held = None if part is None else part.schedulers
        schedulers = [] if part is None else tree.named_leaves(held, "scheduler")
        self._arrangement, self._arranged = tree.structure(held), [path for path, _ in schedulers]
        self._extras = {f"scheduler[extra {name}]": name for name, each in extra.items() if _is_scheduler(each)}
        schedulers += [(path, bare(extra[name])) for path, name in self._extras.items()]
        self._made = [_Made(path, each, _fresh(each)) for path, each in schedulers]
        self._optimizers = {name: each.optimizer for name, each in optimizers.items()}
        driven = [each for each in self._optimizers.values() if any(_drives(made, each) for made in self._made)]
        self._groups = {id(each): _group_values(each) for each in driven}
        self.contract: dict[str, Json] = {}
        for made in self._made:
            if made.fresh is None:
                continue
            knows_groups = id(getattr(made.scheduler, "optimizer", None)) in self._groups
            self.contract |= scheduler_settings(made.scheduler, f"{_PREFIX}{made.path}", knows_groups=knows_groups)

    def adapted(
        self, saved: Mapping[str, Any], keys: Collection[str], parts: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[TrainfoldError]]:
        """Bring the schedulers that a policy adapts to the count of a saved state, and return the state's components with them.

        Law: these schedulers, and the rates in the groups, are what the new schedulers give after as many calls of ``step()``.

        For this the schedulers themselves are stepped, from their states at the attach, and then put back. Schedulers of one
        optimizer are stepped in turn, in the order in which they were attached. A ``ReduceLROnPlateau`` depends on
        measurements, so it keeps them, and the rate stays.

        Args:
            saved: the components of the state.
            keys: the keys of the contract for which the run's value replaces the saved one.
            parts: the components of the run.

        Returns:
            The components, and every reason why it cannot be done.
        """
        states = opaques(saved["scheduler"]) if "scheduler" in saved else {}
        states |= {path: saved[name] for path, name in self._extras.items() if name in saved}
        found, problems = dict(saved), list[TrainfoldError]()
        if list(states) != [made.path for made in self._made]:
            return found, problems  # another arrangement, which the scheduler component reports
        changed = [made for made in self._made if self._concerns(made, keys)]
        for together in self._by_optimizer(changed):
            try:
                self._replay(together, states, found, parts)
            except _NotKnown as unknown:
                problems.append(unknown.problem)
        if changed and not problems:
            if self._arranged:
                found["scheduler"] = tree.unflatten(self._arrangement, [states[path] for path in self._arranged])
            found |= {name: states[path] for path, name in self._extras.items()}
        return found, problems

    def check_resets(self, reset: Collection[str]) -> None:
        """Check that no scheduler is reset without an optimizer that it drives, or the other way round. For ``optimizer`` and ``scheduler`` the plan decides.

        Raises:
            InvalidArgument: naming both.
        """
        for made in self._made:
            scheduler = self._extras.get(made.path, "scheduler")
            for name, each in self._optimizers.items():
                if (
                    not _drives(made, each)
                    or (name in reset) == (scheduler in reset)
                    or {name, scheduler} == {"optimizer", "scheduler"}
                ):
                    continue
                one, other = (name, scheduler) if name in reset else (scheduler, name)
                raise InvalidArgument(
                    "reset", expected=f"{name} and {scheduler} both or neither: the learning rate is in both",
                    found=f"{one} without {other}", fix=f"reset {other} too")  # fmt: skip

    @property
    def components(self) -> frozenset[str]:
        """The components that contain schedulers."""
        return frozenset({"scheduler", *self._extras.values()})

    # --- inside ------------------------------------------------------------------------------------------------------

    def _concerns(self, made: _Made, keys: Collection[str]) -> bool:
        """Whether a key is about a scheduler, or about the base rates of an optimizer that it drives."""
        driven = [name for name, each in self._optimizers.items() if _drives(made, each)]
        groups = ["optimizer.groups[" if name == "optimizer" else f"{_PREFIX}{name}.groups[" for name in driven]
        return any(
            key == "scheduler.kind"
            or key.startswith((f"{_PREFIX}{made.path}.", f"{_PREFIX}{made.path}["))
            or (key.startswith(tuple(groups)) and key.rsplit(".", 1)[1] in BASE_RATES)
            for key in keys
        )

    def _by_optimizer(self, changed: list[_Made]) -> list[list[_Made]]:
        """The changed schedulers, each with all others of the same optimizer, because together they determine the rate."""
        seen, found = set[int](), list[list[_Made]]()
        for made in changed:
            optimizer = getattr(made.scheduler, "optimizer", made.scheduler)
            if id(optimizer) not in seen:
                seen.add(id(optimizer))
                found.append(
                    [each for each in self._made if getattr(each.scheduler, "optimizer", each.scheduler) is optimizer]
                )
        return found

    def _replay(
        self, together: list[_Made], states: dict[str, Any], found: dict[str, Any], parts: Mapping[str, Any]
    ) -> None:
        for made in together:
            if made.is_plateau:
                states[made.path] = made.with_measurements(states[made.path])
        stepped = [made for made in together if not made.is_plateau]
        if not stepped:
            return
        count = _common_count(stepped, states)
        optimizer = stepped[0].scheduler.optimizer
        if count > _LOGGED_ABOVE:
            _LOG.info("replaying %d steps of %s under its new settings", count, stepped[0].path)
        with _put_back(together, optimizer):
            for group, values in zip(optimizer.param_groups, self._groups.get(id(optimizer), ()), strict=False):
                _set_values(group, values)
            before = _group_values(optimizer)
            _step(stepped, count)
            after = _group_values(optimizer)
            states |= {made.path: Opaque(copied(made.scheduler.state_dict())) for made in stepped}
        for name, each in self._optimizers.items():
            if each is optimizer and isinstance(found.get(name), OptimizerState | OwnOptimizerState):
                base = _with_rates(base_of(found[name]), parts[name], before, after)
                found[name] = base if isinstance(found[name], OptimizerState) else attrs.evolve(found[name], base=base)


def _common_count(stepped: list[_Made], states: Mapping[str, Any]) -> float:
    """How often the schedulers of one optimizer were stepped; raises `_NotKnown` if that cannot be replayed."""
    counts = {made.path: made.count(states[made.path]) for made in stepped}
    for made in stepped:
        count = counts[made.path]
        if count is None or count < 0 or not isinstance(made.scheduler, LRScheduler):
            name = type(made.scheduler).__qualname__
            raise _NotKnown(made, f"a step count of {with_article(name)} that can be replayed")
    first, *others = (count for count in counts.values() if count is not None)
    if any(other != first for other in others):
        raise _NotKnown(stepped[0], f"schedulers of one optimizer that were stepped equally often, not {counts}")
    return first


class _NotKnown(Exception):
    """A scheduler cannot be brought to the count of the state."""

    def __init__(self, made: _Made, expected: str, error: Exception | None = None) -> None:
        super().__init__(expected)
        self.problem = InvalidState(
            made.path,
            expected=expected,
            found="none" if error is None else f"{type(error).__qualname__}: {error}",
            fix='keep the settings of the saved scheduler, or restart it with reset={"scheduler": "why"} and set its count and the '
            "rates of the groups yourself",
        )


def _step(schedulers: list[_Made], count: float) -> None:
    """Step them in turn, from their states at the attach, without torch's warning about the order of the two ``step()`` calls."""
    for made in schedulers:
        made.scheduler.load_state_dict(copied(made.fresh))
    whole = math.floor(count)
    rounds: list[tuple[float, ...]] = [()] * whole
    if count > whole:
        rounds.append((count,))  # a fraction of an epoch is passed, not counted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for arguments in rounds:
                for made in schedulers:
                    made.scheduler.step(*arguments)
        except Exception as error:
            raise _NotKnown(schedulers[0], f"a schedule of at least {count:g} steps", error) from error


@contextmanager
def _put_back(schedulers: list[_Made], optimizer: torch.optim.Optimizer) -> Iterator[None]:
    states = [copied(made.scheduler.state_dict()) for made in schedulers]
    groups = _group_values(optimizer)
    try:
        yield
    finally:
        for made, state in zip(schedulers, states, strict=True):
            made.scheduler.load_state_dict(state)
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            _set_values(group, values)


def _is_scheduler(target: Any) -> bool:
    """Whether an extra is a torch scheduler, or the pair of its own two methods."""
    is_plain = not isinstance(target, tuple) or getattr(target[0], "__name__", None) == "state_dict"
    return is_plain and isinstance(bare(target), LRScheduler)


def _fresh(scheduler: Any) -> Any:
    """A copy of its state for a replay; None if `state_dict` fails, which the first capture then reports."""
    try:
        return copied(scheduler.state_dict())
    except Exception:  # noqa: BLE001 (a scheduler of the user's)
        return None


def _group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: _detached(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def _detached(value: Any) -> Any:
    """A copy of a group's value, which changes of the group do not reach."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, list | dict) else value


def _set_values(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key in [key for key in group if key != "params" and key not in values]:
        del group[key]
    for key, value in values.items():
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = _detached(value)


def _with_rates(
    state: OptimizerState, part: OptimizerPart, before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> OptimizerState:
    """The state with the values and base rates that the replayed schedulers wrote into the groups."""
    replayed = {}
    for names, old, new in zip(part.groups(), before, after, strict=True):
        moved = {
            key: value
            for key, value in new.items()
            if key == "lr" or key in BASE_RATES or not _same(old.get(key), value)
        }
        replayed[frozenset(names)] = moved
    values = {frozenset(names): new for names, new in zip(part.groups(), after, strict=True)}
    groups = []
    for group in state.groups:
        moved = dict(replayed.get(frozenset(group.params), {}))
        now = values.get(frozenset(group.params), {})
        driven = {key for sign, keys in SCHEDULED.items() if sign in group.hyper for key in keys}
        # the saved scheduler has moved these, and the new one may not
        moved |= {key: now[key] for key in driven if key in now}
        if "betas" in moved and "betas" in group.hyper:  # a momentum cycle moves the first beta only
            moved["betas"] = (moved["betas"][0], *group.hyper["betas"][1:])
        kept = {key: value for key, value in group.hyper.items() if key not in BASE_RATES}
        groups.append(attrs.evolve(group, hyper={**kept, **moved} if moved else group.hyper))
    return attrs.evolve(state, groups=tuple(groups))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return one is other or (
        type(one) is type(other) and isinstance(one, int | float | str | list | tuple) and one == other
    )


def _drives(made: _Made, optimizer: torch.optim.Optimizer) -> bool:
    return getattr(made.scheduler, "optimizer", None) is optimizer


def _last_epoch(state: Any) -> float | None:
    """The count in the state of a torch scheduler; for a chain of several, the count of the first."""
    if not isinstance(state, Mapping):
        return None
    if "last_epoch" not in state:
        inner = state.get("_schedulers")
        return _last_epoch(inner[0]) if isinstance(inner, list | tuple) and inner else None
    last, within = state["last_epoch"], state.get("T_cur", 0)
    if not all(isinstance(each, int | float) and math.isfinite(each) for each in (last, within)):
        return None
    return float(last) + (within - math.floor(within) if isinstance(within, float) else 0.0)
