"""`RunWatch`: checks a live run at its steps and saves, and adds its settings to the contract of a checkpoint."""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Never, final

from trainfold.adapters.components.component import ComponentAdapter
from trainfold.adapters.components.module_settings import settings_of_modules, settings_of_root
from trainfold.adapters.construct.unset_watch import UnsetWatch
from trainfold.adapters.live.attached_objects import AttachedObjects
from trainfold.adapters.parallel.gradient_order import GradientOrder
from trainfold.adapters.parallel.parallel_settings import settings_of_parallel
from trainfold.adapters.script.attached_settings import attached_settings
from trainfold.adapters.script.loop_settings import LoopSettings
from trainfold.adapters.script.rates import Rates
from trainfold.adapters.script.schedules import Schedules
from trainfold.adapters.script.script_contract import SchedulerWatch, frozen, hyperparameters, late_schedules
from trainfold.adapters.script.trained import Trained
from trainfold.adapters.watch.audit import Audit
from trainfold.adapters.watch.swapped import SwapProbe
from trainfold.adapters.watch.unattached import StepWatch
from trainfold.adapters.watch.window_probe import WindowProbe
from trainfold.backends.ranks.launcher import log_for_all
from trainfold.core.errors import HalfRestored, IncompleteWindow, TrainfoldError
from trainfold.core.format.structure.united_contract import FROZEN_NAMES, frozen_entries
from trainfold.core.resume.drift import DriftAction
from trainfold.core.state.audit import UNSAVED, unsaved_of
from trainfold.core.state.notes import ORDERS, TRAINED, gradient_orders_of, put_back_text, trained_of
from trainfold.core.state.state import TrainState

_LOG: Final = logging.getLogger("trainfold")


@final
class RunWatch:
    """Watches attached objects for state that no component saves, and for steps that are not counted.

    Args:
        objects: of the run.
        loader: as given to `attach`.
        unsaved: attributes that need not be saved.
        is_strict: whether hidden state refuses a save.

    Attributes:
        window: the evidence that an accumulation window is open.
        loop: what only the loop says.
    """

    def __init__(
        self,
        objects: AttachedObjects,
        loader: Any,
        *,
        unsaved: Collection[str],
        is_strict: bool,
    ) -> None:
        self._objects = objects
        self._is_half_restored = False
        optimizers = objects.optimizer_parts()
        self._schedulers = SchedulerWatch()
        for name, part in optimizers.items():
            self._schedulers.add(name, part.optimizer)
        scheduled = {name for name in optimizers if self._schedulers.covers(name, objects.schedulers, objects.extra)}
        self._script = hyperparameters(optimizers, scheduled=scheduled)
        if objects.optimizer is not None:
            names = frozen(objects.model)
            self._script |= (
                frozen_entries(names) if objects.stage is None else {FROZEN_NAMES: dict.fromkeys(names, True)}
            )
        self._check_schedulers("attach.scheduler")
        self._schedules = Schedules(objects.scheduler, optimizers, objects.extra)
        self._script |= self._schedules.contract
        self._script |= settings_of_root(objects.model, "attached.model")
        is_part = objects.stage is not None
        self._script |= settings_of_modules(objects.model, "attached.model", is_part=is_part)
        self._script |= settings_of_parallel(objects.model, "attached.model")
        self._script |= attached_settings(objects.extra, loader, is_part=is_part)
        self.window = WindowProbe({"model": objects.model, "optimizer": objects.optimizer, **objects.extra})
        self._steps_of_others = StepWatch(objects.attached, objects.names_of_parameters)
        mine, watch = objects.schedulers, self._schedulers
        self._rates = Rates(
            {
                name: part.optimizer
                for name, part in optimizers.items()
                if not mine and not watch.has_scheduler(name, mine, objects.extra)
            }
        )
        self._audit = Audit(
            {**objects.attached(), **objects.named_schedulers}, loader, accepted=unsaved, is_strict=is_strict
        )
        self._trained = Trained(objects.attached())
        self.loop = LoopSettings()
        self._averages = SwapProbe(objects.model, objects.extra)
        self._orders = GradientOrder(objects.attached, objects.stage)
        self._unset = UnsetWatch(lambda: objects.modules)

    # --- checks -------------------------------------------------------------------------------------------------------

    def check_step(self, where: str, *, is_step: bool) -> None:
        """Raise if a scheduler is not attached, or an unattached optimizer has stepped parameters of the run.

        Raises:
            HalfRestored: if a restore failed halfway, and was passed over.
            InvalidArgument: naming the optimizer whose scheduler is not attached.
            InvalidState: naming tensors of a model built on meta that nothing has set.
            UnattachedOptimizer: naming the optimizer that has stepped.
        """
        self._check_schedulers(where)
        if is_step:
            if self._is_half_restored:
                self._raise_half_restored(where)
            if self._unset.names:
                self._unset.check(where)
            self._steps_of_others.check(where)

    def _raise_half_restored(self, where: str) -> Never:
        raise HalfRestored(
            where,
            expected="objects that hold one state",
            found="a restore that failed while it overwrote them",
            fix="end this process and start again from the checkpoint, or restore a state as a whole",
        )

    def _check_schedulers(self, where: str) -> None:
        objects = self._objects
        self._schedulers.check(lambda: objects.schedulers, objects.extra, where=where)

    def check_boundary(self, unaccounted: Callable[[], str | None], *, is_swapped: bool = False) -> None:
        """Raise unless the run is between two optimizer steps, as far as that shows.

        Args:
            unaccounted: returns a text about uncounted batches, or None.
            is_swapped: whether averaged weights stand in the model, and the trained ones are known.

        Raises:
            HalfRestored: if a restore failed halfway.
            IncompleteWindow: naming what is open.
            SwappedWeights: while averaged weights stand in the model.
            UnattachedOptimizer: if an unattached optimizer has stepped parameters of the run.
        """
        if self._is_half_restored:
            self._raise_half_restored("live")
        self._steps_of_others.check("live")
        if not is_swapped:
            self._averages.check()
        found = self.window.evidence() or unaccounted()
        if found:
            raise IncompleteWindow(
                "live",
                expected="a boundary: a whole number of optimizer steps, counted by advance()",
                found=found,
                fix="save after optimizer.step() and live.advance(samples=...); or call live.drop_window() to discard the window",
            )

    def check_set(self, where: str) -> None:
        """Raise if nothing has set a tensor of a model that was built on meta.

        Raises:
            InvalidState: naming the tensors.
        """
        if self._unset.names:
            self._unset.check(where)

    def check_counted(self) -> None:
        """Raise if an optimizer has stepped since the last `advance`: a loop that never counts is never saved.

        Raises:
            IncompleteWindow: naming the optimizers.
            UnattachedOptimizer: if an unattached optimizer has stepped parameters of the run.
        """
        taken = self.window.uncounted()
        if taken:
            raise IncompleteWindow(
                "live.advance",
                expected="a call after each optimizer step, before manager.step(live)",
                found=taken,
                fix="call live.advance(samples=...) after optimizer.step()",
            )
        self._steps_of_others.check("manager.step")

    def check_saved(self, state: TrainState, step: int, selection: Collection[str] | None) -> None:
        """Look for state that no component saves: warn of it, or refuse the save in strict mode.

        Raises:
            HiddenStateRefused: in strict mode, naming the attributes.
        """
        self._audit.check(state, step, selection)

    # --- the contract -------------------------------------------------------------------------------------------------

    def contract(self) -> dict[str, Any]:
        """Settings of the script and notes of the run."""
        found: dict[str, Any] = {}
        if self._objects.scheduler is not None:
            found["scheduler.kind"] = self._objects.scheduler.kinds()
        if self._audit.unsaved:
            found[UNSAVED] = self._audit.unsaved
        found |= self._rates.contract() | self.loop.contract()
        if trained := self._trained.contract():
            found[TRAINED] = trained
        if orders := self._orders.contract():
            found[ORDERS] = orders
        return found

    def settings(self) -> dict[str, Any]:
        """What the script gave to the objects that it attached."""
        return self._script

    def late_settings(self) -> dict[str, Any]:
        """The base rates of schedulers made after the attach."""
        return late_schedules(self._objects.optimizer, self._objects.names_of_parameters, self._script)

    @property
    def sums_change(self) -> bool:
        """Whether DDP sums gradients in another order after a backward that is still to come."""
        return self._orders.changes

    # --- what happens to the run --------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """Note that an optimizer step was counted."""
        if self._orders.unknown != {}:
            self._orders.stepped()
        self.window.close()  # after DDP may have moved gradients into other buckets
        self._audit.stepped()
        self._rates.stepped()
        self._averages.stepped()

    def adapted(
        self,
        saved: Mapping[str, Any],
        parts: Mapping[str, ComponentAdapter],
        adapts: Collection[str],
        chosen: Collection[str] | None,
    ) -> tuple[dict[str, Any], list[TrainfoldError]]:
        """The components of a state; if a policy adapts schedulers, these have the settings of the script.

        Args:
            saved: the state's components.
            parts: the run's components.
            adapts: the keys of the contract in which the run's settings win.
            chosen: the components to restore; None for all.

        Returns:
            The components, and every reason why it cannot be done.
        """
        is_scheduled = chosen is None or not self._schedules.components.isdisjoint(chosen)
        return self._schedules.adapted(saved, adapts if is_scheduled else frozenset(), parts)

    def check_resets(self, reset: Collection[str]) -> None:
        """Raise `InvalidArgument` if one half of what has a learning rate in common is reset alone."""
        self._schedules.check_resets(reset)

    def overwrites(self, *, is_over: bool = False) -> None:
        """Note that a restore begins to overwrite what it cannot put back, or that it has."""
        self._is_half_restored = not is_over

    def restored(
        self,
        contract: Mapping[str, Any],
        chosen: Collection[str] | None,
        step: int,
        policy: Mapping[str, DriftAction],
    ) -> None:
        """Take what the contract of a restored state says, and put back which parameters are trained."""
        self._is_half_restored = False
        self.window.close()
        self._audit.restored(step, unsaved_of(contract))
        if changed := self._trained.put_back(trained_of(contract, chosen)):
            log_for_all("%s", put_back_text(changed))
        self._rates.restored(contract, step)
        self._averages.stepped()
        if chosen is None or "optimizer" in chosen:
            self._orders.take(gradient_orders_of(contract))
            self.loop.restored(contract, step, policy)

    def registered(self, name: str, target: Any, settings: Mapping[str, Any]) -> None:
        """Watch an object attached later, with its settings."""
        self._script |= settings
        self.window.watch(name, target)
        self._steps_of_others.forget()
        self._audit.attach(name, target)
        self._trained.attach(name, target)
        self._orders.attach()
        self._averages = SwapProbe(self._objects.model, self._objects.extra)
        self._unset.look()
        if name in self._objects.optimizers:
            self._schedulers.add(name, target)
