"""`Live`: the mutable objects of a training loop, read as one `TrainState` and written back from one."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, final

from trainfold.adapters.batches.feed import Feed
from trainfold.adapters.components.component import ComponentAdapter, copied_containers
from trainfold.adapters.live.attached_objects import AttachedObjects
from trainfold.adapters.live.counters import Counters, check_increments
from trainfold.adapters.live.dry_capture import dry_capture
from trainfold.adapters.live.loop.loop_data import LoopData
from trainfold.adapters.live.loop.loops_over_data import LoopsOverData
from trainfold.adapters.live.pending import PendingComponents
from trainfold.adapters.live.redo import Redo
from trainfold.adapters.live.restore import OnAnyRank, checked, checked_by_all, has_refusable, read_in_place, write_all
from trainfold.adapters.live.run_watch import RunWatch
from trainfold.adapters.live.view import LiveView, read_objects
from trainfold.adapters.loaders.group import FeedGroup, Samples
from trainfold.adapters.outside.held_masters import HeldMasters
from trainfold.adapters.outside.outside_weights import OutsideWeights
from trainfold.adapters.outside.selects_components import SelectsComponents
from trainfold.adapters.outside.takes_weights import TakesWeights
from trainfold.adapters.parallel.end_together import end_together
from trainfold.adapters.parallel.microbatches import GradientWindows, Microbatches
from trainfold.adapters.parallel.share import share_of_model
from trainfold.adapters.parallel.sharing import Shared
from trainfold.adapters.script.accelerate_wrappers import unwrapped
from trainfold.adapters.script.attached_settings import attached_settings
from trainfold.adapters.watch.averaged import SwapsAverages
from trainfold.adapters.watch.recorder import Recorder, check_values
from trainfold.backends.formats.native.unread import UnreadTensors
from trainfold.backends.ranks.in_process import ALONE
from trainfold.backends.ranks.left_out import texts_of_left_out, warn_of_left_out, warn_of_nothing
from trainfold.core.component_names import torn_pairs
from trainfold.core.data.batches_read import BatchesRead
from trainfold.core.errors import CaptureRefused, InvalidArgument
from trainfold.core.layout.world import Collectives
from trainfold.core.resume.drift import DriftAction, check_policy
from trainfold.core.state.components import all_of, components_of, state_of
from trainfold.core.state.parent_checkpoint import ParentCheckpoint
from trainfold.core.state.state import Origin, Progress, TrainState


@final
class Live(LoopsOverData, GradientWindows, TakesWeights, SelectsComponents, SwapsAverages):
    """A mutable run. Make it with `attach`.

    Law: run k steps, `capture`, build every object again, `restore`, run n steps = run k + n steps, bit for bit.

    Attributes:
        components: those that its checkpoints have; None for all.
        optional: components that a save and a restore can do without.
        recorders: of a rehearsal, and of a flight log; set by managers.
        share: which share of the data this rank reads; None if only the caller knows.
        saved_in: run id -> its checkpoint that this run comes from, or was saved as.
        unread: what a restore reads in place; set by a manager.
        outside: what comes from a source of weights, and not from checkpoints; None for nothing.
        began: tensor -> the source that its first values came from, as far as that is known.
    """

    def __init__(  # noqa: PLR0913 - keywords
        self,
        objects: AttachedObjects,
        feed: Feed | FeedGroup | None,
        watch: RunWatch,
        optional: Collection[str],
        outside: OutsideWeights | None = None,
        *,
        components: Collection[str] | None = None,
    ) -> None:
        self._objects, self._watch, self.outside = objects, watch, outside
        self._feed, self.share = feed, None if feed is None else feed.share
        self._data = None if feed is None else LoopData(feed, self._parts_now)
        self.optional = frozenset(optional)
        self.recorders: tuple[Recorder, ...] = ()
        self.saved_in: dict[str, ParentCheckpoint] = {}
        self.unread: UnreadTensors | None = None
        self.began: Mapping[str, str] = {}
        self._counters = Counters(self._data)
        self._microbatches = Microbatches(objects.ranks, objects, self._counters, watch.loop)
        self._pending = PendingComponents()
        self.components: tuple[str, ...] | None = None
        self.components = self.selected(components, where="attach.components")
        self.check_selected(self.components, where="attach.components")
        warn_of_nothing(self.components, self.present)
        self._selection = self.components  # what a manager saves; None for all
        self._has_met = False  # whether the loaders of the ranks were compared
        self._is_tried = False  # whether a dry capture has shown that the run can be saved
        self._extras = objects.loader_extras()  # components that batches may be drawn from
        if feed is not None:
            feed.attend(self._extras)

    def __repr__(self) -> str:
        """The components and the counters; class names only, because the objects may be large."""
        now = self.progress
        window = ", inside an accumulation window" if self.is_in_window else ""
        pending = f"; not registered yet: {', '.join(self.pending)}" if self.pending else ""
        at = f"step {now.step}, epoch {now.epoch}, {now.samples} samples"
        return f"<Live at {at}{window}: {', '.join(self._objects.shown(has_data=self._feed is not None))}{pending}>"

    # --- counting ----------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """The counters, as of the last `advance`."""
        return self._counters.progress

    @property
    def origin(self) -> Origin:
        """The runs it was restored from or saved into, for a manager that saves it."""
        outside = self.outside
        if outside is None:
            return Origin(dict(self.saved_in))
        return Origin(
            dict(self.saved_in), outside=frozenset({"model"} if outside.is_whole else ()), frozen=outside.frozen
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the components beside the built-in ones, registered or pending."""
        return (*self._objects.extra, *self._objects.own_states, *self.sharing.names, *self._pending.values)

    @property
    def pending(self) -> tuple[str, ...]:
        """Names of restored components for which nothing is registered yet."""
        return tuple(self._pending.values)

    @property
    def present(self) -> tuple[str, ...]:
        """Names of the components that it has now, built-in ones too; pending ones are in `names`."""
        return tuple(self._parts_now())

    def advance(self, *, samples: Samples = None, tokens: int | None = None, steps: int | None = None) -> Progress:
        """Count what was trained on; call it after each optimizer step, before anything is saved.

        Args:
            samples: samples trained on since the last call. With a ``DataLoader``, None counts every batch handed out; a number must agree
                with them; 0 is a step on no data. With several loaders, pass the number of all batches or of one loader's, or a dict of
                numbers by loader name. On several ranks, pass the number of this rank's batches if all shares have as many, or the sum
                over all ranks: all ranks save one count, so it must be the same on each.
            tokens: valid tokens among them; on several ranks those of all ranks, such as the weight that `check` returns.
            steps: optimizer steps; 0 inside an accumulation window, which then stays open: nothing can be saved. None for 0 inside a
                window of `microbatch` or of ``accelerator.accumulate`` (with an optimizer that accelerate has prepared), and else 1.

        Returns:
            The counters.

        Raises:
            InvalidArgument: for a negative number, or an optimizer whose scheduler was made meanwhile and is not attached.
            UnattachedOptimizer: if an unattached optimizer has stepped parameters of this run.
            IncompleteWindow: for a step inside a window of `microbatch` or ``accelerator.accumulate``, or one of parameters whose gradients FSDP2 holds back.
            InvalidState: if an optimizer steps a parameter that was frozen when ``DistributedDataParallel`` wrapped its module, or nothing has
                set a tensor of a model that was built on meta.
            CaptureRefused: at the first step, if the run cannot be saved as it is.
            DataPositionMismatch: if the samples are not those of whole batches from `batches`, or a loader has handed out none since then.

        Examples:
            >>> import torch
            >>> from trainfold import attach
            >>> live = attach(torch.nn.Linear(2, 1))
            >>> live.advance(samples=32, tokens=4096)
            Progress(step=1, epoch=0, samples=32, tokens=4096)
        """
        if self.swap is not None:
            self.check_trained("live.advance")
        if self._objects.accelerated.optimizers:
            steps = self._objects.accelerated.steps(steps)
        steps = (0 if self._microbatches.done else 1) if steps is None else steps
        check_increments(samples, tokens, steps)
        if steps and (self._microbatches.done or self._microbatches.is_torn):
            self._microbatches.check_closed("live.advance")
        self._watch.check_step("live.advance", is_step=steps > 0)
        if steps:
            self._microbatches.check_reduced(self._watch.window.steps)
            if self.outside is not None:
                self.outside.stepped("live.advance")
        counted = self._counters.advance(
            samples, tokens=tokens or 0, steps=steps, is_scheduled=self._microbatches.ramp is not None
        )
        progress = self._counters.progress
        if self.recorders:
            self._tell_consumed()
        if not steps:
            self._watch.window.open(counted)
            return progress
        self._watch.stepped()
        if not self._is_tried:
            self._try_capture()
        for each in self.recorders:
            each.advanced(progress)
        return progress

    def record(self, **values: Any) -> None:
        """Give `trainfold rehearse`, and a manager that records, values to compare, such as the loss; call it in each step, before `advance`.

        Args:
            values: numbers, or tensors without dimensions, by name. Otherwise nothing is kept, and nothing waits for a GPU. A flight log
                keeps ``loss`` and ``grad_norm``, and a journal those names that do not come in each step, as of an evaluation: a value in ten steps.

        Raises:
            InvalidArgument: for any other value.
        """
        check_values(values)
        for each in self.recorders:
            each.record(self._counters.step + 1, values)

    def drop_window(self) -> Progress:
        """Discard an accumulation window that the end of the data, or an error, left open, and return the counters.

        Its samples count as consumed, its gradients are cleared, and no step is counted. Modules of torch that an error has interrupted in
        their backward can run again. Call it on every rank.
        """
        self._counters.drop()
        self._microbatches.drop()  # before: FSDP2 may have gathered parameters whose gradients are not those of the optimizer
        self._objects.clear_gradients()
        self._watch.window.close()
        if self.recorders:
            self.take_logged()  # what is dropped is in no step
        return self.progress

    def _is_over(self, steps: int | None = None) -> bool:
        step = self._counters.step
        return (steps is not None and step >= steps) or any(each.is_over(step) for each in self.recorders)

    # --- capture and restore -----------------------------------------------------------------------------------------

    def capture(self) -> TrainState:
        """Return the run as a value; call it at a boundary.

        Its tensors are the live ones, not copies: save it before training goes on. Nothing moves: no stream, gradient, mode or position.
        Components that wait for `register` are in it as they were restored.

        Raises:
            SwappedWeights: while the averaged weights of an attached object stand in the model.
            HiddenStateRefused: if the run was attached with ``strict=True`` and holds state that no component saves.
            IncompleteWindow: inside an accumulation window, as far as it shows: after a batch or an optimizer step without `advance`, after
                `advance` with ``steps=0``, or if gradients changed since `advance`.
            InvalidState: if nothing has set a tensor of a model that was built on meta.
        """
        self._watch.check_set("live.capture")
        found = self.read(view=False)
        warn_of_left_out(texts_of_left_out([found.left_out]), ALONE)
        return found.state

    def read(self, *, view: bool, is_saved: bool = True) -> LiveView:
        """The run at a boundary, and the optional components that cannot be saved, for which nothing was warned yet.

        Args:
            view: True for no copy, valid only during a save call; False for the state that `capture` returns.
            is_saved: False for a look at the tensors, of which the run need not know.
        """
        self.check_boundary()
        if view:
            self._watch.check_set("live")
        values, named, streams, left_out = read_objects(self._objects, self._parts, self.optional, view=view)
        if self.swap is not None:
            values = {**values, "model": self.swap.trained(values["model"])}
        state = self._state_of(values if view else {**values, "rng": streams()}, is_saved=is_saved)
        return LiveView(state, named, streams if view else None, left_out)

    def restore(
        self,
        state: TrainState,
        *,
        components: Iterable[str] | None = None,
        policy: Mapping[str, DriftAction] | None = None,
        collectives: Collectives | None = None,
        without: Collection[str] = (),
    ) -> None:
        """Write a state into the live objects: all of it, or nothing if any part does not fit.

        Everything is checked first. Parameters are overwritten in place, so ties and references survive. Gradients are cleared, or set to zeros
        where an optimizer had one at the capture. ``scheduler.step()`` is not called. Random streams come last. The state is copied.

        Args:
            state: from a checkpoint, or captured.
            components: which of them; None for all that this run has, or was attached with, which must all be there.
            policy: what to do about a difference that only the live loader sees: ``num_workers``, ``data_probe``.
            collectives: the ranks, all of which call: all are restored or none is. None for this process alone.
            without: optional components that keep their state, and of which the user has been warned.

        Raises:
            RestoreRefused: with every reason; nothing was changed. On the other ranks it is `RankFailed`.
            UnknownComponent: for a name that neither this run nor the state has.
            HalfRestored: if memory could not be overwritten: end the process.
        """
        self.check_trained("live.restore")
        world = ALONE if collectives is None else collectives
        state = self._with_outside(state, world)
        (parts, saved, chosen), out, on_any = checked_by_all(
            world, lambda: self._checked(state, components, policy, without), has=self._has
        )
        wanted = {each: part for each, part in parts.items() if each not in out and (chosen is None or each in chosen)}
        warn_of_nothing(chosen, parts)
        masters = HeldMasters(one for name, one in self.optimizers.items() if name not in wanted)
        write_all(
            wanted,
            saved,
            self.optional,
            world,
            begins=self._watch.overwrites,
            unread=self.unread,
            refusable=on_any.refusable,
        )
        masters.refresh()
        if self.outside is not None and self.outside.is_whole:
            HeldMasters(
                self.optimizers.values()
            ).refresh()  # those of the checkpoint belong to the weights that it left out
        self._restored_weights(state, chosen)
        self._watch.restored(state.contract, chosen, self._counters.step, self._pending.policy)
        self._counters.restored()
        self._microbatches.drop()
        if chosen is None or "trainer" in chosen:
            self.saved_in = dict(state.origin.runs)
        if self._data is not None:
            self._data.restored(chosen)
        self._pending.restored(state, saved, parts, chosen)
        if chosen is None or "dataset" in chosen:
            self._has_met = True
            if on_any.loaders:
                self.meet(world, again=True)

    def _checked(
        self, state: TrainState, components: Iterable[str] | None, policy: Any, without: Collection[str]
    ) -> Any:
        parts = {name: part for name, part in self._parts_now().items() if name not in without}
        saved = {name: value for name, value in components_of(state).items() if name not in without}
        chosen = self.selected(components, where="Live.restore.components", others=state.extra)
        self._pending.policy = check_policy(policy)
        if self._feed is not None:
            self._feed.policy = self._pending.policy
        there = all_of(state)
        torn = torn_pairs(saved, present=there) if chosen is None else torn_pairs(chosen, present={*there, *parts})
        saved, unknown = self._watch.adapted(saved, parts, state.origin.adapts, chosen)
        left_out = checked(parts, saved, chosen, unknown=(*torn, *unknown), optional=self.optional)
        return (parts, saved, chosen), left_out

    def _has(
        self, checked: tuple[Mapping[str, ComponentAdapter], Mapping[str, Any], Collection[str] | None]
    ) -> OnAnyRank:
        parts, saved, chosen = checked
        wanted = {name: part for name, part in parts.items() if name in saved and (chosen is None or name in chosen)}
        return OnAnyRank(has_refusable(wanted), self._data is not None and bool(self._data.feeds()))

    @property
    def sums_change(self) -> bool:
        """Whether DDP sums gradients in another order after a backward that is still to come, as its first one is."""
        return self._watch.sums_change

    @property
    def holds_gradients_back(self) -> bool:
        """Whether FSDP2 has gradients that `redo` does not put back, because they are in no ``grad`` yet."""
        return self._watch.window.holds_gradients_back

    def redo(self) -> Redo:
        """What takes the objects back to now, without counters and position, so that a step can run again."""
        self.check_trained("live.redo")
        parts = {name: part for name, part in self._parts_now().items() if name not in ("trainer", "dataset")}
        names = self._objects.names_of_parameters()
        tensors = {names.get(id(each), str(id(each))): each for module in self._objects.modules for each in module.parameters()}  # fmt: skip
        return Redo(parts, tensors, self._objects.modules, self._watch, self._wait_to_write)

    def register(self, name: str, target: Any, *, sharing: Mapping[str, Shared] | None = None) -> None:
        """Add a component to a run that may have been restored already.

        Args:
            name: its stable name.
            target: as under ``extra`` of `attach`. If the restored state has a component of this name, the target gets it now.
            sharing: what ranks do not have alike of it, as in `attach`: ``{"meter": "each_rank"}`` for the component ``meter``, or ``{"average.buffers":
                "rank_0"}`` for the buffers of a module.

        Raises:
            InvalidArgument: if the name is taken or cannot be one, for a declaration of something else, or if the run was attached with ``components=``.
            RestoreRefused: if the target cannot take its state; it is not registered then.
        """
        accelerated = self._objects.accelerated.and_among(target, self._objects.extra.values())
        target, named = unwrapped(target), self._objects.named()
        taken, declared = self._parts(named), self._objects.new_sharing(name, target, sharing)
        for each in (name, *declared.names):
            if each in taken:
                raise InvalidArgument("register.name", expected="a new name", found=each, fix="choose another name")
        self.check_may_register(name)
        parts = self._objects.new_parts(name, target, named, declared)
        settings = attached_settings({name: target}, None, is_part=self._objects.stage is not None)
        self._pending.give(name, parts, settings)
        self._objects.add(name, target, parts, declared)
        self._objects.accelerated = accelerated
        self._extras.update(self._objects.loader_extras())
        self._watch.registered(name, target, settings)
        self._is_tried = False

    # --- for a manager -----------------------------------------------------------------------------------------------

    def will_save(self, components: Iterable[str] | None) -> None:
        """Set which components the manager of this run saves, None for all; the others need not be save-able."""
        self._selection = None if components is None else tuple(components)

    def meet(self, world: Collectives, *, again: bool = False) -> None:
        """Compare the loaders with those of the other ranks, which all call, so that their epochs end together.

        Args:
            world: the ranks.
            again: whether they have other positions since the last time, after a restore. The first time is at the first boundary at the latest.
        """
        if self._has_met and not again:
            return
        self._has_met, feeds = True, {} if self._data is None else self._data.feeds()
        is_late = not again and self._counters.step > 0
        end_together(self, feeds, world, self._objects.uneven, self._counters, is_late=is_late)

    def take_logged(self) -> list[str]:
        """Digests of the batches of all loaders that were consumed since the last call, for a flight log; the next ones are digested for it from here on."""
        feeds = {} if self._data is None else self._data.feeds()
        return [digest for feed in feeds.values() for digest in feed.take_logged()]

    def batches_read(self, world: Collectives) -> BatchesRead | None:
        """The share of the data for which this rank trains, and its last batches, for loaders whose samplers have no shares; None if nothing says the share."""
        share = None if self._data is None or self._objects.stage is not None else share_of_model(self, world)
        if self._data is None or share is None:
            return None
        feeds = {name: feed for name, feed in self._data.feeds().items() if feed.shared_order is None}
        return share, {name: feed.last_read for name, feed in feeds.items() if feed.last_read is not None}

    def may_stay_unread(self, components: Iterable[str] | None) -> UnreadTensors:
        """What a restore of these components can read in place; None for all."""
        return read_in_place(self._parts_now(), components)

    def check_resets(self, reset: Collection[str]) -> None:
        """Raise `InvalidArgument` if one half of what has a learning rate in common is reset alone."""
        self._watch.check_resets(reset)

    def attached(self) -> Mapping[str, Any]:
        """Every attached object by its component, without the schedulers."""
        return self._objects.attached()

    def extra_values(self) -> Mapping[str, Any]:
        """The values of the components under ``extra`` now; tensors are the live ones."""
        return self.read(view=False, is_saved=False).state.extra

    def check_whole(self) -> None:
        """Raise `InvalidArgument` if an attached object holds only a part of its state on each rank, but looks whole."""
        self._objects.check_whole()

    def overwrites(self, *, is_over: bool = False) -> None:
        """Note that weights are written into the model from here on, or that all of them were; in between a run is not saved."""
        self._watch.overwrites(is_over=is_over)

    def check_boundary(self) -> None:
        """Raise unless the run is between two optimizer steps, as far as that shows.

        Raises:
            IncompleteWindow: naming what is open; `HalfRestored` after a restore that failed halfway.
        """
        self._microbatches.check_closed("live")
        self._watch.check_boundary(self.uncounted, is_swapped=self.swap is not None)

    def uncounted(self) -> str | None:
        """Batches that were handed out and not counted since, in words; None if there are none."""
        return None if self._data is None else self._data.unaccounted()

    def check_counted(self) -> None:
        """Raise if an optimizer has stepped since the last `advance`: a loop that never counts is never saved.

        Raises:
            IncompleteWindow: naming the optimizers.
            UnattachedOptimizer: if an unattached optimizer has stepped parameters of this run.
        """
        self._watch.check_counted()

    @property
    def is_in_window(self) -> bool:
        """Whether an accumulation window is open, by ``advance(steps=0)``, by `microbatch` or by ``accelerator.accumulate``."""
        is_counted = self._watch.window.open_samples > 0 or self._microbatches.done > 0
        return is_counted or self._microbatches.is_torn or self._objects.accelerated.is_accumulating

    def contract(self) -> dict[str, Any]:
        """What must be the same at a resume for it to be exact, as plain values, beside the state itself.

        Hyperparameters and frozen parameters are those of the script at the attach: what the loop sets as it goes is not compared. Where
        an attached scheduler works on a group, its base (``initial_lr``, ``max_lr``) is compared. What the scheduler makes of it is written as
        ``"live"``, and continues with the saved value.
        """
        found: dict[str, Any] = {} if self._feed is None else self._feed.contract()
        return {
            **found,
            **self._watch.contract(),
            **self._pending.settings,
            **self._watch.settings(),
            **self._outside(),
        }

    # --- inside ------------------------------------------------------------------------------------------------------

    def _tell_consumed(self) -> None:
        batches = self.take_logged()
        for each in self.recorders:
            each.consumed(batches)

    def _try_capture(self) -> None:
        """Find out at the first step whether every save would fail; put the streams back if user code draws."""
        parts = {name: part for name, part in self._parts_now().items() if name not in self.optional}
        reasons = dry_capture(parts, self._objects.late_problems, self.contract, chosen=self._selection)
        if reasons:
            raise CaptureRefused("live.advance", reasons)
        self._is_tried = True

    def _state_of(self, found: Mapping[str, Any], *, is_saved: bool) -> TrainState:
        late = self._watch.late_settings()
        state = state_of({**found, **copied_containers(self._pending.values)})
        if is_saved:
            self._watch.check_saved(state, self._counters.step, self._selection)
        if is_saved and self._data is not None:
            self._data.was_saved()
        return state.evolve(contract={**late, **self.contract()}, origin=self.origin, stage=self._objects.stage)

    def _parts_now(self) -> dict[str, ComponentAdapter]:
        return self._parts(self._objects.named())

    def _parts(self, named: Any) -> dict[str, ComponentAdapter]:
        return self._objects.parts(named, dataset=self._data, trainer=self._counters)
