"""`Source`: what an evaluation draws batches from, and `Span`: which samples it saw, by what was drawn, not by what was promised."""

from collections.abc import Sequence
from typing import Any, Protocol, final

import attrs
import torch

from trainfold.adapters.evaluation.reachability import reachable
from trainfold.adapters.evaluation.time_limit import TimeLimit
from trainfold.core.data.eval_cursor import EvalBatches
from trainfold.core.errors import InvalidArgument
from trainfold.core.evaluate.suite import Tally
from trainfold.core.layout.world import Collectives

_FIX = "keep samples in arrays, or in lists of more than 5,000, which are not looked into"


@final
@attrs.frozen(eq=False)
class Source:
    """The batches that an evaluation was given, and what can be seen behind them.

    Attributes:
        batches: as they were given.
        parts: those of cursors, through wrappers such as a map or a progress bar.
        limits: of time.
        generators: that they draw random numbers from.
    """

    batches: Any
    parts: tuple[EvalBatches[Any], ...]
    limits: tuple[TimeLimit[Any], ...]
    generators: tuple[torch.Generator, ...]


@final
@attrs.frozen
class Span:
    """Which samples a rank has seen: its shares of all that come before some index, each once, and no other.

    Attributes:
        first: the least index of which this is true; -1 where nobody knows.
        last: the greatest: beyond `first` where this rank has no share of what lies between.
        whole: whether nothing was left out, as far as this rank knows.
    """

    first: int
    last: int
    whole: bool


class Cut(Protocol):
    """Batches that were cut anew, so that what was seen is no number of batches."""

    def is_known(self) -> bool:
        """Whether each batch was the one that its cursor gave."""

    def reached(self, seen: int) -> tuple[int, int]:
        """The least and the greatest index of which it is true that all samples of this rank before it were seen."""


def source_of(batches: Any) -> Source:
    """Look behind batches; nothing is drawn from them."""
    parts: list[EvalBatches[Any]] = []
    limits: list[TimeLimit[Any]] = []
    generators: list[torch.Generator] = []
    behind: list[tuple[Any, tuple[type, ...]]] = [(batches, (torch.Generator, EvalBatches, TimeLimit))]
    for thing, kinds in behind:
        found: Any
        for found in reachable(thing, kinds, fix=_FIX):
            if isinstance(found, EvalBatches) and found not in parts:
                parts.append(found)
                behind.append((found.fetch, (torch.Generator,)))
            elif isinstance(found, TimeLimit) and found not in limits:
                limits.append(found)
                behind.append((found.batches, kinds))
            elif isinstance(found, torch.Generator) and found not in generators:
                generators.append(found)
    return Source(batches, tuple(parts), tuple(limits), tuple(generators))


def begin_of(source: Source, start: Tally | None, ranks: Collectives) -> str:
    """Where the batches of cursors begin, as text: the same on every rank.

    Raises:
        InvalidArgument: for batches of another rank, and for those that do not begin where the start ended.
    """
    for part in source.parts:
        if (part.rank, part.world_size) != (ranks.rank, ranks.world_size):
            raise InvalidArgument(
                "batches",
                expected=f"those of rank {ranks.rank} of {ranks.world_size}",
                found=f"those of rank {part.rank} of {part.world_size}",
                fix="give the same collectives to eval_batches and to evaluate",
            )
        if start is not None and start.batches and part.cursor.next_index != start.next_index:
            known = start.next_index >= 0
            raise InvalidArgument(
                "start",
                expected=f"a tally that reached sample {part.cursor.next_index}, where the batches begin",
                found=f"one that reached {f'sample {start.next_index}' if known else 'no known position'}",
                fix="begin where it ended: make_eval_cursor(..., next_index=start.next_index)"
                if known
                else "evaluate from the first sample on: it is of samples with a gap, or was cut where nobody knows",
            )
    return "; ".join(f"{part.cursor}, {part.steps} steps, shares of {part.chunk}" for part in source.parts)


def span_of(source: Source, start: Tally | None, *, seen: int, has_more: bool, chunks: "Cut | None" = None) -> Span:
    """Which samples a rank has seen, those of the start included.

    Args:
        source: what it drew from.
        start: what it went on from.
        seen: how many batches it evaluated, or chunks.
        has_more: whether it took one more, to know that there is one.
        chunks: how the batches were cut anew; None: they were evaluated as they were.
    """
    whole = bool(getattr(source.batches, "complete", True)) and all(limit.complete for limit in source.limits)
    whole = whole and not has_more
    is_first = start is None or start.batches == 0
    if not source.parts:
        return Span(-1, -1, whole and (is_first or start.complete))  # type: ignore[union-attr]
    begin = 0 if is_first else start.next_index  # type: ignore[union-attr]
    has_all = sum(part.given for part in source.parts) == seen + has_more if chunks is None else chunks.is_known()
    is_known = has_all and all(part.cursor.next_index == begin for part in source.parts)
    whole = whole and is_known and all(part.given == len(part) and part.complete for part in source.parts)
    if not is_known or len(source.parts) > 1:
        return Span(-1, -1, whole)
    (part,) = source.parts
    if chunks is not None:
        return Span(*chunks.reached(seen), whole)
    reached = part.cursor.advance(seen)
    return Span(reached.next_index, (reached if seen < len(part) else part.after).next_index, whole)


def together(spans: Sequence[Span]) -> tuple[int, bool]:
    """What all ranks have seen together: the position that each of them is at, or -1, and whether that is everything.

    Examples:
        >>> together([Span(8, 8, False), Span(8, 12, True)]), together([Span(12, 12, True), Span(8, 8, False)])
        ((8, False), (-1, False))
    """
    first, last = max(span.first for span in spans), min(span.last for span in spans)
    return (last if first <= last else -1), all(span.whole for span in spans)
