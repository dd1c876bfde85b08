"""Digests in text form: a look at many says what a look at each says."""

from hypothesis import example, given
from hypothesis import strategies as st

from trainfold.core.digest import digest_of
from trainfold.core.errors import CheckpointHostile
from trainfold.core.format.strict_json import are_digests, digest_text

ONE = digest_of(b"x")
VALUES = st.one_of(
    st.just(ONE), st.sampled_from([ONE[:-1], ONE + "0", ONE.upper(), ONE + "\n", "", None, 7, [ONE]]), st.text(max_size=3)
)  # fmt: skip


@given(st.lists(VALUES, min_size=1, max_size=4))
@example([ONE + "0", ONE[:-1]])
@example([ONE[:-1], "x" + ONE])
def test_many_are_digests_where_each_is(values):
    """Rows of an index are checked column by column, so that one bad text among 100,000 is refused as it would be alone."""
    try:
        each = [digest_text(value, "m") for value in values] == values
    except CheckpointHostile:
        each = False
    assert are_digests(values) == each
