"""`make_step`: one optimizer step as a function from a state and a batch to the next state."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.checks import real_given
from trainfold.core.data.cursor import DataCursor
from trainfold.core.errors import ContractMismatch, InvalidArgument, InvalidState, NonFinite
from trainfold.core.json_values import Json, shown
from trainfold.core.layout.world import Collectives
from trainfold.core.optim.optimizer import Optimizer, pair_of
from trainfold.core.optim.schedule import ScheduleFunction, check_same, describe
from trainfold.core.rng import Key, fold_in, forked_rng, make_key
from trainfold.core.state.contract import STEP_PREFIX, checked_contract, noted_settings, settings_at_risk
from trainfold.core.state.leaves import Lease, Leaves
from trainfold.core.state.state import ModelState, OptimizerState, Progress, Scalar, TrainState
from trainfold.core.step.engine.module_template import ModuleSpec, check_silent
from trainfold.core.step.engine.param_hooks import check_hooks
from trainfold.core.step.engine.workspace import StepWorkspace, WorkspacePool
from trainfold.core.step.gradients import LossFunction, WindowResult, judge, run_window
from trainfold.core.step.loss import Totals
from trainfold.core.step.microbatch import split
from trainfold.core.step.reduce import exchange

Metrics = dict[str, float]
_ALONE = contextlib.nullcontext()


@final
@attrs.frozen(eq=False)
class Step:
    """A training step; make one with `make_step`, and call it. Calls in several threads do not disturb each other.

    Attributes:
        contract: what must not change over a resume, plain scalars.
        donate: whether a call consumes its state.
    """

    contract: Mapping[str, Json]
    donate: bool
    _loss_fn: LossFunction
    _optimizer: Any
    _schedule: ScheduleFunction | None
    _scheduler: Mapping[str, Scalar] | None
    _accumulate: int
    _clip_norm: float | None
    _collectives: Collectives | None
    _pool: WorkspacePool

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Do one optimizer step.

        Args:
            state: the state at a boundary, alive and of this model.
            batch: a tree whose tensors share dimension 0, or a list of ready-made microbatches; with several ranks,
                this rank's share.

        Returns:
            The next state, and ``loss`` (the mean over the window and the ranks), ``grad_norm`` (before clipping),
            ``lr`` (of the first group), ``weight`` and the loss function's own metrics. They are Python numbers: the
            guard against non-finite ones has read them by then, so that nobody waits for a device twice.

        Raises:
            NonFinite: before anything was updated; the state is alive, and ``error.skipped`` leaves the batch out: its
                `DataCursor` is past the batch already, so that a loop goes on with ``state = error.skipped`` alone.
            StateDonated: if an earlier step consumed the state.
            InvalidBatch: if the batch cannot be split, or has no weight.
            InvalidArgument: if the loss does not depend on any parameter, or is no `Loss`.
            SharedStorage: if two leaves of a state to be donated share storage.
        """
        with self._telling():
            key = self._check(state)
            factor = self._factor(state)
            micro, samples = split(batch, self._accumulate)
        with self._pool.worker(state) as worker:
            verdict = self._measure(worker, state, micro, samples, key)
            with self._telling(), self._drawn(state, key, worker):
                if worker.bound is None:
                    return self._update_by_function(worker, state, verdict, factor)
                return self._update(worker, state, verdict, 1.0 if factor is None else factor)

    def _check(self, state: TrainState) -> Key:
        """The key of a state that can be trained."""
        if not isinstance(state, TrainState):
            raise InvalidState(
                "state", expected="a TrainState", found=type(state).__name__, fix="make the state with init_state"
            )
        if state.model is None or state.optimizer is None or state.trainer is None:
            raise InvalidState(
                "state",
                expected="the components model, optimizer and trainer",
                found=[name for name in ("model", "optimizer", "trainer") if getattr(state, name) is None] + ["absent"],
                fix="make the state with init_state, or merge the missing components into it",
            )
        state.model.params.alive("state.model.params")
        if isinstance(self._optimizer, Optimizer) and not isinstance(state.optimizer, OptimizerState):
            raise InvalidState(
                "state.optimizer",
                expected="an OptimizerState",
                found=type(state.optimizer).__name__,
                fix="make it with init(params) of the optimizer that the step was made with",
            )
        check_same(state.scheduler, self._scheduler)
        self._check_contract(state)
        key = make_key(0) if state.rng is None else state.rng
        if not isinstance(key, Key):
            raise InvalidState(
                "state.rng",
                expected="a Key, or None",
                found=type(key).__name__,
                fix="captured streams are for mutable loops; use rng=make_key(seed) with a step",
            )
        return key

    def _factor(self, state: TrainState) -> float | None:
        """What the schedule says, known before anything is touched."""
        if self._schedule is None or state.trainer is None:
            return None
        said: object = self._schedule(state.trainer.step)
        factor = real_given(said)
        if factor is None or not math.isfinite(factor):
            raise InvalidArgument(
                f"schedule({state.trainer.step})",
                expected="a finite number, the factor of the learning rates",
                found=shown(said),
                fix="nothing was updated: fix the schedule",
            )
        return factor

    def _check_contract(self, state: TrainState) -> None:
        """Refuse a state that another kind of step has trained: the run would go on, a little different (V08)."""
        differs = [
            name for name, value in state.contract.items() if name in self.contract and self.contract[name] != value
        ]
        if differs:
            raise ContractMismatch(
                "state.contract",
                expected=", ".join(f"{name}={state.contract[name]!r}" for name in differs),
                found="a step with " + ", ".join(f"{name}={self.contract[name]!r}" for name in differs),
                fix="make the step as it was, or accept the change: state.evolve(contract={})",
            )

    def _measure(
        self, worker: StepWorkspace, state: TrainState, micro: list[Any], samples: int, key: Key
    ) -> WindowResult:
        """Forward, backward and verdict; whatever is raised, the state is as it was."""
        ranks = self._collectives
        alone = ranks is None and len(micro) == 1
        assert state.trainer is not None
        totals = Totals()
        with self._telling():
            self._enter(worker, state)
        try:
            with self._telling():
                if self.donate and worker.bound is not None:
                    worker.template.keep_buffers()  # elsewhere they are copies already
                totals = run_window(
                    micro,
                    step=state.trainer.step,
                    module=worker.template.module,
                    loss_fn=self._loss_fn,
                    key=key,
                    device=worker.template.device,
                    rank=0 if ranks is None else ranks.rank,
                    normalise=alone,
                    after_each=worker.gather,
                )
                totals.samples = samples
            if ranks is not None:
                totals = exchange(totals, worker.targets, ranks)
            return judge(totals, worker.norm, normalised=alone, where=f"step {state.trainer.step}")
        except NonFinite as error:
            error.skipped = _skipped(state, totals.samples or samples)
            raise

    def _enter(self, worker: StepWorkspace, state: TrainState) -> None:
        model = state.model
        assert model is not None
        if worker.bound is None:  # the forward writes to nothing but buffers
            copied = attrs.evolve(model, buffers=tree.map_tensors(_copy, model.buffers))
            worker.enter(state.evolve(model=copied))
        elif self.donate:
            worker.check_apart(state)
            worker.enter(state)
        else:
            model, optimizer = tree.map_tensors(_copy, (model, state.optimizer))
            worker.enter(state.evolve(model=model, optimizer=optimizer))

    def _leave(self, worker: StepWorkspace, state: TrainState) -> None:
        if self.donate and worker.bound is not None and state.model is not None:
            self._pool.watch(worker, state.model.params.lease)
        else:
            worker.release()

    def _update(
        self, worker: StepWorkspace, state: TrainState, verdict: WindowResult, factor: float
    ) -> tuple[TrainState, Metrics]:
        """The update in place, of the state's own tensors or of their copies."""
        assert worker.bound is not None
        if self._clip_norm is not None:
            worker.norm.clip(verdict.grads, self._clip_norm, verdict.norm, verdict.grad_norm)
        settings = settings_at_risk(state) if self.donate else {}
        if self.donate:
            _consume(state)  # before the first write: an update that fails half-way leaves no state behind
        worker.bound.apply(factor)
        lease = Lease()
        model, optimizer = worker.collect(state, lease)
        after = self._next(state, model, optimizer, verdict, settings or noted_settings(state, optimizer))
        self._leave(worker, after)
        rate = optimizer.groups[0].hyper.get("lr")
        rates = {} if rate is None else {"lr": float(rate) * factor}
        return after, _metrics(verdict, rates)

    def _update_by_function(
        self, worker: StepWorkspace, state: TrainState, verdict: WindowResult, factor: float | None
    ) -> tuple[TrainState, Metrics]:
        """The update by a user's own pure function; nothing is donated."""
        assert state.model is not None
        if self._clip_norm is not None:
            worker.norm.clip(verdict.grads, self._clip_norm, verdict.norm, verdict.grad_norm)
        scheduled = {} if factor is None else {"lr_factor": factor}
        named = worker.template.params
        grads = {name: param.grad for name, param in named.items() if param.grad is not None}
        _, update = self._optimizer
        params, optimizer = _updated(update(grads, state.optimizer, dict(state.model.params), **scheduled))
        worker.template.check_params(params)
        model = ModelState(
            Leaves({name: params[name].detach() for name in named}),
            Leaves(worker.template.harvest()),
            state.model.ties,
        )
        worker.release()
        after = self._next(state, model, optimizer, verdict, noted_settings(state, optimizer))
        return after, _metrics(verdict, scheduled)

    def _next(
        self, state: TrainState, model: ModelState, optimizer: Any, verdict: WindowResult, settings: Mapping[str, Json]
    ) -> TrainState:
        done = state.trainer
        assert done is not None
        return TrainState(
            model=model,
            optimizer=optimizer,
            scheduler=self._scheduler if state.scheduler is None else state.scheduler,
            trainer=Progress(
                step=done.step + 1,
                epoch=done.epoch,
                samples=done.samples + verdict.samples,
                tokens=done.tokens + round(verdict.weight),
            ),
            dataset=state.dataset,
            rng=state.rng,
            extra=state.extra,
            contract={**state.contract, **settings, **self.contract},
            origin=state.origin,
        )

    def _drawn(self, state: TrainState, key: Key, worker: StepWorkspace) -> contextlib.AbstractContextManager[None]:
        """What an update draws depends on the step alone, and is the same on all ranks; torch's own optimizers draw nothing."""
        if isinstance(self._optimizer, Optimizer) and self._optimizer.cls.__module__.startswith("torch.optim."):
            return _ALONE
        assert state.trainer is not None
        return forked_rng(fold_in(key, f"step {state.trainer.step} update"), worker.template.device)

    def _telling(self) -> contextlib.AbstractContextManager[None]:
        """Tell the other ranks what fails on this one, so that they do not wait for it."""
        return _ALONE if self._collectives is None else _telling(self._collectives)


@contextlib.contextmanager
def _telling(collectives: Collectives) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        collectives.fail(error)
        raise


def make_step(  # noqa: PLR0913 (the public surface: three arguments, and names for the rest)
    model: torch.nn.Module,
    loss_fn: LossFunction,
    optimizer: Any,
    *,
    schedule: ScheduleFunction | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    donate: bool = False,
    collectives: Collectives | None = None,
) -> Step:
    """Make a training step, a function of its arguments alone.

    Laws: the state's bits, the model's, and the global random state are left as they were; the same arguments give the
    same bits; with ``donate=True`` the bits are the same and the state is consumed; k steps give the bits of k steps of
    the hand-written loop (forward, backward, clip, ``optimizer.step()``). A window that is split gives the gradient of
    the whole, because sums are added and divided once (A01, A02).

    What is not in the state is not the step's: Python attributes that a forward changes on the model stay in a private
    copy of it. Buffers that are not persistent have the values of ``model`` in each step (B17).

    Args:
        model: gives the structure; copied without its parameters. It is not changed and not kept. It computes in
            training mode; submodules in eval mode of a model in training mode, such as a frozen normalisation, stay so.
            Not one that communicates (DDP, FSDP): pass the module inside, and ``collectives``. Hooks on its parameters
            act as they are when the step is made; only in steps of one microbatch on one rank, because elsewhere
            gradients are divided at the end.
        loss_fn: ``(model, batch) -> Loss``, a sum and its weight.
        optimizer: what `trainfold.optimizer` returns; or any pair of pure functions, whose
            ``update(grads, opt_state, params)`` is given ``lr_factor=`` too where there is a schedule, and whose states
            cannot be donated.
        schedule: step -> factor of the learning rates.
        accumulate: microbatches a step; the window is a batch that is split, or a list.
        clip_norm: the largest norm of the gradient, as ``torch.nn.utils.clip_grad_norm_``; None for no clipping.
        donate: write the new state into the storage of the old one, which then raises `StateDonated`.
        collectives: the data-parallel ranks, each of which calls its own step with its share of the batch.

    Returns:
        ``step(state, batch) -> (state, metrics)``. ``state.trainer`` gains 1 step, the samples, and as tokens the
        weight, rounded to a whole number where it is not one. ``state.dataset`` is as it was: whoever drew the batch
        knows what was drawn, and advances it, as in ``state.evolve(dataset=cursor.advance(len(ids)))``.

    Raises:
        InvalidArgument: for an argument that can never work.
        InvalidState: if the model is on the meta device or not initialised.

    Examples:
        >>> from trainfold.core.step.init_state import init_state
        >>> from trainfold.core.step.loss import Loss
        >>> from trainfold.core.optim.optimizer import optimizer
        >>> model, sgd = torch.nn.Linear(1, 1, bias=False), optimizer(torch.optim.SGD, lr=0.5)
        >>> def loss_fn(model, batch):
        ...     return Loss(sum=model(batch).sum(), weight=len(batch))
        >>> state = init_state(model, sgd)
        >>> after, metrics = make_step(model, loss_fn, sgd)(state, torch.ones(4, 1))
        >>> (after.model.params["weight"] - state.model.params["weight"]).item(), metrics["grad_norm"], after.trainer.step
        (-0.5, 1.0, 1)
    """
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise InvalidArgument("accumulate", expected="an int >= 1", found=repr(accumulate), fix="1 is one batch a step")
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
    mould, ranks = ModuleSpec(model), None if collectives is None or collectives.world_size == 1 else collectives
    check_hooks(mould.hooks, alone=accumulate == 1 and ranks is None)
    contract = {
        f"{STEP_PREFIX}accumulate": accumulate,
        f"{STEP_PREFIX}clip_norm": largest,
    }
    return Step(
        contract=checked_contract(contract),
        donate=donate,
        loss_fn=loss_fn,
        optimizer=optimizer if mine else (init, update),
        schedule=schedule,
        scheduler=describe(schedule),
        accumulate=accumulate,
        clip_norm=largest,
        collectives=ranks,
        pool=WorkspacePool(mould, optimizer),
    )


def _updated(result: Any) -> tuple[Mapping[str, torch.Tensor], Any]:
    """The parameters and the optimizer's state that a user's own update returned."""
    pair = isinstance(result, tuple | list) and len(result) == len(("params", "opt_state"))
    if pair and isinstance(result[0], Mapping) and all(isinstance(held, torch.Tensor) for held in result[0].values()):
        return result[0], result[1]
    raise InvalidArgument(
        "update",
        expected="(params, opt_state), params as FQN -> tensor",
        found=shown(result),
        fix="return the new parameters, each under its name, and the new state of the optimizer",
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _consume(state: TrainState) -> None:
    assert state.model is not None
    assert state.trainer is not None
    parts = [state.model.params, state.model.buffers, state.optimizer.slots, state.optimizer.masters]
    leases = [leaves.lease for leaves in parts if leaves is not None]
    for lease in leases:
        lease.protect()  # a save that still reads the leaves finishes, or copies what it has not read
    for lease in leases:
        lease.consumed_by = state.trainer.step


def _skipped(state: TrainState, samples: int) -> TrainState:
    """Past the batch: nobody gets to advance the position of a step that raised."""
    assert state.trainer is not None
    dataset = state.dataset.advance(samples) if isinstance(state.dataset, DataCursor) else state.dataset
    trainer = attrs.evolve(state.trainer, samples=state.trainer.samples + samples)
    return state.evolve(trainer=trainer, dataset=dataset)


def _metrics(verdict: WindowResult, rates: dict[str, float]) -> Metrics:
    own = {"loss": verdict.loss, "grad_norm": verdict.grad_norm, **rates, "weight": verdict.weight}
    return {**verdict.metrics, **own}
