"""Tallies, their sum over ranks, and results: pure aggregation. May import `metrics`, `exact` and what lies below them."""
