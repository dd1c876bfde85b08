"""Which checkpoint is the best: decisions as values. May import `format` and what lies below it.

The best and the N best are two rules and no special cases of one: with a ``min_delta`` the winner depends on the order of the results, and
the N best do not. A second result of the best's own step may win; the N best count each step once.
"""
