"""Text for people: what comes from files is made safe for a terminal, a name gets its article, and a size its unit."""

_SPELLED = frozenset("AEFHILMNORSX")  # capitals whose names start with a vowel: "an SGD"


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


def with_article(name: str) -> str:
    """A name with "a" or "an" before it.

    Args:
        name: such as the name of a class; one that starts with two capitals is read letter by letter.

    Examples:
        >>> [with_article(name) for name in ("Adam", "SGD", "GRU", "UserDict", "_Other", "int", "MT19937")]
        ['an Adam', 'an SGD', 'a GRU', 'a UserDict', 'an _Other', 'an int', 'an MT19937']
    """
    read = name.lstrip("_")
    is_spelled = read[:2].isupper()
    starts = read[:1] in _SPELLED if is_spelled else read[:1].lower() in tuple("aeiou")
    return f"an {name}" if starts and not read.lower().startswith(("uni", "use", "uti")) else f"a {name}"


def bytes_text(size_bytes: float) -> str:
    """A size.

    Examples:
        >>> bytes_text(999), bytes_text(61_234_567)
        ('999 B', '61.2 MB')
    """
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
