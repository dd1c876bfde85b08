"""Text from files, made safe for a terminal: characters that move the cursor, hide or reverse a line are escaped."""


def printable(text: str, *, keep: str = "") -> str:
    r"""Text in which every character that a terminal would act on, or not show, is replaced by its escape.

    Control characters, terminal sequences, line breaks, marks that reverse the reading direction, and halves of
    surrogate pairs, which no encoding can write, are escaped. Printable characters of any script stay.

    Args:
        text: any text, such as a name or a version from a file.
        keep: characters to leave alone, such as the line breaks of a message that is a list.

    Examples:
        >>> printable("2.9\x1b[2J\nverified"), printable("größe")
        ('2.9\\x1b[2J\\nverified', 'größe')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def quoted(text: str) -> str:
    r"""The lines of a text from elsewhere, such as a program's output, each indented, so that none of them reads as a line of the message.

    Examples:
        >>> quoted("step 9\r\n\tdone\x1b[2J").split("\n")
        ['    step 9', '            done\\x1b[2J']
    """
    return "\n".join(f"    {printable(line.rstrip().expandtabs())}" for line in text.split("\n"))
