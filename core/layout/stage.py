"""`Stage`: which stages of a pipeline a rank holds. Ranks with the same stages are replicas, or share leaves that are cut."""

from collections.abc import Sequence
from typing import final

import attrs

from trainfold.core.errors import InvalidArgument, RanksDisagree


@final
@attrs.frozen
class Stage:
    """The stages of a pipeline that this rank holds. Make it with `make_stage`.

    Attributes:
        indices: of these stages, ascending.
        count: the number of stages of the pipeline.
    """

    indices: tuple[int, ...]
    count: int

    def __str__(self) -> str:
        return f"stage{'s' if len(self.indices) > 1 else ''} {', '.join(map(str, self.indices))} of {self.count}"


def make_stage(indices: Sequence[int], count: int) -> Stage:
    """Return checked stages.

    Args:
        indices: of the stages that this rank holds, each from 0.
        count: the number of stages of the pipeline.

    Raises:
        InvalidArgument: for no stage, one that is there twice, or one that the pipeline does not have.

    Examples:
        >>> str(make_stage([2, 0], 4))
        'stages 0, 2 of 4'
    """
    found = tuple(sorted(indices))
    if not found or len({*found}) != len(found) or not 0 <= found[0] <= found[-1] < count:
        raise InvalidArgument(
            "stage", expected=f"different stages below {count}", found=list(indices), fix="count the stages from 0"
        )
    return Stage(found, count)


def ranks_by_stage(stages: Sequence[Stage | None]) -> dict[Stage, tuple[int, ...]]:
    """Return the ranks of each part of a pipeline, in the order of the stages; empty if the model is not in stages.

    Args:
        stages: by rank; None for a rank that holds the whole model.

    Raises:
        RanksDisagree: unless each stage belongs to one part, and all ranks have stages of one pipeline.

    Examples:
        >>> ranks = [make_stage([index], 2) for index in (1, 1, 0, 0)]
        >>> {str(stage): ranks for stage, ranks in ranks_by_stage(ranks).items()}
        {'stage 0 of 2': (2, 3), 'stage 1 of 2': (0, 1)}
    """
    known = [each for each in stages if each is not None]
    if not known:
        return {}
    if len(known) != len(stages) or len({each.count for each in known}) > 1:
        odd = next((rank for rank, each in enumerate(stages) if each is None or each.count != known[0].count), 0)
        raise _disagree(
            f"stages of one pipeline on every rank, such as {known[0]}",
            f"{stages[odd] or 'a whole model'} on rank {odd}",
        )
    found: dict[Stage, tuple[int, ...]] = {}
    for rank, stage in enumerate(known):
        found[stage] = (*found.get(stage, ()), rank)
    parts = sorted(found, key=lambda stage: stage.indices)
    held = sorted(index for stage in parts for index in stage.indices)
    if held != list(range(known[0].count)):
        shown = "; ".join(f"{stage} on rank {found[stage][0]}" for stage in parts[:8])
        raise _disagree("each stage on the ranks of one part of the pipeline", shown)
    return {stage: found[stage] for stage in parts}


def _disagree(expected: str, found: str) -> RanksDisagree:
    return RanksDisagree(
        "stage", expected=expected, found=found,
        fix="attach on every rank the stages that it runs, and save and load with collectives over all ranks of the pipeline",
    )  # fmt: skip
