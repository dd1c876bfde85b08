"""Parts of sections: tables that scroll where they are too wide, and hide their later rows; notes."""

from collections.abc import Sequence
from typing import Final

from trainfold.core.flight.journal_line import ALWAYS_KEPT
from trainfold.core.markup.html_table import html_table, safe
from trainfold.core.markup.texts import count_text, moment_text
from trainfold.core.page.run_page import RunPage

SHOWN: Final = 30  # rows of a table before the reader asks for more
MOST: Final = 1000  # rows in all
RECORD: Final = "<code>CheckpointManager(..., record=0)</code>"


def long_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[str] = (),
    shown: int = SHOWN,
) -> str:
    """A table that scrolls where it is too wide; rows beyond the first ones are behind a button."""
    first = scrolling(title, html_table(title, columns, rows[:shown], numbers=numbers))
    more = rows[shown:MOST]
    if not more:
        return first
    left = note(f"{len(rows) - MOST:,} more are not shown.") if len(rows) > MOST else ""
    rest = scrolling(f"{title}, the rest", html_table(f"{title}, the rest", columns, more, most_rows=MOST, numbers=numbers))  # fmt: skip
    return f"{first}<details><summary>{count_text(len(more), 'more row')}</summary>{rest}{left}</details>"


def scrolling(title: str, table: str) -> str:
    """A table in a frame that scrolls sideways, which a keyboard reaches."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{safe(title)}">{table}</div>'


def note(text: str) -> str:
    """A paragraph; ``text`` is HTML: its caller has escaped what comes from files."""
    return f'<p class="note">{text}</p>'


def left_out_note(page: RunPage, what: str) -> str:
    """That a section has no lines of a long journal before its newest ones; empty for a journal that is whole here.

    Args:
        page: the facts.
        what: the section lacks of that time.
    """
    if not page.left_out:
        return ""
    first = next((line for line in page.journal if line.kind not in ALWAYS_KEPT), None)
    since = "" if first is None else f" before {moment_text(first.at, with_secs=True)}"
    return note(f"The journal has {page.left_out:,} more lines than are read here: {what}{since} are not shown.")
