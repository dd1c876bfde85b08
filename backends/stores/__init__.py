"""Stores of checkpoints, behind one protocol. May import the ground floor of `backends`, and nothing of `ranks`."""
