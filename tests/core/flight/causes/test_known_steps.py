"""What the logs of several ranks show of where two runs part."""

import pytest

from trainfold.core.flight.causes.evidence import Evidence
from trainfold.core.flight.causes.known_steps import of_steps, only_rank
from trainfold.core.flight.flight import flight_of
from trainfold.core.flight.step_difference import first_step_apart, step_difference
from trainfold.core.flight.step_record import StateDigest, StepRecord, float_bits_of


def log(loss):
    return flight_of([StepRecord(1, loss=float_bits_of(loss))])


def test_a_rank_is_named_only_if_the_logs_of_all_others_show_that_they_do_not_differ():
    """That of rank 1 was the only one that both runs had, and so it was the one that differed."""
    one, other = {0: log(1.0), 1: log(1.0)}, {0: log(1.0), 1: log(2.0)}
    first = step_difference(one[1], other[1], 1)
    assert only_rank((one, other), 1, first) == 1
    assert only_rank((one, {1: other[1]}), 1, first) is None


@pytest.mark.parametrize(
    "lost", [[], [StepRecord(1)], [StateDigest(1, "model", bytes(16))], [StepRecord(1, batch=bytes(8), is_whole=True)]]
)
def test_no_rank_is_named_where_another_log_lacks_what_differs(lost):
    """The log of rank 0 had no record of the step, by damage or without its loss, and rank 1 was named, as if rank 0 had done the same."""
    one, other = {0: flight_of(lost), 1: log(1.0)}, {0: log(1.0), 1: log(2.0)}
    assert only_rank((one, other), 1, step_difference(one[1], other[1], 1)) is None
    states = [
        flight_of([StepRecord(1), *(StateDigest(1, "model", bytes([at] * 16)) for at in known)])
        for known in ([], [0], [1])
    ]
    assert (
        only_rank(({0: states[0], 1: states[1]}, {0: states[1], 1: states[2]}), 1, step_difference(*states[1:], 1))
        is None
    )
    assert (
        only_rank(({0: states[1], 1: states[1]}, {0: states[1], 1: states[2]}), 1, step_difference(*states[1:], 1)) == 1
    )


def test_states_count_where_the_records_of_their_steps_are_lost():
    """They part in step 2 at the latest, and "in step 3" was certain: both have the state before it, and it was taken for the same."""
    one, other = (
        flight_of([StateDigest(2, "model", bytes([at] * 16)), StepRecord(3, loss=float_bits_of(at))]) for at in (0, 1)
    )
    assert first_step_apart(one, other).step == 2
    later = Evidence(difference=step_difference(one, other, 3))
    assert not of_steps({0: one}, {0: other}, later).is_settled
