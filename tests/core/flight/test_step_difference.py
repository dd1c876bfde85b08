"""The first step in which two flights differ."""

from itertools import pairwise

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.flight.flight import flight_of
from trainfold.core.flight.holes import steps_in_neither, steps_unrecorded
from trainfold.core.flight.step_difference import first_step_apart, step_difference, steps_with_other_batch_digests
from trainfold.core.flight.step_record import StateDigest, StepRecord, float_bits_of

FULL = [
    StepRecord(
        step,
        0,
        step * 4,
        float_bits_of(1 / step),
        float_bits_of(step),
        bytes([step] * 8),
        bytes([step + 9] * 8),
        is_whole=True,
    )
    for step in range(1, 9)
]
OTHER = {
    "loss": float_bits_of(7.5),
    "norm": float_bits_of(70.0),
    "batch": bytes(8),
    "streams": bytes(8),
    "samples": 1,
    "epoch": 5,
}


@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.sampled_from(sorted(OTHER))).filter(lambda each: each != (1, "streams")),
        max_size=4,
    )
)
def test_the_first_changed_step_is_found_with_all_that_was_changed_in_it(changes):
    changed = {record.step: record for record in FULL}
    for step, name in changes:
        changed[step] = attrs.evolve(changed[step], **{name: OTHER[name]})
    found = first_step_apart(flight_of(FULL), flight_of(changed.values()))
    if not changes:
        assert found is None
    else:
        first = min(step for step, _ in changes)
        assert found.step == first
        assert set(found.parts) == {name for step, name in changes if step == first}
        assert {*found.parts, *found.same} == set(OTHER)


@pytest.mark.parametrize("name", ["loss", "norm", "batch", "streams"])
def test_what_only_one_knows_is_no_difference(name):
    unknown = [attrs.evolve(record, **{name: None}) for record in FULL]
    assert first_step_apart(flight_of(FULL), flight_of(unknown)) is None


def test_a_log_that_ends_earlier_or_has_a_hole_is_no_other_run():
    assert first_step_apart(flight_of(FULL), flight_of(FULL[:3])) is None
    assert first_step_apart(flight_of(FULL), flight_of(FULL[3:])) is None
    assert first_step_apart(flight_of(FULL), flight_of([*FULL[:3], *FULL[4:]])) is None
    assert first_step_apart(flight_of(FULL), flight_of([])) is None


def test_another_position_after_a_hole_is_found_in_the_next_step_that_both_have():
    found = first_step_apart(flight_of(FULL), flight_of([*FULL[:3], attrs.evolve(FULL[5], samples=99), *FULL[6:]]))
    assert (found.step, found.parts) == (6, ("samples",))


@given(*[st.sets(st.integers(1, 8), min_size=1)] * 2)
def test_steps_that_only_one_log_has_are_listed(mine, theirs):
    one, other = (flight_of(FULL[step - 1] for step in sorted(steps)) for steps in (mine, theirs))
    last = min(max(mine), max(theirs))
    listed = [step for first, end in steps_unrecorded(one, other) for step in range(first, end + 1)]
    assert listed == [
        step for step in range(max(min(mine), min(theirs)), last + 1) if step not in mine and step in theirs
    ]
    assert first_step_apart(one, other) is None


@given(*[st.sets(st.integers(1, 9), min_size=1)] * 2, st.integers(1, 4))
def test_steps_that_neither_log_has_are_listed(mine, theirs, stride):
    """A record may count several steps: those in between are not missing."""
    listed = [
        step
        for first, end in steps_in_neither(
            *(flight_of(map(StepRecord, (each * stride for each in steps))) for steps in (mine, theirs))
        )
        for step in range(first, end + 1)
    ]
    shared = range(max(min(mine), min(theirs)), min(max(mine), max(theirs)) + 1)
    known = [step for step in shared if step in mine | theirs]
    usual = min((b - a for a, b in pairwise(known)), default=1)
    assert {step for step in listed if step % stride == 0} == {
        step * stride for a, b in pairwise(known) if b - a > usual for step in range(a + 1, b)
    }
    assert usual > 1 or {each for each in shared if each not in known} == {
        step // stride for step in listed if step % stride == 0
    }


def test_the_state_of_a_step_without_a_record_is_compared():
    one, other = (flight_of([*FULL[:3], StateDigest(4, "model", bytes([x] * 16)), *FULL[4:]]) for x in (1, 2))
    found = first_step_apart(one, other)
    assert (found.step, found.parts, found.components) == (4, ("state",), ("model",))


def test_the_components_that_differ_are_named():
    one, other = ([StepRecord(1), *(StateDigest(1, name, bytes([x] * 16)) for name, x in state)]
                  for state in ((("model", 1), ("rng", 2)), (("model", 3), ("rng", 2))))  # fmt: skip
    found = first_step_apart(flight_of(one), flight_of(other))
    assert str(found) == "step 1: the state after it differs in model; the same: samples, epoch"


def test_nans_of_other_bits_are_shown_apart():
    one, other = (flight_of([StepRecord(1, loss=bits)]) for bits in (b"\0\0\0\0\0\0\xf8\x7f", b"\1\0\0\0\0\0\xf8\x7f"))
    assert "0000f87f" in str(first_step_apart(one, other))


def test_streams_of_python_count_only_where_they_come_apart_in_a_step_that_differs():
    """A program that does not use numpy does not seed it: that it is elsewhere says nothing."""
    one = [attrs.evolve(record, host_streams=b"same") for record in FULL]
    other = [attrs.evolve(record, host_streams=b"else") for record in FULL]
    assert first_step_apart(flight_of(one), flight_of(other)) is None
    changed = attrs.evolve(FULL[4], loss=OTHER["loss"], host_streams=b"else")
    assert first_step_apart(flight_of(one), flight_of([*one[:4], changed])).parts == ("loss", "host_streams")
    assert first_step_apart(flight_of(one), flight_of([*other[:4], changed])).parts == ("loss",)
    late = flight_of(
        [*one[:3], other[3], changed]
    )  # a draw after the last use in step 4: step 5 is the first that shows it
    assert first_step_apart(flight_of(one), late).parts == ("loss", "host_streams")


@pytest.mark.parametrize(("whole", "parts", "same"), [
    ((True, True), {"batch"}, {"batch"}),
    ((False, False), {"batch"}, {"batch as far as samples of it show"}),
    ((True, False), set(), set()),
])  # fmt: skip
def test_digests_of_batches_that_cover_other_bytes_are_not_compared(whole, parts, same):
    """One that covers samples shows another batch, and not the same one; a log of an older version has such ones."""
    records = [StepRecord(1, loss=bytes(8), batch=bytes(8), is_whole=each) for each in whole]
    another = attrs.evolve(records[1], batch=b"another!")
    found = step_difference(flight_of(records[:1]), flight_of([another]), 1)
    assert (set() if found is None else {*found.parts} - {"samples"}) == parts
    unlike = attrs.evolve(records[1], loss=float_bits_of(2.0))
    found = step_difference(flight_of(records[:1]), flight_of([unlike]), 1)
    assert {each for each in found.same if each.startswith("batch")} == same
    assert steps_with_other_batch_digests(flight_of(records[:1]), flight_of(records[1:])) == [1] * (
        whole[0] != whole[1]
    )


@pytest.mark.parametrize("known", [True, False])
def test_streams_that_began_elsewhere_are_a_difference_only_if_no_result_is_known_to_be_the_same(known):
    """A program that was not seeded, and that draws nothing."""
    results = {} if known else {"loss": None, "norm": None}
    one = [attrs.evolve(record, **results) for record in FULL]
    other = [attrs.evolve(record, streams=bytes(8)) for record in one]
    found = first_step_apart(flight_of(one), flight_of(other))
    assert (found and found.parts) == (None if known else ("streams",))
    other[4] = attrs.evolve(other[4], batch=bytes(8))
    found = first_step_apart(flight_of(one), flight_of(other))
    assert (found.step, found.parts) == (5, ("batch",) if known else ("batch", "streams"))


def test_streams_that_come_apart_are_a_difference():
    """The losses of that step do not show it yet."""
    other = [*FULL[:3], *(attrs.evolve(record, streams=bytes(8)) for record in FULL[3:])]
    found = first_step_apart(flight_of(FULL), flight_of(other))
    assert (found.step, found.parts) == (4, ("streams",))
