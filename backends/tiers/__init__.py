"""Checkpoints in more than one store: copies of them, what is kept in each, and a run in two tiers. May import runs, flight, stores and the ground."""
