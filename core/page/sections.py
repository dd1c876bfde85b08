"""The sections of a run's page: each a pure function from its facts to HTML, in which every text from a file is escaped."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from trainfold.core.format.manifest import Manifest
from trainfold.core.history.inventory import Entry, lineage
from trainfold.core.markup.chart import bars_html, chart_html
from trainfold.core.markup.curve import Curve, curve_of
from trainfold.core.markup.html_table import html_table, safe
from trainfold.core.markup.texts import bytes_text, count_text, moment_text, number_text, secs_text
from trainfold.core.markup.timelines import lineage_chart
from trainfold.core.page.charts import curve_chart, save_chart, time_line
from trainfold.core.page.kept import changes_between, policy_of, why_kept
from trainfold.core.page.run_page import RunPage
from trainfold.core.page.sessions import IN_WORDS, SaveTimes, saves_of, sessions_of
from trainfold.core.state.audit import unsaved_of

SHOWN: Final = 30  # rows of a table before the reader asks for more
MOST: Final = 1000  # rows in all
_RECORD: Final = "<code>CheckpointManager(..., record=0)</code>"


def start_section(page: RunPage) -> str:
    """Processes over time, and what each had to compute again."""
    sessions = sessions_of(page.journal, page.flight)
    if not sessions:
        return _note(f"Starts, kills and resumes of this run are not recorded. {_RECORD} records them.")
    chart = chart_html(time_line(sessions, saves_of(page.journal)), "time")
    rows = [
        (
            str(number),
            moment_text(each.began_at, with_secs=True),
            number_text(each.first),
            number_text(each.last),
            f"{IN_WORDS[each.ending]}{f': {each.error}' if each.error else ''}",
            "" if each.recomputed is None else number_text(each.recomputed),
        )
        for number, each in enumerate(sessions, 1)
    ]
    columns = ("process", "began (UTC)", "from step", "to step", "end", "steps computed again")
    return chart + _table("Processes", columns, rows, numbers=("from step", "to step", "steps computed again"))


def save_section(page: RunPage) -> str:
    """Each save: when it was called, how long the loop stood still, how long it was written, and when it was durable."""
    saves = saves_of(page.journal)
    if not saves:
        return _note(f"The moments of saves are not recorded. {_RECORD} records them; when each checkpoint was committed is below.")  # fmt: skip
    chart = chart_html(save_chart(saves), "saves") if any(save.durable is not None for save in saves) else ""
    columns = ("step", "called (UTC)", "loop stood still", "writing", "call to durable", "durable (UTC)", "end")
    rows = [_save_row(save) for save in reversed(saves)]
    return chart + _table("Saves, the newest first", columns, rows, numbers=columns[:1] + columns[2:5])


def _save_row(save: SaveTimes) -> tuple[str, ...]:
    words = {"written": "durable", "lost": "no end is recorded", "skipped": "skipped: another save was under way", "failed": f"failed: {save.detail}"}  # fmt: skip
    return (
        number_text(save.step),
        moment_text(save.called, with_secs=True),
        secs_text(save.stall_secs),
        "" if save.writing_secs is None else secs_text(save.writing_secs),
        "" if save.durable_secs is None else secs_text(save.durable_secs),
        "" if save.durable is None else moment_text(save.durable, with_secs=True),
        words[save.outcome],
    )


def loss_section(page: RunPage) -> str:
    """Losses and evaluations over steps, with the best."""
    metrics = _evaluated(page)
    drawn = _recorded(page)
    drawn += [_evaluations(page, metric, points, number) for number, (metric, points) in enumerate(metrics.items())]
    if page.best is not None:
        record = page.best.record
        entries = [entry for entry, _ in page.best.entries if entry.score is not None]
        rows = [(str(place), number_text(entry.step), number_text(entry.score or 0.0)) for place, entry in enumerate(entries, 1)]  # fmt: skip
        goal = "less is better" if record.direction == "min" else "more is better"
        drawn.append(_table(f"The best by {record.metric}: {goal}", ("place", "step", record.metric), rows, numbers=("step", record.metric)))  # fmt: skip
    if not metrics:
        drawn.append(_note("No evaluation is recorded: <code>live.record(name=result)</code> and <code>save_best</code> record them."))  # fmt: skip
    return "".join(drawn)


def _recorded(page: RunPage) -> list[str]:
    """The curves of the flight log."""
    if page.flight is None:
        return [_note(f"This run has no flight log, so its losses are not known. {_RECORD} and <code>live.record(loss=loss)</code> record them.")]  # fmt: skip
    drawn = []
    for title, name, curve in (("Loss", "loss", page.flight.loss), ("Norm of the gradient", "norm", page.flight.norm)):
        if curve.points:
            drawn.append(chart_html(curve_chart(title, curve, name=name), f"{name}-curve"))
        drawn += _about(curve)
    if not page.flight.loss.count:
        drawn.append(_note("The flight log has no losses: <code>live.record(loss=loss)</code> before <code>live.advance</code> records them."))  # fmt: skip
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
        found.append(_note(f"{curve.count:,} values, drawn as the least and the largest of each {curve.per_bucket:,}."))
    if curve.not_finite_count:
        steps = ", ".join(f"{step:,}" for step in curve.not_finite[:8])
        more = ", …" if curve.not_finite_count > 8 else ""
        found.append(_note(f"{count_text(curve.not_finite_count, 'value')} not finite: step {steps}{more}."))
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


def lineage_section(page: RunPage) -> str:
    """Timelines and their checkpoints; what is kept, what refers to what, and why."""
    entries = page.inventory.entries
    if not entries:
        return _note("The run holds no checkpoint.")
    present = {entry.name for entry in lineage(page.inventory)}
    heads = [(entry, entry.head) for entry in entries if entry.head is not None]
    chart = ""
    if heads:
        marks = [(head.step, head.timeline, entry.name in present) for entry, head in heads]
        chart = chart_html(lineage_chart(marks, {head.timeline: head.forks for _, head in heads}), "lineage")
    kept, sizes = why_kept(page), page.sizes
    rows = [
        (
            entry.name,
            "" if entry.head is None else str(entry.head.timeline),
            "" if entry.name not in page.committed_at else moment_text(page.committed_at[entry.name]),
            "" if entry.name not in sizes else bytes_text(sizes[entry.name]),
            _status(entry, present),
            "; ".join(kept.get(entry.name, ())) or ("" if entry.problem is not None else "no reason is known"),
            ", ".join(entry.refers),
        )
        for entry in sorted(entries, key=_age, reverse=True)
    ]
    columns = ("checkpoint", "timeline", "committed (UTC)", "size", "status", "why it is kept", "refers to")
    if not any(row[-1] for row in rows):
        rows, columns = [row[:-1] for row in rows], columns[:-1]  # type: ignore[misc,assignment]
    policy = policy_of(page.journal)
    about = _note(f"Rules of the last process: {safe(str(policy))}.") if policy is not None else _note("The rules of the run's retention are not recorded; what names or refers to a checkpoint is.")  # fmt: skip
    return chart + _table("Checkpoints, the newest first", columns, rows, numbers=("timeline", "size")) + about


def _age(entry: Entry) -> tuple[int, int, str]:
    return (-1, -1, entry.name) if entry.head is None else (entry.head.timeline, entry.head.step, entry.name)


def _status(entry: Entry, present: set[str]) -> str:
    if entry.problem is not None:
        return f"{entry.problem.error}: {entry.problem.found}"
    proved = "complete" if entry.manifest is not None else "committed"
    return proved if entry.name in present else f"{proved}, left behind by a rewind"


def finding_section(page: RunPage) -> str:
    """What to look at: problems, drifts, state that is not saved, warnings."""
    found: list[tuple[str, str, str]] = []  # colour, heading, text
    if page.inventory.problem is not None:
        found.append(("warm", "The run", str(page.inventory.problem)))
    found += [("warm", entry.name, str(entry.problem)) for entry in page.inventory.entries if entry.problem is not None][-SHOWN:]  # fmt: skip
    found += [("warm", "Not read", text) for text in page.unread]
    known = {text for _, _, text in found}
    found += [("warm", "A resume now", text) for text in page.resume.problems if text not in known]
    newest = next((entry.manifest for entry in lineage(page.inventory) if entry.manifest is not None), None)
    unsaved = {} if newest is None else unsaved_of(newest.contract)
    found += [("warm", "Not saved, and changed with training", f"{path}: {what}") for path, what in unsaved.items()]
    events = [line for line in page.journal if line.kind in ("warned", "failed", "refused")]
    for line in reversed(events[-SHOWN:]):
        what = {"warned": "Warning", "failed": "A save failed", "refused": "A resume was refused"}[line.kind]
        at = "" if line.step is None else f", step {line.step:,}"
        found.append(("warm", f"{what}{at}, {moment_text(line.at, with_secs=True)}", line.detail))
    drawn = [f'<ul class="findings">{"".join(_finding(*each) for each in found)}</ul>' if found else _note(_nothing(page, newest))]  # fmt: skip
    if len(events) > SHOWN:
        drawn.append(_note(f"{len(events) - SHOWN:,} earlier warnings are in the journal of the run."))
    if page.resume.drifts:
        drawn.append(_table("What a resume on this machine would meet", ("verdict", "kind", "where", "saved", "here"), page.resume.drifts))  # fmt: skip
    ordered = [each for each in reversed(lineage(page.inventory)) if each.manifest is not None]
    changes = changes_between(ordered)
    if changes:
        rows = [(each.after, each.kind, each.where, each.was, each.now) for each in reversed(changes)]
        drawn.append(_table("What changed between checkpoints", ("checkpoint", "kind", "where", "before", "from there on"), rows))  # fmt: skip
    elif len(ordered) > 1:
        drawn.append(
            _note(f"No setting, version or environment changed between the {len(ordered)} newest checkpoints.")
        )
    return "".join(drawn)


def _nothing(page: RunPage, newest: Manifest | None) -> str:
    audit = "" if newest is None else " The audit found no state that changes with training and is not saved."
    recorded = "" if page.journal else f" Warnings of this run are not recorded; {_RECORD} records them."
    return f"No problem of a checkpoint is known.{audit}{recorded}"


def _finding(colour: str, heading: str, text: str) -> str:
    return f'<li class="{colour}"><span class="when">{safe(heading)}</span>{safe(text, most=2000)}</li>'


def size_section(page: RunPage) -> str:
    """Bytes on disk by component."""
    known = [(entry.name, entry.manifest) for entry in page.inventory.entries if entry.manifest is not None]
    sizes = page.sizes
    if not known:
        return _note("No manifest could be read, so sizes are not known.")
    newest = next((entry for entry in lineage(page.inventory) if entry.manifest is not None), None)
    drawn = []
    if newest is not None and newest.manifest is not None:
        drawn.append(_bars(f"In the newest checkpoint, {newest.name}", bytes_by_component([newest.manifest], references=True)))  # fmt: skip
    if len(known) > 1:
        drawn.append(_bars(f"On disk, in the {len(known)} newest checkpoints", bytes_by_component([each for _, each in known])))  # fmt: skip
    total = f"{bytes_text(sum(sizes.values()))} in the data files of {count_text(len(sizes), 'checkpoint')}."
    return "".join(drawn) + _note(f"{total} Files that others refer to count once.")


def _bars(title: str, sizes: Mapping[str, int]) -> str:
    rows = [(name, float(size), bytes_text(size)) for name, size in sizes.items()]
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{safe(title)}">{bars_html(title, rows, ("component", "bytes"))}</div>'


def bytes_by_component(manifests: Sequence[Manifest], *, references: bool = False) -> dict[str, int]:
    """Bytes of the tensors of each component in the files of these checkpoints, and the rest of these files.

    Law: without references, the sum is that of the sizes of the files.

    Args:
        manifests: of checkpoints.
        references: whether bytes in files of other checkpoints count.
    """
    found: dict[str, int] = {}
    whole = 0
    for manifest in manifests:
        counts = [references or not file.checkpoint for file in manifest.files]
        whole += sum(file.size_bytes for file, is_counted in zip(manifest.files, counts, strict=True) if is_counted)
        for component, spans in _spans(manifest).items():
            size = sum(stop - start for file, start, stop in spans if counts[file])
            found[component] = found.get(component, 0) + size
    ordered = dict(sorted(((name, size) for name, size in found.items() if size), key=lambda each: -each[1]))
    rest = whole - sum(ordered.values())
    return {**ordered, **({"headers and the rest": rest} if rest > 0 else {})}


def _spans(manifest: Manifest) -> dict[str, set[tuple[int, int, int]]]:
    """Component -> (file, first byte, one past the last) of its tensors, those included that nothing but their place was read of."""
    found: dict[str, set[tuple[int, int, int]]] = {}
    for component in manifest.components:
        shards = (shard for table in component.tensors for record in table for shard in record.shards)
        found.setdefault(component.name, set()).update((each.file, each.start, each.stop) for each in shards)
    for other in manifest.others:
        places = zip(other.starts, other.stops, strict=True)
        found.setdefault(other.component, set()).update((other.file, start, stop) for start, stop in places)
    return found


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()) -> str:
    """A table that scrolls where it is too wide; rows beyond the first ones are behind a button."""
    first = _scrolling(title, html_table(title, columns, rows[:SHOWN], numbers=numbers))
    more = rows[SHOWN:MOST]
    if not more:
        return first
    note = _note(f"{len(rows) - MOST:,} more are not shown.") if len(rows) > MOST else ""
    rest = _scrolling(f"{title}, the rest", html_table(f"{title}, the rest", columns, more, most_rows=MOST, numbers=numbers))  # fmt: skip
    return f"{first}<details><summary>{count_text(len(more), 'more row')}</summary>{rest}{note}</details>"


def _scrolling(title: str, table: str) -> str:
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{safe(title)}">{table}</div>'


def _note(text: str) -> str:
    """A paragraph; ``text`` is HTML: its caller has escaped what comes from files."""
    return f'<p class="note">{text}</p>'


SECTIONS: Final[Mapping[str, tuple[str, str, Callable[[RunPage], str]]]] = {
    "starts": ("Starts, kills and resumes", "Starts", start_section),
    "losses": ("Losses and evaluations", "Losses", loss_section),
    "saves": ("Saves", "Saves", save_section),
    "checkpoints": ("Checkpoints, and why each is kept", "Checkpoints", lineage_section),
    "findings": ("What to know", "What to know", finding_section),
    "sizes": ("Bytes on disk", "Bytes", size_section),
}
"""Id of a section -> its heading, its name in the table of contents, and what draws it."""
