"""`PipelineParallelism`: stages of ``torch.distributed.pipelining`` on this rank, beside the data parallelism of their modules."""

import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, final, runtime_checkable

import torch

from trainfold.adapters.parallel.pipelines.stage_norm import HasModule, StageNorm
from trainfold.adapters.parallel.torch_parallelism import TorchParallelism
from trainfold.core.errors import InvalidArgument, RanksDisagree
from trainfold.core.layout.parallelism import Coordinates
from trainfold.core.layout.stage import Stage, make_stage
from trainfold.core.layout.world import World
from trainfold.core.step.loss import Totals, read

_TEXT_CHARS: Final = 500
# JSON writes a character in at most six bytes, or two times six beyond the basic plane
_TEXT_BYTES: Final = 4 * 6 * (_TEXT_CHARS + 1)


@runtime_checkable
class PipelineStage(HasModule, Protocol):
    """What a run needs to know of a stage, as ``torch.distributed.pipelining.PipelineStage`` says it."""

    @property
    def group(self) -> Any:
        """The process group of the pipeline; None for all ranks."""


def stages_given(model: Any) -> list[PipelineStage]:
    """Return the stages that were attached, in the order of the pipeline; none if it is anything else.

    Examples:
        >>> stages_given(torch.nn.Linear(1, 1))
        []
    """
    each = list(model) if isinstance(model, list | tuple) else [model]
    if not each or any(isinstance(one, torch.nn.Module) or not isinstance(one, PipelineStage) for one in each):
        return []
    return sorted(each, key=lambda stage: stage.stage_index)


def stage_of(stages: Sequence[PipelineStage]) -> Stage | None:
    """Return which stages these are; None without any.

    Raises:
        InvalidArgument: for stages of several pipelines, or one that is there twice.
    """
    if not stages:
        return None
    counts = {each.num_stages for each in stages}
    if len(counts) > 1:
        raise InvalidArgument(
            "attach.model", expected="stages of one pipeline", found=f"pipelines of {sorted(counts)} stages",
            fix="attach the stages that one schedule runs",
        )  # fmt: skip
    return make_stage([each.stage_index for each in stages], counts.pop())


@final
class PipelineParallelism:
    """The `Parallelism` of the stages of a pipeline. All its ranks have one share of the data; their modules may be wrapped or sharded over others.

    Args:
        stages: of this rank, in the order of the pipeline.
        divisors: from `noted_divisors`.
        inner: how the modules of the stages are trained.
    """

    def __init__(self, stages: Sequence[PipelineStage], divisors: Mapping[int, int], inner: TorchParallelism) -> None:
        self._stages = stages
        self._inner = inner
        self._group = stages[0].group
        self._divisors = divisors
        self._norm = StageNorm(stages, inner, self._group)

    def __repr__(self) -> str:
        here = self.coordinates
        return f"PipelineParallelism({stage_of(self._stages)}, rank {here.world.rank} of {here.world.size}, share {here.data.rank} of {here.data.size})"

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank is among all, and the share of the data of its pipeline."""
        if not torch.distributed.is_initialized():  # stages as a test makes them
            return self._inner.coordinates
        world = World(torch.distributed.get_rank(), torch.distributed.get_world_size())
        return Coordinates(world, self._inner.coordinates.data)

    @property
    def gradient_divisor(self) -> float:
        """As the modules of the stages have it."""
        return self._inner.gradient_divisor

    @property
    def stages_text(self) -> str:
        """Which stages this rank has, in words."""
        indexes = [str(each.stage_index) for each in self._stages]
        return f"stage{'s' if len(indexes) > 1 else ''} {', '.join(indexes)} of {self._stages[0].num_stages}"

    @property
    def has_loss(self) -> bool:
        """Whether this rank has the last stage."""
        return self._stages[-1].stage_index == self._stages[-1].num_stages - 1

    @property
    def schedule_divisor(self) -> int:
        """What the schedule has divided the gradients of this rank by: the number of its microbatches, or 1."""
        return max(self._divisors.values(), default=1)

    @property
    def schedule_text(self) -> str:
        """What a resume compares of the schedule that has run these stages, in words."""
        return f"{getattr(self._stages[0], 'chunks', None)} microbatches, gradients / {self.schedule_divisor}"

    def gradient_sync(self, *, enabled: bool) -> AbstractContextManager[Any]:
        """As for the modules of the stages."""
        return self._inner.gradient_sync(enabled=enabled)

    def all_sum(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The sums over the shares of the data, of ranks with the same stages."""
        return self._inner.all_sum(tensors)

    def unsummed(self, parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """As for the modules of the stages."""
        return self._inner.unsummed(parameters)

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The norm over all stages: with the bits of the whole model's, if its parameters are in the order of the stages and are not cut."""
        return self._norm.of(gradients)

    def from_last_stage(
        self, totals: Totals, *, is_weighted: bool, trouble: RanksDisagree | None
    ) -> tuple[Totals, bool, RanksDisagree | None]:
        """What the ranks with the last stage have summed, on every rank of the pipeline; and the trouble of the first stage that has any.

        Args:
            totals: over the shares of the data, of ranks with the same stages.
            is_weighted: whether the loss is a sum with a weight; what the last stage says counts.
            trouble: what ranks with the stages of this one have found.
        """
        shares, count = self.coordinates.data.size, self._stages[0].num_stages
        suspects = [float(rank + 1) for rank in totals.suspects]
        suspects += [0.0] * (shares - len(suspects))
        loss, weight = read([totals.loss, totals.weight])
        mine = [loss, weight, float(is_weighted), *suspects] if self.has_loss else [0.0] * (3 + shares)
        here = self._stages[0].stage_index
        troubled = [float(trouble is not None and stage == here) for stage in range(count)]
        told = torch.tensor([*mine, *troubled], dtype=torch.float64, device=self._inner.device)
        torch.distributed.all_reduce(told, group=self._group)
        loss, weight, weighted, *rest = told.tolist()
        suspects, troubled = rest[:shares], rest[shares:]
        if any(troubled):
            first = next(stage for stage, flag in enumerate(troubled) if flag)
            trouble = self._told(trouble if first == here else None)
        found = Totals(loss=loss, weight=weight, suspects=[int(each) - 1 for each in suspects if each])
        return found, bool(weighted), trouble

    def _told(self, trouble: RanksDisagree | None) -> RanksDisagree:
        """The error of the one rank that has it, on every rank of the pipeline."""
        fields = [] if trouble is None else [trouble.where, trouble.expected, trouble.found, trouble.fix]
        data = b"" if trouble is None else json.dumps([str(each)[:_TEXT_CHARS] for each in fields]).encode()
        padded = torch.zeros(_TEXT_BYTES, dtype=torch.int32)
        padded[: len(data)] = torch.tensor(list(data), dtype=torch.int32)
        padded = padded.to(self._inner.device)
        torch.distributed.all_reduce(padded, group=self._group)
        where, expected, found, fix = json.loads(bytes(padded.tolist()).rstrip(b"\0"))
        return RanksDisagree(where, expected=expected, found=found, fix=fix)

    def local(self, leaf: torch.Tensor) -> torch.Tensor:
        """The part of a leaf in this rank's memory."""
        return self._inner.local(leaf)

    def fail(self, error: BaseException) -> None:
        """Do nothing: process groups have no way to report an error."""


def noted_divisors(stages: Sequence[PipelineStage]) -> Mapping[int, int]:
    """Let stages note what their schedule divides their gradients by, which no object that is attached says: stage -> the number, after each step."""
    divisors: dict[int, int] = {}
    for stage in stages:
        _note_divisor(stage, divisors)
    return divisors


def _note_divisor(stage: Any, divisors: dict[int, int]) -> None:
    if not hasattr(type(stage), "scale_grads"):
        return
    held = weakref.ref(stage)

    def scale_grads(grad_scale_factor: int) -> None:
        found = held()
        assert found is not None, "it is called on the stage"
        divisors[found.stage_index] = grad_scale_factor
        type(found).scale_grads(found, grad_scale_factor)

    stage.scale_grads = scale_grads
