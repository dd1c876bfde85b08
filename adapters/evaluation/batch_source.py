"""`BatchSource`: the batches of an evaluation, and the cursors, time limits and generators behind them."""

from typing import Any, final

import attrs
import torch

from trainfold.adapters.evaluation.reachability import reachable
from trainfold.adapters.evaluation.time_limit import TimeLimit
from trainfold.core.data.eval_cursor import EvalBatches
from trainfold.core.errors import InvalidArgument
from trainfold.core.evaluate.coverage import DrawnPart
from trainfold.core.evaluate.suite import Tally
from trainfold.core.layout.world import Collectives

_LEVELS = 6  # a loader, its batch sampler, its sampler, and wrappers around these
_FIX = "keep samples in arrays, or in lists of more than 5,000, which are not searched"


@final
@attrs.frozen(eq=False)
class BatchSource:
    """The batches passed to an evaluation, and what was found behind them.

    Attributes:
        batches: the batches as passed.
        parts: the batches of cursors, also behind wrappers such as a map or a progress bar.
        limits: the time limits.
        generators: the generators that they draw random numbers from.
    """

    batches: Any
    parts: tuple[EvalBatches[Any], ...]
    limits: tuple[TimeLimit[Any], ...]
    generators: tuple[torch.Generator, ...]


def source_of(batches: Any) -> BatchSource:
    """Search behind batches, without drawing one."""
    parts: list[EvalBatches[Any]] = []
    limits: list[TimeLimit[Any]] = []
    generators: list[torch.Generator] = []
    behind: list[tuple[Any, tuple[type, ...]]] = [(batches, (torch.Generator, EvalBatches, TimeLimit))]
    for thing, kinds in behind:
        found: Any
        for found in reachable(thing, kinds, levels=_LEVELS, fix=_FIX)[0]:
            if isinstance(found, EvalBatches) and found not in parts:
                parts.append(found)
                behind.append((found.fetch, (torch.Generator,)))
            elif isinstance(found, TimeLimit) and found not in limits:
                limits.append(found)
                behind.append((found.batches, kinds))
            elif isinstance(found, torch.Generator) and found not in generators:
                generators.append(found)
    return BatchSource(batches, tuple(parts), tuple(limits), tuple(generators))


def begin_of(source: BatchSource, start: Tally | None, ranks: Collectives) -> str:
    """Where the batches of cursors start, as text; it must be the same on every rank.

    Raises:
        InvalidArgument: for batches of another rank, and for those that do not begin where the start ended.
    """
    for part in source.parts:
        if (part.rank, part.world_size) != (ranks.rank, ranks.world_size):
            raise InvalidArgument(
                "batches",
                expected=f"those of rank {ranks.rank} of {ranks.world_size}",
                found=f"those of rank {part.rank} of {part.world_size}",
                fix="pass the same collectives to eval_batches and to evaluate",
            )
        if start is not None and start.batches and part.cursor.next_index != start.next_index:
            known = start.next_index >= 0
            raise InvalidArgument(
                "start",
                expected=f"a tally that reached sample {part.cursor.next_index}, where the batches begin",
                found=f"one that reached {f'sample {start.next_index}' if known else 'no known position'}",
                fix="start where it ended: make_eval_cursor(..., next_index=start.next_index)"
                if known
                else "evaluate from the first sample on: the tally has samples with a gap, or ended at an unknown sample",
            )
    return "; ".join(f"{part.cursor}, {part.steps} steps, shares of {part.chunk}" for part in source.parts)


def drawn_from(source: BatchSource) -> list[DrawnPart]:
    """What was drawn from each cursor behind the batches."""
    return [DrawnPart(part.cursor, part.after, batches=len(part), drawn=part.given) for part in source.parts]


def says_whole(source: BatchSource) -> bool:
    """Whether neither the batches nor a time limit behind them say that something was left out."""
    return bool(getattr(source.batches, "complete", True)) and all(limit.complete for limit in source.limits)
