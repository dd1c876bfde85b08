"""Positions in data: samples, shares of ranks, orders. May import `layout` and the ground floor."""
