"""`html_table`: rows as a small table of HTML, for the notebooks in which plans, refusals, runs and evaluations are shown."""

from collections.abc import Iterable, Sequence
from html import escape

from trainfold.core.json_values import shown
from trainfold.core.printable import printable

MOST_ROWS = 100
MOST_CHARACTERS = 480  # of a cell: a whole fix, and no dump of a tensor


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A heading and a table; every text in it is escaped, long ones are cut, and so is a long table.

    Args:
        title: the heading.
        columns: the names of the columns; all empty for none.
        rows: the cells.

    Examples:
        >>> html_table("runs/a", ["step"], [["<b>"]])
        '<p><b>runs/a</b></p><table><tr><th>step</th></tr><tr><td>&lt;b&gt;</td></tr></table>'
    """
    given = list(rows)
    head = "".join(f"<th>{_safe(name)}</th>" for name in columns) if any(columns) else ""
    body = [f"<tr>{''.join(f'<td>{_safe(cell)}</td>' for cell in row)}</tr>" for row in given[:MOST_ROWS]]
    if len(given) > MOST_ROWS:
        body.append(f'<tr><td colspan="{len(columns)}">and {len(given) - MOST_ROWS} more</td></tr>')
    lines = "".join([f"<tr>{head}</tr>" if head else "", *body])
    return f"<p><b>{_safe(title)}</b></p>" + (f"<table>{lines}</table>" if lines else "")


def _safe(value: object) -> str:
    """A text escaped so that a page shows it and does not act on it, whatever a file or a user's object contains."""
    text = printable(value if isinstance(value, str) else shown(value))
    return escape(text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…")
