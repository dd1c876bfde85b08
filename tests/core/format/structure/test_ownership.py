"""Positions of ranks are compared without what is a rank's own."""

from trainfold.core.format.structure.ownership import are_alike_but_for_shares


def position(share, *, epoch=1, moved=False, count=0):
    fields = {"epoch": epoch, "batches": 0, "draws": {"dict": {"count": count, "moved": moved}}, "share": share}
    return {"node": "trainfold.Opaque", "fields": {"value": {"dict": {**fields, "shares": 2}}}}


def test_a_rank_whose_streams_moved_does_not_make_the_positions_differ():
    """G06: a rank that logs a sample, or a thread beside it, draws; between epochs that keeps no other number of ranks out."""
    assert are_alike_but_for_shares([position(0), position(1, moved=True)])


def test_another_epoch_or_other_draws_do():
    """G05: a position of one rank is given to others only where it says the same."""
    assert not are_alike_but_for_shares([position(0), position(1, epoch=2)])
    assert not are_alike_but_for_shares([position(0), position(1, count=3)])
    assert not are_alike_but_for_shares([{}, {}])
