"""`lineage_chart`: the timelines of a run as lines over its steps, with a dot for each checkpoint, and where rewinds left them."""

from collections.abc import Mapping, Sequence
from typing import Final

from trainfold.core.markup.chart import Axis, Chart, Series
from trainfold.core.markup.texts import count_text, number_text, ticks

_ROW: Final = 34  # pixels between two timelines
_MOST_ROWS: Final = 12
_MOST_DIGITS: Final = 8


def lineage_chart(
    checkpoints: Sequence[tuple[int, int, bool]], forks: Mapping[int, Sequence[tuple[int, int]]]
) -> Chart:
    """The chart.

    Args:
        checkpoints: (step, timeline, whether it can be used and is on the present lineage).
        forks: timeline -> (earlier timeline, step) pairs: where each earlier one of its lineage was left.

    Examples:
        >>> chart = lineage_chart([(10, 0, True), (20, 0, False), (15, 1, True)], {1: [(0, 10)]})
        >>> chart.text
        '3 checkpoints on 2 timelines; 1 is left behind, or cannot be used. Timeline 1 begins at step 10 of timeline 0.'
    """
    timelines = sorted({timeline for _, timeline, _ in checkpoints})
    shown = timelines[-_MOST_ROWS:]
    left_out = len(timelines) - len(shown)
    drawn = [each for each in checkpoints if each[1] in shown]
    origin = {timeline: max(forks.get(timeline, ()), default=None) for timeline in shown}
    row = {timeline: float(at) for at, timeline in enumerate(shown)}  # their numbers may have gaps
    first = {}
    for timeline in shown:
        steps = [step for step, of, _ in drawn if of == timeline]
        source = origin[timeline]
        first[timeline] = (min(steps) if source is None else min(source[1], *steps), max(steps))
    lines = tuple(((float(low), row[of]), (float(high), row[of])) for of, (low, high) in first.items() if high > low)
    known = {of: max((each for each in forks.get(of, ()) if each[0] in row), default=None) for of in shown}
    bends = tuple(  # from the nearest one that is drawn: of those between, no checkpoint may be left
        ((float(source[1]), row[source[0]]), (float(first[of][0]), row[of]))
        for of, source in known.items()
        if source is not None
    )
    present = tuple(((float(step), row[of]),) for step, of, is_present in drawn if is_present)
    others = tuple(((float(step), row[of]),) for step, of, is_present in drawn if not is_present)
    text = f"{count_text(len(checkpoints), 'checkpoint')} on {count_text(len(timelines), 'timeline')}"
    text += f"; {len(others)} {'is' if len(others) == 1 else 'are'} left behind, or cannot be used" if others else ""
    text += "." + "".join(
        f" Timeline {of} begins at step {source[1]:,} of timeline {source[0]}."
        for of, source in origin.items()
        if source is not None
    )
    text += f" {count_text(left_out, 'earlier timeline')} not shown." if left_out else ""
    low = min(step for step, _ in first.values())  # a rewind may lie before the checkpoints that are left
    high = max(step for _, step in first.values())
    y = Axis(len(shown) - 0.5, -0.5, tuple((at, _short(of)) for of, at in row.items()), "timeline")
    marks = (
        Series("", "line", "quiet", lines),
        Series("goes on from an earlier checkpoint", "dashed", "quiet", bends),
        Series("left behind, or cannot be used", "squares", "warm", others),
        Series("checkpoint", "dots", "accent", present),
    )
    return Chart(
        "Checkpoints and timelines", text, step_axis(low, high, pad=True), y, marks, height=_ROW * len(shown) + 16
    )


def _short(timeline: int) -> str:
    """The number of a timeline where there is little room: one beside hidden manifests is a time in milliseconds.

    Examples:
        >>> _short(12), _short(1_795_894_154_000)
        ('12', '…94154000')
    """
    text = str(timeline)
    return text if len(text) <= _MOST_DIGITS else f"…{text[-_MOST_DIGITS:]}"


def step_axis(low: float, high: float, *, pad: bool = False) -> Axis:
    """The axis of optimizer steps.

    Args:
        low: the first step.
        high: the last one.
        pad: whether marks at its ends need room.
    """
    room = (high - low) / 40 if pad else 0.0
    if not high > low:
        low, high = low - 1, high + 1
        return Axis(low, high, ((low + 1, f"step {number_text(low + 1)}"),), "step")
    labels = tuple((at, number_text(at)) for at in ticks(low, high, most=7))
    return Axis(low - room, high + room, (*((at, f"step {text}" if place == 0 else text) for place, (at, text) in enumerate(labels)),), "step")  # fmt: skip
