"""`GradientWindows`: what a live run does with gradients: which microbatch synchronises them, and the check before the optimizer steps."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from operator import is_
from typing import Any, Protocol, final

import attrs
import torch
from torch.amp.grad_scaler import OptState

from trainfold.adapters.parallel.interrupted import GradientMarks, forget_interrupted
from trainfold.adapters.parallel.like_gradients import check_known, unlike, unsummed
from trainfold.adapters.parallel.pipelines.pipeline import PipelineParallelism
from trainfold.adapters.parallel.sharing import Sharing
from trainfold.adapters.parallel.torch_parallelism import TrainingRanks
from trainfold.adapters.script.loop_settings import LoopSettings
from trainfold.adapters.sharded.fsdp2_groups import (
    HELD_BACK,
    SYNCHRONISE,
    are_held_back,
    param_groups,
    parameters_held_back,
)
from trainfold.core.checks import count, real_given
from trainfold.core.errors import (
    IncompleteWindow,
    InvalidArgument,
    InvalidBatch,
    TrainfoldError,
    placed,
)
from trainfold.core.json_values import encode_scalar, shown
from trainfold.core.layout.parallelism import Parallelism
from trainfold.core.step.batch_ramp import BatchRamp
from trainfold.core.step.gradients import WindowResult, judge
from trainfold.core.step.loss import Number, Totals, wide
from trainfold.core.step.reduce import exchange, mark_of

_EPSILON = 1e-6  # torch adds it to the norm before it divides
_FIX = "live.drop_window() skips this batch on every rank; or lower the learning rate"


@final
@attrs.frozen
class CheckedStep:
    """What `Live.check` found, as Python numbers; the same on every rank.

    Attributes:
        loss: over all ranks: their mean, or the sum over the sum of the weights.
        grad_norm: the norm of all gradients, before they were clipped.
        weight: the sum of the weights; the number of shares of the data without weights.
    """

    loss: float
    grad_norm: float
    weight: float


class HasObjects(Protocol):
    """The objects of a run."""

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Every module, the model first."""

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Every optimizer by its component."""

    @property
    def extra(self) -> Mapping[str, Any]:
        """What is attached under ``extra``."""

    @property
    def sharing(self) -> Sharing:
        """What the ranks have in common."""


class HasSteps(Protocol):
    """The counters of a run."""

    @property
    def step(self) -> int:
        """Optimizer steps."""


@final
class Microbatches:
    """Counts the microbatches of a window, and checks its gradients at the boundary.

    Args:
        ranks: how the ranks train.
        objects: of the run.
        counters: of the run; not the run itself, which would then wait for a collection.
        loop: remembers what the loop has said.

    Attributes:
        done: microbatches done in a window that is open; 0 at a boundary.
        is_torn: whether a microbatch has failed and left part of its gradients.
        ramp: the schedule of the last microbatch; None without one.
    """

    def __init__(self, ranks: TrainingRanks, objects: HasObjects, counters: HasSteps, loop: LoopSettings) -> None:
        self._ranks = ranks
        self._loop = loop
        self.objects = objects
        self._counters = counters
        self.done = 0
        self.is_torn = False
        self.ramp: BatchRamp | None = None
        self._of = 1
        self._known: tuple[list[object], list[torch.nn.Parameter]] = [], []

    @property
    def parallelism(self) -> Parallelism:
        """How the ranks train."""
        return self._ranks.parallelism

    @contextmanager
    def one(self, of: int | BatchRamp) -> Iterator[bool]:
        """Run a forward and a backward; gradients are synchronised only in the last microbatch of a window.

        Args:
            of: microbatches in the window, or a schedule of them.

        Yields:
            Whether this is the last one.
        """
        if isinstance(of, BatchRamp):
            shares = self.parallelism.coordinates.data.size
            self._loop.ramp.met({str(first): count * shares for first, count in of.stages})
            self.ramp, of = of, of.at(self._counters.step)
        is_boundary = self.done + 1 >= count("of", of, fix="1 means no accumulation")
        self._check_whole("live.microbatch")
        marks = GradientMarks(self._trained(), self._ranks.sharded)
        try:
            with self.parallelism.gradient_sync(enabled=is_boundary):
                yield is_boundary
        except BaseException:
            self.is_torn = marks.have_moved()
            raise
        self.done, self._of = (0 if is_boundary else self.done + 1), of

    def check_closed(self, where: str) -> None:
        """Raise inside a window, whose gradients are not synchronised yet.

        Raises:
            IncompleteWindow: with the numbers.
        """
        self._check_whole(where)
        if self.done:
            raise IncompleteWindow(
                where,
                expected="the last microbatch of a window, in which the ranks sum their gradients",
                found=f"{self.done} of {self._of} microbatches",
                fix="pass of= the number of microbatches that the window really has, or call live.drop_window()",
            )

    def _check_whole(self, where: str) -> None:
        if self.is_torn:
            raise IncompleteWindow(
                where,
                expected="gradients of whole backwards",
                found="a microbatch that has failed after its backward had begun, and has left part of its gradients",
                fix="call live.drop_window() on every rank, and run the window again from its first microbatch",
            )

    def drop(self) -> None:
        """Forget the window, gradients that only FSDP2 holds, and a backward that did not end."""
        forget_interrupted(self.objects.modules)
        self.done, self.is_torn = 0, False

    def check(
        self,
        loss: Number | None,
        *,
        weight: Number | None,
        clip_norm: float | None,
        parameters: Iterable[torch.nn.Parameter] | None,
    ) -> CheckedStep:
        """Reduce the loss and its weight over the ranks, divide the gradients, clip them; see `Live.check`."""
        self.check_closed("live.check")
        limit = real_given(clip_norm)
        if clip_norm is not None and not (limit is not None and limit > 0):
            raise InvalidArgument(
                "clip_norm", expected="> 0, or None", found=shown(clip_norm), fix="None does not clip"
            )
        self._check_unscaled()
        self._loop.clip_norm.met(encode_scalar(limit, "clip_norm"))
        with placed(step=self._counters.step):
            result = self._judged(loss, weight, parameters)
        if limit is not None:
            scale = torch.clamp(limit / (result.norm + _EPSILON), max=1.0)
            torch._foreach_mul_([self.parallelism.local(each) for each in result.grads], scale)
        return CheckedStep(loss=result.loss, grad_norm=result.grad_norm, weight=float(result.weight))

    def _judged(
        self, loss: Number | None, weight: Number | None, parameters: Iterable[torch.nn.Parameter] | None
    ) -> WindowResult:
        """Reduce the loss and its weight over the ranks, and divide the gradients."""
        ranks = self.parallelism
        trained = self._trained() if parameters is None else list(parameters)
        mine = Totals(
            loss=0.0 if loss is None else wide(loss),
            weight=(0 if loss is None else 1) if weight is None else wide(weight),
        )
        divisor = ranks.gradient_divisor
        # without a divisor, `exchange` fills what is missing
        held = 1 if divisor is None else mark_of([each.grad for each in trained])
        counts = weight is not None and not (isinstance(ranks, PipelineParallelism) and not ranks.has_loss)
        mark = 2 * held + counts
        totals = exchange(mine, trained if divisor is None else [], ranks, mark=mark)
        is_weighted, is_part = weight is not None, isinstance(ranks, PipelineParallelism)
        trouble = unlike(totals.marks, trained, ranks) or unsummed(trained, ranks, self.objects.modules)
        if isinstance(ranks, PipelineParallelism):
            totals, is_weighted, trouble = ranks.from_last_stage(totals, is_weighted=is_weighted, trouble=trouble)
        if trouble is not None:
            raise trouble
        self._loop.weighted.met(is_weighted)
        if isinstance(ranks, PipelineParallelism):
            self._loop.schedule.met(ranks.schedule_text)
        if isinstance(ranks, PipelineParallelism) and is_weighted and ranks.schedule_divisor != 1:
            raise InvalidArgument(
                "live.check.weight",
                expected="gradients of sums, which the weight divides once",
                found=f"gradients that the schedule has divided by its {ranks.schedule_divisor} microbatches",
                fix="pass scale_grads=False to the schedule, and a loss function that returns a sum; or leave out weight=",
            )
        if loss is None and not is_weighted and not float(totals.weight):
            raise InvalidBatch(
                "live.check.loss",
                expected="the loss of at least one rank",
                found="None on every rank",
                fix="pass the loss of the window, as it was passed to backward, also where only clip_norm= is wanted",
            )
        divide_by: Number | None = None
        if is_weighted:
            divide_by = totals.weight if divisor is None else totals.weight / divisor
        elif divisor is None:
            divide_by = ranks.coordinates.data.size
        grads = [each.grad for each in trained if each.grad is not None]
        if not grads and not is_part:
            raise self._bare()
        return judge(
            totals,
            grads,
            ranks.norm,
            divide_by=divide_by,
            where=f"step {self._counters.step}",
            fix=_FIX,
            local=ranks.local,
            is_part=is_part,
        )

    def _bare(self) -> TrainfoldError:
        """The error where no parameter has a gradient, on any rank."""
        if are_held_back(param_groups(self._ranks.sharded)):
            fix = f"{SYNCHRONISE}; and call live.check after it"
            return IncompleteWindow("live.check", expected="the gradients of the window", found=HELD_BACK, fix=fix)
        return InvalidArgument(
            "live.check",
            expected="a gradient of a parameter that an attached optimizer steps, or of parameters=",
            found="none of them with one",
            fix="call it after backward and before zero_grad; the loss must depend on such a parameter, without detach() or no_grad(), and not all may be frozen",
        )

    def _check_unscaled(self) -> None:
        """Raise if an attached scaler has scaled the gradients: their norm would be that of other gradients, and clipping would cut them to nothing."""
        for name, each in self.objects.extra.items():
            if not isinstance(each, torch.amp.GradScaler) or not each.is_enabled() or each._scale is None:  # noqa: SLF001
                continue
            states = each._per_optimizer_states  # noqa: SLF001
            stages = [states[id(one)]["stage"] for one in self.objects.optimizers.values() if id(one) in states]
            # an optimizer may have gradients that it does not scale
            if all(stage is OptState.READY for stage in stages):
                raise InvalidArgument(
                    "live.check",
                    expected="gradients as they are without a scale",
                    found=f"extra[{name!r}], a GradScaler that has unscaled those of no attached optimizer",
                    fix="call scaler.unscale_(optimizer) before live.check; or leave out live.check, if the scaler shall skip steps",
                )

    def check_reduced(self, stepped: Iterable[str]) -> None:
        """Raise if an optimizer has stepped parameters whose gradients are not those of all ranks.

        Args:
            stepped: the optimizers, by component.

        Raises:
            IncompleteWindow: if FSDP2 holds them back, so that the step was one without them.
            InvalidState: naming the first parameter that ``DistributedDataParallel`` does not know.
        """
        found, sharded = self._ranks.of_step
        if sharded:
            self._check_stepped(stepped, sharded)
        if found and any(each.requires_grad for each in found):
            check_known(found, self._trained(), self.objects.modules)

    def _check_stepped(self, stepped: Iterable[str], sharded: list[Any]) -> None:
        held = {id(each) for each in parameters_held_back(param_groups(sharded))}
        optimizers = self.objects.optimizers if held else {}
        groups = [group for name in stepped if name in optimizers for group in optimizers[name].param_groups]
        if any(id(each) in held for group in groups for each in group["params"]):
            raise IncompleteWindow(
                "live.advance",
                expected="an optimizer step after a backward that has summed the gradients of the window",
                found=HELD_BACK,
                fix=f"call live.drop_window(), or restore; and {SYNCHRONISE}",
            )

    def _trained(self) -> list[torch.nn.Parameter]:
        """The parameters that attached optimizers step, in the order of the modules; found again when optimizers or modules have others."""
        modules = self.objects.modules
        groups = [group["params"] for each in self.objects.optimizers.values() for group in each.param_groups]
        now: list[object] = [*modules, *chain.from_iterable(groups)]
        known, trained = self._known
        if len(now) == len(known) and all(map(is_, now, known)):
            return trained
        stepped = {id(each): each for params in groups for each in params}
        named = [each for module in modules for each in module.parameters() if id(each) in stepped]
        trained = list({id(each): each for each in (*named, *stepped.values())}.values())
        self._known = now, trained
        return trained


class GradientWindows:
    """What `Live` does with gradients, on one rank or several."""

    _microbatches: Microbatches

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Every attached optimizer by its component, including those under ``extra``."""
        return self._microbatches.objects.optimizers

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Every attached module, the model first."""
        return self._microbatches.objects.modules

    @property
    def parallelism(self) -> Parallelism:
        """How the ranks train: as torch has set up the modules, or what was passed to `attach`."""
        return self._microbatches.parallelism

    @property
    def batch_ramp(self) -> BatchRamp | None:
        """The schedule of microbatches that the loop follows; None without one."""
        return self._microbatches.ramp

    @property
    def sharing(self) -> Sharing:
        """What the ranks have in common, as it was declared to `attach`."""
        return self._microbatches.objects.sharing

    def microbatch(self, of: int | BatchRamp = 1) -> AbstractContextManager[bool]:
        """Run one forward and backward of a window; only its last microbatch synchronises gradients between the ranks.

        Whether it is the last one is decided before the forward, because ``DistributedDataParallel`` prepares its all-reduce there. Under
        FSDP2 the window has one reduce-scatter a group. The setting before comes back, also after an error. A microbatch that fails in its
        forward can be run again; after one that fails in its backward, call `drop_window`.

        Args:
            of: microbatches in the window; at the end of the data, as many as are left. The same on every rank. Or a schedule of them from
                `trainfold.accumulation.batch_ramp`: a manager saves before the number changes.

        Returns:
            A context manager for ``with``, which gives whether this is the boundary: where the optimizer steps.

        Raises:
            InvalidArgument: unless ``of`` is an int >= 1.
            IncompleteWindow: after a microbatch that has failed in its backward.

        Examples:
            >>> from trainfold import attach
            >>> model = torch.nn.Linear(2, 1)
            >>> live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> for _ in range(2):
            ...     with live.microbatch(of=2) as is_boundary:
            ...         (model(torch.ones(4, 2)).mean() / 2).backward()
            ...     progress = live.advance(samples=4)
            >>> is_boundary, progress.step, progress.samples
            (True, 1, 8)
        """
        return self._microbatches.one(of)

    def check(
        self,
        loss: Number | None = None,
        *,
        weight: Number | None = None,
        clip_norm: float | None = None,
        parameters: Iterable[torch.nn.Parameter] | None = None,
    ) -> CheckedStep:
        """Stop on every rank if the loss or a gradient of any rank is not finite; call it at the boundary, before the optimizer steps.

        The ranks exchange one small tensor, and the norm. With ``weight`` the gradients are those of sums: they are divided here by the
        weight of the whole window over all ranks, once, so that a rank with more tokens counts for more.

        Args:
            loss: of this rank's window: its mean, as it was passed to ``backward``; with ``weight``, its sum. None on a rank without one; at least
                one rank has one.
            weight: how many terms the sum has, such as valid tokens.
            clip_norm: the largest norm of all gradients together, as in ``torch.nn.utils.clip_grad_norm_``; None for no clipping. If every check of the
                run had one, two at least, and the first after a resume has another, a warning (`ResumeDrift`) says it.
            parameters: whose gradients are meant; None for those that attached optimizers step.

        Returns:
            The loss, the norm and the weight over all ranks.

        Raises:
            NonFinite: on every rank, with the step and the ranks whose loss is not finite. Nothing was updated.
            RanksDisagree: on every rank, if the gradient of a parameter that nothing sums, such as one of ``ignored_params``, is not the same on all;
                or if some ranks, or stages of a pipeline, have no gradient, those of other parameters, or no weight where others have one.
            InvalidBatch: on every rank, if the sum of the weights is not positive, or no rank has a loss.
            InvalidArgument: if no parameter has a gradient, or an attached ``GradScaler`` has not unscaled them.
            IncompleteWindow: inside a window of `microbatch`, or where FSDP2 holds all gradients back, which are not synchronised yet.
        """
        return self._microbatches.check(loss, weight=weight, clip_norm=clip_norm, parameters=parameters)
