"""Charts of a run: whatever the values are, axes are finite and each point lies on them."""

import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainfold.core.markup.curve import curve_of
from trainfold.core.page.charts import curve_chart

VALUES = st.lists(st.floats(), min_size=1, max_size=8)


@settings(max_examples=60)
@given(
    VALUES.filter(lambda values: any(map(math.isfinite, values))),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=3),
)
@example([1.0, 1.79e308], [])
@example([-1.79e308, 1.79e308], [1.79e308])
@example([5e-324, 1e-323], [])
def test_a_diverging_loss_is_drawn_whatever_its_size(values, evaluations):
    """P32: a loss near the largest float ended the page with an OverflowError. Its text has the value itself."""
    dots = [(float(step), value) for step, value in enumerate(evaluations)]
    chart = curve_chart("loss", curve_of(range(len(values)), values), dots=dots, best=max(dots, default=None))
    assert math.isfinite(chart.y.low)
    assert chart.y.low < chart.y.high < math.inf
    assert math.isfinite(chart.y.high - chart.y.low)
    for series in chart.marks:
        assert all(chart.y.low <= y <= chart.y.high for part in series.parts for _, y in part)
    if 1.79e308 in values:
        assert "at most 1.79e+308" in chart.text
