"""Colours of pages: each text can be read on its ground, in light and in dark."""

import pytest

from trainfold.core.markup.style import COLOURS, page_style, parts_style


def luminance(colour):
    """WCAG 2.2: the relative luminance of a colour."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("which", [0, 1])
def test_texts_and_marks_have_the_contrast_of_wcag_aa(which):
    """4.5 : 1 for texts on both grounds; 3 : 1 for the marks of charts, which the soft bars need not have: a table has their numbers."""
    for name in ("ink", "quiet", "accent", "warm", "good"):
        for ground in ("ground", "raised"):
            assert contrast(COLOURS[name][which], COLOURS[ground][which]) >= 4.5, (name, ground)


def test_a_style_loads_nothing():
    for style in (page_style(), parts_style()):
        assert "url(" not in style
        assert "@import" not in style
        assert "<" not in style
