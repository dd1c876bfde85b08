"""Charts of a run: whatever the values are, axes are finite and each point lies on them."""

import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainfold.core.markup.curve import curve_of
from trainfold.core.markup.timelines import lineage_chart
from trainfold.core.page.charts import curve_chart, time_line
from trainfold.core.page.save_times import SaveTimes
from trainfold.core.page.sessions import Session

VALUES = st.lists(st.floats(), min_size=1, max_size=8)


@settings(max_examples=60)
@given(
    VALUES.filter(lambda values: any(map(math.isfinite, values))),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=3),
)
@example([1.0, 1.79e308], [])
@example([-1.79e308, 1.79e308], [1.79e308])
@example([5e-324, 1e-323], [])
@example([math.nan, 1.0, 2.0, math.inf, math.nan], [])
def test_a_diverging_loss_is_drawn_whatever_its_size(values, evaluations):
    """P32: a loss near the largest float ended the page with an OverflowError. Its text has the value itself."""
    dots = [(float(step), value) for step, value in enumerate(evaluations)]
    chart = curve_chart("loss", curve_of(range(len(values)), values), dots=dots, best=max(dots, default=None))
    assert math.isfinite(chart.y.low)
    assert chart.y.low < chart.y.high < math.inf
    assert math.isfinite(chart.y.high - chart.y.low)
    for series in chart.marks:
        assert all(chart.y.low <= y <= chart.y.high for part in series.parts for _, y in part)
        assert all(chart.x.low <= x <= chart.x.high for part in series.parts for x, _ in part)
    if 1.79e308 in values:
        assert "at most 1.79e+308" in chart.text


def inside(chart):
    """Whether each mark lies between the ends of both axes."""
    (low, high), (down, up) = (sorted((axis.low, axis.high)) for axis in (chart.x, chart.y))
    points = [point for series in chart.marks for part in series.parts for point in part]
    return bool(points) and all(low <= x <= high and down <= y <= up for x, y in points)


def test_no_mark_of_a_chart_lies_outside_of_it():
    """W22: marks of steps without a finite value, of other ranks, of clocks that went back and of rewinds were drawn beside their chart."""
    nan = math.nan
    assert inside(curve_chart("loss", curve_of(range(9), [nan, nan, 1.0, 2.0, 3.0, nan, nan, nan, nan])))
    assert inside(curve_chart("loss", curve_of([5, 6], [1.0, 2.0]), others=[curve_of([1, 9], [0.0, 4.0])]))
    assert inside(curve_chart("loss", curve_of([5, 6], [1.0, 2.0]), left=[(9.0, 7.0)]))
    assert inside(curve_chart("loss", curve_of(range(999), [1.0] + [nan] * 998)))
    sessions = [Session(100.0, 0, 110.0, 5, "killed", moments=((100.0, 0), (110.0, 5))), Session(50.0, 4, 60.0, 9, "closed", moments=((50.0, 4),))]  # fmt: skip
    assert inside(time_line(sessions, [SaveTimes(12, 40.0, 41.0)]))
    assert inside(lineage_chart([(30, 1, True), (40, 1, True)], {1: [(0, 10)]}))


def test_a_timeline_goes_on_from_the_one_that_it_comes_from():
    """W22: where that had no checkpoint left, or was one too many, the line came from the first timeline of the chart, which had nothing to do with it."""

    def bends(checkpoints, forks):
        chart = lineage_chart(checkpoints, forks)
        return [part for mark in chart.marks if mark.form == "dashed" for part in mark.parts]

    late = 1_795_894_154_000
    checkpoints = [(40, 0, True), (80, 1, True), (100, late, True)]
    forks = {1: [(0, 40)], late: [(0, 40), (1, 80), (late - 4000, 85)]}
    assert bends(checkpoints, forks) == [((40.0, 0.0), (40.0, 1.0)), ((80.0, 1.0), (85.0, 2.0))]
    assert bends([(40, 0, True), (90, 2, True)], {2: [(1, 60)]}) == []
    many = [(timeline + 1, timeline, True) for timeline in range(14)]
    assert bends(many, {13: [(0, 1)]}) == []


def test_a_diverged_curve_says_so_where_it_is_heard():
    """P33: the label of a curve ended at its last finite value, and sounded like that of a healthy run."""
    chart = curve_chart("Loss", curve_of(range(1, 6), [3.0, 2.0, 1.0, math.nan, math.inf]))
    assert chart.text == "Loss, steps 1 to 5: from 3 to inf (not finite since step 4), at least 1, at most 3."
