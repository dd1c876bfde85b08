"""`evaluation_parts`: the evaluations of a run, as charts and in numbers, with the best."""

import math
from collections.abc import Sequence
from typing import Final, final

import attrs

from trainfold.core.flight.journal_line import JournalLine
from trainfold.core.markup.chart import chart_html
from trainfold.core.markup.curve import Curve, curve_of
from trainfold.core.markup.html_table import safe
from trainfold.core.markup.texts import count_text, moment_text, number_text
from trainfold.core.page.charts import curve_chart
from trainfold.core.page.page_parts import left_out_note, long_table, note
from trainfold.core.page.run_page import RunPage

MOST_METRICS: Final = 24  # that are shown
_ROWS: Final = 10  # of each, before the reader asks for more
_NAMED: Final = 8  # of those that are not


@final
@attrs.frozen
class Result:
    """A result of a state of the run.

    Attributes:
        step: of the state.
        score: the result; it may be a NaN or an infinity.
        at: when it was recorded, in seconds since 1970; None if that is not known.
        is_left: whether a resume has left the state behind, and none after it has had this result at this step again.
    """

    step: int
    score: float
    at: float | None = None
    is_left: bool = False


@final
@attrs.frozen
class _Stretch:
    """Lines of one process, until it ends or goes back, that the present run goes through.

    Attributes:
        before: the stretch before it.
        begin: the index of its first line; -1 for lines before any start.
        last: the step from which the next stretch goes on.
    """

    before: "_Stretch | None"
    begin: int
    last: int


def evaluations_of(page: RunPage) -> dict[str, list[Result]]:
    """Metric -> each evaluation that is recorded, in the order of their steps. One that was recorded again, with the same result, is there once.

    Examples:
        >>> from trainfold.core.history.inventory import Inventory
        >>> lines = [JournalLine(1.0, "started", 0), *(JournalLine(2.0, "evaluated", step, data={"metric": "acc", "score": score})
        ...          for step, score in ((2, 0.5), (4, "nan"))), JournalLine(3.0, "started", 2)]
        >>> found = evaluations_of(RunPage(Inventory("runs/a", "r", ()), 4.0, journal=tuple(lines)))
        >>> [(each.step, each.score, each.is_left) for each in found["acc"]]
        [(2, 0.5, False), (4, nan, True)]
    """
    found: dict[str, dict[tuple[int, str], Result]] = {}
    for line, highest in zip(reversed(page.journal), reversed(_highest_steps(page.journal)), strict=True):
        name, score = line.data.get("metric"), _score(line)
        if line.step is None or line.kind not in ("evaluated", "best") or not isinstance(name, str) or score is None:
            continue
        made, results = Result(line.step, score, line.at, is_left=line.step > highest), found.setdefault(name, {})
        if results.setdefault((line.step, repr(score)), made).is_left and not made.is_left:
            results[line.step, repr(score)] = made
    found = dict(reversed(found.items()))
    if page.best is not None:
        known = found.setdefault(page.best.record.metric, {})
        lost = page.lost_bests
        for entry, _ in page.best.entries:
            if entry.score is not None and (entry.step, repr(entry.score)) not in known:
                known[entry.step, repr(entry.score)] = Result(entry.step, entry.score, is_left=entry.step in lost)
    return {name: sorted(known.values(), key=lambda each: each.step) for name, known in found.items() if known}


def _highest_steps(journal: Sequence[JournalLine]) -> list[float]:
    """For each line, the highest step up to which the present run has what was recorded there.

    A stretch ends where a process begins or goes back. A resume goes on after the stretch that saved its checkpoint, and not always after the last one: a process
    that went back, and saved nothing after that, is resumed from a later checkpoint than it went back to.
    """
    before: _Stretch | None = None
    begin = -1
    saved: dict[int, tuple[_Stretch | None, int]] = {}
    begins = []
    for at, line in enumerate(journal):
        if line.kind == "committed" and line.step is not None:
            saved[line.step] = before, begin
        elif line.kind in ("started", "restored") and line.step is not None:
            before, begin = _Stretch(*saved.get(line.step, (before, begin)), line.step), at
        begins.append(begin)
    highest, lowest = {begin: math.inf}, math.inf
    while before is not None:
        highest[before.begin] = lowest = min(lowest, before.last)
        before = before.before
    return [highest.get(begin, -math.inf) for begin in begins]


def _score(line: JournalLine) -> float | None:
    """The result of a line; what is not finite is a text there."""
    text = line.data.get("score")
    return float(text) if text in ("nan", "inf", "-inf") else line.moment("score")


def evaluation_parts(page: RunPage) -> list[str]:
    """The parts of the section: for each metric a chart and a table of its numbers, and the best."""
    metrics = evaluations_of(page)
    own = [] if page.best is None else [page.best.record.metric]
    ordered = sorted(metrics, key=lambda name: name not in own)
    drawn = [left_out_note(page, "evaluations")]
    for number, metric in enumerate(ordered[:MOST_METRICS]):
        drawn += _metric(page, metric, metrics[metric], number)
    if len(ordered) > MOST_METRICS:
        others = ordered[MOST_METRICS:]
        names = ", ".join(others[:_NAMED]) + (" and more" if len(others) > _NAMED else "")
        drawn.append(note(f"{count_text(len(others), 'more name')} of evaluations are not shown here: {safe(names)}. The journal of the run has them."))  # fmt: skip
    if page.best is not None:
        record, lost = page.best.record, page.lost_bests
        entries = [entry for entry, _ in page.best.entries if entry.score is not None]
        rows = [
            (str(place), number_text(entry.step), number_text(entry.score or 0.0), lost.get(entry.step, ""))
            for place, entry in enumerate(entries, 1)
        ]
        columns = ("place", "step", record.metric, "checkpoint")[: 4 if any(row[3] for row in rows) else 3]
        goal = "less is better" if record.direction == "min" else "more is better"
        drawn.append(long_table(f"The best by {record.metric}: {goal}", columns, [row[: len(columns)] for row in rows], numbers=("step", record.metric)))  # fmt: skip
    if not metrics:
        drawn.append(note("No evaluation is recorded: <code>live.record(name=result)</code> and <code>save_best</code> record them."))  # fmt: skip
    return drawn


def _metric(page: RunPage, metric: str, found: Sequence[Result], number: int) -> list[str]:
    """A chart of its finite results, what it cannot draw in words, and all of them in numbers."""
    record = None if page.best is None else page.best.record
    best = None
    if record is not None and record.metric == metric and record.score is not None and record.step is not None:
        best = (float(record.step), record.score)
    present = [each for each in found if not each.is_left]
    curve = curve_of([each.step for each in present], [each.score for each in present])
    dots = [(float(step), score) for step, score in curve.points]
    left = [(float(each.step), each.score) for each in found if each.is_left and math.isfinite(each.score)]
    drawn = []
    if dots or left or best:
        chart = curve_chart(f"Evaluation: {metric}", curve, dots=dots, best=best, name=metric, left=left)
        drawn.append(chart_html(chart, f"evaluation-{number}"))
    drawn += about_curve(curve)
    columns = ["step", "score", "recorded (UTC)", *(["timeline"] if len(present) < len(found) else [])]
    rows = [
        (
            number_text(each.step),
            number_text(each.score),
            "" if each.at is None else moment_text(each.at, with_secs=True),
            "left behind by a resume" if each.is_left else "",
        )[: len(columns)]
        for each in reversed(found)
    ]
    return [
        *drawn,
        long_table(f"Evaluations, the newest first: {metric}", columns, rows, numbers=("step", "score"), shown=_ROWS),
    ]


def about_curve(curve: Curve) -> list[str]:
    """What a curve does not show, in words: values that share a point, and values that are not finite."""
    found = []
    if curve.per_bucket > 1:
        found.append(note(f"{curve.count:,} values, drawn as the least and the largest of each {curve.per_bucket:,}."))
    if curve.not_finite_count:
        steps = ", ".join(f"{step:,}" for step in curve.not_finite[:8])
        more = " and more" if curve.not_finite_count > 8 else ""
        since = "" if curve.not_finite_since is None or curve.last is None else f" None is finite since step {curve.not_finite_since:,}; the last one is {number_text(curve.last[1])}, at step {curve.last[0]:,}."  # fmt: skip
        found.append(note(f"{count_text(curve.not_finite_count, 'value')} not finite: step {steps}{more}.{since}"))
    return found
