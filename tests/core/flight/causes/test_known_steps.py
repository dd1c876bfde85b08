"""What the logs of several ranks show of where two runs part."""

from trainfold.core.flight.causes.known_steps import only_rank
from trainfold.core.flight.flight import flight_of
from trainfold.core.flight.step_difference import step_difference
from trainfold.core.flight.step_record import StepRecord, float_bits_of


def log(loss):
    return flight_of([StepRecord(1, loss=float_bits_of(loss))])


def test_a_rank_is_named_only_if_the_logs_of_all_others_show_that_they_do_not_differ():
    """That of rank 1 was the only one that both runs had, and so it was the one that differed."""
    one, other = {0: log(1.0), 1: log(1.0)}, {0: log(1.0), 1: log(2.0)}
    first = step_difference(one[1], other[1], 1)
    assert only_rank((one, other), 1, first) == 1
    assert only_rank((one, {1: other[1]}), 1, first) is None
