"""`make_step`: one optimizer step as a function from a state and a batch to the next state."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.checks import count, real_given
from trainfold.core.errors import InvalidArgument, NonFinite, place
from trainfold.core.json_values import Json, shown
from trainfold.core.layout.data_parallel import Replicas
from trainfold.core.layout.parallelism import Parallelism
from trainfold.core.layout.world import Collectives
from trainfold.core.optim.schedule import ScheduleFunction, check_schedule, describe_schedule
from trainfold.core.rng import Key, fold_in, forked_rng
from trainfold.core.state.contract import checked_contract, noted_settings, settings_at_risk
from trainfold.core.state.contract_kinds import STEP_PREFIX
from trainfold.core.state.leaves import Lease, Leaves
from trainfold.core.state.state import ModelState, Scalar, TrainableState, TrainState
from trainfold.core.step.batch_ramp import BatchRamp
from trainfold.core.step.engine.first_batch import FirstBatch
from trainfold.core.step.engine.module_template import ModuleSpec, check_silent
from trainfold.core.step.engine.param_hooks import check_hooks
from trainfold.core.step.engine.workspace import StepWorkspace, WorkspacePool
from trainfold.core.step.gradients import LossFunction, WindowResult, judge, run_window
from trainfold.core.step.loss import Totals
from trainfold.core.step.microbatch import split
from trainfold.core.step.next_state import Metrics, check_updated, consume, next_state, skipped_state, step_metrics
from trainfold.core.step.optimizer import Optimizer, OptimizerLike, pair_of
from trainfold.core.step.reduce import exchange, exchange_totals
from trainfold.core.step.rows.by_rows import check_by_rows
from trainfold.core.step.rows.parts import rows_of
from trainfold.core.step.rows.sharded import Sharded
from trainfold.core.step.state_checks import check_contract, check_trainable, factor_of, key_of

B = TypeVar("B")
_ALONE = contextlib.nullcontext()


@final
@attrs.frozen(eq=False)
class Step(Generic[B]):
    """A training step; make one with `make_step`, and call it. Calls in several threads do not disturb each other.

    Its type parameter is the batch: what the loss function takes.

    Attributes:
        contract: what must not change at a resume, as plain scalars.
        donate: whether a call consumes its state.
    """

    contract: Mapping[str, Json]
    donate: bool
    _loss_fn: LossFunction[B]
    _optimizer: Any
    _schedule: ScheduleFunction | None
    _scheduler: Mapping[str, Scalar] | None
    _accumulate: int | BatchRamp
    _clip_norm: float | None
    _parallelism: Parallelism | None
    _pool: WorkspacePool
    _first_batch: FirstBatch = attrs.field(factory=FirstBatch)

    def __repr__(self) -> str:
        """What was passed to `make_step`; the loss by its name."""
        loss = getattr(self._loss_fn, "__qualname__", type(self._loss_fn).__qualname__)
        how = f"accumulate={self._accumulate}, clip_norm={self._clip_norm}, donate={self.donate}"
        return f"Step({loss}, {self._optimizer!r}, {how})"

    def __call__(self, state: TrainState, batch: B | list[B]) -> tuple[TrainableState, Metrics]:
        """Do one optimizer step.

        Args:
            state: the state at a boundary, not consumed, and of this model.
            batch: a tree whose tensors share dimension 0, or a list of ready-made microbatches. With several ranks,
                it is this rank's share.

        Returns:
            The next state and the metrics: ``loss`` (the mean over the window and the ranks), ``grad_norm`` (before
            clipping), ``lr`` (of the first group), ``weight``, and the loss function's own metrics. They are Python
            numbers, because the check for non-finite values has read them already: reading them costs no second
            wait for the device.

        Raises:
            NonFinite: before anything is updated. The state can still be used. ``error.skipped`` is the state without
                this batch: its `DataCursor` is already past the batch, so a loop continues with
                ``state = error.skipped`` alone.
            StateDonated: if an earlier step consumed the state.
            InvalidBatch: if the batch cannot be split, or has no weight.
            InvalidArgument: if the loss does not depend on any parameter, or is not a `Loss`.
            SharedStorage: if two leaves of a state to be donated share storage.
        """
        with self._reporting():
            ready, key = self._check(state)
            factor = factor_of(self._schedule, ready.trainer.step)
            micro, samples = split(batch, _microbatches(self._accumulate, ready.trainer.step))
        with self._pool.workspace(ready) as workspace:
            verdict = self._measure(workspace, ready, micro, samples, key)
            with self._reporting(), self._update_rng(ready, key, workspace):
                if workspace.bound is None:
                    return self._update_by_function(workspace, ready, verdict, factor)
                return self._update(workspace, ready, verdict, 1.0 if factor is None else factor)

    def _check(self, state: TrainState) -> tuple[TrainableState, Key]:
        ready = check_trainable(state, needs_optimizer_state=isinstance(self._optimizer, Optimizer))
        check_schedule(ready.scheduler, self._scheduler)
        check_contract(ready, self.contract)
        return ready, key_of(ready)

    def _measure(
        self, workspace: StepWorkspace, state: TrainableState, micro: list[B], samples: int, key: Key
    ) -> WindowResult:
        """Run forward and backward, and check the result. If it raises, the state is unchanged."""
        ranks = self._parallelism
        alone = ranks is None and len(micro) == 1
        totals = Totals()
        with self._reporting():
            self._enter(workspace, state)
        try:
            with self._reporting():
                if self.donate and workspace.bound is not None:
                    workspace.template.keep_buffers()  # otherwise the buffers are copies already
                totals = run_window(
                    micro,
                    step=state.trainer.step,
                    module=workspace.template.module,
                    loss_fn=self._loss_fn,
                    key=key,
                    device=workspace.template.device,
                    rank=0 if ranks is None else ranks.coordinates.data.rank,
                    normalise=alone,
                    after_each=workspace.gather,
                )
                totals.samples = samples
            if ranks is not None:
                share = exchange_totals if isinstance(ranks, Sharded) else exchange
                totals = share(totals, workspace.summed, ranks, mark=self._first_batch.mark(micro))
                with self._reporting():
                    self._first_batch.compare(totals.marks, rank=ranks.coordinates.world.rank, step=state.trainer.step)
            norm_of = workspace.norm.of if ranks is None else ranks.norm
            if isinstance(ranks, Sharded):
                with self._reporting():
                    workspace.sum_rows(state.trainer.step)
                norm_of = ranks.norm_of_parts
            return judge(
                totals,
                workspace.norm.grads(),
                norm_of,
                divide_by=None if alone else totals.weight,
                where=f"step {state.trainer.step}",
            )
        except Exception as error:
            place(error, step=state.trainer.step)
            if isinstance(error, NonFinite):
                error.skipped = skipped_state(state, totals.samples or samples)
            raise

    def _enter(self, workspace: StepWorkspace, state: TrainableState) -> None:
        if isinstance(self._parallelism, Sharded):
            rows, shapes = rows_of(state, self._parallelism.box)
            if self.donate:
                workspace.check_apart(rows)
            else:
                model, optimizer = tree.map_tensors(_copy, (rows.model, rows.optimizer))
                rows = rows.evolve(model=model, optimizer=optimizer)
            workspace.enter_rows(rows, shapes)
        elif workspace.bound is None:  # the forward writes to buffers only
            copied = attrs.evolve(state.model, buffers=tree.map_tensors(_copy, state.model.buffers))
            workspace.enter(state.evolve(model=copied))
        elif self.donate:
            workspace.check_apart(state)
            workspace.enter(state)
        else:
            model, optimizer = tree.map_tensors(_copy, (state.model, state.optimizer))
            workspace.enter(state.evolve(model=model, optimizer=optimizer))

    def _leave(self, workspace: StepWorkspace, state: TrainableState) -> None:
        if self.donate and workspace.bound is not None and not isinstance(self._parallelism, Sharded):
            self._pool.watch(workspace, state.model.params.lease)
        else:
            workspace.release()

    def _update(
        self, workspace: StepWorkspace, state: TrainableState, verdict: WindowResult, factor: float
    ) -> tuple[TrainableState, Metrics]:
        """Update in place: the state's own tensors, or the copies of them."""
        assert workspace.bound is not None
        if self._clip_norm is not None:
            workspace.norm.clip(verdict.grads, self._clip_norm, verdict.norm, verdict.grad_norm)
        settings = settings_at_risk(state) if self.donate else {}
        if self.donate:
            consume(state)  # before the first write: an update that fails half-way leaves no usable state behind
        workspace.bound.apply(factor)
        lease = Lease()
        model, optimizer = workspace.collect(state, lease)
        after = self._next(state, model, optimizer, verdict, settings or noted_settings(state, optimizer))
        self._leave(workspace, after)
        rate = optimizer.groups[0].hyper.get("lr")
        rates = {} if rate is None else {"lr": float(rate) * factor}
        return after, step_metrics(verdict, rates)

    def _update_by_function(
        self, workspace: StepWorkspace, state: TrainableState, verdict: WindowResult, factor: float | None
    ) -> tuple[TrainableState, Metrics]:
        """Update with the user's own pure function; nothing is donated."""
        if self._clip_norm is not None:
            workspace.norm.clip(verdict.grads, self._clip_norm, verdict.norm, verdict.grad_norm)
        scheduled = {} if factor is None else {"lr_factor": factor}
        named = workspace.template.params
        grads = {name: param.grad for name, param in named.items() if param.grad is not None}
        _, update = self._optimizer
        params, optimizer = check_updated(update(grads, state.optimizer, dict(state.model.params), **scheduled))
        workspace.template.check_params(params)
        model = ModelState(
            Leaves({name: params[name].detach() for name in named}),
            Leaves(workspace.template.harvest()),
            state.model.ties,
        )
        workspace.release()
        after = self._next(state, model, optimizer, verdict, noted_settings(state, optimizer))
        return after, step_metrics(verdict, scheduled)

    def _next(
        self,
        state: TrainableState,
        model: ModelState,
        optimizer: Any,
        verdict: WindowResult,
        settings: Mapping[str, Json],
    ) -> TrainableState:
        return next_state(
            state,
            model=model,
            optimizer=optimizer,
            scheduler=self._scheduler,
            verdict=verdict,
            contract={**settings, **self.contract},
        )

    def _update_rng(
        self, state: TrainableState, key: Key, workspace: StepWorkspace
    ) -> contextlib.AbstractContextManager[None]:
        """Seed what an update draws from the step alone, alike on all ranks; torch's own optimizers draw nothing."""
        if isinstance(self._optimizer, Optimizer) and self._optimizer.cls.__module__.startswith("torch.optim."):
            return _ALONE
        return forked_rng(fold_in(key, f"step {state.trainer.step} update"), workspace.template.device)

    def _reporting(self) -> contextlib.AbstractContextManager[None]:
        """Report a failure of this rank to the other ranks, so that they do not wait for it."""
        return _ALONE if self._parallelism is None else _reporting(self._parallelism)


@contextlib.contextmanager
def _reporting(parallelism: Parallelism) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        parallelism.fail(error)
        raise


def make_step(  # noqa: PLR0913 (the public surface: three arguments, and names for the rest)
    model: torch.nn.Module,
    loss_fn: LossFunction[B],
    optimizer: OptimizerLike,
    *,
    schedule: ScheduleFunction | None = None,
    accumulate: int | BatchRamp = 1,
    clip_norm: float | None = None,
    donate: bool = False,
    collectives: Collectives | None = None,
    parallelism: Parallelism | None = None,
) -> Step[B]:
    """Make a training step, a function of its arguments alone.

    Laws:
        - A step leaves the bits of the state, of the model and of the global random state unchanged.
        - The same arguments give the same bits.
        - With ``donate=True`` the resulting bits are the same, and the old state is consumed.
        - k steps give the bits of k steps of the hand-written loop (forward, backward, clip, ``optimizer.step()``).
        - A split window gives the gradient of the whole window, because sums are added and divided once.

    A step changes nothing outside the state. Python attributes that a forward sets on the model stay in a private
    copy of the model. Buffers that are not persistent have the values of ``model`` at the start of each step.

    Args:
        model: gives the structure. It is copied without its parameters, and neither changed nor kept. The copy
            computes in training mode; if the model is in training mode, its submodules in eval mode (such as a frozen
            normalisation) stay in eval mode. A wrapper that communicates (DDP, FSDP) is refused: pass the module
            inside it, and ``collectives``. Hooks on the parameters are copied when the step is made. They are accepted
            only for steps of one microbatch on one rank, because any other step divides its gradients at the end.
        loss_fn: ``(model, batch) -> Loss``, a sum and its weight. Its batch type is the step's.
        optimizer: what `trainfold.optimizer` returns, or any pair of pure functions ``(init, update)``. With a
            schedule, ``update(grads, opt_state, params)`` also receives ``lr_factor=``. States of such a pair cannot
            be donated.
        schedule: step -> factor of the learning rates.
        accumulate: microbatches per step, or a schedule of them from `trainfold.accumulation.batch_ramp`; the window is a batch that is split,
            or a list of microbatches.
        clip_norm: the largest norm of the gradient, as in ``torch.nn.utils.clip_grad_norm_``; None for no clipping.
        donate: write the new state into the storage of the old one, which then raises `StateDonated`.
        collectives: the data-parallel ranks. Each rank calls its own step with its share of the batch.
        parallelism: instead of ``collectives``, `trainfold.ranks.Sharded`, with which each rank holds its rows of the state; or a parallelism of your
            own in which a backward does not communicate.

    Returns:
        ``step(state, batch) -> (state, metrics)``. ``state.trainer`` gains 1 step, the samples, and the weight as
        tokens, rounded to a whole number. ``state.dataset`` does not change: the caller knows which samples the batch
        holds and advances the position, as in ``state.evolve(dataset=cursor.advance(len(ids)))``.

    Raises:
        InvalidArgument: for an argument that can never work.
        InvalidState: if the model is on the meta device, or has parameters that are not initialised, or DTensors.

    Examples:
        >>> from trainfold import Loss, init_state, optimizer
        >>> model, sgd = torch.nn.Linear(1, 1, bias=False), optimizer(torch.optim.SGD, lr=0.5)
        >>> def loss_fn(model, batch):
        ...     return Loss(sum=model(batch).sum(), weight=len(batch))
        >>> state = init_state(model, sgd)
        >>> after, metrics = make_step(model, loss_fn, sgd)(state, torch.ones(4, 1))
        >>> (after.model.params["weight"] - state.model.params["weight"]).item(), metrics["grad_norm"], after.trainer.step
        (-0.5, 1.0, 1)
    """
    if not isinstance(accumulate, BatchRamp):
        count("accumulate", accumulate, fix="1 is one batch a step")
    largest = real_given(clip_norm)
    if clip_norm is not None and not (largest is not None and largest > 0):
        raise InvalidArgument("clip_norm", expected="> 0, or None", found=shown(clip_norm), fix="None does not clip")
    if not callable(loss_fn):
        raise InvalidArgument(
            "loss_fn", expected="a function (model, batch) -> Loss", found=repr(loss_fn), fix="pass the function"
        )
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgument("model", expected="a torch module", found=type(model).__name__, fix="pass the module")
    check_silent(model)
    init, update = pair_of(optimizer)
    if schedule is not None and not callable(schedule):
        raise InvalidArgument(
            "schedule",
            expected="a function of the step",
            found=repr(schedule),
            fix="such as trainfold.schedules.cosine(...)",
        )
    mine = isinstance(optimizer, Optimizer)
    if donate and not mine:
        raise InvalidArgument(
            "donate",
            expected="False, because a function that returns a new state writes to no old one",
            found="True, with a pair of pure functions for an optimizer",
            fix="leave donate out, or make the optimizer with trainfold.optimizer",
        )
    spec, ranks = ModuleSpec(model), _parallelism_given(collectives, parallelism)
    check_hooks(spec.hooks, alone=accumulate == 1 and ranks is None)
    if isinstance(ranks, Sharded):
        check_by_rows(optimizer)
    contract = {
        f"{STEP_PREFIX}accumulate": accumulate.as_json() if isinstance(accumulate, BatchRamp) else accumulate,
        f"{STEP_PREFIX}clip_norm": largest,
    }
    return Step(
        contract=checked_contract(contract),
        donate=donate,
        loss_fn=loss_fn,
        optimizer=optimizer if mine else (init, update),
        schedule=schedule,
        scheduler=describe_schedule(schedule),
        accumulate=accumulate,
        clip_norm=largest,
        parallelism=ranks,
        pool=WorkspacePool(spec, optimizer, ranks if isinstance(ranks, Sharded) else None),
    )


def _parallelism_given(collectives: Collectives | None, parallelism: Parallelism | None) -> Parallelism | None:
    if parallelism is None:
        ranks: Parallelism | None = None if collectives is None else Replicas(collectives)
    elif collectives is None and parallelism.gradient_divisor is None:
        ranks = parallelism
    else:
        raise InvalidArgument(
            "parallelism",
            expected="one in which a backward does not communicate, without collectives beside it",
            found="collectives too" if collectives is not None else "one that synchronises gradients in the backward",
            fix="pass collectives alone: a step sums the gradients itself",
        )
    return None if ranks is None or ranks.coordinates.data.size == 1 else ranks


def _microbatches(accumulate: int | BatchRamp, step: int) -> int:
    return accumulate.at(step) if isinstance(accumulate, BatchRamp) else accumulate


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()
