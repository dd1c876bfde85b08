"""Which rank two runs of several ranks part on."""

from trainfold.adapters.cli.flights.replay_run import first_of_ranks
from trainfold.core.flight.causes.known_steps import only_rank
from trainfold.core.flight.flight import flight_of
from trainfold.core.flight.step_record import StepRecord, float_bits_of


def test_a_rank_whose_own_loss_alone_differs_is_named_where_all_have_another_norm():
    """A bit of its memory flips: DDP's gradients are of all ranks, and with them the norm; the losses that a loop records are not reduced."""

    def of(losses, norm):
        return {
            rank: flight_of([StepRecord(1, loss=loss and float_bits_of(loss), norm=float_bits_of(norm))])
            for rank, loss in enumerate(losses)
        }

    for a, b, rank in (
        ((1.0, 2.0), (1.0, 2.5), 1),
        ((1.0, 2.0, 3.0), (1.5, 2.0, 3.0), 0),
        ((1.0, 2.0), (1.5, 2.5), None),  # reduced, or both
        ((None, 2.0), (None, 2.5), None),  # who knows
        ((1.0, 2.0), (1.0, 2.0), None),
    ):
        one, other = of(a, 3.0), of(b, 4.0)
        assert only_rank((one, other), *first_of_ranks(one, other, after=0)) == rank, (a, b)
