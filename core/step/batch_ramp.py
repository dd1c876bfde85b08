"""`BatchRamp`: how many microbatches a step accumulates, as a schedule of the step; the batch grows with it."""

from collections.abc import Mapping
from typing import final

import attrs

from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import Json, shown
from trainfold.core.step.accumulation import accumulation_steps


@final
@attrs.frozen
class BatchRamp:
    """Microbatches for each step. Make it with `batch_ramp`; pass it as ``accumulate`` of `make_step`, or ``of`` of `Live.microbatch`.

    Attributes:
        stages: (first step, microbatches) pairs, in the order of the steps, the first one from step 0.
    """

    stages: tuple[tuple[int, int], ...]

    def at(self, step: int) -> int:
        """The microbatches of a step: of the step after so many.

        Examples:
            >>> ramp = batch_ramp({0: 16, 100: 64}, per_microbatch=16)
            >>> ramp.at(99), ramp.at(100)
            (1, 4)
        """
        return next(count for first, count in reversed(self.stages) if step >= first)

    def changes_after(self, step: int) -> bool:
        """Whether the next step, after so many, has other microbatches than the last one: a manager saves before it.

        Examples:
            >>> ramp = batch_ramp({0: 16, 100: 64}, per_microbatch=16)
            >>> [step for step in range(200) if ramp.changes_after(step)]
            [100]
        """
        return step > 0 and self.at(step) != self.at(step - 1)

    def as_json(self) -> Json:
        """The stages as a contract has them: first step -> microbatches."""
        return {str(first): count for first, count in self.stages}


def batch_ramp(per_step: Mapping[int, int], *, per_microbatch: int, world_size: int = 1) -> BatchRamp:
    """Return the schedule of microbatches for global batches that grow.

    Args:
        per_step: first step -> samples (or tokens) per optimizer step from there on, over all ranks. It must have step 0.
        per_microbatch: samples (or tokens) per microbatch on one rank.
        world_size: the number of data-parallel ranks.

    Raises:
        BatchNotDivisible: with the numbers, unless every division is exact.
        InvalidArgument: if there is no batch for step 0, or a number is out of range.

    Examples:
        >>> batch_ramp({0: 64, 1000: 128}, per_microbatch=16, world_size=2).stages
        ((0, 2), (1000, 4))
    """
    if 0 not in per_step or any(type(first) is not int or first < 0 for first in per_step):
        raise InvalidArgument(
            "per_step",
            expected="first step -> batch, from step 0",
            found=shown(dict(per_step)),
            fix="begin with the batch of step 0, such as {0: 256, 1000: 512}",
        )
    return BatchRamp(
        tuple(
            (first, accumulation_steps(per_step=per_step[first], per_microbatch=per_microbatch, world_size=world_size))
            for first in sorted(per_step)
        )
    )


def ramp_of(value: Json) -> BatchRamp | None:
    """The schedule in a contract; None for a number, which never changes.

    Examples:
        >>> ramp_of({"0": 1, "100": 4}), ramp_of(4)
        (BatchRamp(stages=((0, 1), (100, 4))), None)
    """
    if not isinstance(value, Mapping):
        return None
    return BatchRamp(tuple(sorted((int(first), int(str(count))) for first, count in value.items())))
