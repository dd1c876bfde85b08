"""Hypothesis strategies, laws and contracts, for this project's tests and for users' own."""
