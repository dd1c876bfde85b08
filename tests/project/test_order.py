"""The files of tests that take the longest are started first, so that no process is busy alone at the end."""

from itertools import groupby, pairwise


def test_files_are_in_order_of_what_they_cost_and_none_is_in_two_pieces(request):
    files = [(path, list(items)) for path, items in groupby(request.session.items, key=lambda item: item.path)]
    assert len(files) == len({path for path, _ in files})
    cost = [0.05 * len(items) + sum(m.args[0] for i in items for m in i.iter_markers("slow")) for _, items in files]
    assert all(one >= other - 1e-6 for one, other in pairwise(cost))


def test_xdist_keeps_that_order(pytestconfig):
    assert not getattr(pytestconfig.option, "loadscopereorder", False)
