"""The record of where weights came from."""

import json

from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.weights.several.lineage import lineage_of, lineage_source

NAMES = st.builds(".".join, st.lists(st.sampled_from(("layers", "0", "1", "12", "w", "w1")), min_size=1, max_size=4))


@given(st.dictionaries(NAMES, st.sampled_from(("hub", "run", "script"))))
def test_the_record_says_of_each_tensor_where_it_came_from(sources):
    """L02, V16: also after a checkpoint was written and read."""
    record = json.loads(json.dumps(lineage_of(sources)))
    assert {name: lineage_source(record, name) for name in sources} == sources


def test_the_record_of_a_large_model_is_as_short_as_that_of_a_small_one():
    """L02: a hundred thousand names have no place in each manifest."""
    large = {f"layers.{i}.experts.{e}.{part}": "hub" for i in range(40) for e in range(64) for part in ("w1", "w2")}
    assert lineage_of(large | {"head": "script"}) == [["hub", ["layers.*.experts.*.w1", "layers.*.experts.*.w2"]], ["script", ["head"]]]  # fmt: skip


def test_what_is_no_record_knows_nothing():
    for record in (None, 3, [3], [["hub"]], [[1, ["w"]]], [["hub", "w"]]):
        assert lineage_source(record, "w") is None
