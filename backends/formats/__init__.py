"""Formats of checkpoints, one room each. May import `stores`."""
