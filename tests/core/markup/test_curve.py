"""A curve of many values: it is short, and no peak is lost."""

import math

from hypothesis import example, given
from hypothesis import strategies as st

from trainfold.core.markup.curve import curve_of


@given(values=st.lists(st.floats(), max_size=200), most=st.integers(4, 40))
@example(values=[float("nan")] * 5, most=4)
@example(values=[0.0, -0.0] * 40, most=4)
def test_the_first_the_last_the_least_and_the_largest_value_are_points(values, most):
    curve = curve_of(range(1, len(values) + 1), values, most=most)
    finite = [(step, value) for step, value in enumerate(values, 1) if math.isfinite(value)]
    assert list(curve.points) == sorted(set(curve.points)), "in their order, each once"
    assert set(curve.points) <= set(finite)
    assert len(curve.points) <= most or len(finite) <= most
    assert curve.count == len(values)
    assert curve.not_finite_count == len(values) - len(finite)
    assert len(curve.not_finite) == min(100, curve.not_finite_count)
    assert (curve.last is None) == (not values)
    if values:
        assert curve.last[0] == len(values)
        assert repr(curve.last[1]) == repr(values[-1])
    after = finite[-1][0] + 1 if finite else 1
    assert curve.not_finite_since == (after if after <= len(values) else None)
    if finite:
        assert (curve.points[0], curve.points[-1]) == (finite[0], finite[-1])
        drawn = [value for _, value in curve.points]
        assert (min(drawn), max(drawn)) == (min(value for _, value in finite), max(value for _, value in finite))
    if len(finite) <= most:
        assert list(curve.points) == finite
        assert curve.per_bucket == 1
