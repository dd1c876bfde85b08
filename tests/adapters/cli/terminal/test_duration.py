"""Durations on the command line have a unit."""

import pytest

from trainfold.adapters.cli.terminal.duration import duration_text, seconds_of


@pytest.mark.parametrize(
    ("text", "secs"),
    [("90s", 90), ("1.5h", 5400), ("1h30m", 5400), ("1h 30min", 5400), ("2d", 172800), ("250ms", 0.25)],
)
def test_a_duration_has_a_unit(text, secs):
    assert seconds_of(text) == secs
    assert seconds_of(duration_text(secs).replace(" ", "")) == pytest.approx(secs, rel=5e-3)


@pytest.mark.parametrize("text", ["", "s", "12", "12 parsecs", "1h30", "1e3s", "-1s", "h1", "\u0661s", "inf", "1..5s"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="not a duration with a unit"):
        seconds_of(text)
