"""`merged_journals`: the lines of two copies of a journal that parted."""

from trainfold.core.flight.journal_line import decode_journal_line


def merged_journals(one: bytes, other: bytes) -> bytes:
    r"""A journal with each line of both: those that both begin with, and then what each has more, the older first.

    Law: what was merged before is not added again.

    Args:
        one: a journal.
        other: another copy, of the same run.

    Examples:
        >>> merged_journals(b"a\nb\nc\n", b"a\nd\n"), merged_journals(b"a\n", b"a\nd\n"), merged_journals(b"a\nd\n", b"a\n")
        (b'a\nb\nc\nd\n', b'a\nd\n', b'a\nd\n')
    """
    if one.startswith(other):
        return one
    if other.startswith(one):
        return other
    first, second = _lines(one), _lines(other)
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    common, known = first[:same], set(first)
    mine, others = first[same:], [line for line in second[same:] if line not in known]
    blocks = sorted([mine, others], key=_began) if others else [mine]
    return b"".join([*common, *(line for block in blocks for line in block)])


def has_lines(one: bytes, other: bytes) -> bool:
    r"""Whether a journal has each line of another copy.

    Examples:
        >>> has_lines(b"a\nb\nc\n", b"b\n"), has_lines(b"a\n", b"a\nd\n")
        (True, False)
    """
    return one.startswith(other) or set(_lines(one)).issuperset(_lines(other))


def _lines(journal: bytes) -> list[bytes]:
    """Its lines, each with its end: a kill may have torn the last one."""
    return [line + b"\n" for line in journal.split(b"\n") if line]


def _began(lines: list[bytes]) -> float:
    return next((found.at for line in lines if (found := decode_journal_line(line)) is not None), 0.0)
