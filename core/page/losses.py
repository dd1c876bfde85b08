"""`loss_section`: losses, norms and evaluations of a run over its steps, with the best."""

from collections.abc import Sequence

from trainfold.core.markup.chart import chart_html
from trainfold.core.markup.curve import Curve, curve_of
from trainfold.core.markup.html_table import safe
from trainfold.core.markup.texts import count_text, number_text
from trainfold.core.page.charts import curve_chart
from trainfold.core.page.page_parts import RECORD, left_out_note, long_table, note
from trainfold.core.page.run_page import FlightFacts, RunPage


def loss_section(page: RunPage) -> str:
    """Losses and evaluations over steps, with the best."""
    metrics = _evaluated(page)
    drawn = _recorded(page)
    drawn.append(left_out_note(page, "evaluations"))
    drawn += [_evaluations(page, metric, points, number) for number, (metric, points) in enumerate(metrics.items())]
    if page.best is not None:
        record = page.best.record
        entries = [entry for entry, _ in page.best.entries if entry.score is not None]
        rows = [(str(place), number_text(entry.step), number_text(entry.score or 0.0)) for place, entry in enumerate(entries, 1)]  # fmt: skip
        goal = "less is better" if record.direction == "min" else "more is better"
        drawn.append(long_table(f"The best by {record.metric}: {goal}", ("place", "step", record.metric), rows, numbers=("step", record.metric)))  # fmt: skip
    if not metrics:
        drawn.append(note("No evaluation is recorded: <code>live.record(name=result)</code> and <code>save_best</code> record them."))  # fmt: skip
    return "".join(drawn)


def _recorded(page: RunPage) -> list[str]:
    """The curves of the flight log."""
    if page.flight is None:
        return [note(f"This run has no flight log, so its losses are not known. {RECORD} and <code>live.record(loss=loss)</code> record them.")]  # fmt: skip
    drawn = [note(f"Not read: {safe(page.flight.damage)}.")] if page.flight.damage else []
    for title, name, curve in (("Loss", "loss", page.flight.loss), ("Norm of the gradient", "norm", page.flight.norm)):
        if curve.points:
            others = [getattr(facts, name) for facts in page.flight.others.values()]
            unlike = [other for other in others if other.points and other != curve]
            drawn.append(chart_html(curve_chart(title, curve, name=name, others=unlike), f"{name}-curve"))
        drawn += _about(curve)
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


def _evaluated(page: RunPage) -> dict[str, list[tuple[float, float]]]:
    """Metric -> (step, score) of each evaluation that is recorded."""
    found: dict[str, set[tuple[float, float]]] = {}
    for line in page.journal:
        name, score = line.data.get("metric"), line.moment("score")
        if line.kind in ("evaluated", "best") and isinstance(name, str) and line.step is not None and score is not None:
            found.setdefault(name, set()).add((float(line.step), score))
    if page.best is not None:
        known = found.setdefault(page.best.record.metric, set())
        known |= {(float(entry.step), entry.score) for entry, _ in page.best.entries if entry.score is not None}
    return {name: sorted(points) for name, points in found.items()}


def _about(curve: Curve) -> list[str]:
    found = []
    if curve.per_bucket > 1:
        found.append(note(f"{curve.count:,} values, drawn as the least and the largest of each {curve.per_bucket:,}."))
    if curve.not_finite_count:
        steps = ", ".join(f"{step:,}" for step in curve.not_finite[:8])
        more = ", …" if curve.not_finite_count > 8 else ""
        found.append(note(f"{count_text(curve.not_finite_count, 'value')} not finite: step {steps}{more}."))
    return found


def _evaluations(page: RunPage, metric: str, points: Sequence[tuple[float, float]], number: int) -> str:
    record = None if page.best is None else page.best.record
    best = None
    if record is not None and record.metric == metric and record.score is not None and record.step is not None:
        best = (float(record.step), record.score)
    curve = curve_of([int(step) for step, _ in points], [score for _, score in points])
    dots = [(float(step), score) for step, score in curve.points]
    chart = curve_chart(f"Evaluation: {metric}", Curve(curve.points, curve.count), dots=dots, best=best, name=metric)
    return chart_html(chart, f"evaluation-{number}") + "".join(_about(curve))
