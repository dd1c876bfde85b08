"""Which samples an evaluation has seen: compared with the samples themselves, whatever each rank drew."""

import attrs
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from trainfold.core.data.eval_cursor import EvalBatches, make_eval_cursor
from trainfold.core.evaluate.coverage import Cut, DrawnPart, Span, span_of, together
from trainfold.core.evaluate.suite import no_tally
from trainfold.core.metrics.ratio import Ratio

NONE_SEEN = no_tally({"loss": Ratio()})


def tally_at(index, *, complete=False):
    return attrs.evolve(NONE_SEEN, batches=1, next_index=index, complete=complete)


@st.composite
def evaluations(draw):
    """The batches of the ranks from some position on, and how many batches each rank has drawn and evaluated."""
    length, size, world = draw(st.integers(0, 12)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    begin = draw(st.integers(0, length // size)) * size
    cursor = make_eval_cursor(length, global_batch_size=size, next_index=min(begin, length))
    steps = draw(st.integers(min(1, cursor.steps), cursor.steps))
    parts = [EvalBatches(cursor, list, steps, rank, world) for rank in range(world)]
    seen = [draw(st.integers(0, len(part))) for part in parts]
    return parts, seen, [taken < len(part) and draw(st.booleans()) for taken, part in zip(seen, parts, strict=True)]


def span(part, seen, *, has_more=False, start=None, drawn=None, is_whole=True, cut=None):
    taken = seen + has_more if drawn is None else drawn
    of_it = DrawnPart(part.cursor, part.after, batches=len(part), drawn=taken)
    return span_of([of_it], start=start, seen=seen, has_more=has_more, is_whole=is_whole, cut=cut)


def start_of(part):
    return tally_at(part.cursor.next_index) if part.cursor.next_index else None


@given(case=evaluations())
def test_a_known_position_and_a_whole_say_exactly_which_samples_were_seen(case):
    """P30, Q12: each sample before the position exactly once, and no other sample."""
    parts, seen, more = case
    spans = [span(part, n, has_more=m, start=start_of(part)) for part, n, m in zip(parts, seen, more, strict=True)]
    position, complete = together(spans)
    samples = sorted(i for part, n in zip(parts, seen, strict=True) for batch in list(part)[:n] for i in batch)
    begin, length = parts[0].cursor.next_index, parts[0].cursor.length
    if position >= 0:
        assert samples == list(range(begin, position))
    if complete:
        assert samples == list(range(begin, length))
    is_all = samples == list(range(begin, length)) and parts[0].after.is_done
    assert complete == (is_all and not any(more))
    if all(n == len(part) for n, part in zip(seen, parts, strict=True)):
        assert position == parts[0].after.next_index
    event(f"known: {position >= 0}, complete: {complete}")


@given(case=evaluations(), data=st.data())
def test_batches_that_were_drawn_and_not_evaluated_leave_no_position(case, data):
    """Q12: a wrapper drops, joins or repeats batches."""
    (part, *_), (seen, *_), _ = case
    other = data.draw(st.integers(0, len(part) + 1).filter(lambda drawn: drawn != seen))
    found = span(part, seen, start=start_of(part), drawn=other)
    assert found == Span(-1, -1, whole=False)


def test_an_evaluation_that_begins_elsewhere_than_its_start_ended_has_no_position():
    part = EvalBatches(make_eval_cursor(8, global_batch_size=4, next_index=4), list, 1, 0, 1)
    assert span(part, 1, start=tally_at(4)) == Span(8, 8, whole=True)
    assert span(part, 1, start=None) == Span(-1, -1, whole=False)
    assert span(part, 1, start=tally_at(0)) == Span(-1, -1, whole=False)


@pytest.mark.parametrize("complete", [True, False])
def test_without_a_cursor_the_position_is_unknown_and_the_source_says_what_is_whole(complete):
    def seen(**facts):
        return span_of([], **{"start": None, "seen": 3, "has_more": False, "is_whole": True, **facts})

    assert seen() == Span(-1, -1, whole=True)
    assert not seen(has_more=True).whole
    assert not seen(is_whole=False).whole
    assert seen(start=tally_at(-1, complete=complete)).whole == complete


def test_two_cursors_have_no_position_and_chunks_bring_their_own():
    part = EvalBatches(make_eval_cursor(8, global_batch_size=4), list, 2, 0, 1)
    drawn = DrawnPart(part.cursor, part.after, batches=2, drawn=2)
    both = span_of([drawn, drawn], start=None, seen=4, has_more=False, is_whole=True)
    assert both == Span(-1, -1, whole=True)
    chunked = span(part, 3, drawn=2, cut=Cut(is_in_order=True, first=6, last=6))
    assert chunked == Span(6, 6, whole=True)
    assert span(part, 3, drawn=2, cut=Cut(is_in_order=False, first=6, last=6)) == Span(-1, -1, whole=False)
