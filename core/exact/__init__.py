"""Exact sums of floating-point numbers. May import the ground floor."""
