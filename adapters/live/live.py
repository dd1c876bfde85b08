"""`Live`: the mutable objects of a training loop, read as one `TrainState` and written back from one."""

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, final

import attrs
import torch

from trainfold.adapters.components.component import (
    ComponentAdapter,
    ObjectPart,
    Stateful,
    TreePart,
    copied,
    copied_containers,
)
from trainfold.adapters.components.held_optimizers import Attached
from trainfold.adapters.components.module import ModulePart, module_state
from trainfold.adapters.components.module_settings import settings_of_modules, settings_of_root
from trainfold.adapters.components.optimizer import OptimizerPart
from trainfold.adapters.components.own_modules import OwnModulePart, late_problems, own_module_parts
from trainfold.adapters.components.scheduler import SchedulerPart, check_schedulers
from trainfold.adapters.components.sharded import check_whole, wheres
from trainfold.adapters.draws.beside import is_beside
from trainfold.adapters.draws.feed import Feed, mismatch
from trainfold.adapters.live.dry_capture import dry_capture
from trainfold.adapters.live.loop.loop_data import LoopData, no_names, total_of
from trainfold.adapters.live.loop.since_restore import SinceRestore
from trainfold.adapters.live.optional import captured, fitting, optional_given
from trainfold.adapters.live.recorder import Recorder, check_values
from trainfold.adapters.live.restore import CountersPart, refusals, write_all
from trainfold.adapters.live.view import LiveView
from trainfold.adapters.loaders.choose import feeds_of
from trainfold.adapters.loaders.group import FeedGroup, Samples
from trainfold.adapters.script.attached_settings import (
    attached_settings,
    changed_settings,
    saved_settings,
    warn_changed,
)
from trainfold.adapters.script.rates import Rates
from trainfold.adapters.script.schedules import Schedules
from trainfold.adapters.script.script_contract import SchedulerWatch, frozen, hyperparameters, late_schedules
from trainfold.adapters.script.trained import Trained
from trainfold.adapters.streams.generator import GeneratorPart, is_generator
from trainfold.adapters.streams.rng_streams import RngPart, bound_device, preserved_rng
from trainfold.adapters.watch.audit import Audit
from trainfold.adapters.watch.open_window import WindowProbe
from trainfold.adapters.watch.swapped import SwapProbe
from trainfold.adapters.watch.unattached import StepWatch
from trainfold.core import tree
from trainfold.core.errors import CaptureRefused, IncompleteWindow, InvalidArgument, InvalidState, RestoreRefused
from trainfold.core.resume.drift import DriftAction, check_policy
from trainfold.core.state.audit import UNSAVED, unsaved_of
from trainfold.core.state.components import components_of, state_of, validate_components
from trainfold.core.state.descent import Descent
from trainfold.core.state.fqn import NamedTensors, check_real, named_tensors
from trainfold.core.state.notes import TRAINED, put_back_text, trained_of
from trainfold.core.state.state import Origin, Progress, TrainState

_LOG = logging.getLogger("trainfold")


def attach(  # noqa: PLR0913 - keywords
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    loader: Any = None,
    extra: Mapping[str, Any] | None = None,
    strict: bool = False,
    unsaved: Collection[str] = (),
    optional: Collection[str] = (),
) -> "Live":
    """Make the mutable objects of a loop save-able and resume-able.

    Args:
        model: the module; wrapped (DDP, compile) or not.
        optimizer: made from the parameters of ``model``.
        scheduler: an object with ``state_dict`` and ``load_state_dict``; or a list, tuple or dict of them.
        loader: a ``DataLoader`` over a map-style dataset, or one with a state of its own; iterate over
            ``live.batches()`` then. Several by name, in a dict: iterate over ``live.batches(name)``.
        extra: the run's other components by name: modules, optimizers, random generators, anything with ``state_dict`` and
            ``load_state_dict``, or a pair of functions ``(get, set)`` for a tree.
        strict: whether a save is refused (`HiddenStateRefused`), and not only warned of (`HiddenState`), where the attached
            objects hold state that changes with training and that no component saves (W07).
        unsaved: such state that need not be saved, by the names that the warning gives, such as ``"model.history"``.
        optional: names under ``extra`` that the run can do without: where one cannot be saved or restored, a warning
            (`OptionalLeftOut`) names it, and it is left out. Everything else fails the save or the load, on every rank (B07).

    Returns:
        The live run.

    Raises:
        InvalidArgument: for an object whose state cannot be known, or an optimizer whose scheduler is forgotten for
            certain; where that is not certain, a warning names it after a resume that has restarted it.
        InvalidState: if the optimizer holds a tensor that the model does not have, or the model has no values yet.
        UnsupportedLeaf: for a hyperparameter that is not plain, and so could not be compared at a resume.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> live.progress
        Progress(step=0, epoch=0, samples=0, tokens=0)
        >>> list(live.capture().model.params)
        ['weight', 'bias']
    """
    return Live(
        model,
        optimizer,
        scheduler=scheduler,
        loader=loader,
        extra=extra or {},
        strict=strict,
        unsaved=unsaved,
        optional=optional,
    )


@final
class Live:
    """A mutable run. Make it with `attach`.

    Law: run k steps, `capture`, build every object anew, `restore`, run n steps = run k + n steps, bit for bit.
    """

    def __init__(  # noqa: PLR0913 - keywords
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        scheduler: Any,
        loader: Any,
        extra: Mapping[str, Any],
        strict: bool = False,
        unsaved: Collection[str] = (),
        optional: Collection[str] = (),
    ) -> None:
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidArgument(
                "attach.optimizer",
                expected="a torch.optim.Optimizer",
                found=f"a {type(optimizer).__qualname__}",
                fix="attach the optimizer itself, and a wrapper's own state under extra=",
            )
        check_real(model)
        check_whole(wheres(model, optimizer, extra))
        self._model = model
        self._optimizer = optimizer
        self._scheduler = None if scheduler is None else SchedulerPart(check_schedulers(scheduler))
        self._feed: Feed | FeedGroup | None = None if loader is None else feeds_of(loader)
        self._data = None if self._feed is None else LoopData(self._feed, _weakly(self._parts_now))
        self._extra = dict(extra)
        self.optional = optional_given(optional, self._extra)  # what a save and a restore can do without
        self._progress = Progress()
        self._pending: dict[str, Any] = {}
        self._owed: dict[str, Any] = {}  # what the restored checkpoint says of the settings of those that are pending
        self._policy: dict[str, DriftAction] = {}
        self._taken = 0  # batches handed out since the last optimizer step
        self.recorder: Recorder | None = None  # of a rehearsal: given by a manager that was made in one
        modules = {"model": model, **self._extra}
        self._implied = {name: own_module_parts(name, each) for name, each in modules.items()}
        self._as_attached = Attached()
        components_of(TrainState(extra=self._extra))  # checks the names
        for name in set(self._of_modules) & self._extra.keys():
            raise InvalidArgument(
                f"extra[{name!r}]",
                expected="another name",
                found="that of the states which attached modules say themselves",
                fix="choose another name",
            )
        optimizers = {
            name: part for name, part in self._parts(self._named()).items() if isinstance(part, OptimizerPart)
        }
        self._watch = SchedulerWatch()
        for name, part in optimizers.items():
            self._watch.add(name, part.optimizer)
        scheduled = {name for name in optimizers if self._watch.covers(name, self._schedulers(), self._extra)}
        self._script = hyperparameters(optimizers, scheduled=scheduled)
        if optimizer is not None:
            self._script["attached.optimizer.frozen"] = frozen(model)
        self._watch.check(self._schedulers, self._extra, where="attach.scheduler")
        self._schedules = Schedules(self._scheduler, optimizers, self._extra)
        self._script |= self._schedules.contract
        self._script |= settings_of_root(model, "attached.model") | settings_of_modules(model, "attached.model")
        self._script |= attached_settings(self._extra, loader)
        self.saved_in: dict[
            str, Descent
        ] = {}  # run id -> the checkpoint of it that this run comes from, or is saved as
        self._boundary = WindowProbe({"model": model, "optimizer": optimizer, **self._extra})
        self._steps_of_others = StepWatch(self._attached, self._names_of_parameters)
        self._selection: tuple[str, ...] | None = None  # what a manager saves; None for all
        schedulers = {} if self._scheduler is None else dict(tree.named_leaves(self._scheduler.schedulers, "scheduler"))
        mine = self._schedulers()
        free = (
            {} if mine else {n: p for n, p in optimizers.items() if not self._watch.has_scheduler(n, mine, self._extra)}
        )
        self._rates = Rates({name: part.optimizer for name, part in free.items()})
        self._audit = Audit({**self._attached(), **schedulers}, loader, accepted=unsaved, is_strict=strict)
        self._trained = Trained(self._attached())
        self._averages = SwapProbe(model, self._extra)
        self._is_tried = False  # whether a dry capture has shown that the run can be saved
        self._beside: dict[str, ComponentAdapter] = {}  # components that batches may be drawn from
        for name, target in self._extra.items():
            self._attend(name, target)
        if self._feed is not None:
            self._feed.attend(self._beside)

    def __repr__(self) -> str:
        """What the run holds and where it stands; class names only, because the objects may be large.

        Examples:
            >>> attach(torch.nn.Linear(2, 1), None, extra={"ema": torch.nn.Linear(2, 1)})
            <Live at step 0, epoch 0, 0 samples: model (Linear), trainer, rng, ema (Linear)>
        """
        now, given = self.progress, {"model": self._model, "optimizer": self._optimizer}
        if self._scheduler is not None:
            given["scheduler"] = self._scheduler.schedulers
        held = [f"{name} ({type(each).__name__})" for name, each in given.items() if each is not None]
        held += ["trainer", *(["dataset"] if self._feed is not None else []), "rng"]
        held += [f"{name} ({type(each).__name__})" for name, each in self._extra.items()]
        window = ", inside an accumulation window" if self.is_in_window else ""
        pending = f"; not registered yet: {', '.join(self._pending)}" if self._pending else ""
        at = f"step {now.step}, epoch {now.epoch}, {now.samples} samples"
        return f"<Live at {at}{window}: {', '.join(held)}{pending}>"

    # --- counting ----------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """The counters, as of the last `advance`."""
        if self._feed is None:
            return self._progress
        now, epoch = self._progress, self._feed.epoch  # at each step: `attrs.evolve` costs ten times as much
        return now if now.epoch == epoch else Progress(now.step, epoch, now.samples, now.tokens)

    @property
    def origin(self) -> Origin:
        """The runs that it was restored from or saved into, for a manager that saves it."""
        return Origin(dict(self.saved_in))

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Every attached optimizer by its component, those under ``extra`` included."""
        attached = {"optimizer": self._optimizer, **self._extra}
        return {name: each for name, each in attached.items() if isinstance(each, torch.optim.Optimizer)}

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Every attached module, the model first."""
        attached = (self._model, *self._extra.values())
        return [each for each in attached if isinstance(each, torch.nn.Module)]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the components beside the built-in ones, registered or pending."""
        return (*self._extra, *self._of_modules, *self._pending)

    @property
    def pending(self) -> tuple[str, ...]:
        """Names of components that the restored state had and that nothing is registered for (B15)."""
        return tuple(self._pending)

    def advance(self, *, samples: Samples = None, tokens: int | None = None, steps: int = 1) -> Progress:
        """Count what was trained on; call it after each optimizer step, before anything is saved.

        Args:
            samples: samples trained on since the last call; with a ``DataLoader``, None means those of every batch that was handed
                out, and a number has to agree with them; 0 for a step on none. With several loaders, a number is that of all
                batches or of those of one loader; a dict says it for each by name. On several ranks either those of this rank's
                batches, where all shares have as many, or their sum over all ranks: all ranks save one count, so it has to be the same on each.
            tokens: valid tokens among them.
            steps: optimizer steps; 0 inside an accumulation window, which then stays open: nothing can be saved (A06).

        Returns:
            The counters.

        Raises:
            InvalidArgument: for a negative number, or an optimizer whose scheduler was made meanwhile and is forgotten.
            UnattachedOptimizer: if an optimizer that is not attached has stepped parameters of this run (W13).
            CaptureRefused: at the first step, if the run cannot be saved as it is (W14).
            DataPositionMismatch: if the samples are not those of whole batches from `batches` (G02), or a loader is
                attached and none of its batches came from there since the last step.

        Examples:
            >>> live = attach(torch.nn.Linear(2, 1))
            >>> live.advance(samples=32, tokens=4096)
            Progress(step=1, epoch=0, samples=32, tokens=4096)
        """
        total = samples if samples is None or type(samples) is int else total_of(samples)
        for name, value in (("samples", total or 0), ("tokens", tokens or 0), ("steps", steps)):
            if type(value) is not int or value < 0:
                raise InvalidArgument(f"advance.{name}", expected="an int >= 0", found=repr(value), fix="only count up")
        self._watch.check(self._schedulers, self._extra, where="live.advance")
        if steps:
            self._steps_of_others.check("live.advance")
        taken = self._taken + (0 if self._feed is None else self._feed.undelivered())
        if self._feed is not None and steps and total != 0 and not taken:
            raise mismatch(
                "advance",
                "a step on batches from live.batches(), where a loader is attached",
                "none handed out since the last step",
                "iterate over live.batches() and not over the loader itself; or say samples=0, for a step on no new data",
            )
        counted = no_names(samples) if self._data is None else self._data.advance(samples, steps=steps)
        self._taken = 0 if steps else taken
        counted = counted if total is None else total
        now, epoch = self._progress, 0 if self._feed is None else self._feed.epoch
        self._progress = Progress(now.step + steps, epoch, now.samples + counted, now.tokens + (tokens or 0))
        if steps:
            self._boundary.close()
            self._audit.stepped()
            self._rates.stepped()
            self._averages.stepped()
            if not self._is_tried:
                self._try_capture()
            if self.recorder is not None:
                self.recorder.advanced(self._progress.step, self._progress.epoch)
        else:
            self._boundary.open(counted)
        return self._progress

    def record(self, **values: Any) -> None:
        """Give `trainfold rehearse` values to compare, such as the loss; call it in each step, before `advance` (W15).

        Outside of a rehearsal nothing is kept, and nothing waits for a GPU.

        Args:
            values: numbers, or tensors without dimensions, by name.

        Raises:
            InvalidArgument: for a value that is neither.

        Examples:
            >>> live = attach(torch.nn.Linear(2, 1))
            >>> live.record(loss=torch.tensor(0.5), lr=1e-3)
        """
        check_values(values)
        if self.recorder is not None:
            self.recorder.record(self._progress.step + 1, values)

    def drop_window(self) -> Progress:
        """Give up an accumulation window that the end of the data, or an error, left open (A07).

        Its samples count as consumed, its gradients are cleared, no step is counted.

        Returns:
            The counters.
        """
        dropped = 0 if self._data is None else self._data.drop()
        self._taken = 0
        self._progress = attrs.evolve(self._progress, samples=self._progress.samples + dropped)
        for module in self.modules:
            for parameter in module.parameters():
                parameter.grad = None
        self._boundary.close()
        return self.progress

    def batches(
        self, loader: str | None = None, /, *, epochs: int | None = None, steps: int | None = None
    ) -> Iterator[Any]:
        """The loader's batches from the position on, also in the middle of an epoch, and epoch after epoch.

        ``set_epoch`` is called on samplers that have it, before the position is sought (G04). Where ``epochs`` or
        ``steps`` are reached already, nothing is drawn and no iterator is made (A11); for ``epochs`` a warning is logged.

        In the body of a loop over `epochs` it yields the batches of that epoch. If random streams have moved since a
        restore, they are put back at the first batch, and a warning names them (G11).

        Args:
            loader: its name, where several are attached.
            epochs: stop when the run has had so many, from its beginning; None for no limit.
            steps: stop when the run has had so many optimizer steps, from its beginning; None for no limit.

        Yields:
            What the loader yields.

        Raises:
            InvalidArgument: if no loader was attached.
            DataPositionMismatch: if the loader turns out not to be able to take the position.
        """
        if epochs is not None and self._data is not None and self.progress.epoch >= epochs:
            _LOG.warning("live.batches(epochs=%d) has nothing to give: the run has had %d epochs; raise epochs= to extend it: "
                         '"Train for fewer epochs than were done" in docs/how-to/change-a-run.md', epochs, self.progress.epoch)  # fmt: skip

        def is_done() -> bool:
            return (steps is not None and self._progress.step >= steps) or self._is_over()

        return self._loop_data("live.batches").batches(loader, epochs=epochs, until=steps, done=is_done)

    def epochs(self, n: int) -> Iterator[int]:
        """The epochs that are still to do, for a loop in two levels.

        Inside, ``live.batches()`` yields the rest of that epoch. Leaving it early begins the next epoch, as it does in a
        plain loop, and so does a resume from a save after that. A position that was saved at an epoch's last batch comes back to
        that epoch: no batch is left, and what the body does after them is done.

        A resume inside an epoch runs the start of its body again, which was done before the save. What it changes of the run is put
        back at the first batch, and a warning names it. What moved between the restore and this loop is put back before it (G11).

        Args:
            n: how many epochs the run has, from its beginning.

        Yields:
            The number of each, from the one that the run is in.

        Raises:
            InvalidArgument: if no loader was attached.
            RestoreRefused: at the first batch, if what the start of a body has changed cannot be put back.

        Examples:
            >>> loader = torch.utils.data.DataLoader(torch.arange(4), batch_size=2)
            >>> live = attach(torch.nn.Linear(1, 1), loader=loader)
            >>> for epoch in live.epochs(2):
            ...     for batch in live.batches():
            ...         progress = live.advance(samples=len(batch))
            >>> epoch, progress.step
            (1, 4)
        """
        return self._loop_data("live.epochs").epochs(n, done=self._is_over)

    def _is_over(self) -> bool:
        return self.recorder is not None and self.recorder.is_over(self._progress.step)

    def _loop_data(self, where: str) -> LoopData:
        if self._data is None:
            raise InvalidArgument(where, expected="an attached loader", found="none", fix="attach(..., loader=loader)")
        return self._data

    # --- capture and restore -----------------------------------------------------------------------------------------

    def capture(self) -> TrainState:
        """The run as a value, at a boundary.

        Tensors in it are the live ones, not copies: save it before training goes on. Nothing changes or moves: no
        random stream, no gradient, no mode, no position (C14).

        Returns:
            A state of all components; those that are kept for `register` are in it as they were restored (B15).

        Raises:
            SwappedWeights: while the averaged weights of an attached object stand in the model (B13).
            HiddenStateRefused: where the run was attached with ``strict=True`` and holds state that no component saves (W07).
            IncompleteWindow: inside an accumulation window, as far as it shows: a batch was handed out, or the optimizer
                stepped, without `advance`; `advance` with ``steps=0``; gradients that changed since `advance` (A06).
        """
        return self._read().state

    def view(self) -> LiveView:
        """As `capture`, with the parameter objects themselves, and the random streams read but not yet made values: for a save, at once."""
        return self._read(view=True)

    def _read(self, *, view: bool = False) -> LiveView:
        self.check_boundary()
        named = self._named()
        parts = self._parts(named)
        rng = parts.pop("rng")
        assert isinstance(rng, RngPart)
        late = named.keys() - self.optional  # read after the user's code
        found = captured({name: part for name, part in parts.items() if name not in late}, self.optional)
        streams = rng.read()  # last, because the user's objects may draw to say what they hold
        if any(isinstance(part, ObjectPart | TreePart | OwnModulePart) for part in parts.values()):
            named = self._named()  # the user's code has run, and may have put other tensors into the modules
        values = {
            name: module_state(named[name], view=view) if name in named else found[name]
            for name in parts
            if name in late or name in found
        }
        if not view:
            return LiveView(self._state_of({**values, "rng": streams()}), named)
        return LiveView(self._state_of(values), named, streams)

    def restore(
        self,
        state: TrainState,
        *,
        components: Iterable[str] | None = None,
        policy: Mapping[str, DriftAction] | None = None,
    ) -> None:
        """Make the live objects what a state says: all of it, or nothing if any part does not fit (V12).

        Everything is checked first. Parameters are overwritten in place, so ties and references survive; gradients are
        cleared, to zeros where an optimizer had one when it was captured; ``scheduler.step()`` is not called; random
        streams come last (G11). The state is copied from.

        Args:
            state: from a checkpoint, or captured.
            components: which of them; None for all that this run has, which must all be there.
            policy: what to do about a difference that only the live loader sees: ``num_workers``, ``data_probe``.

        Raises:
            RestoreRefused: with every reason; nothing was changed.
            UnknownComponent: for a name that neither this run nor the state has.
        """
        parts, saved = self._parts(self._named()), components_of(state)
        chosen = validate_components(components, declared=(*self.names, *state.extra))
        self._policy = check_policy(policy)
        if self._feed is not None:
            self._feed.policy = self._policy
        is_scheduled = chosen is None or not self._schedules.components.isdisjoint(chosen)
        adapts = state.origin.adapts if is_scheduled else frozenset()
        saved, unknown = self._schedules.adapted(saved, adapts, parts)
        parts = fitting(parts, saved, [name for name in self.optional if chosen is None or name in chosen])
        reasons = (*unknown, *refusals(parts, saved, chosen))
        if reasons:
            raise RestoreRefused("live", reasons)
        leftover = [name for name in saved if name not in parts and (chosen is None or name in chosen)]
        kept = {name: copied(saved[name]) for name in leftover if name in state.extra}
        wanted = {name: part for name, part in parts.items() if chosen is None or name in chosen}
        write_all(wanted, saved, optional=self.optional)
        self._boundary.close()
        self._audit.restored(self._progress.step, unsaved_of(state.contract))
        if changed := self._trained.put_back(trained_of(state.contract, chosen)):
            _LOG.warning("%s", put_back_text(changed))
        self._rates.restored(state.contract, self._progress.step)
        self._averages.stepped()
        self._taken = 0
        if chosen is None or "trainer" in chosen:
            self.saved_in = dict(state.origin.runs)
        if self._data is not None:
            self._data.restored(SinceRestore(_weakly(self._parts_now), chosen))
        unchosen = () if chosen is None else tuple(name for name in self._pending if name not in chosen)
        self._pending = {**{name: self._pending[name] for name in unchosen}, **kept}
        self._owed = {key: value for name in kept for key, value in saved_settings(state.contract, name).items()}
        if kept:
            _LOG.warning("the state has %s, not registered here: kept until live.register()", list(kept))
        if len(kept) < len(leftover):
            ignored = [name for name in leftover if name not in kept]
            _LOG.warning("the state has %s, and nothing is attached that would take it: ignored", ignored)

    def register(self, name: str, target: Any) -> None:
        """Add a component to a run that may have been restored already (B15).

        Args:
            name: its stable name.
            target: as under ``extra`` of `attach`; if the restored state has a component of this name, it is given to
                the target now.

        Raises:
            InvalidArgument: if the name is taken or cannot be one.
            RestoreRefused: if the target cannot take its state; it is not registered then.
        """
        named = self._named()
        if name in self._parts(named):
            raise InvalidArgument("register.name", expected="a new name", found=name, fix="choose another name")
        components_of(TrainState(extra={name: target}))
        check_whole([(f"register({name!r})", target)])
        implied = own_module_parts(name, target)
        parts = {name: self._part(name, target, _names(named)), **implied}
        owed = {each: part for each, part in parts.items() if each in self._pending}
        settings = attached_settings({name: target}, None)
        drifts = changed_settings(saved_settings(self._owed, name), settings, self._policy)
        reasons = [reason for each, part in owed.items() for reason in part.problems(self._pending[each])]
        reasons += [
            InvalidState("live.register", expected=f"{each.where} = {each.saved}", found=each.wanted, fix="put it back")
            for each in drifts
            if each.verdict == "refuse"
        ]
        if reasons:
            raise RestoreRefused(f"live.register({name!r})", tuple(reasons))
        write_all(owed, self._pending)
        warn_changed(drifts)
        self._script |= settings
        self._owed = {key: value for key, value in self._owed.items() if key not in saved_settings(self._owed, name)}
        self._pending = {each: held for each, held in self._pending.items() if each not in owed}
        self._extra[name] = target
        self._attend(name, target)
        self._implied[name] = implied
        self._boundary.watch(name, target)
        self._steps_of_others.forget()
        self._audit.attach(name, target)
        self._trained.attach(name, target)
        self._averages = SwapProbe(self._model, self._extra)
        self._is_tried = False
        if isinstance(target, torch.optim.Optimizer):
            self._watch.add(name, target)

    def will_save(self, components: Iterable[str] | None) -> None:
        """Say which components the manager of this run saves: the others need not be save-able. A manager calls it.

        Args:
            components: names; None for all.
        """
        self._selection = None if components is None else tuple(components)

    def check_whole(self) -> None:
        """Raise if an attached object holds a part of its state on each rank in a form that looks whole.

        Raises:
            InvalidArgument: for FSDP1's flat parameters and a ``ZeroRedundancyOptimizer``.
        """
        check_whole(wheres(self._model, self._optimizer, self._extra))

    def check_boundary(self) -> None:
        """Raise unless the run is between two optimizer steps, as far as that shows (A06).

        Raises:
            IncompleteWindow: saying what is open.
        """
        self._steps_of_others.check("live")
        self._averages.check()
        found = self._boundary.evidence()
        if found is None and self._data is not None:
            found = self._data.unaccounted()
        if found:
            raise IncompleteWindow(
                "live",
                expected="a boundary: a whole number of optimizer steps, counted by advance()",
                found=found,
                fix="save after optimizer.step() and live.advance(samples=...); or live.drop_window() to give it up",
            )

    def check_counted(self) -> None:
        """Raise if an optimizer has stepped since the last `advance`: a loop that never counts is never saved (W11).

        Raises:
            IncompleteWindow: naming the optimizers.
            UnattachedOptimizer: if it was an optimizer that is not attached: `advance` refuses it, where it is called.
        """
        taken = self._boundary.uncounted()
        if taken:
            raise IncompleteWindow(
                "live.advance",
                expected="a call after each optimizer step, before manager.step(live)",
                found=taken,
                fix="call live.advance(samples=...) after optimizer.step()",
            )
        self._steps_of_others.check("manager.step")

    @property
    def is_in_window(self) -> bool:
        """Whether an accumulation window was declared open by ``advance(steps=0)``."""
        return self._boundary.open_samples > 0

    def contract(self) -> dict[str, Any]:
        """What must be the same at a resume for it to be exact, as plain values, beside what the state itself says.

        Hyperparameters are those that the script gave: as they were when it attached the optimizers. So a changed learning
        rate is a difference, and one that the loop sets by hand as it goes is none. Where an attached scheduler works on a
        group, its base (``initial_lr``, ``max_lr``) is compared; what the scheduler makes of it says ``"live"``, is not
        compared, and goes on with the value that was saved. Frozen parameters of the model are those of then, too, so that
        a loop may freeze and unfreeze as it goes.
        """
        found: dict[str, Any] = {} if self._feed is None else self._feed.contract()
        if self._scheduler is not None:
            found["scheduler.kind"] = self._scheduler.kinds()
        if self._audit.unsaved:
            found[UNSAVED] = self._audit.unsaved
        found |= self._rates.contract()
        if trained := self._trained.contract():
            found[TRAINED] = trained
        return {**found, **self._owed, **self._script}

    # --- inside ------------------------------------------------------------------------------------------------------

    def _try_capture(self) -> None:
        """Find out at the first step what no save could save; where the user's code draws, the streams are put back."""
        parts = self._parts(self._named())
        rng = parts["rng"]
        assert isinstance(rng, RngPart)
        with preserved_rng(rng.device):
            late = [
                problem
                for name, own in self._implied.items()
                for problem in late_problems(name, self._attached()[name], own)
            ]
            needed = {name: part for name, part in parts.items() if name not in self.optional}
            reasons = tuple(late) + dry_capture(needed, self.contract, chosen=self._selection)
        if reasons:
            raise CaptureRefused("live.advance", reasons)
        self._is_tried = True

    def _names_of_parameters(self) -> dict[int, str]:
        return _names(self._named())

    def _attached(self) -> dict[str, Any]:
        found = {"model": self._model, "optimizer": self._optimizer, **self._extra}
        return {name: target for name, target in found.items() if target is not None}

    @property
    def _of_modules(self) -> dict[str, OwnModulePart]:
        """What attached modules say themselves, by component."""
        return {name: part for own in self._implied.values() for name, part in own.items()}

    def _schedulers(self) -> list[Any]:
        return [] if self._scheduler is None else tree.leaves(self._scheduler.schedulers)

    def _state_of(self, found: Mapping[str, Any]) -> TrainState:
        late = late_schedules(self._optimizer, lambda: _names(self._named()), self._script)
        state = state_of({**found, **copied_containers(self._pending)})
        self._audit.check(state, self._progress.step, self._selection)
        if self._data is not None:
            self._data.was_saved()
        return state.evolve(contract={**late, **self.contract()}, origin=self.origin)

    def _parts_now(self) -> dict[str, ComponentAdapter]:
        return self._parts(self._named())

    def _named(self) -> dict[str, NamedTensors]:
        """What the attached modules hold, by component."""
        modules = {"model": self._model, **self._extra}
        return {name: named_tensors(each) for name, each in modules.items() if isinstance(each, torch.nn.Module)}

    def _parts(self, named: Mapping[str, NamedTensors]) -> dict[str, ComponentAdapter]:
        """The components, in the order in which they are written: what may refuse comes first, random streams last."""
        names = _names(named)
        extras = {name: self._part(name, target, names) for name, target in self._extra.items()}
        parts: dict[str, ComponentAdapter] = {
            n: part for n, part in extras.items() if isinstance(part, ObjectPart | TreePart)
        }
        if self._scheduler is not None:
            parts["scheduler"] = self._scheduler
        if self._data is not None:
            parts["dataset"] = self._data
        if self._optimizer is not None:
            extras = {"optimizer": self._part("optimizer", self._optimizer, names), **extras}
        parts.update({n: part for n, part in extras.items() if isinstance(part, OptimizerPart) and part.has_own_way})
        extras["model"] = ModulePart(self._model)
        for name, own in self._implied.items():
            if own:  # what a module says itself comes after its weights, and may be refused
                parts[name] = ModulePart({"model": self._model, **self._extra}[name], name, can_undo=True)
                parts.update(own)
        parts.update({n: part for n, part in extras.items() if n not in parts})
        parts["trainer"] = CountersPart(lambda: self.progress, self._set_progress)
        parts["rng"] = RngPart(bound_device(list(named["model"].params.values())))
        return parts

    def _part(self, name: str, target: Any, names: Mapping[int, str]) -> ComponentAdapter:
        if isinstance(target, torch.nn.Module):
            return ModulePart(target, name)
        if isinstance(target, torch.optim.Optimizer):
            return OptimizerPart(target, names, name, self._as_attached.of(name, target))
        if is_generator(target):
            return GeneratorPart(target, name)
        if isinstance(target, Stateful):
            return ObjectPart(target, name)
        if isinstance(target, tuple) and len(target) == 2 and all(callable(function) for function in target):
            return TreePart(*target, name)
        raise InvalidArgument(
            f"extra[{name!r}]",
            expected="a module, an optimizer, an object with state_dict and load_state_dict, or (get, set)",
            found=f"a {type(target).__qualname__}",
            fix="pass a pair of functions that return its tree and take it back",
        )

    def _attend(self, name: str, target: Any) -> None:
        if not isinstance(target, torch.nn.Module | torch.optim.Optimizer):
            part = self._part(name, target, {})
            self._beside.update({name: part} if is_beside(part) else {})

    def _set_progress(self, progress: Progress) -> None:
        self._progress = progress


def _weakly(
    method: Callable[[], Mapping[str, ComponentAdapter]],
) -> Callable[[], Mapping[str, ComponentAdapter] | None]:
    """A call of a method, which does not keep its object alive."""
    kept = weakref.WeakMethod(method)

    def call() -> Mapping[str, ComponentAdapter] | None:
        found = kept()
        return None if found is None else found()

    return call


def _names(named: Mapping[str, NamedTensors]) -> dict[int, str]:
    """``id(parameter)`` -> name, for the model and the modules among the extras."""
    found = {id(value): name for name, value in named["model"].params.items()}
    for component, each in named.items():
        for name, value in each.params.items() if component != "model" else ():
            found.setdefault(id(value), f"{component}.{name}")
    return found
