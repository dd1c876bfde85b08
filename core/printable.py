"""Text from files as a terminal may have it: what would move the cursor, hide a line or reverse one is written out."""


def printable(text: str, *, keep: str = "") -> str:
    r"""Text in which every character that a terminal would act on, or not show, stands as its escape.

    Control characters, terminal sequences, line breaks, marks that reverse the reading direction, and halves of
    surrogate pairs, which no encoding can write. What can be shown stays as it is, in any script (W23).

    Args:
        text: anything; a name or a version out of a file, for one.
        keep: characters to leave alone, such as the line breaks of a message that has lines of its own.

    Examples:
        >>> printable("2.9\x1b[2J\nverified"), printable("größe")
        ('2.9\\x1b[2J\\nverified', 'größe')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
