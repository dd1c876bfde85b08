"""The sections of a run's page: each a pure function from its facts to HTML, in which every text from a file is escaped."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from trainfold.core.flight.journal_line import JournalLine, drifts_of
from trainfold.core.format.file_names import step_of
from trainfold.core.format.manifest import Manifest
from trainfold.core.history.inventory import BEHIND, Entry, lineage
from trainfold.core.history.recognise import gone_checkpoint
from trainfold.core.markup.chart import chart_html
from trainfold.core.markup.html_table import safe
from trainfold.core.markup.texts import moment_text, number_text, secs_text
from trainfold.core.markup.timelines import lineage_chart
from trainfold.core.page.charts import save_chart, time_line
from trainfold.core.page.kept import changes_between, few_names, policy_of, why_kept
from trainfold.core.page.losses import loss_section
from trainfold.core.page.page_parts import RECORD, SHOWN, left_out_note, long_table, note
from trainfold.core.page.run_page import RunPage
from trainfold.core.page.save_times import SaveTimes, saves_of
from trainfold.core.page.sessions import IN_WORDS, sessions_of, steps_under_way
from trainfold.core.page.sizes import size_section
from trainfold.core.printable import bytes_text
from trainfold.core.problem import problem_of
from trainfold.core.state.audit import unsaved_of

_BREAK: Final = "\n"
# characters of a finding: all that a checkpoint in quarantine did not load for, and what to do
_MOST_TEXT: Final = 8000
_PROBLEMS: Final = {
    "warned": "Warning",
    "failed": "A save failed",
    "refused": "A resume was refused",
    "not_pruned": "Old checkpoints were not deleted",
    "not_uploaded": "A checkpoint was not sent to the far tier",
    "not_fetched": "A checkpoint was not fetched from the far tier",
}
_BEING_WRITTEN: Final = "being written, if the process runs"


def start_section(page: RunPage) -> str:
    """Processes over time, and what each had to compute again."""
    sessions = sessions_of(page.journal, page.flight, runs=page.runs)
    if not sessions:
        return note(f"Starts, kills and resumes of this run are not recorded. {RECORD} records them.")
    chart = chart_html(time_line(sessions, saves_of(page.journal)), "time")
    rows = [
        (
            str(number),
            moment_text(each.began_at, with_secs=True),
            number_text(each.first),
            number_text(each.at_end) + (f" (reached {number_text(each.last)})" if each.last != each.at_end else ""),
            f"{'rank 0: ' * page.has_several_ranks}{IN_WORDS[each.ending]}{f': {each.error}' if each.error else ''}",
            each.recomputed_text,
        )
        for number, each in enumerate(sessions, 1)
    ]
    columns = ("process", "began (UTC)", "from step", "to step", "end", "steps computed again")
    table = long_table("Processes", columns, rows, numbers=("from step", "to step", "steps computed again"))
    if page.has_several_ranks:
        table += note("Starts and ends are those of rank 0. How the other ranks ended is not recorded: where one of them fails, its launcher ends rank 0, too, which then leaves no end.")  # fmt: skip
    if page.is_copied and sessions[-1].ending == "open":
        table += note("The logs were copied after the run: the last process is known up to the last line of the journal, and may have gone on for longer.")  # fmt: skip
    return chart + table + left_out_note(page, "saves and evaluations")


def save_section(page: RunPage) -> str:
    """Each save: when it was called, how long the loop stood still, how long it was written, and when it was durable."""
    saves = saves_of(page.journal)
    if not saves:
        return note(f"The moments of saves are not recorded. {RECORD} records them; when each checkpoint was committed is below.")  # fmt: skip
    chart = chart_html(save_chart(saves), "saves") if any(save.durable is not None for save in saves) else ""
    columns = ("step", "called (UTC)", "loop stood still", "writing", "call to durable", "durable (UTC)", "end")
    open_steps = steps_under_way(page.journal, page.flight, runs=page.runs)
    rows = [_save_row(save, is_newest and save.step in open_steps) for save, is_newest in _newest_first(saves)]
    table = long_table("Saves, the newest first", columns, rows, numbers=columns[:1] + columns[2:5])
    stood = note("The loop stands still in the call of a save, and in updates that copy, or wait for, what the save has not read yet; of a save without a recorded end, the call alone is known.")  # fmt: skip
    return chart + table + stood + left_out_note(page, "saves")


def _newest_first(saves: Sequence[SaveTimes]) -> list[tuple[SaveTimes, bool]]:
    """Each save, the newest first, and whether it is the newest one of its step."""
    newest = {save.step: at for at, save in enumerate(saves)}
    return [(save, newest[save.step] == at) for at, save in reversed(list(enumerate(saves)))]


def _save_row(save: SaveTimes, is_under_way: bool) -> tuple[str, ...]:  # noqa: FBT001
    words = {"written": "durable", "lost": _BEING_WRITTEN if is_under_way else "no end is recorded", "skipped": "skipped: another save was under way", "failed": f"failed: {save.detail}"}  # fmt: skip
    return (
        number_text(save.step),
        moment_text(save.called, with_secs=True),
        secs_text(save.stall_secs),
        "" if save.writing_secs is None else secs_text(save.writing_secs),
        "" if save.durable_secs is None else secs_text(save.durable_secs),
        "" if save.durable is None else moment_text(save.durable, with_secs=True),
        words[save.outcome],
    )


def lineage_section(page: RunPage) -> str:
    """Timelines and their checkpoints; what is kept, what refers to what, and why."""
    entries = page.inventory.entries
    if not entries:
        return note("The run holds no checkpoint.")
    present = {entry.name for entry in lineage(page.inventory)}
    heads = [(entry, entry.head) for entry in entries if entry.head is not None]
    chart = ""
    if heads:
        marks = [(head.step, head.timeline, entry.name in present) for entry, head in heads]
        chart = chart_html(lineage_chart(marks, {head.timeline: head.forks for _, head in heads}), "lineage")
    kept, sizes, under_way, policy = why_kept(page), page.sizes, _under_way(page), policy_of(page.journal, page.place)
    is_known = policy is not None and policy.rules is not None and not policy.own
    without_reason = "no rule keeps it: the next save may delete it" if is_known else "no reason is known"
    rows = [
        (
            entry.name,
            "" if entry.head is None else str(entry.head.timeline),
            "" if entry.name not in page.committed_at else moment_text(page.committed_at[entry.name]),
            "" if entry.name not in sizes else bytes_text(sizes[entry.name]),
            under_way.get(entry.name) or _status(entry, present),
            "; ".join(kept.get(entry.name, ())) or ("" if entry.problem is not None else without_reason),
            few_names(entry.refers),
        )
        for entry in sorted(entries, key=_age, reverse=True)
    ]
    columns = ("checkpoint", "timeline", "committed (UTC)", "size", "status", "why it is kept", "refers to")
    if not any(row[-1] for row in rows):
        rows, columns = [row[:-1] for row in rows], columns[:-1]  # type: ignore[misc,assignment]
    about = note(f"Rules of the last process: {safe(str(policy))}.") if policy is not None else note("The rules of the run's retention are not recorded; what names or refers to a checkpoint is.")  # fmt: skip
    return chart + long_table("Checkpoints, the newest first", columns, rows, numbers=("timeline", "size")) + about


def _under_way(page: RunPage) -> dict[str, str]:
    """The checkpoints that have no manifest because they are being written, as the lock of the run says, or else the journal; with that in words."""
    steps = steps_under_way(page.journal, page.flight, runs=page.runs)
    begun = page.inventory.unfinished
    found = {name: _BEING_WRITTEN for name in begun if step_of(name) in steps}
    return found | {
        name: f"being written by {page.inventory.writers[name]}" for name in begun if name in page.inventory.writers
    }


def _age(entry: Entry) -> tuple[int, int, str]:
    return (-1, -1, entry.name) if entry.head is None else (entry.head.timeline, entry.head.step, entry.name)


def _status(entry: Entry, present: set[str]) -> str:
    if entry.problem is not None:
        return f"{entry.problem.error}: {entry.problem.found}"
    proved = "complete" if entry.manifest is not None else "committed"
    return proved if entry.name in present else f"{proved}, {BEHIND}"


def finding_section(page: RunPage) -> str:
    """What to look at: problems, drifts, state that is not saved, warnings."""
    found: list[tuple[str, str, str]] = []  # colour, heading, text
    if page.inventory.problem is not None:
        found.append(("warm", "The run", str(page.inventory.problem)))
    under_way = _under_way(page)
    found += [("warm", entry.name, str(entry.problem)) for entry in page.inventory.entries if entry.problem is not None and entry.name not in under_way][-SHOWN:]  # fmt: skip
    for name, by in page.pointers.items():
        if step_of(name) is not None and page.inventory.entry(name) is None:
            found.append(("warm", name, str(problem_of(gone_checkpoint(page.inventory.run, name, by[0])))))
    found += [("warm", "Not read", text) for text in page.unread]
    known = {text for _, _, text in found} | {str(entry.problem) for entry in page.inventory.entries if entry.name in under_way}  # fmt: skip
    found += [("warm", "A resume now", text) for text in page.resume.problems if text not in known]
    newest = next((entry.manifest for entry in lineage(page.inventory) if entry.manifest is not None), None)
    unsaved = {} if newest is None else unsaved_of(newest.contract)
    found += [("warm", "Not saved, and changed with training", f"{path}: {what}") for path, what in unsaved.items()]
    events = _events(page)
    found += events[:SHOWN]
    drawn = [f'<ul class="findings">{"".join(_finding(*each) for each in found)}</ul>' if found else note(_nothing(page, newest))]  # fmt: skip
    if len(events) > SHOWN:
        drawn.append(note(f"{len(events) - SHOWN:,} earlier warnings are in the journal of the run."))
    drawn.append(left_out_note(page, "warnings and drifts"))
    if page.resume.drifts:
        drawn.append(long_table("What a resume on this machine would meet", ("verdict", "kind", "where", "saved", "here"), page.resume.drifts))  # fmt: skip
    drawn += _met(page)
    ordered = [each for each in reversed(lineage(page.inventory)) if each.manifest is not None]
    changes = changes_between(ordered)
    if changes:
        rows = [(each.after, each.kind, each.where, each.was, each.now) for each in reversed(changes)]
        drawn.append(long_table("What changed between checkpoints", ("checkpoint", "kind", "where", "before", "from there on"), rows))  # fmt: skip
    elif len(ordered) > 1:
        drawn.append(note(f"No setting, version or environment changed between the {len(ordered)} newest checkpoints."))
    return "".join(drawn)


def _events(page: RunPage) -> list[tuple[str, str, str]]:
    """What the journal has of problems, the newest first. What came again, as at each save, is there once."""
    again: dict[tuple[str, str], list[JournalLine]] = {}
    for line in reversed(page.journal):
        if line.kind in _PROBLEMS:
            again.setdefault((line.kind, line.detail), []).append(line)
    return [
        (
            "warm",
            f"{_PROBLEMS[kind]}{'' if lines[0].step is None else f', step {lines[0].step:,}'}, {moment_text(lines[0].at, with_secs=True)}"
            + (f", {len(lines):,} times since {moment_text(lines[-1].at, with_secs=True)}" if len(lines) > 1 else ""),
            detail,
        )
        for (kind, detail), lines in again.items()
    ]


def _met(page: RunPage) -> list[str]:
    """What resumes of the past have met, and what was done about it."""
    lines = [line for line in reversed(page.journal) if line.kind == "met"]
    rows = [
        (moment_text(line.at, with_secs=True), "" if line.step is None else number_text(line.step), *each)
        for line in lines
        for each in drifts_of(line)
    ]
    left = sum(max(0, int(line.moment("count") or 0) - len(drifts_of(line))) for line in lines)
    columns = ("resumed (UTC)", "step", "verdict", "kind", "where", "saved", "then")
    found = [long_table("What past resumes have met", columns, rows, numbers=("step",))] if rows else []
    return [*found, note(f"{left:,} more are not in the journal.")] if left else found


def _nothing(page: RunPage, newest: Manifest | None) -> str:
    audit = "" if newest is None else " The audit found no state that changes with training and is not saved."
    recorded = "" if page.journal else f" Warnings of this run are not recorded; {RECORD} records them."
    return f"No problem of a checkpoint is known.{audit}{recorded}"


def _finding(colour: str, heading: str, text: str) -> str:
    return f'<li class="{colour}"><span class="when">{safe(heading)}</span><div class="message">{safe(text, most=_MOST_TEXT, keep=_BREAK)}</div></li>'


SECTIONS: Final[Mapping[str, tuple[str, str, Callable[[RunPage], str]]]] = {
    "starts": ("Starts, kills and resumes", "Starts", start_section),
    "losses": ("Losses and evaluations", "Losses", loss_section),
    "saves": ("Saves", "Saves", save_section),
    "checkpoints": ("Checkpoints, and why each is kept", "Checkpoints", lineage_section),
    "findings": ("What to know", "What to know", finding_section),
    "sizes": ("Bytes on disk", "Bytes", size_section),
}
"""Id of a section -> its heading, its name in the table of contents, and what draws it."""
