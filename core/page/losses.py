"""`loss_section`: losses and norms of a run over its steps, and its evaluations."""

from trainfold.core.markup.chart import chart_html
from trainfold.core.markup.html_table import safe
from trainfold.core.markup.texts import count_text, number_text
from trainfold.core.page.charts import curve_chart
from trainfold.core.page.evaluations import about_curve, evaluation_parts
from trainfold.core.page.page_parts import RECORD, long_table, note
from trainfold.core.page.run_page import FlightFacts, RunPage


def loss_section(page: RunPage) -> str:
    """Losses and evaluations over steps, with the best."""
    return "".join([*_recorded(page), *evaluation_parts(page)])


def _recorded(page: RunPage) -> list[str]:
    """The curves of the flight log."""
    if page.flight is None:
        return [note(f"This run has no flight log, so its losses are not known. {RECORD} and <code>live.record(loss=loss)</code> record them.")]  # fmt: skip
    drawn = [note(f"Not read: {safe(page.flight.damage)}.")] if page.flight.damage else []
    logs = [page.flight, *page.flight.others.values()]
    drawn += [note(f"Not drawn: {safe(text)}.") for facts in logs for text in facts.undone]
    for title, name, curve in (("Loss", "loss", page.flight.loss), ("Norm of the gradient", "norm", page.flight.norm)):
        if curve.points:
            others = [getattr(facts, name) for facts in page.flight.others.values()]
            unlike = [other for other in others if other.points and other != curve]
            drawn.append(chart_html(curve_chart(title, curve, name=name, others=unlike), f"{name}-curve"))
        drawn += about_curve(curve)
    drawn += _ranks(page.flight)
    if not page.flight.loss.count and page.flight.last is not None:
        drawn.append(note("The flight log has no losses: <code>live.record(loss=loss)</code> before <code>live.advance</code> records them."))  # fmt: skip
    return drawn


def _ranks(flight: FlightFacts) -> list[str]:
    """The logs of all ranks that are shown, if there is more than one."""
    if not flight.others and not flight.not_shown:
        return []
    logs = {0: flight, **flight.others}
    rows = [
        (
            str(rank),
            "" if each.first is None else number_text(each.first),
            "" if each.last is None else number_text(each.last),
            number_text(each.loss.count),
            "" if each.loss.last is None else number_text(each.loss.last[1]),
            number_text(each.loss.not_finite_count),
            "some lines cannot be read" if each.damage else "",
        )
        for rank, each in sorted(logs.items())
    ]
    columns = ("rank", "from step", "to step", "losses", "last loss", "not finite", "damage")
    drawn = [long_table("Flight logs of the ranks", columns, rows, numbers=columns[:6])]
    if flight.not_shown:
        drawn.append(
            note(
                f"{count_text(flight.not_shown, 'rank')} more have a log that is not read here: <code>trainfold.states.read_flights</code> reads all."
            )
        )
    return drawn
