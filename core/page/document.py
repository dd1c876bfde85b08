"""`page_html`: the page of a run as one file of HTML, which opens offline and loads nothing; `sections_html`: its parts by their ids, for a live page."""

import statistics
from typing import Final

from trainfold.core.history.inventory import lineage
from trainfold.core.markup.html_table import safe
from trainfold.core.markup.style import CLASS, page_style
from trainfold.core.markup.texts import count_text, moment_text, number_text, secs_text
from trainfold.core.page.charts import lineage_name
from trainfold.core.page.run_page import RunPage
from trainfold.core.page.save_times import saves_of
from trainfold.core.page.sections import SECTIONS
from trainfold.core.page.sessions import IN_WORDS, Session, again_text, sessions_of
from trainfold.core.printable import bytes_text

OFFLINE: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
BEGIN: Final = '<!doctype html>\n<html lang="en"><!-- a page of trainfold -->'
"""How each page begins, by which a later one knows that it may be replaced."""


def page_html(page: RunPage, *, policy: str = OFFLINE, script: str | None = None) -> str:
    """The whole page.

    Law: whatever texts the facts have, the tags and attributes of the page are those of a page with harmless texts.

    Args:
        page: the facts.
        policy: what the page may load.
        script: the address of a script that follows the run; None for a page that does nothing.
    """
    name = safe(lineage_name(page.inventory))
    contents = "".join(f'<li><a href="#{key}">{title}</a></li>' for key, (_, title, _) in SECTIONS.items())
    body = "".join(sections_html(page).values())
    live = "" if script is None else f'<p id="now" role="status">Following the run.</p><script src="{safe(script)}"></script>'  # fmt: skip
    return (
        f'{BEGIN}<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><meta name="referrer" content="no-referrer">'
        f'<meta name="color-scheme" content="light dark"><title>{name} · trainfold</title><style>{page_style()}</style></head>'
        f'<body class="{CLASS}"><header><a class="skip" href="#overview">To the contents</a><h1>{name}</h1>'
        f'<p class="quiet">A run of trainfold at <code>{safe(page.inventory.run)}</code></p>{live}'
        f'<nav aria-label="Sections"><ul>{contents}</ul></nav></header><main>{body}</main>'
        f"<footer>Run {safe(page.inventory.run_id or 'without an id')}. Times are in UTC.</footer></body></html>\n"
    )


def sections_html(page: RunPage) -> dict[str, str]:
    """Id -> the section, with its heading."""
    found = {"overview": f'<section id="overview" aria-label="Overview">{_overview(page)}</section>'}
    for key, (heading, _, draw) in SECTIONS.items():
        found[key] = f'<section id="{key}" aria-labelledby="{key}-h"><h2 id="{key}-h">{heading}</h2>{draw(page)}</section>'  # fmt: skip
    return found


def _overview(page: RunPage) -> str:
    inventory, flight, best = page.inventory, page.flight, page.best
    sessions, saves = sessions_of(page.journal, flight, runs=page.runs), saves_of(page.journal)
    present = lineage(inventory)
    newest = present[0] if present else None
    figures: list[tuple[str, str, str]] = []
    reached = max([session.last for session in sessions[-1:]] + [flight.last or 0 if flight is not None else 0])
    has_gone_back = bool(sessions) and sessions[-1].at_end < sessions[-1].last
    saved = newest.head.step if newest is not None and newest.head is not None else None
    if reached or saved is not None:
        step = sessions[-1].at_end if has_gone_back else max(reached, saved or 0)
        figures.append(("Step", number_text(step), "" if saved is None else f"saved: {saved:,}"))
    if sessions:
        kills = sum(session.ending == "killed" for session in sessions)
        figures.append(("Processes", str(len(sessions)), f"{count_text(kills, 'kill')}, {again_text(sessions)} again"))
        figures.append(
            (
                f"Last process{', rank 0' * page.has_several_ranks}",
                _ending(sessions[-1]),
                secs_text(sessions[-1].ended_at - sessions[-1].began_at),
            )
        )
    if flight is not None and flight.loss.last is not None:
        step, value = flight.loss.last
        since = flight.loss.not_finite_since
        figures.append(("Loss", number_text(value), f"step {step:,}" if since is None else f"not finite since step {since:,}"))  # fmt: skip
    if best is not None and best.record.score is not None:
        entry, _ = best.best
        lost = page.lost_bests.get(entry.step, "")
        figures.append((f"Best {best.record.metric}", number_text(best.record.score), f"step {entry.step:,}{lost and f', {lost}'}"))  # fmt: skip
    usable = sum(entry.is_candidate for entry in inventory.entries)
    figures.append(("Checkpoints", number_text(usable), bytes_text(sum(page.sizes.values()))))
    stalls = [save.stall_secs for save in saves if save.durable is not None]
    if stalls:
        figures.append(("A save stalls", secs_text(statistics.median(stalls)), f"median of {len(stalls):,}"))
    items = "".join(
        f"<div><dt>{safe(name)}</dt><dd>{safe(value)}{f'<small>{safe(more)}</small>' if more else ''}</dd></div>"
        for name, value, more in figures
    )
    nothing = "A resume is refused now: see below." if page.resume.problems and present else "A resume finds nothing that it can continue from."  # fmt: skip
    checkpoint = page.resume.checkpoint
    resume = f"A resume would continue from <code>{safe(checkpoint)}</code>." if checkpoint else nothing
    return f'<dl class="figures">{items}</dl><p class="note">{resume} Facts of {moment_text(page.made_at, with_secs=True)}.</p>'


def _ending(last: Session) -> str:
    return "no end recorded" if last.ending == "open" else IN_WORDS[last.ending].partition(",")[0]
