"""Lines of a journal: what was written is read, torn and foreign lines are left out, and nothing is ever raised."""

from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.flight.journal_line import JournalLine, decode_journal, decode_journal_line, encode_journal_line

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
    assert decode_journal(b"".join(data)) == tuple(lines)
    kept = b"".join(data)[:cut]
    whole = kept.count(b"\n")
    found = decode_journal(kept + b"\n" + encode_journal_line(JournalLine(7.0, "closed")))
    assert found[:whole] == tuple(lines[:whole])
    assert found[-1] == JournalLine(7.0, "closed")


@given(st.binary(max_size=60) | st.sampled_from([b"[1]", b"{}", b'{"at":NaN,"kind":""}', b'{"at":1e99,"kind":"a"}', b"[" * 5000,
                                                  b'{"at":1,"kind":"a","step":true}', b'{"at":1,"kind":"a","step":-1}', b'{"at":1,"kind":2}']))  # fmt: skip
def test_other_bytes_are_no_line(data):
    found = decode_journal_line(data)
    assert found is None or encode_journal_line(found)
