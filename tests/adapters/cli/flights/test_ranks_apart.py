"""Which rank two runs of several ranks part on."""

from trainfold.adapters.cli.flights.replay_run import first_of_ranks
from trainfold.core.flight.causes.known_steps import only_rank
from trainfold.core.flight.flight import flight_of
from trainfold.core.flight.step_record import StepRecord, float_bits_of


def test_of_ranks_with_another_norm_the_one_with_another_loss_is_shown_and_not_named():
    """A bit of its memory flips: the norm is of all ranks, and the losses that a loop records are not reduced. A rank that reads what another one broke looks the same."""

    def of(losses, norm):
        return {
            rank: flight_of([StepRecord(1, loss=float_bits_of(loss), norm=float_bits_of(norm))])
            for rank, loss in enumerate(losses)
        }

    for a, b, rank in (((1.0, 2.0), (1.0, 2.5), 1), ((1.0, 2.0), (1.5, 2.0), 0), ((1.0, 2.0), (1.5, 2.5), 0), ((1.0, 2.0), (1.0, 2.0), 0)):  # fmt: skip
        one, other = of(a, 3.0), of(b, 4.0)
        shown = first_of_ranks(one, other, after=0)
        assert shown[0] == rank, (a, b)
        assert only_rank((one, other), *shown) is None
