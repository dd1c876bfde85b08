"""`span_of` and `together`: which samples an evaluation has seen, measured from the batches drawn, not from a promise."""

from collections.abc import Sequence
from typing import final

import attrs

from trainfold.core.data.eval_cursor import DistributedEvalCursor
from trainfold.core.evaluate.suite import Tally


@final
@attrs.frozen
class DrawnPart:
    """One rank's batches of a cursor, and how many of them were drawn.

    Attributes:
        begin: the position of the first sample.
        end: the position after the last one.
        batches: how many batches this rank has of it.
        drawn: how many of them were drawn.
    """

    begin: DistributedEvalCursor
    end: DistributedEvalCursor
    batches: int
    drawn: int


@final
@attrs.frozen
class Cut:
    """Batches that were cut into chunks of another size before they were evaluated.

    Attributes:
        is_in_order: whether each batch was the next one of its cursor.
        first: the least index before which this rank has seen all of its samples and no other; -1 if unknown.
        last: the greatest such index.
    """

    is_in_order: bool
    first: int
    last: int


@final
@attrs.frozen
class Span:
    """Which samples a rank has seen: its shares of all samples before an index, each once, and no other sample.

    Attributes:
        first: the least such index; -1 if unknown.
        last: the greatest such index. It is larger than `first` if this rank has no share of the samples between them.
        whole: whether nothing was left out, as far as this rank knows.
    """

    first: int
    last: int
    whole: bool


def span_of(  # noqa: PLR0913 - keywords, one for each fact
    parts: Sequence[DrawnPart],
    *,
    start: Tally | None,
    seen: int,
    has_more: bool,
    is_whole: bool,
    cut: Cut | None = None,
) -> Span:
    """Which samples a rank has seen, including those of the start tally.

    Law: the index is known only if every batch that was drawn from the one cursor was evaluated, in order, from the end of the start on.

    Args:
        parts: the cursors behind the batches; none if the samples have no known index.
        start: the tally that the evaluation continued; None if it started from scratch.
        seen: how many batches, or chunks, were evaluated.
        has_more: whether one more batch was drawn, only to know that it exists.
        is_whole: whether the source itself says that it left nothing out.
        cut: what is known of chunks; None if the batches were evaluated as they were.

    Examples:
        >>> from trainfold.evaluation import make_eval_cursor
        >>> cursor = make_eval_cursor(10, global_batch_size=4)
        >>> part = DrawnPart(cursor, cursor.advance(3), batches=3, drawn=2)
        >>> span_of([part], start=None, seen=2, has_more=False, is_whole=True)
        Span(first=8, last=8, whole=False)
    """
    whole = is_whole and not has_more
    continued = None if start is None or start.batches == 0 else start
    if not parts:
        return Span(-1, -1, whole and (continued is None or continued.complete))
    begin = 0 if continued is None else continued.next_index
    is_in_order = sum(part.drawn for part in parts) == seen + has_more if cut is None else cut.is_in_order
    is_known = is_in_order and all(part.begin.next_index == begin for part in parts)
    whole = whole and is_known and all(part.drawn == part.batches and part.end.is_done for part in parts)
    if not is_known or len(parts) > 1:
        return Span(-1, -1, whole)
    if cut is not None:
        return Span(cut.first, cut.last, whole)
    (part,) = parts
    reached = part.begin.advance(seen)
    return Span(reached.next_index, (reached if seen < part.batches else part.end).next_index, whole)


def together(spans: Sequence[Span]) -> tuple[int, bool]:
    """The position that all ranks have reached, or -1 if there is none, and whether they have seen every sample.

    Law: if the position is known, the ranks together have seen each sample before it once, and no other.

    Examples:
        >>> together([Span(8, 8, False), Span(8, 12, True)]), together([Span(12, 12, True), Span(8, 8, False)])
        ((8, False), (-1, False))
    """
    first, last = max(span.first for span in spans), min(span.last for span in spans)
    return (last if first <= last else -1), all(span.whole for span in spans)
