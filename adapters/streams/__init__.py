"""Saves and restores the random streams and generators of a mutable loop. May import `components`."""
