"""`Chart`: lines and marks over two axes, as a figure of HTML that fits any width: a picture that stretches, with labels that do not."""

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, final

import attrs

from trainfold.core.markup.html_table import safe

_WIDTH: Final = 1000
_HEIGHT: Final = 400
_MOST_TEXT: Final = 600

Point: TypeAlias = tuple[float, float]
Form: TypeAlias = Literal["line", "steps", "dots", "squares", "bars", "dashed", "wide"]
Colour: TypeAlias = Literal["accent", "warm", "good", "quiet", "soft", "ink"]


@final
@attrs.frozen
class Series:
    """Points of one kind.

    Attributes:
        name: what they are, in the key of the chart; empty to leave them out of it.
        form: ``line``, ``dashed`` or ``wide``: each sequence of points is a line; ``dots`` and ``squares``: each point is one; ``bars``: each
            pair of points is a bar.
        colour: the colour. No two marks of a chart differ by it alone.
        parts: sequences of points.
    """

    name: str
    form: Form
    colour: Colour
    parts: tuple[tuple[Point, ...], ...]


@final
@attrs.frozen
class Axis:
    """The extent of an axis, and its labels.

    Attributes:
        low: the number at its start.
        high: the number at its end; less than ``low`` for an axis that goes down.
        labels: (number, text).
        name: what it shows, such as ``step``.
    """

    low: float
    high: float
    labels: tuple[tuple[float, str], ...]
    name: str

    def place(self, number: float) -> float:
        """Where a number is, from 0 to 1."""
        return 0.5 if self.high == self.low else (number - self.low) / (self.high - self.low)


@final
@attrs.frozen
class Chart:
    """A chart.

    Attributes:
        title: the heading.
        text: what it shows, in sentences, for those who do not see it.
        x: the axis below.
        y: the axis at the left.
        marks: the lines, bars and dots, the last one on top.
        height: in pixels.
    """

    title: str
    text: str
    x: Axis
    y: Axis
    marks: tuple[Series, ...]
    height: int = 220


def chart_html(chart: Chart, name: str) -> str:
    """A figure.

    Args:
        chart: what it shows; its texts may come from files.
        name: an id that no other chart of the page has.

    Examples:
        >>> axis = Axis(0, 10, ((0, "0"), (10, "10")), "step")
        >>> made = chart_html(Chart("a < b", "A line.", axis, axis, (Series("loss", "line", "accent", (((0, 0), (10, 10)),)),)), "c")
        >>> "a &lt; b" in made, '<path class="accent line" d="M0 400L1000 0"/>' in made
        (True, True)
    """
    grid = "".join(f"M0 {_y(chart.y, at)}H{_WIDTH}" for at, _ in chart.y.labels)
    paths = "".join(
        f'<path class="{mark.colour} {mark.form}" d="{_path(chart, mark)}"/>' for mark in chart.marks if any(mark.parts)
    )
    left = "".join(
        f'<span style="top:{100 - 100 * chart.y.place(at):.2f}%">{safe(text)}</span>' for at, text in chart.y.labels
    )
    widest = max((text for _, text in chart.y.labels), key=len, default="")
    key = "".join(
        f'<li><svg viewBox="0 0 22 12" aria-hidden="true"><path class="{mark.colour} {mark.form}" d="{_sample(mark.form)}"/></svg>{safe(mark.name)}</li>'
        for mark in chart.marks
        if mark.name and any(mark.parts)
    )
    wrapped_key = f'<ul class="key">{key}</ul>' if key else ""
    return (
        f'<figure aria-labelledby="{name}-t"><figcaption id="{name}-t">{safe(chart.title)}</figcaption>'
        f'<div class="plot"><div class="unit" aria-hidden="true">{safe(chart.y.name)}</div>'
        f'<div class="left" aria-hidden="true">{left}<i>{safe(widest)}</i></div>'
        f'<div class="area" style="height:{chart.height}px">'
        f'<svg role="img" aria-label="{safe(chart.text, most=_MOST_TEXT)}" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none">'
        f'<path class="grid" d="{grid}"/>{paths}</svg></div>'
        f'<div class="below" aria-hidden="true">{_below(chart.x)}</div></div>'
        f"{wrapped_key}</figure>"
    )


def _below(axis: Axis) -> str:
    """The labels below; at the ends they do not stick out, and on a narrow screen every second one is left out."""
    found = []
    for number, (at, text) in enumerate(axis.labels):
        place = axis.place(at)
        names = [*(["first"] if place < 0.04 else []), *(["last"] if place > 0.96 else []), *(["odd"] if number % 2 else [])]  # fmt: skip
        kind = f' class="{" ".join(names)}"' if names else ""
        found.append(f'<span{kind} style="left:{100 * place:.2f}%">{safe(text)}</span>')
    return "".join(found)


def _path(chart: Chart, mark: Series) -> str:
    drawn = []
    for part in mark.parts:
        points = [(_x(chart.x, x), _y(chart.y, y)) for x, y in part]
        if mark.form in ("dots", "squares"):
            drawn += [f"M{x} {y}h0" for x, y in dict.fromkeys(points)]
        elif points:
            (x, y), *rest = points
            drawn.append(f"M{x} {y}" + "".join(f"L{x} {y}" for x, y in rest))
    return "".join(drawn)


def _x(axis: Axis, number: float) -> str:
    return f"{_WIDTH * axis.place(number):.1f}".removesuffix(".0")


def _y(axis: Axis, number: float) -> str:
    return f"{_HEIGHT - _HEIGHT * axis.place(number):.1f}".removesuffix(".0")


def _sample(form: Form) -> str:
    if form in ("dots", "squares"):
        return "m11 6h0"
    return "m11 1V11" if form == "bars" else "M1 6H21"


def bars_html(title: str, rows: Sequence[tuple[str, float, str]], columns: tuple[str, str]) -> str:
    """A table of names and amounts, with a bar for each amount.

    Args:
        title: the caption.
        rows: name, amount >= 0, and the amount as text.
        columns: what the names and the amounts are.

    Examples:
        >>> "width:50.0%" in bars_html("sizes", [("a", 4.0, "4 B"), ("b", 2.0, "2 B")], ("name", "size"))
        True
    """
    most = max((amount for _, amount, _ in rows), default=0.0) or 1.0
    body = "".join(
        f'<tr><th scope="row">{safe(name)}</th><td class="number">{safe(text)}</td>'
        f'<td style="width:60%"><span class="share" style="width:{100 * amount / most:.1f}%"></span></td></tr>'
        for name, amount, text in rows
    )
    head = f'<tr><th scope="col">{safe(columns[0])}</th><th scope="col" class="number">{safe(columns[1])}</th><td></td></tr>'
    return f"<table><caption>{safe(title)}</caption><thead>{head}</thead><tbody>{body}</tbody></table>"
