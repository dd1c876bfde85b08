"""`html_table`: rows as a table of HTML, in notebooks and on the page of a run; `safe`: any value as text that a page shows and does not act on."""

from collections.abc import Collection, Iterable, Sequence
from html import escape
from typing import Final

from trainfold.core.json_values import shown
from trainfold.core.printable import printable

MOST_ROWS: Final = 100
MOST_CHARACTERS: Final = 480  # of a cell: a whole fix, and no dump of a tensor


def html_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    most_rows: int = MOST_ROWS,
    numbers: Collection[str] = (),
) -> str:
    """A table with its title as the caption; every text in it is escaped, long ones are cut, and so is a long table.

    The first cell of each row is its heading, for readers that hear a table.

    Args:
        title: the caption; empty for none.
        columns: the names of the columns; all empty for none.
        rows: the cells.
        most_rows: the rest is a count.
        numbers: the columns that are aligned to the right.

    Examples:
        >>> html_table("runs/a", ["step"], [["<b>"]])
        '<table><caption>runs/a</caption><thead><tr><th scope="col">step</th></tr></thead><tbody><tr><th scope="row">&lt;b&gt;</th></tr></tbody></table>'
    """
    given = list(rows)
    kinds = ["number" if name in numbers else "moment" if name.endswith("(UTC)") else "" for name in columns]
    marks = [f' class="{kind}"' if kind else "" for kind in kinds]
    names = "".join(
        f'<th scope="col"{mark}>{safe(name)}</th>' if name else "<td></td>"
        for name, mark in zip(columns, marks, strict=True)
    )
    head = f"<thead><tr>{names}</tr></thead>" if any(columns) else ""
    body = []
    for first, *others in given[:most_rows]:
        cells = (f"<td{mark}>{safe(cell)}</td>" for cell, mark in zip(others, marks[1:], strict=True))
        body.append(f'<tr><th scope="row"{marks[0]}>{safe(first)}</th>{"".join(cells)}</tr>')
    if len(given) > most_rows:
        body.append(f'<tr><td colspan="{len(columns)}">and {len(given) - most_rows:,} more</td></tr>')
    caption = f"<caption>{safe(title)}</caption>" if title else ""
    return f"<table>{caption}{head}<tbody>{''.join(body)}</tbody></table>"


def safe(value: object, *, most: int = MOST_CHARACTERS, keep: str = "") -> str:
    r"""A text escaped so that a page shows it and does not act on it, whatever a file or a user's object contains.

    Args:
        value: a text, or any other value, of which its short form is shown.
        most: characters; the rest is cut.
        keep: characters that are left alone, such as the line breaks of a message.

    Examples:
        >>> safe("<b>\x1b"), safe("x" * 9, most=3)
        ('&lt;b&gt;\\x1b', 'xxx…')
    """
    text = value if isinstance(value, str) else shown(value)
    text = printable(text if len(text) <= most else f"{text[:most]}…", keep=keep)
    return escape(text if len(text) <= most + 1 else f"{text[:most]}…")


def notebook(html: str) -> str:
    """Parts as a notebook shows them, with their style and a ground of their own: the system may be dark where the notebook is light.

    Examples:
        >>> notebook("<p>a</p>").endswith("</style><p>a</p></div>")
        True
    """
    from trainfold.core.markup.style import CLASS, parts_style  # late: commands import this module, and show no HTML

    return f'<div class="{CLASS}" style="background:var(--ground);padding:.8em 1em"><style>{parts_style()}</style>{html}</div>'
