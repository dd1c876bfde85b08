"""Lines of a journal: what was written is read, torn and foreign lines are left out, and nothing is ever raised."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.flight.journal_line import (
    LONGEST_LINE,
    JournalLine,
    JournalLines,
    decode_journal,
    decode_journal_line,
    drift_data,
    drifts_of,
    encode_journal_line,
)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**60), 2**60)
LINES = st.builds(
    JournalLine,
    at=st.floats(0, 1e10),
    kind=TEXTS,
    step=st.none() | st.integers(0, 2**62),
    checkpoint=st.none() | TEXTS,
    detail=TEXTS,
    data=st.dictionaries(TEXTS, NUMBERS | TEXTS | st.lists(NUMBERS, max_size=3), max_size=3),
)


@given(lines=st.lists(LINES, max_size=4), cut=st.integers(0, 2000))
def test_a_journal_that_is_cut_anywhere_has_its_whole_lines(lines, cut):
    """A kill, or a full disk, may leave half a line; the next process begins a line of its own."""
    data = [encode_journal_line(line) for line in lines]
    assert decode_journal(data) == JournalLines(tuple(lines))
    kept = b"".join(data)[:cut]
    whole = kept.count(b"\n")
    found = decode_journal([kept, b"\n" + encode_journal_line(JournalLine(7.0, "closed"))]).lines
    assert found[:whole] == tuple(lines[:whole])
    assert found[-1] == JournalLine(7.0, "closed")


@given(st.binary(max_size=60) | st.sampled_from([b"[1]", b"{}", b'{"at":NaN,"kind":""}', b'{"at":1e99,"kind":"a"}', b"[" * 5000,
                                                  b'{"at":1,"kind":"a","step":true}', b'{"at":1,"kind":"a","step":-1}', b'{"at":1,"kind":2}']))  # fmt: skip
def test_other_bytes_are_no_line(data):
    found = decode_journal_line(data)
    assert found is None or encode_journal_line(found)


KINDS = st.lists(st.sampled_from(["started", "called", "evaluated", "closed"]), max_size=12)


@given(kinds=KINDS, most=st.integers(1, 5), size=st.integers(1, 200))
def test_of_a_long_journal_the_newest_lines_and_all_starts_and_ends_are_there(kinds, most, size):
    """W22: a process does not vanish from its page because much was recorded after its start; what is left out is counted."""
    lines = [JournalLine(float(at), kind, detail='"kind":"started"') for at, kind in enumerate(kinds)]
    data = b"".join(map(encode_journal_line, lines))
    found = decode_journal([data[at : at + size] for at in range(0, len(data), size)], most=most)
    old, new = lines[:-most], lines[-most:]
    last_before = [one for one, other in itertools.pairwise(old) if other.kind == "started"]
    expected = [line for line in old if line.kind in ("started", "closed") or line in last_before]
    assert found == JournalLines((*expected, *new), len(lines) - len(expected) - len(new))


@given(st.lists(st.tuples(*[st.text()] * 5), max_size=60))
def test_what_a_resume_has_met_fits_a_line_whatever_it_is(drifts):
    """A line that is too long would be dropped by the reader."""
    written = encode_journal_line(JournalLine(1.0, "met", data=drift_data(drifts)))
    assert len(written) <= LONGEST_LINE
    found = drifts_of(decode_journal_line(written))
    assert len(found) == min(40, len(drifts))
    assert drifts_of(JournalLine(1.0, "met", data={"drifts": [["a"], 3, ["b"] * 5]})) == (("b",) * 5,)


class Piece(bytes):
    """Bytes that count how many they are joined with."""

    joined = 0

    def __radd__(self, other):
        Piece.joined += len(other)
        return bytes(other) + bytes(self)


def test_a_journal_without_ends_of_lines_is_read_once():
    """64 MiB of anything but lines took 22 s: each piece was joined with all before it. What is longer than a line costs itself alone."""
    Piece.joined = 0
    end = encode_journal_line(JournalLine(7.0, "closed"))
    found = decode_journal([*[Piece(b"a" * LONGEST_LINE)] * 20, b"\n" + end])
    assert found == JournalLines((JournalLine(7.0, "closed"),), unreadable=1)
    assert Piece.joined < 22 * LONGEST_LINE
