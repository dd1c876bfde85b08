"""Formats of checkpoints, one room each. May import `stores` and the ground floor of `backends`, and not `ranks`."""
